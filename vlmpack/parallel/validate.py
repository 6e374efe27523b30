"""A whole recipe, and a row of it, looked at before the first step: what is wrong is said all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from vlmpack.errors import ConfigError
from vlmpack.layout import PackedRow, Segments
from vlmpack.parallel.recipe import Recipe
from vlmpack.parallel.rules import RULES, ranks_of


def validate(
    recipe: Recipe,
    row: PackedRow | Segments | Sequence[int] | torch.Tensor | None = None,
    *,
    total: int | None = None,
) -> None:
    """Look for settings under which packed rows cannot be trained as their samples alone.

    Args:
        recipe: the settings.
        row: a row as the recipe's data loader makes it, or the boundaries of its slots (`cu_seqlens_q_padded`) alone.
            Waits for boundaries that lie on a device, and for nothing else.
        total: tokens of the row, where `row` is boundaries; None: `sequence_length`.

    Raises:
        ConfigError: every such setting, what was seen, and what to set.
    """
    problems = [problem for rule in RULES for problem in rule(recipe)]
    if row is not None:
        problems += _row_problems(recipe, row, recipe.sequence_length if total is None else total)
    if problems:
        raise ConfigError("this recipe does not train packed rows as their samples alone:\n- " + "\n- ".join(problems))


def _row_problems(
    recipe: Recipe, row: PackedRow | Segments | Sequence[int] | torch.Tensor, total: int
) -> Iterator[str]:
    segments = row.segments if isinstance(row, PackedRow) else row
    if isinstance(segments, Segments):
        total = segments.total
        covered = recipe.needed_slots.tail_in_slot and recipe.engine == "vlmpack"
        stride = segments.stride if covered else segments.without_tail().stride
    else:
        stride = tuple(segments.tolist() if isinstance(segments, torch.Tensor) else segments)
    yield from _width_of(recipe, total)
    yield from _edges(stride, total)
    yield from _slots_of(stride, recipe.needed_slots.multiple)


def _width_of(recipe: Recipe, total: int) -> Iterator[str]:
    multiple, width = recipe.needed_slots.row_multiple, recipe.slots.pad_to
    if total > recipe.sequence_length:
        yield f"the row is {total} tokens wide but sequence_length={recipe.sequence_length}: make rows shorter"
    if width is not None and total != width:
        yield f"the row is {total} tokens wide but pad_to={width}: pack it by the recipe's slots"
    if total % multiple:
        yield (
            f"the row is {total} tokens wide, not a multiple of {multiple}, so it cannot be cut over "
            f"{ranks_of(recipe)}: pack it with SlotRule(row_multiple={multiple})"
        )


def _edges(stride: tuple[int, ...], total: int) -> Iterator[str]:
    if not stride or stride[0] != 0:
        yield f"boundaries must start at 0, got {list(stride)[:6]}: set the first one to 0"
    for i, (a, b) in enumerate(pairwise(stride)):
        if b < a:
            yield f"boundaries must never decrease, but segment {i} runs from {a} to {b}: give cumulative counts"
    if stride and stride[-1] != total:
        yield (
            f"boundaries end at {stride[-1]} but the row is {total} tokens wide, so kernels leave tokens unwritten or "
            "read beyond it: end the last slot where the row ends (SlotRule(tail_in_slot=True))"
        )


def _slots_of(stride: tuple[int, ...], multiple: int) -> Iterator[str]:
    odd = [(i, b - a) for i, (a, b) in enumerate(pairwise(stride)) if b >= a and (b - a) % multiple]
    if odd:
        (first, slot), others = odd[0], len(odd) - 1
        yield (
            f"segment {first} has {slot} slots of the row{f' (and {others} more like it)' if others else ''}, not a "
            f"multiple of {multiple}, so ranks would hold tokens twice and lose others: pack with "
            f"SlotRule(multiple={multiple})"
        )
