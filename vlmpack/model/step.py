"""The model step for a Hugging Face model with packing enabled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from vlmpack.context_parallel.mesh import Parallel
from vlmpack.errors import ConfigError
from vlmpack.families.media import media_reader
from vlmpack.families.registry import family_named, family_of
from vlmpack.layout.batch import METADATA_KEY, TEACHER, PaddedBatch, check_is_batch
from vlmpack.layout.device import copied
from vlmpack.layout.pieces import cut_group
from vlmpack.layout.row import PackedRow
from vlmpack.model.enable import enable_packing
from vlmpack.model.engine import StepCall, StepConfig, stored_state
from vlmpack.model.forward import STEP
from vlmpack.model.groups import GroupStep
from vlmpack.model.head import Scoring
from vlmpack.model.plain import find_model
from vlmpack.model.result import StepResult


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
            LayoutError: the row is on a device, or has a medium that is longer than `capacity`.
        """
        core = find_model(self.model)
        cut = cut_group(row, capacity, read_media=media_reader(family_of(core), core.config))
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
