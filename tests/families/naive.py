"""The positions of one sample as plain loops over its tokens: the truth for tests.

Fed from the sample's own tokens and grids, it knows neither rows nor segments.
"""

from collections.abc import Sequence

import numpy as np

from vlmpack.layout import Grid

Position = tuple[int, int, int, int]
"""(text, time, height, width) of one token."""


def naive_positions(
    token_types: Sequence[int],
    *,
    merge: int,
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    frame_intervals: Sequence[float] | None = None,
    frames_apart: bool = False,
) -> list[Position]:
    """The position of every token of one sample.

    Args:
        token_types: 0 text, 1 image, 2 video.
        merge: patches merged into one token along each side.
        image_grids: (frames, rows, columns) in patches.
        video_grids: the same of each video.
        frame_intervals: positions from one frame of each video to the next, before rounding down; None: 1.
        frames_apart: each frame of a video is a run of its own (Qwen3-VL).
    """
    images = [(grid, 1.0) for grid in image_grids]
    videos = list(zip(video_grids, frame_intervals or [1.0] * len(video_grids), strict=True))
    if frames_apart:
        videos = [((1, h, w), interval) for (t, h, w), interval in videos for _ in range(t)]
    waiting = {1: images, 2: videos}
    out: list[Position] = []
    here = 0  # the position at which the next token or item starts
    while len(out) < len(token_types):
        modality = token_types[len(out)]
        if modality == 0:
            out.append((len(out), here, here, here))
            here += 1
            continue
        (t, h, w), interval = waiting[modality].pop(0)
        h, w = h // merge, w // merge
        for frame in range(t):
            for row in range(h):
                for column in range(w):
                    time = int(np.float32(frame) * np.float32(interval))
                    out.append((len(out), here + time, here + row, here + column))
        here += max(h, w)
    return out
