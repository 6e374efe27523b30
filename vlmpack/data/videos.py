"""Read the headers and frames of video files through PyAV (extra `video`), and decode audio.

    file ──read_video_header──▶ VideoHeader(frames, rate, size)        decodes one frame
      └───decode_frames(indices)──▶ frame, frame, ...                  one at a time, upright RGB

| property of a video file            | rule                                                                          |
|-------------------------------------|-------------------------------------------------------------------------------|
| container                           | mp4, mov, mkv, webm, avi, by content; never one that names other files        |
| stream                              | the first video stream that is no cover picture                               |
| number of frames                    | from the header (mp4, mov, avi), without frames that an edit list removes;    |
|                                     | else packets are counted, which reads the file without decoding (mkv, webm)   |
| rotation                            | applied: a video that was filmed upright is upright                           |
| pixels that are not square          | left as they are, as in transformers                                          |
| a frame                             | same pixels as when all frames are decoded in order                           |

Frames are found by their times. The decoder seeks to the last key frame before a wanted frame, if that key frame comes
after the previously decoded frame. If this does not lead to the frame at that time, or if the container has no times
(avi), all frames are decoded from the start. Decoding uses one thread, since DataLoader workers run in parallel.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from vlmpack.data.images import check_size, open_source
from vlmpack.errors import SampleError, check_extra

VideoSource = bytes | bytearray | memoryview | str | Path | Mapping
"""A video file: its path, its bytes, or {"bytes", "path"}."""

_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
"""libav's names of the allowed containers. Playlists are not among them: they name other files and addresses."""
_WITHOUT_TIMES = "avi"
_FIRST_BOXES = (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
"""Names of boxes with which mp4 and mov files begin."""
_RIGHT_ANGLES = (0, 90, 180, 270)


@dataclass(frozen=True, kw_only=True)
class VideoLimits:
    """Limits for video files, checked against their headers before frames are decoded."""

    max_pixels: int = 36_000_000
    """Largest width times height of a frame (8K)."""
    max_aspect_ratio: float = 200.0
    """Largest ratio of the longer to the shorter side. The resize rule of Qwen's processors fails above 200."""
    max_frames: int = 432_000
    """Largest number of frames in a file: two hours at 60 frames per second."""
    max_sampled: int = 2048
    """Largest number of frames that are taken from a video."""
    max_bytes: int = 8 * 2**30
    """Largest size of the file in bytes."""


DEFAULT_VIDEO_LIMITS = VideoLimits()


@dataclass(frozen=True, kw_only=True)
class VideoHeader:
    """Properties of a video file."""

    num_frames: int
    """Number of frames that decoding returns, at least 1."""
    fps: float
    """Frames per second: the container's average rate, or the measured one if the header is wrong."""
    height: int
    """Height in pixels, upright."""
    width: int
    """Width in pixels, upright."""


def read_video_header(source: VideoSource, *, limits: VideoLimits = DEFAULT_VIDEO_LIMITS) -> VideoHeader:
    """Read the header of a video file. Decodes its first frame, to know its size and rotation.

    Raises:
        SampleError: the video cannot be used; the message names the fault and the remedy, `.reason` is a slug.
        ConfigError: PyAV is not installed.
    """
    with _opened(source, limits) as video:
        num_frames, rate = video.listed_frames(), video.stream.average_rate
        frame = next(video.frames(), None)
        if frame is None:
            raise _undecodable("it has no frame that can be decoded")
        height, width = (frame.width, frame.height) if _turn_of(frame) in (90, 270) else (frame.height, frame.width)
    if num_frames is None:
        with _opened(source, limits) as video:
            scan = video.scan()
        num_frames, rate = len(scan.shown), _rate(scan, rate)
    if not rate or rate <= 0:
        fault = "the file does not say how many frames it has a second; write it again with a constant frame rate"
        raise SampleError(f"{fault} (ffmpeg -r), or give the frames as pictures with 'sample_fps'", "video_rate")
    return VideoHeader(num_frames=num_frames, fps=float(rate), height=height, width=width)


def decode_frames(
    source: VideoSource, indices: Sequence[int], *, limits: VideoLimits = DEFAULT_VIDEO_LIMITS
) -> Iterator[np.ndarray]:
    """Decode frames of a video, one at a time.

    Args:
        source: the file.
        indices: indices of the frames, ascending, from 0.
        limits: limits checked against the header before decoding.

    Returns:
        Each frame, uint8 `[H, W, 3]`, upright RGB.

    Raises:
        SampleError: a frame cannot be decoded, or the file cannot be used at all.
        ConfigError: PyAV is not installed.
    """
    with _opened(source, limits) as video:
        scan = video.scan()
    if indices[-1] >= len(scan.shown):
        raise _undecodable(f"frame {indices[-1]} is wanted, and only {len(scan.shown)} can be decoded")
    decoded = 0
    if scan.has_times:
        with _opened(source, limits) as video:
            for frame in video.jump_to(indices, scan):
                yield upright(frame)
                decoded += 1
    if decoded < len(indices):
        with _opened(source, limits) as video:
            for frame in video.walk_to(indices[decoded:], scan):
                yield upright(frame)


def upright(frame: Any) -> np.ndarray:
    """Return a frame as RGB, uint8 `[H, W, 3]`, rotated as its file demands.

    Raises:
        SampleError: the rotation is not a multiple of 90 degrees.
    """
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), _turn_of(frame) // 90))


def _turn_of(frame: Any) -> int:
    """Return the counterclockwise rotation in degrees with which a frame is displayed."""
    turn = frame.rotation % 360
    if turn not in _RIGHT_ANGLES:
        fault = f"the video is to be shown turned by {turn} degrees, and only right angles can be; encode it upright"
        raise SampleError(fault, "video_rotation")
    return turn


def open_video(source: VideoSource, *, limits: VideoLimits = DEFAULT_VIDEO_LIMITS) -> IO[bytes]:
    """Open the encoded bytes of a video, unchanged.

    Raises:
        SampleError: there are no bytes, they cannot be read, or they exceed the limits.
    """
    return open_source(source, kind="video", max_bytes=limits.max_bytes)


# ---------------------------------------------------------------------- one open file


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """The packets of a stream, without their data."""

    shown: Sequence[int]
    """Display time of each frame in the stream's time base, ascending."""
    keys: Sequence[int]
    """Display time of each key frame, ascending."""
    seconds: float
    """Seconds from the first frame to the end of the last."""
    has_times: bool
    """False: the container has no times, or two frames have the same time; then only the length of `shown` is valid."""


class _Video:
    """An open container and its video stream.

    Args:
        container: PyAV's container.
        limits: limits for the file.
    """

    def __init__(self, container: Any, limits: VideoLimits) -> None:
        self.container, self.limits = container, limits
        streams = [
            stream for stream in container.streams.video if not stream.disposition & stream.disposition.attached_pic
        ]
        if not streams:
            kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none at all"
            raise SampleError(
                f"the file has no stream of video (its streams: {kinds}); drop the sample", "video_frames"
            )
        self.stream = streams[0]
        if self.stream.codec_context is None:
            raise SampleError("libav has no decoder for its codec; encode it again as H.264", "video_codec")
        self.stream.codec_context.thread_count = 1
        self.stream.codec_context.options = {"max_pixels": str(limits.max_pixels)}
        self._check_size(self.stream.codec_context)

    def frames(self) -> Iterator[Any]:
        """Decode frames from the current position of the container.

        Raises:
            SampleError: the next frame is damaged.
        """
        for frame in self.container.decode(self.stream):
            if frame.is_corrupt:
                raise _undecodable(f"the frame at {frame.time} seconds is damaged")
            self._check_size(frame)
            yield frame

    def listed_frames(self) -> int | None:
        """Count the frames in the container's index. None: it has no index, or an incomplete one.

        Raises:
            SampleError: there are too many frames.
        """
        index = self.stream.index_entries
        if not self.stream.frames or self.stream.frames != len(index):
            return None
        count = sum(not entry.is_discard for entry in index)
        self._check_count(count)
        return count

    def scan(self) -> _Scan:
        """Read all packets of a container at its start, without decoding.

        Raises:
            SampleError: there are no frames, or too many.
        """
        is_vp8 = self.stream.codec_context.codec.canonical_name == "vp8"
        shown, keys, ends = [], [], []
        for packet in self.container.demux(self.stream):
            if not packet.size or packet.is_discard or (is_vp8 and _is_hidden(packet)):
                continue
            time = packet.dts if packet.pts is None else packet.pts
            shown.append(time or 0)
            ends.append((time or 0) + (packet.duration or 0))
            if packet.is_keyframe and time is not None:
                keys.append(time)
            self._check_count(len(shown))
        self._check_count(len(shown))
        return _Scan(
            shown=sorted(shown),
            keys=sorted(keys),
            seconds=(max(ends) - min(shown)) * float(self.stream.time_base),
            has_times=len(set(shown)) == len(shown) and self.container.format.name != _WITHOUT_TIMES,
        )

    def jump_to(self, indices: Sequence[int], scan: _Scan) -> Iterator[Any]:
        """Decode frames by their times. Ends early if seeking to a key frame does not lead to a frame."""
        frames, now = self.frames(), scan.shown[0]
        for wanted in (scan.shown[index] for index in indices):
            key = bisect_right(scan.keys, wanted) - 1
            if key >= 0 and now < scan.keys[key]:
                self._seek(scan.keys[key])
                frames = self.frames()
            frame = _first_from(frames, wanted)
            if frame is None or frame.pts != wanted:
                return
            now = wanted
            yield frame

    def _seek(self, time: int) -> None:
        """Seek to the last key frame displayed at or before a time."""
        self.container.seek(time, stream=self.stream)

    def walk_to(self, indices: Sequence[int], scan: _Scan) -> Iterator[Any]:
        """Decode frames by counting from the first; decode all of them if there are no times to compare.

        Raises:
            SampleError: a frame is damaged, or is not the one that the container lists at that index.
        """
        wanted, count = set(indices), 0
        for frame in self.frames():
            if scan.has_times and (count >= len(scan.shown) or frame.pts != scan.shown[count]):
                raise _undecodable(f"frame {count} of {len(scan.shown)} is missing or damaged")
            if count in wanted:
                yield frame
            count += 1
            if scan.has_times and count > indices[-1]:
                return
        if count != len(scan.shown):
            raise _undecodable(f"it lists {len(scan.shown)} frames, and {count} can be decoded")

    def _check_size(self, of: Any) -> None:
        check_size(of.width, of.height, self.limits, kind="video", seen="its frames are")

    def _check_count(self, count: int) -> None:
        if not count:
            raise SampleError("the file has no frames; write it again or drop the sample", "video_frames")
        if count > self.limits.max_frames:
            raise SampleError(
                f"it has more than VideoLimits.max_frames={self.limits.max_frames} frames; cut it, or raise the limit",
                "video_too_large",
            )


@contextmanager
def _opened(source: VideoSource, limits: VideoLimits) -> Iterator[_Video]:
    """Open a video file."""
    with open_video(source, limits=limits) as file:
        size = file.seek(0, io.SEEK_END)
        if (end := _end_of(file, size)) > size:
            raise _undecodable(f"it was cut short: by its own structure it has {end} bytes, and {size} are there")
        file.seek(0)
        with _container(file, "video", _CONTAINERS) as container:
            yield _Video(container, limits)


@contextmanager
def _container(file: IO[bytes], kind: str, formats: str) -> Iterator[Any]:
    """Open a file with PyAV. Any error of libav, whenever it occurs, becomes a `SampleError`."""
    check_extra("video", "av", needed_by=f"decoding {kind}")
    import av
    from av.error import FFmpegError

    options = {"format_whitelist": formats, "protocol_whitelist": ""}
    # Titles that are not UTF-8 are no fault of the medium. PyAV 19 no longer has this argument.
    titles: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    try:
        with av.open(file, options=options, **titles) as container:
            yield container
    except (FFmpegError, UnicodeDecodeError) as error:  # UnicodeDecodeError: names of damaged streams
        raise _undecodable(f"libav cannot read it ({type(error).__name__}: {error})", kind) from error


def _end_of(file: IO[bytes], size: int) -> int:
    """Return the length of a file according to its own structure, as far as that is there; 0: unknown.

    Needed because libav reads the remains of a truncated file without reporting an error.
    """
    file.seek(0)
    head = file.read(64)
    if head.startswith(b"RIFF"):  # avi: the size of the first chunk; a file written to a pipe has none
        length = int.from_bytes(head[4:8], "little")
        return 8 + length if 0 < length < 0xFFFFFF00 else 0
    if head.startswith(b"\x1a\x45\xdf\xa3"):  # mkv, webm: the size of the segment; a live recording has none
        at = head.find(b"\x18\x53\x80\x67") + 4
        more = 8 - head[at].bit_length() if 4 <= at < len(head) else 8
        value = int.from_bytes(head[at : at + more + 1], "big") & ((1 << 7 * (more + 1)) - 1)
        return 0 if more == 8 or value == (1 << 7 * (more + 1)) - 1 else at + more + 1 + value
    at = 0  # mp4, mov: the size before each top-level box
    while head[4:8] in _FIRST_BOXES and at + 8 <= size:
        file.seek(at)
        box = file.read(16)
        length = int.from_bytes(box[8:] if box[:4] == b"\0\0\0\1" else box[:4], "big")
        if length < 8 or not box[4:8].isalnum():  # 0: to the end of the file; not alphanumeric: a trailer of the camera
            break
        at += length
    return at


def _is_hidden(packet: Any) -> bool:
    """Return whether this is a VP8 frame that is not displayed, only referenced (RFC 6386, section 9.1)."""
    return not bytes(packet)[0] & 0x10


def _rate(scan: _Scan, header: Any) -> float | None:
    """Return the header's frame rate, or the mean rate if the header does not match the number of frames."""
    if header and abs(float(header) * scan.seconds - len(scan.shown)) <= 1:
        return float(header)
    return len(scan.shown) / scan.seconds if scan.seconds > 0 else None


def _first_from(frames: Iterator[Any], time: int) -> Any:
    """Return the first frame displayed at or after a time. None: there is none, or one before it is damaged."""
    from av.error import FFmpegError

    try:
        return next((frame for frame in frames if frame.pts is None or frame.pts >= time), None)
    except (FFmpegError, SampleError):  # after a seek, frames that a key frame's successors refer to may be missing
        return None


def _undecodable(fault: str, kind: str = "video") -> SampleError:
    return SampleError(
        f"the {kind} cannot be decoded: {fault}; write the file again or drop the sample", f"{kind}_undecodable"
    )


# ---------------------------------------------------------------------- audio

_OF_AUDIO = "wav,flac,mp3,ogg,mov,mp4,m4a,matroska,webm,aac"


def load_audio(source: Any, *, rate: int) -> np.ndarray:
    """Decode an audio to one channel, float32 `[n]`, within -1 ... 1.

    Args:
        source: a path, bytes, `{"bytes", "path"}` or a data URI.
        rate: sample rate of the result in Hz; audio with another rate is resampled.

    Raises:
        SampleError: the audio cannot be read (`audio_missing`, `audio_source`, `audio_undecodable`, ...).
        ConfigError: PyAV is not installed.
    """
    parts, most = [np.zeros(0, np.float32)], DEFAULT_VIDEO_LIMITS.max_bytes
    with (
        open_source(source, kind="audio", max_bytes=most) as file,
        _container(file, "audio", _OF_AUDIO) as container,
    ):
        import av

        if not container.streams.audio:
            raise SampleError("the file has no stream of audio; drop the sample", "audio_source")
        resampler = av.AudioResampler("fltp", rate=rate)
        for frame in (*container.decode(container.streams.audio[0]), None):  # None flushes the resampler
            parts += [made.to_ndarray().mean(0) for made in resampler.resample(frame)]
    return np.concatenate(parts)
