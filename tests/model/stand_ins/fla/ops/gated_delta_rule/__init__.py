"""The gated delta rule, token by token, and a list of the calls made."""

from itertools import pairwise
from typing import Any

import torch

CALLS: list[dict[str, Any]] = []
"""One entry a call: `shape` of the queries, and the boundaries `cu_seqlens` or None."""
CHUNK = 64


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] to [B, T, HV, V] and [N, HV, K, V], the states.

    HV / H value heads share a query and a key. N sequences: B, or as many as there are between boundaries.
    """
    CALLS.append({"shape": list(q.shape), "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist()})
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`.")
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"{v.shape[2]} value heads cannot share {q.shape[2]} heads")
    edges = [0, q.shape[1]] if cu_seqlens is None else _checked(cu_seqlens, cu_seqlens_cpu, chunk_indices)
    starts = [None] * (len(edges) - 1) if initial_state is None else _of_stretches(initial_state, len(edges) - 1, q)
    out, states = v.new_full(v.shape, float("nan")), []  # the real one leaves what lies behind the last boundary as is
    for start, stop, before in zip(edges, edges[1:], starts, strict=False):
        part, state = _recurrence(*(x[:, start:stop].float() for x in (q, k, v, g, beta)), scale, before)
        out = torch.cat([out[:, :start], part.to(v.dtype), out[:, stop:]], 1)
        states.append(state)
    return out, torch.cat(states) if output_final_state else None


def _of_stretches(states_NHKV: torch.Tensor, stretches: int, q: torch.Tensor) -> list[torch.Tensor]:
    """For each stretch the states that it starts from, [B, HV, K, V]."""
    if q.shape[0] > 1:
        return [states_NHKV]
    if len(states_NHKV) != stretches:
        raise ValueError(
            f"The number of initial states is expected to be equal to the number of input sequences, "
            f"i.e., {stretches} rather than {len(states_NHKV)}."
        )
    return list(states_NHKV.split(1))


def _recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shared = v.shape[2] // q.shape[2]
    q, k = (_unit(x).repeat_interleave(shared, dim=2) for x in (q, k))
    q = q * (scale or q.shape[-1] ** -0.5)
    if state is None:
        state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])  # [B, HV, K, V]
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        known = (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - known))[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(outputs, 1), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _checked(cu_seqlens: torch.Tensor, on_host: torch.Tensor | None, chunks: torch.Tensor | None) -> list[int]:
    """The boundaries; what was worked out from them beforehand must agree with them, or the real one goes astray."""
    edges = cu_seqlens.tolist()
    if on_host is not None:
        assert on_host.device.type == "cpu"
        assert on_host.tolist() == edges
    if chunks is not None:
        lengths = [stop - start for start, stop in pairwise(edges)]
        assert chunks.dtype == cu_seqlens.dtype
        assert chunks.tolist() == [[i, c] for i, n in enumerate(lengths) for c in range(-(-n // CHUNK))]
    return edges
