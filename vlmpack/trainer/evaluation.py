"""Evaluate a data set in planned rows: the loss of every sample, each counted once on any number of ranks.

    rows    [4 1] [0 5] [2] [3]      indices in the data set, row by row
    rank 0  [4 1] [2]                two ranks
    rank 1  [0 5] [3]

If the rows do not divide evenly, some ranks compute a row again and drop its losses. Sharded models communicate in
every forward pass, so all ranks must compute the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction

from vlmpack.collate.collator import VLMCollator
from vlmpack.context_parallel.mesh import gathered
from vlmpack.data.formats import sample_id_of
from vlmpack.data.readers import MapStyle, check_samples
from vlmpack.errors import ConfigError, SampleError, skipped_are_reported
from vlmpack.layout.batch import METADATA_KEY
from vlmpack.lengths import check_refused, measure_lengths
from vlmpack.model.enable import bind_loss_metrics, disable_packing, is_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.loss_count import LossCount
from vlmpack.model.plain import find_model
from vlmpack.model.result import StepResult, Work
from vlmpack.model.step import PackedStep
from vlmpack.plan.balance import EMPTY, balance_rows
from vlmpack.plan.lengths import OVERLENGTH
from vlmpack.plan.plan import Plan, plan_bins
from vlmpack.trainer.loss import Loss, SampleLosses, data_place, mean_loss

Collator = Callable[[Sequence[Any]], Mapping[str, Any]]
"""A list of samples → a padded batch or a packed row, as a dictionary with host metadata."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Losses of a model on N samples, in the order of the data set. Equal on all ranks."""

    sample_ids: np.ndarray
    """int64 [N], ascending: index of each sample in the data set; refused samples have no entry."""
    sample_losses: np.ndarray
    """float64 [N]: mean over each sample's targets of cross-entropy (nats) times weight; 0 without targets. With a
    teacher's `topk_logprobs`, the loss of `Distillation` takes the place of cross-entropy, here and in all metrics."""
    sample_targets: np.ndarray
    """int64 [N]: number of targets of each sample."""
    refused: tuple[SampleError, ...]
    """Samples that could not be used, ordered by index."""
    rows: int
    """Number of rows computed."""
    work: Work
    """Work counts, summed over all rows and ranks."""

    @property
    def metrics(self) -> dict[str, float]:
        """`loss_metrics` of the whole set, and the number of refused samples."""
        return {**losses_of_set(self.sample_losses, self.sample_targets), "num_refused": float(len(self.refused))}

    @property
    def num_targets(self) -> int:
        """Number of targets of the whole set."""
        return int(self.sample_targets.sum())

    @property
    def token_loss(self) -> float:
        """Cross-entropy (nats) of all targets, divided by their number."""
        return self.metrics["token_loss"]

    @property
    def sample_loss(self) -> float:
        """Mean over samples of each sample's mean loss; samples without targets are ignored."""
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
    """Compute the loss of every sample, equal to that of the sample alone in the unmodified model.

    Rows hold whole samples; a sample that is too large for a row gets its own. The model runs in evaluation mode with
    packing enabled; afterwards each module is back in its previous mode. Under torch.distributed, each rank computes
    its share of the rows (ranks that share rows, the same ones), and all ranks get the whole result.

    Args:
        model: a Hugging Face model, or a wrapper around it (PEFT, DDP, FSDP2), on its device.
        dataset: map-style data set, the same on all ranks.
        collator: a `VLMCollator` of either layout. Other collators must return batches with host metadata, and need a
            plan.
        capacity: maximum tokens of a row; `VLMCollator.measure` then measures lengths from text and image headers.
        plan: the rows, planned from the lengths of the whole data set.
        workers: number of processes that load data.

    Raises:
        ConfigError: not exactly one of `capacity` and `plan` is given, the plan belongs to another data set, or the
            collator cannot measure, or leaves samples out without naming the others.
        SampleError: a sample cannot be used, and the collator's `on_bad` is "raise".
    """
    rows = EvaluationRows.of(dataset, collator, plan=plan, capacity=capacity, workers=workers)
    modes, was_packing = [(module, module.training) for module in model.modules()], is_packing(model)
    try:
        step = PackedStep(model)
        rank, ranks = data_place(model)
        loader = EvaluationLoader(dataset, collator, rows, rank=rank, ranks=ranks, num_workers=workers)
        losses = RowLosses(loader)
        model.eval()
        with torch.no_grad():  # not inference mode: autograd refuses parameters that FSDP2 gathers in inference mode
            for batch in loader:
                losses.add(batch, step(batch))
    finally:
        for module, mode in modes:
            module.training = mode
        if not was_packing:
            disable_packing(model)
    return losses.total()


@torch.no_grad()
def generate_answer(model: Any, collator: VLMCollator, sample: Any, *, max_new_tokens: int) -> str | None:
    """Generate the last answer of a sample, greedily, from what comes before it. Puts the model in eval mode.

    Args:
        model: a Hugging Face model, or PEFT's wrapper around it, with or without packing.
        collator: of the training; its `layout`, `max_length` and `train_on` do not matter here.
        sample: a conversation that ends with an answer.
        max_new_tokens: maximum number of tokens to generate.

    Returns:
        The answer's text without special tokens; None: the sample has no prompt.
    """
    alone = VLMCollator(collator.processor, add_stop=collator.add_stop, ignored_keys=collator.ignored_keys)
    batch = alone([sample])
    is_target = batch["labels"][0] >= 0
    starts = (is_target[1:] & ~is_target[:-1]).nonzero()
    if not len(starts):
        return None
    start, accepted = int(starts[-1]) + 1, signature(find_model(model).forward).parameters
    prompt = {
        name: (value[:, :start] if value.shape[:2] == batch["labels"].shape else value).to(model.device)
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and name != "labels" and name in accepted
    }
    ids = model.eval().generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return collator.processor.decode(ids[0, start:], skip_special_tokens=True)


# ---------------------------------------------------------------------- rows of an evaluation set


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationRows:
    """The rows of an evaluation set."""

    plan: Plan
    """The samples of each row, by their indices in the data set."""
    refused: tuple[SampleError, ...]
    """Samples in no row, and why."""

    @classmethod
    def of(
        cls, dataset: MapStyle, collator: Collator, *, plan: Plan | None, capacity: int | None, workers: int = 0
    ) -> EvaluationRows:
        """Arrange an evaluation set in rows: the rows of a plan, or rows planned from lengths the collator measures.

        With a capacity, every usable sample gets a row; samples too large for a row get their own, as without packing.

        Raises:
            ConfigError: not exactly one of `plan` and `capacity` is given, the plan has another number of samples, the
                collator cannot measure, or no sample can be used.
            SampleError: a sample cannot be used, and the collator's `on_bad` is "raise".
        """
        check_samples(dataset)
        if (plan is None) == (capacity is None):
            raise ConfigError("give capacity=, the tokens of a row, or plan=, the rows themselves")
        if plan is not None:
            check_plan(plan, dataset, collator)
            return cls(plan=plan, refused=_dropped(plan))
        assert capacity is not None
        if not isinstance(collator, VLMCollator):
            raise ConfigError(f"a {type(collator).__name__} cannot measure lengths, as VLMCollator can; give plan=")
        with skipped_are_reported():  # by an error, or in `Evaluation.refused`
            table = measure_lengths(dataset, collator, workers=workers)
        check_refused(table, collator, of="the evaluation set")
        return cls(plan=plan_bins(table, capacity, overlength="own_row"), refused=table.refused)


def check_plan(plan: Plan, dataset: Any, collator: object) -> None:
    """Check that a plan is of this data set, and that the collator shares the prefixes that its rows share.

    Raises:
        ConfigError: the data set has no length or another one, or the collator does not share all prefixes.
    """
    if not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        raise ConfigError(
            f"a {kind} has no length, so it cannot be planned: leave plan= out, and pack it with PackedStream"
        )
    if len(plan.lengths) != len(dataset):
        raise ConfigError(
            f"the plan is of {len(plan.lengths)} samples, but the data set has {len(dataset)}; plan this one: "
            "plan_bins(measure_lengths(dataset, collator), capacity)"
        )
    check_sharing(plan, collator)


def check_sharing(plan: Plan, collator: object) -> None:
    """Check that a collator shares all prefixes that the plan's rows share; otherwise rows would be too long.

    Raises:
        ConfigError: the collator does not share prefixes, or only longer ones.
    """
    if plan.groups is None:
        return
    if not isinstance(collator, VLMCollator) or collator.share_prefixes is None:
        raise ConfigError(
            "the rows of this plan share prefixes: collate them with VLMCollator(processor, layout='packed', "
            "share_prefixes=True), or plan without groups="
        )
    least = collator.share_prefixes.min_shared
    computed = plan.sums(plan.lengths, plan.groups.tokens_shared(least))
    if (wrong := computed > np.maximum(plan.tree_tokens, plan.capacity)).any():
        raise ConfigError(
            f"rows share prefixes of less than {least} tokens, which this collator repeats: row {int(wrong.argmax())} "
            f"would compute {int(computed[wrong][0])} tokens, for a capacity of {plan.capacity}. Find the groups with "
            f"min_shared={least}, or collate with min_shared={int(plan.groups.added(plan.groups.tokens).min())}"
        )


def _dropped(plan: Plan) -> tuple[SampleError, ...]:
    """Return the samples in no row; those with length 0 were refused when lengths were measured."""

    def reason(at: int) -> SampleError:
        if not plan.lengths[at]:
            detail = "it was refused when its length was measured: LengthTable.refused has the reason"
            return SampleError(detail, "refused_before", index=at)
        return SampleError(f"the plan left it out, for on its own it has {plan.excess(at)}", OVERLENGTH, index=at)

    return tuple(map(reason, plan.dropped.tolist()))


@final
class NumberedCollator:
    """Collates samples of a data set by their indices, which errors name.

    Args:
        dataset: map-style data set.
        collator: collates samples.
        as_ids: replace the samples' ids by their indices.
    """

    def __init__(self, dataset: MapStyle, collator: Collator, *, as_ids: bool = False) -> None:
        self.dataset, self.collator, self._as_ids = dataset, collator, as_ids

    def __call__(self, places: Sequence[int]) -> Mapping[str, Any]:
        """Return the batch.

        Raises:
            SampleError: a sample cannot be used; names its index in the data set and its own id. This happens in the
                worker, because only the text of an error leaves a worker.
        """
        at_once = getattr(self.dataset, "__getitems__", None)  # PyTorch asks for it, too
        samples = found = at_once(list(places)) if at_once and places else [self.dataset[place] for place in places]
        if self._as_ids:
            found = [{**s, "id": at} if isinstance(s, Mapping) else s for at, s in zip(places, samples, strict=True)]
        try:
            return self.collator(found)
        except SampleError as error:
            if error.index is None or error.index not in range(len(places)):
                raise
            place, sample_id = places[error.index], sample_id_of(samples[error.index])
            raise SampleError(error.detail, error.reason, index=place, sample_id=sample_id) from error


@final
class EvaluationLoader(DataLoader[Any]):
    """Loads the batches of one rank's rows. Its separate generator keeps evaluation from changing training."""

    def __init__(
        self, dataset: MapStyle, collator: Collator, rows: EvaluationRows, *, rank: int, ranks: int, **settings: Any
    ) -> None:
        costs, bins = rows.plan.tree_tokens.astype(np.float64), rows.plan.bins
        dealt = balance_rows(costs, ranks=ranks).rows[:, rank].reshape(-1).tolist()
        counted = [at for at in dealt if at != EMPTY]
        repeated = (counted[:1] or [0]) * (len(dealt) - len(counted))
        settings |= {"collate_fn": NumberedCollator(dataset, collator, as_ids=True), "generator": torch.Generator()}
        places: Any = range(len(dataset))  # a data set of indices
        super().__init__(places, batch_sampler=[list(bins[at]) for at in counted + repeated], **settings)
        self.rows, self.rank = rows, rank
        self.counted = [bins[at] for at in counted]
        """Rows whose losses count (the first ones of the loader); losses of repeated rows are dropped."""
        self.names_samples = isinstance(collator, VLMCollator)
        """Whether batches name their samples; if so, a batch without sample ids has no samples."""


# ---------------------------------------------------------------------- losses


@final
class RowLosses:
    """Losses of the samples in one rank's rows, in row order."""

    def __init__(self, loader: EvaluationLoader) -> None:
        self._loader = loader
        self._rows = iter(loader.counted)
        self._places: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._works: list[Work] = []

    def add(self, batch: Any, result: StepResult) -> None:
        """Store the losses of the next row, unless it is a repeated one.

        Raises:
            ConfigError: samples were left out, and the batch does not name the others.
        """
        row = next(self._rows, None)
        if row is None:
            return
        named = batch[METADATA_KEY].sample_ids if METADATA_KEY in batch else ()
        present = list(named if named or self._loader.names_samples else row)
        if present and len(result.sample_targets) != len(present):
            raise ConfigError(
                f"of samples {list(row)} there are only {len(result.sample_targets)} in the batch, and it does not "
                "name them: let the collator do so, in HostMetadata.sample_ids"
            )
        self._places += present
        self._works.append(result.work)
        if present:
            self._losses.append(result.sample_losses)
            self._targets.append(result.sample_targets)

    def total(self) -> Evaluation:
        """Gather the results of all ranks; every rank must call it.

        Raises:
            ConfigError: losses of some rows of this rank are missing.
        """
        if row := next(self._rows, None):
            raise ConfigError(
                f"the losses of samples {list(row)} are missing: prediction_step was replaced by one that does not "
                "call PackedTrainer's; put PackedTrainer first among the bases, or set eval_packing=False"
            )
        of_rank = (self._places, _to_numpy(self._losses), _to_numpy(self._targets), self._works)
        computed = dict(gathered((self._loader.rank, of_rank)))  # once, of ranks that share rows
        places, losses, targets, works = zip(*computed.values(), strict=True)
        order = np.argsort(sample_ids := np.concatenate(places).astype(np.int64))
        rows, all_works = self._loader.rows, [*chain.from_iterable(works)]
        detail = "the collator left it out of its row; its log of skipped samples has the reason"
        absent = np.setdiff1d(rows.plan.sample_ids, sample_ids).tolist()
        left_out = (SampleError(detail, "left_out", index=at) for at in absent)
        return Evaluation(
            sample_ids=sample_ids[order],
            sample_losses=np.concatenate(losses)[order],
            sample_targets=np.concatenate(targets)[order].astype(np.int64),
            refused=tuple(sorted((*rows.refused, *left_out), key=lambda sample: sample.index or 0)),
            rows=len(rows.plan),
            work=Work.total(all_works, sum(work.real_tokens for work in all_works)),
        )


@final
class BatchLosses:
    """Losses of the samples in Trainer's own batches, as accelerate distributes them, each sample counted once.

    On several ranks, accelerate fills up the last batches with the first samples, and truncates gathered values to the
    number of samples left. That works for losses of samples, but not for the mean of a batch.
    """

    def __init__(self, accelerator: Any, batch_size: int, dataset: Any) -> None:
        """Begin an evaluation.

        Raises:
            ConfigError: several ranks evaluate an iterable data set, whose last batch accelerate cannot truncate.
        """
        self._gather, self._ranks, self._size = accelerator.gather_for_metrics, accelerator.num_processes, batch_size
        self._seen: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        if self._ranks > 1 and isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"over {self._ranks} ranks accelerate repeats samples of an IterableDataset, and does not report how "
                "many: give the evaluation set a length"
            )

    def add(self, result: StepResult | SampleLosses | None) -> None:
        """Store the losses of the next batch (None: it was not packed); every rank must call it.

        Raises:
            ConfigError: there are several ranks, and the batch was not packed or has another number of samples.
        """
        if self._ranks > 1 and (result is None or len(result.sample_targets) != self._size):
            fault = "is not packed" if result is None else f"has {len(result.sample_targets)} samples, not {self._size}"
            raise ConfigError(
                f"a batch of the evaluation {fault}, so on {self._ranks} ranks some samples may count twice: evaluate "
                "in planned rows, with eval_capacity="
            )
        losses = None if result is None else (result.sample_loss_sums, result.sample_targets)
        self._seen.append(self._gather(losses) if self._ranks > 1 else losses)

    def mean(self, loss: Loss) -> float | None:
        """Return the loss of all samples; None: some batch was not packed, or there are no targets."""
        seen = [losses for losses in self._seen if losses is not None]
        sums, targets = (_to_numpy([losses[at] for losses in seen]) for at in (0, 1))
        return mean_loss(sums, targets, loss) if len(seen) == len(self._seen) and targets.any() else None


def _to_numpy(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Concatenate tensors to float64 [n]; the only host–device sync of an evaluation."""
    return torch.cat(list(tensors)).double().numpy(force=True) if tensors else np.zeros(0)


# ---------------------------------------------------------------------- metrics for HF Trainer


@final
class LossMetrics:
    """Computes the losses of an evaluation set from HF Trainer's predictions, see `loss_metrics`."""

    def __init__(self, loss_count: LossCount) -> None:
        self._loss_count = loss_count

    def is_bound_to(self, model: Any) -> bool:
        """Return whether `loss_metrics` was called with this model or a wrapper around it."""
        return is_packing(model) and packing_state(find_model(model)).loss_count is self._loss_count

    def __call__(self, prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, float]:
        """Return the losses by name.

        Args:
            prediction: what Trainer makes of an enabled model's `PackedOutput`: `predictions` ends with (sample_losses
                [B], sample_targets [B]) of the whole set, or is a list of such pairs, one per batch. If
                `Seq2SeqTrainer` generated, predictions are ids [B, S].
            compute_result: Trainer passes it only with `batch_eval_metrics=True`, which is refused.

        Raises:
            ConfigError: the predictions do not come from a model with packing enabled, come one batch at a time, or
                have fewer samples than losses were computed.
        """
        computed = [(losses.cpu().numpy(), targets.cpu().numpy()) for losses, targets in self._loss_count.take()]
        if compute_result is not None:
            raise ConfigError(
                "batch_eval_metrics=True hands over one batch at a time, but loss_metrics needs the whole set: set it "
                "to False"
            )
        batches = prediction.predictions if isinstance(prediction.predictions, list) else [prediction.predictions]
        if computed:
            num_given = sum(len(batch[-1] if isinstance(batch, tuple) else batch) for batch in batches)
            if (num_computed := sum(len(losses) for losses, _ in computed)) != num_given:
                raise ConfigError(
                    f"HF Trainer computed {num_computed} losses and handed over {num_given} samples: of packed rows "
                    "accelerate cuts the last batch (use PackedTrainer), or an evaluation was interrupted (evaluate "
                    "again)"
                )
        pairs = computed or [_pair(batch) for batch in batches]  # PackedTrainer's are exact, and the model keeps none
        losses, targets = (np.concatenate(parts).astype(np.float64) for parts in zip(*pairs, strict=True))
        metrics = losses_of_set(losses, targets)
        return {"loss": metrics["token_loss"], **metrics}


def loss_metrics(model: nn.Module) -> LossMetrics:
    """Make HF Trainer's evaluation on one rank exact: `Trainer(model, ..., compute_metrics=loss_metrics(model))`.

    In Trainer's own `eval_loss`, each sample counts with the mean over all targets of its batch, so the result changes
    with `per_device_eval_batch_size` and with the order of the samples. A model with packing enabled refuses such an
    evaluation unless these metrics are bound to it. They do not depend on batches, and `loss` replaces `eval_loss`,
    even if `Seq2SeqTrainer` generates (`predict_with_generate=True`):

        loss           same as token_loss; Trainer reports it as `eval_loss` and selects the best model by it
        token_loss     cross-entropy (nats) times weight, summed over all targets, divided by their number
        sample_loss    mean over samples of each sample's mean loss; samples without targets are ignored
        perplexity     exp(token_loss)
        num_targets    number of targets of the whole set
        num_samples    number of samples with targets

    Args:
        model: the evaluated model, or a wrapper around it (PEFT, `torch.compile`, DDP), with packing enabled.

    Raises:
        ConfigError: packing is not enabled on the model.
    """
    return LossMetrics(bind_loss_metrics(model))


def losses_of_set(losses: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the metrics of `loss_metrics` by name, without `loss`.

    Args:
        losses: float64 [B]: mean loss of each sample.
        targets: [B]: number of targets of each sample.
    """
    sums = losses * targets
    token_loss = mean_loss(sums, targets, "token")
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(token_loss))
    return {
        "token_loss": token_loss,
        "sample_loss": mean_loss(sums, targets, "sample"),
        "perplexity": perplexity,
        "num_targets": float(targets.sum()),
        "num_samples": float((targets > 0).sum()),
    }


def _pair(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the last two entries of a batch's predictions; they follow the logits if logits were requested."""
    if isinstance(batch, tuple) and len(batch) >= 2:
        losses, targets = (np.asarray(values) for values in batch[-2:])
        if losses.ndim == 1 and losses.shape == targets.shape and np.issubdtype(targets.dtype, np.integer):
            return losses, targets
    shapes = [list(np.shape(part)) for part in batch] if isinstance(batch, tuple) else list(np.shape(batch))
    raise ConfigError(
        f"loss_metrics needs one loss and one target count a sample, got predictions of shape {shapes}; train with "
        "Trainer(model=enable_packing(model), ...), and leave preprocess_logits_for_metrics out"
    )
