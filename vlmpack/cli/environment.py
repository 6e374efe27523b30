"""What this machine has: versions of the packages that matter, devices, and attention back-ends."""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch

from vlmpack.attention import AttentionCall, explain
from vlmpack.families import family_named
from vlmpack.machine import version_of
from vlmpack.model import FlaCall, uses_fla

PACKAGES = (
    "vlmpack",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "flash-attn",
    "fla-core",
    "causal-conv1d",
    "qwen-vl-utils",
    "torchvision",
)
IMPORTED = {
    "flash-attn": "flash_attn",
    "fla-core": "fla",
    "causal-conv1d": "causal_conv1d",
    "qwen-vl-utils": "qwen_vl_utils",
    "torchvision": "torchvision",
}
"""Packages that are often installed and yet do not import, and their modules."""
IMPORT_TIMEOUT_S = 120
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 128, 32, 8
"""The attention of the released 8B models, by which back-ends are judged."""


@final
@dataclass(frozen=True, kw_only=True)
class Version:
    """One package."""

    name: str
    """As `pip` knows it."""
    version: str | None
    """None: not installed."""
    problem: str | None = None
    """Why it is of no use although it is installed."""


@final
@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device."""

    type: str
    """"cpu" or "cuda"."""
    name: str
    """Its name for people."""


@final
@dataclass(frozen=True, kw_only=True)
class Serving:
    """Whether one back-end can serve one kind of call."""

    backend: str
    """Its name."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Element type of the call, or "any"."""
    reasons: tuple[str, ...]
    """Why it cannot; empty: it can."""


def versions() -> list[Version]:
    """Python and every package that vlmpack works with."""
    found = {name: version_of(name) for name in PACKAGES}
    tried = [name for name in IMPORTED if found[name]]
    with ThreadPoolExecutor() as pool:
        problems = dict(zip(tried, pool.map(import_problem, [IMPORTED[name] for name in tried]), strict=True))
    python = Version(name="python", version=platform.python_version())
    return [python, *(Version(name=name, version=found[name], problem=problems.get(name)) for name in PACKAGES)]


def import_problem(module: str) -> str | None:
    """The last line of what importing `module` raises; None: it imports.

    In a process of its own: a torchvision that does not fit torch registers half of its operators before it fails.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    return f"does not import: {(done.stderr.strip().splitlines() or ['it ended without a word'])[-1]}"


def devices() -> list[Device]:
    """The CPU, and CUDA devices if there are any."""
    cpu = Device(type="cpu", name=f"{platform.machine()}, {torch.get_num_threads()} threads")
    cuda = [
        Device(type="cuda", name=torch.cuda.get_device_name(i))
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return [cpu, *cuda]


def serving(device_types: list[str]) -> list[Serving]:
    """Every back-end's answer for calls in float32 and bfloat16 on these devices."""
    return [
        Serving(backend=name, device=device, dtype=str(dtype).removeprefix("torch."), reasons=tuple(reasons))
        for device in dict.fromkeys(device_types)
        for dtype in (torch.float32, torch.bfloat16)
        for name, reasons in explain(
            AttentionCall(device=device, dtype=dtype, head_dim=HEAD_DIM, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS)
        ).items()
    ]


def delta_serving(device_types: list[str]) -> list[Serving]:
    """Return whether flash-linear-attention serves the training of gated delta layers on these devices."""
    calls = {name: torch.device(name) for name in device_types}
    if not uses_fla(family_named("qwen3_5")):
        why = "transformers has not found it; rows are computed in batches of samples of like length"
        return [Serving(backend="fla", device=name, dtype="any", reasons=(why,)) for name in calls]
    reasons = {name: FlaCall.of(device, training=True).unsupported() for name, device in calls.items()}
    return [Serving(backend="fla", device=name, dtype="any", reasons=tuple(why)) for name, why in reasons.items()]
