"""Check each mechanism that keeps the tokens of samples apart by itself: whatever moves there is its fault.

    packing          the tokens and media that reach the model, against those of the samples
    positions        the rotary inputs that reach attention, against those of the sample alone
    cache            what a layer gets to keep keys and values in
    mask             every attention layer with one sample's hidden states changed
    conv taps        every gated delta layer with a state that forgets everything at once, and every short convolution
                     as it is, likewise
    recurrent state  every gated delta layer with no tap but the current one, likewise
    router           the tokens that reach the experts of each layer, and what padding gets back
    vision           the tower with one sample's pixels changed, and its features against those of the sample alone
    audio            the same of audio, by the embeddings that reach the text part (`audio.py`)

Mechanisms are run on the hidden states, positions and boundaries that reached them in the row, so that an error of a
layer before them does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from vlmpack.attention.patterns import EVERYTHING, Reach
from vlmpack.families.spans import Sees
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.attention import layer_reaches, spans_in
from vlmpack.model.plain import CACHES
from vlmpack.probing.forward_passes import ForwardPass, ProbedModel, frames_as_images
from vlmpack.probing.report import Cause, Check
from vlmpack.probing.trace import (
    LEAK,
    ModuleCall,
    Span,
    Trace,
    count_caches,
    largest_move,
    leak_between,
    perturb_spans,
    routed_tokens,
)
from vlmpack.testing.samples import Sample, grids_of, media_of, perturbed

FORGETS_EVERYTHING = 20.0
"""A_log of a gated delta layer whose state is multiplied by exp(-exp(20) * softplus(...)) = 0 at every token."""
FEATURE_LIMITS = {torch.float32: 1e-4}
"""Largest error of features against those of the sample alone, as a part of the largest entry."""
FEATURE_LIMIT_IN_LOW_PRECISION = 5e-2
LAYER_LIMITS = {torch.float32: 1e-4}
"""Largest error of a layer's output against the plain layer on each sample: chunks of gated delta layers in a prefix
tree begin elsewhere."""
LAYER_LIMIT_IN_LOW_PRECISION = 5e-2

Rotary = tuple[torch.Tensor, ...]
Features = list[list[torch.Tensor]]
"""Of one sample: every tensor that the tower returned, for its images and for its videos."""


# ---------------------------------------------------------------------- what goes in


def check_packed_row(row: PackedRow, samples: Sequence[Sample], segments: Segments) -> Check:
    """Compare a packed row with the samples: each one's tokens at its place, and its media in its turn."""
    return _check_tokens(row.input_ids, row.media.to_hf(), samples, segments)


def check_model_inputs(trace: Trace) -> Check:
    """Compare what reaches the model with the samples."""
    inputs = trace.backbone.kwargs
    return _check_tokens(inputs["input_ids"], inputs, [*map(frames_as_images, trace.samples)], trace.segments)


def _check_tokens(
    ids_1T: torch.Tensor, media: Mapping[str, Any], samples: Sequence[Sample], segments: Segments
) -> Check:
    row_T = ids_1T[0].cpu()
    if len(row_T) != segments.total:
        detail = f"the row is {len(row_T)} tokens wide, and its samples take {segments.total}"
        return Check.wrong("packing", detail, value=len(row_T), allowed=segments.total)
    for i, ((start, stop), sample) in enumerate(zip(segments.spans, samples, strict=False)):
        if not torch.equal(row_T[start:stop], sample["input_ids"]):
            return Check.wrong("packing", f"sample {i} has other tokens in the row")
    for name, expected in media_of(samples).to_hf().items():
        packed = media.get(name)
        if packed is None or not torch.equal(packed.cpu().to(expected.dtype), expected):
            return Check.wrong("packing", f"{name} are not those of the samples in order")
    return Check.of_mechanism("packing", 0, 0, "")


def rotary_of(call: ModuleCall) -> Rotary:
    """cos and sin that an attention layer gets, [..., T, H], by keyword or second; Llama 4 has them as one complex."""
    found = call.args[1] if len(call.args) > 1 else call.kwargs["position_embeddings"]
    return (found.real, found.imag) if isinstance(found, torch.Tensor) else tuple(found)


def check_positions(trace: Trace, alone: Sequence[Rotary]) -> Check:
    """Compare rotary inputs with `alone`, those of each sample by itself."""
    spans = [torch.arange(start, stop) for start, stop in trace.segments.spans]
    return check_rotary(next(iter(trace.attention.values())), spans, alone)


def check_rotary(call: ModuleCall, places: Sequence[torch.Tensor], alone: Sequence[Rotary]) -> Check:
    """Compare rotary inputs of a layer at the places of each sample, int64 [L], with those of the sample by itself."""
    row = rotary_of(call)
    worst, at = 0.0, 0
    for i, (index, expected) in enumerate(zip(places, alone, strict=True)):
        pairs = zip(row, expected, strict=True)
        error = max(float((x[..., index.to(x.device), :].float() - y.float()).abs().max()) for x, y in pairs)
        if not error <= worst:
            worst, at = error, i
    detail = f"sample {at} has other rotary positions than alone: cos and sin differ by {worst:.1e}"
    return Check.of_mechanism("positions", worst, LEAK, detail)


def check_query_scale(trace: Trace, places: Sequence[torch.Tensor]) -> list[Check]:
    """Compare layers that scale queries by place with the plain layer on each sample; `places`: of each, int64 [L].

    Another sample's tokens do not move them, so that nothing leaks where a factor is wrong.
    """
    calls = {name: call for name, call in trace.attention.items() if not call.module.use_rope} if _scales(trace) else {}
    if not calls:
        return []
    errors = {name: _error_against_plain(call, places) for name, call in calls.items()}
    at = max(errors, key=errors.__getitem__)
    limit = LAYER_LIMITS.get(calls[at].hidden.dtype, LAYER_LIMIT_IN_LOW_PRECISION)
    detail = (
        f"{at}: queries are scaled by other places than alone: the attention of a sample is off by {errors[at]:.1e}"
    )
    return [Check.of_mechanism("positions", errors[at], limit, detail)]


def _scales(trace: Trace) -> bool:
    return trace.probed.family.has("query_scale")


def _error_against_plain(call: ModuleCall, places: Sequence[torch.Tensor]) -> float:
    """Largest error of attention without rotary positions, as a part of the largest entry."""
    out_1TD, worst = call.rerun(call.hidden)[0], 0.0
    for index in places:
        index_L = index.to(out_1TD.device)
        hidden_1LD = call.hidden.index_select(1, index_L)
        mask_LL = hidden_1LD.new_full((len(index), len(index)), torch.finfo(hidden_1LD.dtype).min).triu(1)
        further = {"position_embeddings": None, "attention_mask": mask_LL[None, None]}
        alone = call.rerun_plain(hidden_1LD, **further)[0]
        worst = max(worst, largest_move(out_1TD.index_select(1, index_L), alone, [(0, len(index))], dim=1))
    return worst


def check_cache(trace: Trace) -> Check:
    """Count layers with a cache: training has no use for one, and with one transformers ignores packed positions."""
    layers = [*trace.attention.values(), *trace.delta.values(), *trace.conv.values()]
    return _cache_check(sum(any(call.kwargs.get(name) is not None for name in CACHES) for call in layers))


def check_cache_that_raises(forward: ForwardPass, probed: ProbedModel, samples: Sequence[Sample]) -> Check:
    """Count layers with a cache in a forward pass that raises: convolutions and states of a cache are of one size."""
    return _cache_check(count_caches(forward, probed, samples))


def _cache_check(count: int) -> Check:
    return Check.of_mechanism("cache", count, 0, f"{count} layers get a cache: it is filled and thrown away")


def check_routing(trace: Trace) -> Check:
    """Check that experts get the real tokens of a row and nothing else, and that padding gets nothing back."""
    if not trace.experts:
        return Check.skipped("router")
    real = trace.segments.num_tokens
    for name, calls in trace.experts.items():
        if (routed := routed_tokens(calls)) != real:
            padding = ": padding is routed and counted" if routed > real else ""
            detail = f"{name} gets {routed} tokens, and {real} are real{padding}"
            return Check.wrong("router", detail, value=routed, allowed=real)
        of_kinds = [routed_tokens([call]) for call in calls]
        if (expected := _tokens_of_kinds(trace)) and of_kinds != expected:
            detail = f"experts of text and of images of {name} get {of_kinds} tokens, and these are {expected}"
            return Check.wrong("router", detail, value=max(of_kinds), allowed=max(expected))
    for name, call in trace.blocks.items():
        output = call.output[0].reshape(-1, call.hidden.shape[-1])
        on_padding = output[trace.segments.padding_mask(output.device)]
        if stray := int((on_padding != 0).any(-1).sum()):
            detail = f"{name} computed padding in place of {stray} real tokens"
            return Check.wrong("router", detail, value=real - stray, allowed=real)
    return Check.of_mechanism("router", real, real, "")


def _tokens_of_kinds(trace: Trace) -> list[int]:
    """Tokens of text, and those of images, that are sent to experts of their own; []: all experts get both."""
    if (name := trace.probed.family.expert_types) is None:
        return []
    of_images = sum(int((sample[name] > 0).sum()) for sample in trace.samples)
    return [trace.segments.num_tokens - of_images, *[of_images] * bool(of_images)]


# ---------------------------------------------------------------------- attention and gated delta layers


def check_mask(trace: Trace) -> Check:
    """Check that others do not move, a last token attends to its sample's first half, and none to a later one but those
    of an image span or a prefix, where layers have them."""
    leak, at = _worst_layer(trace.attention, trace, lambda call: lambda hidden: call.rerun(hidden)[0])
    detail = f"{at}: the attention of a sample moves by {leak:.1e} when only another one changes"
    check = Check.of_mechanism("mask", leak, LEAK, detail, finding="leaks")
    if check.is_bad:
        return check
    probed, sparse = trace.probed, trace.probed.family.has("per_sample")
    parts = ModelParts(family=probed.family, core=probed.core)
    reaches, sees, runs = {} if sparse else layer_reaches(parts), spans_in(parts), runs_of_row(trace)
    by_sample = [[run for run in runs if start <= run[0] < stop] for start, stop in trace.segments.spans]
    first_runs = [of[0] for of in by_sample if of]  # to a second image a first one is the past
    for name, call in trace.attention.items():
        reach = reaches.get(int(name.removeprefix("layer ")), EVERYTHING)
        has_spans = sees is not None and sees.is_in(reach.window)
        problem = _causality_problem(
            call, trace.segments.spans, sparse=sparse, reach=reach, runs=runs if has_spans else []
        )
        if problem or (problem := "" if sees is None else _span_problem(call, first_runs, sees, has_spans=has_spans)):
            return Check.wrong("mask", f"{name}: {problem}")
    return check


def runs_of_row(trace: Trace) -> list[Span]:
    """The runs of tokens of a row that see each other in both directions."""
    spans = zip(trace.segments.spans, trace.samples, strict=False)
    return [(at + start, at + stop) for (at, _), sample in spans for start, stop in trace.probed.runs_of(sample)]


def _span_problem(call: ModuleCall, runs: Sequence[Span], sees: Sees, *, has_spans: bool) -> str:
    """Find out whether the first token of each image, or of each prefix, attends to its last."""
    runs = [(start, stop) for start, stop in runs if stop - start > 1]
    if not runs:
        return ""
    before = call.rerun(call.hidden)[0]
    after = call.rerun(perturb_spans(call.hidden, [(stop - 1, stop) for _, stop in runs], dim=1))[0]
    moves = [largest_move(after, before, [(start, start + 1)], dim=1) for start, _ in runs]
    if has_spans and min(moves) == 0:
        return f"the first token of {sees.noun} does not attend to its last, as it does in the model's own code"
    if not has_spans and not max(moves) <= LEAK:
        return f"the first token of {sees.noun} attends to its last, as it does not in the model's own code"
    return ""


def check_delta(trace: Trace) -> list[Check]:
    """Check convolution and recurrence of gated delta layers, each with the other one disabled; short convolutions."""
    if trace.conv:
        leak, at = _worst_layer(trace.conv, trace, lambda call: lambda hidden: call.rerun(hidden)[0])
        detail = f"{at}: the convolution of a sample moves by {leak:.1e} when only another one changes"
        taps = Check.of_mechanism("conv taps", leak, LEAK, detail, finding="leaks")
        return [taps, Check.skipped("recurrent state")]
    if not trace.delta:
        return [Check.skipped("conv taps"), Check.skipped("recurrent state")]
    return [
        _delta_check(trace, "conv taps", forgetting, "the state forgets everything"),
        _delta_check(trace, "recurrent state", current_tap, "the convolution reads one token"),
    ]


def _delta_check(
    trace: Trace, cause: Cause, disabled: Callable[[ModuleCall], dict[str, torch.Tensor]], meanwhile: str
) -> Check:
    def prepare(call: ModuleCall) -> Callable[[torch.Tensor], torch.Tensor]:
        weights = disabled(call)
        return lambda hidden: call.rerun(hidden, weights)[0]

    leak, at = _worst_layer(trace.delta, trace, prepare)
    detail = f"{at}: while {meanwhile}, a sample moves by {leak:.1e} when only another one changes"
    return Check.of_mechanism(cause, leak, LEAK, detail, finding="leaks")


def forgetting(call: ModuleCall) -> dict[str, torch.Tensor]:
    """Weights of a gated delta layer whose state forgets everything at every token."""
    return {"A_log": torch.full_like(call.module.get_parameter("A_log"), FORGETS_EVERYTHING)}


def current_tap(call: ModuleCall) -> dict[str, torch.Tensor]:
    """Weights of a gated delta layer whose convolution reads one token."""
    weight = call.module.get_parameter("conv1d.weight")
    taps = torch.zeros_like(weight)
    taps[..., -1] = weight[..., -1]
    return {"conv1d.weight": taps}


def _worst_layer(
    calls: Mapping[str, ModuleCall],
    trace: Trace,
    prepare: Callable[[ModuleCall], Callable[[torch.Tensor], torch.Tensor]],
) -> tuple[float, str]:
    """(the largest move, the name of the layer)."""
    spans, gaps = trace.segments.spans, trace.gaps
    moves = {name: leak_between(prepare(call), call.hidden, spans, gaps) for name, call in calls.items()}
    at = max(moves, key=moves.__getitem__)
    return moves[at], at


def _causality_problem(
    call: ModuleCall, spans: Sequence[Span], *, sparse: bool, reach: Reach, runs: Sequence[Span]
) -> str:
    """Find what is wrong inside samples. A query of sparse attention may do without a sample's first half, and tokens
    of a span, one of `runs`, attend to its last."""
    long = [(start, stop) for start, stop in spans if stop - start > 1]
    lasts = [(stop - 1, stop) for _, stop in long]
    seen_from = [start + reach.first_key(stop - start - 1) for start, stop in long]
    before = call.rerun(call.hidden)[0]
    firsts = [(at, max((a + b) // 2, at + 1)) for (a, b), at in zip(long, seen_from, strict=True)]
    if not sparse:
        after_first = call.rerun(perturb_spans(call.hidden, firsts, dim=1))[0]
        if any(largest_move(after_first, before, [last], dim=1) == 0 for last in lasts):
            return "a sample's last token does not attend to its first half"
    starts = {stop: start for start, stop in runs}
    # a span reaches beyond the window
    beyond = [(a, at) for (a, b), at in zip(long, seen_from, strict=True) if at > a and b not in starts]
    if beyond:
        after = call.rerun(perturb_spans(call.hidden, beyond, dim=1))[0]
        if not (move := largest_move(after, before, lasts, dim=1)) <= LEAK:
            return f"a sample's last token attends beyond its {reach}: it moves by {move:.1e}"
    after_last = call.rerun(perturb_spans(call.hidden, lasts, dim=1))[0]
    earlier = [(a, starts.get(b, b - 1)) for a, b in long]
    if not (ahead := largest_move(after_last, before, earlier, dim=1)) <= LEAK:
        return f"a sample attends to its own future: it moves by {ahead:.1e} when its last token changes"
    return ""


# ---------------------------------------------------------------------- vision


def features_of(calls: Sequence[ModuleCall]) -> Features:
    """Features that a tower returned, call by call."""
    return [call.output for call in calls]


def check_vision(trace: Trace, alone: Sequence[Features], *, plain_error: float) -> Check:
    """Check that only changed features move, and compare features with those of each sample alone.

    Args:
        trace: of the row.
        alone: features of each sample by itself.
        plain_error: of plain transformers on all images at once; ten times the limit is counted at most.
    """
    if not trace.probed.family.has_vision:
        return Check.skipped("vision")
    if not trace.probed.family.has_patch_rows:
        leak = _tile_leak(trace)
        detail = f"a sample's embeddings move by {leak:.1e} when only another sample's pixels change"
        return Check.of_mechanism("vision", leak, LEAK, detail, finding="leaks")
    patches = _patches(trace.samples)
    leak = max(_vision_leak(call, counts) for call, counts in zip(trace.vision, patches, strict=True))
    detail = f"a sample's image features move by {leak:.1e} when only another sample's pixels change"
    check = Check.of_mechanism("vision", leak, LEAK, detail, finding="leaks")
    if check.is_bad:
        return check
    error = feature_error(trace.vision, trace.samples, alone)
    limit = FEATURE_LIMITS.get(trace.vision[0].output[0].dtype, FEATURE_LIMIT_IN_LOW_PRECISION)
    detail = f"a sample's image features are off by {error:.1e} from those of the sample alone"
    compared = Check.of_mechanism("vision", error, limit + 2 * min(plain_error, 10 * limit), detail)
    return compared if compared.is_bad else check


def feature_error(calls: Sequence[ModuleCall], samples: Sequence[Sample], alone: Sequence[Features]) -> float:
    """Measure how far any feature is from that of its sample alone, as a part of the largest entry."""
    worst = 0.0
    remaining = [iter(features) for features in alone]
    for call, patches in zip(calls, _patches(samples), strict=True):
        for i, span in enumerate(_spans(patches)):
            if span[0] == span[1]:
                continue
            for x, y in zip(call.output, next(remaining[i]), strict=True):
                ((start, stop),) = _merged([span], len(x), call.hidden.shape[0])
                worst = max(worst, largest_move(x[start:stop], y, [(0, len(y))], dim=0))
    return worst


def _patches(samples: Sequence[Sample]) -> list[list[int]]:
    """Patches of each sample, for every call of the tower: its images, its videos."""
    samples = [*map(frames_as_images, samples)]
    counts = [
        [sum(map(prod, grids_of(sample, "image"))) for sample in samples],
        [sum(map(prod, grids_of(sample, "video"))) for sample in samples],
    ]
    return [modality for modality in counts if any(modality)]


class _EmbeddedError(Exception):
    """The text part was given its embeddings: the rest need not run."""


@torch.no_grad()
def embeddings_of(trace: Trace, media: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[1, T, D] that the text part is given of the row, with these tensors in place of those of their names."""
    call, found = trace.backbone, []
    changed = {name: values.to(call.kwargs[name]) for name, values in media.items()}

    def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.append(kwargs["inputs_embeds"])
        raise _EmbeddedError

    text = trace.probed.family.language_model(trace.probed.core)
    handle = text.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with suppress(_EmbeddedError):
            call.module(*call.args, **{**call.kwargs, **changed})
    finally:
        handle.remove()
    return found[0]


def _tile_leak(trace: Trace) -> float:
    """Measure how far embeddings of samples move when pixels of others change; images are no rows of patches."""
    pixels = set(trace.probed.family.pixel_names)
    with_images = [at for at, sample in enumerate(trace.samples) if pixels & sample.keys()]
    before, worst, config = _with_pixels(trace, trace.samples), 0.0, trace.probed.config
    for changed in (with_images[::2], with_images[1::2]):
        samples = [perturbed(each, config) if at in changed else each for at, each in enumerate(trace.samples)]
        others = [span for at, span in enumerate(trace.segments.spans) if at not in changed]
        worst = max(worst, largest_move(_with_pixels(trace, samples), before, others, dim=1))
    return worst


def _with_pixels(trace: Trace, samples: Sequence[Sample]) -> torch.Tensor:
    tensors = media_of(samples).to_hf()
    names = [name for name in trace.probed.family.pixel_names if name in tensors]
    return embeddings_of(trace, {name: tensors[name] for name in names})


def _vision_leak(call: ModuleCall, patches: list[int]) -> float:
    pixels, spans = call.hidden, [span for span in _spans(patches) if span[0] < span[1]]
    before, worst = call.rerun(pixels), 0.0
    for changed, others in (spans[::2], spans[1::2]), (spans[1::2], spans[::2]):
        after = call.rerun(perturb_spans(pixels, changed, dim=0)) if changed and others else before
        for x, y in zip(after, before, strict=True):
            worst = max(worst, largest_move(x, y, _merged(others, len(y), pixels.shape[0]), dim=0))
    return worst


def _spans(patches: Sequence[int]) -> list[Span]:
    return list(pairwise((0, *accumulate(patches))))


def _merged(spans: Sequence[Span], rows: int, patches: int) -> list[Span]:
    """The same spans in a tensor that has merged patches into `rows`."""
    merged = patches // rows
    return [(start // merged, stop // merged) for start, stop in spans]
