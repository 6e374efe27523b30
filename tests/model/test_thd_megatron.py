"""Megatron-Core's own GPTModel behind ThdStep: losses and gradients of each sample alone, in the batch layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron_models import VOCABULARY, gpt_model, on_a_cpu, one_process
from ranks import on_ranks

from vlmpack.layout import PaddedBatch, SlotRule
from vlmpack.layout.batch import IGNORE
from vlmpack.model import ThdStep

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")  # Megatron-Core's own calls

LENGTHS = (7, 3, 11, 5)
EXPERTS = 4
RULES = {"no padding": SlotRule(), "slots and a tail": SlotRule(multiple=4, row_multiple=20, tail_in_slot=True)}
CLOSE: Any = {"atol": 2e-6, "rtol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_process():
        yield


@pytest.fixture(autouse=True)
def a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(lambda *where: monkeypatch.setattr(*where, raising=False))


def texts() -> PaddedBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask, IGNORE)
    labels[2, :4] = IGNORE  # a prompt
    return PaddedBatch(input_ids=ids * mask, attention_mask=mask.long(), labels=labels)


def losses_alone(model: Any, batch: PaddedBatch) -> list[torch.Tensor]:
    """[targets] of each sample: Megatron's own loss of the sample in a batch of one, without boundaries."""
    losses = []
    for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
        ids, labels = ids[mask.bool()][None], labels[mask.bool()]
        targets = F.pad(labels[1:], (0, 1), value=IGNORE)
        positions = torch.arange(ids.shape[1])[None]
        losses.append(model(ids, positions, None, labels=targets[None])[0][targets != IGNORE])
    return losses


def router_losses(model: Any, recorded: list[list[torch.Tensor]]) -> torch.Tensor:
    """The auxiliary and z-loss of all samples' tokens together, by Megatron's own functions."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func, z_loss_func

    config, loss = model.config, torch.zeros(())
    for layer in recorded:
        logits = torch.cat([each.reshape(-1, config.num_moe_experts) for each in layer])
        scores = logits.softmax(-1)
        chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2, -1).indices, 1.0).sum(0)
        loss = loss + switch_load_balancing_loss_func(
            scores, chosen, len(logits), 2, config.num_moe_experts, config.moe_aux_loss_coeff
        )
        loss = loss + z_loss_func(logits, config.moe_z_loss_coeff)
    return loss


def outcome_alone(experts: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model, recorded = gpt_model(experts=experts), []
    for layer in model.decoder.layers if experts else ():
        recorded.append(logits := [])
        gating = layer.mlp.router.gating
        # Its own router losses, of one sample at a time, are left out: a batch's are not their sum.
        layer.mlp.router.config.moe_aux_loss_coeff, layer.mlp.router.config.moe_z_loss_coeff = 0.0, None
        layer.mlp.router.gating = lambda hidden, gating=gating, logits=logits: (
            logits.append(gating(hidden)) or logits[-1]
        )
    losses = losses_alone(model, texts())
    loss = torch.cat(losses).mean()
    if experts:
        plain = gpt_model(experts=experts)
        loss = loss + router_losses(plain, recorded)
    loss.backward()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("experts", [0, EXPERTS], ids=["dense", "experts"])
def test_a_gpt_model_gives_each_sample_what_it_has_alone(experts: int, rule: SlotRule) -> None:
    losses, gradients = outcome_alone(experts)
    model = gpt_model(experts=experts)
    result = ThdStep(model, slots=rule)(texts())
    result.loss.backward()
    torch.testing.assert_close(-result.target_logprobs, torch.cat(losses), **CLOSE)
    torch.testing.assert_close(result.sample_losses, torch.stack([each.mean() for each in losses]), **CLOSE)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, gradients[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_router_losses_move_without_the_padding_mask() -> None:
    _, gradients = outcome_alone(EXPERTS)
    model = gpt_model(experts=EXPERTS)
    step = ThdStep(model, slots=RULES["slots and a tail"])
    inputs = step.inputs(texts())
    assert inputs.row.segments.has_padding
    output = model(**{**inputs.arguments, "padding_mask": None})
    step.result(output, inputs).loss.backward()
    router = "decoder.layers.0.mlp.router.weight"
    error = dict(model.named_parameters())[router].grad - gradients[router]
    assert error.norm() > 1e-2 * gradients[router].norm()


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_of_a_model_give_the_losses_of_one(tmp_path: Path) -> None:
    """Dense with its weights cut over both (tensor parallel), and with experts on each (expert parallel)."""
    on_ranks(Path(__file__).with_name("two_megatron_ranks.py"), tmp_path)
    for parallel, experts in (("tensor", 0), ("expert", EXPERTS)):
        expected = ThdStep(gpt_model(experts=experts), slots=SlotRule(multiple=4))(texts()).sample_losses
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{parallel} {rank}.pt"), expected, **CLOSE)
