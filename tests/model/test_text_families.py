"""What text models beside Qwen's bring with them, each mechanism once: windows, softcaps, sinks, latent attention, what
follows the head, routers with a bias (packed equals alone: `test_equality.py`)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from breakages import without
from equality import alone_through, check_packed
from moe import decoder_layers, router_of

from vlmpack.errors import BackendError
from vlmpack.families.registry import FAMILIES
from vlmpack.model import PackedStep, StepConfig
from vlmpack.model.mechanisms.experts import ByProbability
from vlmpack.testing import mixed_samples, padded, tiny_model


def fresh(family: str) -> Any:
    return tiny_model(family, seed=3, layers=2)


@functools.cache
def truth(family: str) -> Any:
    model = fresh(family)
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=("text",) * 3, text=(4, 15)))


def test_the_comparison_sees_soft_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    truth("gemma2")
    without("softcap")("gemma2", monkeypatch)
    with pytest.raises(AssertionError):
        check_packed(truth("gemma2"), fresh("gemma2"))


def test_the_comparison_sees_what_follows_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("gemma2", "cohere2"):
        truth(family)
        monkeypatch.setattr(type(FAMILIES[family]), "to_logits", lambda self, model: self.head(model))
        with pytest.raises(AssertionError):
            check_packed(truth(family), fresh(family))


# ---------------------------------------------------------------------- what a layer passes


def test_a_kernel_that_cannot_serve_a_pattern_is_refused_by_name() -> None:
    model = fresh("gpt_oss")
    with pytest.raises(BackendError, match=r"it computes no sinks, which this layer has"):
        PackedStep(model, StepConfig(attention="torch_varlen"))(padded(truth("gpt_oss").samples))


# ---------------------------------------------------------------------- routers with a bias


BIASED = [family for family in ("deepseek_v3", "lfm2_moe") if family in FAMILIES]


@pytest.mark.parametrize("family", BIASED)
def test_counts_of_experts_are_what_a_router_with_a_bias_chose(family: str) -> None:
    model, chosen = tiny_model(family, seed=3, layers=2, experts=8), []
    for layer in decoder_layers(model):
        router_of(layer).register_forward_hook(lambda router, args, output: chosen.append(output[2].flatten()))
    result = PackedStep(model, StepConfig(z_loss_coef=0.1))(padded(truth(family).samples))
    assert result.expert_counts.tolist() == [x.bincount(minlength=8).tolist() for x in chosen]
    assert result.aux_loss is None
    top_k = model.config.num_experts_per_tok
    by_probability = [ByProbability().counts(x, top_k).tolist() for x in result.router_logits]
    assert by_probability != result.expert_counts.tolist(), "no token chose by the bias or by groups"
