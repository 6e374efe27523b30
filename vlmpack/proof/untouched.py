"""A model is probed where it is, and is afterwards what it was before, whatever happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vlmpack.model import (
    PackingState,
    StepConfig,
    disable_packing,
    enable_packing,
    find_model,
    is_packing,
    packing_state,
)

SMALL = 10_000_000
"""Weights up to which a model is computed by one thread."""


def settings_of(model: nn.Module) -> StepConfig | None:
    """The settings with which packing is enabled; None: it is not."""
    state = _packing_of(model)
    return None if state is None else state.config


def _packing_of(model: nn.Module) -> PackingState | None:
    return packing_state(find_model(model)) if is_packing(model) else None


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside: no packing, eval mode, no gradients, exact float32, no autocast; small models have one thread.
    Afterwards: everything as it was, bit for bit.

    Weights and the configuration are not written to at all. Buffers (in train mode some modules count in them), modes,
    gradients (the very tensors), packing and the random state of every device are put back.
    """
    packing = _packing_of(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (m, name, x, None if x is None else x.clone()) for m in model.modules() for name, x in m._buffers.items()
    ]
    cuda = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda), _exact_arithmetic(), _threads_for(model), torch.enable_grad():
        try:
            disable_packing(model)
            model.eval()
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for module, training in modes:
                module.training = training
            _put_back(buffers)
            disable_packing(model)
            if packing is not None:
                enable_packing(model, packing.config, parallel=packing.parallel)


@torch.no_grad()
def _put_back(buffers: Iterable[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]]) -> None:
    """The very tensors, with the values that they had."""
    for module, name, buffer, value in buffers:
        module._buffers[name] = buffer
        if buffer is not None and value is not None and not torch.equal(buffer, value):
            buffer.copy_(value)


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """CUDA rounds float32 to TF32 in convolutions, and in products where asked to; autocast rounds to less: more than
    packing may differ by."""
    before = torch.get_float32_matmul_precision()
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@contextmanager
def _threads_for(model: nn.Module) -> Iterator[None]:
    """One for a small model on a CPU: its operations are so short that threads mostly wait for each other, and where
    other programs keep the cores busy they wait ten times as long as they compute."""
    small = sum(p.numel() for p in model.parameters()) < SMALL and all(
        p.device.type == "cpu" for p in model.parameters()
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
