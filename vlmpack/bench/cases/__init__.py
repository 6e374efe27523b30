"""The cases, one file each: a function from settings and shapes to figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from vlmpack.bench.cases.attention import AttentionShapes, measure_attention
from vlmpack.bench.cases.collate import CollateShapes, measure_collate
from vlmpack.bench.cases.compiled import CompileShapes, measure_compiled
from vlmpack.bench.cases.head import measure_head
from vlmpack.bench.cases.lengths import LengthShapes, measure_headers
from vlmpack.bench.cases.memory import measure_memory
from vlmpack.bench.cases.pack import PackShapes, measure_pack
from vlmpack.bench.cases.peers import measure_peers
from vlmpack.bench.cases.pixels import PixelShapes, measure_pixels
from vlmpack.bench.cases.plan import PlanShapes, measure_plan
from vlmpack.bench.cases.step import measure_step
from vlmpack.bench.figure import Figure, Skipped
from vlmpack.bench.peers import PeerShapes
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.workload import ReceiptShapes


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    about: str
    """One line for people."""
    run: Callable[[BenchSettings, Any], Sequence[Figure | Skipped]]
    """Measures it, and says what it had to leave out."""
    shapes: Any
    """The sizes that `run` gets unless told otherwise: a frozen dataclass."""
    by_family: bool = False
    """Whether it measures one family of models at a time, that of the settings."""
    weight: float = 1.0
    """Its share of a run's time, relative to the others: long rounds need more for an equally stable median."""


CASES: Mapping[str, Case] = {
    "pack": Case(about="pack a padded batch, against copying its bytes", run=measure_pack, shapes=PackShapes()),
    "collate": Case(
        about="collate receipts into a row, against a padded batch", run=measure_collate, shapes=CollateShapes()
    ),
    "pixels": Case(
        about="join the patches of a batch, against a copy of them", run=measure_pixels, shapes=PixelShapes()
    ),
    "plan": Case(about="rows from lengths, planned ahead and from a stream", run=measure_plan, shapes=PlanShapes()),
    "lengths": Case(
        about="lengths of samples from their images' headers, against running the processor",
        run=measure_headers,
        shapes=LengthShapes(),
    ),
    "peers": Case(
        about="other projects on the same tokenised samples, against us", run=measure_peers, shapes=PeerShapes()
    ),
    "attention": Case(
        about="attention on a row, against a padded batch and a dense mask",
        run=measure_attention,
        shapes=AttentionShapes(),
    ),
    "compile": Case(
        about="rows of many lengths through compiled layers: how often they are compiled again",
        run=measure_compiled,
        shapes=CompileShapes(),
        by_family=True,
    ),
    "step": Case(
        about="a training step on a row, against Hugging Face's own on the padded batch",
        run=measure_step,
        shapes=ReceiptShapes(),
        by_family=True,
        weight=3.0,
    ),
    "memory": Case(about="peak memory of those two steps", run=measure_memory, shapes=ReceiptShapes(), by_family=True),
    "head": Case(about="the head on labelled rows, against all rows", run=measure_head, shapes=ReceiptShapes()),
}
"""In the order in which they are run."""

__all__ = [
    "CASES",
    "AttentionShapes",
    "Case",
    "CollateShapes",
    "CompileShapes",
    "LengthShapes",
    "PackShapes",
    "PixelShapes",
    "PlanShapes",
    "ReceiptShapes",
]
