"""PackedStep: the model step for people with their own training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.layout import METADATA_KEY, PackedRow, PaddedBatch
from vlmpack.parallel import Parallel
from vlmpack.step.attach import enable_packing, remembered
from vlmpack.step.engine import StepConfig
from vlmpack.step.forward import Sink
from vlmpack.step.keys import SINK
from vlmpack.step.models import find_model
from vlmpack.step.result import StepResult


@final
class PackedStep:
    """A callable that runs one batch or row through a model and returns a `StepResult`.

    It calls the module that it was given, so wrappers around the model (PEFT, DDP, `torch.compile`) do their part.

        step = PackedStep(model)
        result = step(batch, num_items_in_batch=targets_of_all_micro_batches)
        result.loss.backward()
    """

    def __init__(self, model: nn.Module, config: StepConfig | None = None, *, parallel: Parallel | None = None) -> None:
        """Enable packing on `model` (or the model that it holds). On an enabled one, what is not given stays.

        Raises:
            FamilyError: the model's family cannot be packed exactly.
        """
        self.model, core = model, find_model(model)
        state = remembered(core)
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
        **inputs: Any,
    ) -> StepResult:
        """Run one batch or row.

        Args:
            batch: a padded batch, a packed row, or the dictionary of either, on any device.
            num_items_in_batch: targets of all batches that make up one optimiser step; None: this one's own.
            logits: also return logits.
            **inputs: further inputs by name, such as `rope_cu_seqlens`; they win over the batch's.

        Raises:
            LayoutError: the batch contradicts itself.
            ConfigError: the batch is neither a padded batch with its 2D mask nor a packed row.
        """
        given = _inputs_of(batch)
        device = next(self.model.parameters()).device
        given = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) and _travels(name) else value
            for name, value in {**given, **inputs}.items()
        }
        logits = bool(given.pop("output_logits", False)) or logits  # as a batch asks a model for them
        sink = Sink()
        output = self.model(**given, num_items_in_batch=num_items_in_batch, output_logits=logits, **{SINK: sink})
        if sink.result is None:
            raise ConfigError(
                f"this batch cannot be packed: give a 2D attention_mask or {METADATA_KEY!r} metadata or cu_seqlens_q; "
                f"it has {sorted(given)}"
            )
        # The loss as the wrappers handed it back: their hooks for the backward pass hang on it.
        return sink.result if output.loss is None else replace(sink.result, loss=output.loss)


def _inputs_of(batch: PaddedBatch | PackedRow | Mapping[str, Any]) -> dict[str, Any]:
    """What the model takes: extras are the caller's."""
    if isinstance(batch, PackedRow):
        return replace(batch, extras={}).step_inputs()
    if not isinstance(batch, PaddedBatch | Mapping):
        raise ConfigError(f"a {type(batch).__name__} is no batch; collate first: step(collator.collate(samples))")
    return replace(batch, extras={}).to_hf() if isinstance(batch, PaddedBatch) else dict(batch)


def _travels(name: str) -> bool:
    """Boundaries are read on the host, and stay there."""
    return name not in ("cu_seqlens_q", "cu_seqlens_q_padded", "rope_cu_seqlens")
