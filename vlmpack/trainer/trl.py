"""TRL's trainers on packed rows: `from vlmpack.trainer.trl import PackedSFTTrainer`, the same arguments.

    samples ──TRL──▶ padded batch ──pack, share──▶ row ──the model──▶ hidden states ──TRL──▶ loss, metrics

Each trainer of TRL computes hidden states in the model's backbone, and scores them by a head of its own. The calls of
the backbone are packed (`pack_backbone`); samples, head, loss and metrics stay TRL's. So every setting means what it
means there, and results are those of the padded trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer

from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.collator import VLMCollator
from vlmpack.errors import ConfigError, check_extra, check_kind
from vlmpack.layout.batch import METADATA_KEY
from vlmpack.model.backbone import pack_backbone
from vlmpack.model.enable import enable_packing, is_packing
from vlmpack.model.engine import packing_state
from vlmpack.model.plain import find_model
from vlmpack.model.result import Work
from vlmpack.trainer.check_trl import check_packing
from vlmpack.trainer.checkpoint_weights import RenamedWeights
from vlmpack.trainer.evaluation import SampleLosses
from vlmpack.trainer.packed_trainer import PackedTrainer

check_extra("rl", "trl", needed_by="vlmpack.trainer.trl")

import trl  # noqa: E402
from datasets import Dataset, IterableDataset  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput  # noqa: E402

__all__ = ["PackedDPOTrainer", "PackedGRPOTrainer", "PackedKTOTrainer", "PackedRLOOTrainer", "PackedSFTTrainer"]


class _PackedHead(RenamedWeights):
    """Packs the calls that a trainer of TRL makes of the policy's backbone, and of the reference's.

    It logs `packing/computed`: tokens that went through the model, over those of the padded batch.

    Args:
        model: the policy, or a `PeftModel` of it; not a name, of which TRL would load it. Packing is enabled on it.
        *args: those of TRL's trainer.
        share_prefixes: compute what samples of a micro-batch begin with alike, images included, once. Where there is
            dropout, they have one mask in common there. None: as is usual for this trainer.
        **kwargs: those of TRL's trainer.

    Raises:
        ConfigError: no model; or a setting whose results would not be TRL's, with the remedy.
    """

    shares_prefixes = False
    """True if beginnings are shared where `share_prefixes` is None."""

    def __init__(
        self, model: Any, *args: Any, share_prefixes: bool | SharePrefixes | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"packing cannot be enabled on {model!r:.60}, which TRL would load: load the model and hand it over, "
                "AutoModelForImageTextToText.from_pretrained(...)"
            )
        if share_prefixes is not None and not isinstance(share_prefixes, bool):
            check_kind("share_prefixes", share_prefixes, SharePrefixes, "SharePrefixes(min_shared=64)")
        if not is_packing(model):
            enable_packing(model)
        if share_prefixes is None:
            share_prefixes = self.shares_prefixes
        self.share_prefixes = SharePrefixes() if share_prefixes is True else share_prefixes or None
        """Rule for sharing beginnings; None: they are not shared."""
        self._packed_calls = 0
        trainer_of_trl: Any = super()
        unprepared = self._unprepared(kwargs)
        trainer_of_trl.__init__(model, *args, **{**kwargs, **dict.fromkeys(unprepared, _STAND_IN)})
        vars(self).update(unprepared)
        trainer: Any = self
        _check_settings(trainer.args, model)
        self._pack(trainer.model)

    def _unprepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the data sets, by their arguments, that TRL is not to see."""
        return {}

    @property
    def ref_model(self) -> Any:
        """The reference model; None: there is none, or it is the policy without its adapter."""
        return self._packed_ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        # Packing is enabled as soon as TRL has loaded it: a moment later TRL replaces its forward.
        trainer: Any = self
        if isinstance(model, nn.Module) and not is_packing(model):
            enable_packing(model, packing_state(find_model(trainer.model)).config)
            self._pack(model)
        self._packed_ref_model = model

    def _pack(self, model: nn.Module) -> None:
        min_shared = None if self.share_prefixes is None else self.share_prefixes.min_shared
        pack_backbone(model, min_shared=min_shared, report=self._count)

    def _count(self, work: Work, tokens: int) -> None:
        """Count a call that was packed."""
        trainer: Any = self
        self._packed_calls += 1
        if "_metrics" in vars(self):  # not while references are computed ahead
            mode = "train" if trainer.model.training else "eval"
            trainer._metrics[mode]["packing/computed"].append(work.physical_tokens / max(tokens, 1))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch as TRL does.

        Raises:
            ConfigError: nothing of it was packed.
        """
        before = self._packed_calls
        trainer: Any = super()
        loss = trainer.training_step(*args, **kwargs)
        if self._packed_calls == before:
            raise ConfigError(
                f"{type(self).__name__} packed nothing of a training step: TRL {trl.__version__} computed it past the "
                "model's backbone, or from embeddings, as prompt tuning does: use LoRA, or TRL's own trainer"
            )
        return loss


_STAND_IN = Dataset.from_list([{"input_ids": [0, 0], "labels": [0, 0]}])
"""TRL refuses data sets of others than `datasets`, and tokenises what is not tokenised: it gets this in their place."""


def _check_settings(args: Any, model: nn.Module) -> None:
    state = packing_state(find_model(model))
    if state.config.z_loss_coef:
        raise ConfigError(
            f"z_loss_coef is {state.config.z_loss_coef}, but TRL's loss has no z-loss of routers: leave it out of "
            "StepConfig (the load-balancing loss is router_aux_loss_coef of TRL's settings)"
        )
    if state.parallel is not None and state.parallel.ranks > 1:
        raise ConfigError(
            f"{state.parallel.ranks} ranks share each row, but TRL gives every rank samples of its own: enable packing "
            "without parallel="
        )
    if args.torch_compile:
        raise ConfigError(
            "torch_compile=True would be broken off at every row that is packed: hand over compile_layers(model) of "
            "vlmpack.model, and leave it out"
        )


# ---------------------------------------------------------------------- preferences


class PackedDPOTrainer(_PackedHead, DPOTrainer):
    """TRL's DPOTrainer on packed rows: a pair shares a row, and computes its prompt, with its images, once.

    PackedDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, processing_class=processor)
    """

    shares_prefixes = True


class PackedKTOTrainer(_PackedHead, KTOTrainer):
    """TRL's KTOTrainer on packed rows."""


# ---------------------------------------------------------------------- samples that are drawn


class _Sampling(_PackedHead):
    """Samples without video placeholders, as TRL suppresses those of images: a sample of one is no video."""

    shares_prefixes = True

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        trainer: Any = self
        core = find_model(trainer.model)
        has_videos = packing_state(core).family.has_videos
        if has_videos and not trainer.use_vllm and trainer.generation_config.suppress_tokens:
            suppressed = sorted({*trainer.generation_config.suppress_tokens, core.config.video_token_id})
            trainer.generation_config.suppress_tokens = trainer.generation_kwargs["suppress_tokens"] = suppressed


class PackedGRPOTrainer(_Sampling, GRPOTrainer):
    """TRL's GRPOTrainer on packed rows: samples of a prompt share its computation.

        PackedGRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), ...)

    TRL repeats the prompt of a group, with its images, for each of its samples. In the row they begin alike, and are
    computed once: for the policy, the policy that drew the samples, and the reference.
    """


class PackedRLOOTrainer(_Sampling, RLOOTrainer):
    """TRL's RLOOTrainer on packed rows: samples of a prompt share its computation."""


# ---------------------------------------------------------------------- supervised fine-tuning


class PackedSFTTrainer(PackedTrainer, _PackedHead, SFTTrainer):
    """TRL's SFTTrainer on packed rows: batches of TRL's collator, or rows of a plan, a stream or `VLMCollator`.

        PackedSFTTrainer(model, args=SFTConfig(...), train_dataset=chats, processing_class=processor)
        PackedSFTTrainer(model, ..., data_collator=VLMCollator(processor, layout="packed"), plan=plan_bins(...))
        PackedSFTTrainer(model, ..., data_collator=..., train_dataset=open_dataset("chats.jsonl"))

    The first is TRL's run, with its settings and metrics, without computing padding. Arguments beyond TRL's are those
    of `PackedTrainer`. `eval_loss` is exact on any number of ranks. Data sets that are not of `datasets` (opened, mixed
    or stored ones, streams, lists) go to the collator as they are.

    Args:
        *args: SFTTrainer's own.
        eval_packing: evaluate in planned rows, which have no entropy and no token accuracy; None: if the collator is a
            `VLMCollator`, and a row's capacity is known. False: in TRL's batches, with all of TRL's metrics.
        **kwargs: SFTTrainer's own and those of `PackedTrainer`.

    Raises:
        ConfigError: also, a data set that is not of `datasets` and no collator. When it trains or evaluates: TRL's own
            packing (`packing`, `padding_free`, `eval_packing`), which `check_trainer` names as well.
    """

    def __init__(self, *args: Any, eval_packing: bool | None = None, **kwargs: Any) -> None:
        if eval_packing is None and not isinstance(kwargs.get("data_collator"), VLMCollator):
            eval_packing = False
        super().__init__(*args, eval_packing=eval_packing, **kwargs)

    def _unprepared(self, settings: dict[str, Any]) -> dict[str, Any]:
        given = {name: settings.get(name) for name in ("train_dataset", "eval_dataset")}
        others = {name: data for name, data in given.items() if data is not None and not _is_of_datasets(data)}
        if others and settings.get("data_collator") is None:
            name, data = next(iter(others.items()))
            raise ConfigError(
                f"{name} is a {type(data).__name__}, which TRL cannot tokenise: give data_collator=VLMCollator("
                "processor, layout='packed') and SFTConfig(remove_unused_columns=False), or a data set of `datasets`"
            )
        return others

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does."""
        _refuse_packing_of_trl(self)
        return super().train(*args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as TRL does, which tokenises data sets of `datasets`; others go to the collator as they are."""
        _refuse_packing_of_trl(self)
        is_of_trl = eval_dataset is None or isinstance(eval_dataset, str) or _is_of_datasets(eval_dataset)
        base: Any = super() if is_of_trl else super(SFTTrainer, self)
        return base.evaluate(eval_dataset, *args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as TRL does; of an evaluation in planned rows as Trainer does."""
        if self._row_losses is not None:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if METADATA_KEY in inputs and inputs.get("attention_mask") is None:
            inputs = {**inputs, "attention_mask": (~inputs["moe_padding_mask"]).long()}  # TRL counts tokens by it
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Compute a batch of an evaluation, or a planned row, and store its samples' losses."""
        if self._batch_losses is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with _scored(model) as scored:
            predictions = SFTTrainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        (output,) = scored
        assert output.log_probs is not None
        assert output.label_mask is not None
        self._batch_losses.add(SampleLosses.of(output.log_probs, output.label_mask, inputs.get(METADATA_KEY)))
        return predictions


def _refuse_packing_of_trl(trainer: Trainer) -> None:
    if problems := list(check_packing(trainer)):
        raise ConfigError("; ".join(problems))


def _is_of_datasets(data: Any) -> bool:
    parts = data.values() if isinstance(data, dict) else [data]
    return all(isinstance(part, Dataset | IterableDataset) for part in parts)


@contextmanager
def _scored(model: nn.Module) -> Iterator[list[FusedCausalLMOutput]]:
    """Collect what TRL's head gives meanwhile."""
    outputs: list[FusedCausalLMOutput] = []

    def collect(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, FusedCausalLMOutput):
            outputs.append(output)

    hook = find_model(model).register_forward_hook(collect)
    try:
        yield outputs
    finally:
        hook.remove()
