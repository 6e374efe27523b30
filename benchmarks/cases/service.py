"""service: training requests through the engine of the step service, and what the wire adds.

    packed step / engine       time of the same rows by PackedStep with PEFT in a loop of one's own, over the engine's
    single datums / engine     time of the same datums one by one through plain transformers with PEFT
    own rows / shared rows     time of small batches of several adapters, rows of their own over rows that they share
    wire / engine              time of a request beside encoding and rows, over that of encoding and rows
    longest / mean wait        of clients that send small requests at once

Of the first three images are encoded before the clock starts, as the service does while other requests run.
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
import torch.nn.functional as F
from PIL import Image

from benchmarks.cases.wire import measure_waits, measure_wire, serving
from benchmarks.figures import BenchSettings, Figure, Skipped, Target
from benchmarks.receipts import FIRST_WORD, ReceiptShapes, receipt_model
from benchmarks.timing import alternate
from vlmpack.errors import ConfigError, check_extra
from vlmpack.families import family_named
from vlmpack.layout import HostMetadata, Media, PackedRow, Segments
from vlmpack.model import PackedStep
from vlmpack.testing import tiny_processor

CASE = "service"
FAMILY = "qwen3_vl"
TOKEN_PIXELS = 32
"""Side of what becomes one image token: two patches of 16."""
THROUGHPUT = Target(limit=0.9, better="higher")
AGAINST_SINGLE = Target(limit=2.0, better="higher")
_MODEL = ReceiptShapes(hidden=128, kv_heads=2, vision_hidden=64)
"""Small, as a CPU's time is spent on large products in whatever rows they are; a GPU gains with any size."""
_WIRE_MODEL = ReceiptShapes()
"""The project's yardstick, of which a step of 64 datums takes seconds on two cores."""


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
    wire: ReceiptShapes = field(default_factory=lambda: replace(_WIRE_MODEL, samples=64, longest=128))
    """Of the request that goes over the wire."""
    crowd: int = 16
    """Clients that send small requests at once."""
    crowd_requests: int = 6
    """Requests of each of them."""


def measure_service(settings: BenchSettings, shapes: ServiceShapes) -> list[Figure | Skipped]:
    """Time one large request, and small ones of several adapters."""
    try:
        check_extra("serve", "starlette", "uvicorn", "google.protobuf", "peft", needed_by="the service")
    except ConfigError as error:
        return [Skipped(case=CASE, name="service", why=str(error))]
    third = replace(settings, seconds=settings.seconds / 3)
    return [*_large(third, shapes), *_small(third, shapes), *_over_the_wire(third, shapes)]


def _large(settings: BenchSettings, shapes: ServiceShapes) -> Iterator[Figure]:
    engine = new_engine(settings, shapes, row_tokens=shapes.row_tokens)
    data = new_data(shapes.receipts, seed=settings.seed)
    request = encoded(engine, data, model_id="client 0")
    timings = alternate(
        {
            "engine": lambda: run_requests(engine, [request]),
            "single": datum_loop(request, settings, shapes),
            "step": own_loop(engine, request, settings, shapes),
        },
        seconds=settings.seconds,
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
            encoded(engine, new_data(shapes.small, seed=settings.seed + at), model_id=f"client {at}")
            for at in range(shapes.clients)
        ]
        ways[name] = lambda engine=engine, requests=requests: run_requests(engine, requests)
    timings = alternate(ways, seconds=settings.seconds, device=settings.device)
    tokens = sum(shapes.small.lengths)
    about = f"{shapes.clients} adapters, {tokens} tokens each"
    yield Figure.timed(CASE, f"{about}, own rows", timings, "own", settings)
    yield Figure.compared(CASE, f"own rows / shared rows, {about}", timings, ("own", "shared"), settings)


def _over_the_wire(settings: BenchSettings, shapes: ServiceShapes) -> Iterator[Figure]:
    model = receipt_model(family_named(FAMILY), shapes.wire, seed=settings.seed, device=settings.device)
    with serving(model, _processor(), row_tokens=shapes.row_tokens) as (port, engine_time):
        yield from measure_wire(port, engine_time, new_data(shapes.wire, seed=settings.seed), settings)
        small = replace(shapes.small, vocab_size=shapes.wire.vocab_size)
        data = new_data(small, seed=settings.seed)
        yield measure_waits(port, data, clients=shapes.crowd, requests=shapes.crowd_requests)


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


def new_data(shapes: ReceiptShapes, *, seed: int) -> list[Any]:
    """Datums with an image each, of the lengths of `shapes`."""
    from vlmpack.service import Datum, ImageChunk, TextChunk

    rng = np.random.default_rng(seed)
    data = []
    for length in shapes.lengths:
        side = isqrt(max(1, round(length * shapes.image_share)))
        words = rng.integers(FIRST_WORD, shapes.vocab_size, length - side**2).astype(np.int32)
        image = ImageChunk(data=_png(side * TOKEN_PIXELS, rng), format="png", expected_tokens=side**2)
        chunks = (TextChunk(tokens=words[:1]), image, TextChunk(tokens=words[1:]))
        targets = rng.integers(FIRST_WORD, shapes.vocab_size, length)
        data.append(Datum(chunks=chunks, inputs={"target_tokens": targets}))
    return data


def encoded(engine: Any, data: Sequence[Any], *, model_id: str) -> Any:
    """A checked request."""
    from vlmpack.service import ForwardBackward

    return engine.encode(ForwardBackward(model_id=model_id, seq_id=1, data=tuple(data), loss_fn="cross_entropy"))


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


# ---------------------------------------------------------------------- loops of one's own


def _with_peft(settings: BenchSettings, shapes: ServiceShapes) -> Any:
    """The model with an adapter of PEFT on the layers that the engine's adapters are on."""
    from peft import LoraConfig, get_peft_model

    model = receipt_model(family_named(FAMILY), shapes.receipts, seed=settings.seed, device=settings.device)
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj|lm_head"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT, about transformers
        return get_peft_model(model, LoraConfig(r=shapes.rank, lora_alpha=32, target_modules=targets))


def own_loop(engine: Any, request: Any, settings: BenchSettings, shapes: ServiceShapes) -> Callable[[], float]:
    """Forward and backward of the rows that the engine makes of a request, by PackedStep."""
    model = _with_peft(settings, shapes)
    work = engine.forward_backward([request])
    members = [[place.datum for place in row.places] for row in work.rows]
    work.cancel()
    step, rows = PackedStep(model), [_row([request.data[at] for at in row]) for row in members]

    def run() -> float:
        model.zero_grad()
        loss = 0.0
        for row in rows:
            result = step(row, num_items_in_batch=1)
            result.loss.backward()
            loss += result.loss_sum.item()
        return loss

    return run


def datum_loop(request: Any, settings: BenchSettings, shapes: ServiceShapes) -> Callable[[], float]:
    """Forward and backward of each datum of a request by itself, by plain transformers."""
    model = _with_peft(settings, shapes)
    inputs = [_alone(datum, model.config, settings.device) for datum in request.data]
    targets = [torch.from_numpy(datum.targets).to(settings.device) for datum in request.data]

    def run() -> float:
        model.zero_grad()
        total = 0.0
        for batch, ids in zip(inputs, targets, strict=True):
            loss = F.cross_entropy(model(**batch, use_cache=False).logits[0].float(), ids, reduction="sum")
            loss.backward()
            total += loss.item()
        return total

    return run


def _alone(datum: Any, config: Any, device: str) -> dict[str, torch.Tensor]:
    """A datum as transformers takes it."""
    ids = torch.from_numpy(datum.sequence.input_ids)[None]
    images = datum.sequence.images
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": torch.cat([image.pixel_values for image in images]),
        "image_grid_thw": torch.tensor([image.grid for image in images]),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _row(data: Sequence[Any]) -> PackedRow:
    sequences = [datum.sequence for datum in data]
    ids = np.concatenate([sequence.input_ids for sequence in sequences])
    images = [image for sequence in sequences for image in sequence.images]
    lengths = tuple(sequence.length for sequence in sequences)
    return PackedRow(
        input_ids=torch.from_numpy(ids)[None],
        segments=Segments.from_lengths(lengths),
        shift_labels=torch.from_numpy(np.concatenate([datum.targets for datum in data]))[None],
        media=Media(
            pixel_values=torch.cat([image.pixel_values for image in images]),
            image_grid_thw=torch.tensor([image.grid for image in images]),
        ),
        metadata=HostMetadata(
            lengths=lengths,
            image_grids=tuple(image.grid for image in images),
            images_per_sample=(1,) * len(lengths),
            num_targets=sum(lengths),
        ),
    )
