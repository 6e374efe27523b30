"""Model families as data: multimodal rotary positions, tokens per image, where a model's parts are."""

from __future__ import annotations

from vlmpack.families.audio import AskModel, AudioPart
from vlmpack.families.family import Family
from vlmpack.families.registry import FAMILIES, check_parts, family_named, family_of, family_of_processor
from vlmpack.families.rules import MRope, OneAxis, run_of_pairs, run_per_frame, timed_run
from vlmpack.families.spans import (
    ImageSpans,
    Prefix,
    Runs,
    Sees,
    TypeRuns,
    media_runs,
    prefix_run,
    runs_of_row,
    type_runs,
)
from vlmpack.families.tiles import Join

__all__ = [
    "FAMILIES",
    "AskModel",
    "AudioPart",
    "Family",
    "ImageSpans",
    "Join",
    "MRope",
    "OneAxis",
    "Prefix",
    "Runs",
    "Sees",
    "TypeRuns",
    "check_parts",
    "family_named",
    "family_of",
    "family_of_processor",
    "media_runs",
    "prefix_run",
    "run_of_pairs",
    "run_per_frame",
    "runs_of_row",
    "timed_run",
    "type_runs",
]
