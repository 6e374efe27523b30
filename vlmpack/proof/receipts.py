"""The samples of a probe that the user's own processor makes: drawn receipts, small, and questions about them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.families import Family
from vlmpack.layout import IMAGE, VIDEO, PaddedBatch
from vlmpack.proof.samples import ProbeSample
from vlmpack.testing import SMALLEST_LEGIBLE, SyntheticReceipts

IMAGE_TOKENS, FRAME_TOKENS = 24, 8
"""Most tokens of an image, and of a frame of the video."""


def check_fits(samples: Sequence[ProbeSample], family: Family, config: Any) -> None:
    """Samples of another model's processor would only make an embedding or a convolution raise.

    Raises:
        ConfigError: they have token ids, patches or placeholders that the model does not know.
    """
    remedy = "give the processor that was saved with the model"
    vocabulary = family.text_config(config).vocab_size
    if (highest := max(int(sample.input_ids.max()) for sample in samples)) >= vocabulary:
        raise ConfigError(f"the processor makes token id {highest}, and the model has {vocabulary} of them; {remedy}")
    width = family.patch_channels(config)
    for sample in samples:
        for pixels in (sample.media.pixel_values, sample.media.pixel_values_videos):
            if pixels is not None and pixels.shape[-1] != width:
                seen = f"patches of {pixels.shape[-1]} numbers, and the model takes {width}"
                raise ConfigError(f"the processor makes {seen}; {remedy}")
        types = family.media_types(sample.input_ids, config)
        for kind, grids, name in ((IMAGE, sample.image_grids, "image"), (VIDEO, sample.video_grids, "video")):
            if (seen := int((types == kind).sum())) != (expected := family.media_tokens(grids, config)):
                counts = f"{seen} {name} tokens of this model where its pixels make {expected}"
                raise ConfigError(f"the processor writes {counts}; {remedy}")


def processed_samples(processor: Any) -> list[ProbeSample]:
    """An image, text, two images, and a video where the processor's family takes one. The same every time."""
    collator = VLMCollator(processor)
    records = [_drawn(i) for i in range(3)]
    side = processor.image_processor.patch_size * processor.image_processor.merge_size
    one, two, three = ({**record, "part": _image(record["image"], side)} for record in records)
    samples = [
        _sample(collator, "image", [one["part"], _text("What is the total?")], one["total"]),
        _sample(collator, "text", [_text("What is two times 14,500?")], "It is 29,000."),
        _sample(
            collator,
            "two images",
            [two["part"], three["part"], _text("And the totals of these two?")],
            f"They are {two['total']} and {three['total']}.",
        ),
    ]
    frames = [record["image"].resize((160, 200)) for record in (records[0], records[0], records[1], records[1])]
    try:
        video = {"type": "video", "video": frames, "min_pixels": 4 * side**2, "max_pixels": FRAME_TOKENS * side**2}
        samples.append(_sample(collator, "video", [video, _text("What is shown?")], "Two receipts."))
    except VlmpackError:  # a processor that takes no videos
        pass
    return samples


def _drawn(index: int) -> dict[str, Any]:
    record = SyntheticReceipts(num=index + 1, scale=SMALLEST_LEGIBLE)[index]
    total = json.loads(record["ground_truth"])["gt_parse"].get("total", {})
    return {"image": record["image"], "total": str(total.get("total_price", "not given"))}


def _image(image: Any, side: int) -> dict[str, Any]:
    return {"type": "image", "image": image, "min_pixels": 4 * side**2, "max_pixels": IMAGE_TOKENS * side**2}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _sample(collator: VLMCollator, kind: str, question: list[Mapping[str, Any]], answer: str) -> ProbeSample:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": [_text(answer)]}]
    batch = collator.collate([{"messages": messages}])
    assert isinstance(batch, PaddedBatch)
    assert batch.labels is not None
    assert batch.metadata is not None
    ids, labels = batch.input_ids[0], batch.labels[0].clone()
    labels[0] = ids[0]
    return ProbeSample(
        kind=kind,
        input_ids=ids,
        labels=labels,
        media=replace(batch.media, **_float32(batch)),
        image_grids=batch.metadata.image_grids,
        video_grids=batch.metadata.video_grids,
        seconds=batch.metadata.seconds_per_grid,
    )


def _float32(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    names = ("pixel_values", "pixel_values_videos")
    return {name: pixels.float() for name in names if (pixels := vars(batch.media)[name]) is not None}
