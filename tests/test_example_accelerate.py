"""The loop of accelerate under FSDP2 on two gloo processes: the losses of one that was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from test_example import EXAMPLES, run

CONFIGURATIONS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))


def losses_on_two_ranks(folder: Path, *arguments: str) -> list[str]:
    """The lines of its steps, targets and loss, of a model that is sharded."""
    launch = ["--config_file", str(EXAMPLES / "accelerate" / "fsdp2.yaml"), "--mixed_precision", "no"]
    on_cpus = str(Path(__file__).with_name("accelerate_on_cpus.py"))
    script = [on_cpus, str(EXAMPLES / "accelerate_loop.py"), "--output", str(folder), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *launch, "--main_process_port", "0", *script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *lines = done.stdout.strip().splitlines()
    assert first == "FSDP on 2 cpu ranks"
    return lines


@pytest.fixture
def on_one_rank(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[str], dict[str, torch.Tensor]]]:
    """Its lines and weights; it was stopped after the first epoch."""
    folder, lines = tmp_path_factory.mktemp("one"), list[str]()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for epochs in (1, 2):
        AcceleratorState._reset_state(reset_partial_state=True)
        words = ("--output", folder, "--accumulation", 4, "--epochs", epochs)
        first, *more = run("accelerate_loop.py", *words, folder=folder)
        assert first == "NO on 1 cpu ranks" and more
        lines += more
    yield lines, load_file(folder / "model.safetensors")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_that_was_stopped_between(
    on_one_rank: tuple[list[str], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """With accumulation, and gradients that are clipped: their norms are about 5, the limit is 1."""
    one, weights = on_one_rank
    two = losses_on_two_ranks(tmp_path, "--epochs", "2")
    for line, expected in zip(two, one, strict=True):
        (targets, loss), (same_targets, same_loss) = (text.split(" targets, loss ") for text in (line, expected))
        assert targets == same_targets
        assert float(loss) == pytest.approx(float(same_loss), rel=1e-4)
    ours = load_file(tmp_path / "model.safetensors")
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_configurations_are_read_by_accelerate(path: Path) -> None:
    settings = load_config_from_file(str(path))
    kind, name = settings.distributed_type.value, path.stem
    assert kind == {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(name, "DEEPSPEED")
    if kind == "FSDP":
        assert settings.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert settings.deepspeed_config["zero_stage"] == int(name.removeprefix("zero"))
        assert settings.deepspeed_config["gradient_accumulation_steps"] == 2  # the default of the example
