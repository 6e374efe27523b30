"""The processes of a service on several ranks: rank 0 starts the others of its machine, or torchrun starts all.

    rank 0 ──stdin──▶ rank 1      its end of the pipe closes with rank 0, however that ends: then rank 1 ends too
           ◀──exit──              a rank that fails ends rank 0, whose state is on the disk

None outlives another. Under torchrun its agent does the same.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from vlmpack.service.ranks import FAILED, Ranks, end

log = logging.getLogger("vlmpack.service")

LAUNCHED = "VLMPACK_LAUNCHED"
"""Variable of processes that `launch` started, whose standard input is a pipe from rank 0."""
LAST_SECONDS = 10.0
"""Time that ranks which rank 0 stopped have to end."""


@final
class Launched:
    """The other ranks of this machine, which this process started; it ends if one of them fails."""

    def __init__(self, workers: int, arguments: Sequence[str]) -> None:
        """Start them; this process goes on as rank 0.

        Args:
            workers: ranks, this one included.
            arguments: of the `vlmpack` command that the others run too, such as `sys.argv[1:]`.
        """
        self.store = TCPStore("127.0.0.1", 0, workers, is_master=True, wait_for_workers=False)
        """Where the ranks find each other."""
        threads = str(max(1, (os.cpu_count() or 1) // workers))
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(int(threads))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(workers)}
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **shared, LAUNCHED: "1"}
        self._watches = []
        for rank in range(1, workers):
            # a session of its own: Ctrl-C is for rank 0, which stops the others
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
        """Wait until they have ended; rank 0 has stopped them."""
        for watch in self._watches:
            watch.join(LAST_SECONDS)


def join(launched: Launched | None = None) -> Ranks | None:
    """Join the other ranks, if this process launched them, or was launched by one or by torchrun; None: it is alone.

    A GPU is chosen by the local rank.

    Args:
        launched: the others, if this process started them.
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
        store: where they find each other; None: where the variables of torchrun say.
        rank: of this process.
        size: number of ranks.
        gpu: number of this rank's GPU, if there are any.
    """
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(gpu)
    place: dict[str, Any] = {} if store is None else {"store": store, "rank": rank}
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", world_size=size, **place)
    return Ranks()


def _end_with(rank: int, other: subprocess.Popen[bytes]) -> None:
    """End this process if another rank fails; one that rank 0 stopped ends with 0."""
    if status := other.wait():
        log.error("rank %d ended with status %d, so the service ends; its state is kept: start it again", rank, status)
        end(FAILED)


def _end_with_rank_0() -> None:
    """End this process when rank 0 is gone, whose end of the pipe closes then."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    end(FAILED)
