"""One audio from a file: decoded by PyAV, its channels averaged, at the rate that a processor takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from vlmpack.data.images import ImageError, open_source
from vlmpack.data.videos import DEFAULT_VIDEO_LIMITS
from vlmpack.errors import check_extra

_CONTAINERS = "wav,flac,mp3,ogg,mov,mp4,m4a,matroska,webm,aac"


def load_audio(source: Any, *, rate: int) -> np.ndarray:
    """Decode an audio: float32 `[n]`, within -1 ... 1, one channel.

    Args:
        source: a path, bytes, `{"bytes", "path"}` or a data URI.
        rate: samples a second of the result; a file with others is resampled.

    Raises:
        ImageError: it cannot be read (`audio_missing`, `audio_source`, `audio_undecodable`, ...).
        ConfigError: PyAV is not installed.
    """
    check_extra("video", "av", needed_by="a file of audio")
    import av
    from av.error import FFmpegError

    parts = [np.zeros(0, np.float32)]
    with open_source(source, kind="audio", max_bytes=DEFAULT_VIDEO_LIMITS.max_bytes) as file:
        try:
            with av.open(file, options={"format_whitelist": _CONTAINERS, "protocol_whitelist": ""}) as container:
                if not container.streams.audio:
                    raise ImageError("the file has no stream of audio; drop the sample", "audio_source")
                resampler = av.AudioResampler("fltp", rate=rate)
                for frame in (*container.decode(container.streams.audio[0]), None):  # None: what is left
                    parts += [made.to_ndarray().mean(0) for made in resampler.resample(frame)]
        except (FFmpegError, UnicodeDecodeError) as error:
            fault = f"libav cannot read it ({type(error).__name__}: {error}); write the file again or drop the sample"
            raise ImageError(fault, "audio_undecodable") from error
    return np.concatenate(parts)
