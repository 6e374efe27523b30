"""Packed against alone: how far apart they may be, what stands in the gaps, and how the two are compared.

truth = alone_through(model, samples)            # every sample by itself, through the untouched model
row = pack(padded(samples), rule=rule)
with poisoned(model, row.segments):              # NaN or 1e4 in every gap
    result = PackedStep(model)(row, logits=True)
    result.loss.backward()
check_outputs(truth, result, limits_of(family))
check_gradients(truth, gradients(model), limits_of(family))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from vlmpack.families import FAMILIES, family_of
from vlmpack.layout import Segments
from vlmpack.model import ModelParts, StepResult, expert_layers
from vlmpack.model.mechanisms import attention, per_sample
from vlmpack.testing import Sample, alone

NAN, HUGE = float("nan"), 1e4
"""What stands in gaps: NaN where nothing may read them, 1e4 where every token is computed by itself."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest differences allowed between packed and alone."""

    logits: float
    """Of any logit."""
    loss: float
    """Of the loss, relative."""
    gradient: float
    """Of any entry of a parameter's gradient, as a part of its largest entry."""
    cosine: float
    """1 - cosine of a parameter's two gradients."""


ATTENTION = Limits(logits=2e-5, loss=1e-6, gradient=1e-5, cosine=1e-9)
DELTA = Limits(logits=2e-5, loss=1e-6, gradient=3e-5, cosine=1e-9)
"""The norm behind a gated delta rule divides by what may be small: it enlarges rounding, and nothing else."""
LOW_PRECISION = 2.0
"""bfloat16: error <= this times the error that the samples alone in bfloat16 make, both against float32."""


def limits_of(family: str) -> Limits:
    """The limits of a family in float32."""
    return DELTA if FAMILIES[family].has("gated_delta") else ATTENTION


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What samples come to, each by itself."""

    samples: list[Sample]
    """The samples."""
    logits: list[torch.Tensor]
    """[L, V] of each."""
    loss: torch.Tensor
    """Scalar: mean cross-entropy of all their targets."""
    gradients: dict[str, torch.Tensor]
    """Of the loss; parameters that take no part are left out."""

    def all_logits(self) -> torch.Tensor:
        """float32 [R, V]."""
        return torch.cat(self.logits).float()

    def logprobs(self) -> torch.Tensor:
        """float32: log-probability of every target."""
        pairs = [(x[:-1].float(), s["labels"][1:]) for x, s in zip(self.logits, self.samples, strict=True)]
        return torch.cat([-F.cross_entropy(x, y, reduction="none")[y != -100] for x, y in pairs])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(sample["input_ids"]) for sample in self.samples]


def alone_through(model: Any, samples: Sequence[Sample]) -> Alone:
    """Every sample on its own through the untouched model, losses summed; the model's gradients are used up."""
    logits, loss_sum, targets = [], 0.0, 0
    for sample in samples:
        logits.append(model(**{**alone(sample), "labels": None}).logits[0])
        loss_sum = loss_sum + F.cross_entropy(logits[-1][:-1].float(), sample["labels"][1:], reduction="sum")
        targets += int((sample["labels"][1:] != -100).sum())
    loss = torch.as_tensor(loss_sum / targets)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return Alone(samples=[*samples], logits=[x.detach() for x in logits], loss=loss.detach(), gradients=found)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every gradient that is not all zeros."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if gradient.isnan().any() or gradient.any()}


# ---------------------------------------------------------------------- comparing


def check_outputs(truth: Alone, result: StepResult, limits: Limits) -> None:
    """Loss, and the logits of every real token."""
    assert torch.isclose(result.loss, truth.loss, rtol=limits.loss, atol=0)
    check_logits(truth, result, limits)


def check_logits(truth: Alone, result: StepResult, limits: Limits) -> None:
    """Of every real token."""
    for own, packed in zip(truth.logits, by_sample(result), strict=True):
        assert (packed - own).abs().max() <= limits.logits


def by_sample(result: StepResult) -> list[torch.Tensor]:
    """[L, V] logits of each sample, out of the row's."""
    assert result.row_logits is not None
    return [result.row_logits[0, start:stop] for start, stop in result.segments.spans]


def check_gradients(truth: Alone, found: dict[str, torch.Tensor], limits: Limits) -> None:
    """Every parameter's gradient, in size and in direction."""
    assert truth.gradients
    assert found.keys() == truth.gradients.keys()
    for name, own in truth.gradients.items():
        assert (found[name] - own).abs().max() <= limits.gradient * own.abs().max(), name
        assert 1 - F.cosine_similarity(found[name].double().flatten(), own.double().flatten(), dim=0) <= limits.cosine


def check_low_precision(truth: Alone, plain: Alone, result: StepResult, found: dict[str, torch.Tensor]) -> None:
    """Packed in bfloat16 (`result`, `found`) against the samples alone in bfloat16 (`plain`), both against `truth`.

    Gradients are compared by tower. Over 16 seeds of all families, with AMX and without (oneDNN's avx512_bf16), the
    ratio of packed to alone of a tower is at most 1.01, with a standard deviation of 1 %. That of one parameter has
    median 1.00 but reaches 5: norms sum their gradients over all patches of a call, in bfloat16, and a row is one call.
    Single parameters have their limits in float32 and float64.
    """
    for values in (Alone.all_logits, Alone.logprobs):
        own = values(truth)
        packed = values(replace(plain, logits=by_sample(result)))
        assert largest(packed, own) <= LOW_PRECISION * largest(values(plain), own)
    assert found.keys() == plain.gradients.keys() == truth.gradients.keys()
    for tower, names in towers(truth.gradients).items():
        packed, own = (relative_error(of, truth.gradients, names) for of in (found, plain.gradients))
        assert packed <= LOW_PRECISION * own, tower


def towers(gradients: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Names of parameters: of the vision tower, if there is one, and of the text model."""
    vision = [name for name in gradients if name.startswith("model.visual.")]
    text = [name for name in gradients if name not in vision]
    return {tower: names for tower, names in (("vision", vision), ("text", text)) if names}


def relative_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    """Root mean square, over all entries of these parameters, of errors as parts of their own parameter's gradient."""
    errors = [difference(found[name], truth[name]).norm() / truth[name].float().cpu().norm() for name in names]
    entries = torch.tensor([truth[name].numel() for name in names])
    return ((torch.stack(errors).square() * entries).sum() / entries.sum()).sqrt()


def largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest difference."""
    return difference(a, b).abs().max()


def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In float32 on the host."""
    return a.detach().float().cpu() - b.detach().float().cpu()


def check_work(truth: Alone, result: StepResult, multiple: int, *, sparse: bool = False) -> None:
    """Equal outputs do not prove that padding was skipped: so does the work. Sparse attention chooses among pairs."""
    lengths = truth.lengths
    assert result.work.real_tokens == sum(lengths)
    assert result.work.physical_tokens == sum(-(-n // multiple) * multiple for n in lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert 0 < result.work.attended_pairs <= pairs if sparse else result.work.attended_pairs == pairs


# ---------------------------------------------------------------------- poison


@contextmanager
def poisoned(model: Any, segments: Segments) -> Iterator[list[int]]:
    """Put poison into every gap of this row wherever tokens meet; packing must be enabled already.

    The embeddings of padding become 1e4, and go through norms and MLPs, which see each token by itself. Attention
    back-ends, layers that are given a row in parts, and blocks of experts are given NaN there. What padding learns is
    cut off.

    Yields a list that grows by the number of poisoned tokens with every call that was given some.
    """
    family, pad_T, count = family_of(model), segments.padding_mask(next(model.parameters()).device), []

    def fill(hidden: torch.Tensor, value: float) -> torch.Tensor:
        count.append(int(pad_T.sum()))
        return hidden.masked_fill(pad_T[None, :, None], value)

    def embedded(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return fill(output, HUGE)

    def given(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (fill(args[0], NAN), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": fill(kwargs["hidden_states"], NAN)}

    text, parts = family.language_model(model), ModelParts(family=family, core=model)
    mixers = parts.layer_parts("gated_delta")
    if family.has("per_sample"):
        mixers += per_sample.attention_layers(parts) + per_sample.ngram_layers(parts)
    blocks = [layer.block for layer in expert_layers(parts)]
    if not pad_T.any():
        yield count
        return
    with ExitStack() as stack:
        hooks = [text.get_submodule("embed_tokens").register_forward_hook(embedded)]
        hooks += [m.register_forward_pre_hook(given, with_kwargs=True, prepend=True) for m in (*mixers, *blocks)]
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(mock.patch.object(attention, "choose", _poisoning(attention.choose, pad_T)))
        yield count


def _poisoning(choose: Any, pad_T: torch.Tensor) -> Any:
    """Back-ends that are given NaN in the gaps of the text row; in the vision tower, which is not causal, are none."""

    def chosen(call: Any, name: str) -> Any:
        attend = choose(call, name)

        def attend_poisoned(*qkv_and_segments: Any, causal: bool, **settings: Any) -> torch.Tensor:
            *qkv, segments = qkv_and_segments
            given = [x.masked_fill(pad_T[:, None, None], NAN) for x in qkv] if causal else qkv
            return attend(*given, segments, causal=causal, **settings)

        return attend_poisoned

    return chosen
