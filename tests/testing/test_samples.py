"""The samples that all tests are built on are what they say."""

from __future__ import annotations

import pytest
import torch
from cases import families
from chats import QWEN
from equality import VISION

from vlmpack.errors import ConfigError
from vlmpack.families import family_named
from vlmpack.testing import branches_of, mixed_samples, tiny_config
from vlmpack.testing.samples import (
    grids_of,
    kind_of,
    num_targets,
    synthetic_samples,
    with_adversarial_lengths,
)

every_family = pytest.mark.parametrize("name", families(lambda family: family.model_type in QWEN, ["qwen3"]))


@every_family
def test_synthetic_samples_hold_every_kind_and_differ_in_length(name: str) -> None:
    family, config = family_named(name), tiny_config(name)
    samples = synthetic_samples(config)
    assert [kind_of(s) for s in samples] == (["image", "text", "2 images", "video"] if name in VISION else ["text"] * 3)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert len(set(lengths)) == len(lengths), "two samples of one length could be taken for each other"
    for sample in samples:
        assert sample["labels"][0] == sample["input_ids"][0], "to see that it is masked"
        assert 0 < num_targets(sample) < len(sample["input_ids"]) - 1
        types = family.media_types(sample["input_ids"], config) if name in VISION else torch.zeros(1)
        for modality, grids in ((1, grids_of(sample, "image")), (2, grids_of(sample, "video"))):
            assert int((types == modality).sum()) == (family.media_tokens(grids, config) if grids else 0)


def test_branches_of_too_few_samples_are_refused_with_the_remedy() -> None:
    config = tiny_config("qwen3_vl")
    samples = mixed_samples(config)
    with pytest.raises(ConfigError, match=r"takes five samples, .* and got 4: .* with_adversarial_lengths\("):
        branches_of(samples, config)
    assert len(branches_of(with_adversarial_lengths(samples, config), config).samples) == 6
