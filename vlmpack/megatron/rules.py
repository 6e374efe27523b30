"""The rules of packed rows over many ranks: one function a rule, which yields what is wrong and what to set.

They are those of Megatron-Bridge and of the kernels below it, as far as they concern packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import lcm

import torch

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.registry import FAMILIES, family_named
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments, SlotRule, round_up
from vlmpack.megatron.recipe import Recipe
from vlmpack.megatron.thd import installed_version

_WITH_ATTENTION = frozenset({"full_iteration", "layer", "attn"})
_PACKED_GDN = (0, 18)
"""The first megatron-core whose gated delta layers take packed rows."""

# ---------------------------------------------------------------------- rows and ranks


def _row_length(recipe: Recipe) -> Iterator[str]:
    length, multiple = recipe.sequence_length, recipe.needed_slots.row_multiple
    if length % multiple:
        yield (
            f"sequence_length={length} is not a multiple of {multiple}, so a full row cannot be cut over "
            f"{ranks_of(recipe)}: set sequence_length={round_up(length, multiple)}"
        )


def _slot_multiple(recipe: Recipe) -> Iterator[str]:
    multiple, needed = recipe.slots.multiple, recipe.needed_slots.multiple
    if multiple % needed:
        yield (
            f"slots are a multiple of {multiple}, not of {needed}, so segments cannot be cut over {ranks_of(recipe)}: "
            f"set SlotRule(multiple={lcm(multiple, needed)}), or take SlotRule.for_parallel(..., "
            "layout='mirrored')"
        )


def _row_multiple(recipe: Recipe) -> Iterator[str]:
    rule, needed = recipe.slots, recipe.needed_slots.row_multiple
    if rule.pad_to is None and _width_multiple(rule) % needed:
        yield (
            f"rows are a multiple of {_width_multiple(rule)}, not of {needed}, so they cannot be cut over "
            f"{ranks_of(recipe)}: set SlotRule(row_multiple={lcm(rule.row_multiple, needed)})"
        )


def _row_width(recipe: Recipe) -> Iterator[str]:
    width, length = recipe.slots.pad_to, recipe.sequence_length
    if width is not None and width != length:
        yield f"rows are padded to {width} tokens but sequence_length={length}: set SlotRule(pad_to={length})"


def _tail(recipe: Recipe) -> Iterator[str]:
    rule = recipe.slots
    has_tail = rule.pad_to is not None or rule.multiple % rule.row_multiple != 0
    if recipe.needed_slots.tail_in_slot and has_tail and not rule.tail_in_slot and recipe.engine == "vlmpack":
        yield (
            "a row's tail lies behind its last boundary, where a mirrored cut would lose it: set "
            "SlotRule(tail_in_slot=True), or layout='contiguous'"
        )


def _cut(recipe: Recipe) -> Iterator[str]:
    if recipe.engine == "megatron" and recipe.layout == "contiguous" and recipe.context > 1:
        yield "layout='contiguous', but Megatron-Core cuts packed rows mirrored: set layout='mirrored'"


def _width_multiple(rule: SlotRule) -> int:
    """Return the multiple of every row's width, if it is not fixed."""
    return rule.row_multiple if rule.multiple % rule.row_multiple else rule.multiple


def ranks_of(recipe: Recipe) -> str:
    """The settings that cut a row, for an error."""
    settings = [f"context={recipe.context}"]
    if recipe.eval_context not in (None, recipe.context):
        settings.append(f"eval_context={recipe.eval_context}")
    if recipe.sequence_parallel:
        settings.append(f"tensor={recipe.tensor} with sequence_parallel")
    return f"{' and '.join(settings)} in {recipe.precision}"


# ---------------------------------------------------------------------- loss and batches


def _loss(recipe: Recipe) -> Iterator[str]:
    reasons = {
        "under context parallelism, where a rank may hold no target at all": recipe.context > 1 and recipe.finetuning,
        "where rows are packed while data are read, each with another number of targets": recipe.packing == "stream",
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None and not recipe.per_token_loss:
        yield f"per_token_loss=False averages the averages of ranks {why}: set it to True"
    if why is not None and recipe.average_in_collective:
        yield f"average_in_collective=True divides gradients by the ranks once more {why}: set it to False"


def _micro_batch(recipe: Recipe) -> Iterator[str]:
    size = recipe.micro_batch_size
    if recipe.packing == "in_batch" and size < 2:
        yield (
            f"micro_batch_size={size} leaves nothing to pack, because in_batch puts the samples of a micro-batch into "
            "one row: set it to 2 or more, or packing='offline' with rows stored ahead"
        )
    elif recipe.packing != "in_batch" and size > 1:
        yield (
            f"micro_batch_size={size}, but each of the {recipe.packing} rows is a whole micro-batch already: set "
            f"micro_batch_size=1, and sequence_length={recipe.sequence_length * size} for as many tokens a step"
        )


# ---------------------------------------------------------------------- fixed shapes


def _fixed_width(recipe: Recipe) -> Iterator[str]:
    reasons = {
        f"pipeline={recipe.pipeline}: stages send each other tensors of one shape": recipe.pipeline > 1,
        f"expert={recipe.expert}: ranks exchange tokens of rows of one width": recipe.expert > 1,
        f"cuda_graphs={recipe.cuda_graphs}: a graph replays one shape": bool(recipe.cuda_graphs),
        f"max_segments={recipe.slots.max_segments} (pad_cu_seqlens): boundaries of one number": (
            recipe.slots.max_segments is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds and recipe.slots.pad_to is None:
            yield (
                f"{reason}, but rows have any width: set SlotRule(pad_to={recipe.sequence_length}) (pad_to_max_length)"
            )


def _fixed_boundaries(recipe: Recipe) -> Iterator[str]:
    room, packing = recipe.slots.max_segments, recipe.packing
    captured = sorted(_WITH_ATTENTION.intersection(recipe.cuda_graphs))
    if captured and room is None:
        yield (
            f"cuda_graphs capture attention ({', '.join(captured)}), but rows have any number of boundaries: set "
            "SlotRule(max_segments=...) (pad_cu_seqlens)"
        )
    if room is None:
        return
    if packing == "offline" and recipe.fullest_row is None:
        yield (
            f"max_segments={room} (pad_cu_seqlens) needs the manifest of the rows stored ahead, which knows the "
            "fullest row: set fullest_row"
        )
    most = {"in_batch": recipe.micro_batch_size, "offline": recipe.fullest_row, "stream": None}[packing]
    if most is not None and most > room:
        yield f"max_segments={room}, but a row can hold {most} samples: set SlotRule(max_segments={most})"


def _router_graphs(recipe: Recipe) -> Iterator[str]:
    family = FAMILIES.get(recipe.family or "")
    with_router = {"moe", "moe_router"} | ({"layer"} if family is not None and family.has("experts") else set())
    captured = sorted(with_router.intersection(recipe.cuda_graphs))
    if captured:
        left = tuple(scope for scope in recipe.cuda_graphs if scope not in with_router)
        yield (
            f"cuda_graphs capture the router ({', '.join(captured)}), which must leave out another padding in each "
            f"packed row: set cuda_graphs={left}"
        )


# ---------------------------------------------------------------------- what cannot go together


def _streamed_megatron(recipe: Recipe) -> Iterator[str]:
    if recipe.engine != "megatron" or recipe.packing != "stream":
        return
    refused = {
        f"mtp_depth={recipe.mtp_depth}": (recipe.mtp_depth > 0, "mtp_depth=0"),
        f"cuda_graphs={recipe.cuda_graphs}": (bool(recipe.cuda_graphs), "cuda_graphs=()"),
        f"pipeline={recipe.pipeline}": (recipe.pipeline > 1, "pipeline=1"),
    }
    for name, (holds, remedy) in refused.items():
        if holds:
            yield f"{name} does not go with rows that Megatron-Bridge packs while it reads: set {remedy}, or store rows"


def _mtp(recipe: Recipe) -> Iterator[str]:
    if recipe.engine != "megatron" or not recipe.mtp_depth:
        return
    if recipe.slots.multiple > 1 and recipe.boundaries == "real":
        yield (
            f"mtp_depth={recipe.mtp_depth} on slots that are a multiple of {recipe.slots.multiple}: Megatron-Core "
            "takes real boundaries for places in the row and rolls targets into other samples: set boundaries='slots'"
        )
    if "full_iteration" in recipe.cuda_graphs:
        yield (
            f"mtp_depth={recipe.mtp_depth} does not go with a graph of the full iteration, because Megatron-Core's "
            "roll reads boundaries on the host: leave 'full_iteration' out of cuda_graphs"
        )


def _family(recipe: Recipe) -> Iterator[str]:
    if recipe.family is None:
        return
    try:
        family = family_named(recipe.family)
    except FamilyError as error:
        yield f"family: {error}"
        return
    version = installed_version()
    if recipe.engine == "megatron" and family.has("gated_delta") and version is not None and version < _PACKED_GDN:
        yield (
            f"family: gated delta layers of megatron-core {'.'.join(map(str, version))} refuse packed rows, and "
            f"{recipe.family} has such layers: install megatron-core>=0.18, or set engine='vlmpack'"
        )


RULES: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _row_length,
    _slot_multiple,
    _row_multiple,
    _row_width,
    _tail,
    _cut,
    _loss,
    _micro_batch,
    _fixed_width,
    _fixed_boundaries,
    _router_graphs,
    _streamed_megatron,
    _mtp,
    _family,
)
"""The checks that `validate` makes of a recipe without a row."""


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
            Boundaries on a device are a host–device sync; nothing else is.
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
