"""Packed against alone where rounding is out of the way, and where it is all there is.

In float64 what is left over is a leak, however small. In bfloat16 a row may make twice the error that each sample alone
makes in it, both against the same numbers in float32: weights and pixels are rounded to bfloat16 first.
"""

import functools
from dataclasses import replace

import pytest
import torch
from cases import one_of_each, slow
from equality import (
    LOW_PRECISION,
    Limits,
    alone_through,
    check_gradients,
    check_logits,
    check_low_precision,
    gradients,
    kinds_in,
    poisoned,
)

from benchmarks.gpu import with_patch_products
from vlmpack.attention.backends import BACKENDS, AttentionCall
from vlmpack.errors import BackendError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.comparison import distance, rms_distance
from vlmpack.testing.samples import sample_like

EXACT = Limits(logits=1e-12, loss=1e-6, gradient=1e-12, cosine=1e-12)
"""The loss is a cross-entropy in float32."""
DELTA = replace(EXACT, gradient=2e-6)
"""Gated delta rules compute in float32 whatever they are given."""
ROUNDED = replace(EXACT, logits=1e-6, gradient=1e-5, cosine=1e-10)
"""Norms, routers and eager softmaxes in float32: where their input differs in its last bit, so may what they round."""
KINDS = {"text": ("text",) * 3, "image": ("image", "images", "image"), "mixed": ("text", "video", "image", "audio")}
LOW = torch.bfloat16
FAST = ("qwen2_5_vl", "qwen3_5_moe", "gemma3")


def cast(samples, dtype, device="cpu"):
    def moved(x):
        return x.to(device, dtype if x.is_floating_point() else None)

    return [sample_like(sample, {name: moved(x) for name, x in sample.items()}) for sample in samples]


@pytest.mark.parametrize("family", one_of_each())
def test_in_float64_packed_equals_alone_to_the_last_digits(family):
    descriptor, model = FAMILIES[family], tiny_model(family, layers=4).double()
    if descriptor.has("experts") or family == "gemma4":
        model.set_experts_implementation("eager")  # others multiply in float32 at most
    truth = alone_through(model, cast(mixed_samples(model.config, seed=2), torch.float64))
    result = PackedStep(model)(pack(padded(truth.samples), rule=SlotRule(multiple=4)), logits=True)
    result.loss.backward()
    assert result.row_logits.dtype == torch.float64
    exact = EXACT if family.startswith("qwen") and not descriptor.has_audio else ROUNDED
    limits = DELTA if descriptor.has("gated_delta") else exact
    assert torch.isclose(result.loss, truth.loss, rtol=limits.loss, atol=0)
    check_logits(truth, result, limits)
    check_gradients(truth, gradients(model), limits)


def fresh(family, attention="sdpa"):
    return tiny_model(family, seed=3, layers=3, dtype=LOW, attn_implementation=attention)


@functools.cache
def truth_of(family, kind="mixed"):
    """The samples alone in float32, from weights and pixels that bfloat16 can hold."""
    model = tiny_model(family, seed=3, layers=3)
    model.load_state_dict({name: x.float() for name, x in fresh(family).state_dict().items()})
    kinds = kinds_in(family, KINDS)
    samples = mixed_samples(model.config, seed=5, kinds=kinds.get(kind, kinds["text"]), text=(1, 12))
    return alone_through(model, cast(cast(samples, LOW), torch.float32))


def compare(family, backend, device="cpu"):
    own = truth_of(family)
    model = fresh(family, "eager" if backend == "eager_mask" else "sdpa").to(device)
    if device == "cuda":
        with_patch_products(model)  # versions of cuDNN have no kernel for the convolution
    plain = alone_through(model, cast(own.samples, LOW, device))
    row = pack(padded(cast(own.samples, LOW)), rule=SlotRule(row_multiple=64))
    assert row.segments.has_padding
    step = PackedStep(model, StepConfig(attention=backend))
    with poisoned(model, row.segments):
        result = step(row, logits=True)
        result.loss.backward()
    assert result.row_logits.dtype == LOW
    check_low_precision(own, plain, result, gradients(model))


@pytest.mark.parametrize("backend", ["sdpa_segments", *slow("eager_mask")])
@pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen2_5_vl", "qwen3_vl_moe", "gemma3", "lfm2_vl", "gpt_oss")])
def test_in_bfloat16_packed_is_as_close_to_float32_as_alone(family, backend):
    compare(family, backend)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe", "gemma2", "gpt_oss"])
def test_so_it_is_on_a_gpu_with_every_back_end(family, backend):
    call = AttentionCall(device="cuda", dtype=LOW, head_dim=16, num_heads=4, num_kv_heads=2)
    if reasons := BACKENDS[backend].unsupported(call):
        pytest.skip(f"waits for {backend}: {'; '.join(reasons)}")
    if (backend, family) in (("torch_varlen", "gemma2"), ("efficient", "gemma2"), ("efficient", "gpt_oss")):
        with pytest.raises(BackendError, match=r"computes no (window|softcap)"):
            compare(family, backend, "cuda")
    else:
        compare(family, backend, "cuda")


@pytest.mark.parametrize("family", FAST)
def test_twice_the_error_of_bfloat16_is_less_than_a_leak(family):
    own, model = truth_of(family, "text"), fresh(family)
    plain = alone_through(model, cast(own.samples, LOW))
    row = pack(padded(own.samples))
    inputs = {"input_ids": row.input_ids, "cu_seqlens_q": [0, row.segments.total]}
    inputs |= {name: column.cummax(1).values for name, column in row.extras.items()}  # the prefix of the first one
    joined = PackedStep(model)(inputs, logits=True)
    first, *others = joined.row_logits[0].split(own.lengths)
    assert distance(first, own.logits[0]) <= LOW_PRECISION * distance(plain.logits[0], own.logits[0])
    for leaky, low, full in zip(others, plain.logits[1:], own.logits[1:], strict=True):
        assert rms_distance([(leaky, full)]) > LOW_PRECISION * rms_distance([(low, full)])
