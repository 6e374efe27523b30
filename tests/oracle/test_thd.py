"""A model that takes boundaries itself gets exactly those of the samples, and its results are those of the samples
alone. The model is the one of `examples/thd_model.py`: the modules of a Qwen3-VL-MoE in Megatron-Bridge's layout."""

from __future__ import annotations

import importlib.util
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle.packed import collator_of, outcome_of, run_of
from tests.oracle.plain import CASES, Case, conversations, differences, encoded, gradients_of, in_one_batch
from vlmpack import SlotRule, ThdStep

EXPERTS = CASES[2]
EXAMPLE = Path(__file__).parents[2] / "examples" / "thd_model.py"


def thd_model(plain: Any) -> Any:
    """The example's model around the modules of a plain one."""
    spec = importlib.util.spec_from_file_location("thd_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ThdQwen3VLMoe(plain)


class Recorder(nn.Module):
    """Asks for boundaries and positions, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, torch.Tensor] = {}
        self.losses = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_q_padded: torch.Tensor,
        rope_cu_seqlens: torch.Tensor,
        moe_padding_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.given = {name: value for name, value in locals().items() if isinstance(value, torch.Tensor)}
        return self.losses.expand(*input_ids.shape)


def aux_loss_of_the_padded_batch(model: Any) -> float:
    samples = [encoded(EXPERTS, talk) for talk in conversations(EXPERTS)]
    batch = in_one_batch(samples, pad=EXPERTS.tokenizer.pad_token_id)
    with torch.no_grad():
        return model(**batch, output_router_logits=True, use_cache=False).aux_loss.item()


@pytest.mark.parametrize("slots", [None, SlotRule(multiple=8)], ids=["without gaps", "with gaps"])
def test_losses_and_log_probabilities_are_those_alone(slots: SlotRule | None) -> None:
    plain = EXPERTS.model()
    step = ThdStep(thd_model(plain), slots=slots, config=plain.config)
    result = step(collator_of(EXPERTS, "padded").collate(conversations(EXPERTS)))
    run = run_of(EXPERTS, "packed")
    seen = outcome_of(result, run.samples, dict(run.alone.gradients))
    assert differences(seen, run.alone) == []
    assert result.num_targets == sum(run.alone.targets)


@pytest.mark.parametrize("slots", [None, SlotRule(multiple=8)], ids=["without gaps", "with gaps"])
def test_every_gradient_is_that_of_the_samples_alone(slots: SlotRule | None) -> None:
    plain = EXPERTS.model()
    step = ThdStep(thd_model(plain), slots=slots, config=plain.config)
    result = step(collator_of(EXPERTS, "padded").collate(conversations(EXPERTS)))
    (result.loss_sum / result.num_targets).backward()
    run = run_of(EXPERTS, "packed")
    assert differences(outcome_of(result, run.samples, gradients_of(plain)), run.alone) == []


def test_routers_do_not_count_padding() -> None:
    """The model adds its load-balancing loss, that of the padded batch with its mask, whatever the gaps."""
    plain = EXPERTS.model()
    step = ThdStep(thd_model(plain), slots=SlotRule(multiple=64), config=plain.config)
    result = step(collator_of(EXPERTS, "padded").collate(conversations(EXPERTS)))
    expected = plain.config.text_config.router_aux_loss_coef * aux_loss_of_the_padded_batch(plain)
    assert result.loss.item() - run_of(EXPERTS, "packed").alone.loss == pytest.approx(expected, abs=2e-6)
    assert expected > 1e-3


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_boundaries_count_real_tokens_and_places_and_positions_restart_at_them(case: Case) -> None:
    model = Recorder()
    ThdStep(model, slots=SlotRule(multiple=8), config=case.model().config)(
        collator_of(case, "padded").collate(conversations(case))
    )
    run = run_of(case, "packed")
    slots = [-(-length // 8) * 8 for length in run.lengths]
    real, places = ([0, *accumulate(counts)] for counts in (run.lengths, slots))
    assert model.given["cu_seqlens_q"].tolist() == model.given["rope_cu_seqlens"].tolist() == real
    assert model.given["cu_seqlens_q_padded"].tolist() == places
    for i, (start, length) in enumerate(zip(places[:-1], run.lengths, strict=True)):
        positions = model.given["position_ids"].reshape(-1, places[-1])[-3:, start : start + length]
        assert positions.equal(run.alone.positions[i])
        assert model.given["input_ids"][0, start : start + length].equal(run.samples[i]["input_ids"][0])
        assert model.given["moe_padding_mask"][0, start : start + slots[i]].tolist() == [
            place >= length for place in range(slots[i])
        ]
