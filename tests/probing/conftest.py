"""Each sample alone, computed once for each tiny model: breaking packing does not change it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlmpack.probing import run
from vlmpack.probing.reference import ProbeSetup, compute_references, tree_references

_COMPUTED: dict[tuple[str, str], Any] = {}


@pytest.fixture
def shared_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly half of a probe is the samples alone, through a model without packing."""
    monkeypatch.setattr(run, "compute_references", lambda setup: _computed(compute_references, setup))
    monkeypatch.setattr(run, "tree_references", lambda setup: _computed(tree_references, setup))


def _computed(compute: Callable[[ProbeSetup], Any], setup: ProbeSetup) -> Any:
    model = setup.probed.model
    if any(module._forward_hooks for module in model.modules()):  # another model
        return compute(setup)
    key = hashlib.blake2b(repr((setup.probed.config, setup.probed.dtype)).encode())
    for name, tensor in model.state_dict().items():
        key.update(name.encode())
        key.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    place = compute.__name__, key.hexdigest()
    if place not in _COMPUTED:
        _COMPUTED[place] = compute(setup)
    return _COMPUTED[place]
