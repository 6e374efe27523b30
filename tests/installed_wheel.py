"""Try what a wheel installs, without extras, outside the repository: `make wheel` runs this in an empty environment.

No test of pytest: nothing but the wheel and what it brings is there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

HEAVY = {"accelerate", "datasets", "matplotlib", "peft", "ray", "torchvision", "starlette", "pyarrow"}
"""Packages that only extras bring."""


def command(*words: str, status: int = 0) -> str:
    """Run the installed command, and return what it prints."""
    path = Path(sys.executable).with_name("vlmpack")
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def check_import() -> None:
    """Importing vlmpack loads no torch, and takes no time."""
    code = "import sys, time; start = time.perf_counter(); import vlmpack; " + (
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    seconds, torch = min(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    )
    assert torch == "False"
    assert float(seconds) < 0.05, seconds


def check_base() -> None:
    """The base installation has no heavy extras, and says which one a missing part needs."""
    present = {package for package in HEAVY if importlib.util.find_spec(package)}
    assert not present, f"a base installation brings {present}"
    from vlmpack.data import open_dataset
    from vlmpack.errors import ConfigError

    Path("rows.parquet").write_bytes(b"")
    try:
        open_dataset("rows.parquet")
    except ConfigError as error:
        assert "pip install 'vlmpack[data]'" in str(error), error
    else:
        raise AssertionError("a parquet file was opened without the extra")


def check_step() -> None:
    """A packed row, and the loss of each sample."""
    from vlmpack import PackedStep, VLMCollator
    from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

    processor = tiny_processor()
    collate = VLMCollator(processor, layout="packed").collate
    receipts = list(receipt_conversations(num=2, scale=0.35))
    step = PackedStep(tiny_model(processor=processor))
    packed = step(collate(receipts)).sample_losses
    alone = [step(collate([receipt])).sample_losses for receipt in receipts]
    assert all(abs(float(a - b)) < 1e-5 for a, (b,) in zip(packed, alone, strict=True))


def main() -> None:
    """Run every check."""
    assert "vlmpack" not in {path.name for path in Path.cwd().iterdir()}, "run this outside the repository"
    version = importlib.metadata.version("vlmpack")
    assert version in command("--version")
    assert files("vlmpack").joinpath("py.typed").is_file()
    check_import()
    check_base()
    check_step()
    assert "sdpa_segments" in command("doctor")
    assert "exact" in command("doctor", "--probe")
    assert "vlmpack[" in command("demo", "--steps", "1", status=2)  # accelerate comes with an extra
    assert "tokens" in command("analyze", "synthetic", "--num", "5", "--processor", "tiny")
    print(f"vlmpack {version}: the wheel works outside the repository")


if __name__ == "__main__":
    started = time.perf_counter()
    main()
