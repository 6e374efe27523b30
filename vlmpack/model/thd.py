"""The model step for models that take packed boundaries themselves, under the names in their `forward`.

Such models are Megatron-Core's GPTModel, Megatron-Bridge's Qwen3-VL, or a custom model. `ThdStep` packs a batch by a
`SlotRule` and passes the arguments that the signature names. Example: sample lengths [3, 5, 2], each padded to a
multiple of 4:
    row                     a a a .  b b b b b . . .  c c . .
    cu_seqlens_q            [0, 3, 8, 10]       tokens to attend to
    cu_seqlens_q_padded     [0, 4, 12, 16]      where each sample starts in the row, padding included
    rope_cu_seqlens         [0, 3, 8, 10]       where MRoPE positions restart, counted in real tokens
    moe_padding_mask        F F F T  F F F F F T T T  F F T T
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.errors import ConfigError, LayoutError, check_whole_number
from vlmpack.families.family import Family
from vlmpack.families.media import media_of_row
from vlmpack.families.registry import family_named
from vlmpack.interop.megatron import Halo, LocalRow, packed_seq_fields, packed_seq_params, shard, validate
from vlmpack.layout.batch import MEDIA_KEYS, METADATA_KEY, TEACHER, Media, PaddedBatch, check_is_batch, check_is_tensor
from vlmpack.layout.device import copied, require
from vlmpack.layout.row import IGNORE, PackedRow, pack
from vlmpack.layout.segments import Layout, Segments, SlotRule, checked_boundaries
from vlmpack.layout.sharing import check_unshared
from vlmpack.machine import version_of
from vlmpack.model.engine import check_targets, divisor, positions_of_row, rope_segments, targets_of
from vlmpack.model.forward import PADDING_MASKS, WEIGHTS, read_batch
from vlmpack.model.result import StepResult, Work, target_sums

REAL = frozenset({"cu_seqlens_q", "cu_seqlens_kv"})
PADDED = frozenset({"cu_seqlens_q_padded", "cu_seqlens_kv_padded"})
BOUNDARY_PARAMETERS = REAL | PADDED | {"packed_seq_params"}
POSITIONS = frozenset({"position_ids", "rope_cu_seqlens", "packed_seq_params"})
"""Arguments that tell a model where positions restart. Megatron's rotary embedding reads `packed_seq_params`."""

WRAPPED = ("module", "_orig_mod", "base_model", "model")
"""Attributes in which wrappers (DDP, Megatron's Float16Module, `torch.compile`, PEFT) keep the model."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ThdInputs:
    """A packed row and the keyword arguments to call a model with."""

    row: PackedRow
    """The whole row, on the model's device."""
    arguments: Mapping[str, Any]
    """The model's keyword arguments."""
    part: LocalRow | None = None
    """The part of the row on this context-parallel rank; None: one rank holds all of it."""

    def halo(self, depth: int) -> Halo:
        """Return the halo for multi-token prediction: the tokens of other ranks that `depth` further tokens need.

        Raises:
            ConfigError: one rank holds the whole row, which `vlmpack.layout.roll_left` can roll.
        """
        if self.part is None:
            raise ConfigError("one rank holds the whole row: roll it with vlmpack.layout.roll_left; there is no halo")
        return Halo(partition=self.part.partition, depth=depth)


@final
class ThdStep:
    """Pack a batch, call a model that takes packed boundaries, and return a `StepResult`.

        step = ThdStep(model, slots=SlotRule.for_parallel(context=2, layout="mirrored"), config=hf_config)
        result = step(batch, num_items_in_batch=targets_of_all_micro_batches)
        result.loss.backward()

    A trainer that calls the model itself uses the two halves: `inputs = step.inputs(batch)`, then
    `step.result(model(**inputs.arguments), inputs)`.

    The model gets only the arguments that its `forward` names:

    | name | value |
    |---|---|
    | `input_ids` or `tokens` | [1, T] int64 |
    | `labels` or `shift_labels` | [1, T] int64: the next token of each token, -100 for none |
    | `loss_mask` | [1, T] float32: 1 where there is a target |
    | `cu_seqlens_q`, `cu_seqlens_kv` | int32 [G + 1]: cumulative real tokens |
    | `cu_seqlens_q_padded`, `cu_seqlens_kv_padded` | int32 [G + 1]: samples' starts; the same object without gaps |
    | `max_seqlen_q`, `max_seqlen_kv` | int: the largest padded length |
    | `packed_seq_params` | megatron-core's object with these fields, or a plain object if it is not installed |
    | `rope_cu_seqlens` | int32: where MRoPE positions restart, counted in real tokens |
    | `position_ids` | [1, T], or [3, 1, T] time, height, width |
    | `moe_padding_mask` or `padding_mask` | [1, T] bool, True on padding, which routers must not count |
    | `attention_mask` | None: the boundaries replace it |
    | `mm_token_type_ids`, `pixel_values`, `image_grid_thw`, ... | as in the batch |

    The model returns per-token losses [1, T]; logits [1, T, V]; a tuple that starts with either (if the second entry
    has as many elements as the row, it is compared with the loss mask); or a mapping with `losses` or `logits`, and
    optionally `aux_loss`, a scalar that is added to the loss unchanged (a context-parallel rank returns its share).
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any],
        *,
        slots: SlotRule | None = None,
        config: Any = None,
        has_experts: bool | None = None,
        context_ranks: int = 1,
        context_rank: int = 0,
        layout: Layout = "mirrored",
        model_cuts: bool = False,
    ) -> None:
        """Read the model's signature.

        Args:
            model: a module or function whose `forward` has packed boundaries among its parameters.
            slots: how samples and the row are padded; None: no padding at all.
            config: the Hugging Face configuration of the model's family (`AutoConfig.from_pretrained(name)`), from
                which positions are computed and placeholders checked against grids. None: the samples are text, or the
                batch contains positions.
            has_experts: whether padding could reach a router; None: look in the model's configuration and modules.
            context_ranks: context-parallel ranks that share a row.
            context_rank: this rank, 0 to `context_ranks` - 1.
            layout: how the row is split across these ranks.
            model_cuts: True: the model gets the whole row and returns its own part, as Megatron-Bridge's
                vision-language models do. False: it gets its part of the row and the boundaries of the whole row, as
                GPTModel does.

        Raises:
            ConfigError: the model takes no boundaries; needs an argument that a row does not have; would count padding
                in its routers; or would let positions run on from sample to sample.
        """
        self.model = model
        self.slots = slots or SlotRule()
        self.config = config
        self.layout: Layout = layout
        self.context_ranks, self.context_rank = context_ranks, context_rank
        self.model_cuts = model_cuts
        check_whole_number("context_rank", context_rank, at_least=0, at_most=context_ranks - 1)
        if config is not None and not hasattr(config, "model_type"):
            raise ConfigError(f"config is {config!r:.60}; give the model's Hugging Face configuration, AutoConfig's")
        self.family: Family | None = None if config is None else family_named(config.model_type)
        self._parameters = _parameters_of(model)
        self._names = frozenset(self._parameters)
        self._has_experts = _has_experts(model) if has_experts is None else has_experts
        if not self._names & POSITIONS:
            raise ConfigError(
                f"the model's forward takes none of {', '.join(sorted(POSITIONS))}, so rotary positions would run on "
                "from sample to sample: give it one of these parameters"
            )
        if self.slots.multiple > 1 or self.slots.row_multiple > 1 or self.slots.pad_to is not None:
            self._check_padding(f"{self.slots} makes rows with padding")

    def __call__(
        self,
        batch: PaddedBatch | PackedRow | Mapping[str, Any],
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        rope_cu_seqlens: Any = None,
        **inputs: Any,
    ) -> StepResult:
        """Pack a batch, call the model, and read what it returns.

        Args:
            batch: see `inputs`.
            num_items_in_batch: number of targets in all batches of one optimizer step; None: in this row.
            rope_cu_seqlens: see `inputs`.
            **inputs: further arguments of the model, by name.

        Raises:
            LayoutError, ConfigError: as `inputs` and `result`.
        """
        called = self.inputs(batch, rope_cu_seqlens=rope_cu_seqlens, **inputs)
        return self.result(self.model(**called.arguments), called, num_items_in_batch=num_items_in_batch)

    # ------------------------------------------------------------------ in

    def inputs(
        self, batch: PaddedBatch | PackedRow | Mapping[str, Any], *, rope_cu_seqlens: Any = None, **inputs: Any
    ) -> ThdInputs:
        """Pack a batch into a row on the model's device, and build the model's arguments from it.

        With host metadata (`VLMCollator` adds it) there is no host–device sync.

        Args:
            batch: a padded batch with its 2D mask, padded on either side; a packed row; or either as a dictionary.
            rope_cu_seqlens: further boundaries at which positions restart, in addition to the start of each sample: a
                tensor, list or tuple, in real tokens or positions of the row.
            **inputs: further arguments of the model, by name.

        Raises:
            LayoutError: the batch contradicts itself, or the ranks cannot share the row evenly.
            ConfigError: the row has an input that the model would ignore; or the model needs one that the row lacks.
        """
        if isinstance(batch, Mapping):
            rope_cu_seqlens = batch.get("rope_cu_seqlens") if rope_cu_seqlens is None else rope_cu_seqlens
            batch, further = self._from_dictionary(batch)
            inputs = {**further, **dict.fromkeys(batch.extras.keys() - self._names), **inputs}  # extras: refused below
        row = self._row(batch)
        self._check_row(row)
        unknown = sorted(inputs.keys() - self._names)
        if unknown:
            raise ConfigError(
                f"the model's forward takes no {', '.join(unknown)}; it takes {', '.join(self._parameters)}"
            )
        part = None
        if self.context_ranks > 1:
            part = shard(row, self.context_rank, self.context_ranks, layout=self.layout)
        available = self._available(row, part, rope_cu_seqlens)
        arguments = {name: value for name, value in available.items() if name in self._names}
        for name, value in inputs.items():
            arguments[name] = copied(value, row.input_ids.device) if isinstance(value, torch.Tensor) else value
        required = [x.name for x in self._parameters.values() if x.default is x.empty and x.kind in _BY_NAME]
        missing = [name for name in required if name not in arguments]
        if missing:
            raise ConfigError(
                f"the model's forward needs {', '.join(missing)}, which this row does not have: hand it over by name, "
                f"step(batch, {missing[0]}=...)"
            )
        return ThdInputs(row=row, arguments=arguments, part=part)

    def _row(self, batch: PaddedBatch | PackedRow) -> PackedRow:
        parameter = next(self.model.parameters(), None) if isinstance(self.model, nn.Module) else None
        if not isinstance(batch, PaddedBatch | PackedRow):
            raise ConfigError(f"a {type(batch).__name__} is no batch; collate first: step(collator.collate(samples))")
        if parameter is not None:
            batch = batch.to(parameter.device, non_blocking=True)
        _check_pixels(batch.media)
        return pack(batch, rule=self.slots) if isinstance(batch, PaddedBatch) else batch

    def _from_dictionary(self, batch: Mapping[str, Any]) -> tuple[PaddedBatch | PackedRow, dict[str, torch.Tensor]]:
        """Build a batch or row from a dictionary, and return its other tensors too: further arguments of the model.

        Duplicate information must agree.
        """
        check_is_batch(batch)
        check_is_tensor(batch["input_ids"], "input_ids")
        for name, remedy in _REFUSED.items():
            if batch.get(name) is not None:
                raise ConfigError(f"the batch has {name}, which this step makes by itself: {remedy}")
        media = {*MEDIA_KEYS, *(() if self.family is None else self.family.media)}
        shape = batch["input_ids"].shape
        others = {n: x for n, x in batch.items() if isinstance(x, torch.Tensor) and n not in media | _COLUMNS}
        extras = tuple(sorted(name for name, x in others.items() if x.shape[-2:] == shape))
        further = {name: x for name, x in others.items() if name not in extras}
        read = read_batch(batch, extras=extras, media=media)
        if isinstance(read, PackedRow):
            boundaries = {"cu_seqlens_kv": read.segments.real, "cu_seqlens_kv_padded": read.segments.stride}
            for name, expected in boundaries.items():
                if batch.get(name) is not None and checked_boundaries(batch[name], name) != expected:
                    of_queries = name.replace("kv", "q")
                    raise LayoutError(f"{name} is not {of_queries}: keys of other samples are no packed row")
        return read, further

    def _available(self, row: PackedRow, part: LocalRow | None, rope_cu_seqlens: Any) -> dict[str, Any]:
        """Return the value of every argument that this row can provide."""
        held = row if part is None or self.model_cuts else part
        segments, device, labels = row.segments, row.input_ids.device, held.shift_labels
        restarts = None if rope_cu_seqlens is None else rope_segments(rope_cu_seqlens, segments)
        fields = packed_seq_fields(segments, device=device)
        values: dict[str, Any] = {
            **{name: fields.get(name) for name in REAL | PADDED | {"max_seqlen_q", "max_seqlen_kv"}},
            **dict.fromkeys(("input_ids", "tokens"), held.input_ids),
            **dict.fromkeys(PADDING_MASKS, held.moe_padding_mask),
            "rope_cu_seqlens": (restarts or segments).cu_seqlens(device),
            "attention_mask": None,
            **held.extras,
            **row.media.to_hf(),
        }
        for name in PADDED:  # without gaps the same object: kernels take that as a sign that there are none
            values[name] = values["cu_seqlens_q"] if values[name] is None else values[name]
        if "packed_seq_params" in self._names:
            is_installed = version_of("megatron-core") is not None
            fields = dict.fromkeys(PADDED) | fields
            params = packed_seq_params(segments, device=device) if is_installed else SimpleNamespace(**fields)
            values["packed_seq_params"] = params
        if labels is not None:
            values |= {"labels": labels, "shift_labels": labels, "loss_mask": (labels != IGNORE).float()}
        types, positions = row.mm_token_type_ids, self._positions(row, restarts)
        if types is None and self.family is not None:
            types = self.family.types_of_row(row, self.config)
        for name, tensor in (("mm_token_type_ids", types), ("position_ids", positions)):
            if tensor is not None:
                values[name] = tensor if part is None or held is row else part.partition.cut(tensor, part.rank)
        if positions is None and "rope_cu_seqlens" in self._names:  # the model computes them from boundaries and grids
            values["position_ids"] = None
        return values

    def _positions(self, row: PackedRow, restarts: Segments | None) -> torch.Tensor | None:
        """Return positions [1, T], or [3, 1, T] for a family with MRoPE.

        None if they depend on grids and the step has no `config`: the model computes them.
        """
        if self.family is not None:
            table, types = media_of_row(self.family, row, self.config), self.family.types_of_row(row, self.config)
            positions = positions_of_row(row, table, types, self.family, self.config, restarts=restarts)
            return positions[-3:] if self.family.positions_rule.axes == 3 else positions[0]
        if row.position_ids is not None:
            if restarts is not None:
                raise ConfigError(
                    "position_ids do not restart at the finer rope_cu_seqlens: leave one of the two out, or give the "
                    "step config=, by which they are computed"
                )
            return row.position_ids[-3:] if row.position_ids.ndim == 3 else row.position_ids
        if not row.media.to_hf():
            return (restarts or row.segments).position_in_segment(row.input_ids.device)[None]
        if not self._names & {"rope_cu_seqlens", "packed_seq_params"}:
            raise ConfigError(
                "the row has media, so its positions follow from their grids: give the step config=, the model's "
                "Hugging Face configuration, or the batch position_ids"
            )
        return None

    # ------------------------------------------------------------------ out

    def result(
        self, output: Any, inputs: ThdInputs, *, num_items_in_batch: torch.Tensor | int | None = None
    ) -> StepResult:
        """Turn the model's output into sums and counts, one entry per sample.

        On a context-parallel rank, targets held by other ranks count as 0 in `target_logprobs`, `loss_sum` and
        `sample_loss_sums`, and in full in `num_targets` and `sample_targets`, so that the ranks' results add up to the
        row's.

        Args:
            output: per-token losses [1, T] or logits [1, T, V] (t tokens on a context-parallel rank), alone or in a
                tuple or mapping.
            inputs: the return value of `inputs`.
            num_items_in_batch: number of targets in all batches of one optimizer step; None: in this row.

        Raises:
            ConfigError: the output is neither losses nor logits of these tokens.
        """
        row = inputs.row
        check_targets(row)
        labels, index = targets_of(row, row.known_metadata.num_targets)
        output, aux_loss = _main_output(output, inputs, labels)
        logits = output if output.ndim == 3 else None
        losses = _target_losses(output, inputs, labels, index)
        sums = target_sums(-losses, row, index)
        loss_sum, targets = sums["loss_sum"], sums["num_targets"]
        loss = loss_sum / divisor(num_items_in_batch, targets) if targets else loss_sum
        return StepResult(
            **sums,
            loss=loss if aux_loss is None else loss + torch.as_tensor(aux_loss).to(loss.device).reshape(()),
            work=Work(
                real_tokens=row.segments.num_tokens,
                physical_tokens=row.segments.total // (1 if inputs.part is None else inputs.part.partition.ranks),
                attended_pairs=row.segments.attended_pairs,
                vision_patches=0 if (media := row.known_metadata.media) is None else media.patches,
            ),
            row_logits=logits if inputs.part is None else None,
        )

    # ------------------------------------------------------------------ checks

    def _check_padding(self, seen: str) -> None:
        """Refuse padding that the model cannot tell from samples."""
        if "packed_seq_params" not in self._names and not self._names & PADDED:
            raise ConfigError(
                f"{seen}, but the model's forward takes neither cu_seqlens_q_padded nor packed_seq_params, so it would "
                "look for samples in the wrong places: leave slots out, or give it one of these parameters"
            )
        if self._has_experts and not self._names & {*PADDING_MASKS}:
            raise ConfigError(
                f"{seen}, but the model has experts and its forward takes neither moe_padding_mask nor padding_mask, "
                "so its routers would count padding: leave slots out, give it one of these parameters, or set "
                "has_experts=False if it finds padding by itself"
            )

    def _check_row(self, row: PackedRow) -> None:
        """Refuse inputs that the model would ignore, and padded lengths that ranks cannot share."""
        check_unshared(row, "a model that takes boundaries")
        if odd := sorted(row.extras.keys() & {*TEACHER}):
            raise ConfigError(f"the row has {odd[0]}, which a model that takes boundaries would ignore: use PackedStep")
        if row.segments.has_padding:
            self._check_padding(f"the row has {row.segments.total - row.segments.num_tokens} tokens of padding")
        validate(row, self.slots)
        if row.media.to_hf() and self.context_ranks > 1 and not self.model_cuts:
            raise ConfigError(
                "a part of a row with media cannot be computed by itself, because an image's features belong to tokens "
                "of several ranks: set model_cuts=True for a model that takes the whole row and cuts it by itself"
            )
        ignored = sorted(row.media.to_hf().keys() - self._names)
        if ignored:
            raise ConfigError(
                f"the row has {', '.join(ignored)}, which the model's forward does not take, so it would ignore them: "
                "give it these parameters, or leave them out of the batch"
            )


_COLUMNS = frozenset(
    {
        *("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "mm_token_type_ids"),
        *("use_cache", METADATA_KEY),
        *(*REAL, *PADDED, *PADDING_MASKS, *WEIGHTS, "max_seqlen_q", "max_seqlen_kv", "rope_cu_seqlens"),
    }
)
"""Columns of a batch dictionary that the step reads, besides media. Maximum lengths are recomputed."""
_REFUSED = {
    "loss_mask": "set labels to -100 where nothing is to be predicted, and leave it out",
    "packed_seq_params": "hand over vlmpack.interop.megatron.from_megatron(batch)",
    "tokens": "call them input_ids, or hand over vlmpack.interop.megatron.from_megatron(batch)",
}


def _check_pixels(media: Media) -> None:
    """Check that there are as many patches as the grids describe, without a host–device sync."""
    for pixels, grids in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        values, grid = media.to_hf().get(pixels), media.to_hf().get(grids)
        if grid is None:
            continue
        if values is None:
            raise LayoutError(f"the batch has {grids} and no {pixels}: pass the pixels too, or leave both out")
        expected = grid.prod(-1).sum()
        message = f"{pixels} has {len(values)} patches, which is not what {grids} describes: pass those of every sample"
        require(expected == len(values), message, LayoutError)


def _parameters_of(model: nn.Module | Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the first forward that names boundaries, searching from the outermost wrapper inwards.

    A name that only `**kwargs` would accept does not count: models accept any keyword and ignore it.
    """
    inner: Any = model
    while inner is not None:
        parameters = inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner).parameters
        if parameters.keys() & BOUNDARY_PARAMETERS:
            return parameters
        passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        held = [getattr(inner, name, None) for name in WRAPPED] if passes_on else []
        inner = next((module for module in held if isinstance(module, nn.Module)), None)
    raise ConfigError(
        f"the forward of {type(model).__name__} names none of {', '.join(sorted(BOUNDARY_PARAMETERS))}, so the samples "
        "of a row would attend to each other. Give it such parameters (**kwargs do not count: what they take may be "
        "ignored). For a Hugging Face model use PackedStep"
    )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EXPERT_COUNTS = ("num_moe_experts", "num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configurations."""


def _has_experts(model: Any) -> bool:
    if not isinstance(model, nn.Module):
        return False
    modules = list(model.modules())
    configs = [getattr(module, "config", None) for module in modules]
    configs += [getattr(config, "text_config", None) for config in configs]
    counted = any(getattr(config, name, None) for config in configs for name in _EXPERT_COUNTS)
    return counted or any(word in type(module).__name__.lower() for module in modules for word in ("router", "moe"))


def _main_output(output: Any, inputs: ThdInputs, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (losses [1, t] or logits [1, t, V], auxiliary loss) from a model's output."""
    aux_loss = None
    held = labels if inputs.part is None else inputs.part.shift_labels
    if isinstance(output, Mapping):
        aux_loss = output.get("aux_loss")
        output = output.get("logits") if output.get("losses") is None else output["losses"]
    elif isinstance(output, tuple | list) and output:
        output, *others = output
        mask = others[0] if others else None
        if isinstance(mask, torch.Tensor) and held is not None and mask.numel() == held.numel():
            agrees = ((mask.reshape(-1) != 0) == (held.reshape(-1) != IGNORE)).all()
            require(agrees, "the loss mask that the model returned is not that of the row's targets", LayoutError)
    tokens = (labels if held is None else held).numel()
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        if output.numel() == tokens:
            return output.reshape(1, tokens), aux_loss
        if output.ndim >= 2 and output.numel() == tokens * output.shape[-1]:
            return output.reshape(1, tokens, -1), aux_loss
    shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    raise ConfigError(
        f"the model returned {shape} for a row of {tokens} tokens: return losses of each token [1, {tokens}] or logits "
        f"[1, {tokens}, V], alone, first in a tuple, or as 'losses' or 'logits' in a mapping. A mean over the row does "
        "not tell the losses of samples"
    )


def _target_losses(output: torch.Tensor, inputs: ThdInputs, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return float32 [L]: the cross-entropy of each target of the row, 0 if another rank holds it."""
    part = inputs.part
    if part is None:
        if output.ndim == 2:
            return output[0].index_select(0, index).float()
        logits_LV = output[0].index_select(0, index).float()
        return F.cross_entropy(logits_LV, labels[0].index_select(0, index), reduction="none")
    if part.shift_labels is None:
        return output.new_zeros(0, dtype=torch.float32)
    held = part.shift_labels[0]
    losses_t = output[0].float() if output.ndim == 2 else F.cross_entropy(output[0].float(), held, reduction="none")
    losses_t = losses_t.where(held != IGNORE, 0)
    return losses_t.new_zeros(labels.shape[1]).index_copy(0, part.index, losses_t).index_select(0, index)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RouterLosses:
    """Router losses over real tokens only. E experts."""

    aux_loss: torch.Tensor
    """Scalar: E times the sum over experts of (fraction of choices) times (mean probability), equations 4 to 6 of
    Switch Transformer (2021), over the tokens of all layers together, as in transformers; without a coefficient."""
    z_loss: torch.Tensor
    """Scalar: the mean over tokens and layers of logsumexp(logits) squared, ST-MoE (2022), equation 5; without a
    coefficient."""
    expert_counts: torch.Tensor
    """int64 [layers, E]: real tokens sent to each expert."""


def masked_router_losses(
    router_logits: Sequence[torch.Tensor], moe_padding_mask: torch.Tensor, *, top_k: int
) -> RouterLosses:
    """Compute the router losses that a model should compute when it gets `moe_padding_mask`.

    Padding must not enter a router's auxiliary loss, z-loss, counts or capacity, and is dispatched to no expert.

    Args:
        router_logits: [1, T, E] of each layer with experts.
        moe_padding_mask: [1, T] bool, True on padding.
        top_k: number of experts per token.
    """
    real_T = (~moe_padding_mask).reshape(-1).float()
    stacked_LTE = torch.stack([logits.flatten(0, -2).float() for logits in router_logits])
    probabilities_LTE = stacked_LTE.softmax(-1)
    chosen_LTE = torch.zeros_like(stacked_LTE).scatter(-1, probabilities_LTE.topk(top_k, -1).indices, 1.0)
    chosen_LE = torch.einsum("lte,t->le", chosen_LTE, real_T)
    tokens = real_T.sum().clamp(min=1) * len(stacked_LTE)  # a row of padding alone has losses of 0
    probability_E = torch.einsum("lte,t->e", probabilities_LTE, real_T) / tokens
    return RouterLosses(
        aux_loss=stacked_LTE.shape[-1] * (chosen_LE.sum(0) / tokens * probability_E).sum(),
        z_loss=(stacked_LTE.logsumexp(-1).square() * real_T).sum() / tokens,
        expert_counts=chosen_LE.long(),
    )
