"""A Qwen3-VL-MoE that takes packed boundaries as arguments, in Megatron-Bridge's layout: one [1, T] row with gaps.

    python examples/thd_model.py

It has the modules and the weights of the Hugging Face model, and four arguments that a padded batch does not have:

- `cu_seqlens_q` and `cu_seqlens_q_padded`: attention selects each sample's real tokens by these boundaries;
- `rope_cu_seqlens`: MRoPE positions restart at these boundaries, counted in real tokens;
- `moe_padding_mask`: padding is neither dispatched to experts nor counted by routers.

`ThdStep` packs a batch and passes all of them. The script trains on packed rows of receipts. Before each step, it
prints the Hugging Face model's loss for each receipt alone; the losses are the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import apply_rotary_pos_emb

from vlmpack import SlotRule, ThdStep, VLMCollator
from vlmpack.model import masked_router_losses
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor


class ThdQwen3VLMoe(nn.Module):
    """The modules of a `Qwen3VLMoeForConditionalGeneration`, run on a packed row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_q_padded: torch.Tensor,
        rope_cu_seqlens: torch.Tensor,
        moe_padding_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the logits [1, T, V], and the routers' load-balancing loss times its coefficient."""
        text, config = self.model.language_model, self.config.text_config
        hidden = text.embed_tokens(input_ids)
        images, deepstack = input_ids == self.config.image_token_id, []
        if pixel_values is not None:
            features = self.model.visual(pixel_values, grid_thw=image_grid_thw, return_dict=True)
            hidden = hidden.masked_scatter(images[..., None], features.pooler_output)
            deepstack = features.deepstack_features
        positions = self.positions(input_ids, rope_cu_seqlens, moe_padding_mask, image_grid_thw)
        rope = text.rotary_emb(hidden, positions)
        spans = spans_of(cu_seqlens_q, cu_seqlens_q_padded)
        router_logits = []
        for index, layer in enumerate(text.layers):
            hidden = hidden + attend(layer.self_attn, layer.input_layernorm(hidden), rope, spans)
            normed = layer.post_attention_layernorm(hidden)
            if hasattr(layer.mlp, "gate"):
                mixed, logits = mix(layer.mlp, normed, moe_padding_mask)
                router_logits.append(logits)
            else:
                mixed = layer.mlp(normed)
            hidden = hidden + mixed
            if index < len(deepstack):
                hidden = hidden.masked_scatter(images[..., None], hidden[images] + deepstack[index])
        routers = masked_router_losses(router_logits, moe_padding_mask, top_k=config.num_experts_per_tok)
        logits = self.lm_head(text.norm(hidden))
        return {"logits": logits, "aux_loss": config.router_aux_loss_coef * routers.aux_loss}

    def positions(
        self,
        input_ids: torch.Tensor,
        rope_cu_seqlens: torch.Tensor,
        moe_padding_mask: torch.Tensor,
        image_grid_thw: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return MRoPE positions [3, 1, T] (time, height, width) that restart at each boundary; 0 on padding."""
        real = ~moe_padding_mask[0]
        ids_R = input_ids[0, real]
        types_R = (ids_R == self.config.image_token_id).long()
        positions_3R, grids = [], [] if image_grid_thw is None else list(image_grid_thw)
        for start, stop in pairwise(rope_cu_seqlens.tolist()):
            kinds = types_R[start:stop]
            count = int(((kinds == 1) & (F.pad(kinds, (1, 0))[:-1] != 1)).sum())  # runs of image tokens
            mine, grids = grids[:count], grids[count:]
            own, _ = self.model.get_rope_index(
                ids_R[None, start:stop],
                mm_token_type_ids=kinds[None],
                image_grid_thw=torch.stack(mine) if mine else None,
            )
            positions_3R.append(own[:, 0])
        positions = torch.zeros(3, 1, input_ids.shape[1], dtype=torch.int64, device=input_ids.device)
        positions[:, 0, real] = torch.cat(positions_3R, 1)
        return positions


def spans_of(cu_seqlens_q: torch.Tensor, cu_seqlens_q_padded: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of each sample's real tokens in the row."""
    starts, lengths = cu_seqlens_q_padded.tolist(), cu_seqlens_q.diff().tolist()
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def attend(
    attention: Any,
    hidden: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    spans: list[tuple[int, int]],
) -> torch.Tensor:
    """Compute causal attention within each sample's real tokens; 0 on padding."""
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(hidden).view(shape)).transpose(1, 2)
    v = attention.v_proj(hidden).view(shape).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *rope)
    out = torch.zeros_like(q)
    for start, stop in spans:
        sample = (tensor[:, :, start:stop] for tensor in (q, k, v))
        out[:, :, start:stop] = F.scaled_dot_product_attention(*sample, is_causal=True, enable_gqa=True)
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def mix(block: Any, hidden: torch.Tensor, moe_padding_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' output (0 on padding) and the router's logits [1, T, E]."""
    real = ~moe_padding_mask
    logits_TE, _, _ = block.gate(hidden)
    _, weights, chosen = block.gate(hidden[real])
    mixed = torch.zeros_like(hidden)
    mixed[real] = block.experts(hidden[real], chosen, weights)
    return mixed, logits_TE[None]


def main() -> None:
    """Train on packed rows; before each step, print the losses of the Hugging Face model on each receipt alone."""
    processor = tiny_processor("qwen3_vl", max_pixels=64 * 32 * 32)
    reference = tiny_model("qwen3_vl_moe", processor=processor)
    model = ThdQwen3VLMoe(reference)  # the same weights
    collate = VLMCollator(processor).collate
    step = ThdStep(model, slots=SlotRule(multiple=8), config=reference.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    receipts = list(receipt_conversations(num=12))
    for batch in (receipts[:4], receipts[4:8], receipts[8:]):
        with torch.no_grad():
            alone = [reference(**tensors_of(collate([receipt]).to_hf())).loss for receipt in batch]
        result = step(collate(batch))
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("packed", *(f"{loss:.4f}" for loss in result.sample_losses.tolist()), end="   ")
        print("alone", *(f"{loss:.4f}" for loss in torch.stack(alone).tolist()))


def tensors_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch, without vlmpack's metadata."""
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    main()
