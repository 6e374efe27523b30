"""Every way in which a host can wait for its device is recorded, and by which line; and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vlmpack.errors import LayoutError
from vlmpack.layout.device import nothing_on_host, require, to_device
from vlmpack.probing.host_syncs import HostSync, recorded_syncs

CPU = torch.device("cpu")
X = torch.arange(6.0)
MASK = X > 2
TIMES = torch.tensor([1, 0, 2, 1, 3, 1])


def waits_of(function: Callable[[], Any]) -> list[HostSync]:
    with recorded_syncs(CPU) as waits:
        function()
    return waits


def assigned(values: Any) -> torch.Tensor:
    x = X.clone()
    x[MASK] = values
    return x


WAITING: dict[str, tuple[str, Callable[[], Any]]] = {
    "x.item()": ("_local_scalar_dense", lambda: X.sum().item()),
    "bool(x)": ("_local_scalar_dense", lambda: bool(MASK.any())),
    "x[scalar tensor]": ("_local_scalar_dense", lambda: X[torch.tensor(1)]),
    "x[: scalar tensor]": ("_local_scalar_dense", lambda: X[: torch.tensor(2)]),
    "equal": ("equal", lambda: torch.equal(X, X)),
    "allclose": ("allclose", lambda: torch.allclose(X, X)),
    "nonzero": ("nonzero", lambda: X.nonzero()),
    "where": ("nonzero", lambda: torch.where(MASK)),
    "masked_select": ("masked_select", lambda: X.masked_select(MASK)),
    "bincount": ("bincount", lambda: TIMES.bincount()),
    "unique": ("_unique2", lambda: X.unique()),
    "unique of rows": ("unique_dim", lambda: X.unique(dim=0)),
    "unique_consecutive": ("unique_consecutive", lambda: X.unique_consecutive()),
    "repeat_interleave by a tensor": ("repeat_interleave", lambda: X.repeat_interleave(TIMES)),
    "indices repeated": ("repeat_interleave", lambda: torch.repeat_interleave(TIMES)),
    "x[mask]": ("index", lambda: X[MASK]),
    "x[:, mask]": ("index", lambda: X[None][:, MASK]),
    "x[mask] = y": ("index_put_", lambda: assigned(X[:3])),
    "tensor of numbers": ("copy in tensor", lambda: torch.tensor([1, 2], device=X.device)),
    "tensor of a number": ("copy in tensor", lambda: torch.tensor(1, device=X.device)),
    "as_tensor of numbers": ("copy in as_tensor", lambda: torch.as_tensor([1, 2], device=X.device)),
    "as_tensor of an array": ("copy in as_tensor", lambda: torch.as_tensor(np.ones(2), device=X.device)),
    "new_tensor": ("copy in new_tensor", lambda: X.new_tensor([1, 2])),
    "array to the device": ("copy in to", lambda: torch.from_numpy(np.ones(2)).to(X.device)),
    "numbers to the device": ("copy in to", lambda: torch.tensor([1]).to(device=X.device, dtype=X.dtype)),
    "to where another tensor is": ("copy in to", lambda: torch.arange(2).to(X)),
    "what is computed on the host": ("copy in to", lambda: torch.cat([torch.ones(2), torch.ones(3)]).argsort().to(X)),
    "copy_ from the host": ("copy in copy_", lambda: torch.empty_like(X).copy_(torch.ones(6))),
    "x[list]": ("copy in __getitem__", lambda: X[[1, 2]]),
    "x[:, array]": ("copy in __getitem__", lambda: X[None][:, np.array([1, 2])]),
    "x[tensor on the host]": ("copy in __getitem__", lambda: X[torch.tensor([1, 2])]),
    "x[list] = y": ("copy in __setitem__", lambda: X.clone().__setitem__([1, 2], 0.0)),
    "x.tolist()": ("copy in tolist", lambda: X.tolist()),
    "x.cpu()": ("copy in cpu", lambda: X.cpu()),
    'x.to("cpu")': ("copy in to", lambda: X.to("cpu")),
}

NOT_WAITING: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: X.cumsum(0) + 1,
    "x[index]": lambda: X[TIMES],
    "x[mask] = 0": lambda: assigned(0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "masked_scatter": lambda: X.masked_scatter(MASK, X),
    "where of three": lambda: torch.where(MASK, X, -X),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2),
    "repeat_interleave of a known size": lambda: X.repeat_interleave(TIMES, output_size=8),
    "a factory on the device": lambda: torch.arange(2, device=X.device) + torch.full((2,), 3.0, device=X.device),
    "numbers on the host": lambda: torch.tensor([1, 2], device="cpu").tolist() + torch.tensor([3]).cpu().tolist(),
    "another type of number": lambda: (X.to(torch.float64), torch.tensor([1]).to(torch.float64)),
    "an asynchronous copy": lambda: torch.tensor([1]).to(X.device, non_blocking=True).new_zeros(2).to(X),
    "our own asynchronous copy": lambda: X[to_device(np.array([1, 2]), X.device)],
    "x[1:, None]": lambda: X[1:, None],
}


@pytest.mark.parametrize("what", WAITING)
def test_what_waits_is_recorded_once(what: str) -> None:
    operation, function = WAITING[what]
    assert [wait.operation for wait in waits_of(function)] == [operation]


@pytest.mark.parametrize("what", NOT_WAITING)
def test_what_does_not_wait_is_not(what: str) -> None:
    assert waits_of(NOT_WAITING[what]) == []


def test_what_autograd_does_for_it_waits_too() -> None:
    x = X.clone().requires_grad_()
    picked = x[MASK].sum()
    assert [wait.operation for wait in waits_of(picked.backward)] == ["index_put"]


def test_what_is_recomputed_in_a_backward_pass_is_seen() -> None:
    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.tensor([2.0], device=x.device)).sin()

    def step() -> None:
        checkpoint(recomputed, X.clone().requires_grad_(), use_reentrant=False).backward(torch.ones_like(X))

    assert [wait.function for wait in waits_of(step)] == ["recomputed", "recomputed"]


def test_the_line_that_asked_is_named() -> None:
    def asks() -> None:
        F = torch.nn.functional
        F.one_hot(TIMES)  # PyTorch's own code asks for the largest value

    wait, *_ = waits_of(asks)
    assert (wait.file, wait.function) == (__file__, "asks")
    assert wait.place == f"{__file__}:{asks.__code__.co_firstlineno + 2} in asks"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("what", ["x[mask]", "x[mask] = y", "unique", "x[list]", "new_tensor", "x.tolist()"])
def test_cuda_waits_where_the_cpu_says_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("X", "MASK", "TIMES"):
        monkeypatch.setitem(globals(), name, globals()[name].cuda())
    before = torch.cuda.get_sync_debug_mode()
    with recorded_syncs(torch.device("cuda")) as waits:
        WAITING[what][1]()
    assert {wait.file for wait in waits} == {__file__}
    assert torch.cuda.get_sync_debug_mode() == before
    with recorded_syncs(torch.device("cuda")) as waits:
        for name in ("arithmetic", "x[mask] = 0", "masked_fill", "an asynchronous copy"):
            NOT_WAITING[name]()
    assert waits == []


@pytest.mark.parametrize("message", ["x" * 400, "é" * 200], ids=["ascii", "two bytes a character"])
def test_a_device_gets_a_message_that_cuda_accepts(message: str) -> None:
    with nothing_on_host():
        require(torch.tensor(True), message, LayoutError)  # conftest refuses what CUDA refuses
        with pytest.raises(RuntimeError, match=message[:100]):
            require(torch.tensor(False), message, LayoutError)


def test_the_host_raises_the_whole_message() -> None:
    message = "x" * 400
    with pytest.raises(LayoutError, match=f"^{message}$"):
        require(torch.tensor(False), message, LayoutError)
