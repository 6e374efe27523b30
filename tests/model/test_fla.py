"""When flash-linear-attention must not compute a gated delta layer, how it is found, and what it is told."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from parts import gated_delta_layers
from torch import nn

from vlmpack.errors import BackendError, ConfigError
from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments
from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, check_fla, fla_boundaries, uses_fla
from vlmpack.model.mechanisms.recurrent_rows import check_zeros
from vlmpack.testing import tiny_model

GATED = [name for name, family in FAMILIES.items() if family.has("gated_delta")]
H100 = FlaCall(device="cuda", chip=9, fla="0.6.0", triton="3.7.1", tilelang=False, training=True)

SERVED = {
    "newest on Hopper": H100,
    "Triton before the flaw": replace(H100, triton="3.3.1"),
    "a later Triton": replace(H100, triton="3.10.0"),
    "flawed Triton, but tilelang takes over": replace(H100, triton="3.6.0", tilelang=True),
    "flawed Triton, but no gradients": replace(H100, triton="3.6.0", training=False),
    "flawed Triton on another chip": replace(H100, triton="3.6.0", chip=8),
    "an AMD GPU": replace(H100, triton="3.6.0", chip=None),
    "0.5.2 on Blackwell": replace(H100, fla="0.5.2", chip=10),
}
REFUSED = {
    "on the CPU": (replace(H100, device="cpu", chip=None), "move the model"),
    "0.4.2": (replace(H100, fla="0.4.2", chip=8), "install fla-core 0.5.2"),
    "0.5.1, no gradients": (replace(H100, fla="0.5.1", training=False), "before 0.5.2"),
    "Triton 3.4.0 on Hopper": (replace(H100, triton="3.4.0"), "install Triton 3.7.1 or newer, or tilelang"),
    "Triton 3.7.0 on Hopper": (replace(H100, triton="3.7.0+git1"), "install Triton 3.7.1 or newer, or tilelang"),
}


@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED)
def test_fla_may_serve(call: FlaCall) -> None:
    assert call.unsupported() == []


@pytest.mark.parametrize(("call", "why"), REFUSED.values(), ids=REFUSED)
def test_fla_must_not_serve_and_the_reason_names_the_remedy(call: FlaCall, why: str) -> None:
    (reason,) = call.unsupported()
    assert why in reason


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plays a version of fla, and Triton, that is loaded."""

    def load(version: str) -> None:
        for name, number in (("fla", version), ("triton", "3.7.1")):
            module = ModuleType(name)
            vars(module)["__version__"] = number
            monkeypatch.setitem(sys.modules, name, module)

    return load


def test_the_call_is_read_from_what_is_loaded(loaded: Callable[[str], None]) -> None:
    loaded("0.5.2")
    call = FlaCall.of(torch.device("cpu"), training=True)
    assert (call.device, call.chip, call.fla, call.triton, call.training) == ("cpu", None, "0.5.2", "3.7.1", True)


def test_everything_that_is_wrong_is_named_at_once(loaded: Callable[[str], None]) -> None:
    loaded("0.4.0")
    with pytest.raises(
        BackendError, match=r"fla 0\.4\.0, which cannot serve .* on the CPU.*; before 0\.5\.2 .*install"
    ):
        check_fla(torch.device("cpu"), training=True)


@pytest.mark.parametrize(
    ("version", "keywords"),
    {
        "0.6.0": {"cu_seq_lens_q", "cu_seqlens_cpu", "chunk_indices"},
        "0.7.0": {"cu_seq_lens_q", "cu_seqlens_cpu"},  # who knows how many tokens it will compute at a time
    }.items(),
)
def test_boundaries_are_worked_out_for_versions_that_are_known(
    loaded: Callable[[str], None], version: str, keywords: set[str]
) -> None:
    loaded(version)
    told = fla_boundaries(Segments.from_lengths([73, 2]), torch.device("cpu"))
    assert told.keys() == keywords
    assert told["cu_seq_lens_q"].tolist() == told["cu_seqlens_cpu"].tolist() == [0, 73, 75]
    assert {boundaries.dtype for boundaries in told.values()} == {torch.int32}
    if "chunk_indices" in told:
        assert told["chunk_indices"].tolist() == [[0, 0], [0, 1], [1, 0]]


def bound_by_transformers(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers wraps what it has found."""
    implementation = function

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return implementation(*args, **kwargs)

    return wrapped


def made_a_module(func: Callable[..., Any]) -> nn.Module:
    """As the package kernels wraps what transformers has wrapped."""

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    return Func()


def rule() -> None:
    """A function of fla."""


def similar() -> None:
    """A function of another package."""


rule.__module__ = "fla.ops.gated_delta_rule.chunk"
similar.__module__ = "flax.linen"

FOUND = {
    "by itself": rule,
    "bound by transformers": bound_by_transformers(rule),
    "made a module": made_a_module(bound_by_transformers(rule)),
}
NOT_FOUND = {
    "PyTorch": bound_by_transformers(torch.relu),
    "a hub kernel": made_a_module(torch.relu),
    "a package of a similar name": bound_by_transformers(similar),
    "nothing": None,
}


@pytest.mark.parametrize("function", FOUND.values(), ids=FOUND)
@pytest.mark.parametrize("family", GATED)
def test_fla_is_found_behind_every_wrapper(monkeypatch: pytest.MonkeyPatch, family: str, function: Any) -> None:
    monkeypatch.setattr(import_module(family_named(family).modeling), "torch_chunk_gated_delta_rule", function)
    assert uses_fla(family_named(family))


@pytest.mark.parametrize("function", NOT_FOUND.values(), ids=NOT_FOUND)
def test_anything_else_is_not_taken_for_fla(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    family = "qwen3_5"
    monkeypatch.setattr(import_module(family_named(family).modeling), "torch_chunk_gated_delta_rule", function)
    assert not uses_fla(family_named(family))


@pytest.mark.parametrize("family", GATED)
def test_zeros_stay_zeros_up_to_the_convolution_unless_a_projection_has_a_bias(family: str) -> None:
    model = tiny_model(family, layers=4)
    (layer, *_) = gated_delta_layers(model)
    check_zeros(layer)
    name, projection = next((n, m) for n, m in layer.named_children() if n.startswith("in_proj_qkv"))
    adapter = nn.ModuleDict({"base_layer": projection, "lora_B": nn.Linear(4, projection.out_features)})
    layer.add_module(name, adapter)
    with pytest.raises(ConfigError, match="has a bias"):
        check_zeros(layer)
    del adapter["lora_B"].bias
    check_zeros(layer)
