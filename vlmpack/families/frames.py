"""Which patches of a vision tower attend to which: frames of images and videos, and windows within a frame.

    grid (1, 4, 6), merge 2, windows of 4 x 4 patches          one frame: 24 patches
                                                               its windows: 16 and 8 patches
    a a a a b b
    a a a a b b
    a a a a b b
    a a a a b b

All boundaries are derived on the host, from grids in patches. A tower lays the patches of a window one after the other,
and puts them back behind its last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vlmpack.layout.batch import Grid
from vlmpack.layout.segments import Segments


@final
@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """Window attention of a vision tower: all in patches."""

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

    Args:
        grids: (frames, rows, columns) in patches of each image or video.
        rule: the side of a window, in patches.
    """
    side = rule.window // rule.merge
    lengths: list[int] = []
    for t, h, w in grids:
        rows, columns = pieces(h // rule.merge, side), pieces(w // rule.merge, side)
        lengths += [row * column * rule.merge**2 for row in rows for column in columns] * t
    return Segments.from_lengths(lengths)


def pieces(tokens: int, side: int) -> list[int]:
    """`tokens` in pieces of `side`, the last one shorter."""
    whole, rest = divmod(tokens, side)
    return [side] * whole + [rest] * bool(rest)
