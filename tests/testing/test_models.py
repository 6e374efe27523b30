"""Tiny models are real, reproducible, and lively enough that a leak is as large as the signal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import families
from chats import QWEN

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.registry import FAMILIES
from vlmpack.testing import alone, mixed_samples, tiny_config, tiny_model

every_family = pytest.mark.parametrize("name", families(lambda family: family.model_type in QWEN, ["qwen3"]))


@every_family
def test_the_seed_decides_the_weights_and_nothing_else_does(name: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = tiny_model(name, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    again, other = tiny_model(name, seed=1), tiny_model(name, seed=2)
    weights = [dict(model.named_parameters()) for model in (first, again, other)]
    assert weights[0]
    assert all(torch.equal(weight, weights[1][key]) for key, weight in weights[0].items())
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])


@every_family
@torch.no_grad()
def test_logits_are_of_order_one(name: str) -> None:
    model = tiny_model(name, patch_size=4)
    sample = mixed_samples(model.config)[0]
    assert 0.3 < float(model(**alone(sample)).logits.std()) < 3.0
    dull = tiny_model(name, patch_size=4, lively=False)
    assert float(dull(**alone(sample)).logits.std()) < 0.3


@every_family
def test_a_processor_gives_ids_vocabulary_and_patches(name: str) -> None:
    ids = {"<|vision_start|>": 11, "<|vision_end|>": 12, "<|image_pad|>": 13, "<|video_pad|>": 14}
    config: Any = tiny_config(name, processor=stand_in_processor(ids))
    text = FAMILIES[name].text_config(config)
    assert text.vocab_size == 77
    assert (text.pad_token_id, text.eos_token_id) == (8, 9)
    more = tiny_config(name, processor=stand_in_processor(ids), vocab_size=80)
    assert FAMILIES[name].text_config(more).vocab_size == 80
    if not FAMILIES[name].has_vision:
        return
    assert (config.vision_start_token_id, config.vision_end_token_id) == (11, 12)
    assert (config.image_token_id, config.video_token_id) == (13, 14)
    assert (config.vision_config.patch_size, config.vision_config.spatial_merge_size) == (6, 3)


def test_a_processor_without_the_special_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no <\|video_pad\|>; is it a Qwen-VL processor"):
        tiny_config(processor=stand_in_processor({"<|vision_start|>": 11, "<|vision_end|>": 12, "<|image_pad|>": 13}))


@pytest.mark.parametrize(
    ("family", "sizes", "text"),
    [
        ("qwen3_vl", {"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ("qwen3_vl", {"head_dim": 5}, "head_dim=5 must be even"),
        ("qwen3_vl", {"head_dim": 4}, "at least 6"),
        ("qwen3_vl", {"vision_hidden": 12}, "must be a multiple of 4 \\* vision_heads=8"),
        ("qwen3_vl", {"vocab_size": 5}, "does not hold token id 5; raise it to 6"),
        ("qwen3_vl", {"hiden": 5}, "hiden: not a size of a tiny model"),
        ("qwen2_vl", {"head_dim": 12}, "qwen2_vl needs head_dim"),
        ("qwen3_next", {"head_dim": 6}, "head_dim=6 must be even and at least 12"),
        ("qwen3_moe", {"hidden": 60, "heads": 4, "head_dim": 16}, "hidden=60 must be a multiple of 8"),
        ("flava", {}, "'flava'; there are qwen2_vl, qwen2_5_vl, qwen3_vl"),
    ],
)
def test_sizes_that_do_not_fit_together(family: str, sizes: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, FamilyError), match=text):
        tiny_config(family, **sizes)


def stand_in_processor(ids: dict[str, int]) -> Any:
    class Tokenizer:
        pad_token_id, eos_token_id, unk_token_id = 8, 9, None

        def __len__(self) -> int:
            return 77

        def convert_tokens_to_ids(self, token: str) -> int | None:
            return ids.get(token)

    images = SimpleNamespace(patch_size=6, merge_size=3, temporal_patch_size=2)
    return SimpleNamespace(tokenizer=Tokenizer(), image_processor=images)
