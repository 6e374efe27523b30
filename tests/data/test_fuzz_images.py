"""Images of every kind, whole and damaged: each is what Pillow makes of it, or refused with a reason.

    drawn image ──encode──▶ file ──mutate──▶ data ──┬─ Pillow: open, exif_transpose, the documented rule for colour
                                                    └─ load_image, read_size

*Wrong* is an image that is taken and differs from Pillow's, or has another size than `read_size` gave; where a mutation
only takes pixels away (cut, zeros at the end), one that differs from the whole file's.
Damage inside compressed pixels that still decodes cannot be seen: it is right where it equals Pillow's.
"""

from __future__ import annotations

import io
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import slow
from PIL import Image, ImageOps

from vlmpack.data.images import ImageLimits, load_image, read_size
from vlmpack.errors import SampleError

SEED, CASES = 20, 2000
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


# ---------------------------------------------------------------- mutations


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice([rng.randrange(len(data)), max(0, len(data) - rng.randint(1, 16))])]


def zeros(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes(len(data) - at)


def flips(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        end = min(len(data), rng.choice([len(data), 64, 400]))
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "whole": lambda _, data: data,
    "cut": cut,
    "zeros": zeros,
    "flips": flips,
    "twice": lambda rng, data: data[: (at := rng.randrange(len(data)))] + data[rng.randrange(at + 1) :],
}
LOSES_ONLY = {"cut": ("PNG", "JPEG", "BMP", "PPM", "GIF", "WEBP"), "zeros": ("PNG", "JPEG"), "whole": FORMATS}
"""Mutations that take pixels away and add none, and the formats of which that is noticed."""


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


def outcome(read: Callable[..., Any], source: bytes | Path) -> Any:
    """What was read, or the reason of the refusal."""
    try:
        return read(source, limits=LIMITS)
    except SampleError as error:
        assert error.reason in REASONS, error.reason
        assert len(error.detail) > 40
        return error.reason


def check(fmt: str, how: str, whole: bytes, data: bytes, path: Path | None = None) -> str:
    """Compare one file, in memory or at a path whose name may say something else, with Pillow; what became of it."""
    if path is not None:
        path.write_bytes(data)
    image, size = outcome(load_image, path or data), outcome(read_size, path or data)
    if isinstance(image, str):
        assert how != "whole" or fmt not in FORMATS, f"refused: {image}"
        return image
    pixels = np.asarray(image)
    assert image.mode == "RGB"
    assert size == pixels.shape[:2], f"read_size gave {size}, and it is {pixels.shape}"
    np.testing.assert_array_equal(pixels, by_pillow(data), err_msg="not Pillow's")
    if fmt in LOSES_ONLY.get(how, ()):
        np.testing.assert_array_equal(pixels, by_pillow(whole), err_msg="not the whole file's")
    return "taken"


def fuzz(seed: int, cases: int, folder: Path) -> Counter[tuple[str, str]]:
    """How often each mutation came to which outcome."""
    rng, seen = random.Random(seed), Counter[tuple[str, str]]()
    for case in range(cases):
        fmt, whole = encoded(rng)
        how = rng.choice(list(MUTATIONS))
        data = MUTATIONS[how](rng, whole)
        path = folder / f"image.{rng.choice(['png', 'jpg', 'tif', 'txt'])}" if rng.random() < 0.2 else None
        began = time.perf_counter()
        try:
            seen[how, check(fmt, how, whole, data, path)] += 1
        except Exception as error:
            raise AssertionError(f"case {case} of seed {seed}: {how} {fmt} of {len(whole)} bytes: {error!r}") from error
        assert time.perf_counter() - began < 10, f"case {case} of seed {seed}: {how} {fmt}"
    return seen


@pytest.mark.filterwarnings("ignore")  # of Pillow, about damage that it gets over
@pytest.mark.parametrize("cases", [CASES // 10, *slow(CASES)])
def test_every_image_is_right_or_refused(cases: int, tmp_path: Path) -> None:
    seen = fuzz(SEED, cases, tmp_path)
    assert seen.total() == cases
    for how in MUTATIONS if cases == CASES else ():
        results = {result: number for (kind, result), number in seen.items() if kind == how}
        assert results["taken"] > 20, f"{how}: {results}"
        assert sum(results.values()) - results["taken"] > 20, f"{how}: {results}"
