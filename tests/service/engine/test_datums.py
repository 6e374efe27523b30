"""Datums: what comes of good ones, compared with the processor of transformers; how bad ones are refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from step_service import (
    gradients,
    lora,
    png,
    processor_for,
    random_datum,
    request,
    run_one,
    some_data,
    text,
    tiny_engine,
    vision_ids,
)

from vlmpack.errors import RequestError
from vlmpack.service.engine.engine import Engine
from vlmpack.service.wire.messages import Chunk, Datum, ImageChunk, Sample, SamplingParams, TextChunk

PROCESSOR = processor_for("qwen3_vl")
START, END = vision_ids(PROCESSOR)
IMAGE_ID, VIDEO_ID = PROCESSOR.image_token_id, PROCESSOR.video_token_id


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = tiny_engine(limits={"context": 200, "image_pixels": 100_000, "image_bytes": 200_000})
    engine.create("a", lora())
    return engine


def datum(*chunks: Chunk, tokens: int | None = None, **inputs: np.ndarray) -> Datum:
    total = sum(len(chunk.tokens) for chunk in chunks if isinstance(chunk, TextChunk)) if tokens is None else tokens
    return Datum(chunks=chunks, inputs={"target_tokens": np.zeros(total, np.int64), **inputs})


def image(data: bytes | None = None, *, format: str = "png", expected_tokens: int | None = None) -> ImageChunk:
    return ImageChunk(data=png(64, 64) if data is None else data, format=format, expected_tokens=expected_tokens)


def saved(size: tuple[int, int], format: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, format)
    return file.getvalue()


def header_of(width: int, height: int) -> bytes:
    """A PNG that has hardly any bytes and claims to be this large."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"\x00\x00\x00\x00IEND\xaeB`\x82"
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + end


# ---------------------------------------------------------------------- good ones


@pytest.mark.parametrize("sizes", [[(64, 64)], [(96, 64), (130, 77)]])
def test_images_become_what_the_processor_of_transformers_makes(
    engine: Engine, sizes: Sequence[tuple[int, int]]
) -> None:
    chunks: list[Chunk] = [text(*PROCESSOR.tokenizer("before")["input_ids"])]
    for at, size in enumerate(sizes):
        chunks += [text(*START), image(png(*size, seed=at)), text(*END)]
    chunks.append(text(*PROCESSOR.tokenizer("after")["input_ids"]))
    ours = engine.encode_chunks(chunks)
    pictures = [Image.open(io.BytesIO(png(*size, seed=at))) for at, size in enumerate(sizes)]
    prompt = "before" + "<|vision_start|><|image_pad|><|vision_end|>" * len(sizes) + "after"
    theirs = PROCESSOR(text=[prompt], images=pictures, return_tensors="pt")
    assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
    assert torch.equal(torch.cat([i.values[0] for i in ours.images]), theirs["pixel_values"])
    assert [list(i.patch_grid) for i in ours.images] == theirs["image_grid_thw"].tolist()
    assert ours.patches == len(theirs["pixel_values"])


def test_a_right_count_is_accepted_and_jpeg_too(engine: Engine) -> None:
    jpeg = saved((64, 64), "JPEG")  # the format is that of the bytes
    for chunk in (image(expected_tokens=4), image(jpeg, format="jpeg"), image(jpeg, format="png")):
        assert engine.encode_chunks([text(*START), chunk, text(*END)]).length == 6


def test_an_image_may_come_first_and_last(engine: Engine) -> None:
    """Two datums whose images meet in the row stay two."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 500, 6)
    ends = Datum(chunks=(text(7, *START), image()), inputs={"target_tokens": targets})
    begins = Datum(chunks=(image(png(64, 64, seed=3)), text(*END, 9)), inputs={"target_tokens": targets})
    together = run_one(engine, [ends, begins], forward_only=True).logprobs
    for ours, alone in zip(together, (ends, begins), strict=True):
        np.testing.assert_allclose(ours, run_one(engine, [alone], forward_only=True).logprobs[0], atol=1e-5)


def test_threads_encode_at_a_time(engine: Engine) -> None:
    data = some_data(engine)
    one = engine.encode(request(data))
    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(engine.encode, [request(data)] * 8):
            for a, b in zip(one.data, other.data, strict=True):
                assert np.array_equal(a.sequence.input_ids, b.sequence.input_ids)
                pairs = zip(a.sequence.images, b.sequence.images, strict=True)
                assert all(torch.equal(x.values[0], y.values[0]) for x, y in pairs)


# ---------------------------------------------------------------------- bad ones

BAD = {
    "nothing": (datum(text()), "no tokens"),
    "a negative token": (datum(text(5, -1)), "holds the id -1 at place 1; use ids from 0"),
    "a token that does not exist": (datum(text(5, 10**6)), "chunk 0 holds the id 1000000 at place 1"),
    "a negative target": (datum(text(5), target_tokens=np.array([-100])), "target_tokens holds the id -100"),
    "a target that does not exist": (datum(text(5), target_tokens=np.array([2**40])), f"holds the id {2**40}"),
    "the placeholder of an image in text": (datum(text(5, IMAGE_ID)), "the placeholder of an image, in its text"),
    "the placeholder of a video in text": (datum(text(5, VIDEO_ID)), "the placeholder of a video, in its text"),
    "targets of the text alone": (datum(text(5), image(), tokens=1), "has shape [1], but the datum has 5"),
    "another count": (datum(text(5), image(expected_tokens=5), tokens=5), "4 tokens, but expected_tokens is 5"),
    "no image": (datum(text(5), image(b"hello"), tokens=5), "image 0: 5 bytes starting with b'hello'"),
    "an empty image": (datum(text(5), image(b""), tokens=5), "the image is empty"),
    "half an image": (datum(text(5), image(png(64, 64)[:800]), tokens=5), "image 0: "),
    "a bomb": (datum(text(5), image(header_of(60_000, 60_000)), tokens=5), "the image is too large for Pillow"),
    "a large image": (datum(text(5), image(saved((400, 400), "PNG")), tokens=5), "400 x 400 = 160000 pixels"),
    "a large file": (datum(text(5), image(bytes(200_001)), tokens=5), "200001 bytes"),
    "a narrow image": (datum(text(5), image(saved((3, 900), "PNG")), tokens=5), "aspect ratio"),
    "another format by name": (datum(text(5), image(format="webp"), tokens=5), "format 'webp'; send png or jpeg"),
    "another format by content": (datum(text(5), image(saved((64, 64), "GIF")), tokens=5), "not an image of the"),
    "two images without text between": (datum(text(5), image(), text(), image(), tokens=9), "right after another"),
    "more tokens than the context": (datum(text(*[5] * 201)), "201 tokens, but the context here is 200"),
    "more tokens with its image": (datum(text(*[5] * 197), image(), tokens=201), "201 tokens, but the context here is"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_datum_is_named_and_leaves_no_gradient(engine: Engine, case: str) -> None:
    bad, message = BAD[case]
    good = datum(text(5, 6))
    with pytest.raises(RequestError) as raised:
        engine.encode(request([good, bad, good]))
    assert str(raised.value).startswith("datum 1: ")
    assert message in str(raised.value)
    assert gradients(engine) == {}


def test_requests_have_limits() -> None:
    engine = tiny_engine(limits={"datums": 2, "images": 2, "samples": 2})
    prompt, params = (text(5), image(), text(6), image(), text(7), image()), SamplingParams()
    for data, message in (([], "0 datums"), ([datum(text(5))] * 3, "3 datums"), ([datum(*prompt)], "3 images")):
        with pytest.raises(RequestError, match=f"{message} in a request: send"):
            engine.encode(request(data))
    for chunks, count, message in ((prompt, 1, "3 images"), (prompt[:1], 3, "num_samples 3: at most 2")):
        wanted = Sample(sampling_session_id="s", seq_id=0, prompt=chunks, num_samples=count, params=params)
        with pytest.raises(RequestError, match=message):
            engine.encode_prompt(wanted)


def test_all_datums_are_checked_before_an_image_is_decoded(engine: Engine) -> None:
    half = datum(text(5), image(png(64, 64)[:800]), tokens=5)
    with pytest.raises(RequestError, match=r"datum 1: .*use ids from 0"):
        engine.encode(request([half, datum(text(-5))]))


def test_images_of_a_request_are_measured_before_one_is_decoded() -> None:
    """By their headers, each of which is small enough by itself."""
    engine = tiny_engine(limits={"pixel_bytes": 4 * 1536 * 40})
    headers = [datum(text(5), image(header_of(64, 64)), tokens=5)] * 3  # 16 patches each, and no pixels at all
    with pytest.raises(RequestError, match=r"the images take 294912 bytes as patches, more than 245760"):
        engine.encode(request(headers))
    with pytest.raises(RequestError, match=r"datum 0: image 0: .*damaged or cut short"):
        engine.encode(request(headers[:2]))


def test_a_prompt_is_checked_as_a_datum_is(engine: Engine) -> None:
    sample = Sample(
        sampling_session_id="s", seq_id=0, prompt=(text(5, -1),), num_samples=1, params=SamplingParams(max_tokens=1)
    )
    with pytest.raises(RequestError, match="prompt: chunk 0 holds the id -1"):
        engine.encode_prompt(sample)


def test_a_text_model_takes_no_image() -> None:
    engine = tiny_engine("qwen3")
    with pytest.raises(RequestError, match="chunk 0 is an image, but qwen3 is a text model"):
        engine.encode_chunks([image(), text(5)])
    random_datum(np.random.default_rng(0), engine, length=3)
