"""Scripts on several gloo ranks: `on_ranks(script, folder)`; inside a script, `save_cases(folder, cases)`.

What torchrun does, but the ranks are forks of one process that has imported the script already: most of the time went
into importing PyTorch and transformers once a rank.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor


def on_ranks(script: Path, *arguments: Any, ranks: int = 2, **environment: str) -> None:
    """Run a script on so many ranks, to its end."""
    command = [sys.executable, "-W", "ignore", __file__, str(ranks), str(script), *map(str, arguments)]
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **fixed, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]


def save_cases(folder: Path, cases: Mapping[str, Callable[[], Any]]) -> None:
    """Compute every case together with the other ranks; rank 0 writes what it saw to FOLDER/CASE.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, compute in cases.items():
        seen = compute()
        if dist.get_rank() == 0:
            torch.save(seen, folder / f"{name}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def whole(tensor: Any) -> Any:
    """A tensor that ranks may have parts of."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(ranks: int, script: str, *arguments: str) -> int:
    """Fork the ranks and wait for them; the first that fails takes the others with it."""
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]  # this folder stays behind it
    runpy.run_path(script)  # what it imports
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    living = set()
    for rank in range(ranks):
        if not (child := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            runpy.run_path(script, run_name="__main__")
            return 0
        living.add(child)
    while living:
        child, status = os.wait()
        living.remove(child)
        if status:
            for other in living:
                os.kill(other, 9)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
