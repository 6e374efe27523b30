"""Files of videos: headers against decoding, single frames against all of them, and everything that is refused."""

from __future__ import annotations

import importlib.util
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from cases import slow
from clips import clip_bytes, number_of, write_clip
from mutations import check, damaged, outcomes

from vlmpack.data import VideoLimits, videos
from vlmpack.data.videos import decode_frames, read_video_header
from vlmpack.errors import ConfigError, SampleError

NAMES = ["h264.mp4", "h264.mkv", "mpeg4.avi", *slow("h264.mov", "vp9.webm", "vp8.webm")]
"""Of `CODECS`."""
IRREGULAR = [0, 100, 150, 160, 700, 1500, *range(1570, 2550, 70)]
"""Times of 20 frames in milliseconds."""


@pytest.fixture(scope="module")
def clip() -> bytes:
    return clip_bytes()


def all_frames(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def refused(source: Any, **limits: Any) -> SampleError:
    with pytest.raises(SampleError) as caught:
        read_video_header(source, limits=VideoLimits(**limits))
    return caught.value


def decoded(source: Any, indices: Any) -> list[int]:
    return [number_of(frame) for frame in decode_frames(source, indices)]


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("name", NAMES)
def test_the_header_and_single_frames_are_those_of_decoding_everything(name: str, tmp_path: Path) -> None:
    write_clip(tmp_path / name)
    expected = all_frames(tmp_path / name)
    header = read_video_header(tmp_path / name)
    assert (header.num_frames, header.fps, header.height, header.width) == (20, 10.0, 64, 96)
    assert len(expected) == 20
    for indices in ([0, 7, 13, 19], [11], [5, 6], range(20)):
        for index, frame in zip(indices, decode_frames(tmp_path / name, indices), strict=True):
            np.testing.assert_array_equal(frame, expected[index])
            assert number_of(frame) == index


def test_no_frame_is_taken_for_another(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump that leads nowhere, or beyond the frame that is wanted, is given up; all is decoded from the start."""
    with monkeypatch.context() as nowhere:
        nowhere.setattr(videos._Video, "jump_to", lambda self, indices, scan: iter(()))
        assert decoded(clip, [0, 7, 19]) == [0, 7, 19]
    monkeypatch.setattr(
        videos._Video, "_seek", lambda self, time: self.container.seek(time + 8 * 1024, stream=self.stream)
    )
    assert decoded(clip, [0, 7, 13, 19]) == [0, 7, 13, 19]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_frames_of_a_varying_rate_are_counted_and_their_rate_is_the_mean(name: str, tmp_path: Path) -> None:
    write_clip(tmp_path / name, times=IRREGULAR, codec="libx264")
    header = read_video_header(tmp_path / name)
    assert header.num_frames == 20
    assert header.fps == pytest.approx(20 / 2.55, rel=0.03)
    assert decoded(tmp_path / name, [0, 3, 4, 19]) == [0, 3, 4, 19]


def test_frames_that_an_edit_list_cuts_off_are_not_there(tmp_path: Path) -> None:
    """As `ffmpeg -ss 0.3 -c copy` writes it: packets from the key frame on, the first three of them not to be shown."""
    write_clip(tmp_path / "whole.mp4")
    with av.open(str(tmp_path / "whole.mp4")) as whole, av.open(str(tmp_path / "cut.mp4"), "w") as out:
        source = whole.streams.video[0]
        stream = out.add_stream_from_template(source)
        for packet in whole.demux(source):
            if packet.size:
                packet.pts -= 3 * 1024
                packet.dts -= 3 * 1024
                packet.stream = stream
                out.mux(packet)
    with av.open(str(tmp_path / "cut.mp4")) as container:
        assert container.streams.video[0].frames == 20  # by the header alone
    assert read_video_header(tmp_path / "cut.mp4").num_frames == 17
    assert decoded(tmp_path / "cut.mp4", range(17)) == list(range(3, 20))


def test_a_file_in_fragments_is_counted(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", container_options={"movflags": "frag_keyframe+empty_moov"})
    assert read_video_header(tmp_path / "a.mp4").num_frames == 20
    assert decoded(tmp_path / "a.mp4", [0, 11, 19]) == [0, 11, 19]


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_a_video_is_turned_upright(turn: int, tmp_path: Path) -> None:
    write_clip(tmp_path / "plain.mp4")
    write_clip(tmp_path / "turned.mp4", rotation=turn)
    header = read_video_header(tmp_path / "turned.mp4")
    frame = next(decode_frames(tmp_path / "turned.mp4", [5]))
    assert frame.shape[:2] == (header.height, header.width)
    np.testing.assert_array_equal(frame, np.rot90(next(decode_frames(tmp_path / "plain.mp4", [5])), turn // 90))


def test_turns_that_are_no_right_angle_are_refused(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", rotation=45)
    error = refused(tmp_path / "a.mp4")
    assert error.reason == "video_rotation"
    assert "turned by 45 degrees" in error.detail


# ---------------------------------------------------------------- sources


def test_a_path_its_bytes_and_a_dict_of_either_are_the_same_video(clip: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a clip.mp4"
    path.write_bytes(clip)
    sources = [path, str(path), path.as_uri(), clip, bytearray(clip), {"bytes": clip, "path": None}]
    for source in (*sources, {"bytes": None, "path": str(path)}):
        assert read_video_header(source) == read_video_header(clip)
        assert decoded(source, [3, 14]) == [3, 14]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("film.mp4", "video_missing"),
        ("https://example.org/film.mp4", "video_remote"),
        ("concat:a.mp4|b.mp4", "video_missing"),
        ({"frames": 3}, "video_source"),
        (b"", "video_undecodable"),
        (b"no video at all", "video_undecodable"),
    ],
)
def test_what_is_no_file_of_a_video_is_refused(source: Any, reason: str) -> None:
    assert refused(source).reason == reason


def test_a_playlist_opens_no_other_file(clip: bytes, tmp_path: Path) -> None:
    """libav would follow it, to files and to addresses."""
    (tmp_path / "a.mp4").write_bytes(clip)
    playlist = tmp_path / "list.mp4"
    playlist.write_text("ffconcat version 1.0\nfile a.mp4\n")
    with playlist.open("rb") as file, av.open(file) as container:
        assert sum(1 for _ in container.decode(video=0)) == 20
    assert refused(playlist).reason == "video_undecodable"


def test_without_pyav_the_extra_is_named(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("vlmpack.errors.find_spec", lambda name: None if name == "av" else find(name))
    with pytest.raises(ConfigError, match=r"decoding video needs av, not installed here: pip install"):
        read_video_header(clip)


# ---------------------------------------------------------------- damage and limits


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_was_cut_short_anywhere_is_refused_by_its_header(name: str, tmp_path: Path) -> None:
    """Also mp4 whose index stands in front."""
    write_clip(tmp_path / name, container_options={"movflags": "faststart"} if name == "h264.mp4" else None)
    whole = (tmp_path / name).read_bytes()
    for size in (1, 30, *(len(whole) * part // 7 for part in range(1, 7)), len(whole) - 1):
        assert refused(whole[:size]).reason == "video_undecodable", size
    assert read_video_header(whole).num_frames == 20


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_or_leaves_a_video_of_that_length(name: str, tmp_path: Path) -> None:
    """Every frame that was measured is there. Some damage no codec can see."""
    write_clip(tmp_path / name)
    whole = (tmp_path / name).read_bytes()

    def case(rng: random.Random) -> bool:
        data = damaged(whole, rng)
        count = read_video_header(data).num_frames
        return len(list(decode_frames(data, range(count)))) == count

    check(outcomes(40, 0, case), cases=40)


def test_a_file_of_sound_has_no_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 8000, 0, Fraction(1, 8000)
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    error = refused(tmp_path / "a.mp4")
    assert error.reason == "video_frames"
    assert "no stream of video (its streams: audio)" in error.detail


@pytest.mark.parametrize(
    ("limits", "reason", "fault"),
    [
        ({"max_pixels": 64 * 96 - 1}, "video_too_large", "96 x 64 = 6144 pixels, more than"),
        ({"max_frames": 19}, "video_too_large", "more than VideoLimits.max_frames=19 frames"),
        ({"max_bytes": 1000}, "video_too_large", "more than VideoLimits.max_bytes=1000"),
        ({"max_aspect_ratio": 1.4}, "video_aspect_ratio", ", more than 1.4, where"),
    ],
)
@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv"])
def test_limits_hold_before_frames_are_decoded(
    limits: dict[str, Any], reason: str, fault: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_clip(tmp_path / name)
    if "max_frames" not in limits:
        monkeypatch.setattr(videos._Video, "frames", lambda self: pytest.fail("a frame is decoded"))
    error = refused(tmp_path / name, **limits)
    assert error.reason == reason
    assert fault in error.detail


def test_hidden_frames_of_vp8_are_no_frames() -> None:
    shown, hidden = av.Packet(b"\x10\x02\x00"), av.Packet(b"\x00\x02\x00")
    assert not videos._is_hidden(shown)
    assert videos._is_hidden(hidden)
