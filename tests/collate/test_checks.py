"""Checks: what Hugging Face models let through in silence is refused, sample by sample.

Each case takes a good sample, the processor's own output, and spoils one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chats import FAMILIES, picture, processor_of, tokenized
from torch.nn.functional import pad

from vlmpack.collate.encode import Encoder
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.images import ImageLimits
from vlmpack.errors import SampleError

HOLE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT = f"<|im_start|>user\n{HOLE}{HOLE}Total?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n5<|im_end|>"
FAMILY = "qwen3_vl"
PROCESSOR = processor_of(FAMILY)
METADATA = read_processor(PROCESSOR)
ENCODER = Encoder(processor=PROCESSOR, metadata=METADATA, limits=ImageLimits(), train_on="assistant")
VIDEO = {"pixel_values_videos": torch.zeros(16, 1536), "video_grid_thw": [[1, 4, 4]]}
Sample = dict[str, Any]


def good(family: str = FAMILY) -> Sample:
    """Two images of 4 and 6 tokens."""
    side = 2 * processor_of(family).image_processor.patch_size
    return tokenized(family, TEXT, picture(2 * side, 2 * side), picture(3 * side, 2 * side))


def answer(**more: Any) -> Sample:
    return {**tokenized(FAMILY, ANSWER), **more}


def refusal(feature: Sample) -> tuple[str, str]:
    with pytest.raises(SampleError) as caught:
        ENCODER.encode(feature)
    return caught.value.reason, str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_sample_passes(family: str) -> None:
    metadata = read_processor(processor_of(family))
    encoder = Encoder(processor=processor_of(family), metadata=metadata, limits=ImageLimits(), train_on="assistant")
    sample = encoder.encode(good(family))
    assert [stop - start for start, stop in sample.media_runs] == [4, 6]
    assert sample.num_targets == 2


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Sample], Sample]:
    return lambda sample: {**sample, name: change(sample[name])}


def without(*names: str, **more: Any) -> Callable[[Sample], Sample]:
    return lambda sample: {name: value for name, value in sample.items() if name not in names} | more


def put(at: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[at] = value
        return tensor

    return change


def teacher(ids: Callable[[Any], Any]) -> Callable[[Sample], Sample]:
    def add(sample: Sample) -> Sample:
        count = sample["input_ids"].numel()
        return {**sample, "topk_ids": ids([[7, 9]] * count), "topk_logprobs": [[-0.5, -1.5]] * count}

    return add


def touching(sample: Sample) -> Sample:
    """Without the tokens between the two images."""
    ids = sample["input_ids"]
    between = int((ids == METADATA.vision_end_id).nonzero()[0, 0])
    ids = torch.cat([ids[:between], ids[between + 2 :]])
    return {"input_ids": ids, **{name: sample[name] for name in ("pixel_values", "image_grid_thw")}}


def cut_inside(sample: Sample) -> Sample:
    last = int((sample["input_ids"] == METADATA.image_token_id).nonzero()[-1]) - 1
    ids = torch.cat([sample["input_ids"][:last], torch.tensor(PROCESSOR.tokenizer(ANSWER)["input_ids"])])
    return without("attention_mask", "mm_token_type_ids", input_ids=ids)(sample)


def labelled(label: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Sample], Sample]:
    return lambda sample: {**sample, "labels": label(sample["input_ids"].clone())}


def on_media(ids: torch.Tensor) -> torch.Tensor:
    """As TRL's vision collator labels image placeholders."""
    return torch.where(ids == METADATA.image_token_id, ids, -100)


SIZE = METADATA.vocab_size
SPOILED: dict[str, tuple[Callable[[Sample], Sample], str, str]] = {
    # 6 + 4 placeholders against images of 4 and 6 tokens: a finite loss, with features of the one in the other
    "the right total, but other runs": (
        changed("image_grid_thw", lambda grids: grids.flip(0)),
        "image_token_mismatch",
        "its runs of image tokens are [4, 6] long but its grids need [6, 4]",
    ),
    "images that touch": (touching, "image_token_mismatch", "are [10] long but its grids need [4, 6]"),
    "cut inside an image": (cut_inside, "image_token_mismatch", "are [4, 4] long but its grids need [4, 6]"),
    "tokens without pixels": (
        without("pixel_values", "image_grid_thw"),
        "image_tokens_without_pixels",
        "it has 10 image tokens but no image pixels; add pixels and grid, or remove the tokens",
    ),
    "pixels without tokens": (
        lambda _: {**tokenized(FAMILY, "<|image_pad|>", picture()), **answer()},
        "pixels_without_image_tokens",
        "it has 1 image(s) but no image token",
    ),
    "pixels of a video without its tokens": (lambda _: answer(**VIDEO), "pixels_without_video_tokens", "1 video(s)"),
    "a grid without pixels": (without("pixel_values"), "pixel_shape", "but no pixel_values; both come from one call"),
    "pixels without a grid": (without("image_grid_thw"), "pixel_shape", "but no image_grid_thw; both come"),
    "pixels that do not fill the grids": (
        changed("pixel_values", lambda pixels: pixels[:-1]),
        "pixel_shape",
        "pixel_values has shape [39, 1536] but image_grid_thw [[1, 4, 4], [1, 4, 6]] needs 40 rows",
    ),
    "pixels of another patch size": (
        changed("pixel_values", lambda pixels: pixels[:, :1176]),
        "pixel_shape",
        "the grid 1 x 4 x 4 needs pixels of shape [16, 1536], got [16, 1176]; take both from one call",
    ),
    "a grid that cannot be merged": (
        changed("image_grid_thw", lambda _: torch.tensor([[1, 4, 4], [1, 3, 8]])),
        "bad_grid",
        "rows and columns of the grid 1 x 3 x 8 must be multiples of 2, above 0",
    ),
    "an empty grid": (changed("image_grid_thw", lambda _: torch.tensor([[1, 4, 10], [0, 4, 4]])), "bad_grid", "0 x 4"),
    "pixels of whole numbers": (
        changed("pixel_values", lambda pixels: pixels.to(torch.uint8)),
        "pixel_dtype",
        "pixels are torch.uint8; give the processor's normalized floats",
    ),
    **{
        f"the id {bad}": (changed("input_ids", put(0, bad)), "id_out_of_range", f"id {bad}, but ids run from 0 to 8")
        for bad in (-1, -200, SIZE, 10**9)
    },
    **{
        f"the label {bad}": (labelled(put(-1, bad)), "label_out_of_range", f"it holds the label {bad}; labels are -1")
        for bad in (-1, -99, SIZE)
    },
    "no labels": (labelled(lambda ids: ids * 0 - 100), "no_targets", "tokens is trained on; it needs an assistant"),
    "labels on media alone": (labelled(on_media), "no_targets", "tokens is trained on"),
    "a label on the first token alone": (lambda _: {"input_ids": [5, 6], "labels": [5, -100]}, "no_targets", "2 tok"),
    "no answer": (lambda _: {"messages": [{"role": "user", "content": "hi"}]}, "no_targets", "tokens is trained on"),
    "no ids": (lambda _: {"input_ids": []}, "empty", "it has no tokens at all"),
    "no ids in a batch": (lambda _: {"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "empty", "no tokens"),
    "a mask with a hole": (changed("attention_mask", put(3, 0)), "bad_mask", "attention_mask has a hole at column 3"),
    "a shorter mask": (changed("attention_mask", lambda mask: mask[1:]), "bad_shape", "attention_mask covers"),
    "a mask of zeros": (changed("attention_mask", lambda mask: mask * 0), "empty", "no tokens"),
    "other types": (changed("mm_token_type_ids", lambda types: types * 0), "token_type_mismatch", "has 0 for token"),
    "types of 1": (
        changed("mm_token_type_ids", torch.ones_like),
        "token_type_mismatch",
        "is of type 0 (0 text, 1 image, 2 video, 3 audio); it is 1 everywhere, as an attention_mask is",
    ),
    "more types": (changed("mm_token_type_ids", lambda types: pad(types, (0, 1))), "bad_shape", "mm_token_type_ids c"),
    "shifted labels": (
        lambda _: {"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, -100]},
        "labels_shifted",
        "its labels are shifted already: that of token 1 is 7, the id of token 2; give labels as transformers",
    ),
    "positions": (without(position_ids=torch.zeros(3, 1, 9)), "unexpected_positions", "remove the column"),
    "two samples": (lambda _: answer(input_ids=[[1, 2], [3, 4]]), "bad_shape", "input_ids has shape [2, 2]"),
    "ragged ids": (lambda _: answer(input_ids=[[1, 2], [3]]), "bad_shape", "input_ids is not an array"),
    "ids of floats": (lambda _: answer(input_ids=[1.0, 2.0]), "bad_dtype", "whole numbers"),
    "ids of texts": (lambda _: answer(input_ids=["a"]), "bad_dtype", "numbers"),
    "ids of booleans": (changed("input_ids", lambda ids: ids > 0), "bad_dtype", "whole numbers"),
    "labels of booleans": (labelled(lambda ids: ids > 0), "bad_dtype", "whole numbers"),
    "one label": (lambda _: answer(labels=5), "bad_shape", "labels has shape []"),
    "seconds for two videos": (
        lambda _: answer(**VIDEO, second_per_grid_ts=[1.0, 2.0]),
        "bad_shape",
        "second_per_grid_ts has 2 entries for 1 videos",
    ),
    **{
        f"the column {name}": (without(**{name: [1]}), "bad_row", f"input_ids and {name}: nothing reads that; labels")
        for name in ("shift_labels", "assistant_mask", "loss_masks")
    },
    **{
        f"{name} beside ids": (lambda _, name=name: answer(**{name: [picture()]}), "bad_row", f"and {name}, but no pix")
        for name in ("image", "images", "videos")
    },
    **{
        f"{value} in {name}": (
            lambda sample, name=name, value=value: {**sample, name: put(3, value)(sample["input_ids"] * 0 + 1)},
            "bad_mask",
            f"{name} holds other values than 0 and 1; weights belong in loss_weights",
        )
        for name in ("completion_mask", "assistant_masks", "loss_mask")
        for value in (2, -1)
    },
    "weights of other tokens": (without(loss_weights=[1.0]), "bad_shape", "loss_weights covers 1 tokens but input_ids"),
    "a teacher's ids alone": (without(topk_ids=[[1]]), "bad_row", "it has topk_ids alone; a teacher's entries"),
    "a teacher's entries for other tokens": (
        teacher(ids=lambda x: x[1:]),
        "bad_shape",
        "topk_ids covers 28 tokens, but the sample has 29",
    ),
    "no entries for a target": (teacher(ids=lambda x: [*x[:-2], None, x[-1]]), "bad_shape", "0 entries for token 27"),
    "fewer ids than log-probabilities": (teacher(ids=lambda x: [y[:1] for y in x]), "bad_shape", "unequal numbers"),
    "one id for each token": (teacher(ids=lambda x: [0] * len(x)), "bad_shape", "topk_ids holds no list for each tok"),
    "a teacher without targets": (
        lambda sample: teacher(ids=list)({**sample, "labels": sample["input_ids"] * 0 - 100}),
        "no_targets",
        "none of its 29 tokens is trained on",
    ),
    "ids in lists of lists": (teacher(ids=lambda x: [[[0]]] * len(x)), "bad_shape", "topk_ids is [2, 1, 1]"),
    "an id twice": (teacher(ids=lambda x: [[7, 7]] * len(x)), "bad_row", "or one twice; token 26 has [7, 7]"),
    "an id below 0": (teacher(ids=lambda x: [[7, -1]] * len(x)), "bad_row", "or one twice; token 26 has [7, -1]"),
    "probabilities": (
        lambda sample: {**teacher(ids=list)(sample), "topk_logprobs": [[0.6, 0.4]] * sample["input_ids"].numel()},
        "bad_row",
        "add up to nothing, or to more than 1: give log-probabilities; token 26 has [0.6",
    ),
    "floats for ids": (teacher(ids=lambda x: [[0.5, 1]] * len(x)), "bad_dtype", "topk_ids holds float64"),
    "a weight below 0": (
        lambda sample: {**sample, "loss_weights": put(3, -1)(sample["input_ids"] * 0 + 1)},
        "bad_mask",
        "loss_weights holds -1.0; weights are numbers from 0",
    ),
}


@pytest.mark.parametrize(("spoil", "reason", "message"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_sample_is_refused(spoil: Callable[[Sample], Sample], reason: str, message: str) -> None:
    seen, said = refusal(spoil(good()))
    assert seen == reason
    assert message in said


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_labels_of_more_tokens_than_there_are_ids_are_refused(name: str, is_padded: bool) -> None:
    """Cut to the length of the ids, they would shift every target by one; transformers raises too."""
    ids = answer()["input_ids"]
    count = len(ids)
    mask = [1] * count if not is_padded else [*[1] * (count - 1), 0]
    feature = {"input_ids": ids, "attention_mask": mask, name: [1] * (count + 1)}
    assert refusal(feature) == ("bad_shape", f"{name} covers {count + 1} tokens but input_ids has {count}")


def test_padding_on_either_side_is_cut_off_with_labels_and_types() -> None:
    plain = good()
    alone = ENCODER.encode(plain)
    for sides in ((3, 0), (0, 2), (1, 4)):
        names = ("input_ids", "attention_mask", "mm_token_type_ids")
        feature = {**plain, **{name: pad(plain[name], sides) for name in names}}
        sample = ENCODER.encode({**feature, "labels": pad(torch.from_numpy(alone.labels), sides, value=-100)})
        assert sample.input_ids.tolist() == alone.input_ids.tolist()
        assert sample.labels.tolist() == alone.labels.tolist()
        assert sample.types.tolist() == alone.types.tolist()


@pytest.mark.parametrize("has_labels", [False, True])
def test_the_masks_of_a_tokenized_sample_say_what_is_trained_on(has_labels: bool) -> None:
    turn = "<|im_start|>assistant\n{}<|im_end|>"
    plain = tokenized(FAMILY, f"{turn.format(1)}\n<|im_start|>user\n?<|im_end|>\n{turn.format(2)}")
    count = len(plain["input_ids"])
    assert sum(ENCODER.encode(plain).labels != -100) == 4  # both turns, where nothing is told
    given = {"labels": plain["input_ids"]} if has_labels else {}
    for name in ("completion_mask", "assistant_masks", "loss_mask"):
        mask = [0] * (count - 2) + [1, 1]
        labels = ENCODER.encode({**plain, **given, name: mask}).labels
        assert labels.tolist() == [-100] * (count - 2) + plain["input_ids"].tolist()[-2:]
        assert ENCODER.encode({**plain, name: torch.tensor(mask, dtype=torch.bool)}).num_targets == 2
    weighed = ENCODER.encode({**plain, **given, "loss_weights": [0.0] * (count - 2) + [1, 0.5]})
    assert weighed.labels.tolist() == labels.tolist()
    assert weighed.weights[-2:].tolist() == [1, 0.5]


def test_a_teacher_has_entries_for_the_targets() -> None:
    plain = answer(completion_mask=[0, 0, 0, 1, 1], attention_mask=[0, 1, 1, 1, 1])
    entries = {"topk_ids": [None, [], None, [3, 5], [2, 8]], "topk_logprobs": [None, None, [], [-1, -2], [-0.5, -3]]}
    taught = ENCODER.encode({**plain, **entries}).teacher
    assert taught["topk_ids"].tolist() == [[0, 0], [0, 0], [3, 5], [2, 8]]
    assert taught["topk_logprobs"].tolist() == [[0, 0], [0, 0], [-1, -2], [-0.5, -3]]
    logprobs = torch.tensor([[-1.0, -2.0]] * 5, dtype=torch.bfloat16, requires_grad=True)
    tensors = {"topk_ids": torch.tensor([[3, 5]] * 5), "topk_logprobs": logprobs}
    assert ENCODER.encode({**plain, **tensors}).teacher["topk_logprobs"].tolist()[2:] == [[-1, -2]] * 2


def test_lists_arrays_and_batches_of_one_are_taken_as_well() -> None:
    plain = good()
    alone = ENCODER.encode(plain)
    lists = {name: value.tolist() for name, value in plain.items()}
    lists["pixel_values"] = plain["pixel_values"].numpy()
    batch = {n: v[None] if n not in ("pixel_values", "image_grid_thw") else v for n, v in plain.items()}
    for feature in (lists, batch, {**plain, "images": [picture()], "videos": []}):
        sample = ENCODER.encode(feature)
        assert sample.input_ids.tolist() == alone.input_ids.tolist()
        assert [image.grid for image in sample.images] == [(1, 4, 4), (1, 4, 6)]
        assert torch.equal(sample.images[1].pixels, alone.images[1].pixels)


def test_empty_lists_of_patches_are_no_patches() -> None:
    empty = {"pixel_values": [], "image_grid_thw": [], "pixel_values_videos": [], "video_grid_thw": []}
    assert ENCODER.encode(answer(**empty)).images == ()
    assert refusal(answer(**empty, images=["a.png"]))[0] == "bad_row"
