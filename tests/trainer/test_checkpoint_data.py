"""A state is read back as it was written, and nothing in the file is run."""

from __future__ import annotations

import pickle
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from safetensors.torch import save_file

from vlmpack.errors import ConfigError, SampleError
from vlmpack.trainer.checkpoints import read_state, write_state

PLAIN = [
    *(None, True, 0, -(2**70), 1.5, float("inf"), "", "a\nb \ud800 é", b"", b"\x00\xff", bytearray(b"ab")),
    *([], (), {}, set(), [1, (2, [3])], {1: "one", "two": {None: 2.5}}, {3, 1}, frozenset({"a"})),
    *(Decimal("1.10"), Path("a/b.png"), date(2026, 11, 22), datetime(2026, 11, 22, 20, 30, 1, 5, tzinfo=timezone.utc)),
]
"""What compares by ==."""


def through_a_file(value, tmp_path):
    write_state(value, tmp_path / "state")
    return read_state(tmp_path / "state")


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_data_comes_back_as_it_was(value, tmp_path):
    back = through_a_file({"of": [value]}, tmp_path)["of"][0]
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_tensors_come_back_as_they_were(dtype, shape, tmp_path):
    tensor = (torch.arange(15).remainder(7)[: torch.Size(shape).numel()].reshape(shape)).to(dtype)
    again, view = through_a_file([tensor, tensor.T if tensor.ndim == 2 else tensor], tmp_path)
    assert again.dtype == dtype
    assert torch.equal(again, tensor)
    assert torch.equal(view, tensor.T if tensor.ndim == 2 else tensor)


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 4)), np.array(["ab", "c"])])
def test_arrays_come_back_as_they_were(array, tmp_path):
    again, scalar = through_a_file([array, np.float32(0.1)], tmp_path)
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)
    assert scalar == np.float32(0.1) and type(scalar) is np.float32


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "I;16", "LA"])
def test_images_come_back_with_what_they_say(mode, tmp_path):
    drawn = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    image = drawn.convert("I").convert("I;16") if mode == "I;16" else drawn.convert(mode)
    again = through_a_file((image,), tmp_path)[0]
    assert (again.mode, again.size) == (image.mode, image.size)
    assert np.array_equal(np.asarray(again.convert("RGBA")), np.asarray(image.convert("RGBA")))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_an_image_from_a_file_keeps_its_orientation(format, tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (7, 5), "red").save(tmp_path / "image", format=format, exif=exif)
    with Image.open(tmp_path / "image") as image:
        again = ImageOps.exif_transpose(through_a_file({"image": image}, tmp_path)["image"])
        upright = ImageOps.exif_transpose(image)
    assert again.size == upright.size == (5, 7)
    assert np.array_equal(np.asarray(again), np.asarray(upright))


def test_a_sample_that_could_not_be_read_comes_back_with_its_reason(tmp_path):
    again = through_a_file([SampleError("too dark", index=3, reason="dark", sample_id="r-3")], tmp_path)[0]
    assert (again.detail, again.index, again.reason, again.sample_id) == ("too dark", 3, "dark", "r-3")


@pytest.mark.parametrize("value", [object(), lambda: 0, np.array([object()]), torch.zeros(2).to_sparse()])
def test_what_only_pickle_could_hold_is_refused_by_its_place(value, tmp_path):
    with pytest.raises(ConfigError, match=r"the state\['rows'\]\[1\]\['x'\] is a .* without pickle.*names of files"):
        write_state({"rows": [1, {"x": value}]}, tmp_path / "state")


def test_a_file_that_ends_anywhere_or_is_of_something_else_is_refused(tmp_path):
    file = tmp_path / "state"
    write_state({"rows": [torch.arange(3), "text", b"bytes"]}, file)
    whole = file.read_bytes()
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match="is damaged, or is no state that vlmpack wrote"):
            read_state(file)
    for foreign in (pickle.dumps({"rows": []}), b"{}", b"\0" * 99):
        file.write_bytes(foreign)
        with pytest.raises(ConfigError, match="resume from another checkpoint"):
            read_state(file)
    save_file({"state": torch.zeros(3)}, file)
    with pytest.raises(ConfigError, match="its format is None"):
        read_state(file)
