"""The call of an attention back-end, and the interface of every back-end.

Shapes: T row tokens, N query heads, K key-value heads (N a multiple of K), H head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import torch

from vlmpack.layout import Segments


@final
@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The properties of one attention call that decide which back-ends can serve it."""

    device: str
    """Device type, "cpu" or "cuda"."""
    dtype: torch.dtype
    """Element type of q, k and v."""
    head_dim: int
    """H."""
    num_heads: int
    """N."""
    num_kv_heads: int
    """K."""
    dropout: float = 0.0
    """Probability of dropping an attention weight."""

    @classmethod
    def of(cls, q_TNH: torch.Tensor, k_TKH: torch.Tensor, *, dropout: float = 0.0) -> AttentionCall:
        """Read the properties off tensors."""
        return cls(
            device=q_TNH.device.type,
            dtype=q_TNH.dtype,
            head_dim=q_TNH.shape[-1],
            num_heads=q_TNH.shape[-2],
            num_kv_heads=k_TKH.shape[-2],
            dropout=dropout,
        )


class Backend(Protocol):
    """One way to let every segment of a row attend to itself and to nothing else."""

    name: str

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Why this back-end cannot serve `call`: one sentence a reason; empty: it can."""
        ...

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        dropout: float = 0.0,
        keys: Segments | None = None,
    ) -> torch.Tensor:
        """softmax(q k^T * scale) v within each segment: [T, N, H].

        Every row of the result, and of the gradients, is written; rows of padding are 0.

        Args:
            q_TNH: queries.
            k_TKH: keys.
            v_TKH: values.
            segments: the boundaries of all three, or of the queries alone.
            causal: whether a token sees no later one.
            scale: of the scores.
            dropout: probability of dropping an attention weight.
            keys: the boundaries of keys and values where they reach back further than the queries: as many segments,
                neither kind with gaps or empty segments; the last query of each is at the place of its last key.
        """
        ...
