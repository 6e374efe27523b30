"""Per-sample execution: sparse attention and n-gram layers run on each sample of a row by itself.

Sparse attention scores blocks of tokens, counted from the start of the sequence, and selects the highest. An n-gram
layer hashes every token together with the tokens before it. Neither takes boundaries, so both run on the samples, in
right-padded batches of samples of similar length (`Buckets`). The tokens of a sample compete only with each other, and
none of them reads the padding, which comes later.

In a prefix tree, the children of a node are one batch or several. As in generation, they get a cache: the keys of their
path (`KeysOfPath`), or its last tokens (`TailOfPath`). So shared tokens go through once, also behind a kept prefix
(`PackedStep.group`).

Attention gets the row by keyword, as all layers do. N-gram layers get no keywords, so the layers that hold them hand it
on.

transformers' indexer selects for one token at a time, each with a host-device sync. In a row, all tokens are selected
for at once (`select_blocks`).

n samples, W tokens of the longest, S tokens with those before them, B blocks of these, N indexer heads, H head
dimension.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from vlmpack.layout.device import outside_graph
from vlmpack.model.mechanisms import (
    ClassMechanism,
    Maker,
    ModelParts,
    RowSetup,
    handed_on,
    handed_row,
    handing_class,
    replaces,
)
from vlmpack.model.mechanisms.attention import plain_config
from vlmpack.model.mechanisms.recurrent_rows import Buckets, Path
from vlmpack.model.plain import CACHES, warn_past_the_forward
from vlmpack.model.row import CONTEXT, RowContext


@final
class PerSample(ClassMechanism):
    """Layers that take the start of the sequence as the start of the sample. A row's entry: its samples in buckets."""

    name: ClassVar[str] = "per_sample"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every sparse attention layer, its indexer, every n-gram layer (there may be none), and the layers that
        hand their row on to one."""
        attention, ngram = (model.layer_parts(self.name, part) for part in ("attention", "ngram"))
        indexers = [layer.indexer for layer in attention]
        holders = [layer for layer in model.text.layers.children() if {*layer.children()} & {*ngram}]
        made = (
            *((attention, attention_class), (indexers, indexer_class)),
            *((ngram, ngram_class), (holders, handing_class)),
        )
        return [(layer, maker) for layers, maker in made for layer in layers]

    def prepare(self, setup: RowSetup) -> Buckets:
        """Group samples of similar length, or the children of each node of a tree."""
        return Buckets.of_row(setup, by_parent=True)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Count the pairs that the indexer selects."""
        paths, text_config = setup.part.paths, setup.text_config
        if paths is None:
            return {"attended_pairs": selected_pairs(setup.row.segments.sample_lengths, text_config)}
        keys = np.asarray(paths.keys.lengths)
        before = selected_pairs(keys - np.asarray(paths.nodes.lengths), text_config)
        return {"attended_pairs": selected_pairs(keys, text_config) - before}


def selected_pairs(lengths: Sequence[int] | np.ndarray, text_config: Any) -> int:
    """Return the number of query-key pairs that the indexer selects in samples of these lengths. It does not depend on
    the scores.

    If a query sees m tokens, its m // ratio whole blocks compete for budget // ratio slots, and the m % ratio tokens of
    the last, partial block are always selected.
    """
    ratio = text_config.indexer_compress_ratio
    visible = np.arange(1, max(lengths, default=0) + 1)
    selected = np.minimum(visible // ratio, text_config.indexer_budget // ratio) * ratio + visible % ratio
    pairs = np.concatenate([[0], selected.cumsum()])
    return int(pairs[[*lengths]].sum())


@replaces()
def attention_class(
    plain: Any,
    module: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Make a subclass of a sparse attention class that runs on each sample of a row."""
    row: RowContext | None = kwargs.pop(CONTEXT, None)
    if row is None:
        if module.training:
            warn_past_the_forward(attention_mask)
        return plain(module, hidden_states, position_embeddings, attention_mask, **kwargs)

    others = {name: value for name, value in kwargs.items() if name not in CACHES}

    def attend(path: KeysOfPath | None, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if path is not None:
            cos, sin = path.join("cos", cos), path.join("sin", sin)
        mask = _causal_mask(module, hidden, cos.shape[1])
        with handed_on(row):
            out, _ = plain(module, hidden, (cos, sin), mask, path, **others)
        return out

    return run_per_sample(attend, row, module, KeysOfPath, hidden_states, *position_embeddings), None


@replaces()
def indexer_class(
    plain: Any,
    module: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Make a subclass of an indexer's class that selects for all tokens at once in a row."""
    if handed_row() is None or attention_mask.dtype != torch.bool:  # additive: versions of transformers differ
        return plain(module, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
    return select_blocks(module, hidden_states, *position_embeddings, path=cache) & attention_mask


@replaces()
def ngram_class(
    plain: Any, module: nn.Module, hidden_states: torch.Tensor, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Make a subclass of an n-gram layer's class that runs on each sample of a row."""
    if (row := handed_row()) is None:
        return plain(module, hidden_states, input_ids, *args, **kwargs)

    def look_up(path: TailOfPath | None, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return plain(module, hidden, ids, path, *args[1:], **others)

    others = {name: value for name, value in kwargs.items() if name not in CACHES}
    return run_per_sample(look_up, row, module, functools.partial(TailOfPath, module), hidden_states, input_ids)


@final
class KeysOfPath:
    """A cache of one sparse attention layer for n siblings: the keys of their path, then their own."""

    DIMS: ClassVar[Mapping[str, int]] = {"keys": 2, "values": 2, "indexer": 1, "cos": 1, "sin": 1}
    """The dimension of tokens of each tensor."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths`: the path before each sibling, the same for all."""
        self._before = {name: [of_node[at] for of_node in paths[0]] for at, name in enumerate(self.DIMS)}
        self._siblings, self._own = len(paths), dict[str, torch.Tensor]()

    def join(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return the siblings' own tensor behind those of the path."""
        self._own[name] = own
        before = [x.expand(self._siblings, *x.shape[1:]) for x in self._before[name]]
        return torch.cat([*before, own], self.DIMS[name]) if before else own

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the path and of the siblings, [n, K, S, H]."""
        return self.join("keys", keys), self.join("values", values)

    def update_indexer(self, keys_nWH: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Return the indexer's keys before pooling, [n, S, H]."""
        return self.join("indexer", keys_nWH)

    def left(self, lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return what each sibling adds to its path."""
        every = zip(*(self._own[name].split(1) for name in self.DIMS), strict=True)
        return [
            tuple(x.narrow(dim, 0, length) for x, dim in zip(own, self.DIMS.values(), strict=True))
            for own, length in zip(every, lengths, strict=True)
        ]


@final
class TailOfPath:
    """A cache of one n-gram layer for n siblings: the last inputs of its convolution and the last token ids before
    them, each [n, ..., K]."""

    def __init__(self, layer: Any, paths: Sequence[Path]) -> None:
        """`paths`: the path before each sibling, the same for all."""
        weight, embedding = layer.conv1d.weight, layer.ple_embedding
        if paths[0]:
            last = paths[0][-1]
        else:
            zeros = weight.new_zeros(1, len(weight), layer.short_conv_state_len)
            last = zeros, torch.full((1, embedding.context_len), embedding.eos_token_id, device=weight.device)
        before = (x.expand(len(paths), *x.shape[1:]) for x in last)
        self.conv_states: dict[int, torch.Tensor] = dict(zip(_OF_NGRAMS, before, strict=True))
        """What precedes the siblings, by the number of the state."""
        self._joined: dict[int, torch.Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return what precedes the siblings."""
        return self.conv_states[state_idx]

    def update_conv_state(
        self, tokens: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Return what precedes the siblings, and their tokens, [n, ..., K + W]."""
        self._joined[state_idx] = torch.cat([self.conv_states[state_idx].to(tokens.dtype), tokens], -1)
        return self._joined[state_idx]

    def left(self, lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return the last K tokens of each sibling and its path."""
        taps = [self.conv_states[at].shape[-1] for at in _OF_NGRAMS]
        every = zip(*(self._joined[at].split(1) for at in _OF_NGRAMS), strict=True)
        return [
            tuple(x.narrow(-1, length, k) for x, k in zip(own, taps, strict=True))
            for own, length in zip(every, lengths, strict=True)
        ]

    # transformers 5.17 calls the following instead of `get_conv_state`

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Return True."""
        return True

    @property
    def layers(self) -> TailOfPath:
        """Return itself, for every layer."""
        return self

    def __getitem__(self, layer_idx: int) -> TailOfPath:
        return self


_OF_NGRAMS = 1, 2
"""The numbers that n-gram layers give to the states of their convolution and of their token ids."""


@outside_graph
def run_per_sample(
    layer: Callable[..., torch.Tensor],
    row: RowContext,
    module: nn.Module,
    cache: Callable[[Sequence[Path]], Any],
    hidden_1tD: torch.Tensor,
    *beside_1t: torch.Tensor,
) -> torch.Tensor:
    """Run [1, t, D] through the layer of a module, sample by sample, or node by node of a tree. This stays outside
    compiled graphs, because it would be recompiled for nearly every row.

    `layer`, `cache`: as in `Buckets.run`.
    """
    buckets: Buckets = row.entries[PerSample.name]
    on_samples = functools.partial(buckets.run, layer, module, cache, row.part)
    if buckets.tree is None:
        return row.part.on_whole_row(on_samples, hidden_1tD, *beside_1t)
    return on_samples(hidden_1tD, *beside_1t)


@torch.no_grad()
def select_blocks(
    indexer: Any,
    hidden_nWD: torch.Tensor,
    cos_nSH: torch.Tensor,
    sin_nSH: torch.Tensor,
    *,
    path: KeysOfPath | None = None,
) -> torch.Tensor:
    """Select the tokens that each query attends to, bool [n, 1, W, S]. Later tokens are not excluded.

    A query sees whole blocks of tokens, which compete, and tokens after them, which are always selected. The blocks
    are the same for all queries, so that one product scores all of them.

    Args:
        indexer: its projection, norms and sizes are used.
        hidden_nWD: hidden states of n samples, right-padded.
        cos_nSH: cosines of the positions of the tokens and those before them.
        sin_nSH: sines of the same.
        path: the cache with the keys before these tokens; None: there are none.
    """
    ratio, kept, dim = indexer.compress_ratio, indexer.block_topk, indexer.index_head_dim
    rotate = inspect.unwrap(type(indexer).forward).__globals__["apply_rotary_pos_emb"]
    (_, width, _), device, total = hidden_nWD.shape, hidden_nWD.device, cos_nSH.shape[1]
    before = total - width
    q_nWF, key_nSH = indexer.index_qk_proj(hidden_nWD).split([indexer.index_n_heads * dim, dim], -1)
    key_nSH = key_nSH if path is None else path.update_indexer(key_nSH, indexer.layer_idx)
    q_nWNH = indexer.q_layernorm(q_nWF.unflatten(-1, (-1, dim)))
    q_nWNH = rotate(q_nWNH, cos=cos_nSH[:, before:], sin=sin_nSH[:, before:], unsqueeze_dim=2)
    blocks, whole = total // ratio, total - total % ratio
    pooled_nBH = key_nSH[:, :whole].unflatten(1, (blocks, ratio)).float().mean(2).to(key_nSH.dtype)
    cos_nBH, sin_nBH = cos_nSH[:, :whole:ratio], sin_nSH[:, :whole:ratio]
    key_nB1H = rotate(indexer.k_layernorm(pooled_nBH)[:, :, None], cos=cos_nBH, sin=sin_nBH, unsqueeze_dim=2)
    scores_nWNB = (q_nWNH.flatten(1, 2).float() @ key_nB1H[:, :, 0].float().mT).unflatten(1, (width, -1))
    scores_nWB = scores_nWNB.relu().sum(2) / math.sqrt(dim)
    seen_W1 = torch.arange(before + 1, total + 1, device=device)[:, None] // ratio
    complete_WB = torch.arange(blocks, device=device) < seen_W1
    chosen_nWB = complete_WB.expand(len(hidden_nWD), -1, -1).clone()
    # A CPU's topk chooses among equal scores by the number of all scores, so it gets exactly those of each query.
    # CUDA's takes the first of them.
    fewest = max(kept, (before + 1) // ratio - 1) + 1
    numbers = range(fewest, blocks + 1) if device.type == "cpu" else [blocks] * (blocks > kept)
    for number in numbers:
        first, stop = (max(n * ratio - 1 - before, 0) for n in (number, number + 1))
        queries = slice(first, stop) if device.type == "cpu" else slice(None)
        visible_nwB = scores_nWB[:, queries, :number].masked_fill(~complete_WB[queries, :number], -math.inf)
        best_nwK = visible_nwB.topk(kept, sorted=False).indices
        chosen_nWB[:, queries, :number] &= torch.zeros_like(visible_nwB, dtype=torch.bool).scatter(-1, best_nwK, True)
    selected_nWS = nn.functional.pad(chosen_nWB.repeat_interleave(ratio, -1), (0, total - whole))
    return (selected_nWS | (torch.arange(total, device=device) >= seen_W1 * ratio))[:, None]


def _causal_mask(attention: nn.Module, hidden_nWD: torch.Tensor, total: int) -> torch.Tensor:
    """Return the mask that transformers makes for the last W of S = `total` tokens of samples without padding, [n, 1,
    W, S], boolean or additive.

    The mask is never replaced by a flag, because the indexer reads from it which tokens a query sees.
    """
    padding, cache, every = None, None, hidden_nWD[:, :1].expand(-1, total, -1)
    mask = create_causal_mask(plain_config(attention), every, padding, cache, allow_is_causal_skip=False)
    assert isinstance(mask, torch.Tensor)
    return mask[:, :, -hidden_nWD.shape[1] :]
