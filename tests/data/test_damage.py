"""Files that Pillow decodes without an error although pixels of them are missing; and what decoding may make."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, TiffImagePlugin

from vlmpack.data import damage, pixels
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_size

HEIGHT, WIDTH = 97, 61
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM", "TIFF")


def noise(channels: int = 3, seed: int = 0) -> Image.Image:
    shape = (HEIGHT, WIDTH, channels) if channels > 1 else (HEIGHT, WIDTH)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def encoded(image: Image.Image, fmt: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def tiff(monkeypatch: pytest.MonkeyPatch, compression: str | None, image: Image.Image | None = None) -> bytes:
    """A TIFF of several strips where it is compressed, and of one where it is not."""
    monkeypatch.setattr(TiffImagePlugin, "STRIP_SIZE", 1000)
    return encoded(image or noise(), "TIFF", compression=compression)


def with_tag(data: bytes, tag: int, value: int, *, count: int = 1) -> bytes:
    """A little-endian TIFF with one tag's value, a long, written anew; what lies elsewhere stays there."""
    at = struct.unpack_from("<I", data, 4)[0]
    (number,) = struct.unpack_from("<H", data, at)
    entries = [at + 2 + 12 * i for i in range(number)]
    (entry,) = [e for e in entries if struct.unpack_from("<H", data, e)[0] == tag]
    return data[:entry] + struct.pack("<HHII", tag, 4, count, value) + data[entry + 12 :]


def refusal(source) -> str:
    with pytest.raises(ImageError) as caught:
        load_image(source)
    assert caught.value.reason == "image_undecodable"
    return str(caught.value)


class TestTiff:
    @pytest.mark.parametrize("rows", [1, 2, 20, 96])
    def test_rows_of_a_strip_that_leave_the_rest_black(self, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        data = with_tag(tiff(monkeypatch, None), 278, rows)
        assert not np.asarray(Image.open(io.BytesIO(data)))[rows:].any()  # Pillow says nothing
        strips = -(-HEIGHT // rows)
        message = f"it has 1 strips, where {strips} of {WIDTH} x {rows} pixels make its size"
        assert message in refusal(data)
        with pytest.raises(ImageError, match=message):
            read_size(data)
        with pytest.raises(ImageError, match=message):
            load_image(Image.open(io.BytesIO(data)))

    @pytest.mark.parametrize(
        ("tag", "value", "message"),
        [
            (278, 0, f"its strips are {WIDTH} x 0 pixels"),
            (278, 97, "it has 20 strips, where 1 of"),
            (257, 96 + 50, "it has 20 strips, where 30 of"),
        ],
    )
    def test_tags_that_contradict_each_other(self, tag: int, value: int, message: str, monkeypatch) -> None:
        data = with_tag(tiff(monkeypatch, "tiff_lzw"), tag, value)
        assert message in refusal(data)

    def test_a_strip_outside_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = tiff(monkeypatch, None)
        size = len(plain)
        assert f"strip 0 of 17751 bytes at byte 200 does not lie in a file of {size} bytes" in refusal(
            with_tag(plain, 273, 200)
        )
        assert "strip 0 has 17000 bytes and needs 17751" in refusal(with_tag(plain, 279, 17000))

    def test_strips_that_overlap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = bytearray(tiff(monkeypatch, "tiff_lzw"))
        first, second = Image.open(io.BytesIO(bytes(data))).tag_v2[273][:2]
        at = data.index(struct.pack("<II", first, second))
        data[at + 4 : at + 8] = struct.pack("<I", first + 3)
        assert f"two of its strips, at bytes {first} and {first + 3}, overlap" in refusal(bytes(data))

    @pytest.mark.parametrize(
        "compression", [None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "lzma", "zstd"]
    )
    @pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "YCbCr"])
    def test_whole_ones_pass(self, compression: str | None, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = tiff(monkeypatch, compression, noise().convert(mode))
        assert load_image(data).size == (WIDTH, HEIGHT)

    @pytest.mark.parametrize("mode", ["1", "P", "LA", "I;16", "I", "F", "LAB"])
    def test_so_do_those_of_other_depths(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        grey = noise(1)
        image = {
            "LA": Image.merge("LA", (grey, grey)),
            "I;16": Image.fromarray(np.asarray(grey).astype(np.uint16)),
            "LAB": Image.merge("LAB", (grey, grey, grey)),
        }.get(mode) or grey.convert(mode)
        for compression in (None, "tiff_lzw"):
            assert load_image(tiff(monkeypatch, compression, image)).size == (WIDTH, HEIGHT)

    def test_a_directory_that_is_cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        xmp = b'<x tiff:Orientation="6"/>' + b" " * 300  # stands behind the pixels
        whole = encoded(noise(), "TIFF", compression="tiff_lzw", tiffinfo={700: xmp})
        assert load_image(whole).size == (HEIGHT, WIDTH)
        at = whole.index(xmp)
        for cut in (at, at + len(xmp) - 1):
            assert "its tag 700 of 325 bytes at byte" in refusal(whole[:cut])
        directory = struct.unpack_from("<I", whole, 4)[0]
        assert "its directory of tags is cut short" in refusal(whole[: directory + 20])

    @pytest.mark.parametrize("place", [2**64 - 1, 2**63, 2**40])
    def test_a_directory_at_a_place_that_no_file_has(self, place: int, tmp_path: Path) -> None:
        data = b"II+\0" + struct.pack("<HHQ", 8, 0, place) + bytes(64)
        (tmp_path / "a.tif").write_bytes(data)
        for source in (data, tmp_path / "a.tif"):
            assert "its directory of tags is cut short" in refusal(source)
            with pytest.raises(ImageError, match="its directory of tags is cut short"):
                read_size(source)

    def test_a_tag_of_more_values_than_python_can_hold(self) -> None:
        with pytest.raises(ImageError, match="its tag 324 has 9000000 values"):
            load_image(with_tag(tiled(tile=16), 324, 8, count=9_000_000) + bytes(36_000_000))

    @pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd"])
    def test_strips_of_ycbcr_that_are_too_short(self, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = with_tag(tiff(monkeypatch, compression, noise().convert("YCbCr")), 256, WIDTH + 30)
        Image.open(io.BytesIO(data)).load()  # Pillow says nothing
        refusal(data)

    def test_a_jpeg_in_a_strip_has_the_size_of_the_strip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = with_tag(tiff(monkeypatch, "jpeg"), 256, WIDTH + 30)
        Image.open(io.BytesIO(data)).load()  # Pillow says nothing
        assert f"rows and columns, where 8 x {WIDTH + 30} are expected" in refusal(data)

    def test_a_tile_may_be_no_larger_than_an_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = tiled(tile=30_000)
        monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("pixels were decoded"))
        with pytest.raises(
            ImageError, match="tiles of the TIFF are 900000000 pixels each, more than ImageLi"
        ) as caught:
            load_image(data)
        assert caught.value.reason == "image_too_large"

    def test_tiles_are_counted_as_strips_are(self) -> None:
        assert load_image(tiled(tile=16, number=1)).size == (16, 16)
        assert "it has 2 tiles, where 1 of 16 x 16 pixels make its size" in refusal(tiled(tile=16, number=2))


def tiled(*, tile: int, number: int = 1) -> bytes:
    """A grey TIFF of 16 x 16 pixels in tiles of Deflate."""
    content = zlib.compress(bytes(256))
    offsets, lengths = (struct.pack(f"<{max(number, 2)}I", *[v] * max(number, 2)) for v in (8, len(content)))
    head = 8 + len(content)
    many = [8, len(content)] if number == 1 else [head, head + len(offsets)]
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: many[0], 325: many[1]}
    entries = b"".join(
        struct.pack("<HHII", tag, 4, number if tag in (324, 325) else 1, value) for tag, value in tags.items()
    )
    place = head + len(offsets) + len(lengths)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", place) + content + offsets + lengths + directory


class TestZerosAtTheEnd:
    """What a download leaves that reserved its file and did not finish."""

    @pytest.mark.parametrize("fmt", ["PNG", "JPEG", "GIF"])
    def test_they_are_no_pixels(self, fmt: str) -> None:
        whole = encoded(noise(), fmt)
        pristine = load_image(whole).tobytes()
        taken = 0
        for at in [*range(len(whole) // 3, len(whole), max(1, len(whole) // 50)), *range(len(whole) - 9, len(whole))]:
            try:
                image = load_image(whole[:at] + bytes(len(whole) - at))
            except ImageError as error:
                assert error.reason == "image_undecodable"
            else:
                taken += 1
                assert image.tobytes() == pristine, f"cut at {at} of {len(whole)}"
        assert taken < 9  # where only the mark of the end is gone

    @pytest.mark.parametrize("lossless", [False, True])
    def test_nor_in_webp_where_they_are_many(self, lossless: bool) -> None:
        whole = encoded(noise(), "WEBP", lossless=lossless)
        assert "its pixels end in 512 zero bytes or more" in refusal(whole[:-600] + bytes(600))

    @pytest.mark.parametrize("top", [False, True], ids=["blank", "with something on top"])
    @pytest.mark.parametrize("how", [{"quality": 80}, {"lossless": True, "quality": 0, "method": 0}], ids=str)
    def test_a_large_blank_page_in_webp_ends_in_zeros_and_is_whole(self, top: bool, how: dict) -> None:
        page = Image.new("RGB", (2600, 2600), "white")
        if top:
            page.paste(noise(), (7, 7))
        whole = encoded(page, "WEBP", **how)
        image = load_image(whole)
        assert image.tobytes() == Image.open(io.BytesIO(whole)).convert("RGB").tobytes()
        if top:
            assert whole[-600:].rstrip(b"\0\1") == b""  # or the case would be none

    def test_a_thumbnail_has_an_end_of_its_own(self) -> None:
        exif = Image.Exif()
        exif[270] = encoded(Image.new("RGB", (8, 8)), "JPEG").decode("latin-1")
        whole = encoded(noise(), "JPEG", exif=exif.tobytes() + encoded(Image.new("RGB", (8, 8)), "JPEG"))
        assert "it ends in zeros, without the marker of its end" in refusal(whole[:-300] + bytes(300))

    def test_behind_the_end_they_are_padding(self) -> None:
        for fmt in ("PNG", "JPEG", "GIF", "WEBP"):
            whole = encoded(noise(), fmt)
            assert load_image(whole + bytes(4096)).tobytes() == load_image(whole).tobytes()


class TestPngBehindItsPixels:
    """Where Pillow reads an orientation, and compares no checksum."""

    def test_a_checksum_that_is_wrong(self) -> None:
        exif = Image.Exif()
        exif[274] = 6
        told = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
        whole = encoded(noise(), "PNG")
        at = whole.index(b"IEND") - 4
        chunk = struct.pack(">I", len(told) - 4) + told + struct.pack(">I", zlib.crc32(told))
        turned = whole[:at] + chunk + whole[at:]
        assert load_image(turned).size == (HEIGHT, WIDTH)
        flipped = bytearray(turned)
        flipped[at + chunk.index(6)] ^= 2
        assert f"the checksum of its eXIf chunk at byte {at} is wrong" in refusal(bytes(flipped))

    def test_an_end_that_is_missing(self) -> None:
        whole = encoded(noise(), "PNG")
        for cut in range(1, 13):
            assert f"it ends before its last chunk, at byte {len(whole) - cut}" in refusal(whole[:-cut])


class TestLoadTruncatedImages:
    @pytest.fixture(autouse=True)
    def filling(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """As scripts set it that would rather have half an image."""
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        yield
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_what_is_cut_short_is_refused_all_the_same(self, fmt: str) -> None:
        whole = encoded(noise(), fmt)
        for cut in (len(whole) // 2, len(whole) * 9 // 10):
            refusal(whole[:cut])
        assert load_image(whole).size == (WIDTH, HEIGHT)

    def test_also_while_another_thread_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other_has_begun, done = threading.Event(), threading.Event()
        cut = encoded(noise(), "BMP")[:9000]

        def slow(image: Image.Image) -> None:
            if image.size == (5, 5):
                other_has_begun.set()
                done.wait(10)

        monkeypatch.setattr("vlmpack.data.images.check_content", slow)
        other = threading.Thread(target=load_image, args=(encoded(Image.new("RGB", (5, 5)), "BMP"),))
        other.start()
        other_has_begun.wait(10)
        refusal(cut)
        assert ImageFile.LOAD_TRUNCATED_IMAGES is False  # the other one is not done
        done.set()
        other.join()

    def test_a_forked_process_begins_anew(self) -> None:
        with damage.filling.off():
            fresh = damage._Filling()
            fresh.threads = 1  # as a child finds it whose parent had a thread decoding
            fresh.restart()
            assert ImageFile.LOAD_TRUNCATED_IMAGES is True
            assert fresh.threads == 0


class TestWhatIsMade:
    MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")

    def image(self, mode: str) -> Image.Image:
        grey = noise(1)
        special = {
            "LA": lambda: Image.merge("LA", (grey, noise(1, 1))),
            "LAB": lambda: Image.merge("LAB", (grey, grey, grey)),
            "I;16": lambda: Image.fromarray(np.asarray(grey).astype(np.uint16) * 257),
            "RGBA": lambda: noise(4),
        }
        return special[mode]() if mode in special else (grey if mode in "IF" else noise()).convert(mode)

    @pytest.mark.parametrize("mode", MODES)
    def test_some_rows_at_a_time_give_the_same_pixels(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        image = self.image(mode)
        at_once, seen = load_image(image).tobytes(), []
        convert = pixels._part_to_rgb
        monkeypatch.setattr(pixels, "_PIXELS_AT_ONCE", 7 * WIDTH)
        monkeypatch.setattr(pixels, "_part_to_rgb", lambda part: seen.append(part.height) or convert(part))
        assert load_image(image).tobytes() == at_once
        assert seen == ([] if mode == "RGB" else [7] * 13 + [6])

    @pytest.mark.parametrize("transparency", [0, b"\0\x80\xff"])
    def test_a_palette_with_transparency_too(self, transparency: int | bytes, monkeypatch) -> None:
        data = encoded(noise().quantize(16), "PNG", transparency=transparency)
        at_once = load_image(data).tobytes()
        monkeypatch.setattr(pixels, "_PIXELS_AT_ONCE", 7 * WIDTH)
        assert load_image(data).tobytes() == at_once

    def test_values_out_of_range_are_found_in_any_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pixels, "_PIXELS_AT_ONCE", 7 * WIDTH)
        for value in (-1.0, 256.0, float("nan")):
            grey = np.zeros((HEIGHT, WIDTH), np.float32)
            grey[50, 3] = value
            with pytest.raises(ImageError, match="only 0 to 255 has a known meaning"):
                load_image(Image.fromarray(grey))

    def test_a_picture_from_webp_does_not_keep_its_decoder(self) -> None:
        assert type(load_image(encoded(noise(), "WEBP"))) is Image.Image

    @pytest.mark.parametrize("head", [b"P3 9 9 255\n", b"P6 9 9 100\n"])
    def test_large_ones_that_pillow_decodes_in_python_are_refused(self, head: bytes) -> None:
        data = head + b"1 " * 243
        assert load_image(data, limits=ImageLimits(max_pixels=81 * 16)).size == (9, 9)
        with pytest.raises(ImageError, match="Pillow decodes only a million a second; save it as PNG") as caught:
            load_image(data, limits=ImageLimits(max_pixels=81 * 16 - 1))
        assert caught.value.reason == "image_too_large"
