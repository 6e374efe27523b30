"""vlmpack has two encoders: one for Qwen's processors, one for any processor. Both give the same batch.

This file goes when one of them goes. It is the only one of the suite that imports private names, since nothing public
chooses between them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmpack import VLMCollator, VlmpackError
from vlmpack.collate import collator as collator_module
from vlmpack.collate import processor_metadata
from vlmpack.testing import tiny_processor

TEXTS = (
    "What is the total?",
    "2 + 2 = 4",
    "Ä日本😀",
    "a\nb",
    "a  b\t.",
    "<b>bold</b>",
    "x",
    "The shop is closed.",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"train_on": "all"},
    {"max_length": 120, "overlength": "truncate"},
)
SAMPLES = 20


def read_as_any_other(processor: Any, *, vocab_size: int | None = None) -> Any:
    """Metadata of a Qwen processor by which the collator takes the general encoder."""
    settings = {**processor_metadata.processor_settings(processor), "border_ids": ()}
    metadata = processor_metadata.metadata_of(processor, settings, vocab_size=vocab_size)
    images = processor.image_processor
    return replace(metadata, patch_size=images.patch_size, temporal_patch_size=images.temporal_patch_size)


def conversations() -> list[dict[str, Any]]:
    """Random ones: a system turn or none, up to four questions with images anywhere, answers with flags."""
    rng, noise = random.Random(3), np.random.default_rng(3)

    def picture() -> Image.Image:
        width, height = rng.randint(28, 200), rng.randint(28, 200)
        return Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8))

    def conversation() -> dict[str, Any]:
        turns = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, 4)):
            content = [{"type": "text", "text": rng.choice(TEXTS)}]
            for _ in range(rng.choice([0, 0, 1, 2])):
                content.insert(rng.randint(0, len(content)), {"type": "image", "image": picture()})
            answer = {"role": "assistant", "content": rng.choice(TEXTS)}
            if rng.random() < 0.3:
                answer["train"] = rng.random() < 0.5
            turns += [{"role": "user", "content": content}, answer]
        if not any(turn.get("train", True) for turn in turns if turn["role"] == "assistant"):
            turns[-1].pop("train", None)
        return {"messages": turns}

    return [conversation() for _ in range(SAMPLES)]


def outcome(collator: VLMCollator, sample: dict[str, Any]) -> dict[str, Any] | str:
    """The tensors of a batch as lists, or the reason for which the sample is refused."""
    try:
        batch = collator([sample])
    except VlmpackError as error:
        return str(getattr(error, "reason", type(error).__name__))
    names = ("input_ids", "labels", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    return {name: batch[name].tolist() for name in names if name in batch}


@pytest.mark.full
def test_both_encoders_give_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """120 comparisons: 20 conversations, three settings, two families; ids, labels, pixels, or the same refusal."""
    compared = equal = 0
    for family in ("qwen2_5_vl", "qwen3_vl"):
        for settings in SETTINGS:
            processor = tiny_processor(family)
            of_qwen = VLMCollator(processor, **settings)
            with monkeypatch.context() as patched:
                patched.setattr(collator_module, "read_processor", read_as_any_other)
                of_any = VLMCollator(processor, **settings)
            assert (of_qwen.metadata.by_processor, of_any.metadata.by_processor) == (False, True)
            for sample in conversations():
                seen = outcome(of_qwen, sample)
                assert seen == outcome(of_any, sample), (family, settings, sample)
                compared += 1
                equal += isinstance(seen, dict)
    assert compared == 120
    assert equal > 110, "most samples are refused, so that nothing of them was compared"
