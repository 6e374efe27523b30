"""Packed against alone: how far apart they may be, what stands in the gaps, and how the two are compared.

truth = alone_through(model, samples)            # every sample by itself, through the untouched model
result = check_packed(truth, model)              # one step on their row, with poison in every gap
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from fixtures.work import work_problems

from vlmpack.attention.patterns import LayerMask
from vlmpack.families import family_of
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, StepResult
from vlmpack.model.plain import find_model
from vlmpack.testing import Sample, comparison, padded, tiny_config
from vlmpack.testing.comparison import (
    Errors,
    Limits,
    Outcome,
    compare,
    distance,
    logits_by_sample,
    rms_distance,
    run_alone,
    smallest_cosine,
)
from vlmpack.testing.samples import Kind, kinds_of

VISION = tuple(name for name, family in FAMILIES.items() if family.has_grids and family.has_videos)
"""Families that take images and videos as patches with one grid for each image or video."""
HUGE = 1e4
"""The embedding of padding behind the samples."""
ROW_MULTIPLE = 23
"""Widths of rows with gaps: between samples they are left out, behind them some padding goes through the model."""

EQUAL = {
    torch.float32: Limits(logits=5e-6, loss=1e-6, gradient=1e-5, cosine=1e-9),
    torch.float64: Limits(logits=1e-12, loss=1e-6, gradient=1e-12, cosine=1e-12),
}
"""Limits for tiny models on a CPU. Losses are summed in float32 with either dtype."""
ATTENTION = EQUAL[torch.float32]
DELTA = replace(ATTENTION, logits=1e-5, gradient=3e-5)
"""The norm behind a gated delta rule divides by what may be small: it enlarges rounding, and nothing else. By how much
depends on the CPU: gradients of plain transformers' own padded batch are off by up to 2.9e-5."""
GEMMA4 = replace(ATTENTION, logits=1e-5)
"""Experts beside an MLP and embeddings of each layer round once more each."""
GIVEN = ("row", "row with gaps", "right padded", "left padded")
"""How samples are handed in."""
LOW_PRECISION = 2.0
"""bfloat16: error <= this times the error that the samples alone in bfloat16 make, both against float32."""


_TOWERS = {family.vision_path.rpartition(".")[2] for family in FAMILIES.values() if family.vision_path is not None}
"""Names of vision towers among the modules of a model."""


def tower_errors(actual: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Root mean square, over all entries of a tower, of errors as parts of the norm of their parameter's gradient.

    Towers are "vision" and "text". In low precision the ratio of two of these is steady where that of a single
    parameter is not: over 16 seeds of all families, packed to alone is at most 1.01, and 5 for one parameter.
    """
    sums: dict[str, list[float]] = {}
    for name, gradient in truth.items():
        error = rms_distance([(actual[name], gradient)])
        total = sums.setdefault("text" if _TOWERS.isdisjoint(name.split(".")) else "vision", [0.0, 0.0])
        total[0] += error**2 * gradient.numel()
        total[1] += gradient.numel()
    return {tower: (square / entries) ** 0.5 for tower, (square, entries) in sums.items()}


def kinds_in(family: str, kinds: Mapping[str, Sequence[Kind]]) -> dict[str, tuple[Kind, ...]]:
    """The kinds of batches of which a family takes samples, each with those that it takes."""
    taken = kinds_of(tiny_config(family))
    batches = {name: tuple(kind for kind in batch if kind in taken) for name, batch in kinds.items()}
    return {name: batch for name, batch in batches.items() if batch and (name in taken or len({*batch}) > 1)}


def limits_of(family: str) -> Limits:
    """The limits of a family in float32."""
    return DELTA if FAMILIES[family].has("gated_delta") else GEMMA4 if family == "gemma4" else ATTENTION


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Samples, and the outcome of each by itself."""

    samples: list[Sample]
    """The samples."""
    outcome: Outcome
    """Of each by itself through the unmodified model."""

    @property
    def logits(self) -> list[torch.Tensor]:
        """[L, V] of each."""
        return self.outcome.logits

    @property
    def loss(self) -> torch.Tensor:
        """Scalar: mean cross-entropy of all their targets."""
        return torch.tensor(self.outcome.loss)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the loss; parameters that take no part are left out."""
        return without_zeros(self.outcome.gradients)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(sample["input_ids"]) for sample in self.samples]


def alone_through(model: Any, samples: Sequence[Sample]) -> Alone:
    """Every sample on its own through the untouched model; the model's gradients are used up."""
    return Alone(samples=[*samples], outcome=run_alone(model, samples))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every gradient that is not all zeros."""
    return without_zeros({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def without_zeros(gradients: Any) -> dict[str, torch.Tensor]:
    """Those that are not all zeros. A bias of keys adds the same to all scores of a query, so without rotary positions
    its true gradient is 0, and what is left of it is rounding."""
    return {
        name: gradient
        for name, gradient in gradients.items()
        if gradient.isnan().any() or gradient.abs().max() > (1e-6 if name.endswith("k_proj.bias") else 0)
    }


# ---------------------------------------------------------------------- how a model is trained


def checkpointed(model: Any, *, reentrant: bool = False) -> Any:
    """A model whose layers are computed again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def adapted(model: Any) -> Any:
    """LoRA on every linear layer but routers and the head, the tower's too."""
    from peft import LoraConfig, get_peft_model  # tests for a GPU import this file without extras

    linear = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]  # routers return pairs
    settings: dict[str, Any] = {"target_modules": [name for name in linear if not name.endswith("lm_head")]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, lora_alpha=1, init_lora_weights=False, **settings))


# ---------------------------------------------------------------------- comparing


def outcome_of(truth: Alone, result: StepResult) -> Outcome:
    """What a packed step came to, without gradients."""
    losses, logits = result.sample_losses, logits_by_sample(result)
    return comparison.outcome_of(torch.nn.Module(), truth.samples, logits, result.loss.item(), sample_losses=losses)


def problems(errors: Errors, limits: Limits) -> list[str]:
    """Every error above its limit, one line each."""
    return [f"{each.name}: {each}" for each in errors.measured(limits) if not each.error <= each.allowed]


def check_outputs(truth: Alone, result: StepResult, limits: Limits) -> None:
    """Losses, and the logits of every real token."""
    errors = compare(outcome_of(truth, result), replace(truth.outcome, gradients={}))
    assert not problems(errors, limits)


def check_logits(truth: Alone, result: StepResult, limits: Limits) -> None:
    """Of every real token."""
    assert compare(outcome_of(truth, result), replace(truth.outcome, gradients={})).logits <= limits.logits


def handed_in(samples: Sequence[Sample], given: str, rule: SlotRule) -> Any:
    """A batch or a row of samples: `given` names a layout of `GIVEN`, with "without metadata" behind it or not."""
    assert given.removesuffix(" without metadata") in GIVEN, given
    batch = padded(samples, "left" if given.startswith("left") else "right", metadata="without" not in given)
    if not given.startswith("row"):
        return batch.to_hf()
    row = pack(padded(samples), rule=rule if given.startswith("row with gaps") else None, pad_token_id=17)
    return {name: value for name, value in row.to_hf().items() if name != "vlmpack"} if "without" in given else row


def check_packed(
    truth: Alone,
    model: Any,
    *,
    given: str = "row with gaps",
    multiple: int = 8,
    backend: str = "auto",
    limits: Limits | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: bool = True,
) -> StepResult:
    """Compare one packed step with its samples alone: logits, losses, every gradient, and the work that was done.

    Padding is poisoned. The model keeps packing enabled, and forgets its gradients.

    Args:
        truth: the samples, each through a model of the same weights.
        model: packing is enabled on it.
        given: a key of `GIVEN`: how the samples are handed in.
        multiple: of the slots of rows with gaps, and of padded batches that are packed.
        backend: of attention.
        limits: None: those of the family.
        around: entered around the forward pass.
        backward: compare gradients too.
    """
    core = find_model(model)
    family = core.config.model_type
    rule = SlotRule() if given == "row" else SlotRule(multiple=multiple, row_multiple=ROW_MULTIPLE)
    inputs = handed_in(truth.samples, given, rule)
    step = PackedStep(model, StepConfig(attention=backend, slots=rule))
    segments = pack(padded(truth.samples, "left" if given.startswith("left") else "right"), rule=rule).segments
    with poisoned(core, segments, rule) as poison, around():
        result = step(inputs, logits=True)
    assert (sum(poison) > 0) == segments.without_gaps(rule).has_padding
    assert result.segments == segments
    limits = limits or limits_of(family)
    check_outputs(truth, result, limits)
    check_work(truth, result, rule.row_multiple, core.config)
    assert result.loss.requires_grad == backward
    if backward:
        with poisoned(core, segments, rule):  # layers are computed again
            result.loss.backward()
        check_gradients(truth, gradients(model), limits)
        model.zero_grad()
    return result


def check_gradients(truth: Alone, found: dict[str, torch.Tensor], limits: Limits) -> None:
    """Every parameter's gradient, in size and in direction."""
    expected = truth.gradients
    assert expected
    assert found.keys() == expected.keys()
    packed = replace(truth.outcome, gradients=found)
    assert not problems(compare(packed, replace(truth.outcome, gradients=expected), smallest_gradient=0.0), limits)
    worst = smallest_cosine(found, expected)
    assert 1 - worst.cosine <= limits.cosine, worst


def check_step(truth: Alone, model: Any, result: StepResult, limits: Limits) -> None:
    """Outputs, and every gradient of the loss."""
    check_outputs(truth, result, limits)
    result.loss.backward()
    check_gradients(truth, gradients(model), limits)


def check_low_precision(truth: Alone, plain: Alone, result: StepResult, found: dict[str, torch.Tensor]) -> None:
    """Packed in bfloat16 (`result`, `found`) against the samples alone in bfloat16 (`plain`), both against `truth`.

    Gradients are compared by tower: see `tower_errors`. Single parameters have their limits in float32 and float64.
    """
    packed, exact, alone = outcome_of(truth, result), truth.outcome, plain.outcome
    for values in (logits_of, logprobs_of):
        assert distance(values(packed), values(exact)) <= LOW_PRECISION * distance(values(alone), values(exact))
    others = (found.keys() ^ truth.gradients.keys()) | (plain.gradients.keys() ^ truth.gradients.keys())
    assert all(name.endswith("k_proj.bias") for name in others), others  # what bfloat16 leaves of a true 0
    allowed = tower_errors(plain.gradients, truth.gradients)
    for tower, error in tower_errors(found, truth.gradients).items():
        assert error <= LOW_PRECISION * allowed[tower], tower


def logits_of(outcome: Outcome) -> torch.Tensor:
    """[R, V] of all real tokens."""
    return torch.cat(outcome.logits)


def logprobs_of(outcome: Outcome) -> torch.Tensor:
    """Log-probability of every target."""
    return -torch.cat(outcome.target_losses)


def check_work(truth: Alone, result: StepResult, row_multiple: int, config: Any) -> None:
    """Equal outputs do not prove that padding was skipped: so does the work. Sparse attention chooses among pairs."""
    family = FAMILIES[config.model_type]
    problems_of_work = work_problems(
        result.work,
        truth.samples,
        row_multiple=row_multiple,
        sparse=family.has("per_sample"),
        layer_masks=layer_masks_of(family.text_config(config)),
        bidirectional=family.bidirectional_tokens(config),
    )
    assert not problems_of_work


def layer_masks_of(text_config: Any) -> set[LayerMask]:
    """How far back a model's layers attend, as its configuration describes them."""
    masks = {
        "sliding_attention": LayerMask(window=getattr(text_config, "sliding_window", None)),
        "chunked_attention": LayerMask(chunk=getattr(text_config, "attention_chunk_size", None)),
    }
    kinds = getattr(text_config, "layer_types", None) or ["sliding_attention"]
    return {masks.get(kind, LayerMask()) for kind in kinds if kind not in ("linear_attention", "conv")}


# ---------------------------------------------------------------------- poison


@contextmanager
def poisoned(model: Any, segments: Segments, slots: SlotRule | None = None) -> Iterator[list[int]]:
    """Put poison into the padding that goes through a model with this row, behind its samples: embeddings of 1e4.

    Args:
        model: the model.
        segments: the row, as it is handed in.
        slots: of the model's `StepConfig`.

    Yields a list that grows by the number of poisoned tokens with every call that was given some.
    """
    pad_T = segments.without_gaps(slots).padding_mask(next(model.parameters()).device)
    count: list[int] = []

    def embedded(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        count.append(int(pad_T.sum()))
        return output.masked_fill(pad_T[None, :, None], HUGE)

    embeddings = family_of(model).language_model(model).get_submodule("embed_tokens")
    hooks = [embeddings.register_forward_hook(embedded)] if pad_T.any() else []
    try:
        yield count
    finally:
        for hook in hooks:
            hook.remove()
