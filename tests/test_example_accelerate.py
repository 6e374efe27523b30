"""The loop of accelerate under FSDP2 on two gloo processes: the losses of one, continued where it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGURATIONS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))


def losses(folder: Path, *arguments: str, ranks: int = 1) -> list[str]:
    """The lines of its steps, targets and loss; two ranks are sharded."""
    script = [str(EXAMPLES / "accelerate_loop.py"), "--output", str(folder), *arguments]
    if ranks == 2:
        launch = ["--config_file", str(EXAMPLES / "accelerate" / "fsdp2.yaml"), "--mixed_precision", "no"]
        on_cpus = str(Path(__file__).with_name("accelerate_on_cpus.py"))
        script = ["-m", "accelerate.commands.launch", *launch, "--main_process_port", "0", on_cpus, *script]
    done = subprocess.run(
        [sys.executable, *script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *lines = done.stdout.strip().splitlines()
    assert first == ("NO on 1 cpu ranks" if ranks == 1 else "FSDP on 2 cpu ranks")
    return lines


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Its lines and weights."""
    folder = tmp_path_factory.mktemp("one")
    lines = losses(folder, "--accumulation", "4", "--epochs", "2")
    return lines, load_file(folder / "model.safetensors")


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_and_go_on_where_they_were(
    on_one_rank: tuple[list[str], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """With accumulation, and gradients that are clipped: their norms are about 5, the limit is 1."""
    one, weights = on_one_rank
    first = losses(tmp_path, "--epochs", "1", ranks=2)
    rest = losses(tmp_path, "--epochs", "2", ranks=2)
    assert len(first) == len(rest) > 1
    for line, expected in zip(first + rest, one, strict=True):
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
