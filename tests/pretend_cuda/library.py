"""Build the device once per environment: `device.cpp` against the headers that PyTorch's wheel brings."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DAT_PER_OPERATOR_HEADERS")


def torch_folder() -> Path:
    """The installed PyTorch, without importing it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def missing() -> str | None:
    """What this machine lacks to have the device; None: nothing."""
    torch = torch_folder()
    if sys.platform != "linux":
        return "the pretend one needs Linux"
    if [*(torch / "lib").glob("libtorch_cuda*")]:
        return "the pretend one needs a CPU build of PyTorch"
    if not (torch / "include" / "torch" / "library.h").is_file():
        return "the pretend one needs the headers of PyTorch"
    if shutil.which("g++") is None:
        return "the pretend one needs g++"
    return None


def built() -> Path:
    """The library, built now if this environment has none for this source and this PyTorch; about 10 s."""
    told = "\n".join((SOURCE.read_text(), version("torch"), *FLAGS))
    name = f"device-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    home = Path(sys.prefix) if os.access(sys.prefix, os.W_OK) else Path(tempfile.gettempdir())
    folder = home / f"pretend_cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the test run wait for it
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    torch, half = torch_folder(), library.with_suffix(".half")
    places = (f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}")
    command = ("g++", *FLAGS, *places, str(SOURCE), "-o", str(half), "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the pretend CUDA device does not compile with PyTorch {version('torch')}:\n{done.stderr}")
    half.rename(library)
