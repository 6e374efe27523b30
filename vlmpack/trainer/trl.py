"""TRL's trainers on packed rows: `from vlmpack.trainer.trl import PackedSFTTrainer`, the same arguments.

    samples ──TRL──▶ padded batch ──pack, share──▶ row ──the model──▶ hidden states ──TRL──▶ loss, metrics

TRL's trainers compute hidden states in the model's backbone and score them with their own head. The packed trainers
pack only the calls of the backbone (`pack_backbone`); samples, head, loss and metrics stay TRL's. So every setting
keeps its meaning, and results equal those of the padded trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer

from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.collator import VLMCollator
from vlmpack.data.formats import FLAGS
from vlmpack.errors import ConfigError, check_extra
from vlmpack.layout.batch import METADATA_KEY, TEACHER
from vlmpack.model.enable import enable_packing, is_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.forward import WEIGHTS, pack_backbone
from vlmpack.model.plain import find_model
from vlmpack.model.result import Work
from vlmpack.trainer.check import packing_of_trl, shared_rows
from vlmpack.trainer.checkpoints import RenamedWeights
from vlmpack.trainer.evaluation import BatchLosses, RowLosses
from vlmpack.trainer.loss import channels_of, sample_losses_of
from vlmpack.trainer.packed_trainer import PackedTrainer, take_rows_whole

check_extra("rl", "trl", needed_by="vlmpack.trainer.trl")

from datasets import Dataset, IterableDataset  # noqa: E402
from trl.trainer.distillation_trainer import DistillationTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402
from trl.trainer.reward_trainer import RewardTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput  # noqa: E402

__all__ = [
    "PackedDPOTrainer",
    "PackedDistillationTrainer",
    "PackedGRPOTrainer",
    "PackedKTOTrainer",
    "PackedRLOOTrainer",
    "PackedRewardTrainer",
    "PackedSFTTrainer",
]


class _PackedHead(RenamedWeights):
    """Packs a TRL trainer's calls of the backbones of the policy and of the reference model.

    Logs `packing/computed`: tokens that went through the model, divided by the tokens of the padded batch.

    Args:
        model: the policy, or a `PeftModel` around it; packing is enabled on it. A name is refused, because TRL would
            load the model itself.
        *args: arguments of TRL's trainer.
        share_prefixes: compute prefixes that samples of a micro-batch share, including images, only once. With dropout,
            these samples then share one dropout mask there. None: the default of this trainer.
        **kwargs: keyword arguments of TRL's trainer.

    Raises:
        ConfigError: `model` is not a model, or a setting would give other results than TRL; names the remedy.
    """

    shares_prefixes = False
    """Whether prefixes are shared if `share_prefixes` is None."""
    model: Any
    _metrics: Any

    def __init__(
        self, model: Any, *args: Any, share_prefixes: bool | SharePrefixes | None = None, **kwargs: Any
    ) -> None:
        _enable(model)
        self.share_prefixes = SharePrefixes.of(self.shares_prefixes if share_prefixes is None else share_prefixes)
        """How prefixes are shared; None: they are not."""
        self._packed_calls = 0
        if not isinstance(kwargs.get("data_collator"), VLMCollator):
            for name in ("train_dataset", "eval_dataset"):
                _check_unweighed(name, kwargs.get(name))
        unprepared = self._unprepared(kwargs)
        super().__init__(model, *args, **{**kwargs, **dict.fromkeys(unprepared, _STAND_IN)})
        for name, data in unprepared.items():
            setattr(self, name, data)
        self._check_settings()
        take_rows_whole(self)
        self._pack(self.model)

    def _unprepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the data sets that TRL must not see, by argument name."""
        return {}

    @property
    def ref_model(self) -> Any:
        """The reference model; None: there is none, or it is the policy without its adapter."""
        return self._packed_ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        # Enable packing as soon as TRL has loaded the model: a moment later TRL replaces its forward.
        if isinstance(model, nn.Module) and not is_packing(model):
            enable_packing(model, packing_state(find_model(self.model)).config)
            self._pack(model)
        self._packed_ref_model = model

    def _pack(self, model: nn.Module) -> None:
        min_shared = None if self.share_prefixes is None else self.share_prefixes.min_shared
        pack_backbone(model, min_shared=min_shared, report=self._count)

    def _count(self, work: Work, tokens: int) -> None:
        """Count a packed call."""
        self._packed_calls += 1
        if hasattr(self, "_metrics"):  # missing while reference log-probabilities are precomputed
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["packing/computed"].append(work.physical_tokens / max(tokens, 1))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch as TRL does.

        Raises:
            ConfigError: no call was packed.
        """
        before = self._packed_calls
        loss = super().training_step(*args, **kwargs)
        if self._packed_calls == before:
            raise ConfigError(
                f"{type(self).__name__} packed nothing of a training step, which did not call the backbone with tokens "
                "(prompt tuning): use LoRA, or TRL's own trainer"
            )
        return loss

    def _check_settings(self) -> None:
        state = packing_state(find_model(self.model))
        for problem in shared_rows(state):
            raise ConfigError(problem)
        if state.config.z_loss_coef:
            raise ConfigError("TRL's loss has no z-loss of routers: leave z_loss_coef out of StepConfig")
        if self.args.torch_compile:
            raise ConfigError("torch_compile=True breaks off at packed rows: hand over compile_layers(model) instead")


def _enable(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"packing cannot be enabled on {model!r:.60}, which TRL would load: load the model yourself")
    if not is_packing(model):
        enable_packing(model)


_STAND_IN = Dataset.from_list([{"input_ids": [0, 0], "labels": [0, 0]}])
"""Passed to TRL in place of data sets it would refuse or tokenize: it only accepts those of `datasets`."""


# ---------------------------------------------------------------------- preferences


class PackedDPOTrainer(_PackedHead, DPOTrainer):
    """TRL's DPOTrainer on packed rows: a pair shares a row, and computes its prompt, with its images, once.

    PackedDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, processing_class=processor)
    """

    shares_prefixes = True


class PackedKTOTrainer(_PackedHead, KTOTrainer):
    """TRL's KTOTrainer on packed rows."""


class PackedRewardTrainer(_PackedHead, RewardTrainer):
    """TRL's RewardTrainer on packed rows: a pair shares a row, and computes its prompt once.

    PackedRewardTrainer(classifier, args=RewardConfig(...), train_dataset=pairs, processing_class=tokenizer)
    """

    shares_prefixes = True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss. TRL passes the margins to the model too, which does not read them."""
        scored: Any = lambda margin=None, **batch: model(**batch)  # noqa: E731
        return super().compute_loss(scored, inputs, *args, **kwargs)


# ---------------------------------------------------------------------- generated samples


class _Sampling(_PackedHead):
    """Suppress video placeholders in generation, as TRL suppresses image placeholders: a generated one has no video."""

    shares_prefixes = True
    generation_config: Any
    generation_kwargs: Any
    use_vllm: bool

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        core, config = find_model(self.model), self.generation_config
        if packing_state(core).family.has_videos and not self.use_vllm and config.suppress_tokens:
            suppressed = sorted({*config.suppress_tokens, core.config.video_token_id})
            config.suppress_tokens = self.generation_kwargs["suppress_tokens"] = suppressed


class PackedGRPOTrainer(_Sampling, GRPOTrainer):
    """TRL's GRPOTrainer on packed rows: completions of one prompt share its computation.

        PackedGRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), ...)

    TRL repeats the prompt of a group, with its images, for each completion. In the row this shared prefix is computed
    once: for the policy, the policy that generated the completions, and the reference.
    """


class PackedRLOOTrainer(_Sampling, RLOOTrainer):
    """TRL's RLOOTrainer on packed rows: completions of one prompt share its computation."""


class PackedDistillationTrainer(_Sampling, DistillationTrainer):
    """TRL's DistillationTrainer with the student and the teacher on packed rows.

        PackedDistillationTrainer(student, teacher, args=DistillationConfig(...), ...)

    Packing is enabled on the teacher too. It may be of another family, but its name is refused, because TRL would load
    it itself.
    """

    def __init__(self, model: Any, teacher_model: Any, *args: Any, **kwargs: Any) -> None:
        _enable(teacher_model)
        super().__init__(model, teacher_model, *args, **kwargs)
        self._pack(teacher_model)


# ---------------------------------------------------------------------- supervised fine-tuning


class PackedSFTTrainer(PackedTrainer, _PackedHead, SFTTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """TRL's SFTTrainer on packed rows: batches of TRL's collator, or rows of a plan, a stream or `VLMCollator`.

        PackedSFTTrainer(model, args=SFTConfig(...), train_dataset=chats, processing_class=processor)
        PackedSFTTrainer(model, ..., data_collator=VLMCollator(processor, layout="packed"), plan=plan_bins(...))
        PackedSFTTrainer(model, ..., data_collator=..., train_dataset=open_dataset("chats.jsonl"))

    The first form is TRL's run with TRL's settings and metrics, but computes no padding. The trainer also takes the
    arguments of `PackedTrainer`, except that `loss` must be "token". `eval_loss` is exact on any number of ranks. Data
    sets that do not come from `datasets` (opened, mixed or stored ones, streams, lists) go to the collator unchanged.

    Args:
        *args: arguments of SFTTrainer.
        eval_packing: True evaluates in planned rows, without entropy and token accuracy; False in TRL's batches, with
            all of TRL's metrics. None: planned rows if the collator is a `VLMCollator` and the capacity is known.
        **kwargs: keyword arguments of SFTTrainer and `PackedTrainer`.

    Raises:
        ConfigError: as in `PackedTrainer`; `loss` is not "token"; or a data set does not come from `datasets` and there
            is no collator. Training and evaluation also refuse TRL's own packing (`packing`, `padding_free`,
            `eval_packing`), which `check_trainer` reports earlier.
    """

    def __init__(self, *args: Any, eval_packing: bool | None = None, **kwargs: Any) -> None:
        if kwargs.get("loss", "token") != "token":
            raise ConfigError(
                f"TRL computes the loss by targets, so loss={kwargs['loss']!r} is not possible; {_WEIGH_BY}"
            )
        if eval_packing is None and not isinstance(kwargs.get("data_collator"), VLMCollator):
            eval_packing = False
        super().__init__(*args, eval_packing=eval_packing, **kwargs)

    def _unprepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        given = {name: settings.get(name) for name in ("train_dataset", "eval_dataset")}
        others = {name: data for name, data in given.items() if data is not None and not _is_of_datasets(data)}
        if others and settings.get("data_collator") is None:
            name, data = next(iter(others.items()))
            raise ConfigError(
                f"{name} is a {type(data).__name__}, which TRL cannot tokenize: give data_collator=VLMCollator("
                "processor, layout='packed') and SFTConfig(remove_unused_columns=False)"
            )
        return others

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, after refusing TRL's own packing."""
        self._refuse_packing_of_trl()
        return super().train(*args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as TRL does. TRL tokenizes data sets of `datasets`; others go to the collator unchanged."""
        self._refuse_packing_of_trl()
        is_of_trl = eval_dataset is None or isinstance(eval_dataset, str) or _is_of_datasets(eval_dataset)
        base: Any = super() if is_of_trl else super(SFTTrainer, self)
        return base.evaluate(eval_dataset, *args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as TRL does; in an evaluation in planned rows, as Trainer does."""
        if isinstance(self._losses, RowLosses):
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if METADATA_KEY in inputs and inputs.get("attention_mask") is None:
            inputs = {**inputs, "attention_mask": (~inputs["moe_padding_mask"]).long()}  # TRL counts tokens with it
        if ignored := [name for name in (*WEIGHTS, *TEACHER) if inputs.get(name) is not None]:
            raise ConfigError(f"TRL's loss would ignore {ignored[0]} of the batch; {_WEIGH_BY}")
        if not model.training or channels_of(inputs) is None:
            return SFTTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        with _scored(model) as scored:
            result = SFTTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        self._channel_losses.add(inputs, scored[-1])
        return result

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Compute an evaluation batch or a planned row, and store the losses of its samples."""
        if not isinstance(self._losses, BatchLosses):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with _scored(model) as scored:
            predictions = SFTTrainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        (output,) = scored
        self._losses.add(sample_losses_of(output, inputs.get(METADATA_KEY)))
        return predictions

    def _refuse_packing_of_trl(self) -> None:
        if problems := list(packing_of_trl(self)):
            raise ConfigError("; ".join(problems))


_WEIGH_BY = "use PackedTrainer of vlmpack.trainer, with data_collator=VLMCollator(processor, layout='packed')"


def _check_unweighed(name: str, data: Any) -> None:
    """Check that a data set of `datasets` has no weights in messages, and no teacher's columns: TRL would ignore them.

    Raises:
        ConfigError: it has.
    """
    for part in data.values() if isinstance(data, dict) else [data]:
        sample: Any = next(iter(part), {}) if isinstance(part, Dataset) else {}
        keys = {key for value in sample.values() for turn in _turns(value) for key in turn}
        for ignored in [f"the column {column}" for column in TEACHER if column in sample] + [*keys.intersection(FLAGS)]:
            raise ConfigError(f"{name} has {ignored}, which TRL would ignore; leave it out, or {_WEIGH_BY}")


def _turns(value: Any) -> list[Mapping[str, Any]]:
    """Return the messages in a column, and the parts of their contents; empty for columns of another type."""
    turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
    return turns + [part for turn in turns for part in _turns(turn.get("content"))]


def _is_of_datasets(data: Any) -> bool:
    parts = data.values() if isinstance(data, dict) else [data]
    return all(isinstance(part, Dataset | IterableDataset) for part in parts)


@contextmanager
def _scored(model: nn.Module) -> Iterator[list[FusedCausalLMOutput]]:
    """Collect the outputs of TRL's head while the block runs."""
    outputs: list[FusedCausalLMOutput] = []

    def collect(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, FusedCausalLMOutput):
            outputs.append(output)

    hook = find_model(model).register_forward_hook(collect)
    try:
        yield outputs
    finally:
        hook.remove()
