"""The attention back-end of each kind of layer of a model, from its configuration alone.

The model is made on the meta device, without memory for weights, and a row goes through it. Each layer calls attention
with its own heads, dimensions and pattern, and the call is recorded. So nothing has to be known of the family's code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from vlmpack.attention.backends import AUTO, AttentionCall, choose, explain, kernel_of, recorded_calls
from vlmpack.families.registry import family_named
from vlmpack.layout.row import pack
from vlmpack.model.step import PackedStep
from vlmpack.testing.samples import Kind, kinds_of, mixed_samples, padded


def attention_layers(config: Any, *, device: str, dtype: str) -> list[dict[str, Any]]:
    """Find out which back-end and kernel serve each kind of attention layer, in the order of the model, for JSON.

    `reasons` of a layer that no varlen kernel serves on CUDA tell why earlier back-ends cannot. If the model's code
    fails on the meta device, a last entry of the part "unknown" says so: there may be more layers.

    Args:
        config: the configuration of the whole model.
        device: "cpu" or "cuda"; the device type does not have to exist.
        dtype: the element type that attention gets.

    Raises:
        FamilyError: the family is unknown or cannot be packed.
    """
    family = family_named(config.model_type)
    with torch.device("meta"):
        model = family.auto_class.from_config(config, dtype=torch.bfloat16)  # experts take no other type there
    step = PackedStep(model)
    text, unknown = _calls(step, "text", config)
    parts = {"text": text}
    if family.keeps_grids and "image" in kinds_of(config):
        calls, unknown_of_tower = _calls(step, "image", config)
        parts = {"vision": calls[: len(calls) - len(text)], "text": text}
        unknown = unknown or unknown_of_tower
    made_in = {"device": device, "dtype": dtype}
    entries = [
        {"part": part, "layers": count, **made_in} | _serving(replace(call, device=device, dtype=getattr(torch, dtype)))
        for part, calls in parts.items()
        for call, count in Counter(calls).items()
    ]
    if unknown:
        why = f"the model's code reads values, and here are none ({unknown}); probe it"
        rest = {"heads": "further layers", "backend": "", "kernel": "", "reasons": [why]}
        entries.append({"part": "unknown", "layers": 0, **made_in, **rest})
    return entries


def _calls(step: PackedStep, kind: Kind, config: Any) -> tuple[list[AttentionCall], str]:
    """Send a row of such a sample through the model. Layers whose code reads values end it, with the reason."""
    row = pack(padded(mixed_samples(config, kinds=(kind,)))).to("meta")
    with recorded_calls() as calls, torch.no_grad():
        try:
            step(row)
        except (NotImplementedError, RuntimeError) as error:
            return calls, f"{type(error).__name__}: {error}"
    return calls, ""


def _serving(call: AttentionCall) -> dict[str, Any]:
    backend, why = choose(call, AUTO).name, explain(call)
    is_served = backend in ("torch_varlen", "flash_attn", "efficient") or call.device != "cuda"
    earlier = () if is_served else takewhile(backend.__ne__, why)
    heads = f"heads {call.num_heads}, key-value heads {call.num_kv_heads}, head dimension {call.head_dim}"
    return {
        "heads": ", ".join((heads, *call.pattern)),
        "backend": backend,
        "kernel": kernel_of(call, backend),
        "reasons": [f"{name}: {'; '.join(why[name])}" for name in earlier],
    }
