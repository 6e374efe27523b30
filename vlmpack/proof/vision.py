"""The vision tower by itself: change one sample's pixels, watch the features of the others' images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import torch

from vlmpack.proof.report import Check
from vlmpack.proof.samples import ProbeSample
from vlmpack.proof.scene import LEAK, Call, Scene, Span, changed, moved

SAME = {torch.float32: 1e-4}
"""How far features may be from those of the sample alone, as a part of the largest entry."""
SAME_IN_LOW_PRECISION = 5e-2

Features = list[list[torch.Tensor]]
"""Of one sample: every tensor that the tower gave, for its images and for its videos."""


def features_of(calls: Sequence[Call]) -> Features:
    """What a tower gave, call by call."""
    return [[x.detach() for x in call.output] for call in calls]


def check_vision(scene: Scene, alone: Sequence[Features], *, own_error: float) -> Check:
    """Nothing moves but what is changed, and features are those of the sample alone.

    Args:
        scene: the row.
        alone: features of each sample by itself.
        own_error: of plain transformers, given all images at once; ten times what is allowed at most.
    """
    if not scene.family.has_vision:
        return Check.of_mechanism("vision", "absent")
    leak = max(_leak(call, patches) for call, patches in zip(scene.vision, _patches(scene.samples), strict=True))
    if not leak <= LEAK:
        detail = f"a sample's image features move by {leak:.1e} when only another sample's pixels change"
        return Check.of_mechanism("vision", "leaks", seen=leak, allowed=LEAK, detail=detail)
    error = feature_error(scene, alone)
    same = SAME.get(scene.vision[0].output[0].dtype, SAME_IN_LOW_PRECISION)
    allowed = same + 2 * min(own_error, 10 * same)
    if not error <= allowed:
        detail = f"a sample's image features are off by {error:.1e} from those of the sample alone"
        return Check.of_mechanism("vision", "differs", seen=error, allowed=allowed, detail=detail)
    return Check.of_mechanism("vision", "ok", seen=leak, allowed=LEAK)


def _patches(samples: Sequence[ProbeSample]) -> list[list[int]]:
    """Patches of each sample, for every call of the tower: its images, its videos."""
    grids = [[sample.image_grids for sample in samples], [sample.video_grids for sample in samples]]
    return [[sum(map(prod, own)) for own in modality] for modality in grids if any(modality)]


def _leak(call: Call, patches: list[int]) -> float:
    pixels, spans = call.hidden, [span for span in _spans(patches) if span[0] < span[1]]
    before, worst = call.again(pixels), 0.0
    for these, others in (spans[::2], spans[1::2]), (spans[1::2], spans[::2]):
        after = call.again(changed(pixels, these, dim=0)) if these and others else before
        for x, y in zip(after, before, strict=True):
            worst = max(worst, moved(x, y, _scaled(others, len(y), pixels.shape[0]), dim=0))
    return worst


def feature_error(scene: Scene, alone: Sequence[Features]) -> float:
    """How far any feature is from that of its sample alone, as a part of the largest entry."""
    worst = 0.0
    own = [iter(features) for features in alone]
    for call, patches in zip(scene.vision, _patches(scene.samples), strict=True):
        for i, span in enumerate(_spans(patches)):
            if span[0] == span[1]:
                continue
            for x, y in zip(call.output, next(own[i]), strict=True):
                ((start, stop),) = _scaled([span], len(x), call.hidden.shape[0])
                worst = max(worst, moved(x[start:stop], y, [(0, len(y))], dim=0))
    return worst


def _spans(patches: Sequence[int]) -> list[Span]:
    return list(pairwise((0, *accumulate(patches))))


def _scaled(spans: Sequence[Span], rows: int, patches: int) -> list[Span]:
    """The same spans in a tensor that has merged patches into `rows`."""
    merged = patches // rows
    return [(start // merged, stop // merged) for start, stop in spans]
