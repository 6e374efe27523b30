"""The pretend device is as strict as CUDA: each of its rules is broken here, and seen."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from waiting import waits_are_errors

ON_A_REAL_ONE = torch.cuda.is_available() and "Pretend" not in torch.cuda.get_device_name()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON_A_REAL_ONE, reason="of the pretend device")]


def ones(*shape: int, **more: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **more)


# ---------------------------------------------------------------------- devices and memory


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x.dot(torch.ones(3)),
        lambda x: torch.where(x > 0, x, torch.ones(3)),
        lambda x: x.masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
        lambda x: torch.nn.functional.embedding(torch.tensor([0]), x[:, None]),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: torch.ones(3)[x.long()],
    ],
)
def test_tensors_of_two_devices_do_not_meet(mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(ones(3))


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert ones(3).new_empty(2, 3, dtype=torch.bfloat16).isnan().all()


def test_memory_runs_out_and_comes_back() -> None:
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + 1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == free
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    del (kept := [ones(1 << 20)])[:]
    assert not kept
    assert torch.cuda.max_memory_allocated() - before == 4 << 20


def test_a_process_that_was_forked_has_no_device() -> None:
    child = os.fork()
    if child == 0:
        try:
            torch.empty(3, device="cuda")
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_backward_pass_runs_in_a_thread_of_the_device() -> None:
    threads = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        return x.sin()

    x = ones(3, requires_grad=True)
    checkpoint(noted, x, use_reentrant=False).sum().backward()
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
    assert torch.equal(x.grad, x.cos())


# ---------------------------------------------------------------------- waiting

MASK = [True, False, True]
WAITING = {
    "a value": lambda x: x.sum().item(),
    "a branch": lambda x: bool(x.any()),
    "a mask as an index": lambda x: x[x > 0],
    "values under a mask": lambda x: x.masked_select(x > 0),
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "a copy to the device": lambda x: torch.ones(3).to("cuda"),
    "a copy from the device": lambda x: x.cpu(),
    "numbers": lambda x: torch.tensor([1, 2], device="cuda"),
    "equality": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_makes_the_host_wait_is_seen(what: str) -> None:
    x = ones(3)
    with waits_are_errors(), pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        WAITING[what](x)


def test_what_does_not_is_not() -> None:
    x, pinned = ones(3), torch.ones(3).pin_memory()
    with waits_are_errors():
        x[x > 0] = 0
        x.repeat_interleave(x.long() + 1, output_size=3).masked_fill(x > 0, 1.0)
        pinned.to("cuda", non_blocking=True).to("cpu", non_blocking=True)
        torch.zeros(3, device="cuda") + x[1:2]


def test_a_wait_in_a_backward_pass_is_seen() -> None:
    y = ones(3, requires_grad=True)[torch.tensor(MASK).cuda()].sum()
    with waits_are_errors(), pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        y.backward()


def test_a_copy_that_is_not_waited_for_has_not_arrived() -> None:
    arrived = ones(3).to("cpu", non_blocking=True)
    assert arrived.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(arrived, torch.ones(3))


def test_pinned_memory_is_not_written_while_it_is_copied() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(3).is_pinned()
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.to("cuda", non_blocking=True)
    pinned += 1
    with pytest.raises(RuntimeError, match="pinned memory was written"):
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- CUDA's kernels


def test_an_assertion_takes_254_bytes() -> None:
    torch.ops.aten._assert_async.msg(ones((), dtype=torch.bool), "x" * 254)
    with pytest.raises(RuntimeError, match="Message length must be smaller than 255"):
        torch.ops.aten._assert_async.msg(ones((), dtype=torch.bool), "x" * 255)


def qkv(rows: int, **more: Any) -> list[torch.Tensor]:
    settings = {"dtype": torch.bfloat16, **more}
    return [torch.randn(rows, 4, 16, device="cuda", requires_grad=True, **settings) for _ in "qkv"]


def boundaries(*cu_seqlens: int) -> torch.Tensor:
    return torch.tensor(cu_seqlens, dtype=torch.int32, device="cuda")


def test_varlen_attention_is_that_of_each_sequence() -> None:
    q, k, v = qkv(9)
    out = varlen_attn(q, k, v, boundaries(0, 4, 9), boundaries(0, 4, 9), 5, 5, window_size=(-1, 0))
    out.float().sin().sum().backward()
    low = [x.detach().float().requires_grad_() for x in (q, k, v)]
    for start, stop in ((0, 4), (4, 9)):
        part = [x[start:stop].transpose(0, 1) for x in low]
        truth = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1)
        truth.sin().sum().backward()
        torch.testing.assert_close(out[start:stop].float(), truth, rtol=0, atol=1e-2)
    for ours, exact in zip((q, k, v), low, strict=True):
        torch.testing.assert_close(ours.grad.float(), exact.grad, rtol=0, atol=5e-2)


def test_rows_beyond_the_last_boundary_are_not_written() -> None:
    q, k, v = qkv(9)
    out = varlen_attn(q, k, v, boundaries(0, 4, 7), boundaries(0, 4, 7), 4, 4)
    out.sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert x[7:].isnan().all()
        assert x[:7].isfinite().all()


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (lambda: (*qkv(5, dtype=torch.float32), boundaries(0, 5), boundaries(0, 5), 5, 5), "fp16 and bf16"),
        (lambda: (*qkv(5), boundaries(0, 5).long(), boundaries(0, 5), 5, 5), "int32"),
        (lambda: (*qkv(5), boundaries(0, 5), boundaries(0, 5), 4, 5), "leave out the longest"),
        (lambda: (*qkv(5), boundaries(0, 6), boundaries(0, 6), 6, 6), "end behind"),
        (lambda: ([x[..., :12] for x in qkv(5)]), "multiple of 8"),
    ],
)
def test_the_varlen_kernel_refuses(given: Callable[[], Any], refusal: str) -> None:
    arguments = given()
    if len(arguments) == 3:
        arguments = (*arguments, boundaries(0, 5), boundaries(0, 5), 5, 5)
    with pytest.raises(RuntimeError, match=refusal):
        varlen_attn(*arguments)
