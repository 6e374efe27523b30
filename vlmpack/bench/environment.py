"""Where a figure was measured."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import vlmpack

PACKAGES = ("torch", "transformers", "numpy", "pillow")


def environment(device: str) -> dict[str, Any]:
    """Versions, device, threads and the commit of the source tree (None outside one), as JSON values."""
    return {
        "vlmpack": vlmpack.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor_name(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "system": sys.platform,
    }


def version_of(package: str) -> str | None:
    """The version of an installed package; None: it is not installed.

    What is imported already is asked itself: the build, such as "+cu132" of PyTorch, is not always in the metadata.
    """
    module = sys.modules.get(package.replace("-", "_"))
    if module is not None and (own := vars(module).get("__version__")) is not None:
        return str(own)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor_name() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit that is checked out, with "+" for changes on top of it."""
    root = Path(vlmpack.__file__).parent.parent
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes.strip())
