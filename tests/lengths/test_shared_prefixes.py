"""Groups of samples that begin alike, measured from text and the bytes of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import chat, picture, processor_of, tokenized
from measured import encoded

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.lengths import measure_lengths
from vlmpack.plan import LengthTable

QUESTIONS = ("What is the total of this receipt?", "Who sold it?", "On which day was it paid?")


def questions(images: int = 3) -> list[dict[str, Any]]:
    """Questions about each of some images of one size, image by image."""
    return [
        chat(question, f"answer {at} {number}", encoded(190, 61, seed=number))
        for number in range(images)
        for at, question in enumerate(QUESTIONS)
    ]


def measured(samples: Any, min_shared: int | None = 8, **settings: Any) -> LengthTable:
    return measure_lengths(samples, VLMCollator(processor_of()), min_shared=min_shared, **settings)


def test_questions_about_one_image_are_a_group_and_images_of_one_size_are_not_mixed_up() -> None:
    table = measured(questions())
    assert table.groups.of_samples.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert table.groups is not None
    assert table.groups.images.tolist() == [1, 1, 1]
    assert table.groups.shared(table.groups.patches).tolist() == table.patches.tolist()
    assert (table.groups.shared(table.groups.tokens) > table.image_tokens).all()
    assert (table.groups.shared(table.groups.tokens) < table.tokens).all()


def test_prompts_are_shared_to_their_last_token() -> None:
    samples = [chat("Why? " * 30, answer) for answer in ("yes", "no", "perhaps, or rather not")]
    table, collator = measured(samples), VLMCollator(processor_of())
    prompt = int(np.flatnonzero(collator.measure(samples[0]).labels >= 0)[0])
    assert table.groups.shared(table.groups.tokens).tolist() == [prompt] * 3


def test_samples_that_come_as_patches_are_compared_by_them() -> None:
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    )
    samples = [tokenized("qwen3_vl", text.format(at), picture(50, 50, seed=at // 2)) for at in range(4)]
    assert measured(samples).groups.of_samples.tolist() == [0, 0, 1, 1]


def test_groups_are_looked_for_only_when_asked() -> None:
    plain = measured(questions(), None)
    assert plain.groups is None
    with pytest.raises(ConfigError, match=r"min_shared .*or None to look for no shared prefixes"):
        measured(questions(), 0)


def test_groups_that_the_collator_would_repeat_are_refused() -> None:
    collator = VLMCollator(processor_of(), layout="packed", share_prefixes=True)
    with pytest.raises(ConfigError, match=r"min_shared is 8, .* less than 64 .* give min_shared=64, .*min_shared=8\)"):
        measure_lengths(questions(), collator, min_shared=8)
    assert measure_lengths(questions(), collator, min_shared=64).groups is not None


def test_a_cache_gives_the_same_groups_and_keeps_images_of_one_size_apart(tmp_path: Path) -> None:
    first = measured(questions(), cache=tmp_path / "cache")
    assert measured(questions(), cache=tmp_path / "cache") == first == measured(questions())
    assert measured(questions(), None, cache=tmp_path / "cache") == measured(questions(), None)
    swapped = [*questions()[:5], chat(QUESTIONS[2], "answer 2 1", encoded(190, 61, seed=7)), *questions()[6:]]
    assert measured(swapped, cache=tmp_path / "cache").groups.of_samples.tolist() == [0, 0, 0, 1, 1, -1, 2, 2, 2]
