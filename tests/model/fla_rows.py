"""What test_delta_fla.py runs in a process of its own, where a stand-in for flash-linear-attention is on the path.

    python fla_rows.py FAMILY ...

Writes one JSON object to standard output: by family, what each case below saw.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from equality import Alone, alone_through, by_sample, gradients, poisoned
from fla.ops.gated_delta_rule import CALLS  # pyright: ignore[reportMissingImports]
from parts import gated_delta_layers
from trees import DEEP, STRANGER, samples_of, shared

from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout import PaddedBatch, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.mechanisms import gated_delta, gated_delta_tree
from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla
from vlmpack.model.mechanisms.gated_delta_tree import HandedState
from vlmpack.model.mechanisms.recurrent_rows import SpacedNodes
from vlmpack.testing import build_sample, mixed_samples, padded, tiny_model
from vlmpack.testing.samples import kinds_of

RULE = SlotRule(multiple=4)
GPU = FlaCall(device="cuda", chip=8, fla="0.6.0", triton="3.7.1", tilelang=False, training=True)
"""A machine that fla serves; this one plays it."""


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    json.dump({family: cases(family) for family in families}, sys.stdout)


def cases(family: str) -> dict[str, Any]:
    model = tiny_model(family, seed=3, layers=4).train()
    kinds = ("image", "text", "images") if len(kinds_of(model.config)) > 1 else ("text", "text", "text")
    samples = mixed_samples(model.config, seed=9, kinds=kinds)
    samples += [build_sample(model.config, stretches=[n]) for n in (2, 70)]  # less than the taps, more than a chunk
    truth = alone_through(model, samples)
    seen = {"fla": uses_fla(family_named(family)), "refused": refusal(model, truth)}
    with mock.patch.object(FlaCall, "of", return_value=GPU):
        seen["exact"] = compared(model, truth)
        seen["no zeros"] = without(model, truth, mock.patch.object(gated_delta, "reach", return_value=0))
        seen["no boundaries"] = without(model, truth, mock.patch.object(gated_delta, "fla_boundaries", return_value={}))
        seen["bias"] = biased(model, truth)
        own = branches(model)
        seen["tree"] = of_tree(model, own)
        seen["broken trees"] = {name: of_tree(model, own, damage) for name, damage in BREAKAGES.items()}
        seen["padding alone"] = padding_alone(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        seen["checkpointing"] = compared(model, truth)
    conv = sys.modules.get("causal_conv1d")
    seen["conv calls"] = 0 if conv is None else len(conv.CALLS)
    return seen


def compared(model: Any, truth: Alone) -> dict[str, Any]:
    """How far packed is from alone, with poison in every gap, and how it was computed."""
    row = pack(padded(truth.samples), rule=RULE)
    CALLS.clear()
    enable_packing(model)
    with poisoned(model, row.segments) as poison:
        result = PackedStep(model, StepConfig(slots=RULE))(row, logits=True)
        result.loss.backward()
    found = gradients(model)
    model.zero_grad()
    disable_packing(model)
    assert found.keys() == truth.gradients.keys()
    assert poison
    pairs = [(found[name], own) for name, own in truth.gradients.items()]
    return {
        "lengths": truth.lengths,
        "layers": sum("linear_attn.conv1d.weight" in name for name in found),
        "calls": [*CALLS],
        "delta_tokens": result.work.delta_tokens,
        "logits": max(float((x - own).abs().max()) for x, own in zip(by_sample(result), truth.logits, strict=True)),
        "loss": abs(float(result.loss / truth.loss) - 1),
        "gradient": max(float((x - own).abs().max() / own.abs().max()) for x, own in pairs),
    }


def branches(model: Any) -> Alone:
    """Samples that begin alike, and one that does not, each alone."""
    return alone_through(model, samples_of(model.config, DEEP, STRANGER))


def of_tree(model: Any, truth: Alone, damage: Callable[[], Any] = nullcontext) -> dict[str, Any]:
    """How far a row with a prefix tree is from its samples alone, and how it was computed."""
    row = shared(truth.samples)
    with damage():
        PackedStep(model)(row)  # states are tried out once a process
        CALLS.clear()
        result = PackedStep(model)(row, logits=True)
        result.loss.backward()
    found = gradients(model)
    model.zero_grad()
    disable_packing(model)
    return {
        "calls": len(CALLS),
        "depth": max(row.tree.depths) + 1,
        "nodes": len(row.tree.lengths),
        "delta_tokens": result.work.delta_tokens,
        "tokens": [result.work.physical_tokens, result.work.real_tokens],
        "logits": max(float((x - own).abs().max()) for x, own in zip(by_sample(result), truth.logits, strict=True)),
        "gradient": max(float((found[n] - own).abs().max() / own.abs().max()) for n, own in truth.gradients.items()),
    }


def untried() -> Any:
    """States are handed on without trying that out, which would see what is broken here."""
    return mock.patch.object(gated_delta, "hands_states", return_value=True)


@contextmanager
def no_states() -> Iterator[None]:
    """Every node starts from nothing."""
    honest = HandedState.update_recurrent_state

    def update(self: HandedState, state: torch.Tensor, *place: Any, **kwargs: Any) -> None:
        honest(self, 0 * state, *place, **kwargs)

    with untried(), mock.patch.object(HandedState, "update_recurrent_state", update):
        yield


@contextmanager
def no_taps() -> Iterator[None]:
    """What a convolution reads of a node's path is zero."""
    honest = SpacedNodes.split

    def split(self: SpacedNodes, tree_1tD: torch.Tensor) -> list[torch.Tensor]:
        (laid,) = honest(self, tree_1tD)
        places = self._derived("places", laid.device, self._places)
        return [torch.zeros_like(laid).index_copy(1, places, laid.index_select(1, places))]

    with untried(), mock.patch.object(SpacedNodes, "split", split):
        yield


@contextmanager
def behind_their_taps() -> Iterator[None]:
    """A node's recurrence runs over the tokens before it as well."""

    def cut(self: SpacedNodes) -> Any:
        return tuple(self.reach + length for length in self.lengths), tuple(range(len(self.nodes)))

    with untried(), mock.patch.object(SpacedNodes, "_cut", property(cut)):
        yield


@contextmanager
def refused_states() -> Iterator[None]:
    """As where transformers asks for something else."""
    with (
        mock.patch.dict(gated_delta_tree._HANDS, clear=True),
        mock.patch.object(HandedState, "update_recurrent_state", None),
    ):
        yield


BREAKAGES = {
    "no states": no_states,
    "no taps": no_taps,
    "behind their taps": behind_their_taps,
    "refused": refused_states,
}


def without(model: Any, truth: Alone, damage: Any) -> float:
    """How far the logits of samples after the first are from alone if part of the mechanism is missing."""
    with damage, torch.no_grad():
        result = PackedStep(model, StepConfig(slots=RULE))(pack(padded(truth.samples), rule=RULE), logits=True)
    disable_packing(model)
    return max(float((x - own).abs().max()) for x, own in zip(by_sample(result)[1:], truth.logits[1:], strict=True))


def padding_alone(model: Any) -> dict[str, Any]:
    """What a rank without samples computes."""
    nothing = torch.zeros(2, 5, dtype=torch.long)
    batch = PaddedBatch(input_ids=nothing, attention_mask=nothing, labels=nothing - 100)
    result = PackedStep(model, StepConfig(keep_empty=True, slots=SlotRule(pad_to=12)))(batch)
    result.loss.backward()
    disable_packing(model)
    learnt = [p.grad for name, p in model.named_parameters() if ".linear_attn." in name]
    model.zero_grad()
    return {
        "loss": result.loss.item(),
        "largest gradient": max(float("nan") if g is None else float(g.abs().max()) for g in learnt),
        "delta_tokens": result.work.delta_tokens,
    }


def biased(model: Any, truth: Alone) -> str:
    """What is said if a projection before the convolution gets a bias."""
    layer = gated_delta_layers(model)[0]
    projection = next(child for name, child in layer.named_children() if name.startswith("in_proj_qkv"))
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    said = refusal(model, truth)
    projection.bias = None
    return said


def refusal(model: Any, truth: Alone) -> str:
    """What the step says instead of computing."""
    try:
        PackedStep(model)(padded(truth.samples))
    except VlmpackError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        disable_packing(model)
    return "nothing"


if __name__ == "__main__":
    main(sys.argv[1:])
