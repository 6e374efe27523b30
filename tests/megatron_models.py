"""Megatron-Core's own GPTModel on a CPU, without Transformer Engine, and attention by boundaries in its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH = 64, 32


def import_megatron() -> None:
    """Import what tests of Megatron-Core need, or skip them; without Transformer Engine and Apex it warns, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("megatron.core", "megatron.core.models.gpt", "megatron.core.transformer.moe.moe_utils"):
            pytest.importorskip(module, reason="needs megatron-core: pip install 'vlmpack[megatron]'")


class ByBoundaries(nn.Module):
    """A core attention: causal within each sample of a THD row; of a batch [S, B, N, H], causal in each row of it.

    Megatron-Core's own takes THD rows with Transformer Engine alone, which needs CUDA.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **others: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        real, padded = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
        starts = (real if padded is None else padded).tolist()
        out = torch.zeros_like(value)
        for start, (first, stop) in zip(starts, pairwise(real.tolist()), strict=False):
            tokens = slice(start, start + stop - first)
            q, k, v = (tensor[tokens].transpose(0, 1)[None] for tensor in (query, key, value))
            out[tokens] = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        return out.flatten(1)


@contextmanager
def one_process() -> Iterator[None]:
    """Megatron-Core's groups of one rank."""
    import_megatron()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt_model(*, experts: int = 0, tensor: int = 1, expert: int = 1, seed: int = 0) -> Any:
    """A GPTModel of two local layers: dense, or with top-2 of some experts, an auxiliary and a z-loss.

    `parallel_state` must know the tensor- and expert-parallel ranks already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Transformer Engine and Apex
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        routers = {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
        losses = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
        config = TransformerConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=4,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
            normalization="RMSNorm",
            gated_linear_unit=True,
            add_bias_linear=False,
            bias_activation_fusion=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            tensor_model_parallel_size=tensor,
            expert_model_parallel_size=expert,
            **({**routers, **losses} if experts else {}),
        )
        layers = get_gpt_layer_local_spec(num_experts=experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
        layers.submodules.self_attention.submodules.core_attention = ByBoundaries
        torch.default_generator.manual_seed(seed)
        return GPTModel(
            config,
            layers,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )


def on_a_cpu(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Answer what Megatron-Core asks CUDA and Transformer Engine at run time."""
    from megatron.core.transformer.moe import moe_utils

    set_attribute(torch.cuda, "current_device", lambda: "cpu")
    set_attribute(moe_utils, "te_general_gemm", None)  # without Transformer Engine the name is not bound
