"""The ranks of a service: processes, collective operations, mirrored calls, and a sharded base model (FSDP2).

    rank 0   row 0   row 2   row 4 ┐
    rank 1   row 1   row 3         ┘ gradients are summed once, after the last row; results go to all ranks

Every rank has the same plan and computes its rows. Objects go over a separate process group, which uses gloo on all
devices.

    rank 0 ──stdin──▶ rank 1      the pipe closes when rank 0 ends, however it ends; then rank 1 ends too
           ◀──exit──              if a rank fails, rank 0 ends; its state is on disk

Rank 0 starts the other ranks of its machine. Or torchrun starts all ranks, and its agent does the same. No rank
outlives another.

With a sharded base model, each rank keeps its shard of every layer. To compute a layer, a rank gathers it, and frees it
afterwards. So all ranks must run the same passes in the same order: a forward pass, and a backward pass if every rank
has one. A rank without a row runs an idle row with one token that does not count. Adapters are small and not sharded.
If one rank fails during a pass, the others wait for it forever; so the service ends, and its state is on disk.

    rank 0    HTTP ─ queue ─ Mirror ────┬── its own engine and sampler
                           calls        │
    rank 1    follow ◀──────────────────┴── an engine and a sampler with the same models

Rank 0 has the queue and the clients, and all other ranks mirror its calls. Each rank has the base model, or its shard
of it, and all client models; every rank takes the same optimizer step. Only rank 0 writes files; `load` reads the state
folder on every rank. Only rank 0 samples, unless the base model is sharded.

Commands are objects that rank 0 pickles and its own workers unpickle. They go over gloo, on 127.0.0.1 or the address
that torchrun sets. Nothing that a client sends is ever unpickled.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vlmpack.errors import ConfigError, RequestError, VlmpackError
from vlmpack.families.family import Family

log = logging.getLogger("vlmpack.service")

IDLE = timedelta(days=3650)
"""Maximum time that a rank waits for work."""
FAILED = 1
"""Exit status of a rank that cannot continue."""

Result = TypeVar("Result")
Gradients = list[torch.Tensor | None]
"""The gradient of each parameter, in order; None: the parameter has no gradient."""


@final
class Ranks:
    """The ranks of a data-parallel engine, seen from this rank."""

    def __init__(self) -> None:
        """Join the default process group, which must be initialized."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control: Any = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, value: Any) -> None:
        """Send an object from rank 0 to all others, which call `receive`."""
        dist.broadcast_object_list([value], src=0, group=self._control)

    def receive(self) -> Any:
        """Wait for an object from rank 0 and return it.

        Raises:
            ConnectionError: the connection to rank 0 is lost.
        """
        values = [None]
        try:
            dist.broadcast_object_list(values, src=0, group=self._control)
        except RuntimeError as error:
            raise ConnectionError("rank 0 is gone") from error
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def spread(self, value: Result) -> Result:
        """Return the value of rank 0, on every rank."""
        if self.rank:
            return self.receive()
        self.send(value)
        return value

    def together(self, call: Callable[[], Result], *, name: str) -> Result:
        """Make a call that every rank makes, and return this rank's result if all ranks succeeded.

        Raises:
            Exception: all ranks raised the same error.
            RuntimeError: some ranks failed.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        messages = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if all(message is None for message in messages):
            return result
        if error is not None and all(message == messages[0] for message in messages):
            raise error
        raise RuntimeError(f"{name} failed: " + "; ".join(f"rank {r}: {m}" for r, m in enumerate(messages) if m))

    def sum(self, gradients: Gradients | None, parameters: Sequence[torch.Tensor]) -> Gradients | None:
        """Return the sum of the ranks' gradients.

        A parameter without a gradient on any rank has none in the sum.

        Args:
            gradients: this rank's gradients; None: this rank computed none.
            parameters: parameters of the model; they give the gradients' shapes.
        """
        mine = [gradient is not None for gradient in gradients or [None] * len(parameters)]
        there = [any(rank) for rank in zip(*self.gather(mine), strict=True)]
        if not any(there):
            return None
        ours = gradients or [None] * len(parameters)
        summed: Gradients = [
            (torch.zeros_like(parameter) if gradient is None else gradient.contiguous()) if is_there else None
            for gradient, parameter, is_there in zip(ours, parameters, there, strict=True)
        ]
        sums = [dist.all_reduce(gradient, async_op=True) for gradient in summed if gradient is not None]
        for one in filter(None, sums):
            one.wait()
        return summed


def end(status: int) -> NoReturn:
    """End this process at once.

    The state is on disk, and a process group cannot be destroyed when its other ranks are gone.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


# ---------------------------------------------------------------------- mirrored calls


ON_ALL = {
    "engine": ("create", "create_from", "free", "load", "optim_step", "forward_backward"),
    "work": ("run_row", "cancel"),
    "sampler": ("close", "add", "step"),
}
"""Methods that every rank calls: of the engine, because they change a model (the queue has drawn all seeds before); of
a `RowWork`; and of the sampler of a sharded base model, because all ranks run its passes. All others run on rank 0."""

Call = tuple[str | int, str, tuple[Any, ...], dict[str, Any]]
"""A call that every rank makes: the owner of the method ("engine", "sampler", or the number of a `RowWork`), the
method, its positional and its keyword arguments."""


@final
class Rank:
    """The engine, the sampler and the running `RowWork`s of one rank."""

    def __init__(self, ranks: Ranks, *, engine: Any, sampler: Any) -> None:
        self.ranks = ranks
        self._owners: dict[str | int, Any] = {"engine": engine, "sampler": sampler}
        self._begun = 0
        """Number of `RowWork`s started. It is the key of the latest one, and the same on every rank."""

    def run(self, call: Call) -> Any:
        """Make a call on this rank, as all ranks do.

        Raises:
            RequestError: a client's mistake, which all ranks found.
            RuntimeError: the call failed on some ranks.
        """
        self._begun += call[1] == "forward_backward"
        return self.ranks.together(lambda: self._call(*call), name=call[1])

    def _call(self, of: str | int, method: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        result = getattr(self._owners[of], method)(*arguments, **settings)
        if method == "forward_backward":
            done = [key for key, work in self._owners.items() if isinstance(key, int) and not work.rows_left]
            for key in done:
                del self._owners[key]
            self._owners[self._begun] = result
        return result

    def mirror(self, of: str) -> Any:
        """Return a proxy of the engine or the sampler, for rank 0; the other ranks call `follow`."""
        return Mirror(self, of, self._owners[of], ON_ALL[of])

    def call_on_all(self, call: Call) -> Any:
        """Make a call on every rank; for rank 0."""
        self.ranks.send(call)
        result = self.run(call)
        return Mirror(self, self._begun, result, ON_ALL["work"]) if call[1] == "forward_backward" else result

    def follow(self) -> None:
        """Make the calls of rank 0 until it sends None. Called by every other rank.

        Raises:
            ConnectionError: the connection to rank 0 is lost.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals all ranks: rank 0 drains, stops the others
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while (call := self.ranks.receive()) is not None:
            try:
                self.run(call)
            except (RequestError, RuntimeError, OSError):
                continue  # rank 0 reports it to its queue


@final
class Mirror:
    """A proxy on rank 0 that calls some methods of an object on every rank, and all others only on rank 0."""

    def __init__(self, rank: Rank, of: str | int, own: Any, on_all: tuple[str, ...]) -> None:
        self._rank, self._of, self._own, self._on_all = rank, of, own, on_all

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._on_all else getattr(self._own, name)

    def _call(self, method: str, *arguments: Any, **settings: Any) -> Any:
        return self._rank.call_on_all((self._of, method, arguments, settings))


# ---------------------------------------------------------------------- processes


LAUNCHED = "VLMPACK_LAUNCHED"
"""Environment variable of processes that `Launched` started. Their standard input is a pipe from rank 0."""
LAST_SECONDS = 10.0
"""Seconds for ranks to end after rank 0 stopped them."""


@final
class Launched:
    """The other ranks of this machine, started by this process. If one of them fails, this process ends."""

    def __init__(self, workers: int, arguments: Sequence[str]) -> None:
        """Start the other ranks; this process continues as rank 0.

        Args:
            workers: number of ranks, including this one.
            arguments: arguments of the `vlmpack` command that the others run too, e.g. `sys.argv[1:]`.
        """
        self.store = TCPStore("127.0.0.1", 0, workers, is_master=True, wait_for_workers=False)
        """The store through which the ranks find each other."""
        threads = str(max(1, (os.cpu_count() or 1) // workers))
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(int(threads))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(workers)}
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **shared, LAUNCHED: "1"}
        self._watches = []
        for rank in range(1, workers):
            # a separate session: Ctrl-C only reaches rank 0, which stops the others
            other = subprocess.Popen(
                [sys.executable, "-m", "vlmpack.cli", *arguments],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            watch = threading.Thread(target=_end_with, args=(rank, other), name=f"vlmpack-rank-{rank}", daemon=True)
            watch.start()
            self._watches.append(watch)
        os.environ.update(shared, RANK="0", LOCAL_RANK="0")

    def wait(self) -> None:
        """Wait until the other ranks have ended, after rank 0 stopped them."""
        for watch in self._watches:
            watch.join(LAST_SECONDS)


def join(launched: Launched | None = None) -> Ranks | None:
    """Join the other ranks; None: this process runs alone.

    There are other ranks if this process launched them, or was itself launched by rank 0 or torchrun. The local rank
    selects the GPU.

    Args:
        launched: the other ranks, if this process started them.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    store = None if launched is None else launched.store
    if LAUNCHED in os.environ:
        threading.Thread(target=_end_with_rank_0, name="vlmpack-rank-0", daemon=True).start()
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    return join_at(store, rank=int(os.environ["RANK"]), size=size, gpu=int(os.environ["LOCAL_RANK"]))


def join_at(store: TCPStore | None, *, rank: int, size: int, gpu: int) -> Ranks:
    """Join the other ranks.

    Args:
        store: the store through which the ranks find each other; None: use torchrun's environment variables.
        rank: rank of this process.
        size: number of ranks.
        gpu: index of this rank's GPU, if there are GPUs.
    """
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(gpu)
    place: dict[str, Any] = {} if store is None else {"store": store, "rank": rank}
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", world_size=size, **place)
    return Ranks()


def _end_with(rank: int, other: subprocess.Popen[bytes]) -> None:
    """End this process if another rank fails. A rank that rank 0 stopped exits with status 0."""
    if status := other.wait():
        log.error("rank %d ended with status %d, so the service ends; its state is kept: start it again", rank, status)
        end(FAILED)


def _end_with_rank_0() -> None:
    """End this process when rank 0 is gone, because its end of the pipe closes then."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    end(FAILED)


# ---------------------------------------------------------------------- a sharded base model


LEAST_TORCH = (2, 13)
"""The first PyTorch version whose FSDP2 can discard a forward pass that has no backward pass."""


@final
class Sharding:
    """This rank's view of the sharded base model."""

    def __init__(self, model: Any, family: Family, ranks: Ranks, *, device: str) -> None:
        """Shard a model in place, layer by layer, and move it to its device.

        Args:
            model: frozen, with packing enabled for several ranks.
            family: family of the model.
            ranks: the ranks to shard over.
            device: device type of the ranks.

        Raises:
            ConfigError: PyTorch is too old.
        """
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LEAST_TORCH:
            least = ".".join(map(str, LEAST_TORCH))
            raise ConfigError(f"--shard needs PyTorch {least} or newer, not {torch.__version__}; leave it out")
        # the warning is about in-place changes of a pass's outputs, and nothing here makes any
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        self._model, self._ranks = model, ranks
        mesh = init_device_mesh(device, (ranks.size,))
        layers = family.language_model(model).get_submodule("layers").children()
        for part in (*layers, *family.vision_blocks(model), model):
            fully_shard(part, mesh=mesh)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Enclose passes that all ranks run alike.

        On exit, free what FSDP2 keeps of forward passes that had no backward pass. A `VlmpackError` is raised on every
        rank before its passes, so it propagates. Any other error ends the process.
        """
        try:
            yield
        except VlmpackError:
            raise
        except Exception:
            log.exception("rank %d failed amid a pass that all ranks run, so the service ends", self._ranks.rank)
            end(FAILED)
        self._model.reset_iter_state()

    def all_agree(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return all(self._ranks.gather(value))
