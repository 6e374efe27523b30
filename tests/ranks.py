"""Scripts on several gloo ranks of this machine: `on_ranks(script, folder)`.

What torchrun does, but the ranks are forks of one process that has imported the script already: most of the time went
into importing PyTorch and transformers once a rank.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def on_ranks(script: Path, *arguments: Any, ranks: int = 2, **environment: str) -> None:
    """Run a script on so many ranks, to its end."""
    command = [sys.executable, "-W", "ignore", __file__, str(ranks), str(script), *map(str, arguments)]
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **fixed, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]


def main(ranks: int, script: str, *arguments: str) -> int:
    """Fork the ranks and wait for them; the first that fails takes the others with it."""
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
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
