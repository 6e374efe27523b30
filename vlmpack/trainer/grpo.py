"""PackedGRPOTrainer: TRL's GRPOTrainer, whose log-probabilities and entropies come from packed rows.

    prompts ──TRL──▶ samples, rewards, advantages ──TRL──▶ micro-batch [B, S]
                                                              │ pack
                                                              ▼
    loss ◀──TRL── log-probabilities, entropies [B, C] ◀── packed row [1, T]

One method of GRPOTrainer computes log-probabilities: of the policy, of the policy that drew the samples, and of the
reference. It is replaced. Generation, rewards, advantages, the loss and its metrics stay TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from trl.trainer.grpo_trainer import GRPOTrainer

from vlmpack.errors import ConfigError
from vlmpack.layout import IGNORE, Media, PaddedBatch, pack
from vlmpack.model import PackedStep, enable_packing, find_model, is_packing, packing_state


class PackedGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer on packed rows: the same samples, losses and gradients, without computing padding.

        PackedGRPOTrainer(enable_packing(model), reward_funcs=reward, args=GRPOConfig(...), ...)

    Args:
        model: the policy, with packing enabled, or a `PeftModel` of it; not a name, of which TRL would load it.
        *args: GRPOTrainer's own.
        **kwargs: GRPOTrainer's own.

    Raises:
        ConfigError: packing is not enabled; or a setting whose loss would not be TRL's, with the remedy.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        _check_model(model)
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
        batch = PaddedBatch(input_ids=input_ids, attention_mask=attention_mask, labels=labels, media=_media(media))
        options = {"temperature": self.temperature, "entropy": compute_entropy}
        if compute_aux_loss:
            options["output_router_logits"] = True
        results = []
        for part in _parts(batch, media.get("num_images"), batch_size or len(input_ids)):
            row = pack(part)
            with self.accelerator.autocast():
                result = PackedStep(model)(row, **options)
            assert row.metadata is not None
            results.append(replace(result, width=input_ids.shape[1], offsets=row.metadata.offsets))
        predicting = slice(-logits_to_keep - 1, -1)
        logprobs = torch.cat([result.logprobs[:, predicting] for result in results])
        entropies = torch.cat([result.entropies[:, predicting] for result in results]) if compute_entropy else None
        aux_loss = torch.stack([result.aux_loss for result in results]).mean() if compute_aux_loss else None
        return logprobs, entropies, aux_loss


# ---------------------------------------------------------------------- samples of a batch


def _media(columns: dict[str, Any]) -> Media:
    """Pixels and grids; token types are read off the ids.

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
    return Media(**{name: columns.get(name) for name in names})


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
        assert batch.labels is not None
        yield PaddedBatch(
            input_ids=batch.input_ids[samples],
            attention_mask=batch.attention_mask[samples],
            labels=batch.labels[samples],
            media=of_part,
        )


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
