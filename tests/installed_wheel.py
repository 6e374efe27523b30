"""Try what a wheel installs, without extras, outside the repository: `make wheel` runs this in an environment that has
the wheel's base requirements and nothing else.

No test of pytest: nothing but the wheel and what it requires is there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

HEAVY = {"accelerate", "datasets", "matplotlib", "peft", "ray", "torchvision", "starlette", "pyarrow", "trl", "av"}
"""Packages that only extras bring."""
SECONDS = 0.05
"""Most that `import vlmpack` may take."""


def script(*words: str) -> str:
    """Run the installed script, and return what it prints."""
    path = Path(sys.executable).with_name("vlmpack")
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout


def verb(*words: str, status: int = 0) -> str:
    """Run a verb in this process, and return what it prints."""
    from typer.testing import CliRunner

    from vlmpack.cli import app

    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == status, (words, done.exit_code, done.output)
    return done.stdout + done.stderr


def check_import() -> None:
    """Importing vlmpack loads no torch, and takes no time."""
    code = "import sys, time; start = time.perf_counter(); import vlmpack; " + (
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(5)
    ]
    assert {torch for _, torch in runs} == {"False"}
    assert min(float(seconds) for seconds, _ in runs) < SECONDS, runs


def check_step() -> None:
    """A packed row, and the loss of each sample, with enable_packing and the step."""
    from vlmpack import PackedStep, VLMCollator, enable_packing
    from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

    processor = tiny_processor()
    collate = VLMCollator(processor, layout="packed").collate
    receipts = list(receipt_conversations(num=2, scale=0.35))
    model = enable_packing(tiny_model(processor=processor))
    step = PackedStep(model)
    packed = step(collate(receipts)).sample_losses
    alone = [step(collate([receipt])).sample_losses for receipt in receipts]
    assert all(abs(float(a - b)) < 1e-5 for a, (b,) in zip(packed, alone, strict=True))
    model(**collate(receipts).to_hf()).loss.backward()


def check_extras() -> None:
    """The base has no heavy packages, and a command that needs one says which extra brings it."""
    present = {package for package in HEAVY if importlib.util.find_spec(package)}
    assert not present, f"a base installation brings {present}"
    for extra, words in {
        "demo": ["demo"],
        "serve": ["serve", "--demo"],
        "data": ["pack", "synthetic", "rows", "--processor", "tiny", "--capacity", "900"],
    }.items():
        assert f"pip install 'vlmpack[{extra}]'" in verb(*words, status=2)


def main() -> None:
    """Run every check."""
    import vlmpack

    version = importlib.metadata.version("vlmpack")
    assert Path(vlmpack.__file__).is_relative_to(Path(sys.prefix).resolve()), f"{vlmpack.__file__} is not the wheel's"
    assert script("--version") == f"vlmpack {version}\n"
    assert files("vlmpack").joinpath("py.typed").is_file()
    check_import()
    check_extras()
    check_step()
    report = json.loads(script("doctor", "--probe", "tiny:qwen3", "--json"))
    assert report["healthy"] and report["probes"][0]["attention"] == "sdpa_segments"
    assert json.loads(verb("analyze", "synthetic", "--num", "5", "--processor", "tiny", "--json"))["samples"] == 5
    print(f"vlmpack {version}: the wheel works outside the repository")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
