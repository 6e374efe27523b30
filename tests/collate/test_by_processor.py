"""Families beyond Qwen: the same tokens and tensors as the model's own processor gives, one sample at a time."""

from functools import lru_cache

import pytest
import torch
from cases import slow
from chats import CHATTING, SHOWN, fast_and_slow, needs, picture, says, text, user
from fixtures.processors import tile_sizes, tiny_processor

from vlmpack.collate import VLMCollator
from vlmpack.errors import SampleError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout.media import IMAGE

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers' own
]
TOKEN_NAMES = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "labels"}


@lru_cache
def processor_of(family):
    return tiny_processor(family)


def conversation(count, *, turns=1):
    """A question with `count` pictures of different shapes, its answer, and further questions without pictures."""
    parts = [{"type": "image"} for _ in range(count)] + [text("What is the total?")]
    messages = [user(parts), says("The total is 75,000.")]
    for turn in range(1, turns):
        messages.append(user(f"And {turn}?"))
        messages.append(says(f"It costs {turn},500."))
    pictures = [picture(61 + 80 * at, 143 + 30 * at, seed=at) for at in range(count)]
    return {"messages": messages, **({"images": pictures} if count else {})}


def by_transformers(processor, feature):
    """The processor's own `apply_chat_template` of a sample, images inside its parts."""
    pictures = iter(feature.get("images", ()))
    messages = []
    for message in feature["messages"]:
        content = message["content"]
        parts = [text(content)] if isinstance(content, str) else content
        messages.append(
            {**message, "content": [p if p["type"] == "text" else {**p, "image": next(pictures)} for p in parts]}
        )
    out = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    return dict(out)


def same_tensors(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# ---------------------------------------------------------------------- equal to the processor


@pytest.mark.parametrize("count", fast_and_slow([0, 1, 3], [0, 3]))
@pytest.mark.parametrize("family", fast_and_slow(CHATTING, SHOWN))
def test_tokens_and_tensors_equal_the_processor_s_own(family, count):
    feature = conversation(count, turns=2)
    truth = by_transformers(processor_of(family), feature)
    batch = VLMCollator(processor_of(family))([feature])
    for name in {"input_ids", FAMILIES[family].expert_types} - {None}:
        assert batch[name].tolist() == truth[name].tolist()
    media = {name: tensor for name, tensor in truth.items() if name not in TOKEN_NAMES}
    same_tensors({name: batch[name] for name in batch if name in media or name == "pixel_values"}, media)
    assert bool(media) == bool(count)
    metadata = batch["vlmpack"]
    assert len(metadata.media.images) == count
    image_id = tile_sizes(processor_of(family))["image_token_id"]
    if count and FAMILIES[family].has_grids:
        assert metadata.media.grids(IMAGE) == tuple(map(tuple, truth["image_grid_thw"].tolist()))
    else:
        assert sum(image.tokens for image in metadata.media.images) == (batch["input_ids"] == image_id).sum()
    for name in {"image_sizes", "target_sizes"} & media.keys():
        assert [[*row] for image in metadata.media.images for row in image.sizes] == media[name].tolist()
    assert (batch["mm_token_type_ids"] == 1).sum() == (batch["input_ids"] == image_id).sum()


@needs("paligemma")
@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_and_its_suffix_equal_paligemma_s_own(count):
    processor, feature = processor_of("paligemma"), conversation(count)
    prompt = f"{processor.image_token * count}Total?"
    truth = processor(text=[prompt], images=[feature["images"]], suffix="75,000", return_tensors="pt")
    batch = VLMCollator(processor)([{"prompt": prompt, "completion": "75,000", "images": feature["images"]}])
    names = ("input_ids", "labels", "pixel_values", "token_type_ids")
    same_tensors({name: batch[name] for name in names}, {name: truth[name] for name in names})
    assert batch["vlmpack"].prefixes == (int((truth["token_type_ids"] == 0).sum()),)


@needs("deepseek_ocr2")
def test_an_image_without_tiles_beside_others_equals_deepseek_ocr2_s_own():
    processor = processor_of("deepseek_ocr2")
    pictures = [picture(90, 61), picture(200, 90), picture(40, 170)]  # of the first there is the whole alone
    prompt = "<image>" * 3 + "Total?"
    truth = processor(text=[prompt], images=[pictures], return_tensors="pt")
    assert truth["num_local_patches"].tolist()[0] == 0 < min(truth["num_local_patches"].tolist()[1:])
    batch = VLMCollator(processor)([{"prompt": prompt, "completion": "5", "images": pictures}])
    width = truth["input_ids"].shape[1]
    assert batch["input_ids"][:, :width].tolist() == truth["input_ids"].tolist()
    names = ("pixel_values", "pixel_values_local", "num_local_patches")
    same_tensors({name: batch[name] for name in names}, {name: truth[name] for name in names})


@needs("deepseek_ocr2")
def test_tiles_are_pixels_too(monkeypatch):
    """In the type of pixels, and refused where they are not finite."""
    processor = processor_of("deepseek_ocr2")
    feature = {"prompt": "<image>Total?", "completion": "5", "images": [picture(200, 90)]}
    collator = VLMCollator(processor, pixel_dtype=torch.bfloat16)
    assert collator([feature])["pixel_values_local"].dtype == torch.bfloat16
    process = type(processor.image_processor).preprocess

    def broken(*args, **kwargs):
        out = process(*args, **kwargs)
        for tiles in (out[name] for name in ("pixel_values_local",) if name in out):
            tiles[0, 0, 0, 0] = float("nan")
        return out

    monkeypatch.setattr(type(processor.image_processor), "preprocess", broken)
    with pytest.raises(SampleError, match="its pixels hold NaN or infinity"):
        collator([feature])


@pytest.mark.parametrize("family", ["internvl", "idefics3", *slow("kimi_k25")])
def test_no_tokens_of_an_image_are_learnt(family):
    """Row and column markers, line breaks and what a template writes around included, also where everything else is."""
    feature = conversation(2)
    batch = VLMCollator(processor_of(family), train_on="all")([feature])
    text = processor_of(family).tokenizer.decode([i for i in batch["labels"][0].tolist() if i != -100])
    alone = VLMCollator(processor_of(family), train_on="all")([conversation(0)])
    without = processor_of(family).tokenizer.decode([i for i in alone["labels"][0].tolist() if i != -100])
    assert "The total is 75,000." in text
    assert len(batch["labels"][0]) - (batch["labels"] != -100).sum() > sum(
        image.tokens for image in batch["vlmpack"].media.images
    )
    assert text.replace("\n", "").replace(" ", "") == without.replace("\n", "").replace(" ", "")
