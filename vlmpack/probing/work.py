"""Count the work of a pass: query-key pairs, from the arguments of attention kernels, and host-device syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.attention.backends import PADDED_ON, padded_lengths
from vlmpack.context_parallel.attention import GatheredKV
from vlmpack.context_parallel.partition import Partition
from vlmpack.layout.row import pack
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.attention import bidirectional_spans, layer_masks
from vlmpack.model.mechanisms.recurrent_rows import Buckets, call_cost
from vlmpack.probing.forward_passes import PackedPass, ProbedModel
from vlmpack.probing.host_syncs import HostSync, recorded_syncs
from vlmpack.probing.reference import ProbeSetup
from vlmpack.probing.report import Cause, Check
from vlmpack.testing.comparison import backward
from vlmpack.testing.samples import padded

# ---------------------------------------------------------------------- query-key pairs

_VARLEN = {"torch_attn::_varlen_attn": (3, 4), "flash_attn::_flash_attn_varlen_forward": (3, 4)}
"""Varlen kernels, and the argument positions of the cu_seqlens of queries and keys."""


@final
@dataclass(kw_only=True)
class PairCount:
    """Query-key pairs of the text model's attention, from the arguments of its kernels."""

    computed: int = 0
    """Pairs per head, over all calls. Causal attention counts both halves of the square."""
    dense: int = 0
    """The part of `computed` in dense score matrices, where a mask hides most pairs."""
    calls: int = 0
    """Number of calls of attention layers."""
    depth: int = 0
    """Number of attention layers that are running now."""

    @property
    def per_layer(self) -> int | None:
        """Pairs that one layer computes; None: no known kernel ran."""
        return self.computed // self.calls if self.calls and self.computed else None


@contextmanager
def counted_pairs(attention: Iterable[nn.Module]) -> Iterator[PairCount]:
    """Count query-key pairs while these attention layers run, in forward passes only."""
    pairs = PairCount()

    def enter(*_: Any) -> None:
        pairs.depth += 1
        pairs.calls += 1

    def leave(*_: Any) -> None:
        pairs.depth -= 1

    with ExitStack() as stack:
        for layer in attention:
            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
        with _KernelPairs(pairs), _FunctionPairs(pairs):
            yield pairs


@final
class _FunctionPairs(TorchFunctionMode):
    """Counts pairs in PyTorch's attention, and in softmax over a score matrix that the model's code computed."""

    def __init__(self, pairs: PairCount) -> None:
        super().__init__()
        self._pairs = pairs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pairs.depth:
            if func is F.scaled_dot_product_attention:
                query, key = args[0], args[1]
                self._pairs.computed += query.shape[0] * query.shape[-2] * key.shape[-2]
            elif func in (F.softmax, torch.softmax, torch.Tensor.softmax):
                *batch, _, queries, keys = args[0].shape
                self._pairs.computed += (batch[0] if batch else 1) * queries * keys
                self._pairs.dense += (batch[0] if batch else 1) * queries * keys
        return func(*args, **(kwargs or {}))


@final
class _KernelPairs(TorchDispatchMode):
    """Counts pairs in varlen kernels."""

    def __init__(self, pairs: PairCount) -> None:
        super().__init__()
        self._pairs = pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pairs.depth and (places := _VARLEN.get(func._schema.name)):
            queries, keys = (args[i].diff().long() for i in places)
            self._pairs.computed += int((queries * keys).sum())
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- checks


def count_pairs(forward: Callable[[], object], probed: ProbedModel) -> tuple[int | None, bool]:
    """Return (query-key pairs that one layer of the text model computes, whether in a dense matrix); None: no known
    kernel ran."""
    layers = probed.family.language_model(probed.core).get_submodule("layers").children()
    attention = [part for layer in layers for name, part in layer.named_children() if name == "self_attn"]
    with torch.no_grad(), counted_pairs(attention) as pairs:
        forward()
    return pairs.per_layer, pairs.dense > 0


def check_pairs(setup: ProbeSetup, packed: PackedPass) -> Check:
    """Compare the query-key pairs that a layer computes with those that the samples need."""
    probed, parts = setup.probed, ModelParts(family=setup.probed.family, core=setup.probed.core)
    computed, dense = count_pairs(lambda: packed(setup.samples), probed)
    row, tree = packed.computed(setup.samples), packed.row(setup.samples).tree
    # queries and keys of each segment, padding after the samples included; a node's queries get all keys on its path
    calls = [np.asarray([row.lengths] * 2 if tree is None else [tree.lengths, tree.keys.lengths]).T]
    needed = int(calls[0].prod(1).sum())
    if probed.family.has("per_sample"):  # samples, or nodes, of similar length are padded
        cost, nodes = call_cost(next(probed.core.parameters()).device), row if tree is None else tree.nodes
        buckets = Buckets.cheapest(nodes, call_cost=cost, tree=tree, by_parent=True).buckets
        before = {-1: 0} if tree is None else {-1: 0, **dict(enumerate(tree.keys.lengths))}
        parents = (-1,) * row.num_samples if tree is None else tree.parents
        pairs = [(x.width, x.tokens * (before[parents[x.members[0]]] + x.width)) for x in buckets]
        needed, text = sum(each for _, each in pairs), probed.family.text_config(probed.config)
        groups = (
            text.num_attention_heads // text.num_key_value_heads
        )  # transformers takes those of one query for queries
        folded = needed + (groups - 1) * sum(each for width, each in pairs if width == 1)
        needed = folded if computed == folded else needed
    if packed.parallel is not None and packed.context_ranks > 1 and computed != needed:  # they do not divide the heads
        partition = Partition(segments=row, ranks=packed.context_ranks, layout="contiguous")
        keys = GatheredKV(partition, packed.parallel.collectives)
        needed = sum(n * k for n, k in zip(keys.queries.lengths, keys.keys.lengths, strict=True))
    if (spans := probed.family.bidirectional_tokens(probed.config)) is not None:
        # a second call: queries of spans, all keys up to their ends
        types = [probed.family.media_types(sample["input_ids"], probed.config) for sample in setup.samples]
        runs = [run for pair in zip(setup.samples, types, strict=True) for run in spans.of_sample(*pair)]
        calls.append(np.asarray([(stop - start, stop) for start, stop in runs]).reshape(-1, 2))
        needed += int(calls[1].prod(1).sum())
    check = Check(part="work", name="attended pairs", finding="ok", value=computed, allowed=needed)
    if computed is None:
        return replace(check, finding="not counted", detail="no known kernel ran")
    padded = needed
    if next(probed.core.parameters()).device.type in PADDED_ON:  # PyTorch's own attention, where it serves
        padded = max(needed, sum(int(padded_lengths(call).prod(1).sum()) for call in calls))
    if computed in (needed, padded):
        return check
    if _is_local(parts) and computed < padded:
        return replace(check, detail=f"{padded - computed} pairs less than without windows and chunks")
    if dense and computed > needed:
        detail = f"a dense mask: {computed} pairs are computed, {needed} are of the same sample"
        return replace(check, finding="not counted", detail=detail)
    detail = f"a layer computes {computed} pairs, the sum of length² is {needed}"
    return replace(check, finding="differs", cause="mask", detail=detail)


def _is_local(parts: ModelParts) -> bool:
    return not parts.family.has("per_sample") and any(mask.is_local for mask in layer_masks(parts).values())


PACKAGE = Path(__file__).parent.parent
CALLING = (PACKAGE / "probing", PACKAGE / "testing")
"""Code that calls `backward`. Operations of the backward pass have this call as their innermost line, so syncs in this
code are not counted."""


def package_syncs(recorded: Iterable[HostSync]) -> list[str]:
    """Describe the syncs in vlmpack's code: operation and file."""
    files = [(sync.operation, Path(sync.file)) for sync in recorded]
    return [
        f"{operation} in {file.relative_to(PACKAGE)}"
        for operation, file in files
        if file.is_relative_to(PACKAGE) and not any(map(file.is_relative_to, CALLING))
    ]


def check_syncs(setup: ProbeSetup, packed: PackedPass) -> Check:
    """Count the host-device syncs of a step in vlmpack's code; on a CPU, the syncs that an accelerator would need."""
    inputs = packed.inputs(setup.samples)

    def step() -> None:
        backward(packed.step(inputs).loss)
        setup.probed.model.zero_grad(set_to_none=True)

    step()  # the first step may fill caches of tensors
    with recorded_syncs(setup.probed.device) as recorded:
        step()
    syncs = package_syncs(recorded)
    others = len(recorded) - len(syncs)
    of_model = f"the model's code syncs {others} times" if others else "none in the model's code either"
    detail = f"{', '.join(sorted({*syncs}))}; {of_model}" if syncs else of_model
    check = Check(part="work", name="host-device syncs", finding="ok", value=len(syncs), allowed=0, detail=detail)
    return replace(check, finding="syncs") if syncs else check


# ---------------------------------------------------------------------- shared prefixes


def tree_work(setup: ProbeSetup, packed: PackedPass) -> Iterator[Check]:
    """Compare the computed tokens, patches and pairs with those of the distinct pieces of the samples, and count syncs.

    Fewer are right too: different pieces may begin with the same words.
    """
    assert setup.branches is not None
    branches, probed = setup.branches, setup.probed
    parts = ModelParts(family=probed.family, core=probed.core)
    paths = {path[:stop] for path in branches.paths for stop in range(1, len(path) + 1)}
    lengths = {path: [len(branches.pieces[piece]["input_ids"]) for piece in path] for path in paths}
    with torch.no_grad():
        work = packed.step(packed.inputs(setup.samples)).work
        apart = packed.step(pack(padded([branches.pieces[path[-1]] for path in paths]))).work
    counts: dict[str, tuple[int, int, Cause]] = {
        "tokens": (work.physical_tokens, apart.physical_tokens, "packing"),
        "patches": (work.vision_patches, apart.vision_patches, "vision"),
    }
    if not (probed.family.has("per_sample") or _is_local(parts) or bidirectional_spans(parts)):
        causal = sum(of[-1] * sum(of) - of[-1] * (of[-1] - 1) // 2 for of in lengths.values())
        counts["pairs"] = work.attended_pairs, causal, "mask"
    for name, (value, allowed, cause) in counts.items():
        detail = f"{value} {name} are computed, and the samples' distinct pieces have {allowed}"
        yield Check.measured("work", f"tree: {name}", value, allowed, detail, cause=cause)
    for check in (check_pairs(setup, packed), check_syncs(setup, packed)):
        yield replace(check, name=f"tree: {check.name}")
