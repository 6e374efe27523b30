"""Every way in which a host can wait for its device is recorded, and by which line; and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_syncs import HostSync, recorded_syncs

from vlmpack.errors import LayoutError
from vlmpack.layout.device import nothing_on_host, require

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
    "x[scalar tensor]": ("_local_scalar_dense", lambda: X[torch.tensor(1)]),
    "equal": ("equal", lambda: torch.equal(X, X)),
    "nonzero": ("nonzero", lambda: X.nonzero()),
    "masked_select": ("masked_select", lambda: X.masked_select(MASK)),
    "bincount": ("bincount", lambda: TIMES.bincount()),
    "unique": ("_unique2", lambda: X.unique()),
    "unique_consecutive": ("unique_consecutive", lambda: X.unique_consecutive()),
    "repeat_interleave by a tensor": ("repeat_interleave", lambda: X.repeat_interleave(TIMES)),
    "indices repeated": ("repeat_interleave", lambda: torch.repeat_interleave(TIMES)),
    "x[mask]": ("index", lambda: X[MASK]),
    "x[mask] = y": ("index_put_", lambda: assigned(X[:3])),
}

NOT_WAITING: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: X.cumsum(0) + 1,
    "x[index]": lambda: X[TIMES],
    "x[mask] = 0": lambda: assigned(0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "masked_scatter": lambda: X.masked_scatter(MASK, X),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2),
    "repeat_interleave of a known size": lambda: X.repeat_interleave(TIMES, output_size=8),
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


def test_the_line_that_asked_is_named() -> None:
    def asks() -> None:
        F = torch.nn.functional
        F.one_hot(TIMES)  # PyTorch's own code asks for the largest value

    wait, *_ = waits_of(asks)
    assert (wait.line.filename, wait.line.name) == (__file__, "asks")
    assert wait.line.lineno == asks.__code__.co_firstlineno + 2


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("what", ["x[mask]", "x[mask] = y", "unique"])
def test_cuda_waits_where_the_cpu_says_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("X", "MASK", "TIMES"):
        monkeypatch.setitem(globals(), name, globals()[name].cuda())
    before = torch.cuda.get_sync_debug_mode()
    with recorded_syncs(torch.device("cuda")) as waits:
        WAITING[what][1]()
    assert {wait.line.filename for wait in waits} == {__file__}
    assert torch.cuda.get_sync_debug_mode() == before
    with recorded_syncs(torch.device("cuda")) as waits:
        for name in ("arithmetic", "x[mask] = 0", "masked_fill"):
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
