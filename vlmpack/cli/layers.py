"""The attention back-end of each kind of layer of a model, from its configuration alone.

The model is made on the meta device, without memory for weights, and a row goes through it. Each layer calls attention
with its own heads, dimensions and pattern, and the call is recorded. So nothing has to be known of the family's code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from vlmpack.attention.backends import AUTO, AttentionCall, choose, explain, kernel_of, recorded_calls
from vlmpack.cli.weights import auto_class
from vlmpack.families.registry import family_named
from vlmpack.layout.row import pack
from vlmpack.model.step import PackedStep
from vlmpack.testing.samples import Kind, kinds_of, mixed_samples, padded


class LayerServing(NamedTuple):
    """A kind of attention layer, and what computes it."""

    part: str
    """"text", or "vision"."""
    layers: int
    """Number of such layers."""
    call: AttentionCall
    """Their attention call."""
    backend: str
    """Name of the back-end that serves it."""
    kernel: str
    """The kernel that the back-end calls."""
    reasons: tuple[str, ...]
    """On CUDA, why earlier back-ends cannot serve it, if no varlen kernel does; () if one does."""


class Layers(NamedTuple):
    """The attention layers of a model."""

    kinds: tuple[LayerServing, ...]
    """The kinds, in the order of the model."""
    unknown: str | None
    """Why there may be more: an error of the model's own code on the meta device; None: these are all."""


def attention_layers(config: Any, *, device: str, dtype: torch.dtype) -> Layers:
    """Find out which back-end serves each kind of attention layer.

    Args:
        config: the configuration of the whole model.
        device: "cpu" or "cuda"; the device type does not have to exist.
        dtype: the element type that attention gets.

    Raises:
        FamilyError: the family is unknown or cannot be packed.
    """
    family = family_named(config.model_type)
    with torch.device("meta"):
        model = auto_class(family).from_config(config, dtype=torch.bfloat16)  # experts take no other type there
    step = PackedStep(model)
    text, unknown = _calls(step, "text", config)
    parts = {"text": text}
    if family.from_grids and "image" in kinds_of(config):
        calls, unknown_of_tower = _calls(step, "image", config)
        parts = {"vision": calls[: len(calls) - len(text)], "text": text}
        unknown = unknown or unknown_of_tower
    kinds = [
        _serving(part, count, replace(call, device=device, dtype=dtype))
        for part, calls in parts.items()
        for call, count in Counter(calls).items()
    ]
    return Layers(tuple(kinds), unknown)


def _calls(step: PackedStep, kind: Kind, config: Any) -> tuple[list[AttentionCall], str | None]:
    """Send a row of such a sample through the model. Layers whose code reads values end it, with the reason."""
    row = pack(padded(mixed_samples(config, kinds=(kind,)))).to("meta")
    with recorded_calls() as calls, torch.no_grad():
        try:
            step(row)
        except (NotImplementedError, RuntimeError) as error:
            return calls, f"{type(error).__name__}: {error}"
    return calls, None


def _serving(part: str, layers: int, call: AttentionCall) -> LayerServing:
    backend = choose(call, AUTO).name
    why = explain(call)
    is_served = backend in ("torch_varlen", "flash_attn", "efficient") or call.device != "cuda"
    earlier = () if is_served else takewhile(backend.__ne__, why)
    reasons = tuple(f"{name}: {'; '.join(why[name])}" for name in earlier)
    return LayerServing(part, layers, call, backend, kernel_of(call, backend), reasons)
