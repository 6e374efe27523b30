"""Images of every kind, whole and damaged: each is what Pillow makes of it, or refused with a reason.

    drawn image ──encode──▶ file ──damage──▶ data ──┬─ Pillow: open, exif_transpose, the documented rule for color
                                                    └─ load_image, read_size

Damage inside compressed pixels that still decodes cannot be seen: it is right where it equals Pillow's.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import slow
from mutations import check, damaged, outcomes
from PIL import Image, ImageOps

from vlmpack.data.images import ImageLimits, load_image, read_size
from vlmpack.errors import SampleError

LIMITS = ImageLimits(max_pixels=250_000)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
REASONS = {"image_undecodable", "image_too_large", "image_aspect_ratio", "image_mode", "image_exif", "image_zero_size"}
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'
MODES = {
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "PPM": ("1", "L", "RGB", "I", "I;16"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F"),
    "WEBP": ("RGB", "RGBA", "L", "P"),
    "ICO": ("RGBA",),
}
COMPRESSIONS = (None, "raw", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits", "jpeg", "lzma", "zstd")


# ---------------------------------------------------------------- whole files


def drawn(rng: random.Random, mode: str, height: int, width: int) -> Image.Image:
    """Noise, or large even areas, in one of Pillow's modes."""
    source = np.random.default_rng(rng.getrandbits(32))
    pixels = source.integers(0, 256, (height, width, 4), dtype=np.uint8)
    if rng.random() < 0.4:
        pixels[:] = np.where(np.arange(width)[None, :, None] * 2 < width, pixels[0, 0], 255)
    if mode in ("I;16", "I", "F"):
        dtype = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
        return Image.fromarray((pixels if mode == "F" else pixels.view(np.uint16))[..., 0].astype(dtype))
    if mode in ("LA", "RGBA", "CMYK", "LAB"):
        return Image.merge(mode, [Image.fromarray(pixels[..., band]) for band in range(len(mode))])
    image = Image.fromarray(pixels[..., :3])
    return image.quantize(16) if mode == "P" else image.convert(mode)


def encoded(rng: random.Random) -> tuple[str, bytes]:
    """A whole file and Pillow's name of its format, with an orientation wherever the format has a place for one."""
    fmt = rng.choice([*FORMATS, "ICO"])
    mode = rng.choice(MODES[fmt])
    image = drawn(rng, mode, rng.randint(1, 40), rng.randint(1, 40))
    options: dict[str, Any] = {}
    if fmt in ("GIF", "PNG", "TIFF", "WEBP") and rng.random() < 0.2:
        options |= {"save_all": True, "append_images": [drawn(rng, mode, *image.size[::-1]) for _ in range(2)]}
    if fmt in ("GIF", "PNG") and mode == "P" and rng.random() < 0.5:
        options["transparency"] = rng.choice([0, 3] if fmt == "GIF" else [0, b"\0\x80\xff"])
    if fmt == "PNG" and mode == "RGB" and rng.random() < 0.3:
        options["transparency"] = image.getpixel((0, 0))
    if fmt == "TIFF":
        options["compression"] = rng.choice(COMPRESSIONS)
    if fmt == "JPEG":
        options |= {"progressive": rng.random() < 0.3, "restart_marker_rows": rng.randint(0, 1)}
    if fmt == "WEBP":
        options |= {"lossless": rng.random() < 0.5, "method": 0}
    if fmt in ("JPEG", "PNG", "TIFF", "WEBP"):
        by = rng.randrange(10)  # 0 and 9 are no orientations
        options["exif"] = Image.Exif()
        options["exif"][274] = by
        if fmt == "JPEG" and rng.random() < 0.5:
            options |= {"exif": Image.Exif(), "xmp": XMP.format(by).encode()}
    file = io.BytesIO()
    try:
        image.save(file, fmt, **options)
    except (OSError, RuntimeError):  # libtiff has no such compression of this mode, or no such orientation
        return encoded(rng)
    return fmt, file.getvalue()


# ---------------------------------------------------------------- what is right


def by_pillow(data: bytes) -> np.ndarray:
    """uint8 [H, W, 3], by Pillow and the rule that `images.py` documents."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=FORMATS))
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        full = 255.0 if image.mode == "F" else 65535.0
        gray = np.rint(np.asarray(image).astype(np.float64) * (255.0 / full))
        return np.repeat(gray[..., None], 3, 2).astype(np.uint8)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        image = Image.alpha_composite(white, rgba)
    return np.asarray(image.convert("RGB"))


@pytest.mark.filterwarnings("ignore")  # of Pillow, about damage that it gets over
@pytest.mark.parametrize("cases", [200, *slow(2000)])
def test_every_image_is_right_or_refused(cases: int, tmp_path: Path) -> None:
    def case(rng: random.Random) -> bool:
        fmt, whole = encoded(rng)
        source = data = whole if (is_whole := rng.random() < 0.2) else damaged(whole, rng)
        if rng.random() < 0.2:  # at a path whose name may say something else
            source = tmp_path / f"image.{rng.choice(['png', 'jpg', 'tif', 'txt'])}"
            source.write_bytes(data)
        try:
            image = load_image(source, limits=LIMITS)
        except SampleError as error:
            assert error.reason in REASONS and len(error.detail) > 40
            assert not is_whole or fmt not in FORMATS
            raise
        pixels = np.asarray(image)
        assert image.mode == "RGB"
        assert read_size(source, limits=LIMITS) == pixels.shape[:2]
        return np.array_equal(pixels, by_pillow(data))

    check(outcomes(cases, 20, case), cases=cases)
