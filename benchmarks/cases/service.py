"""service: training requests through the engine of the step service, without the wire.

    packed step / engine       time of the same rows by PackedStep with PEFT in a loop of one's own, over the engine's
    single datums / engine     time of the same datums as a row each
    own rows / shared rows     time of small batches of several adapters, rows of their own over rows that they share

Images are encoded before the clock starts, as the service does while other requests run.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any, final

import numpy as np
import torch
from PIL import Image

from benchmarks.figures import BenchSettings, Figure, Skipped, Target
from benchmarks.receipts import FIRST_WORD, ReceiptShapes, receipt_model
from benchmarks.timing import alternate
from vlmpack.errors import ConfigError, check_extra
from vlmpack.families import family_named
from vlmpack.layout import HostMetadata, Media, PackedRow, Segments
from vlmpack.model import PackedStep
from vlmpack.plan import plan_bins
from vlmpack.testing import tiny_processor

CASE = "service"
FAMILY = "qwen3_vl"
TOKEN_PIXELS = 32
"""Side of what becomes one image token: two patches of 16."""
THROUGHPUT = Target(limit=0.9, better="higher")
AGAINST_SINGLE = Target(limit=2.0, better="higher")
_MODEL = ReceiptShapes(hidden=128, kv_heads=2, vision_hidden=64)
"""Small, as a CPU's time is spent on large products in whatever rows they are; a GPU gains with any size."""


@final
@dataclass(frozen=True, kw_only=True)
class ServiceShapes:
    """Sizes of the model and of the requests."""

    receipts: ReceiptShapes = field(default_factory=lambda: replace(_MODEL, samples=32, longest=128))
    """Of the model, and of one request: datums with an image each."""
    row_tokens: int = 2048
    """Token budget of a row."""
    rank: int = 8
    """Rank of every adapter."""
    clients: int = 8
    """Adapters that send small batches at a time."""
    small: ReceiptShapes = field(default_factory=lambda: replace(_MODEL, samples=2, longest=64))
    """Of each of their requests."""


def measure_service(settings: BenchSettings, shapes: ServiceShapes) -> list[Figure | Skipped]:
    """Time one large request, and small ones of several adapters."""
    try:
        check_extra("serve", "starlette", "uvicorn", "google.protobuf", "peft", needed_by="the service")
    except ConfigError as error:
        return [Skipped(case=CASE, name="service", why=str(error))]
    return [*_large(settings, shapes), *_small(settings, shapes)]


def _large(settings: BenchSettings, shapes: ServiceShapes) -> Iterator[Figure]:
    engine, single = (new_engine(settings, shapes, row_tokens=budget) for budget in (shapes.row_tokens, 1))
    request = new_request(engine, shapes.receipts, model_id="client 0", seed=settings.seed)
    timings = alternate(
        {
            "engine": lambda: run_requests(engine, [request]),
            "single": lambda: run_requests(single, [request]),
            "step": own_loop(request, settings, shapes),
        },
        seconds=settings.seconds / 2,
        device=settings.device,
    )
    count = shapes.receipts.samples
    yield Figure.timed(CASE, f"{count} image datums", timings, "engine", settings)
    yield Figure.compared(CASE, "packed step / engine", timings, ("step", "engine"), settings, target=THROUGHPUT)
    name = "single datums / engine"
    yield Figure.compared(CASE, name, timings, ("single", "engine"), settings, target=AGAINST_SINGLE)


def _small(settings: BenchSettings, shapes: ServiceShapes) -> Iterator[Figure]:
    ways = {}
    for name, shared in (("own", False), ("shared", True)):
        engine = new_engine(settings, shapes, row_tokens=shapes.row_tokens, share_rows=shared)
        requests = [
            new_request(engine, shapes.small, model_id=f"client {at}", seed=settings.seed + at)
            for at in range(shapes.clients)
        ]
        ways[name] = lambda engine=engine, requests=requests: run_requests(engine, requests)
    timings = alternate(ways, seconds=settings.seconds / 2, device=settings.device)
    tokens = sum(shapes.small.lengths)
    about = f"{shapes.clients} adapters, {tokens} tokens each"
    yield Figure.timed(CASE, f"{about}, own rows", timings, "own", settings)
    yield Figure.compared(CASE, f"own rows / shared rows, {about}", timings, ("own", "shared"), settings)


# ---------------------------------------------------------------------- engines and requests


def new_engine(settings: BenchSettings, shapes: ServiceShapes, *, row_tokens: int, share_rows: bool = False) -> Any:
    """An engine with as many adapters as there are clients."""
    from vlmpack.service import Engine, EngineConfig, LoraConfig, ServiceLimits

    model = receipt_model(family_named(FAMILY), shapes.receipts, seed=settings.seed, device=settings.device)
    config = EngineConfig(limits=ServiceLimits(row_tokens=row_tokens), share_rows=share_rows)
    engine = Engine(model, _processor(), name="benchmark", tokenizer_id="none", config=config)
    for at in range(shapes.clients):
        engine.create(f"client {at}", LoraConfig(rank=shapes.rank, seed=at))
    return engine


def _processor() -> Any:
    return tiny_processor(FAMILY, min_pixels=TOKEN_PIXELS**2, max_pixels=4096 * TOKEN_PIXELS**2)


def new_request(engine: Any, shapes: ReceiptShapes, *, model_id: str, seed: int) -> Any:
    """A checked request of datums with an image each, of the lengths of `shapes`."""
    from vlmpack.service import Datum, ForwardBackward, ImageChunk, TextChunk

    rng = np.random.default_rng(seed)
    data = []
    for length in shapes.lengths:
        side = isqrt(max(1, round(length * shapes.image_share)))
        words = rng.integers(FIRST_WORD, shapes.vocab_size, length - side**2).astype(np.int32)
        image = ImageChunk(data=_png(side * TOKEN_PIXELS, rng), format="png", expected_tokens=side**2)
        chunks = (TextChunk(tokens=words[:1]), image, TextChunk(tokens=words[1:]))
        targets = rng.integers(FIRST_WORD, shapes.vocab_size, length)
        data.append(Datum(chunks=chunks, inputs={"target_tokens": targets}))
    request = ForwardBackward(model_id=model_id, seq_id=1, data=tuple(data), loss_fn="cross_entropy")
    return engine.encode(request)


def _png(side: int, rng: np.random.Generator) -> bytes:
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def run_requests(engine: Any, requests: Sequence[Any]) -> list[Any]:
    """Run requests of as many models, a row of each in turn, and drop their gradients."""
    works = [engine.forward_backward([request]) for request in requests]
    while any(work.rows_left for work in works):
        for work in works:
            if work.rows_left:
                work.run_row()
    for request in requests:
        engine.client(request.model_id).gradients = None
    return [work.results()[0] for work in works]


# ---------------------------------------------------------------------- the same rows in a loop of one's own


def own_loop(request: Any, settings: BenchSettings, shapes: ServiceShapes) -> Callable[[], float]:
    """Forward and backward of the request's rows by PackedStep, with an adapter of PEFT on the same layers."""
    from peft import LoraConfig, get_peft_model

    model = receipt_model(family_named(FAMILY), shapes.receipts, seed=settings.seed, device=settings.device)
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj|lm_head"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT, about transformers
        model = get_peft_model(model, LoraConfig(r=shapes.rank, lora_alpha=32, target_modules=targets))
    step, rows = PackedStep(model), list(_rows(request, shapes.row_tokens))

    def run() -> float:
        model.zero_grad()
        loss = 0.0
        for row in rows:
            result = step(row, num_items_in_batch=1)
            result.loss.backward()
            loss += result.loss_sum.item()
        return loss

    return run


def _rows(request: Any, row_tokens: int) -> Iterator[PackedRow]:
    sequences = [datum.sequence for datum in request.data]
    for row in plan_bins([sequence.length for sequence in sequences], row_tokens):
        members = [int(at) for at in row]
        ids = np.concatenate([sequences[at].input_ids for at in members])
        images = [image for at in members for image in sequences[at].images]
        lengths = tuple(sequences[at].length for at in members)
        yield PackedRow(
            input_ids=torch.from_numpy(ids)[None],
            segments=Segments.from_lengths(lengths),
            shift_labels=torch.from_numpy(np.concatenate([request.data[at].targets for at in members]))[None],
            media=Media(
                pixel_values=torch.cat([image.pixel_values for image in images]),
                image_grid_thw=torch.tensor([image.grid for image in images]),
            ),
            metadata=HostMetadata(
                lengths=lengths,
                image_grids=tuple(image.grid for image in images),
                images_per_sample=(1,) * len(members),
                num_targets=sum(lengths),
            ),
        )
