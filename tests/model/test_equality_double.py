"""Packed against alone in float64, where rounding is out of the way: what is left over is a leak, however small.

Gated delta rules compute in float32 whatever they are given, so their families are closer in logits than in gradients.
"""

from dataclasses import replace

import pytest
import torch
from equality import Limits, alone_through, check_gradients, check_logits, gradients
from tiers import shown_by_others

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import sample_like

EXACT = Limits(logits=1e-12, loss=1e-6, gradient=1e-12, cosine=1e-12)
"""The loss is a cross-entropy in float32."""
DELTA = replace(EXACT, gradient=2e-6)
ROUNDED = replace(EXACT, logits=1e-6, gradient=1e-5, cosine=1e-10)
"""Norms, routers and eager softmaxes in float32: where their input differs in its last bit, so may what they round."""


def wide(sample):
    return sample_like(sample, {name: x.double() if x.is_floating_point() else x for name, x in sample.items()})


@pytest.mark.each_value
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_to_the_last_digits(family, multiple):
    model = tiny_model(family, layers=4).double()
    if FAMILIES[family].has("experts") or family == "gemma4":
        model.set_experts_implementation("eager")  # others multiply in float32 at most
    samples = [wide(sample) for sample in mixed_samples(model.config, seed=2)]
    truth = alone_through(model, samples)
    result = PackedStep(model)(pack(padded(samples), rule=SlotRule(multiple=multiple)), logits=True)
    result.loss.backward()
    assert result.row_logits is not None
    assert result.row_logits.dtype == torch.float64
    limits = DELTA if FAMILIES[family].has("gated_delta") else ROUNDED if family in shown_by_others() else EXACT
    assert torch.isclose(result.loss, truth.loss, rtol=limits.loss, atol=0)
    check_logits(truth, result, limits)
    check_gradients(truth, gradients(model), limits)
