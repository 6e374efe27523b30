"""Calls that an enabled model computes as the plain model does, and a warning where training then pays for padding.

generate()                    plain, whatever its steps look like
forward, cannot be packed     plain: a cache, embeddings, attention weights
model.model(...)              plain: it never comes to the forward of the enabled model
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmpack.errors import UnpackedWarning
from vlmpack.layout import on_host, outside_graph

_generating: ContextVar[nn.Module | None] = ContextVar("vlmpack_generating", default=None)
_passed_on: ContextVar[bool] = ContextVar("vlmpack_passed_on", default=False)
_done: set[str] = set()
"""Reasons that were given; and those for which a mask on a device was read, which makes the host wait."""

PAST_THE_FORWARD = (
    "a part of the model was called directly (model.model(...), as trainers with a loss of their own do), past the "
    "forward that packs. Call the model itself: logits_to_keep and output_hidden_states come packed too"
)
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parents[1]))
"""vlmpack, and where PyTorch is installed, beside transformers and trainers."""


def plain_generate(base: Any) -> Callable[..., Any]:
    """`generate` of a model class whose forward passes go to the model's own forward."""

    @functools.wraps(base.generate)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        token = _generating.set(self)
        try:
            return base.generate(self, *args, **kwargs)
        finally:
            _generating.reset(token)

    return generate


def is_generating(model: nn.Module) -> bool:
    """Whether the forward pass is a step of this model's `generate`."""
    return _generating.get() is model


@contextmanager
def passed_on() -> Iterator[None]:
    """Surround a forward pass that the enabled model passes on to the model's own."""
    token = _passed_on.set(True)
    try:
        yield
    finally:
        _passed_on.reset(token)


@outside_graph
def warn_past_the_forward(mask: Any) -> None:
    """Warn of padding that reaches a layer in training by a call that the enabled model's forward never saw.

    Args:
        mask: what the layer's attention was given: [B, S], or [B, 1, S, S] boolean or to be added.
    """
    if not _passed_on.get():
        warn_of_padding(mask, PAST_THE_FORWARD)


def warn_of_padding(mask: Any, reason: str) -> None:
    """Warn once that padding is computed, and say why. A mask on a device is read at the first call only."""
    if reason in _done or not torch.is_grad_enabled() or not isinstance(mask, torch.Tensor):
        return
    if not on_host(mask):
        _done.add(reason)
    if _has_padding(mask.detach()):
        _done.add(reason)
        message = f"nothing is packed in this training step, so its padding is computed too: {reason}"
        warnings.warn(message, UnpackedWarning, stacklevel=_callers_level())


def _has_padding(mask: torch.Tensor) -> bool:
    """A causal mask hides nothing from the last query."""
    last = mask[..., -1, :] if mask.ndim > 2 else mask
    return bool((last < 0).any() if last.is_floating_point() else (last == 0).any())


def _callers_level() -> int:
    """`stacklevel`, for the function above, of the first code that belongs to no library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level
