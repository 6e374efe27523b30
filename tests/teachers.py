"""A teacher's entries for samples, and the loss that they stand for: from whole distributions, in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from vlmpack.layout import PaddedBatch

K = 3


def entries_of(sample: Any, vocab: int, *, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, log-probabilities), both [n, k]; other ones for each sample, also where samples begin alike."""
    ids = sample["input_ids"]
    rng = torch.Generator().manual_seed(int(ids.sum()) + len(ids))
    top = torch.randn(len(ids), vocab, generator=rng).mul(3).log_softmax(-1).topk(k)
    return top.indices, top.values


def taught(batch: PaddedBatch, samples: Sequence[Any], vocab: int) -> PaddedBatch:
    """The right-padded batch of these samples with their teacher's entries."""
    columns = zip(*(entries_of(sample, vocab) for sample in samples), strict=True)
    ids, logprobs = (pad_sequence([*each], batch_first=True).permute(2, 0, 1) for each in columns)
    return replace(batch, extras={**batch.extras, "topk_ids": ids, "topk_logprobs": logprobs})


def loss_of(logits: torch.Tensor, sample: Any, *, weight: float, tail: bool, k: int = K) -> torch.Tensor:
    """The sum over a sample's targets of `weight` KL(teacher, model) + (1 - `weight`) cross-entropy; logits: [n, V]."""
    ids, logprobs = (each[1:].to(logits.device) for each in entries_of(sample, logits.shape[1], k=k))
    labels = sample["labels"][1:].to(logits.device)
    is_target = labels != -100
    q = logits[:-1][is_target].double().softmax(-1)
    p = torch.zeros_like(q).scatter(1, ids[is_target], logprobs[is_target].double().exp())
    is_kept = p > 0
    if tail:
        rest = [(1 - p.sum(1))[:, None], q.masked_fill(is_kept, 0).sum(1)[:, None]]
        p, q_K = torch.cat([p, rest[0]], 1), torch.cat([q.where(is_kept, 1), rest[1]], 1)
    else:
        p, q_K = p / p.sum(1, keepdim=True), q.where(is_kept, 1)
        q_K = torch.where(is_kept, q_K / q.where(is_kept, 0).sum(1, keepdim=True), 1)
    divergence = torch.nn.functional.kl_div(q_K.log(), p, reduction="sum")
    entropy = -q.gather(1, labels[is_target][:, None]).log().sum()
    return weight * divergence + (1 - weight) * entropy
