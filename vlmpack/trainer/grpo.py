"""PackedGRPOTrainer: TRL's GRPOTrainer, whose log-probabilities and entropies come from packed rows.

    prompts ──TRL──▶ samples, rewards, advantages ──TRL──▶ micro-batch [B, S]
                                                              │ pack, share
                                                              ▼
    loss ◀──TRL── log-probabilities, entropies [B, C] ◀── packed row [1, T], a tree

One method of GRPOTrainer computes log-probabilities: of the policy, of the policy that drew the samples, and of the
reference. It is replaced. Generation, rewards, advantages, the loss and its metrics stay TRL's.

TRL repeats the prompt of a group, with its images, for each of its samples. In the row they begin alike, and are
computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import trl
from torch import nn
from trl.trainer.grpo_trainer import GRPOTrainer

from vlmpack.collate import SharePrefixes
from vlmpack.errors import ConfigError, check_kind
from vlmpack.layout import IGNORE, Media, PackedRow, PaddedBatch, pack, share
from vlmpack.model import PackedStep, StepResult, enable_packing, find_model, is_packing, packing_state


def check_seam(trainer: type, version: str) -> None:
    """Check that TRL's trainer has the method that is replaced; it would compute padded batches otherwise.

    Raises:
        ConfigError: it has not.
    """
    if SEAM not in vars(trainer):
        raise ConfigError(
            f"{trainer.__name__} of TRL {version} has no method {SEAM}, which PackedGRPOTrainer replaces: install a "
            "version that has it, such as 1.16"
        )


SEAM = "_get_per_token_logps_and_entropies"
"""The method of TRL that computes log-probabilities, entropies and the load-balancing loss of a padded batch."""

check_seam(GRPOTrainer, trl.__version__)


class PackedGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer on packed rows: the same samples, losses and gradients, without computing padding.

        PackedGRPOTrainer(enable_packing(model), reward_funcs=reward, args=GRPOConfig(...), ...)

    It logs `packing/computed`: tokens that went through the model, over those of the padded batch.

    Args:
        model: the policy, with packing enabled, or a `PeftModel` of it; not a name, of which TRL would load it.
        *args: GRPOTrainer's own.
        share_prefixes: compute what samples of a micro-batch begin with alike, images included, once. Where there is
            dropout, they have one mask in common there.
        **kwargs: GRPOTrainer's own.

    Raises:
        ConfigError: packing is not enabled; or a setting whose loss would not be TRL's, with the remedy.
    """

    def __init__(self, model: Any, *args: Any, share_prefixes: bool | SharePrefixes = True, **kwargs: Any) -> None:
        _check_model(model)
        if not isinstance(share_prefixes, bool):
            check_kind("share_prefixes", share_prefixes, SharePrefixes, "SharePrefixes(min_shared=64)")
        self.share_prefixes = SharePrefixes() if share_prefixes is True else share_prefixes or None
        """How beginnings are shared; None: they are not."""
        super().__init__(model, *args, **kwargs)
        _check_settings(self.args, model)
        self._suppress_videos()

    @property
    def ref_model(self) -> Any:
        """The reference model; None: there is none, or it is the policy without its adapter."""
        return self._packed_ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        # Packing is enabled as soon as TRL has loaded it: a moment later TRL replaces its forward.
        policy: Any = self.model
        if isinstance(model, nn.Module) and not is_packing(model):
            enable_packing(model, packing_state(find_model(policy)).config)
        self._packed_ref_model = model

    def _suppress_videos(self) -> None:
        """Suppress video placeholders in sampling, as TRL does image placeholders: a sample of one is no video."""
        policy: Any = self.model
        config: Any = find_model(policy).config
        if not self.use_vllm and self.generation_config.suppress_tokens:
            suppressed = sorted({*self.generation_config.suppress_tokens, config.video_token_id})
            self.generation_config.suppress_tokens = self.generation_kwargs["suppress_tokens"] = suppressed

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **media: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute log-probabilities of completions, a row at a time.

        Args:
            model: the policy, or the reference.
            input_ids: [B, S], prompts padded on the left, then completions padded on the right.
            attention_mask: [B, S].
            logits_to_keep: C, columns of completions.
            batch_size: samples of a row; None: all.
            compute_entropy: whether to return entropies.
            compute_aux_loss: whether to return the routers' load-balancing loss.
            **media: pixels and grids of all samples, `num_images` of each.

        Returns:
            (log-probabilities [B, C], entropies [B, C] or None, load-balancing loss or None), 0 on padding.
        """
        labels = input_ids.masked_fill(attention_mask == 0, IGNORE)
        labels[:, :-logits_to_keep] = IGNORE
        batch = PaddedBatch(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            mm_token_type_ids=_token_types(model, input_ids),
            media=_media(media),
        )
        options = {"temperature": self.temperature, "entropy": compute_entropy}
        if compute_aux_loss:
            options["output_router_logits"] = True
        parts = _parts(batch, media.get("num_images"), batch_size or len(input_ids))
        results = [self._computed(model, part, options) for part in parts]
        predicting = slice(-logits_to_keep - 1, -1)
        logprobs = torch.cat([result.logprobs[:, predicting] for result in results])
        entropies = [result.entropies[:, predicting] for result in results if result.entropies is not None]
        aux_losses = [result.aux_loss for result in results if result.aux_loss is not None]
        aux_loss = torch.stack(aux_losses).mean() if compute_aux_loss else None
        return logprobs, torch.cat(entropies) if entropies else None, aux_loss

    def _computed(self, model: nn.Module, batch: PaddedBatch, options: dict[str, Any]) -> StepResult:
        """Run a batch as one row; its results have the places of the batch."""
        policy: Any = self.model
        row = pack(batch)
        if self.share_prefixes is not None:
            row = _shared(row, self.share_prefixes)
        with self.accelerator.autocast():
            result = PackedStep(model)(row, **options)
        fraction = result.work.physical_tokens / batch.input_ids.numel()
        self._metrics["train" if policy.training else "eval"]["packing/computed"].append(fraction)
        return replace(result, width=batch.input_ids.shape[1], offsets=row.known_metadata.offsets)


# ---------------------------------------------------------------------- samples of a batch


def _shared(row: PackedRow, sharing: SharePrefixes) -> PackedRow:
    """Find the row's prefix tree on the host, where pixels are compared."""
    return share(row.to("cpu"), min_shared=sharing.min_shared)


def _token_types(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor | None:
    """int64 [B, S]: types of tokens, read off the ids; None: a text model. TRL's own are of one side of padding."""
    core: Any = find_model(model)
    family = packing_state(core).family
    return family.media_types(input_ids, core.config) if family.has_vision else None


def _media(columns: dict[str, Any]) -> Media:
    """Pixels and grids.

    Raises:
        ConfigError: media as a model of another family takes them.
    """
    names = {"pixel_values", "image_grid_thw"}
    others = [
        name
        for name, value in columns.items()
        if value is not None and name not in {*names, "num_images", "mm_token_type_ids"}
    ]
    if others:
        raise ConfigError(f"{', '.join(others)} belong to a processor of another model; load both from one checkpoint")
    return Media(pixel_values=columns.get("pixel_values"), image_grid_thw=columns.get("image_grid_thw"))


def _parts(batch: PaddedBatch, num_images: list[int] | None, size: int) -> Iterator[PaddedBatch]:
    """Cut a batch into batches of `size` samples, with their images."""
    count, media = len(batch.input_ids), batch.media
    images = [0, *accumulate(num_images or [0] * count)]
    patches = [0, *accumulate([] if media.image_grid_thw is None else media.image_grid_thw.prod(-1).tolist())]
    for start in range(0, count, size):
        samples, first, last = slice(start, start + size), images[start], images[min(start + size, count)]
        of_part = Media()
        if first < last and media.pixel_values is not None and media.image_grid_thw is not None:
            pixels = media.pixel_values[patches[first] : patches[last]]
            of_part = Media(pixel_values=pixels, image_grid_thw=media.image_grid_thw[first:last])
        names = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
        columns = {name: vars(batch)[name] for name in names if vars(batch)[name] is not None}
        yield PaddedBatch(**{name: column[samples] for name, column in columns.items()}, media=of_part)


# ---------------------------------------------------------------------- settings


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not is_packing(model):
        shown = repr(model) if isinstance(model, str) else type(model).__name__
        raise ConfigError(
            f"packing is not enabled on {shown}, and cannot be once TRL has replaced its forward: load the model and "
            "hand over enable_packing(model)"
        )


def _check_settings(args: Any, model: nn.Module) -> None:
    state = packing_state(find_model(model))
    if state.config.z_loss_coef:
        raise ConfigError(
            f"z_loss_coef is {state.config.z_loss_coef}, but TRL's loss has no z-loss of routers: leave it out of "
            "StepConfig (the load-balancing loss is router_aux_loss_coef of GRPOConfig)"
        )
    if state.parallel is not None and state.parallel.ranks > 1:
        raise ConfigError(
            f"{state.parallel.ranks} ranks share each row, but TRL gives every rank samples of its own: enable packing "
            "without parallel="
        )
    if args.cast_lm_head_to_fp32 and (args.bf16 or args.fp16):
        raise ConfigError(
            "cast_lm_head_to_fp32 would be undone by autocast (bf16=True or fp16=True) inside a packed step: load the "
            "model with dtype='bfloat16' and leave bf16 off, or leave cast_lm_head_to_fp32 out; log-probabilities are "
            "taken of float32 logits in any case"
        )
