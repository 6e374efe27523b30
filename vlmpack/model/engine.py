"""Run one packed row through an unmodified model: positions, hidden states, head at labeled positions, sums."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf, lcm, prod
from typing import Any, final, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vlmpack.attention.backends import AUTO, BACKENDS
from vlmpack.context_parallel.mesh import Parallel
from vlmpack.context_parallel.plans import fit_adapters
from vlmpack.errors import ConfigError, LayoutError, check_choice, check_kind, check_whole_number
from vlmpack.families.family import Family
from vlmpack.families.media import media_of_row, media_reader
from vlmpack.layout.batch import TEACHER, check_is_tensor, check_tensor
from vlmpack.layout.device import Copies, around_graph, copied, copies_reused, on_host, outside_graph, require
from vlmpack.layout.media import IMAGE, KINDS, VIDEO, Grid, MediaTable
from vlmpack.layout.pieces import cut_group
from vlmpack.layout.row import IGNORE, PackedRow, check_none_on_padding, without_gaps
from vlmpack.layout.segments import Segments, SlotRule, checked_boundaries
from vlmpack.model.distillation import Distillation, Teacher
from vlmpack.model.head import Head, Scoring, in_one_call, score_targets, target_positions
from vlmpack.model.loss_count import LossCount
from vlmpack.model.mechanisms import Mechanism, Memo, ModelParts, RowSetup
from vlmpack.model.mechanisms.experts import Balance, RouterStatistics, router_statistics
from vlmpack.model.mechanisms.tensor_parallel import DividedHead
from vlmpack.model.mechanisms.vision import for_compiler
from vlmpack.model.pieces import Outputs, PieceOfGroup, RowInPieces, RunPiece
from vlmpack.model.result import StepResult, Work, target_sums
from vlmpack.model.row import CONTEXT, LAST_HIDDEN, RowContext, RowOverRanks, RowPart


@final
@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Settings of an enabled model."""

    slots: SlotRule = SlotRule()
    """How samples and rows are padded when the forward pass packs a padded batch. `row_multiple` and `pad_to` also set
    the width of rows from which the gaps between samples are removed."""
    keep_empty: bool = False
    """Keep all-zero rows of a padded batch as segments of length 0 instead of refusing them."""
    attention: str = AUTO
    """Name of the attention back-end, or "auto": the first one that supports the call. Sparse attention always uses the
    model's own."""
    head_chunk: int = 2048
    """Rows of logits in memory at a time. Logits take at least `4 * head_chunk * vocabulary` bytes."""
    aux_loss: Balance = "row"
    """How the routers' load-balancing loss is computed. "row": over all real tokens together, as transformers does for
    a batch; "sample": the mean of each sample's own loss; "step": over the rows of all data ranks, and their z-loss and
    the counts of tokens too. With "step", all data ranks must make equally many passes."""
    distillation: Distillation = field(default_factory=Distillation)
    """The loss of batches with a teacher's `topk_ids` and `topk_logprobs`."""
    z_loss_coef: float = 0.0
    """Factor by which the routers' z-loss is added to the loss. transformers has no z-loss, so the default is 0."""
    capacity: int | None = None
    """Maximum number of tokens that go through the backbone at a time. A larger row of several samples goes through in
    pieces, shared prefixes once; gradients take a second forward pass through all pieces but the first and the
    `kept_pieces`. None: rows of any size."""
    kept_pieces: int = 1
    """How many of a row's last pieces keep what their backward pass needs, so that they go forward once. With 1, the
    most memory is that of one path from the first token of a sample to its last; each further one adds a piece's."""

    def __post_init__(self) -> None:
        if self.capacity is not None:
            check_whole_number("capacity", self.capacity)
        check_whole_number("kept_pieces", self.kept_pieces, at_least=0)
        check_kind("slots", self.slots, SlotRule, "SlotRule(multiple=4)")
        check_kind("distillation", self.distillation, Distillation, "Distillation(weight=0.5)")
        check_choice("attention", self.attention, (AUTO, *BACKENDS))
        check_whole_number("head_chunk", self.head_chunk)
        check_choice("aux_loss", self.aux_loss, get_args(Balance))
        if not 0 <= self.z_loss_coef < inf:
            raise ConfigError(f"z_loss_coef is {self.z_loss_coef!r}; it is 0 or a positive number")


@final
@dataclass(frozen=True, kw_only=True)
class PackingState:
    """The state that an enabled model stores."""

    family: Family
    """The model's family."""
    config: StepConfig
    """The settings."""
    parallel: Parallel | None
    """The ranks that train together; None: each rank works by itself."""
    mechanisms: tuple[Mechanism, ...]
    """The mechanisms of the family."""
    has_head: bool
    """Whether the model has a language-model head, and so a loss over tokens."""
    loss_count: LossCount | None = None
    """Set by `loss_metrics(model)`, which replaces Trainer's `eval_loss`; None: it is not replaced."""
    memo: Memo = field(default_factory=Memo)
    """What the mechanisms remember of the model."""

    def parts_of(self, core: nn.Module) -> ModelParts:
        """Return the enabled model and its parts."""
        parallel = self.parallel
        vision = None if parallel is None or not parallel.same_calls else parallel.vision
        return ModelParts(family=self.family, core=core, vision=vision, memo=self.memo)

    @property
    def slots(self) -> SlotRule:
        """Return the padding rule for rows, adjusted so that the ranks that share a row can split it."""
        rule, ranks = self.config.slots, 1 if self.parallel is None else self.parallel.ranks
        return rule if ranks == 1 else replace(rule, row_multiple=lcm(rule.row_multiple, ranks))

    @property
    def rows_of_routers(self) -> Parallel | None:
        """The data ranks whose rows count together in routers' losses; None: each row by itself."""
        is_of_step = self.config.aux_loss == "step" and self.family.has("experts")
        return self.parallel if is_of_step and self.parallel is not None and self.parallel.data_ranks > 1 else None

    def in_pieces(self, core: nn.Module, row: PackedRow, run: RunPiece) -> RowInPieces | None:
        """Return the `RowInPieces` of a row that is larger than the capacity; None: it goes through whole.

        Args:
            core: the model.
            row: the row without gaps, on the model's device.
            run: runs the row of a piece, on the model's device, through the backbone.
        """
        capacity, tokens = self.config.capacity, (row.segments if row.tree is None else row.tree).num_tokens
        is_one = row.segments.num_samples == 1  # all of its pieces are kept until the backward pass: nothing is saved
        if capacity is None or tokens <= capacity or is_one or row.segments.total != row.segments.num_tokens:
            return None
        if (problem := self.problem_of_pieces(core)) is not None:
            if problem not in _logged:
                _logged.add(problem)
                _LOG.warning("a row of %d tokens goes through the model whole: %s", tokens, problem)
            return None
        device = row.input_ids.device
        cut = cut_group(row.to("cpu"), capacity, read_media=media_reader(self.family, core.config))
        learning = [p for p in core.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
        return RowInPieces(cut, run, learning=learning, kept_pieces=self.config.kept_pieces, device=device)

    def problem_of_pieces(self, model: nn.Module, *, under_one_loss: bool = True) -> str | None:
        """Return why a row cannot go through this model, or a wrapper around it, in pieces; None: it can."""
        if under_one_loss and any({x.__name__ for x in type(module).__mro__} & _SHARDED for module in model.modules()):
            return "FSDP frees its parameters behind each backward pass: use PackedStep.group, or groups that fit a row"
        if under_one_loss and DistributedDataParallel._get_active_ddp_module() is not None and _is_reentrant(model):
            return "reentrant checkpointing gives DDP several gradients of a parameter: set use_reentrant=False"
        if self.parallel is not None and self.parallel.ranks > 1:
            return f"{self.parallel.ranks} ranks share its rows: give each rank other rows, Parallel()"
        if self.parallel is not None and self.parallel.vision.host is not None:
            return (
                "balance_vision deals the images of all ranks in each pass, but ranks may have different numbers of "
                "pieces: turn it off"
            )
        if self.rows_of_routers is not None:
            return 'routers count the tokens of all ranks in each pass: set aux_loss="row" or "sample"'
        return None

    def check(self, core: Any, *, attached: bool) -> None:
        """Check the model again, because parts of it may have been replaced.

        Args:
            core: the model.
            attached: whether the mechanisms should have changed their modules already.

        Raises:
            ConfigError: packed rows would give wrong results.
        """
        check_unchanged(core, self.family, has_head=self.has_head)
        parts = self.parts_of(core)
        for mechanism in self.mechanisms:
            if (problem := mechanism.problem(parts, attached=attached)) is not None:
                raise ConfigError(problem)


_COPIES: WeakKeyDictionary[nn.Module, Copies] = WeakKeyDictionary()
"""The host arrays that the last pass of a model copied to its device."""
_SHARDED = {"FSDPModule", "FullyShardedDataParallel"}
_LOG, _logged = logging.getLogger(__name__), set[str]()


def _is_reentrant(core: nn.Module) -> bool:
    """Return whether gradient checkpointing of this kind is on."""
    calls = [getattr(x, "_gradient_checkpointing_func", None) for x in core.modules()]
    return any(getattr(call, "keywords", {}).get("use_reentrant") for call in calls)


def check_unchanged(core: Any, family: Family, *, has_head: bool) -> None:
    """Check that the model has no additions that packed rows would bypass, or that would treat a row as one sample.

    Raises:
        ConfigError: a language model has a custom loss; its class's forward was replaced for all models of the class,
            as Liger's function without `model=` does; a LoRA is activated at one position per row of `input_ids` (PEFT
            stores its configurations on the model that it wraps); or NEFTune adds noise to embeddings in training.
    """
    if has_head:
        _check_head_unchanged(core, family)
    for name, config in (getattr(core, "peft_config", None) or {}).items():
        if getattr(config, "alora_invocation_tokens", None):
            raise ConfigError(
                f"adapter {name!r} is activated by tokens (alora_invocation_tokens), which PEFT looks for once in "
                "a packed row, so that one sample alone would have it; train it on padded batches without packing"
            )
    embeddings = core.get_input_embeddings()
    if embeddings.training and getattr(embeddings, "neftune_noise_alpha", None) is not None:
        raise ConfigError(
            "neftune_noise_alpha scales noise by the width of the row, so a packed sample would get less of it than "
            "alone: leave it out, or train on padded batches without packing"
        )


def _check_head_unchanged(core: Any, family: Family) -> None:
    if getattr(core, "_loss_function", None) is not None:
        raise ConfigError(
            f"this {type(core).__name__} was given a loss_function of its own, which packed rows would not call: they "
            "take cross-entropy of the labeled positions. Compute yours from PackedStep's target_logprobs "
            "or row_logits, and `del model._loss_function`"
        )
    upstream = family.upstream_class(core)
    if upstream.forward.__module__ != upstream.__module__:
        raise ConfigError(
            f"the forward of the class {upstream.__name__} was replaced by that of {upstream.forward.__module__}, "
            f"which packed rows would bypass. {_WITHOUT_LIGERS_LOSS} Start a new process for it: the class stays "
            "replaced"
        )


_WITHOUT_LIGERS_LOSS = (
    "Liger: apply_liger_kernel_to_...(fused_linear_cross_entropy=False) keeps its other kernels, and the head of "
    "vlmpack computes labeled positions alone, in chunks."
)


def stored_state(core: nn.Module) -> PackingState | None:
    """Return the state of a model without checking its layers; None: packing is not enabled."""
    return getattr(core, "_vlmpack_state", None)


def packing_state(core: nn.Module) -> PackingState:
    """Return the state of an enabled model, after checking the model.

    Raises:
        ConfigError: packing is not enabled, or parts of the model were replaced after it was.
    """
    state = stored_state(core)
    if state is None:
        raise ConfigError(f"packing is not enabled on this {type(core).__name__}; call enable_packing(model) first")
    state.check(core, attached=True)
    return state


@final
class StepCall:
    """Carries a row into the forward of an enabled model, past any wrappers, and carries the full result back.

    It is not a dataclass, because FSDP's mixed precision would rebuild one.
    """

    def __init__(
        self,
        row: PackedRow | None = None,
        *,
        last_hidden: bool = False,
        scoring: Scoring | None = None,
        piece: PieceOfGroup | None = None,
        exchanged: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.row = row
        """The row, on the model's device; None: the batch or row is in the model's other inputs."""
        self.last_hidden = last_hidden
        """Whether the result should have `row_last_hidden`."""
        self.scoring = scoring
        """What to compute for each target. The scores are then also among the model's outputs; None: they are not."""
        self.piece = piece
        """The row's place in a group that goes through the model piece by piece; None: it is no piece."""
        self.exchanged = exchanged
        """The parameters of a pass that only exchanges gradients (`exchanged_once`); None: it is no such pass."""
        self.result: StepResult | None = None
        """The result; None: the model did not pack."""


@final
class RowPass:
    """A row on its way through the backbone (the model without its head), without the gaps between its samples.

    The backbone is called with `inputs`, by `call` or by a trainer, and `end` gets what it returned. A row that is
    larger than the capacity goes through in pieces: `inputs` are those of the first piece, and `end` runs the others.
    """

    @outside_graph
    def __init__(
        self,
        core: nn.Module,
        state: PackingState,
        row: PackedRow,
        options: Mapping[str, Any],
        *,
        recorded: bool = False,
        piece: PieceOfGroup | None = None,
        restarts: Segments | None = None,
        prepared: Callable[[dict[str, Any]], dict[str, Any]] = for_compiler,
    ) -> None:
        """Set up the row.

        Args:
            core: the model.
            state: its packing state.
            row: the row, on the model's device.
            options: further keyword arguments of the backbone.
            recorded: whether the router logits of all layers are needed.
            piece: the row's place in a group; None: it is no piece.
            restarts: boundaries at which rotary positions restart; None: the row's own. Such a row, and one of whose
                layers the hidden states are wanted, goes through whole.
            prepared: the last change of the inputs, before the backbone is called.
        """
        self.state = state
        """The model's packing state."""
        self._core, self._options, self._prepared = core, options, prepared
        self._restarts = None if restarts is None else restarts.without_gaps(state.slots)
        self._recorded, self._works = recorded, list[Work]()
        parts, backend = state.parts_of(core), state.config.attention
        self._setup_of = partial(setup_row, parts, parallel=state.parallel, backend=backend)
        check_targets(row)
        self.compact = without_gaps(row, state.slots)
        """The row without gaps."""
        self.setup = self._first = self._setup_of(self.compact.row, piece=piece)
        """Its setup."""
        self._pieces: RowInPieces | None = None
        if piece is None and restarts is None and not options.get("output_hidden_states"):
            self._pieces = state.in_pieces(core, self.compact.row, self._run_piece)
        if self._pieces is not None:
            self._first = self._setup_of(self._pieces.first_row, piece=self._pieces.first)
        self.inputs = self._inputs_of(self._first)
        """The backbone's keyword arguments for the row, or for its first piece."""

    def _inputs_of(self, setup: RowSetup) -> dict[str, Any]:
        return {**backbone_inputs(setup, self.state.mechanisms, rope_segments=self._restarts), **self._options}

    @around_graph
    def _run_piece(self, row: PackedRow, piece: PieceOfGroup) -> Outputs:
        setup = self._setup_of(row, piece=piece)
        _, outputs = self.call(inputs := self._inputs_of(setup))
        self._works.append(finish(setup, self.state.mechanisms, inputs[CONTEXT].entries))
        return outputs

    @around_graph
    def call(self, inputs: dict[str, Any]) -> tuple[Any, Outputs]:
        """Call the backbone with these inputs; return its output, and the hidden states and router logits in it.

        Raises:
            ConfigError: packing was disabled meanwhile, or the model returns no router logits.
        """
        core, family, collected = self._core, self.state.family, list[torch.Tensor]()

        def collect(text: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if kwargs.get(CONTEXT) is inputs[CONTEXT]:  # not a row of another thread
                collected.extend(output.router_logits)

        is_hooked = self._recorded and not family.returns_router_logits
        of_text = family.language_model(core).register_forward_hook(collect, with_kwargs=True) if is_hooked else None
        with of_text or nullcontext():
            output = family.backbone(core)(**self._prepared(inputs))
        if stored_state(core) is not self.state:
            raise ConfigError(
                "packing was disabled or enabled again, by another thread, while a row was in the model, which may "
                "have mixed its samples: do so between steps"
            )
        router_logits = collected if is_hooked else getattr(output, "router_logits", None)
        if self._recorded and router_logits is None:
            raise ConfigError(
                f"{type(core).__name__} of this transformers returns no router logits, which the routers' losses and "
                "counts are made of; upgrade transformers, or set the coefficients of these losses to 0"
            )
        return output, (output[0], *(router_logits or ()))  # a tuple if the configuration says return_dict=False

    @around_graph
    def end(self, outputs: Outputs) -> Outputs:
        """Return the hidden states and router logits of the whole row from those of a call with `inputs`."""
        self._works.append(finish(self._first, self.state.mechanisms, self.inputs[CONTEXT].entries))
        pieces, self._pieces = self._pieces, None  # they hold this object, which would then hold itself
        return outputs if pieces is None else pieces.rest(*outputs)

    @property
    def work(self) -> Work:
        """The work that was done."""
        return Work.total(self._works, self.compact.row.segments.num_tokens)

    def of_row(self, part_1tX: torch.Tensor) -> torch.Tensor:
        """Return [1, T, X] at the row's own indices from what the backbone computed."""
        return self.compact.spread(self.setup.part.gather(part_1tX[0])[None])


@around_graph
def run_row(
    core: nn.Module,
    state: PackingState,
    row: PackedRow,
    call: StepCall,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    rope_segments: Segments | None = None,
    logits: bool = False,
    last_hidden: bool = False,
    hidden_states: Any = False,
    balance: bool = False,
) -> StepResult:
    """Compute one row, without the gaps between its samples. Results refer to the row as it was given.

    Args:
        core: a `...ForConditionalGeneration` or `...ForCausalLM` with packing enabled.
        state: its packing state.
        row: the row, on the model's device.
        call: what the step wants beside the loss.
        num_items_in_batch: divisor of the loss sum; None: this row's targets.
        rope_segments: boundaries at which rotary positions restart; None: the row's own.
        logits: also compute logits at every position of the row, [1, T, V].
        last_hidden: also return the head's input, [1, T, D].
        hidden_states: also return hidden states, [1, T, D] per layer. True: of all layers; transformers' other values
            choose some.
        balance: also compute the routers' load-balancing loss, and add it to the loss if the row has targets.
    """
    config, piece, options, fields = state.config, call.piece, dict[str, Any](), dict[str, Any]()
    recorded = balance or config.z_loss_coef > 0
    if state.family.has("experts"):
        options |= {"output_router_logits": recorded, "return_dict": True}  # overrides the configuration
    if hidden_states:
        options |= {"output_hidden_states": hidden_states, "return_dict": True}
    with copies_reused(_COPIES.get(core)) as _COPIES[core]:
        passed = RowPass(core, state, row, options, recorded=recorded, piece=piece, restarts=rope_segments)
        output, outputs = passed.call(passed.inputs)
        hidden, *router_logits = passed.end(outputs)
    routers = None
    if recorded:
        settings = {"per": config.aux_loss, "with_balance": balance, "z_loss_coef": config.z_loss_coef}
        settings |= {"rows": state.rows_of_routers, "adds_up": num_items_in_batch is not None}
        hidden, routers = router_statistics(tuple(router_logits), hidden, passed.setup, **settings)
    if piece is not None and piece.own is not None:
        hidden = piece.own.root = piece.keep(LAST_HIDDEN, hidden, hidden[:, -1:])
    if last_hidden or call.last_hidden:
        fields["computed_last_hidden"] = hidden if row.tree is not None else passed.of_row(hidden)
    if hidden_states:
        of_layers = (None if x is None else passed.of_row(x) for x in output.hidden_states)
        fields["row_hidden_states"] = tuple(of_layers)
    fields |= {"routers": routers, "work": passed.work}
    return _result(passed, hidden, num_items_in_batch, logits=logits, scoring=call.scoring or Scoring(), **fields)


# ---------------------------------------------------------------------- inputs of the model without its head


@outside_graph
def setup_row(
    model: ModelParts,
    row: PackedRow,
    *,
    parallel: Parallel | None,
    backend: str,
    piece: PieceOfGroup | None = None,
) -> RowSetup:
    """Select this rank's part of a row and derive its metadata.

    Args:
        model: the model.
        row: the row, on the model's device.
        parallel: how ranks work together on the row; None: this rank computes all of it.
        backend: name of the attention back-end, or "auto".
        piece: see `run_row`.

    Raises:
        LayoutError: media or token ids do not match the row or the model; or ranks that should have the same row have
            others.
    """
    family, media, config = model.family, row.media, model.core.config
    if parallel is not None:
        fit_adapters(model.core)
        parallel.check_same_row(row)
        if piece is None and not parallel.same_calls and _trains_tower(model):
            has_images = media.pixel_values is not None or media.pixel_values_videos is not None
            parallel.check_same_towers("images", int(has_images), row.input_ids, family.model_type)
    family.check_floats(media)
    if family.audio is not None:
        family.audio.check_features(media, config)
    _check_vocabulary(row, family.text_config(config).vocab_size)
    part = part_of(row, parallel, family, piece)
    table = media_of_row(family, row, config)
    computed = part.computed_media(table)
    if not family.has_vision or family.has_grids:
        _check_pixels(model, media.pixel_values, computed.grids(IMAGE), "pixel_values")
        _check_pixels(model, media.pixel_values_videos, computed.grids(VIDEO), "pixel_values_videos")
    if (
        parallel is not None
        and piece is None  # ranks may have different numbers of pieces; they exchange gradients once, at the end
        and parallel.vision.host is None
        and family.audio is not None
        and family.audio.reads_padding
    ):
        calls = len(family.audio.groups(computed.audios, table, config))  # without audio, a blank one is computed
        parallel.check_same_towers("audio", max(calls, 1), row.input_ids, family.model_type)
    types = family.types_of_row(row, config)
    return RowSetup(model=model, row=row, media=table, part=part, types=types, backend=backend)


def _trains_tower(model: ModelParts) -> bool:
    path = model.family.vision_path
    return path is not None and any(weight.requires_grad for weight in model.core.get_submodule(path).parameters())


def part_of(row: PackedRow, parallel: Parallel | None, family: Family, piece: PieceOfGroup | None = None) -> RowPart:
    """Return the part of a row that goes through the model on this rank.

    Raises:
        LayoutError: the row cannot be split evenly across the ranks; its prefix tree does not match the row; or ranks
            share a row with a prefix tree, and layers other than attention would need whole paths.
    """
    if parallel is None or parallel.ranks == 1:
        return RowPart(row.segments, row, piece=piece)
    if row.tree is not None and family.mechanisms:
        raise LayoutError(
            f"{parallel.ranks} ranks share a row that has a prefix tree, and {family.model_type} has "
            f"{', '.join(family.mechanisms)} besides attention, which take whole samples: take the tree away with "
            "unshare(row), or give each rank other rows: Parallel()"
        )
    return RowOverRanks(row, parallel)


@outside_graph
def backbone_inputs(
    setup: RowSetup, mechanisms: Sequence[Mechanism], *, rope_segments: Segments | None
) -> dict[str, Any]:
    """Return the keyword arguments of the backbone (the model without its head).

    Args:
        setup: the row.
        mechanisms: the model's mechanisms.
        rope_segments: boundaries at which rotary positions restart; None: at the samples' starts.

    Raises:
        LayoutError: media, placeholders or positions do not match the row.
    """
    family, row, part = setup.model.family, setup.row, setup.part
    if rope_segments is not None and row.tree is not None:
        raise LayoutError(
            "rope_cu_seqlens restarts positions inside samples, which a row with a prefix tree does not support: take "
            "the tree away with unshare(row)"
        )
    positions = positions_of_row(row, setup.media, setup.types, family, setup.config, restarts=rope_segments)
    part.check_shared(positions, "rotary positions")
    entries = {mechanism.name: mechanism.prepare(setup) for mechanism in mechanisms}
    inputs: dict[str, Any] = {
        "input_ids": part.cut(row.input_ids),
        # transformers uses a 4D mask unchanged, so it never builds a T x T mask. Our attention function ignores it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device),
        "position_ids": part.cut(family.rotary_ids(positions)),
        # Overrides the configuration: a cache would be filled and thrown away.
        "use_cache": False,
        **({} if family.token_types is None else {family.token_types: part.cut(setup.types)}),
        **{name: part.cut(types) for name, types in family.expert_types_of(row.input_ids, setup.config).items()},
        CONTEXT: RowContext(segments=row.segments, part=part, entries=entries),
    }
    for mechanism in mechanisms:
        inputs |= mechanism.inputs(entries[mechanism.name])
    return inputs


def _check_pixels(model: ModelParts, pixels: torch.Tensor | None, grids: Sequence[Grid], name: str) -> None:
    """Check that there are as many patches as the grids describe, and that they have this model's patch shape."""
    shape = model.family.patch_shape(model.core.config) if model.family.has_vision else (0,)
    if pixels is not None:
        what = "[patches, values]" if len(shape) == 1 else "[patches, channels, rows, columns]"
        check_tensor(name, pixels, (None,) * (1 + len(shape)), what)
    expected, count = sum(map(prod, grids)), 0 if pixels is None else pixels.shape[0]
    if expected != count:
        raise LayoutError(
            f"the grids describe {expected} patches, {name} has {count}; pass the media of every sample, and what "
            "samples of a prefix tree share once"
        )
    if pixels is not None and pixels.shape[1:] != shape:
        raise LayoutError(
            f"a patch of {name} has {prod(pixels.shape[1:])} values, but {prod(shape)} in this "
            f"{model.family.model_type} model; use the processor that belongs to the model"
        )


def _check_vocabulary(row: PackedRow, size: int) -> None:
    """Refuse ids outside the vocabulary. PyTorch's own error would not say where they are.

    On an accelerator PyTorch's assertions catch them, without a sync.
    """
    for name, ids in (("input_ids", row.input_ids), ("a target of labels", row.shift_labels)):
        if ids is None or not on_host(ids):
            continue
        values = ids[0].numpy()
        odd = values.view(np.uint64) >= size  # negative ids are huge as unsigned integers
        if name != "input_ids":
            odd &= values != IGNORE
        if odd.any():
            at = int(odd.argmax())
            raise LayoutError(
                f"place {at} of the row: {name} is {values[at]}, but this model's ids go from 0 to {size - 1}"
                f"{'' if name == 'input_ids' else f' ({IGNORE}: not trained on)'}; use the tokenizer that belongs to "
                "the model"
            )


# ---------------------------------------------------------------------- positions
#
# Rotary positions given by the caller: where they restart, and their values. Both are checked, not trusted.
#
# Restarts (`rope_cu_seqlens`) are counted in real tokens, like `cu_seqlens_q`, or in positions of the packed row, like
# `cu_seqlens_q_padded`. In real tokens, the last boundary is the number of real tokens. In positions of the row, it is
# at or after the end of the last sample. The two differ only if the row has gaps between samples.
#
#     row       a a a .  b b b b b . . .     two samples, each padded to a multiple of 4
#     tokens    0        3     5       8     [0, 3, 5, 8]: at both samples, and before the third token of b
#     positions 0        4     6       9     [0, 4, 6, 9] or [0, 4, 6, 12]: the same restarts

ROPE = "rope_cu_seqlens"


@outside_graph
def rope_segments(boundaries: Any, segments: Segments) -> Segments | None:
    """Return the row split wherever rotary positions restart; None: only at the samples, as usual.

    Args:
        boundaries: the caller's `rope_cu_seqlens`: a 1D tensor of any length (on an accelerator: a host–device sync), a
            list or a tuple.
        segments: the row.

    Raises:
        LayoutError: invalid boundaries, boundaries of another row, or a sample whose positions would not restart.
    """
    places = _places(checked_boundaries(boundaries, ROPE), segments)
    for sample, (start, stop) in enumerate(segments.spans):
        if stop > start and start not in places:
            raise LayoutError(
                f"{ROPE} has no boundary where sample {sample} starts, at place {start} of the row, so its positions "
                "would run on from the sample before it; keep every boundary of cu_seqlens_q and add your own"
            )
    cut = _cut(segments, sorted(places))
    return None if cut.lengths == segments.lengths else cut


def _places(edges: tuple[int, ...], segments: Segments) -> frozenset[int]:
    """Return the positions in the row at which rotary positions restart."""
    if edges[-1] == segments.num_tokens:
        samples = [(token, bisect_right(segments.real, token) - 1) for token in edges if token < edges[-1]]
        return frozenset(segments.stride[sample] + token - segments.real[sample] for token, sample in samples)
    end = max((stop for start, stop in segments.spans if stop > start), default=0)
    if not end <= edges[-1] <= segments.total:
        raise LayoutError(
            f"{ROPE} ends at {edges[-1]}, but the row has {segments.num_tokens} real tokens and its last sample ends "
            f"at place {end} of {segments.total}; count in real tokens, as cu_seqlens_q does, or in places of the row"
        )
    return frozenset(edges)


def _cut(segments: Segments, places: list[int]) -> Segments:
    lengths, slots = [], []
    for (start, stop), slot in zip(segments.spans, segments.slots, strict=True):
        inner = places[bisect_right(places, start) : bisect_left(places, stop)]
        pieces = [b - a for a, b in pairwise([start, *inner, stop])]
        lengths += pieces
        slots += [*pieces[:-1], slot - sum(pieces[:-1])]
    return Segments(lengths=tuple(lengths), slots=tuple(slots), total=segments.total, num_samples=len(lengths))


@outside_graph
def positions_of_row(
    row: PackedRow,
    table: MediaTable,
    types: torch.Tensor,
    family: Family,
    config: Any,
    *,
    restarts: Segments | None = None,
) -> torch.Tensor:
    """Compute the rotary positions of a row, [4, 1, T]. The caller's own positions and token types must agree.

    Args:
        row: the row.
        table: the row's media.
        types: [1, T] token types derived from the token ids.
        family: the model's family.
        config: the model's configuration.
        restarts: the row split at the caller's `rope_cu_seqlens`; None: at the samples.

    Raises:
        LayoutError: types or positions do not match the row.
    """
    segments = row.segments
    if row.mm_token_type_ids is not None:
        check_column(
            row.mm_token_type_ids,
            types,
            "mm_token_type_ids",
            f"contradicts input_ids: it has to be {family.type_values}and 0 elsewhere; leave it out, it is made from "
            "input_ids",
            ignored=segments.padding_mask(types.device) if segments.has_padding else None,
        )
    if restarts is not None:
        check_restarts(restarts, segments, table)
    device = row.input_ids.device
    positions = family.positions(table, segments, config=config, restarts=restarts, device=device)
    if row.position_ids is not None:
        check_positions(row.position_ids, positions, family, segments, restarts=restarts)
    return positions


def check_column(
    given: Any, expected: torch.Tensor, name: str, fault: str, *, ignored: torch.Tensor | None = None
) -> None:
    """Compare a column of the caller with the one that follows from the others.

    Args:
        given: the caller's column.
        expected: the right one.
        name: name of the column.
        fault: the message if a value differs, without the name.
        ignored: bool, where values may differ; None: nowhere.

    Raises:
        LayoutError: another shape, or other values.
    """
    check_is_tensor(given, name)
    if given.shape != expected.shape:
        raise LayoutError(f"{name} is {list(given.shape)} but input_ids is {list(expected.shape)}; leave it out")
    differs = given != copied(expected, given.device)
    if ignored is not None:
        differs &= ~copied(ignored, given.device)
    require(~differs.any(), f"{name} {fault}", LayoutError)


@outside_graph
def check_restarts(rope: Segments, segments: Segments, table: MediaTable) -> None:
    """Refuse restarts inside a run of image or video tokens: the image or video would have no valid positions.

    Args:
        rope: the row split at restarts.
        segments: the row.
        table: the row's media.

    Raises:
        LayoutError: there is such a restart.
    """
    inner = {*rope.stride} - {*segments.stride}
    for medium in table.media:
        first = segments.stride[medium.sample]
        if any(first + start < at < first + stop for start, stop in medium.runs for at in inner):
            raise LayoutError(
                f"{ROPE} restarts positions inside {KINDS[medium.kind]} tokens of sample {medium.sample}; move the "
                "boundary before its first placeholder"
            )


@outside_graph
def check_positions(
    caller: torch.Tensor, positions: torch.Tensor, family: Family, segments: Segments, *, restarts: Segments | None
) -> None:
    """Check that the caller's positions are the ones each sample would have on its own. Padding is ignored.

    Args:
        caller: [3, 1, T] time, height, width, or [4, 1, T] with the position in the sample first. For a text family
            [1, T] or [1, 1, T].
        positions: the computed positions, [4, 1, T].
        family: the model's family.
        segments: the row.
        restarts: the row split at the caller's `rope_cu_seqlens`; None: at the samples.

    Raises:
        LayoutError: another shape, or other positions; on the host the message names the first difference.
    """
    caller_kT = copied(_rows(caller, family, segments.total), positions.device)
    text_1T = segments.position_in_segment(positions.device)[None]
    rotary_kT = family.rotary_ids(positions).reshape(-1, segments.total)
    expected_kT = rotary_kT if len(caller_kT) == len(rotary_kT) else torch.cat((text_1T, rotary_kT))
    agree_T = (caller_kT == expected_kT).all(0) | segments.padding_mask(positions.device)

    def where(place: int) -> str:
        seen, right = caller_kT[:, place].tolist(), expected_kT[:, place].tolist()
        return f"{segments.where(place)} has {seen}, where {right} is right"

    restart = "every sample" if restarts is None else f"every sample and boundary of {ROPE}"
    message = (
        f"position_ids are not what each sample has alone. They must restart at {restart} and place image tokens by "
        "their grids; leave position_ids out, they are computed"
    )
    require(agree_T, message, LayoutError, where=where)


def _rows(positions: torch.Tensor, family: Family, total: int) -> torch.Tensor:
    """Check the shape and return [1, T] for a text family, [3, T] or [4, T] for others."""
    check_is_tensor(positions, "position_ids")
    has_axes = family.positions_rule.axes == 3
    shapes = [(3, 1, total), (4, 1, total)] if has_axes else [(1, total), (1, 1, total)]
    if tuple(positions.shape) not in shapes:
        rows = " (time, height, width; or the text row first: with fewer rows images lose their places)"
        raise LayoutError(
            f"position_ids is {list(positions.shape)}, but {family.model_type} needs "
            f"{' or '.join(str(list(shape)) for shape in shapes)} for this row{rows if has_axes else ''}: "
            "leave position_ids out, they are computed from the boundaries and the grids"
        )
    return positions.reshape(-1, total)


# ---------------------------------------------------------------------- the result


@outside_graph
def finish(setup: RowSetup, mechanisms: Sequence[Mechanism], entries: Mapping[str, Any]) -> Work:
    """Check that every mechanism ran, and count what was computed."""
    part, family = setup.part, setup.model.family
    if family.has_vision and not family.has_grids:  # counted as pixels
        patches = family.tile_patches(setup.row.media, setup.config)
    else:
        patches = part.computed_media(setup.media).patches
    counts = {"attended_pairs": part.attended_pairs()}
    for mechanism in mechanisms:
        mechanism.check_ran(setup.model, entries[mechanism.name])
        counts |= mechanism.work(setup, entries[mechanism.name])
    return Work(
        real_tokens=setup.row.segments.num_tokens,
        physical_tokens=part.computed.total,
        vision_patches=patches,
        **counts,
    )


@outside_graph
def _result(
    passed: RowPass,
    hidden: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None,
    *,
    routers: RouterStatistics | None,
    logits: bool,
    scoring: Scoring,
    **fields: Any,
) -> StepResult:
    """Compute the result from hidden states [1, t, D]: run the head at labeled positions, then sum and count.

    `fields`: further fields of the result.
    """
    setup, config, given = passed.setup, passed.state.config, passed.compact.given
    row, part = setup.row, setup.part
    labels, index = targets_of(row, row.known_metadata.num_targets)
    family, teacher = setup.model.family, None
    if row.extras.keys() & {*TEACHER}:
        teacher = Teacher(row, index, vocab_size=family.text_config(setup.config).vocab_size)
        scoring = replace(scoring, rest=True)
    targets_of_part = part.targets(index, labels, distinct=teacher is None)  # teachers' entries may differ
    predictions, ids = targets_of_part.predictions, targets_of_part.ids
    candidates = None if teacher is None else teacher.ids(targets_of_part.index)
    core, predicting = setup.model.core, part.with_predecessor(hidden)
    head = family.head(core)
    settings = {"divided": True} if isinstance(vars(head).get("forward"), DividedHead) else {}

    def score(call: Head, hidden: torch.Tensor) -> list[torch.Tensor]:
        logits = family.to_logits(core, partial(call, **settings))
        chunked = {"chunk": config.head_chunk, "scoring": scoring, "candidates": candidates}
        return score_targets(hidden, predictions, ids, logits, **chunked)

    scores = in_one_call(head, score, predicting) if isinstance(head, FSDPModule) else score(head, predicting)
    logprobs, *others = (part.gather_targets(score, targets_of_part) for score in scores)
    topk, losses = None if teacher is None else others[0], -logprobs
    if teacher is not None and teacher.logprobs is not None:
        divergences = config.distillation.losses(others[0], teacher.logprobs, losses)
        losses = divergences.where(teacher.has_entries, losses)
    sums = target_sums(logprobs, row, index, losses_L=losses)
    loss_sum, targets = sums["loss_sum"], sums["num_targets"]
    items = divisor(num_items_in_batch, targets)
    # If no row of the whole training step has targets, the loss is 0, not 0 / 0. In evaluation, a batch without targets
    # has no mean: a 0 would count in HF Trainer's eval_loss, which skips NaN.
    counted = num_items_in_batch is not None and not torch.is_grad_enabled()
    loss = loss_sum / items if targets or counted else loss_sum
    if routers is not None and (targets if part.piece is None else part.piece.has_targets):
        loss = loss + routers.added.to(loss.device)
    sums |= {"segments": given.segments, "target_index": passed.compact.place(index)}
    return StepResult(
        **sums,
        loss=loss,
        target_entropies=others[-1] if scoring.entropy else None,
        topk_logprobs=topk,
        row_logits=passed.of_row(family.to_logits(core)(hidden)) if logits else None,
        routers=routers,
        tree=given.tree,
        **fields,
    )


def check_targets(row: PackedRow) -> None:
    """Raise a LayoutError if a (handmade) row has a target on padding."""
    if row.shift_labels is not None:
        message = "shift_labels has targets on padding, which belongs to no sample; set them to -100 there"
        check_none_on_padding(row.shift_labels, row.segments, message)


def targets_of(row: PackedRow, num_targets: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (shifted labels [1, T], all -100 if the row has none; positions of targets, int64 [L]).

    Raises:
        LayoutError: the row does not have `num_targets` targets.
    """
    labels = row.shift_labels
    if labels is None:
        labels, num_targets = torch.full_like(row.input_ids, IGNORE), 0
    return labels, target_positions(labels, num_targets)


def divisor(items: torch.Tensor | float | None, targets: int) -> torch.Tensor | float:
    """Return the divisor of the loss. A tensor on an accelerator is not compared with the targets: it would be a sync.

    Raises:
        ConfigError: not a number, or not positive although there are targets.
    """
    if items is None:
        return targets
    is_tensor = isinstance(items, torch.Tensor)
    is_bool = items.dtype == torch.bool if is_tensor else isinstance(items, bool)
    if not isinstance(items, torch.Tensor | int | float) or is_bool or (is_tensor and items.numel() != 1):
        raise ConfigError(f"num_items_in_batch is a number, of the targets of all batches of a step; got {items!r:.80}")
    on_host = not isinstance(items, torch.Tensor) or items.device.type == "cpu"
    if on_host and targets and not items > 0:
        raise ConfigError(f"num_items_in_batch is {items}, but this batch alone has {targets} targets; count them all")
    return items
