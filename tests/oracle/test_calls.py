"""Ways to call an enabled model: with batches of your own, rows of your own, through `model(**batch)` or `PackedStep`.

Whatever the way, the numbers are those of plain transformers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.oracle.packed import collator_of, outcome_of, run_of
from tests.oracle.plain import (
    CASES,
    TOLERANCE,
    Case,
    Outcome,
    apart,
    conversations,
    differences,
    encoded,
    gradient_differences,
    gradients_of,
    in_one_batch,
    run_alone,
)
from vlmpack import (
    PackedRow,
    PackedStep,
    PaddedBatch,
    Segments,
    SlotRule,
    StepConfig,
    compile_layers,
    disable_packing,
    enable_packing,
    pack,
    unpack,
)
from vlmpack.trainer import evaluate

QWEN, EXPERTS, GEMMA, TEXT = CASES[1], CASES[2], CASES[5], CASES[7]


@lru_cache
def samples_of(case: Case) -> list[dict[str, torch.Tensor]]:
    return [encoded(case, talk) for talk in conversations(case)]


def alone(case: Case) -> Outcome:
    return run_of(case, "packed").alone


def own_batch(case: Case, side: str = "right") -> dict[str, Any]:
    """Made without vlmpack."""
    return in_one_batch(samples_of(case), pad=case.tokenizer.pad_token_id, side=side)


# ---------------------------------------------------------------------- model(**batch)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("case", [QWEN, GEMMA], ids=str)
def test_a_collated_batch_goes_straight_into_the_model(case: Case, layout: str) -> None:
    model = enable_packing(case.model())
    loss = model(**collator_of(case, layout)(conversations(case))).loss
    loss.backward()
    assert loss.item() == pytest.approx(alone(case).loss, rel=TOLERANCE["losses"])
    assert gradient_differences(gradients_of(model), alone(case).gradients) == []


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", [QWEN, GEMMA, TEXT], ids=str)
def test_a_padded_batch_of_your_own_is_packed_inside_the_forward(case: Case, side: str) -> None:
    model = enable_packing(case.model())
    loss = model(**own_batch(case, side)).loss
    loss.backward()
    assert loss.item() == pytest.approx(alone(case).loss, rel=TOLERANCE["losses"])
    assert gradient_differences(gradients_of(model), alone(case).gradients) == []


@pytest.mark.parametrize("side", ["right", "left"])
def test_without_labels_a_padded_batch_gets_its_logits_back(side: str) -> None:
    batch = own_batch(QWEN, side)
    batch.pop("labels")
    with torch.no_grad():
        seen = enable_packing(QWEN.model())(**batch).logits
        expected = QWEN.model()(**batch, use_cache=False).logits
    is_real = batch["attention_mask"].bool()
    assert seen.shape == expected.shape
    assert apart(seen[is_real], expected[is_real]) <= TOLERANCE["logprobs"]
    assert not seen[~is_real].any()


def test_accumulated_rows_divide_by_all_targets_of_the_step() -> None:
    model = QWEN.model()
    step, collate = PackedStep(model), collator_of(QWEN).collate
    talks = conversations(QWEN)
    for part in (talks[:1], talks[1:]):
        step(collate(part), num_items_in_batch=sum(alone(QWEN).targets)).loss.backward()
    assert gradient_differences(gradients_of(model), alone(QWEN).gradients) == []


def test_generation_of_an_enabled_model_is_the_models_own() -> None:
    """Greedy, of a padded batch of prompts of unequal lengths with images."""
    prompts = [{"messages": talk["messages"][:1]} for talk in conversations(QWEN)]
    batch = in_one_batch([encoded(QWEN, prompt) for prompt in prompts], pad=QWEN.tokenizer.pad_token_id, side="left")
    batch.pop("labels")
    settings = {"max_new_tokens": 5, "do_sample": False, "suppress_tokens": [QWEN.model().config.image_token_id]}
    plain = QWEN.model().eval().generate(**batch, **settings)
    assert enable_packing(QWEN.model()).eval().generate(**batch, **settings).equal(plain)
    assert plain.shape[1] == batch["input_ids"].shape[1] + 5


def test_a_disabled_model_is_what_it_was() -> None:
    plain, model = QWEN.model(), QWEN.model()
    enable_packing(model)
    model(**collator_of(QWEN)(conversations(QWEN)))
    disable_packing(model)
    batch = own_batch(QWEN)
    with torch.no_grad():
        assert model(**batch, use_cache=False).logits.equal(plain(**batch, use_cache=False).logits)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in plain.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")  # a newer name
@pytest.mark.parametrize("case", [QWEN, CASES[3]], ids=str)
def test_gradient_checkpointing_changes_nothing(case: Case) -> None:
    model = enable_packing(case.model())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**collator_of(case)(conversations(case))).loss.backward()
    assert gradient_differences(gradients_of(model), alone(case).gradients) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")  # its own, about itself
def test_compiled_layers_change_nothing() -> None:
    torch.compiler.reset()
    model = compile_layers(enable_packing(TEXT.model(layers=1)), backend="aot_eager")
    model(**collator_of(TEXT)(conversations(TEXT))).loss.backward()
    expected = run_alone(TEXT.model(layers=1), samples_of(TEXT))
    assert gradient_differences(gradients_of(model), expected.gradients) == []


@pytest.mark.parametrize("case", [QWEN, CASES[3], TEXT], ids=str)
def test_with_every_token_learned_no_target_crosses_a_boundary(case: Case) -> None:
    """The first token of a sample is predicted by none: not by the last one of the sample before it."""
    media = case.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    samples = []
    for sample in samples_of(case):
        is_medium = torch.isin(sample["input_ids"], torch.tensor(media))
        samples.append({**sample, "labels": sample["input_ids"].masked_fill(is_medium, -100)})
    model = case.model()
    result = PackedStep(model)(collator_of(case, train_on="all").collate(conversations(case)))
    result.loss.backward()
    expected = run_alone(case.model(), samples)
    assert differences(outcome_of(result, samples, gradients_of(model)), expected) == []
    assert sum(expected.targets) > 2 * sum(alone(case).targets)


# ---------------------------------------------------------------------- experts


def test_routers_count_the_tokens_that_the_padded_batch_with_its_mask_counts() -> None:
    """Transformers' load-balancing loss is one of a batch, so it is compared with the padded batch."""
    plain, model = EXPERTS.model(), EXPERTS.model()
    expected = plain(**own_batch(EXPERTS), output_router_logits=True, use_cache=False)
    result = PackedStep(model)(collator_of(EXPERTS).collate(conversations(EXPERTS)), output_router_logits=True)
    assert result.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    coefficient = plain.config.text_config.router_aux_loss_coef
    assert coefficient > 0
    assert result.loss.item() == pytest.approx(alone(EXPERTS).loss + coefficient * expected.aux_loss.item(), rel=1e-5)
    sent = result.expert_counts.sum(1).tolist()
    assert sent == [plain.config.text_config.num_experts_per_tok * sum(run_of(EXPERTS, "packed").lengths)] * 2


def test_the_load_balancing_loss_trains_routers_as_in_the_padded_batch() -> None:
    plain, model = EXPERTS.model(), EXPERTS.model()
    plain(**own_batch(EXPERTS), output_router_logits=True, use_cache=False).aux_loss.backward()
    batch = collator_of(EXPERTS).collate(conversations(EXPERTS))
    PackedStep(model)(batch, output_router_logits=True).aux_loss.backward()
    assert gradient_differences(gradients_of(model), gradients_of(plain)) == []


# ---------------------------------------------------------------------- rows of your own


def test_packing_moves_real_tokens_and_unpacking_moves_them_back() -> None:
    batch = own_batch(TEXT)
    row = pack(PaddedBatch(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]))
    ids = [sample["input_ids"] for sample in samples_of(TEXT)]
    assert row.input_ids.equal(torch.cat(ids, 1))
    assert unpack(row.input_ids, row.segments).equal(batch["input_ids"] * batch["attention_mask"])


def test_a_row_made_by_hand_needs_ids_targets_and_lengths() -> None:
    samples = samples_of(TEXT)
    none = torch.tensor([[-100]])
    model = TEXT.model()
    row = PackedRow(
        input_ids=torch.cat([sample["input_ids"] for sample in samples], 1),
        shift_labels=torch.cat([torch.cat([sample["labels"][:, 1:], none], 1) for sample in samples], 1),
        segments=Segments.from_lengths([sample["input_ids"].shape[1] for sample in samples]),
    )
    result = PackedStep(model)(row)
    result.loss.backward()
    assert differences(outcome_of(result, samples, gradients_of(model)), alone(TEXT)) == []


@pytest.mark.parametrize("case", [QWEN, EXPERTS, CASES[3], GEMMA], ids=str)
def test_room_for_alignment_between_samples_changes_nothing(case: Case) -> None:
    """Slots of a multiple of 8 tokens, as tensor parallelism and fp8 need them: the rest of a slot is padding."""
    model = case.model()
    batch = collator_of(case, slots=SlotRule(multiple=8)).collate(conversations(case))
    result = PackedStep(model, StepConfig(slots=SlotRule(multiple=8)))(batch)
    result.loss.backward()
    lengths = run_of(case, "packed").lengths
    assert batch.input_ids.shape[1] == sum(-(-length // 8) * 8 for length in lengths) > sum(lengths)
    assert differences(outcome_of(result, samples_of(case), gradients_of(model)), alone(case)) == []


def test_evaluation_returns_the_loss_of_every_sample_whatever_the_rows() -> None:
    held_out = evaluate(QWEN.model(), conversations(QWEN), collator_of(QWEN), capacity=100)
    expected = [loss / count for loss, count in zip(alone(QWEN).losses.tolist(), alone(QWEN).targets, strict=True)]
    order = [int(sample) for sample in held_out.sample_ids]
    assert sorted(order) == [0, 1, 2, 3]
    assert held_out.sample_losses.tolist() == pytest.approx([expected[i] for i in order], rel=TOLERANCE["losses"])
    assert held_out.token_loss == pytest.approx(alone(QWEN).loss, rel=TOLERANCE["losses"])


def test_the_reference_itself_is_the_models_own_loss() -> None:
    """The plain model's own `loss` of each sample is what this suite calls its loss."""
    model = QWEN.model()
    for sample, loss, count in zip(samples_of(QWEN), alone(QWEN).losses, alone(QWEN).targets, strict=True):
        assert model(**sample, use_cache=False).loss.item() == pytest.approx(float(loss) / count, rel=1e-5)
    assert differences(run_alone(model, samples_of(QWEN)), alone(QWEN)) == []
