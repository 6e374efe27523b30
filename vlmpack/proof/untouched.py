"""A model is probed where it is, and is afterwards what it was before, whatever happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vlmpack.step import StepConfig, disable_packing, enable_packing, find_model, is_packing
from vlmpack.step.attach import packing_state


def settings_of(model: nn.Module) -> StepConfig | None:
    """The settings with which packing is enabled; None: it is not."""
    return packing_state(find_model(model)).config if is_packing(model) else None


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside: no packing, eval mode, no gradients, exact float32. Afterwards: everything as it was, bit for bit.

    Weights, buffers and the configuration are not written to at all. Modes, gradients (the very tensors), packing and
    the random state of every device are put back.
    """
    settings = settings_of(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    cuda = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda), _exact_arithmetic(), torch.enable_grad():
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
            disable_packing(model)
            if settings is not None:
                enable_packing(model, settings)


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """CUDA rounds float32 to TF32 in convolutions, and in products where asked to: more than packing may differ by."""
    before = torch.get_float32_matmul_precision()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
