"""pack: ids, labels, positions and mask of a padded batch, against copying the same bytes.

Once as any batch comes, with its mask alone, and once as `VLMCollator` gives it, with its lengths on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.timing import alternate, one_thread
from vlmpack.bench.workload import on_device
from vlmpack.layout import IGNORE, HostMetadata, PaddedBatch, lengths_from_mask, pack

CASE = "pack"
FROM_MASK = Target(limit=3.0, better="lower")
FROM_FACTS = Target(limit=2.0, better="lower")


@final
@dataclass(frozen=True, kw_only=True)
class PackShapes:
    """Batches to pack."""

    batches: tuple[tuple[int, int], ...] = ((8, 4096), (16, 4096), (64, 2048))
    """(samples B, width S in tokens) of each batch."""
    ratio: float = 5.0
    """Longest over shortest sample; the lengths between are evenly spread."""


def measure_pack(settings: BenchSettings, shapes: PackShapes) -> list[Figure]:
    """Time `pack` against `copy_` into warm memory; it reads and checks the mask in either case.

    What is copied: `input_ids`, `labels` and `attention_mask` [B, S] and `position_ids` [4, B, S], all int64.
    """
    figures = []
    for samples, width in shapes.batches:
        batch = long_batch(samples, width, ratio=shapes.ratio, seed=settings.seed)
        batch = on_device(batch, settings.device)
        lengths = lengths_from_mask(batch.attention_mask).lengths
        told = replace(batch, metadata=HostMetadata(lengths=lengths, num_targets=sum(lengths) - len(lengths)))
        sources = list(batch.to_hf().values())
        targets = [torch.empty_like(source) for source in sources]

        def copy(sources: list[torch.Tensor] = sources, targets: list[torch.Tensor] = targets) -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

        with one_thread():
            timings = alternate(
                {
                    "pack": lambda batch=batch: pack(batch),
                    "with lengths": lambda batch=told: pack(batch),
                    "copy": copy,
                },
                seconds=settings.seconds / len(shapes.batches),
                device=settings.device,
            )
        name = f"{samples} x {width}"
        figures += [
            Figure.timed(CASE, f"pack {name}", timings, "pack", settings),
            Figure.compared(CASE, f"pack / copy {name}", timings, ("pack", "copy"), settings, target=FROM_MASK),
            Figure.compared(
                CASE, f"with lengths / copy {name}", timings, ("with lengths", "copy"), settings, target=FROM_FACTS
            ),
        ]
    return figures


def long_batch(samples: int, width: int, *, ratio: float = 5.0, seed: int = 0) -> PaddedBatch:
    """A right-padded batch of text whose lengths reach from `width / ratio` to `width`, in random order."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(width / ratio, width, samples).long()[torch.randperm(samples, generator=rng)]
    ids = torch.randint(1, 1000, (samples, width), generator=rng)
    mask = torch.arange(width) < lengths[:, None]
    return PaddedBatch(
        input_ids=ids,
        attention_mask=mask.long(),
        labels=ids.masked_fill(~mask, IGNORE),
        position_ids=torch.arange(width).expand(4, samples, width).contiguous(),
    )
