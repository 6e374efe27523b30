"""Two gloo processes on the CPU: every target weighs the same on whichever rank it is, and none is counted twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from trainer.packed_runs import fingerprint, fresh, planned, scene
from training import collator, descend, distance, lengths_of, loss_alone, losses_alone, receipts

from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def on_two_ranks(script, *arguments):
    """Run a script, named from this folder, on two gloo ranks, to its end."""
    on_ranks(Path(__file__).parent / script, *arguments, DS_ACCELERATOR="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both ranks left what they saw."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks("two_ranks.py", folder)
    return folder


@pytest.fixture
def ranks(folder):
    """(what rank 0 saw, each rank's weights)."""
    weights = [torch.load(folder / f"weights{rank}.pt") for rank in (0, 1)]
    return json.loads((folder / "result.json").read_text()), weights


def test_a_step_equals_one_step_on_all_samples(ranks):
    result, weights = ranks
    reference = tiny_model()
    expected = descend(reference, receipts(reference), size=4, steps=1)
    assert result["losses"] == pytest.approx(expected.losses, rel=1e-6)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(weights[0][name], p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights[0][name], weights[1][name])


def test_predictions_come_once_and_in_order(ranks):
    result, _ = ranks
    sums, counts = losses_alone(fresh(), receipts(tiny_model()))
    assert result["sample_targets"] == counts.tolist()
    assert result["sample_losses"] == pytest.approx((sums / counts).tolist(), rel=1e-6)
    assert result["metrics"]["eval_token_loss"] == pytest.approx(float(sums.sum() / counts.sum()), rel=1e-6)


def test_eval_loss_is_the_mean_over_all_targets_however_the_last_batches_are_filled_up(ranks):
    """Where ranks have too few samples for a batch, accelerate gives them the first ones again."""
    result, _ = ranks
    sums, counts = losses_alone(fresh(), receipts(tiny_model()))
    assert len(result["eval_losses"]) == 6
    for count, size, layout, loss in result["eval_losses"]:
        exact = float(sums[:count].sum() / counts[:count].sum())
        assert loss == pytest.approx(exact, rel=1e-6), (count, size, layout)


def test_trainers_own_evaluation_is_refused_before_its_first_batch(ranks):
    message, calls = ranks[0]["refused"]
    assert "HF Trainer's own evaluation over 2 ranks weighs the losses of packed batches wrongly" in message
    assert "use PackedTrainer of vlmpack.trainer" in message
    assert calls == 0


def test_ranks_resume_from_the_newest_checkpoint_that_is_whole_on_all_of_them(ranks):
    assert ranks[0]["resumed_from"] == ["checkpoint-3", "checkpoint-3"]


# ---------------------------------------------------------------------- planned rows and streams


@pytest.fixture
def packed(folder):
    """What each rank did on planned rows."""
    return [json.loads((folder / f"packed{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_end_together_on_an_odd_number_of_rows_and_share_every_sample_of_every_epoch(packed):
    one, other = (rank["planned"] for rank in packed)
    everything = sorted(lengths_of(scene()[1]))
    assert one["steps"] == other["steps"] == len(one["rows"]) == len(other["rows"])
    half = one["steps"] // 2
    assert one["rows"][:half] != one["rows"][half:]  # the guard: another epoch is another order
    for epoch in (slice(0, half), slice(half, None)):
        assert sorted(n for rank in (one, other) for row in rank["rows"][epoch] for n in row) == everything


def test_weights_are_equal_on_both_ranks_and_those_of_one_process_with_both_their_rows(packed, folder, tmp_path):
    assert packed[0]["planned"]["weights"] == packed[1]["planned"]["weights"]
    alone = planned(tmp_path, dropout=0.0, gradient_accumulation_steps=2, loss="square")
    before = {name: p.detach().clone() for name, p in alone.model.named_parameters()}
    alone.train()
    for name in ("losses", "loss/long", "loss/short"):
        assert len({*packed[0]["planned"][name]}) > 2
        assert packed[0]["planned"][name] == packed[1]["planned"][name]
        assert fingerprint(alone)[name] == pytest.approx(packed[0]["planned"][name], rel=1e-5)
    weights = torch.load(folder / "planned0.pt")
    assert any(not torch.allclose(weights[name], p) for name, p in before.items())
    for name, p in alone.model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-4, atol=1e-5)


def test_ranks_share_the_rows_of_a_stream_pass_after_pass(packed):
    one, other = (rank["streamed"] for rank in packed)
    assert one["steps"] == other["steps"] == 9
    assert one["weights"] == other["weights"]
    everything = sorted(lengths_of(scene()[1]))
    dealt = [[n for row in rank["rows"] for n in row] for rank in (one, other)]
    assert sorted(n for mine in dealt for n in mine[: len(everything) // 2]) == everything  # the first pass
    assert all(len(mine) > len(everything) // 2 for mine in dealt)


def test_trainer_evaluates_planned_rows_alike_on_both_ranks(packed):
    _, samples = scene()
    one, other = (rank["planned"]["metrics"] for rank in packed)
    for name, loss in (("loss", "square"), ("sample_loss", "sample"), ("token_loss", "token")):
        assert one[f"eval_{name}"] == other[f"eval_{name}"]
        with torch.no_grad():
            assert one[f"eval_{name}"] == pytest.approx(float(loss_alone(fresh(), samples, loss)), rel=1e-6)
    assert one["eval_num_samples"] == len(samples)


@pytest.mark.parametrize("case", ["ddp, few rows", "ddp, one row", "fsdp2, few rows", "fsdp2, one row"])
def test_every_sample_is_evaluated_once_and_every_rank_has_the_whole_answer(packed, case):
    """With one row for two ranks, one of them only keeps the other company."""
    model = tiny_model()
    samples = receipts(model)
    sums, counts = losses_alone(model, samples)
    one, other = (rank["evaluated"][case] for rank in packed)
    assert one == other
    assert one["sample_ids"] == list(range(7))
    assert one["losses"] == pytest.approx((sums / counts).tolist(), rel=1e-6)
    assert one["rows"][0] == one["rows"][1]
    assert (one["rows"][0] == 1) == ("one row" in case)
    assert one["real_tokens"] == sum(lengths_of(samples))


# ---------------------------------------------------------------------- TRL, ZeRO


def test_steps_of_grpo_are_those_of_the_padded_trainer(tmp_path):
    pytest.importorskip("trl", reason="needs TRL: pip install trl")
    on_two_ranks("../trl_runs.py", tmp_path)
    (losses, reference), (ours, weights) = (
        torch.load(tmp_path / f"{name}.pt") for name in ("GRPOTrainer", "PackedGRPOTrainer")
    )
    assert len(losses) == 2
    assert ours == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert distance(reference, weights) < 1e-5


def of_one_process(steps):
    """The same samples in one row a step: (losses, norms before clipping, weights)."""
    model = enable_packing(tiny_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    row, losses, norms = collator("packed")(receipts(model)), [], []
    for _ in range(steps):
        loss = model(**row).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ten_clipped_accumulated_and_resumed_steps(stage, tmp_path):
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")
    on_two_ranks("zero_two_ranks.py", stage, tmp_path)
    ours = torch.load(tmp_path / f"zero{stage}.pt")
    losses, norms, weights = of_one_process(10)
    assert ours["losses"] == pytest.approx(losses, rel=1e-4)
    assert min(norms) > 0.5  # the guard: gradients were clipped
    assert ours["norms"] == pytest.approx(norms, rel=1e-3)
    assert ours["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-2, atol=2e-4)
