"""Checks: what Hugging Face models let through in silence is refused, sample by sample.

Each test takes a good sample, the processor's own output, and spoils one thing.
"""

import pytest
import torch
from chats import FAMILIES, picture, processor_of, tokenised

from vlmpack.collate.encode import Encoder
from vlmpack.collate.encoded import run_lengths
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.images import ImageLimits
from vlmpack.errors import Refusal

HOLE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT = f"<|im_start|>user\n{HOLE}{HOLE}Total?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
FAMILY = "qwen3_vl"
PROCESSOR = processor_of(FAMILY)
METADATA = read_processor(PROCESSOR)
ENCODER = Encoder(processor=PROCESSOR, metadata=METADATA, limits=ImageLimits(), train_on="assistant")
IMAGE = METADATA.image_token_id


def good(family=FAMILY):
    """Two images of 4 and 6 tokens."""
    side = 2 * processor_of(family).image_processor.patch_size
    return tokenised(family, TEXT, picture(2 * side, 2 * side), picture(3 * side, 2 * side))


def refusal(feature):
    with pytest.raises(Refusal) as caught:
        ENCODER.encode(feature)
    return caught.value.reason, str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_sample_passes(family):
    metadata = read_processor(processor_of(family))
    encoder = Encoder(processor=processor_of(family), metadata=metadata, limits=ImageLimits(), train_on="assistant")
    sample = encoder.encode(good(family))
    assert run_lengths(sample.input_ids, metadata.image_token_id) == [4, 6]
    assert sample.num_targets == 2


def test_right_total_but_wrong_run_lengths():
    # 6 + 4 placeholders against images of 4 and 6 tokens: a finite loss, with features of the one in the other.
    feature = good()
    feature["image_grid_thw"] = feature["image_grid_thw"].flip(0)
    reason, message = refusal(feature)
    assert reason == "image_token_mismatch"
    assert "its runs of image tokens are [4, 6] long but its grids need [6, 4] (first difference at run 0)" in message
    assert "do not truncate inside an image" in message


def test_images_that_touch_are_no_longer_two():
    feature = good()
    between = (feature["input_ids"] == METADATA.vision_end_id).nonzero()[0, 0]
    keep = torch.ones(len(feature["input_ids"]), dtype=torch.bool)
    keep[between : between + 2] = False
    feature = {
        "input_ids": feature["input_ids"][keep],
        "pixel_values": feature["pixel_values"],
        "image_grid_thw": feature["image_grid_thw"],
    }
    assert refusal(feature)[1].startswith("its runs of image tokens are [10] long but its grids need [4, 6]")


def test_cut_inside_an_image():
    feature = good()
    cut = int((feature["input_ids"] == IMAGE).nonzero()[-1]) - 1
    answer = torch.tensor(PROCESSOR.tokenizer("<|im_start|>assistant\n5<|im_end|>")["input_ids"])
    feature["input_ids"] = torch.cat([feature["input_ids"][:cut], answer])
    del feature["attention_mask"], feature["mm_token_type_ids"]
    assert "are [4, 4] long but its grids need [4, 6] (first difference at run 1)" in refusal(feature)[1]


def test_image_tokens_without_pixels():
    feature = good()
    del feature["pixel_values"], feature["image_grid_thw"]
    reason, message = refusal(feature)
    assert reason == "image_tokens_without_pixels"
    assert "it has 10 image tokens but no image pixels; add pixels and grid, or remove the tokens" in message


def test_pixels_without_image_tokens():
    image = tokenised(FAMILY, "<|image_pad|>", picture())
    feature = {**image, **tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>")}
    reason, message = refusal(feature)
    assert reason == "pixels_without_image_tokens"
    assert "it has the pixels of 1 image(s) but no image token; is the placeholder missing?" in message


@pytest.mark.parametrize("missing", ["pixel_values", "image_grid_thw"])
def test_pixels_without_grid_and_grid_without_pixels(missing):
    feature = good()
    del feature[missing]
    reason, message = refusal(feature)
    assert reason == "pixel_shape"
    assert f"but no {missing}; both come from one call of the processor" in message


def test_pixels_that_do_not_fill_the_grids():
    feature = good()
    feature["pixel_values"] = feature["pixel_values"][:-1]
    reason, message = refusal(feature)
    assert reason == "pixel_shape"
    assert "pixel_values has shape [39, 1536] but image_grid_thw [[1, 4, 4], [1, 4, 6]] needs 40 rows" in message


def test_pixels_of_another_patch_size():
    feature = good()
    feature["pixel_values"] = feature["pixel_values"][:, :1176]
    assert refusal(feature) == (
        "pixel_shape",
        "the grid 1 x 4 x 4 needs pixels of shape [16, 1536], got [16, 1176]; pixels and grid must come from one call "
        "of this processor",
    )


def test_a_grid_that_cannot_be_merged():
    feature = good()
    feature["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 3, 8]])
    reason, message = refusal(feature)
    assert reason == "bad_grid"
    assert "the grid 1 x 3 x 8 (frames, rows, columns of patches) cannot be merged" in message
    assert "positive multiples of 2" in message


def test_an_empty_grid():
    feature = good()
    feature["image_grid_thw"] = torch.tensor([[1, 4, 10], [0, 4, 4]])
    assert refusal(feature)[0] == "bad_grid"


def test_pixels_that_are_whole_numbers():
    feature = good()
    feature["pixel_values"] = feature["pixel_values"].to(torch.uint8)
    reason, message = refusal(feature)
    assert reason == "pixel_dtype"
    assert "pixels are torch.uint8; give the processor's normalised floats" in message


@pytest.mark.parametrize("bad", [-1, -200, METADATA.vocab_size, 10**9])
def test_ids_without_a_row_in_the_embedding(bad):
    feature = good()
    feature["input_ids"][0] = bad
    reason, message = refusal(feature)
    assert reason == "id_out_of_range"
    assert f"it holds the token id {bad}, but ids run from 0 to {METADATA.vocab_size - 1}; tokenise it with" in message


@pytest.mark.parametrize("bad", [-1, -99, METADATA.vocab_size])
def test_labels_that_are_neither_ids_nor_ignored(bad):
    feature = good()
    feature["labels"] = feature["input_ids"].clone()
    feature["labels"][-1] = bad
    reason, message = refusal(feature)
    assert reason == "label_out_of_range"
    assert f"it holds the label {bad}; labels are -100 (ignored) or ids from 0 to {METADATA.vocab_size - 1}" in message


def test_nothing_to_learn():
    feature = good()
    feature["labels"] = torch.full_like(feature["input_ids"], -100)
    reason, message = refusal(feature)
    assert reason == "no_targets"
    assert f"none of its {len(feature['input_ids'])} tokens is learnt (a mean over no targets is NaN)" in message


def test_labels_on_media_alone_are_nothing_to_learn():
    # TRL's vision collator labels image placeholders.
    feature = good()
    ids = feature["input_ids"]
    feature["labels"] = torch.where(ids == IMAGE, ids, -100)
    assert refusal(feature)[0] == "no_targets"


def test_a_label_on_the_first_token_alone_is_nothing_to_learn():
    assert refusal({"input_ids": [5, 6], "labels": [5, -100]})[0] == "no_targets"


def test_a_chat_without_an_answer():
    assert refusal({"messages": [{"role": "user", "content": "hi"}]})[0] == "no_targets"


@pytest.mark.parametrize("feature", [{"input_ids": []}, {"input_ids": torch.zeros(1, 0, dtype=torch.long)}])
def test_no_tokens_at_all(feature):
    assert refusal(feature) == ("empty", "it has no tokens at all; leave it out of the data set")


def test_a_mask_with_a_hole():
    feature = good()
    feature["attention_mask"][3] = 0
    reason, message = refusal(feature)
    assert reason == "bad_mask"
    assert message.startswith("attention_mask has a hole at column 3")


def test_a_mask_of_another_length():
    feature = good()
    feature["attention_mask"] = feature["attention_mask"][1:]
    reason, message = refusal(feature)
    assert reason == "bad_shape"
    n = len(feature["input_ids"])
    assert f"attention_mask covers {n - 1} tokens but input_ids has {n}" in message


def test_a_mask_of_zeros():
    feature = good()
    feature["attention_mask"][:] = 0
    assert refusal(feature)[0] == "empty"


def test_token_types_that_disagree_with_the_ids():
    feature = good()
    feature["mm_token_type_ids"][:] = 0
    reason, message = refusal(feature)
    assert reason == "token_type_mismatch"
    assert "leave the column out, it is made from input_ids" in message


def test_positions_are_not_taken_over_in_silence():
    feature = {**good(), "position_ids": torch.zeros(3, 1, 9)}
    reason, message = refusal(feature)
    assert reason == "unexpected_positions"
    assert "remove the column" in message


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("input_ids", [[1, 2], [3, 4]], "bad_shape"),
        ("input_ids", [[1, 2], [3]], "bad_shape"),
        ("input_ids", [1.0, 2.0], "bad_dtype"),
        ("input_ids", ["a"], "bad_dtype"),
        ("labels", [1, 2, 3], "bad_shape"),
        ("labels", 5, "bad_shape"),
    ],
)
def test_fields_of_the_wrong_shape_or_type(field, value, reason):
    feature = {**tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>"), field: value}
    assert refusal(feature)[0] == reason


def test_padding_on_either_side_is_cut_off_with_labels_and_types():
    plain = good()
    alone = ENCODER.encode(plain)
    for left, right in ((3, 0), (0, 2), (1, 4)):
        pad = {"input_ids": 0, "attention_mask": 0, "mm_token_type_ids": 0}
        feature = {**plain, **{n: torch.nn.functional.pad(plain[n], (left, right), value=v) for n, v in pad.items()}}
        feature["labels"] = torch.nn.functional.pad(torch.from_numpy(alone.labels), (left, right), value=-100)
        sample = ENCODER.encode(feature)
        assert sample.input_ids.tolist() == alone.input_ids.tolist()
        assert sample.labels.tolist() == alone.labels.tolist()
        assert sample.types.tolist() == alone.types.tolist()


@pytest.mark.parametrize("labelled", [False, True])
def test_the_masks_of_a_tokenised_sample_say_what_is_learnt(labelled):
    text = "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    plain = tokenised(FAMILY, text)
    count = len(plain["input_ids"])
    assert sum(ENCODER.encode(plain).labels != -100) == 4  # both turns, where nothing is told
    given = {"labels": plain["input_ids"]} if labelled else {}
    for name in ("completion_mask", "assistant_masks", "loss_mask"):
        mask = [0] * (count - 2) + [1, 1]
        labels = ENCODER.encode({**plain, **given, name: mask}).labels
        assert labels.tolist() == [-100] * (count - 2) + plain["input_ids"].tolist()[-2:]
    assert refusal({**plain, "completion_mask": [1]}) == (
        "bad_shape",
        f"completion_mask covers 1 tokens but input_ids has {count}; labels and masks go unshifted",
    )


@pytest.mark.parametrize("value", [2, -1])
@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_a_mask_of_what_is_learnt_holds_zeros_and_ones(name, value):
    plain = good()
    mask = torch.ones(len(plain["input_ids"]), dtype=torch.int64)
    assert ENCODER.encode({**plain, name: mask.bool()}).labels is not None
    mask[3] = value
    assert refusal({**plain, name: mask}) == (
        "bad_mask",
        f"{name} holds other values than 0 and 1; weights of targets are no mask",
    )


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_ids_and_labels_are_no_masks(name):
    plain = good()
    assert refusal({**plain, name: torch.ones(len(plain["input_ids"]), dtype=torch.bool)})[0] == "bad_dtype"


@pytest.mark.parametrize("name", ["shift_labels", "assistant_mask", "loss_masks"])
def test_a_column_that_means_to_say_what_is_learnt_and_is_not_read_is_refused(name):
    reason, message = refusal({**good(), name: [1]})
    assert reason == "bad_row"
    assert message.startswith(f"it has {name}, which nothing reads; labels and masks")


@pytest.mark.parametrize(("name", "kind"), [("image", "image"), ("images", "image"), ("videos", "video")])
def test_media_beside_ids_that_were_made_without_them_are_refused(name, kind):
    text = tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>\n")
    reason, message = refusal({**text, name: [picture()]})
    assert reason == "bad_row"
    assert f"it has input_ids and {name}, but no pixel_values" in message
    assert f"the {kind} would be lost" in message
    assert ENCODER.encode({**good(), "images": [picture()], "videos": []}).images  # made of these


def test_lists_arrays_and_batches_of_one_are_taken_as_well():
    plain = good()
    alone = ENCODER.encode(plain)
    lists = {name: value.tolist() for name, value in plain.items()}
    lists["pixel_values"] = plain["pixel_values"].numpy()
    batch = {n: v[None] if n not in ("pixel_values", "image_grid_thw") else v for n, v in plain.items()}
    for feature in (lists, batch):
        sample = ENCODER.encode(feature)
        assert sample.input_ids.tolist() == alone.input_ids.tolist()
        assert [image.grid for image in sample.images] == [(1, 4, 4), (1, 4, 6)]
        assert torch.equal(sample.images[1].pixels, alone.images[1].pixels)


def test_seconds_must_be_one_a_video():
    feature = {
        **tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>"),
        "pixel_values_videos": torch.zeros(16, 1536),
        "video_grid_thw": [[1, 4, 4]],
        "second_per_grid_ts": [1.0, 2.0],
    }
    assert refusal(feature) == ("bad_shape", "second_per_grid_ts has 2 entries for 1 videos")


def test_pixels_of_a_video_without_its_tokens():
    feature = {
        **tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>"),
        "pixel_values_videos": torch.zeros(16, 1536),
        "video_grid_thw": [[1, 4, 4]],
    }
    assert refusal(feature)[0] == "pixels_without_video_tokens"


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_labels_of_more_tokens_than_there_are_ids_are_refused(name, is_padded):
    """Cut to the length of the ids, they would shift every target by one; transformers raises too."""
    plain = tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>")
    count = len(plain["input_ids"])
    mask = [1] * count if not is_padded else [*[1] * (count - 1), 0]
    feature = {"input_ids": plain["input_ids"], "attention_mask": mask, name: [1] * (count + 1)}
    assert refusal(feature) == (
        "bad_shape",
        f"{name} covers {count + 1} tokens but input_ids has {count}; labels and masks go unshifted",
    )


def test_kinds_of_more_tokens_than_there_are_ids_are_refused():
    plain = tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>")
    assert refusal({**plain, "mm_token_type_ids": [0] * (len(plain["input_ids"]) + 1)})[0] == "token_type_mismatch"


def test_empty_lists_of_patches_are_no_patches():
    plain = tokenised(FAMILY, "<|im_start|>assistant\n5<|im_end|>")
    empty = {"pixel_values": [], "image_grid_thw": [], "pixel_values_videos": [], "video_grid_thw": []}
    assert ENCODER.encode({**plain, **empty}).images == ()
    assert refusal({**plain, **empty, "images": ["a.png"]})[0] == "bad_row"
