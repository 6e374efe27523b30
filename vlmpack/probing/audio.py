"""Check audio by itself: the features that reach the text part, with other audio in other samples, and against alone.

Log-mel frames are no rows of patches, so the model runs up to its text part: what is compared are embeddings. They show
features that landed in another sample as well as features that another sample changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlmpack.families.family import Family
from vlmpack.layout.batch import AUDIO
from vlmpack.probing.forward_passes import ForwardPass, ProbedModel
from vlmpack.probing.mechanisms import FEATURE_LIMIT_IN_LOW_PRECISION, FEATURE_LIMITS, embeddings_of
from vlmpack.probing.report import Check
from vlmpack.probing.trace import LEAK, Trace, largest_move, recorded_calls
from vlmpack.testing.comparison import distance
from vlmpack.testing.samples import Sample, build_sample, media_of, perturbed

FRAMES = "input_features"
"""The log-mel frames of all audios, by the model's own name."""


def check_audio(trace: Trace, alone: Sequence[torch.Tensor | None]) -> Check:
    """Check that only changed audio moves, and compare features with those of each sample alone.

    Args:
        trace: of the row.
        alone: [tokens, D] that the audio tower returned of each sample by itself; None: it has no audio.
    """
    if not trace.probed.family.has_audio:
        return Check.skipped("audio")
    leak = _leak(trace)
    detail = f"a sample's embeddings move by {leak:.1e} when only another sample's audio changes"
    check = Check.of_mechanism("audio", leak, LEAK, detail, finding="leaks")
    if check.is_bad:
        return check
    embeddings, error = embeddings_of(trace, {FRAMES: _frames(trace.samples)}), 0.0
    for sample, span, expected in zip(trace.samples, trace.segments.spans, alone, strict=False):
        if expected is None:
            continue
        is_audio = _audio_tokens(trace.probed.family, sample, trace.probed.config).to(embeddings.device)
        in_row = embeddings[0, span[0] : span[1]][is_audio]
        error = max(error, distance(in_row, expected) if in_row.shape == expected.shape else float("inf"))
    limit = FEATURE_LIMITS.get(embeddings.dtype, FEATURE_LIMIT_IN_LOW_PRECISION)
    detail = f"a sample's audio features are off by {error:.1e} from those of the sample alone"
    compared = Check.of_mechanism("audio", error, limit, detail)
    return compared if compared.is_bad else check


def check_padding(packed: ForwardPass, probed: ProbedModel) -> list[Check]:
    """Compare features of an audio shorter than a chunk, beside a longer one, with those of the plain tower on each.

    The samples of a probe have longer ones alone: transformers' padded batch, which is compared with too, has others.

    Returns:
        Nothing of a family whose tower reads no padding.
    """
    audio, tower = probed.family.audio, probed.family.audio_tower(probed.core)
    if audio is None or tower is None or not audio.reads_padding:
        return []
    config = probed.config.audio_config
    counts = (config.n_window + 1, 5 * config.n_window)  # a chunk is twice the window
    samples = [build_sample(probed.config, stretches=[3, 3], audio_frames=[n], seed=n) for n in counts]
    with torch.no_grad(), recorded_calls([tower]) as calls:
        packed(samples)
        call = calls[tower][0]
        features = call.args[0] if call.args else call.kwargs["input_features"]
        alone = [
            tower(part, feature_lens=torch.tensor([part.shape[1]], device=part.device)).last_hidden_state
            for part in features.split(counts, dim=1)
        ]
    in_row = call.output[0].split([len(part) for part in alone])
    error = max(distance(x, y) for x, y in zip(in_row, alone, strict=True))
    limit = FEATURE_LIMITS.get(alone[0].dtype, FEATURE_LIMIT_IN_LOW_PRECISION)
    detail = f"features of an audio shorter than a chunk are off by {error:.1e} where a longer one is in the row"
    return [Check.of_mechanism("audio", error, limit, detail)]


def _frames(samples: Sequence[Sample]) -> torch.Tensor:
    return media_of(samples).tensors[FRAMES]


def _audio_tokens(family: Family, sample: Sample, config: Any) -> torch.Tensor:
    """bool [L]: placeholders of audio."""
    return family.media_types(sample["input_ids"], config) == AUDIO


def _leak(trace: Trace) -> float:
    """Measure how far embeddings of samples move when audio of others changes."""
    with_audio = [at for at, sample in enumerate(trace.samples) if FRAMES in sample]
    before, worst, config = embeddings_of(trace, {FRAMES: _frames(trace.samples)}), 0.0, trace.probed.config
    for changed in (with_audio[::2], with_audio[1::2]):
        samples = [perturbed(each, config) if at in changed else each for at, each in enumerate(trace.samples)]
        others = [span for at, span in enumerate(trace.segments.spans) if at not in changed]
        worst = max(worst, largest_move(embeddings_of(trace, {FRAMES: _frames(samples)}), before, others, dim=1))
    return worst
