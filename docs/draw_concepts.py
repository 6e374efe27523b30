"""Draw the pictures of rows and leaks, from numbers that are measured here: python docs/draw_concepts.py

Everything is computed by plain transformers on tiny random models; only the packed rows are ours.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from vlmpack import PackedRow, PackedStep, SlotRule, VLMCollator, disable_packing
from vlmpack.families import family_of
from vlmpack.layout import Segments
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

COLOURS = ("#0f766e", "#b45309", "#6d28d9")
INK = "#334155"
INPUTS = (
    "input_ids",
    "attention_mask",
    "pixel_values",
    "image_grid_thw",
    "mm_token_type_ids",
)


@dataclass(frozen=True)
class Measured:
    """One row of three receipts, and the error of each of its tokens under plain transformers."""

    segments: Segments
    """The row's boundaries."""
    positions: np.ndarray
    """int [3, T]: time, height, width."""
    packed: np.ndarray
    """[T]: largest difference of a token's logits from those of its sample alone, with packing enabled."""
    plain: dict[str, np.ndarray]
    """The same of the unmodified model, by how it was called."""


@cache
def measured(family: str) -> Measured:
    """Compute one row in every way."""
    processor = tiny_processor(family)
    model = tiny_model(family, processor=processor).eval()
    receipts = list(receipt_conversations(num=3, scale=0.35))
    row = VLMCollator(processor, layout="packed").collate(receipts)
    assert isinstance(row, PackedRow)
    alone = torch.cat([_logits(model, _padded(processor, receipt)) for receipt in receipts])
    step = PackedStep(model)(row, logits=True)
    assert step.row_logits is not None
    packed = _error(step.row_logits[0].detach(), alone)
    disable_packing(model)
    inputs = {name: value for name, value in row.to_hf().items() if name in INPUTS}
    assert row.metadata is not None
    assert row.metadata.media is not None
    positions = family_of(model).positions(
        row.metadata.media, row.segments, config=model.config
    )
    calls = {
        "positions [3, 1, T]": {"position_ids": positions[-3:], "use_cache": False},
        "positions [4, 1, T], use_cache on": {"position_ids": positions, "use_cache": True},
        "positions [4, 1, T], all-ones 2D mask": {
            "position_ids": positions,
            "use_cache": False,
            "attention_mask": torch.ones_like(row.input_ids),
        },
        "positions [4, 1, T], no mask, no cache": {
            "position_ids": positions,
            "use_cache": False,
        },
    }
    plain = {
        name: _error(_logits(model, {**inputs, **extra}), alone)
        for name, extra in calls.items()
    }
    return Measured(row.segments, positions[-3:, 0].numpy(), packed, plain)


def _padded(processor: Any, receipt: dict[str, Any]) -> dict[str, torch.Tensor]:
    batch = VLMCollator(processor, layout="padded").collate([receipt]).to_hf()
    return {name: batch[name] for name in INPUTS if name in batch}


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits[0]


def _error(logits: torch.Tensor, alone: torch.Tensor) -> np.ndarray:
    return (logits - alone).abs().amax(-1).numpy()


# ---------------------------------------------------------------------- pictures


def draw_leaks() -> Figure:
    """The error of every token, a strip for each way to call the model."""
    strips = [
        *(
            (f"Qwen3-VL, {name}", error)
            for name, error in measured("qwen3_vl").plain.items()
        ),
        ("Qwen3-VL, enable_packing", measured("qwen3_vl").packed),
        (
            "Qwen3.5, positions [4, 1, T], no mask, no cache",
            list(measured("qwen3_5").plain.values())[-1],
        ),
        ("Qwen3.5, enable_packing", measured("qwen3_5").packed),
    ]
    stride = measured("qwen3_vl").segments.stride
    figure = Figure(figsize=(9.5, 0.55 * len(strips) + 1.2), layout="constrained", dpi=144)
    panels = figure.subplots(len(strips), 1, sharex=True)
    image = None
    for axes, (name, error) in zip(panels, strips, strict=True):
        image = axes.imshow(
            np.maximum(error, 1e-7)[None],
            aspect="auto",
            cmap="magma_r",
            norm=LogNorm(1e-7, 10),
            extent=(0, len(error), 0, 1),
        )
        axes.set_yticks([])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", color=INK, fontsize=9)
        for edge in stride[1:-1]:
            axes.axvline(edge, color="white", linewidth=1.5)
    panels[-1].set_xlabel(
        "token of the row: three receipts, one after the other", color=INK
    )
    assert image is not None
    figure.colorbar(image, ax=list(panels), label="largest error of its logits", pad=0.01)
    return figure


def draw_masks(lengths: tuple[int, ...] = (6, 9, 4)) -> Figure:
    """What a token attends to: one causal triangle over the row, and one a sample."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    causal = np.tril(np.ones((len(owner), len(owner)), bool))
    block = causal & (owner[:, None] == owner[None])
    figure = Figure(figsize=(8, 4), layout="constrained", dpi=144)
    for axes, mask, title in zip(
        figure.subplots(1, 2),
        (causal, block),
        ("causal over the row: leaks", "block-diagonal causal (document mask)"),
        strict=True,
    ):
        _draw_mask(axes, mask, owner)
        axes.set_title(f"{title}\n{int(mask.sum())} pairs", color=INK, fontsize=10)
    return figure


def _draw_mask(axes: Axes, mask: np.ndarray, owner: np.ndarray) -> None:
    picture = np.ones((*mask.shape, 3))
    for query, key in zip(*np.nonzero(mask), strict=True):
        colour = COLOURS[owner[query]] if owner[query] == owner[key] else "#dc2626"
        picture[query, key] = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    axes.imshow(picture)
    axes.set(xlabel="key", ylabel="query", xticks=[], yticks=[])


def draw_positions(tallest: int = 45) -> Figure:
    """MRoPE positions around the second receipt: they restart in every sample, and run over the grid of its image."""
    found = measured("qwen3_vl")
    start, stop = found.segments.stride[1:3]
    figure = Figure(figsize=(9.5, 3), layout="constrained", dpi=144)
    axes = figure.subplots()
    for name, colour, line in zip(
        ("time", "height", "width"), COLOURS, found.positions, strict=True
    ):
        axes.plot(line, color=colour, linewidth=1.3, label=name)
    for edge in (start, stop):
        axes.axvline(edge, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            "a sample begins",
            (edge, tallest),
            (4, -10),
            textcoords="offset points",
            color=INK,
            fontsize=9,
        )
    axes.set(
        xlabel="token of the row",
        ylabel="position",
        xlim=(start - 8, stop + 90),
        ylim=(-1, tallest),
    )
    axes.legend(frameon=False, ncols=3, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_router() -> Figure:
    """The load-balancing loss of a mixture of experts as rows hold more padding, counted in or left out."""
    shares, counted, left_out = router_losses()
    figure = Figure(figsize=(6.5, 3), layout="constrained", dpi=144)
    axes = figure.subplots()
    axes.plot(
        shares, counted, marker="o", color="#dc2626", label="no 2D mask: padding is counted"
    )
    axes.plot(
        shares,
        left_out,
        marker="o",
        color=COLOURS[0],
        label="moe_padding_mask: padding is left out",
    )
    axes.set(xlabel="share of padding in the row", ylabel="load-balancing loss")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


@cache
def router_losses() -> tuple[list[float], list[float], list[float]]:
    """(share of padding, loss with the padding counted, loss of an enabled model) of one text, more and more padded."""
    model = tiny_model("qwen3_vl_moe").eval()
    model.config.text_config.output_router_logits = True
    ids = (6 + torch.arange(40) ** 2 % 23)[None]
    shares, counted = [], []
    for pads in (0, 10, 30, 60, 120):
        row = torch.cat([ids, torch.zeros(1, pads, dtype=torch.int64)], 1)
        with torch.no_grad():
            counted.append(
                float(model(input_ids=row, labels=row, output_router_logits=True).aux_loss)
            )
        shares.append(pads / row.shape[1])
    step, left_out = PackedStep(model), []
    for share in shares:
        pads = round(share * 40 / (1 - share))
        row = torch.cat([ids, torch.zeros(1, pads, dtype=torch.int64)], 1)
        mask = torch.zeros_like(row)
        mask[:, :40] = 1
        with torch.no_grad():
            output = step.model(
                input_ids=row,
                attention_mask=mask,
                labels=row.where(mask == 1, -100),
                output_router_logits=True,
            )
        left_out.append(float(output.aux_loss))
    return shares, counted, left_out


def draw_thd_row(lengths: tuple[int, ...] = (3, 5, 2)) -> Figure:
    """A row with slots that are a multiple of 4, and the four names under which a model learns of them."""
    row = Segments.from_lengths(lengths, SlotRule(multiple=4))
    figure = Figure(figsize=(9.5, 2.9), layout="constrained", dpi=144)
    axes = figure.subplots()
    for sample, ((start, stop), slot) in enumerate(zip(row.spans, row.slots, strict=True)):
        for place in range(start, start + slot):
            colour = COLOURS[sample] if place < stop else "#e2e8f0"
            axes.add_patch(
                Rectangle(
                    (place, 0), 1, 1, facecolor=colour, edgecolor="white", linewidth=2
                )
            )
            text = "abc"[sample] if place < stop else "pad"
            axes.text(
                place + 0.5,
                0.5,
                text,
                ha="center",
                va="center",
                color="white" if place < stop else INK,
            )
    names = ("cu_seqlens_q", "cu_seqlens_q_padded", "rope_cu_seqlens", "moe_padding_mask")
    for line, (name, values) in enumerate(
        zip(names, (row.real, row.stride, row.real), strict=False)
    ):
        for place, value in zip((*row.stride[:-1], row.total), values, strict=True):
            axes.text(
                place,
                -0.6 - 0.7 * line,
                str(value),
                ha="center",
                va="center",
                color=INK,
                fontsize=10,
            )
        axes.text(
            -0.6, -0.6 - 0.7 * line, name, ha="right", va="center", color=INK, fontsize=10
        )
    for place, pad in enumerate(row.padding_mask().tolist()):
        axes.text(
            place + 0.5,
            -2.7,
            "T" if pad else "F",
            ha="center",
            va="center",
            color=INK,
            fontsize=10,
        )
    axes.text(-0.6, -2.7, names[-1], ha="right", va="center", color=INK, fontsize=10)
    axes.set(xlim=(-5, row.total + 0.5), ylim=(-3.1, 1.1))
    axes.axis("off")
    return figure


PICTURES = {
    "concept_leaks": draw_leaks,
    "concept_masks": draw_masks,
    "concept_positions": draw_positions,
    "concept_router": draw_router,
    "thd_row": draw_thd_row,
}


def main(folder: str = "docs") -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        draw().savefig(Path(folder) / f"{name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
