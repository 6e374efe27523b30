"""The first step of every family on a GPU: a padded batch, a packed row and a prefix tree in bfloat16.

As in `test_equality_low_precision`, the truth is each sample alone in float32, on the CPU, from weights and pixels that
bfloat16 can hold; the error may be twice that of each sample alone in bfloat16. vlmpack never waits for the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from cases import EIGHT, one_of_each, slow
from equality import Alone, alone_through, check_low_precision, without_zeros
from host_syncs import own_lines, recorded_syncs
from trees import Piece, samples_of, shared
from waiting import flex_graph

from benchmarks.gpu import with_patch_products
from vlmpack.attention.backends import Backend, choose
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep
from vlmpack.model.mechanisms import attention
from vlmpack.testing import Sample, padded, tiny_model
from vlmpack.testing.comparison import take_gradients
from vlmpack.testing.samples import sample_like

LOW = torch.bfloat16
SEED = 8
"""Of weights with which routers choose the same experts in both types: another choice is as far away as a leak."""
PROMPT = Piece(text=6, images=1, children=(Piece(text=5), Piece(text=7, images=1)))
CLIP = Piece(text=4, videos=1)
LAYOUTS = {"padded": padded, "row": lambda samples: pack(padded(samples), rule=SlotRule(multiple=8)), "tree": shared}
WITHOUT_VARLEN = ("gemma2", "paligemma")
"""Families with soft-capped scores, which PyTorch's varlen kernel does not have."""
pytestmark = pytest.mark.gpu


def fresh(family: str, dtype: torch.dtype) -> Any:
    return tiny_model(family, seed=SEED, layers=3, vision_depth=1, dtype=dtype)


def cast(samples: list[Sample], dtype: torch.dtype) -> list[Sample]:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return [sample_like(sample, {name: rounded(x) for name, x in sample.items()}) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's model on the device, and what its samples are alone."""

    model: Any
    exact: Alone
    """In float32, on the CPU."""
    plain: Alone
    """In bfloat16, on the device."""


@lru_cache(maxsize=1)
def case_of(family: str) -> Case:
    low = fresh(family, LOW)
    full = fresh(family, torch.float32)
    full.load_state_dict({name: x.float() for name, x in low.state_dict().items()})
    samples = cast(samples_of(low.config, PROMPT, CLIP), LOW)
    model = with_patch_products(low.cuda())  # versions of cuDNN have no kernel for the convolution
    exact = alone_through(full, cast(samples, torch.float32))
    return Case(model=model, exact=exact, plain=alone_through(model, samples))


@contextmanager
def chosen_kernels() -> Iterator[set[str]]:
    """Collect the names of the attention back-ends that serve, while something runs."""
    names: set[str] = set()

    def noted(*call: Any, **more: Any) -> Backend:
        backend = choose(*call, **more)
        names.add(backend.name)
        return backend

    with mock.patch.object(attention, "choose", noted):
        yield names


def check_step(family: str, way: str, layout: str) -> set[str]:
    """Compare one step with the samples alone; the names of the attention back-ends that served."""
    case = case_of(family)
    model = case.model.train()
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    step, given = PackedStep(model), LAYOUTS[layout](case.plain.samples).to("cuda")
    with recorded_syncs(torch.device("cuda")) as waits, chosen_kernels() as kernels:
        result = step(given, logits=True)
        result.loss.backward()
    found = take_gradients(model)
    assert own_lines(waits) == []
    assert ("torch_varlen" in kernels) == (family not in WITHOUT_VARLEN)
    check_low_precision(case.exact, case.plain, result, without_zeros(found))
    return kernels


@pytest.mark.parametrize("family", one_of_each())
def test_a_tree_is_as_close_to_float32_as_its_samples_alone_and_waits_for_nothing(family: str) -> None:
    check_step(family, "plain", "tree")


@pytest.mark.parametrize("layout", ["padded", "row"])
@pytest.mark.parametrize("way", ["plain", *slow("checkpointed")])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", *slow(*(name for name in EIGHT if name != "qwen3_vl_moe"))])
def test_so_is_a_batch_or_a_row(family: str, way: str, layout: str) -> None:
    check_step(family, way, layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITHOUT_VARLEN)
def test_so_is_flex_attention_of_scores_that_varlen_kernels_do_not_have(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flex_graph(monkeypatch)
    for layout in ("row", "tree"):
        assert "flex" in check_step(family, "checkpointed", layout)
