"""The model step for a Hugging Face model with packing enabled: of a row (`PackedStep`), or of a group of samples.

A group that is larger than a row goes through the model piece by piece, every token once (`PackedStep.group`):

    forward     P            keys, values and states of P are kept; its graph stays
                A B          attend to what is kept
    backward    A B          gradients of what is kept are added up
                C D          the next piece: forward, then backward
    backward    P            with the sums: one backward pass for all of its branches

Each piece has its own loss, and the group's is their sum: cross-entropies over a known divisor (`num_items_in_batch`),
or any function of a piece's log-probabilities. A loss that needs those of all samples (DPO): `StepConfig.capacity`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from vlmpack.context_parallel.mesh import Parallel
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families.media import media_reader
from vlmpack.families.registry import family_named, family_of
from vlmpack.layout.batch import METADATA_KEY, TEACHER, PaddedBatch, check_is_batch
from vlmpack.layout.device import copied, to_device
from vlmpack.layout.pieces import CutGroup, cut_group
from vlmpack.layout.row import IGNORE, PackedRow
from vlmpack.model.enable import enable_packing
from vlmpack.model.engine import StepCall, StepConfig, packing_state, stored_state
from vlmpack.model.exchange import exchanged_once
from vlmpack.model.forward import STEP
from vlmpack.model.head import Scoring
from vlmpack.model.mechanisms.experts import RouterStatistics, has_balance, wants_balance
from vlmpack.model.pieces import KeptPrefix, PieceOfGroup, walk
from vlmpack.model.plain import find_model
from vlmpack.model.result import OF_TARGETS, StepResult, Work


@final
class PackedStep:
    """Run one batch or row through a model and return a `StepResult`.

    The step calls the module that you passed, so wrappers around the model (PEFT, DDP, `torch.compile`) stay in effect.

        step = PackedStep(model)
        result = step(batch, num_items_in_batch=targets_of_all_micro_batches)
        result.loss.backward()
    """

    def __init__(self, model: nn.Module, config: StepConfig | None = None, *, parallel: Parallel | None = None) -> None:
        """Enable packing on `model` (or on the model inside it). If it is enabled already, omitted settings stay.

        Raises:
            FamilyError: the model's family cannot be packed exactly.
            ConfigError: PEFT puts learned embeddings in place of token ids.
        """
        self.model, core = model, find_model(model)
        peft_configs = [getattr(module, "active_peft_config", None) for module in model.modules()]
        if any(getattr(config, "is_prompt_learning", False) for config in peft_configs):
            raise ConfigError(
                "PEFT's prompt tuning gives the model embeddings and no token ids, so nothing can be packed: use LoRA, "
                "or call the model itself with padded batches"
            )
        state = stored_state(core)
        if state is None:
            enable_packing(core, config, parallel=parallel)
        elif config is not None or parallel is not None:
            enable_packing(core, config or state.config, parallel=parallel or state.parallel)

    def __call__(
        self,
        batch: PaddedBatch | PackedRow | Mapping[str, Any],
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits: bool = False,
        last_hidden: bool = False,
        temperature: float = 1.0,
        entropy: bool = False,
        **inputs: Any,
    ) -> StepResult:
        """Run one batch or row.

        Args:
            batch: a padded batch, a packed row, or either as a dictionary, on any device.
            num_items_in_batch: number of targets in all batches of one optimizer step; None: in this batch.
            logits: also return logits.
            last_hidden: also return the head's input.
            temperature: sampling temperature; divides the logits in log-probabilities, losses and entropies.
            entropy: also return the entropy of each target's prediction.
            **inputs: further inputs by name, e.g. `rope_cu_seqlens`; they override the batch's.

        Raises:
            LayoutError: the batch contradicts itself, or holds columns of unbatched samples.
            ConfigError: the batch is neither a padded batch with its 2D mask nor a packed row; it names an adapter for
                each sample; or the temperature is not a positive number.
        """
        call = StepCall(last_hidden=last_hidden, scoring=Scoring(temperature=temperature, entropy=entropy))
        device = next(self.model.parameters()).device
        if isinstance(batch, PackedRow) and inputs.keys() <= _BESIDE_A_ROW:
            call.row, columns = batch.to(device, non_blocking=True), inputs
        else:
            family = family_named(find_model(self.model).config.model_type)
            columns = {**_inputs_of(batch, {*family.token_columns, *TEACHER}), **inputs}
            if columns.get("inputs_embeds") is None:
                check_is_batch(columns)
        columns = {
            name: copied(value, device) if isinstance(value, torch.Tensor) and name not in _ON_HOST else value
            for name, value in columns.items()
        }
        if columns.get("adapter_names") is not None:
            raise ConfigError(
                "adapter_names has an adapter for each entry of a batch, and the samples of a row are one entry: pack "
                "samples of one adapter into a row, and choose it with model.set_adapter(name)"
            )
        logits = bool(columns.pop("output_logits", False)) or logits  # a batch may request them too
        output = self.model(**columns, num_items_in_batch=num_items_in_batch, output_logits=logits, **{STEP: call})
        if call.result is None:
            raise ConfigError(
                f"this batch cannot be packed: give a 2D attention_mask or {METADATA_KEY!r} metadata or cu_seqlens_q; "
                f"it has {sorted(columns)}"
            )
        return call.result.with_hooks(output)

    def group(
        self,
        row: PackedRow,
        *,
        capacity: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        output_router_logits: bool | None = None,
    ) -> GroupStep:
        """Run a group of samples of any size in pieces, and compute no shared prefix twice.

            for piece in step.group(row, capacity=4096):
                piece.backward()            # or of your own loss: piece.backward(loss(piece.result))

        DDP and FSDP2 exchange gradients once, behind the last piece, so ranks may have different numbers of pieces.
        With FSDP2 all ranks call `group` for each step, and keep parameters and gradients whole while they iterate.

        Args:
            row: a row of any size on the host, with its prefix tree.
            capacity: maximum number of tokens that go through the model at a time. A shared prefix stays in memory,
                with what its backward pass needs, until all samples behind it are done.
            num_items_in_batch: number of targets in all batches of one optimizer step; None: in this group.
            temperature: as in a call of the step.
            entropy: as in a call of the step.
            output_router_logits: whether to compute the routers' load-balancing loss; None: as the model's
                configuration says.

        Raises:
            ConfigError: the model has layers that cannot start from a kept prefix, the routers' loss is that of a whole
                row, ranks share rows, or FSDP shards the model in a way that does not fit.
            LayoutError: the row is on a device, has no targets, or a medium that is longer than `capacity`.
        """
        core = find_model(self.model)
        cut = cut_group(row, capacity, read_media=media_reader(family_of(core), core.config))
        if row.shift_labels is None:
            raise LayoutError(
                "the row has no shift_labels, so a group has no targets: mark them, or call the step itself"
            )
        return GroupStep(
            self.model,
            cut,
            scoring=Scoring(temperature=temperature, entropy=entropy),
            output_router_logits=output_router_logits,
            num_items_in_batch=num_items_in_batch,
        )


def _inputs_of(batch: PaddedBatch | PackedRow | Mapping[str, Any], needed: Collection[str]) -> dict[str, Any]:
    """Return the model's keyword arguments. Extras are for the caller, so only the `needed` ones are passed on."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if not isinstance(batch, PaddedBatch | PackedRow):
        raise ConfigError(f"a {type(batch).__name__} is no batch; collate first: step(collator.collate(samples))")
    batch = replace(batch, extras={name: x for name, x in batch.extras.items() if name in needed})
    return batch.step_inputs() if isinstance(batch, PackedRow) else batch.to_hf()


_BESIDE_A_ROW = {"rope_cu_seqlens", "output_router_logits", "output_hidden_states", "output_logits"}
"""Inputs that do not change a row. With others, it is rebuilt from its columns."""

_ON_HOST = ("cu_seqlens_q", "cu_seqlens_q_padded", "rope_cu_seqlens")
"""Boundaries, which are read on the host and so do not travel to the model's device."""


# ---------------------------------------------------------------------- a group


@final
class Piece:
    """One piece of a group, after its forward pass."""

    def __init__(self, row: PackedRow, samples: list[int], result: StepResult, kept: KeptPrefix | None) -> None:
        self.row = row
        """The piece's row, on the host: its samples from their first token on. Targets are those of this piece."""
        self.samples = samples
        """The samples of the group that are in the row."""
        self.result = result
        """The result. `result.logprobs` are [b, S] for b samples in the piece and S tokens of the group's longest
        sample, and 0 where another piece computes the target. Of [B, S] weights, `weights[piece.samples]` are theirs.
        """
        self.is_done = False
        """Whether `backward` was called."""
        self._kept, self._loss = kept, result.loss

    def backward(self, loss: torch.Tensor | None = None) -> None:
        """Compute gradients; those of a shared prefix follow when all samples behind it are done.

        Args:
            loss: scalar, a function of `result` alone; None: `result.loss`.

        Raises:
            ConfigError: it was called before.
        """
        if self.is_done:
            raise ConfigError("backward() of this piece was called before: add up its losses, and call it once")
        self.is_done, self._loss = True, self.result.loss if loss is None else loss
        if self._kept is None and self._loss.requires_grad:
            self._loss.backward()

    def finish(self) -> None:
        """Compute the gradients of a shared prefix, behind which all samples are done."""
        root = None if self._kept is None else self._kept.root
        if root is not None and root.requires_grad:
            # zeros: the backward pass goes through all layers, even if no target is in the prefix
            losses = [self._loss] if self._loss.requires_grad else []
            torch.autograd.backward([*losses, root], [*(torch.ones_like(x) for x in losses), torch.zeros_like(root)])


@final
class GroupStep:
    """The pieces of a group, in order. Iterating runs each of them forward.

    Every piece needs its `backward` before the next one; without gradients (`torch.no_grad()`) it is not called.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: CutGroup,
        *,
        scoring: Scoring,
        output_router_logits: bool | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> None:
        self._model, self._scoring, self._wants_routers = model, scoring, output_router_logits
        self.cut = cut
        """The pieces and their rows."""
        labels = cut.group.shift_labels
        self.num_targets = 0 if labels is None else int((labels != IGNORE).sum())
        """Number of targets of all samples."""
        self._items = self.num_targets if num_items_in_batch is None else num_items_in_batch
        self._results: list[StepResult] = []
        self._check()

    def __len__(self) -> int:
        return len(self.cut.pieces)

    def __iter__(self) -> Iterator[Piece]:
        """Run the pieces.

        Raises:
            ConfigError: the last piece had no backward pass; or the model has changed, and cannot compute groups.
        """
        self._check()
        self._results, is_training = [], torch.is_grad_enabled()
        with exchanged_once(self._model, lambda parameters: self._model(**{STEP: StepCall(exchanged=parameters)}).loss):
            for number, row, place in walk(self.cut, range(len(self))):
                result = replace(self._run(row, place), width=max(self.cut.tree.segments.lengths))
                piece = Piece(row, [*self.cut.pieces[number].samples], result, place.own)
                self._results.append(_detached(result))
                yield piece
                if is_training and not piece.is_done:
                    raise ConfigError(
                        f"piece {number} of the group had no backward pass: call piece.backward(loss) before the next "
                        "piece, or iterate under torch.no_grad()"
                    )
                if is_training and place.own is not None:
                    place.own.close = piece.finish

    def _run(self, row: PackedRow, place: PieceOfGroup) -> StepResult:
        row = row.to(next(self._model.parameters()).device, non_blocking=True)
        call = StepCall(row, scoring=self._scoring, piece=place)
        flags = {} if self._wants_routers is None else {"output_router_logits": self._wants_routers}
        output = self._model(num_items_in_batch=self._items, output_logits=False, **flags, **{STEP: call})
        assert call.result is not None
        return call.result.with_hooks(output)

    def _check(self) -> None:
        """Check that the model can compute groups in pieces.

        Raises:
            ConfigError: it cannot. Names the mechanism and the remedy.
        """
        model, core = self._model, find_model(self._model)
        state = packing_state(core)
        problem = state.problem_of_pieces(model, under_one_loss=False)
        if any(isinstance(module, DistributedDataParallel) and module.static_graph for module in model.modules()):
            problem = "static_graph=True makes DDP exchange gradients in every pass: leave static_graph out"
        names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
        around = any(isinstance(module, FSDPModule) and core in module.modules() for module in model.modules())
        if "FullyShardedDataParallel" in names or ("FSDPModule" in names and not around):
            problem = (
                "one pass has to exchange all gradients, which only FSDP2 around the whole model does: "
                "fully_shard(model), after its layers"
            )
        is_balanced = state.config.aux_loss != "sample" and state.family.has("experts") and has_balance(state.family)
        if is_balanced and wants_balance(state.parts_of(core), self._wants_routers):
            problem = (
                "the routers' load-balancing loss of a whole row needs the experts of every token before the first "
                'backward pass: set StepConfig(aux_loss="sample"), or leave output_router_logits out'
            )
        if problem is not None:
            raise ConfigError(f"this {type(core).__name__} cannot compute a group in pieces: {problem}")

    def backward(self, loss: Callable[[Piece], torch.Tensor] | None = None) -> StepResult:
        """Run all pieces, forward and backward, and return the group's result.

        Args:
            loss: returns the loss of a piece; the group's is their sum. None: `piece.result.loss`.
        """
        for piece in self:
            piece.backward(None if loss is None else loss(piece))
        return self.result

    def forward(self) -> StepResult:
        """Run all pieces without gradients, and return the group's result."""
        with torch.no_grad():
            for _ in self:
                pass
        return self.result

    @property
    def result(self) -> StepResult:
        """The result of all pieces in the coordinates of the group's row, detached. `loss` is the sum over pieces.

        Raises:
            ConfigError: not all pieces have run.
        """
        if len(self._results) != len(self):
            raise ConfigError(
                f"{len(self._results)} of {len(self)} pieces have run; iterate over the whole group first"
            )
        results = self._results
        segments, device = self.cut.tree.segments, results[0].loss.device
        samples = torch.cat([torch.tensor(piece.samples, device=device) for piece in self.cut.pieces])
        places = [
            to_device(self.cut.index(piece), device).index_select(0, result.target_index)
            for piece, result in zip(self.cut.pieces, results, strict=True)
        ]
        index, order = torch.cat(places).sort()
        found: dict[str, Any] = {}
        for name in OF_TARGETS:
            values = [x for each in results if (x := getattr(each, name)) is not None]
            found[name] = torch.cat(values).index_select(0, order) if values else None
        for name in ("sample_loss_sums", "sample_targets"):
            values = torch.cat([getattr(each, name) for each in results])
            found[name] = values.new_zeros(segments.num_samples).index_add(0, samples, values)
        for name in ("loss", "loss_sum"):
            found[name] = torch.stack([getattr(each, name) for each in results]).sum()
        return StepResult(
            **found,
            num_targets=self.num_targets,
            target_index=index,
            segments=segments,
            work=Work.total([result.work for result in results], segments.num_tokens),
            routers=_routers([result.routers for result in results if result.routers is not None]),
        )


def _routers(pieces: list[RouterStatistics]) -> RouterStatistics | None:
    """Add up the routers' statistics of pieces."""
    if not pieces:
        return None
    aux_losses = [each.aux_loss for each in pieces if each.aux_loss is not None]
    return RouterStatistics(
        logits=(),
        top_k=pieces[0].top_k,
        aux_loss=torch.stack(aux_losses).sum() if aux_losses else None,
        z_loss=torch.stack([each.z_loss for each in pieces]).sum(),
        added=torch.stack([each.added for each in pieces]).sum(),
        counts=torch.stack([each.expert_counts for each in pieces]).sum(0),
    )


def _detached(result: StepResult) -> StepResult:
    names = ("loss", "loss_sum", *OF_TARGETS)
    detached = {name: None if (x := getattr(result, name)) is None else x.detach() for name in names}
    return replace(
        result, **detached, routers=None if result.routers is None else _routers([result.routers.detached()])
    )
