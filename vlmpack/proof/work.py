"""Work that is counted as it is done: pairs of query and key, and moments in which the host waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.layout import HostSync, recorded_syncs

PROOF = Path(__file__).parent
HOME = PROOF.parent

_VARLEN = {"torch_attn::_varlen_attn": (3, 4), "flash_attn::_flash_attn_varlen_forward": (3, 4)}
"""Kernels that are given boundaries, and which arguments those of queries and keys are."""


# ---------------------------------------------------------------------- pairs


@final
@dataclass(kw_only=True)
class Pairs:
    """Pairs of query and key of the text model's attention, read off what its kernels were given."""

    computed: int = 0
    """Per head, over all calls; causal attention counts both halves."""
    dense: int = 0
    """Of these, those of a dense score matrix, where a mask hides most."""
    calls: int = 0
    """Calls of attention layers."""

    @property
    def a_layer(self) -> int | None:
        """Pairs that one layer computes; None: no kernel showed any."""
        return self.computed // self.calls if self.calls and self.computed else None


@contextmanager
def counted_pairs(attention: Iterable[nn.Module]) -> Iterator[Pairs]:
    """Count while these attention layers run, forward passes only."""
    pairs, inside = Pairs(), _Inside()

    def enter(*_: Any) -> None:
        inside.depth += 1
        pairs.calls += 1

    def leave(*_: Any) -> None:
        inside.depth -= 1

    handles = []
    for layer in attention:
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]
    try:
        with _Kernels(pairs, inside), _Functions(pairs, inside):
            yield pairs
    finally:
        for handle in handles:
            handle.remove()


@final
@dataclass
class _Inside:
    depth: int = 0


@final
class _Functions(TorchFunctionMode):
    """PyTorch's own attention, and softmax over a score matrix that somebody wrote out."""

    def __init__(self, pairs: Pairs, inside: _Inside) -> None:
        super().__init__()
        self._pairs, self._inside = pairs, inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside.depth:
            if func is F.scaled_dot_product_attention:
                query, key = args[0], args[1]
                self._pairs.computed += query.shape[0] * query.shape[-2] * key.shape[-2]
            elif func in (F.softmax, torch.softmax, torch.Tensor.softmax):
                *batch, _, queries, keys = args[0].shape
                self._pairs.computed += (batch[0] if batch else 1) * queries * keys
                self._pairs.dense += (batch[0] if batch else 1) * queries * keys
        return func(*args, **(kwargs or {}))


@final
class _Kernels(TorchDispatchMode):
    """Kernels that are given boundaries."""

    def __init__(self, pairs: Pairs, inside: _Inside) -> None:
        super().__init__()
        self._pairs, self._inside = pairs, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside.depth and (places := _VARLEN.get(func._schema.name)):
            queries, keys = (args[i].diff().long() for i in places)
            self._pairs.computed += int((queries * keys).sum())
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- waits


@final
@dataclass(kw_only=True)
class Waits:
    """Moments in which the host waited for the device, or would have."""

    ours: list[str] = field(default_factory=list)
    """Those in vlmpack's own code: the operation and the file."""
    others: int = 0
    """How many are in the model's own code."""

    def note(self, wait: HostSync) -> None:
        """One more. The line of the proof that calls `backward` is not meant: it names nobody's operation."""
        file = Path(wait.file)
        if file.is_relative_to(HOME) and not file.is_relative_to(PROOF):
            self.ours.append(f"{wait.operation} in {file.relative_to(HOME)}")
        else:
            self.others += 1


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Waits]:
    """Count while something runs: on CUDA PyTorch itself says when it waits; on a CPU, what would have to."""
    waits = Waits()
    with recorded_syncs(device) as recorded:
        try:
            yield waits
        finally:
            for wait in recorded:
                waits.note(wait)
