"""lengths: exact lengths of samples from their images' headers, against running the processor on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from PIL import Image

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.timing import CLOCKS, Clock, Spread, Timings, alternate, one_thread
from vlmpack.collate import VLMCollator
from vlmpack.store import measure_lengths
from vlmpack.testing import SyntheticReceipts, tiny_processor

CASE = "lengths"
SPEED_UP = Target(limit=20.0, better="higher")
TOKEN_AREA = 32**2
"""Pixels of one image token of Qwen3-VL."""


@final
@dataclass(frozen=True, kw_only=True)
class LengthShapes:
    """Receipts to measure."""

    images: int = 10_000
    """Samples, each with one image and a text of its own."""
    files: int = 32
    """JPEG files that they share."""
    width: int = 1000
    """Of an image, in pixels."""
    height: int = 1400
    """Of an image, in pixels."""
    max_image_tokens: int = 1280
    """Largest image that the processor leaves, in tokens."""
    part: int = 1000
    """Samples that are measured in one round against the processor; each round takes the next ones."""
    processed: int = 12
    """Samples that the processor is run on in one round."""


@final
@dataclass(frozen=True, kw_only=True)
class Receipts:
    """A map-style data set of receipts in files."""

    files: tuple[str, ...]
    """JPEG files."""
    texts: tuple[str, ...]
    """The text of each, as JSON."""
    places: range
    """The samples, of all that the files allow."""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = self.places[index]
        at = place % len(self.files)
        question = [
            {"type": "image", "image": self.files[at]},
            {"type": "text", "text": f"Receipt {place}: what is it?"},
        ]
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": self.texts[at]}]}

    def only(self, places: range) -> Receipts:
        """These samples of it."""
        return Receipts(files=self.files, texts=self.texts, places=places)


def measure_headers(settings: BenchSettings, shapes: LengthShapes) -> list[Figure]:
    """Time measuring and processing in turn; then measure all, by one worker a core, and with all in the cache."""
    collator = VLMCollator(tiny_processor("qwen3_vl", max_pixels=shapes.max_image_tokens * TOKEN_AREA))
    with TemporaryDirectory() as folder, one_thread():
        receipts = draw_receipts(Path(folder), shapes, settings.seed)
        return [
            *_against_the_processor(receipts, collator, settings, shapes),
            *_all_of_them(receipts, collator, settings, Path(folder, "lengths.sqlite")),
        ]


def draw_receipts(folder: Path, shapes: LengthShapes, seed: int) -> Receipts:
    """Drawn receipts of one size in JPEG files."""
    records = SyntheticReceipts(num=shapes.files, seed=seed)
    files, texts = [], []
    for at in range(shapes.files):
        record, path = records[at], folder / f"{at}.jpg"
        record["image"].resize((shapes.width, shapes.height)).save(path, quality=90)
        files.append(str(path))
        texts.append(record["ground_truth"][:700])
    return Receipts(files=tuple(files), texts=tuple(texts), places=range(shapes.images))


def _against_the_processor(
    receipts: Receipts, collator: VLMCollator, settings: BenchSettings, shapes: LengthShapes
) -> Iterator[Figure]:
    turns = _Turns(receipts, shapes)
    timings = alternate(
        {
            "headers": lambda: measure_lengths(turns.next_part(), collator),
            "processor": lambda: [run_processor(collator.processor, sample) for sample in turns.next_few()],
        },
        seconds=settings.seconds / 2,
    )
    yield Figure.compared(
        CASE,
        "images a second, headers / processor",
        timings,
        ("processor", "headers"),
        settings,
        scale=turns.part / turns.few,
        target=SPEED_UP,
    )
    yield _a_second("processor", timings, "processor", turns.few, settings)
    yield _a_second("headers", timings, "headers", turns.part, settings)


def _all_of_them(receipts: Receipts, collator: VLMCollator, settings: BenchSettings, cache: Path) -> Iterator[Figure]:
    """A worker's time is not this process's, so its figure is by the wall clock whatever the settings say."""
    workers = os.cpu_count() or 1
    measure_lengths(receipts, collator, cache=cache, workers=workers)
    timings = alternate(
        {
            "workers": lambda: measure_lengths(receipts, collator, workers=workers),
            "cache": lambda: measure_lengths(receipts, collator, cache=cache),
        },
        seconds=settings.seconds / 8,
        least_rounds=1,
    )
    count = len(receipts)
    yield _a_second(f"headers of all {count:,}, {workers} workers (wall)", timings, "workers", count, settings, "wall")
    yield _a_second(f"headers of all {count:,}, found in a cache", timings, "cache", count, settings)


class _Turns:
    """Deals samples: every round measures others."""

    def __init__(self, receipts: Receipts, shapes: LengthShapes) -> None:
        self.receipts = receipts
        self.part, self.few = min(shapes.part, len(receipts)), min(shapes.processed, len(receipts))
        self._measured = self._processed = 0

    def next_part(self) -> Receipts:
        """Samples to measure."""
        places, self._measured = self._deal(self._measured, self.part)
        return self.receipts.only(places)

    def next_few(self) -> list[dict[str, Any]]:
        """Samples to process."""
        places, self._processed = self._deal(self._processed, self.few)
        return [self.receipts[place] for place in places]

    def _deal(self, start: int, count: int) -> tuple[range, int]:
        if start + count > len(self.receipts):
            start = 0
        return range(start, start + count), start + count


def run_processor(processor: Any, sample: dict[str, Any]) -> Any:
    """A sample's ids and patches by the processor itself, from its file."""
    text = processor.apply_chat_template(sample["messages"], tokenize=False)
    with Image.open(sample["messages"][0]["content"][0]["image"]) as image:
        return processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")


def _a_second(
    name: str, timings: Timings, of: str, count: int, settings: BenchSettings, clock: Clock | None = None
) -> Figure:
    """Images a second."""
    rates = {c: Spread.of([count / seconds for seconds in timings.seconds[c][of]]) for c in CLOCKS}
    clocks = {c: rate.median for c, rate in rates.items()}
    return Figure.measured(CASE, f"images a second, {name}", rates[clock or settings.clock], "images/s", clocks=clocks)
