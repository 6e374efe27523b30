"""Each sample alone, computed once for each tiny model: breaking packing does not change it."""

from __future__ import annotations

import hashlib

import pytest
import torch

from vlmpack.probing import run
from vlmpack.probing.reference import ProbeSetup, References, compute_references

_COMPUTED: dict[str, References] = {}


@pytest.fixture
def shared_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly half of a probe is the samples alone, through a model without packing."""
    monkeypatch.setattr(run, "compute_references", _references)


def _references(setup: ProbeSetup) -> References:
    model = setup.probed.model
    if any(module._forward_hooks for module in model.modules()):  # another model
        return compute_references(setup)
    key = hashlib.blake2b(repr((setup.probed.config, setup.probed.dtype)).encode())
    for name, tensor in model.state_dict().items():
        key.update(name.encode())
        key.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if key.hexdigest() not in _COMPUTED:
        _COMPUTED[key.hexdigest()] = compute_references(setup)
    return _COMPUTED[key.hexdigest()]
