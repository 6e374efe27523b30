"""read_size: an image's size as load_image would give it, from its header alone."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image

from vlmpack.data.images import load_image, read_size

XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def encoded(fmt: str, orientation: int = 1, size: tuple[int, int] = (11, 7), **options) -> bytes:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    image.save(file, fmt, exif=exif, **options) if fmt not in ("BMP", "GIF", "PPM") else image.save(file, fmt)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def loaded(source) -> tuple[int, int]:
    image = load_image(source)
    return image.height, image.width


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("decoded", [False, True])
def test_a_pil_image_decoded_or_not(fmt: str, decoded: bool) -> None:
    image, other = (Image.open(io.BytesIO(encoded(fmt, 6))) for _ in range(2))
    if decoded:
        image.load()
    assert read_size(image) == loaded(other) == (11, 7)


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
    plain = encoded("PNG")
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
    path.write_bytes(data := encoded("JPEG", size=(997, 991)))
    monkeypatch.setattr(type(path), "open", lambda self, mode: Counted(data))
    assert read_size(path) == (991, 997)
    assert 0 < Counted.taken < len(data) / 100
