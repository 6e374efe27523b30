"""load_image: every way a dataset holds an image, and every way it can be unusable; read_size: the same by headers."""

from __future__ import annotations

import base64
import io
import pickle
import socket
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from vlmpack.data import images
from vlmpack.data.images import ImageLimits, load_image, read_size
from vlmpack.errors import SampleError

UPRIGHT = {  # EXIF orientation -> what brings the stored array upright (EXIF 2.32, table "Orientation")
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def noise(height: int = 7, width: int = 11, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, fmt: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", b"")


def reason_of(source, **options) -> str:
    with pytest.raises(SampleError) as caught:
        load_image(source, **options)
    return caught.value.reason


def assert_pixels(image: Image.Image, expected: np.ndarray) -> None:
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), expected)


# ---------------------------------------------------------------- sources


def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    pixels = noise()
    picture = Image.fromarray(pixels)
    data = encoded(picture)
    path = tmp_path / "a picture 100%.png"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [
        picture,
        path,
        str(path),
        f"file://{path}",
        path.as_uri(),  # percent-encoded
        "file://localhost" + path.as_uri()[len("file://") :],
        data,
        bytearray(data),
        memoryview(data),
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
        {"bytes": data, "path": "somewhere/else.png"},
        uri,
        uri[:60] + "\n" + uri[60:],
    ]
    for source in sources:
        assert_pixels(load_image(source), pixels)


@pytest.mark.parametrize(
    "address", ["http://host/a.png", "HTTPS://host/a.png", "ftp://host/a.png", "s3://bucket/a.png", "hf://d/a.png"]
)
def test_remote_addresses_are_refused_without_opening_a_connection(address, monkeypatch):
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a connection was opened"))
    with pytest.raises(SampleError, match=r"is remote; nothing is fetched.*download the image first") as caught:
        load_image(address)
    assert caught.value.reason == "image_remote"
    assert reason_of({"bytes": None, "path": address}) == "image_remote"


SQUARE = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(
    ("source", "reason", "message"),
    [
        ("missing.png", "image_missing", r"no image file at 'missing\.png'; check the path"),
        ("file://fileserver/share/a.png", "image_missing", "no image file at"),
        (Path("/"), "image_missing", "no image file at"),
        ("/dev/zero", "image_missing", "no image file at"),
        ("nul\0l.png", "image_missing", "no image file at"),
        ("x" * 5000, "image_missing", "no image file at"),
        (None, "image_source", "is of type NoneType, which cannot be read; give the path"),
        (noise(), "image_source", "of type ndarray"),
        ([b""], "image_source", "of type list"),
        ({"url": "a.png"}, "image_source", r"must hold 'bytes' or 'path'; its keys: \['url'\]"),
        ({"bytes": None, "path": None}, "image_source", "must hold 'bytes' or 'path'"),
        ("data:image/png,x", "image_source", "is no data:image/png;base64,<payload>"),
        ("data:image/png;base64,@@@@", "image_source", "base64,<payload>: "),
        ("data:image/png;base64,", "image_undecodable", r"is empty \(0 bytes\)"),
        (b"<!DOCTYPE html><html></html>", "image_undecodable", "are not an image of the formats BMP, GIF"),
        (b"\x89PNG\r\n\x1a\n", "image_undecodable", "are not an image of the formats"),
        (encoded(SQUARE, "PDF"), "image_undecodable", "are not an image of the formats"),
        (Image.new("RGB", (201, 1)), "image_aspect_ratio", "201 x 1 pixels, an aspect ratio of 201.0, more than 200"),
        (encoded(Image.new("RGB", (3000, 10))), "image_aspect_ratio", "3000 x 10 pixels"),
        (Image.new("RGB", (0, 5)), "image_zero_size", "there is nothing in it"),
    ],
)
def test_what_cannot_be_used_is_refused(source, reason, message):
    with pytest.raises(SampleError, match=message) as caught:
        load_image(source)
    assert caught.value.reason == reason
    again = pickle.loads(pickle.dumps(caught.value))  # as a worker sends it
    assert (str(again), again.reason) == (str(caught.value), reason)


@pytest.mark.parametrize(
    ("limits", "source", "reason"),
    [
        (ImageLimits(max_pixels=63), SQUARE, "image_too_large"),
        (ImageLimits(max_pixels=63), encoded(SQUARE), "image_too_large"),
        (ImageLimits(max_bytes=10), b"12345678901", "image_too_large"),
        (ImageLimits(max_bytes=10), "data:image/png;base64," + "A" * 40, "image_too_large"),
        (ImageLimits(formats=("PNG",)), encoded(SQUARE, "JPEG"), "image_undecodable"),
    ],
)
def test_limits_hold(limits, source, reason):
    assert reason_of(source, limits=limits) == reason
    for size in ((200, 1), (1, 1), (8, 8)):
        assert load_image(Image.new("RGB", size), limits=ImageLimits(max_pixels=200)).size == size


# ---------------------------------------------------------------- orientation


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("fmt", ["PNG", "TIFF"])  # Pillow turns TIFF by itself while it decodes: once must stay once
def test_exif_orientation_is_applied_once(fmt, orientation):
    stored = noise()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(Image.fromarray(stored), fmt, exif=exif)
    expected = UPRIGHT[orientation](stored)
    once = load_image(data)
    assert_pixels(once, expected)
    assert_pixels(load_image(once), expected)
    given = Image.open(io.BytesIO(data))
    before = given.size, given.getexif().get(ExifTags.Base.Orientation)
    assert_pixels(load_image(given), expected)
    if fmt == "PNG":  # and the picture is left as it was
        assert (given.size, given.getexif().get(ExifTags.Base.Orientation)) == before


# ---------------------------------------------------------------- colour


def gray(values: list[float], dtype: str) -> Image.Image:
    return Image.fromarray(np.array([values]).astype(dtype))


@pytest.mark.parametrize(
    ("picture", "options", "expected"),
    [
        # 51/255 = 0.2: 0.2 * 10 + 0.8 * 255 = 206
        (Image.fromarray(np.uint8([[[10, 20, 30, 0], [10, 20, 30, 51]]])), {}, [[255] * 3, [206, 208, 210]]),
        (Image.merge("LA", (gray([10, 10], "uint8"), gray([0, 255], "uint8"))), {}, [[255] * 3, [10] * 3]),
        (Image.fromarray(np.uint8([[[9, 9, 9], [4, 5, 6]]])), {"transparency": (9, 9, 9)}, [[255] * 3, [4, 5, 6]]),
    ],
    ids=["alpha", "gray with alpha", "one colour"],
)
def test_transparency_is_laid_over_white(picture, options, expected):
    assert_pixels(load_image(encoded(picture, **options)), np.uint8([expected]))


@pytest.mark.parametrize(
    ("picture", "seen"),
    [
        (gray([-1, 5], "int32"), "from -1 to 5"),
        (gray([0, 70000], "int32"), "from 0 to 70000"),
        (gray([0.0, 300.0], "float32"), "from 0 to 300"),
        (gray([0.0, np.nan], "float32"), "nan"),
        (gray([0.0, 1.0], "float32"), "multiply it by 255 first"),
        (Image.new("La", (4, 4)), "mode La has no way to RGB"),
    ],
)
def test_colours_of_unknown_meaning_are_refused(picture, seen):
    with pytest.raises(SampleError, match=seen) as caught:
        load_image(picture)
    assert caught.value.reason == "image_mode"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_some_rows_at_a_time_give_the_same_pixels(mode, monkeypatch):
    deep = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    plain = noise(97, 61)
    image = Image.fromarray(plain[..., 0].astype(deep[mode])) if mode in deep else Image.fromarray(plain).convert(mode)
    at_once, seen, convert = load_image(image).tobytes(), [], images._part_to_rgb
    monkeypatch.setattr(images, "_PIXELS_AT_ONCE", 7 * 61)
    monkeypatch.setattr(images, "_part_to_rgb", lambda part: seen.append(part.height) or convert(part))
    assert load_image(image).tobytes() == at_once
    assert seen == [7] * 13 + [6]


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (10_000, r"10000 x 10000 = 100000000 pixels.*max_pixels=64000000; scale it down or raise the limit"),
        (50_000, r"too large for Pillow .*scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS"),
    ],
    ids=["Pillow would warn", "Pillow would fail"],
)
def test_a_decompression_bomb_is_refused_by_its_header(side, message, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("pixels were decoded"))
    with pytest.raises(SampleError, match=message) as caught:
        load_image(png_header(side, side))
    assert caught.value.reason == "image_too_large"


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("fills", [False, True], ids=["", "LOAD_TRUNCATED_IMAGES"])
@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM", "GIF"])
def test_a_truncated_image_is_refused(fmt, fills, monkeypatch):
    """PNG and JPEG also where a script has told Pillow to fill what is missing."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", fills and fmt in ("PNG", "JPEG"))
    data = encoded(Image.fromarray(noise(64, 64)), fmt)
    cuts = range(0, len(data) // 2, max(1, len(data) // 40))
    assert {reason_of(data[:cut]) for cut in cuts} == {"image_undecodable"}
    if fmt in ("PNG", "JPEG"):  # others are not even opened by Pillow
        assert reason_of(Image.open(io.BytesIO(data[: len(data) // 2]))) == "image_undecodable"
    assert load_image(data).size == (64, 64)


def test_a_thumbnail_has_an_end_of_its_own():
    small = encoded(Image.new("RGB", (8, 8)), "JPEG")
    exif = Image.Exif()
    exif[270] = small.decode("latin-1")
    whole = encoded(Image.fromarray(noise(97, 61)), "JPEG", exif=exif.tobytes() + small)
    with pytest.raises(SampleError, match="it has no marker of its end"):
        load_image(whole[:-300] + bytes(300))


# ---------------------------------------------------------------- sizes, from headers alone

XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def turned(fmt: str) -> bytes:
    """A file whose picture of 11 x 7 pixels lies on its side."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return encoded(Image.fromarray(noise()), fmt, exif=exif)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def loaded(source) -> tuple[int, int]:
    image = load_image(source)
    return image.height, image.width


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_tiff_may_tell_its_orientation_in_xmp_alone(orientation: int, compression: str | None) -> None:
    file = io.BytesIO()
    xmp = XMP.format(orientation).encode()
    Image.new("RGB", (11, 7)).save(file, "TIFF", compression=compression, tiffinfo={700: xmp})
    data = file.getvalue()
    assert read_size(data) == loaded(data) == ((11, 7) if orientation > 4 else (7, 11))
    with Image.open(io.BytesIO(data)) as image:
        assert read_size(image) == loaded(data)
        image.load()
        assert read_size(image) == loaded(image) == loaded(data)


@pytest.mark.parametrize("kind", ["bytes", "path", "PIL"])
def test_an_orientation_behind_the_pixels_is_found_in_every_source(tmp_path, kind: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    plain = encoded(Image.fromarray(noise()))
    at = plain.index(b"IEND") - 4
    data = plain[:at] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[at:]
    path = tmp_path / "turned.png"
    path.write_bytes(data)
    if kind == "PIL":
        with Image.open(path) as image:
            assert read_size(image) == (11, 7)
    assert read_size({"bytes": data}.get(kind, path)) == loaded(data) == (11, 7)


def test_of_a_file_no_more_is_read_than_its_header(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    class Counted(io.BytesIO):
        taken = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            Counted.taken += len(data)
            return data

    path = tmp_path / "large.jpg"
    path.write_bytes(data := encoded(Image.fromarray(noise(991, 997)), "JPEG"))
    monkeypatch.setattr(type(path), "open", lambda self, mode: Counted(data))
    assert read_size(path) == (991, 997)
    assert 0 < Counted.taken < len(data) / 100
