"""The loss of every sample of an evaluation set, computed in planned rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from vlmpack.errors import ConfigError
from vlmpack.layout import METADATA_KEY
from vlmpack.model import PackedStep, StepResult, Work, disable_packing, is_packing
from vlmpack.plan import Plan, Refused
from vlmpack.trainer.held_out import Collator, HeldOutLoader, MapStyle, hold_out
from vlmpack.trainer.metrics import losses_of_set


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a model makes of N samples, in the order of their data set. Every rank has the same."""

    sample_ids: np.ndarray
    """int64 [N]: the place of each sample in the data set, rising; refused samples have no entry."""
    sample_losses: np.ndarray
    """float64 [N]: mean cross-entropy (nats) of each sample's targets; 0 for a sample without any."""
    sample_targets: np.ndarray
    """int64 [N]: targets of each sample."""
    refused: tuple[Refused, ...]
    """Samples that could not be used, by their places."""
    rows: int
    """Rows that were computed."""
    work: Work
    """What was computed for them, all ranks together."""

    @property
    def metrics(self) -> dict[str, float]:
        """`loss_metrics` of the whole set, and how many samples were refused."""
        return {**losses_of_set(self.sample_losses, self.sample_targets), "num_refused": float(len(self.refused))}

    @property
    def num_targets(self) -> int:
        """Targets of the whole set."""
        return int(self.sample_targets.sum())

    @property
    def token_loss(self) -> float:
        """Cross-entropy (nats) of all targets / number of targets."""
        return self.metrics["token_loss"]

    @property
    def sample_loss(self) -> float:
        """Mean over samples of each one's own mean; samples without targets are left out."""
        return self.metrics["sample_loss"]

    @property
    def perplexity(self) -> float:
        """exp(`token_loss`)."""
        return self.metrics["perplexity"]

    def __repr__(self) -> str:
        return (
            f"Evaluation({len(self.sample_ids)} samples in {self.rows} rows, {len(self.refused)} refused, token_loss "
            f"{self.token_loss:.4f}, sample_loss {self.sample_loss:.4f}, perplexity {self.perplexity:.4g})"
        )


def evaluate(
    model: nn.Module,
    dataset: MapStyle,
    collator: Collator,
    *,
    capacity: int | None = None,
    plan: Plan | None = None,
    workers: int = 0,
) -> Evaluation:
    """The loss of every sample, equal to that of the sample alone in the unmodified model.

    Samples share rows, whole; one that exceeds a row has its own. Meanwhile the model is in evaluation mode, with
    packing enabled; afterwards each of its modules is in the mode that it was in. Under torch.distributed each rank
    computes its share of the rows, and all get the whole result.

    Args:
        model: a Hugging Face model, or a wrapper around it (PEFT, DDP, FSDP2), on its device.
        dataset: samples by number, the same on all ranks.
        collator: a `VLMCollator`, of either layout; anything else that makes batches with host metadata needs a plan.
        capacity: tokens of a row; lengths are then measured by `VLMCollator.measure`, from image headers.
        plan: the rows, planned from the lengths of the whole data set.
        workers: processes that load data.

    Raises:
        ConfigError: neither capacity nor plan, or both; a plan of another data set; a collator that cannot measure, or
            leaves samples out and does not say which.
        SampleError: a sample cannot be used, and the collator is told to raise.
    """
    held_out = hold_out(dataset, collator, plan=plan, capacity=capacity, workers=workers)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)
    loader = HeldOutLoader(dataset, collator, held_out, held_out.share(rank, ranks), num_workers=workers)
    account = Account(loader)
    with evaluating(model) as step:
        for batch in loader:
            account.add(batch, step(batch))
    return account.total()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[PackedStep]:
    """A step of the model in evaluation mode without gradients; afterwards the model is as it was.

    Not in inference mode: parameters that FSDP2 gathers in it are refused by autograd in the next training step.
    """
    modes = [(module, module.training) for module in model.modules()]
    was_packing = is_packing(model)
    try:
        step = PackedStep(model)
        model.eval()
        with torch.no_grad():
            yield step
    finally:
        for module, mode in modes:
            module.training = mode
        if not was_packing:
            disable_packing(model)


@final
class Account:
    """What one rank has computed of its rows, in their order."""

    def __init__(self, loader: HeldOutLoader) -> None:
        self._loader = loader
        self._rows = iter(loader.share.rows[: loader.share.counted])
        self._places: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._refused: list[Refused] = []
        self._work: Counter[str] = Counter()

    def add(self, batch: Any, result: StepResult) -> None:
        """Note the losses of the next row. Rows that another rank counts are forgotten.

        Raises:
            ConfigError: samples were left out, and nobody says which.
        """
        row = next(self._rows, None)
        if row is None:
            return
        present = self._present(row, batch[METADATA_KEY].sample_ids if METADATA_KEY in batch else (), result)
        self._places += present
        self._refused += [_left_out(place) for place in row if place not in present]
        self._work.update(asdict(result.work))
        if present:
            self._losses.append(result.sample_losses)
            self._targets.append(result.sample_targets)

    def _present(self, row: Sequence[int], named: Sequence[Any], result: StepResult) -> list[int]:
        """Which samples of the row are in the result, in its order."""
        if self._loader.names_samples or named:
            return list(named)
        if len(result.sample_targets) != len(row):
            raise ConfigError(
                f"of samples {list(row)} there are only {len(result.sample_targets)} in the batch, and it does not say "
                "which; let the collator name them in HostMetadata.sample_ids, as VLMCollator does"
            )
        return list(row)

    def total(self) -> Evaluation:
        """What all ranks have computed; all of them have to ask.

        Raises:
            ConfigError: rows of this rank were not taken down.
        """
        if row := next(self._rows, None):
            raise ConfigError(
                f"the row of samples {list(row)} was never taken down: prediction_step was replaced by one that does "
                "not ask PackedTrainer's; put PackedTrainer first among the bases, or set eval_packing=False"
            )
        held_out = self._loader.held_out
        mine = (self._places, _floats(self._losses), _floats(self._targets), self._refused, self._work)
        places, losses, targets, refused, work = zip(*_gathered(mine), strict=True)
        order = np.argsort(sample_ids := np.concatenate(places).astype(np.int64))
        return Evaluation(
            sample_ids=sample_ids[order],
            sample_losses=np.concatenate(losses)[order],
            sample_targets=np.concatenate(targets)[order].astype(np.int64),
            refused=tuple(sorted(chain(held_out.refused, *refused), key=lambda one: one.index)),
            rows=len(held_out.rows),
            work=Work(**{kind.name: sum(one[kind.name] for one in work) for kind in fields(Work)}),
        )


@final
class BatchAccount:
    """The losses of every sample of an evaluation in batches as accelerate deals them, each sample counted once.

    On several ranks accelerate fills the last batches with the first samples, and cuts what is gathered by the number
    of samples that are left. Losses of samples can be cut so; the mean of a batch cannot.
    """

    def __init__(self, accelerator: Any, batch_size: int) -> None:
        self._gather, self._ranks, self._size = accelerator.gather_for_metrics, accelerator.num_processes, batch_size
        self._losses: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self.is_complete = True
        """Whether every batch was packed, so that the losses of its samples are known."""

    def check_length(self, dataset: Any) -> None:
        """Refuse a data set of which accelerate cannot tell how many samples are left for the last batch.

        Raises:
            ConfigError: several ranks evaluate an iterable data set.
        """
        if self._ranks > 1 and isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"over {self._ranks} ranks accelerate fills up the last batch of an IterableDataset with samples that "
                "were evaluated before, and does not say how many: give the evaluation set a length"
            )

    def add(self, result: StepResult | None) -> None:
        """Store the losses of the next batch; all ranks have to call it.

        Raises:
            ConfigError: on several ranks: the batch was not packed, or has other samples than were dealt out.
        """
        if result is None:
            self.is_complete = False
        if self._ranks > 1 and (result is None or len(result.sample_targets) != self._size):
            seen = "is not packed" if result is None else f"has {len(result.sample_targets)} samples, not {self._size}"
            raise ConfigError(
                f"a batch of the evaluation {seen}, so on {self._ranks} ranks it is not known which samples count "
                "twice (packed rows, samples that the collator skips): evaluate in planned rows, with eval_capacity="
            )
        if result is not None:
            losses, targets = result.sample_loss_sums, result.sample_targets
            losses, targets = self._gather((losses, targets)) if self._ranks > 1 else (losses, targets)
            self._losses.append(losses)
            self._targets.append(targets)

    def token_loss(self) -> float | None:
        """Cross-entropy (nats) of all targets / their number; None: some batch was not packed, or there is none."""
        sums, targets = _floats(self._losses).sum(), _floats(self._targets).sum()
        return float(sums / targets) if self.is_complete and targets else None


def _left_out(place: int) -> Refused:
    detail = "the collator left it out of its row; its log of skipped samples says why"
    return Refused(index=place, sample_id=None, reason="left_out", detail=detail)


def _floats(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """float64 [n] of the tensors, one after the other; waits for the device here and not before."""
    return torch.cat(list(tensors)).double().numpy(force=True) if tensors else np.zeros(0)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gathered(mine: Any) -> list[Any]:
    """What every rank gives, rank after rank."""
    if not _is_distributed():
        return [mine]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody
