"""Which patches attend to which in a vision tower, as host metadata: so that no block has to ask the device.

A tower attends within one frame of one image; some blocks of Qwen2.5-VL within a window of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vlmpack.layout import Grid, Segments


@final
@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """Window attention of Qwen2.5-VL: all in patches."""

    window: int
    """Side of a window."""
    merge: int
    """Patches merged into one token along each side; windows hold whole tokens."""


def frame_segments(grids: Sequence[Grid]) -> Segments:
    """One segment for each frame of each image or video: h * w patches.

    The same boundaries as `transformers.vision_utils.get_vision_cu_seqlens`.
    """
    return Segments.from_lengths([h * w for t, h, w in grids for _ in range(t)])


def window_segments(grids: Sequence[Grid], rule: WindowRule) -> Segments:
    """One segment for each window of each frame, in the order in which the tower lays windows out.

    The same boundaries as Qwen2.5-VL's `get_window_index` gives after its empty windows are taken out.
    """
    side = rule.window // rule.merge
    lengths: list[int] = []
    for t, h, w in grids:
        rows, columns = _cut(h // rule.merge, side), _cut(w // rule.merge, side)
        lengths += [row * column * rule.merge**2 for row in rows for column in columns] * t
    return Segments.from_lengths(lengths)


def _cut(tokens: int, side: int) -> list[int]:
    """`tokens` in pieces of `side`, the last one shorter."""
    whole, rest = divmod(tokens, side)
    return [side] * whole + [rest] * bool(rest)
