"""Whatever holds an image becomes one upright RGB image, or a refusal that names the sample."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmpack.data.images import to_rgb
from vlmpack.errors import SampleError

ORIENTATION = 0x0112


def gradient(width: int = 23, height: int = 11) -> Image.Image:
    levels = np.linspace(0, 255, width * height * 3).astype(np.uint8).reshape(height, width, 3)
    return Image.fromarray(levels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sideways() -> bytes:
    """A camera held upright: 23 x 11 pixels stored, to be turned to 11 x 23."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return encoded(gradient(), exif=exif)


class TestForms:
    def test_every_form_gives_the_same_pixels(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        path.write_bytes(encoded(gradient()))
        forms = [
            gradient(),
            path.read_bytes(),
            path,
            str(path),
            {"bytes": path.read_bytes(), "path": None},
            {"bytes": None, "path": str(path)},
        ]
        assert {to_rgb(form).tobytes() for form in forms} == {gradient().tobytes()}

    @pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA", "YCbCr"])
    def test_every_mode_becomes_rgb(self, mode: str) -> None:
        assert to_rgb(gradient().convert(mode)).mode == "RGB"

    def test_transparency_is_put_on_white(self) -> None:
        clear = Image.new("RGBA", (3, 5), (255, 0, 0, 0))
        half = Image.new("LA", (3, 5), (0, 128))
        palette = Image.new("P", (3, 5))
        palette.info["transparency"] = 0
        assert to_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
        assert to_rgb(half).getpixel((0, 0)) == (127, 127, 127)
        assert to_rgb(palette).getpixel((0, 0)) == (255, 255, 255)


class TestOrientation:
    def test_it_is_applied(self) -> None:
        turned = to_rgb(sideways())
        assert turned.size == (11, 23)
        assert turned.tobytes() == gradient().transpose(Image.Transpose.ROTATE_270).tobytes()

    def test_it_is_applied_once(self) -> None:
        once = to_rgb(sideways())
        assert to_rgb(once).tobytes() == once.tobytes()
        assert ORIENTATION not in once.getexif()

    def test_it_is_applied_to_opened_images_too(self) -> None:
        assert to_rgb(Image.open(io.BytesIO(sideways()))).size == (11, 23)


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "seen"),
        [
            (None, "image is empty; give a PIL image"),
            ({"bytes": None, "path": None}, "image is empty"),
            (7, "image is a int; give a PIL image, encoded bytes, a path"),
            (b"<html>not found</html>", r"the image \(bytes\) cannot be read: cannot identify"),
            ("/nowhere/a.png", r"the image \(/nowhere/a.png\) cannot be read: .*No such file.*replace the file"),
            (encoded(gradient())[:60], r"the image \(bytes\) cannot be read"),
        ],
    )
    def test_what_is_no_image_is_refused(self, value: Any, seen: str) -> None:
        with pytest.raises(SampleError, match=f"sample 5: {seen}") as caught:
            to_rgb(value, index=5)
        assert caught.value.reason == "image_unreadable"

    def test_a_bomb_is_refused_before_it_is_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(SampleError, match=r"sample 2: the image is too large .*253 pixels.*shrink it") as caught:
            to_rgb(encoded(gradient()), index=2)
        assert caught.value.reason == "image_too_large"

    @pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of a damaged TIFF that it can still read
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
    def test_damaged_files_give_an_image_or_a_refusal_and_nothing_else(self, kind: str) -> None:
        rng, whole = random.Random(0), encoded(gradient(40, 30), kind)
        outcomes = []
        for _ in range(80):
            damaged = bytearray(whole[: rng.randrange(1, len(whole) + 1)])
            for _ in range(rng.randrange(0, 6)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                outcomes.append(to_rgb(bytes(damaged)).mode)
            except SampleError as error:
                outcomes.append(error.reason)
        assert set(outcomes) <= {"RGB", "image_unreadable", "image_too_large"}
        assert "image_unreadable" in outcomes
