"""A recipe: the settings that decide whether packed rows over many ranks can be trained as their samples alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Literal, final, get_args

from vlmpack.errors import ConfigError
from vlmpack.layout.segments import Layout, Precision, SlotRule
from vlmpack.megatron.thd import Boundaries

Packing = Literal["in_batch", "offline", "stream"]
"""The moment at which samples are put into rows: the samples of a micro-batch into one row; rows stored ahead; while
data are read (Energon, `vlmpack.loading`)."""

Engine = Literal["vlmpack", "megatron"]
"""The code that runs the model step: a Hugging Face model with packing enabled, or Megatron-Core."""

GraphScope = Literal["full_iteration", "layer", "attn", "mlp", "moe", "moe_router", "moe_preprocess"]
"""The parts of a step that a CUDA graph captures, by Megatron-Core's names; `layer`: whole layers."""


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings that decide whether packed rows can be trained as their samples alone.

    Raises:
        ConfigError: a count that is not a whole number of at least 1, or a word that is none of those listed.
    """

    sequence_length: int
    """Tokens of the longest row."""
    micro_batch_size: int
    """Samples or rows that a rank takes from its data loader for one forward: samples for `in_batch`, else rows."""
    packing: Packing
    """The moment at which samples are put into rows."""
    slots: SlotRule = SlotRule()
    """The layout of rows. Megatron-Bridge's `pad_to_max_length` is `pad_to`, its `pad_cu_seqlens` `max_segments`."""
    engine: Engine = "vlmpack"
    """The code that runs the model step."""
    family: str | None = None
    """The model's `config.model_type`; None: not looked at."""
    finetuning: bool = True
    """True if some tokens are no targets."""
    per_token_loss: bool = False
    """True if gradients are divided once, by the targets of all ranks (Megatron-Core: calculate_per_token_loss)."""
    average_in_collective: bool = False
    """True if data-parallel gradients are averaged while they are reduced (Megatron-Core: average_in_collective)."""
    context: int = 1
    """Context-parallel ranks."""
    eval_context: int | None = None
    """Context-parallel ranks in evaluation; None: as in training."""
    layout: Layout | None = None
    """The cut of a row over context-parallel ranks; None: the engine's (vlmpack contiguous, Megatron mirrored)."""
    tensor: int = 1
    """Tensor-parallel ranks."""
    sequence_parallel: bool = False
    """True if tensor-parallel ranks share tokens out between them outside attention."""
    pipeline: int = 1
    """Pipeline stages."""
    expert: int = 1
    """Expert-parallel ranks."""
    precision: Precision = "bf16"
    """Of the matrix products."""
    fullest_row: int | None = None
    """Most samples of any row, by the manifest of the rows stored ahead; None: there is no manifest."""
    cuda_graphs: tuple[GraphScope, ...] = ()
    """The parts that CUDA graphs capture in training; empty: there are none."""
    mtp_depth: int = 0
    """Further tokens that multi-token prediction looks ahead; 0: it is off."""
    boundaries: Boundaries = "real"
    """The boundaries of rows with gaps that Megatron gets (`to_megatron`)."""

    def __post_init__(self) -> None:
        problems = [*_counts(self), *_words(self)]
        if problems:
            raise ConfigError("this is no recipe:\n- " + "\n- ".join(problems))

    @property
    def cut(self) -> Layout:
        """Return how context-parallel ranks cut a row: `layout`, or that of the engine."""
        return self.layout or ("mirrored" if self.engine == "megatron" else "contiguous")

    @property
    def needed_slots(self) -> SlotRule:
        """The least rule under which its ranks can cut a row, in training and in evaluation."""
        rules = [
            SlotRule.for_parallel(
                context=context,
                tensor=self.tensor,
                sequence_parallel=self.sequence_parallel,
                precision=self.precision,
                layout=self.cut,
            )
            for context in (self.context, self.eval_context or self.context)
        ]
        return SlotRule(
            multiple=lcm(*(rule.multiple for rule in rules)),
            row_multiple=lcm(*(rule.row_multiple for rule in rules)),
            tail_in_slot=any(rule.tail_in_slot for rule in rules),
        )


def _counts(recipe: Recipe) -> Iterator[str]:
    counts = ("sequence_length", "micro_batch_size", "context", "tensor", "pipeline", "expert")
    if_given = ("eval_context", "fullest_row")
    least = {**dict.fromkeys(counts, 1), **dict.fromkeys(if_given, 1), "mtp_depth": 0}
    for name, at_least in least.items():
        value = recipe.__dict__[name]
        if not (isinstance(value, int) and value >= at_least) and not (value is None and name in if_given):
            yield f"{name} must be a whole number of at least {at_least}, got {value!r}"


def _words(recipe: Recipe) -> Iterator[str]:
    choices = {"packing": Packing, "engine": Engine, "layout": Layout, "precision": Precision, "boundaries": Boundaries}
    for name, words in choices.items():
        if recipe.__dict__[name] not in get_args(words) and (name, recipe.__dict__[name]) != ("layout", None):
            yield f"{name} must be one of {', '.join(get_args(words))}, got {recipe.__dict__[name]!r}"
    for scope in recipe.cuda_graphs:
        if scope not in get_args(GraphScope):
            yield f"cuda_graphs may hold {', '.join(get_args(GraphScope))}, got {scope!r}"
