"""Varlen kernels run on a GPU only: here one takes their place that is given the same boundaries.

It attends inside gaps too.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from chats import needs

from vlmpack.attention.backends import BACKENDS, AttentionCall, Backend, Softmax, VarlenKernel
from vlmpack.errors import BackendError
from vlmpack.layout import Segments
from vlmpack.model import engine
from vlmpack.model.row import RowContext
from vlmpack.probing import probe
from vlmpack.probing.forward_passes import GAPS
from vlmpack.probing.report import Check
from vlmpack.probing.run import _setup, backends_for, packing, preserved_state
from vlmpack.probing.work import check_pairs
from vlmpack.testing import tiny_model

FAMILIES = ("qwen3", "mistral", "gemma3", "paligemma", "llama4_text")


class EveryKernelSegment(VarlenKernel):
    """Attention within each pair of boundaries."""

    name = "every_kernel_segment"

    def unsupported(self, call: AttentionCall) -> list[str]:
        return []

    def kernel(self, q_TNH, k_TKH, v_TKH, ends_q, ends_k, most_q, most_k, *, softmax: Softmax) -> torch.Tensor:
        out = torch.zeros_like(q_TNH)
        for (a, b), (c, d) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
            i, j = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
            visible = (j <= i) if softmax.causal else torch.ones(b - a, d - c, dtype=torch.bool)
            if softmax.pattern.window is not None:
                visible = visible & (j > i - softmax.pattern.window)
            q_NLH, k_NLH, v_NLH = (x.transpose(0, 1) for x in (q_TNH[a:b], k_TKH[c:d], v_TKH[c:d]))
            gqa = {"attn_mask": visible, "scale": softmax.scale, "enable_gqa": True}
            out[a:b] = F.scaled_dot_product_attention(q_NLH[None], k_NLH[None], v_NLH[None], **gqa)[0].transpose(0, 1)
        return out


class NoSoftcap(EveryKernelSegment):
    """It computes windows, chunks and spans, and neither softcaps nor sinks."""

    name, dtypes, needs_cuda = "no_softcap", (), False

    def unsupported(self, call: AttentionCall) -> list[str]:
        return Backend.unsupported(self, call)


@pytest.fixture(autouse=True)
def varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (EveryKernelSegment(), NoSoftcap()):
        monkeypatch.setitem(BACKENDS, kernel.name, kernel)


def pairs_of(family: str) -> Check:
    """The check of pairs of a row with padding."""
    model = tiny_model(family)
    setup = _setup(model, None, EveryKernelSegment.name)
    with preserved_state(model), packing(setup, GAPS) as packed:
        assert packed.segments(setup.samples).has_padding
        (check,) = check_pairs(setup, packed)
        return check


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=needs(name)) if name == "paligemma" else name for name in FAMILIES]
)
def test_pairs_of_padding_behind_the_samples_are_no_fault(family: str) -> None:
    check = pairs_of(family)
    assert (check.finding, check.cause) == ("ok", None), check
    assert check.value is not None
    assert check.allowed is not None
    assert check.value <= check.allowed


@pytest.mark.parametrize(("family", "missing"), [("gpt_oss", "no sinks"), ("gemma2", "no softcap"), ("qwen3", None)])
def test_a_kernel_that_some_layer_needs_more_than_is_not_listed(family: str, missing: str | None) -> None:
    """Only calls of layers show what they need."""
    model = tiny_model(family, layers=2)
    assert (NoSoftcap.name in backends_for(model)) is (missing is None)
    if missing is not None:
        with pytest.raises(BackendError, match=missing):
            probe(model, attention=NoSoftcap.name)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_samples_that_are_one_segment_are_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_segment(**metadata) -> RowContext:
        return RowContext(**{**metadata, "segments": Segments.from_lengths([metadata["segments"].total])})

    monkeypatch.setattr(engine, "RowContext", one_segment)
    check = pairs_of(family)
    assert (check.finding, check.cause) == ("differs", "mask"), check
