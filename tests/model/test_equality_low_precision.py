"""Packed equals alone in bfloat16, as far as bfloat16 goes: at most twice the error that each sample alone makes in it.

The reference is the same numbers in float32: weights and pixels are rounded to bfloat16 first.
"""

import functools

import pytest
import torch
from benchmarks.gpu.models import with_patch_products
from equality import (
    LOW_PRECISION,
    alone_through,
    check_low_precision,
    gradients,
    kinds_in,
    poisoned,
    tower_errors,
)
from tiers import only_exhaustive

from vlmpack.attention.backends import BACKENDS, AttentionCall
from vlmpack.errors import BackendError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.comparison import distance, rms_distance
from vlmpack.testing.samples import sample_like

KINDS = {
    "text": ("text", "text", "text"),
    "image": ("image", "images", "image"),
    "video": ("video", "video"),
    "mixed": ("text", "video", "image", "text", "images_and_video"),
}
BATCHES = {family: kinds_in(family, KINDS) for family in FAMILIES}
CELLS = [(family, kind) for family, kinds in BATCHES.items() for kind in kinds]
WITHOUT_VARLEN = ("gemma2", "gpt_oss", "paligemma")
"""Families with soft-capped scores, or sinks, which PyTorch's varlen kernel does not compute."""
RULE = SlotRule(multiple=8)
LOW = torch.bfloat16


def fresh(family, attention="sdpa"):
    return tiny_model(family, seed=3, layers=3, dtype=LOW, attn_implementation=attention)


def cast(samples, dtype, device="cpu"):
    def moved(x):
        return x.to(device, dtype if x.is_floating_point() else None)

    return [sample_like(sample, {name: moved(x) for name, x in sample.items()}) for sample in samples]


@functools.cache
def truth(family, kind):
    """The samples alone in float32, from weights and pixels that bfloat16 can hold."""
    model = tiny_model(family, seed=3, layers=3)
    model.load_state_dict({name: x.float() for name, x in fresh(family).state_dict().items()})
    samples = mixed_samples(model.config, seed=5, kinds=BATCHES[family][kind], text=(1, 12))
    return alone_through(model, cast(cast(samples, LOW), torch.float32))


def compare(family, kind, backend, device):
    own = truth(family, kind)
    model = fresh(family, "eager" if backend == "eager_mask" else "sdpa").to(device)
    if device == "cuda":
        with_patch_products(model)  # versions of cuDNN have no kernel for the convolution
    plain = alone_through(model, cast(own.samples, LOW, device))
    row = pack(padded(cast(own.samples, LOW)), rule=RULE)
    assert row.segments.has_gaps
    step = PackedStep(model, StepConfig(attention=backend))
    with poisoned(model, row.segments):
        result = step(row, logits=True)
        result.loss.backward()
    assert result.row_logits.dtype == LOW
    check_low_precision(own, plain, result, gradients(model))


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa_segments", "eager_mask"])
@pytest.mark.parametrize(("family", "kind"), CELLS)
def test_packed_is_as_close_to_float32_as_alone(family, kind, backend):
    compare(family, kind, backend, "cpu")


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("family", "kind"), CELLS)
def test_packed_is_as_close_to_float32_as_alone_on_a_gpu(family, kind, backend):
    call = AttentionCall(device="cuda", dtype=LOW, head_dim=16, num_heads=4, num_kv_heads=2)
    if reasons := BACKENDS[backend].unsupported(call):
        pytest.skip(f"waits for {backend}: {'; '.join(reasons)}")
    if backend == "torch_varlen" and family in WITHOUT_VARLEN:
        with pytest.raises(BackendError, match=r"computes no (softcap|sinks)"):
            compare(family, kind, backend, "cuda")
    else:
        compare(family, kind, backend, "cuda")


@pytest.mark.parametrize("family", [family for family in FAMILIES if not FAMILIES[family].has("per_sample")])
def test_twice_the_error_of_bfloat16_is_less_than_a_leak(family):
    """Not where sparse attention chooses: in bfloat16 it chooses otherwise, which moves a sample as far as a leak."""
    own, model = truth(family, "text"), fresh(family)
    plain = alone_through(model, cast(own.samples, LOW))
    row = pack(padded(own.samples))
    inputs = {"input_ids": row.input_ids, "cu_seqlens_q": [0, row.segments.total]}
    inputs |= {name: column.cummax(1).values for name, column in row.extras.items()}  # the prefix of the first one
    joined = PackedStep(model)(inputs, logits=True)
    first, *others = joined.row_logits[0].split(own.lengths)
    assert distance(first, own.logits[0]) <= LOW_PRECISION * distance(plain.logits[0], own.logits[0])
    for leaky, low, full in zip(others, plain.logits[1:], own.logits[1:], strict=True):
        assert rms_distance([(leaky, full)]) > LOW_PRECISION * rms_distance([(low, full)])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", *only_exhaustive("mistral3", "paddleocr_vl", "glm4v")])
def test_twice_the_error_of_bfloat16_is_less_than_a_leak_between_images(family, monkeypatch):
    """Of gradients of the vision tower, where every patch of the row attends to every other."""
    own, model = truth(family, "image"), fresh(family)
    plain = alone_through(model, cast(own.samples, LOW)).gradients
    monkeypatch.setattr(VisionRow, "find", lambda self, cu_seqlens, patches: Segments.from_lengths([patches]))
    PackedStep(model)(pack(padded(cast(own.samples, LOW)))).loss.backward()
    leaky, low = (tower_errors(of, own.gradients)["vision"] for of in (gradients(model), plain))
    assert leaky > LOW_PRECISION * low
