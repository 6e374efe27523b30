"""Tiny files of videos, written by PyAV: every frame shows its number, so that no two are alike."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

CODECS = {
    "h264.mp4": "libx264",
    "h264.mov": "libx264",
    "h264.mkv": "libx264",
    "vp9.webm": "libvpx-vp9",
    "vp8.webm": "libvpx",
    "mpeg4.avi": "mpeg4",
}
"""Files by the names that tests use, and the encoder of each."""


def picture(index: int, height: int = 64, width: int = 96) -> np.ndarray:
    """A frame: as many bars as bits, light where the bit of its number is set; slowly moving colours below."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for bit in range(8):
        pixels[: height // 2, bit * width // 8 : (bit + 1) * width // 8] = 230 if index >> bit & 1 else 20
    pixels[height // 2 :, :, index % 3] = np.linspace(0, 255, width, dtype=np.uint8)
    return pixels


def number_of(frame: np.ndarray) -> int:
    """The number that a decoded frame of `picture` shows."""
    height, width = frame.shape[:2]
    bars = [frame[height // 4, bit * width // 8 + width // 16].mean() > 125 for bit in range(8)]
    return sum(1 << bit for bit, is_set in enumerate(bars) if is_set)


def write_clip(
    file: Path | io.BytesIO,
    *,
    num_frames: int = 20,
    fps: Any = 10,
    size: tuple[int, int] = (64, 96),
    codec: str | None = None,
    key_every: int = 6,
    times: list[int] | None = None,
    rotation: float | None = None,
    container: str | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> None:
    """Write a clip of B-frames and several key frames; `times` of frames are in milliseconds."""
    codec = codec or CODECS[file.name if isinstance(file, Path) and file.name in CODECS else "h264.mp4"]
    with av.open(file, "w", format=container, options=container_options or {}) as out:
        stream = out.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.options = {"g": str(key_every), "threads": "1", **(options or {})}
        if codec in ("libx264", "mpeg4"):
            stream.options = {**stream.options, "bf": "2"}
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(index, *size), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def clip_bytes(**settings: Any) -> bytes:
    """The bytes of an mp4."""
    file = io.BytesIO()
    write_clip(file, container="mp4", **settings)
    return file.getvalue()
