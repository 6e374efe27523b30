"""Small conversations about small pictures, and one processor a family, for the tests of the collator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.processors import RECIPES, missing_packages, tiny_processor
from PIL import Image
from transformers.video_utils import VideoMetadata

from vlmpack.collate.processor_metadata import read_processor
from vlmpack.collate.video import VideoReader
from vlmpack.families import registry

BEYOND = tuple(family for family in RECIPES if family in registry.FAMILIES)
"""Families beyond Qwen with a tiny processor."""
CHATTING = tuple(family for family in BEYOND if RECIPES[family].template is not None)
"""Those of them with a chat template."""
SHOWN = ("gemma3", "internvl", "idefics3")
"""Those of them in the short tier: texts around images and crops, tiles, row and column markers."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
QWEN = (*FAMILIES, "qwen3", "qwen3_next")
"""Families whose parts are Qwen's own; what others bring is shown with their images and layers."""


needs_torchvision = pytest.mark.skipif(bool(missing_packages("llama4")), reason="torchvision cannot be imported")


def fast_and_slow(values: Iterable[Any], fast: Sequence[Any]) -> list[Any]:
    """All these values of a parameter: those of `fast` in `make test`, the others in `make test-all` only."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def needs(family: str) -> pytest.MarkDecorator:
    """Skip a test about one family beyond Qwen where this version has no such family."""
    return pytest.mark.skipif(family not in BEYOND, reason=f"{family} is no family")


@lru_cache
def processor_of(family: str = "qwen3_vl") -> Any:
    """Shared by all tests: whoever changes one makes it anew."""
    return tiny_processor(family)


def picture(width: int = 61, height: int = 43, *, seed: int = 0) -> Image.Image:
    """Noise: no two pictures have a patch in common."""
    values = np.random.default_rng((seed, width, height)).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def text(words: str, **keys: Any) -> dict[str, Any]:
    """A part of a message, with keys beside its text."""
    return {"type": "text", "text": words, **keys}


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def says(content: Any, **keys: Any) -> dict[str, Any]:
    """An answer of the assistant."""
    return {"role": "assistant", "content": content, **keys}


def human(value: str, **keys: Any) -> dict[str, Any]:
    """A question in ShareGPT's form, which LLaVA and Qwen have too."""
    return {"from": "human", "value": value, **keys}


def gpt(value: str, **keys: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": value, **keys}


def chat(question: str = "What is the total?", answer: str = "The total is 75,000", *images: Any, **more: Any) -> dict:
    """A TRL row: images, one question, one answer."""
    messages = [user([{"type": "image"} for _ in images] + [text(question)]), says(answer)]
    return {"messages": messages, **({"images": list(images)} if images else {}), **more}


def tokenized(family: str, written: str, *images: Any, **more: Any) -> dict:
    """The processor's own output for one sample, as tensors without the batch dimension."""
    out = processor_of(family)(text=written, images=list(images) or None, return_tensors="pt")
    ids = ("input_ids", "attention_mask", "mm_token_type_ids")
    return {**{name: value[0] if name in ids else value for name, value in out.items()}, **more}


def learnt(processor: Any, labels: Any) -> str:
    """What the labels say, as text."""
    return processor.tokenizer.decode([i for i in np.asarray(labels).reshape(-1).tolist() if i != -100])


def of_family(family: str, question: str, answer: str, *images: Any) -> dict[str, Any]:
    """A question about images, as a family's processor takes it."""
    if family in CHATTING:
        return chat(question, answer, *images)
    return {"prompt": "<image>" * len(images) + question, "completion": answer, "images": list(images)}


class Frames:
    """Patches in the place of torchvision's video processor; what is written into the text is the processor's."""

    merge_size, temporal_patch_size, valid_kwargs = 2, 2, None

    def __init__(self, processor: Any, frames: list[Any], fps: float = 2.0) -> None:
        reader = VideoReader(processor=processor, metadata=read_processor(processor))
        self.patches = reader.load({"video": frames, "sample_fps": fps})
        count = len(frames) + len(frames) % 2  # as in qwen-vl-utils, a repeated last frame is a frame
        numbers: dict[str, Any] = {"fps": fps, "duration": count / fps, "frames_indices": [*range(count)]}
        self.metadata = VideoMetadata(total_num_frames=count, **numbers)

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        made = {"pixel_values_videos": self.patches.pixels, "video_grid_thw": torch.tensor([self.patches.grid])}
        return {**made, "video_metadata": [self.metadata]}
