"""What goes into the row and what comes back: tokens and pixels in their places, tokens of routers, targets that the
loss is made of and divides by, and each sample's own results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vlmpack.layout import IGNORE, PackedRow, Segments
from vlmpack.model import StepResult
from vlmpack.proof.outcome import distance, means_of, relative, target_losses
from vlmpack.proof.report import Check
from vlmpack.proof.samples import ProbeSample, joined_media
from vlmpack.proof.scene import Scene
from vlmpack.proof.ways import Pass

SAME = {torch.float32: 1e-5}
"""Relative difference of two losses that are computed from the same numbers."""
SAME_IN_LOW_PRECISION = 2e-3
SAME_TARGETS_IN_LOW_PRECISION = 2e-2
"""Of single targets: matrices of other heights may be multiplied by other kernels."""


def check_dispatch(scene: Scene) -> Check:
    """Experts are given the real tokens of a row and nothing else: as many of them, and padding gets nothing back."""
    if not scene.experts:
        return Check.of_mechanism("router", "absent")
    real = scene.segments.num_tokens
    for name, call in scene.experts.items():
        hidden = call.hidden
        if (seen := hidden.numel() // hidden.shape[-1]) != real:
            return _misrouted(seen, real, f"{name} was given {seen} tokens, and {real} are real")
    for name, call in scene.blocks.items():
        answer = call.output[0][0]
        on_padding = scene.segments.padding_mask(answer.device)
        if stray := int((answer[on_padding] != 0).any(-1).sum()):
            return _misrouted(real - stray, real, f"{name} computed padding in place of {stray} real tokens")
    return Check.of_mechanism("router", "ok", seen=real, allowed=real)


def _misrouted(seen: int, real: int, detail: str) -> Check:
    detail = f"{detail}: padding is routed and counted" if seen > real else detail
    return Check.of_mechanism("router", "differs", seen=seen, allowed=real, detail=detail)


def check_packed(row: PackedRow, samples: Sequence[ProbeSample], segments: Segments) -> Check:
    """Every sample's tokens stand in the row at its place, and the media are those of the samples in their order."""
    return _placed(row.input_ids, row.media.to_hf(), samples, segments)


def check_given(scene: Scene) -> Check:
    """The model is given such a row."""
    inputs = scene.backbone.kwargs
    return _placed(inputs["input_ids"], inputs, scene.samples, scene.segments)


def _placed(
    ids_1T: torch.Tensor, media: Mapping[str, Any], samples: Sequence[ProbeSample], segments: Segments
) -> Check:
    row_T = ids_1T[0].cpu()
    if len(row_T) != segments.total:
        detail = f"the row is {len(row_T)} tokens wide, and its samples take {segments.total}"
        return Check.of_mechanism("packing", "differs", seen=len(row_T), allowed=segments.total, detail=detail)
    for i, ((start, stop), sample) in enumerate(zip(segments.spans, samples, strict=False)):
        if not torch.equal(row_T[start:stop], sample.input_ids):
            return Check.of_mechanism("packing", "differs", detail=f"sample {i} has not its own tokens in the row")
    for name, own in joined_media(samples).to_hf().items():
        given = media.get(name)
        if given is None or given.shape != own.shape or not torch.equal(given.cpu().to(own.dtype), own):
            return Check.of_mechanism("packing", "differs", detail=f"{name} are not those of the samples in order")
    return Check.of_mechanism("packing", "ok", seen=0, allowed=0)


def check_returned(scene: Scene) -> Check:
    """Logits come back where their sample is: those that the head made of its tokens in the row."""
    made = next((call.output[0] for call in scene.head if call.output[0].ndim == 3), None)
    if made is None:
        return Check.of_mechanism("sample results", "not counted")
    spans = scene.segments.spans
    for i, (given, (start, stop)) in enumerate(zip(scene.given.logits, spans, strict=False)):
        own = made[0, start:stop]
        if given.shape != own.shape or not torch.equal(given.detach(), own):
            detail = f"sample {i} is handed logits that the head made of other tokens"
            return Check.of_mechanism("sample results", "differs", detail=detail)
    return Check.of_mechanism("sample results", "ok", seen=0, allowed=0)


def check_totals(found: Pass, samples: Sequence[ProbeSample], *, by_step: Callable[[], Pass]) -> list[Check]:
    """The loss, the log-probabilities of the targets, and each sample's own loss.

    Each is at fault only if those before it are right.

    Args:
        found: the pass.
        samples: in its order.
        by_step: the same pass by `PackedStep`, which shows more; computed only if the loss is wrong.
    """
    with torch.no_grad():
        count = check_loss_count(found, samples)
        shown = by_step() if count.is_bad and found.result is None else found
        head = [] if shown.result is None else [_check_head(shown.result, shown, samples)]
        if count.is_bad:
            return [check for check in head if check.is_bad] or [count]
        return [count, *head, _check_samples(found, samples)]


def _check_head(result: StepResult, found: Pass, samples: Sequence[ProbeSample]) -> Check:
    """Log-probabilities of the targets against those of the logits, if they are of the right targets at all."""
    segments = result.segments
    places = [
        start + (sample.targets != IGNORE).nonzero()[:, 0]
        for (start, _), sample in zip(segments.spans, samples, strict=False)
    ]
    if not torch.equal(result.target_index.cpu(), torch.cat(places)):
        return Check.of_mechanism("head", "absent")
    expected = torch.cat([-target_losses(x, sample) for x, sample in zip(found.logits, samples, strict=True)])
    error = distance(result.target_logprobs, expected)
    allowed = SAME.get(found.logits[0].dtype, SAME_TARGETS_IN_LOW_PRECISION)
    if not error <= allowed:
        detail = f"log-probabilities of targets are off by {error:.1e} from those of the same pass's logits"
        return Check.of_mechanism("head", "differs", seen=error, allowed=allowed, detail=detail)
    return Check.of_mechanism("head", "ok", seen=error, allowed=allowed)


def _check_samples(found: Pass, samples: Sequence[ProbeSample]) -> Check:
    """Each sample's own loss, its number of targets, and its log-probabilities where a padded batch has them."""
    losses = [target_losses(x, sample) for x, sample in zip(found.logits, samples, strict=True)]
    assert found.sample_losses is not None
    assert found.sample_targets is not None
    allowed = SAME.get(found.logits[0].dtype, SAME_IN_LOW_PRECISION)
    error = distance(found.sample_losses, means_of(losses))
    counts = [sample.num_targets for sample in samples]
    detail = ""
    if (seen := found.sample_targets.tolist()) != counts:
        detail = f"the samples have {counts} targets, and {seen} were handed back"
    elif not error <= allowed:
        detail = f"a sample is handed the loss of another one, or of none: off by {error:.1e}"
    elif (result := found.result) is not None and not _logprobs_in_place(result, samples):
        detail = "log-probabilities are handed back at other places than their samples' targets"
    if detail:
        return Check.of_mechanism("sample results", "differs", seen=error, allowed=allowed, detail=detail)
    return Check.of_mechanism("sample results", "ok", seen=error, allowed=allowed)


def _logprobs_in_place(result: StepResult, samples: Sequence[ProbeSample]) -> bool:
    """[B, S] log-probabilities hold those of the row, sample after sample, target after target."""
    offsets = result.offsets or (0,) * len(samples)
    table = result.logprobs.detach()
    own = [
        row[start : start + len(sample.targets)][(sample.targets != IGNORE).to(row.device)]
        for row, start, sample in zip(table, offsets, samples, strict=True)
    ]
    return torch.equal(torch.cat(own), result.target_logprobs.detach())


def check_loss_count(way_pass: Pass, samples: Sequence[ProbeSample]) -> Check:
    """The loss that was given, against each sample's own targets under the logits of the same pass."""
    own_count = sum(sample.num_targets for sample in samples)
    own_sum = sum(float(target_losses(x, sample).sum()) for x, sample in zip(way_pass.logits, samples, strict=True))
    given, expected = float(way_pass.mean_loss.detach()), own_sum / own_count
    if (result := way_pass.result) is not None and result.num_targets != own_count:
        return _miscounted(result.num_targets, own_count, f"{result.num_targets} targets were counted, {own_count} are")
    error, allowed = relative(given, expected), SAME.get(way_pass.logits[0].dtype, SAME_IN_LOW_PRECISION)
    if not error <= allowed:
        text = f"the loss is {given:.6g}, but the samples' own {own_count} targets make {expected:.6g} of these logits"
        return _miscounted(error, allowed, text)
    return Check.of_mechanism("loss count", "ok", seen=error, allowed=allowed)


def _miscounted(seen: float, allowed: float, detail: str) -> Check:
    return Check.of_mechanism("loss count", "differs", seen=seen, allowed=allowed, detail=detail)
