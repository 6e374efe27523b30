"""PackedTrainer under transformers' meshes: every step is that of one process, and checkpoints fit other meshes."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from trainer.mesh_runs import CONTINUED, STEPS, WHOLE, run_of, seen_of, trained
from trainer.packed_runs import fresh
from training import distance

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs left what they came to; four ranks first, whose checkpoint two ranks continue."""
    folder = tmp_path_factory.mktemp("meshes")
    fresh().save_pretrained(folder / "model")
    for ranks in (4, 2):
        on_ranks(Path(__file__).with_name("mesh_runs.py"), folder, ranks=ranks)
    torch.save(trained(folder, "alone from tp"), folder / "alone from tp.pt")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, dict]:
    """What one process comes to, with the rows of so many ranks in each step."""
    seen = {}
    for rows in (1, 2):
        run = run_of(folder, "alone", folder / f"alone{rows}", gradient_accumulation_steps=rows)
        run.train()
        seen[rows] = seen_of(run)
    return seen


@pytest.mark.parametrize("name", [*WHOLE, *CONTINUED])
def test_steps_losses_and_evaluation_are_those_of_one_process(folder: Path, alone: dict[int, dict], name: str) -> None:
    seen = torch.load(folder / f"{name}.pt", weights_only=False)
    expected = alone[2 if "fsdp" in name or "accumulated" in name else 1]
    assert max(expected["norms"]) > 0.5  # the guard: gradients were clipped
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert seen["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert len(seen["losses"]) == STEPS
    assert distance(seen["weights"], expected["weights"]) <= 1e-6
    for metric in ("eval_loss", "eval_sample_loss", "eval_num_samples"):
        assert seen["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-6)


def test_what_trainer_cannot_do_on_ranks_that_share_rows_is_refused(folder: Path) -> None:
    trains, evaluates, resumes = torch.load(folder / "refused.pt")
    for message in (trains, evaluates):
        assert "2 ranks share each batch, and Trainer deals batches to single ranks" in message
    assert "checkpoint-1 has no divided_optimizer: it was written without a mesh" in resumes
