"""Count the work of a pass: query-key pairs, from the arguments of attention kernels, and host-device syncs."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.attention.backends import PADDED_ON, padded_lengths
from vlmpack.layout import device as moving
from vlmpack.layout.row import pack
from vlmpack.probing.forward_passes import PackedPass, ProbedModel
from vlmpack.probing.reference import ProbeSetup
from vlmpack.probing.report import Cause, Check
from vlmpack.testing.comparison import backward
from vlmpack.testing.samples import padded

# ---------------------------------------------------------------------- query-key pairs

_VARLEN = {"torch_attn::_varlen_attn": (3, 4), "flash_attn::_flash_attn_varlen_forward": (3, 4)}
"""Varlen kernels, and the argument positions of the cu_seqlens of queries and keys."""


@final
class PairCount(TorchFunctionMode):
    """Counts query-key pairs of the text model's attention, from the arguments of its kernels.

    This mode sees PyTorch's attention, and softmax over a score matrix that the model's code computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0
        """Pairs per head, over all calls. Causal attention counts both halves of the square."""
        self.dense = 0
        """The part of `computed` in dense score matrices, where a mask hides most pairs."""
        self.calls = 0
        """Number of calls of attention layers."""
        self.depth = 0
        """Number of attention layers that are running now."""

    @property
    def per_layer(self) -> int | None:
        """Pairs that one layer computes; None: no known kernel ran."""
        return self.computed // self.calls if self.calls and self.computed else None

    def enter(self, *_: Any) -> None:
        self.depth += 1
        self.calls += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth and func is F.scaled_dot_product_attention:
            query, key = args[0], args[1]
            self.computed += query.shape[0] * query.shape[-2] * key.shape[-2]
        elif self.depth and func in (F.softmax, torch.softmax, torch.Tensor.softmax):
            *batch, _, queries, keys = args[0].shape
            pairs = (batch[0] if batch else 1) * queries * keys
            self.computed, self.dense = self.computed + pairs, self.dense + pairs
        return func(*args, **(kwargs or {}))


@final
class _VarlenPairs(TorchDispatchMode):
    """Counts pairs in varlen kernels, too."""

    def __init__(self, count: PairCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._count.depth and (places := _VARLEN.get(func._schema.name)):
            queries, keys = (args[i].diff().long() for i in places)
            self._count.computed += int((queries * keys).sum())
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_pairs(attention: Iterable[nn.Module]) -> Iterator[PairCount]:
    """Count query-key pairs while these attention layers run, in forward passes only."""
    with ExitStack() as stack, PairCount() as count, _VarlenPairs(count):
        for layer in attention:
            stack.callback(layer.register_forward_pre_hook(count.enter).remove)
            stack.callback(layer.register_forward_hook(count.leave, always_call=True).remove)
        yield count


# ---------------------------------------------------------------------- host-device syncs

PACKAGE, TORCH = Path(__file__).parent.parent, str(Path(torch.__file__).parent)
PASSED_OVER = {__file__, moving.__file__, warnings.__file__}
"""Files whose lines do not count as the cause of a sync."""


def line_outside_torch() -> FrameSummary:
    """Find the innermost line of the stack outside PyTorch; in a backward pass, the one that called `backward`."""
    lines = traceback.extract_stack()
    others = [x for x in lines if not x.filename.startswith((TORCH, "<")) and x.filename not in PASSED_OVER]
    return others[-1] if others else FrameSummary("PyTorch itself", 0, "")


@contextmanager
def recorded_syncs() -> Iterator[list[FrameSummary]]:
    """Record the lines that make the host wait for the device in a `with` block on CUDA, as PyTorch reports them."""
    lines: list[FrameSummary] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines.append(line_outside_torch())

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # is called during the operation, so the stack contains its line
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(before)


# ---------------------------------------------------------------------- checks


def count_pairs(forward: Callable[[], object], probed: ProbedModel) -> PairCount:
    """Count the query-key pairs that the text model computes in a pass."""
    layers = probed.family.language_model(probed.core).get_submodule("layers").children()
    attention = [part for layer in layers for name, part in layer.named_children() if name == "self_attn"]
    with torch.no_grad(), counted_pairs(attention) as pairs:
        forward()
    return pairs


def check_pairs(setup: ProbeSetup, packed: PackedPass) -> list[Check]:
    """Check that a layer computes no more query-key pairs than those of each sample with itself.

    Layers with windows or chunks, and ranks that share a row, compute fewer. A leak of fewer pairs is impossible, and
    too few of them would show in the logits.
    """
    probed, pairs = setup.probed, count_pairs(lambda: packed(setup.samples), setup.probed)
    row, tree = packed.computed(setup.samples), packed.row(setup.samples).tree
    # queries and keys of each segment, padding after the samples included; a node's queries get all keys on its path
    calls = [np.asarray([row.lengths] * 2 if tree is None else [tree.lengths, tree.keys.lengths]).T]
    if (spans := probed.family.bidirectional_tokens(probed.config)) is not None:
        # a second call: queries of spans, all keys up to their ends
        types = [probed.family.media_types(sample["input_ids"], probed.config) for sample in setup.samples]
        runs = [run for pair in zip(setup.samples, types, strict=True) for run in spans.of_sample(*pair)]
        calls.append(np.asarray([(stop - start, stop) for start, stop in runs]).reshape(-1, 2))
    if probed.device.type in PADDED_ON:  # PyTorch's own attention, where it serves
        calls = [padded_lengths(call) for call in calls]
    allowed = sum(int(call.prod(1).sum()) for call in calls)
    check = Check(part="work", name="attended pairs", finding="ok", value=pairs.per_layer, allowed=allowed)
    if check.value is None:
        return [replace(check, finding="not counted", detail="no known kernel ran")]
    if probed.family.has("per_sample"):
        return [replace(check, finding="not counted", detail="sparse attention pads samples of similar lengths")]
    if check.value <= allowed:
        return [check]
    if pairs.dense:
        detail = f"a dense mask: {check.value} pairs are computed, {allowed} are of the same sample"
        return [replace(check, finding="not counted", detail=detail)]
    detail = f"a layer computes {check.value} pairs, the sum of length² is {allowed}"
    return [replace(check, finding="differs", cause="mask", detail=detail)]


CALLING = (PACKAGE / "probing", PACKAGE / "testing")
"""Code that calls `backward`. Operations of the backward pass have this call as their innermost line, so syncs in this
code are not counted."""


def package_syncs(recorded: Iterable[FrameSummary]) -> list[str]:
    """Name the files of the syncs in vlmpack's code."""
    files = [Path(line.filename) for line in recorded]
    own = [file for file in files if file.is_relative_to(PACKAGE) and not any(map(file.is_relative_to, CALLING))]
    return [str(file.relative_to(PACKAGE)) for file in own]


def check_syncs(setup: ProbeSetup, packed: PackedPass) -> list[Check]:
    """Count the host-device syncs of a step on CUDA in vlmpack's code."""
    check = Check(part="work", name="host-device syncs", finding="not counted")
    if setup.probed.device.type != "cuda":
        return [check]
    inputs = packed.inputs(setup.samples)

    def step() -> None:
        backward(packed.step(inputs).loss)
        setup.probed.model.zero_grad(set_to_none=True)

    step()  # the first step may fill caches of tensors
    with recorded_syncs() as recorded:
        step()
    syncs = package_syncs(recorded)
    others = len(recorded) - len(syncs)
    of_model = f"the model's code syncs {others} times" if others else "none in the model's code either"
    detail = f"{', '.join(sorted({*syncs}))}; {of_model}" if syncs else of_model
    finding = "syncs" if syncs else "ok"
    return [replace(check, finding=finding, value=len(syncs), allowed=0, detail=detail)]


def check_sharing(setup: ProbeSetup, packed: PackedPass) -> list[Check]:
    """Check that no more tokens and patches are computed than the distinct pieces of samples with shared prefixes have.

    Fewer are right too: different pieces may begin with the same words.
    """
    if (branches := setup.branches) is None:
        return []
    paths = {path[:stop] for path in branches.paths for stop in range(1, len(path) + 1)}
    with torch.no_grad():
        work = packed.step(packed.inputs(setup.samples)).work
        apart = packed.step(pack(padded([branches.pieces[path[-1]] for path in paths]))).work
    counts: list[tuple[str, int, int, Cause]] = [
        ("tokens", work.physical_tokens, apart.physical_tokens, "packing"),
        ("patches", work.vision_patches, apart.vision_patches, "vision"),
    ]
    detail = "{} {} are computed, and the samples' distinct pieces have {}"
    return [
        Check.measured("work", name, value, allowed, detail.format(value, name, allowed), cause=cause)
        for name, value, allowed, cause in counts
    ]


WORK_CHECKS = {"attended pairs": check_pairs, "host-device syncs": check_syncs, "shared pieces": check_sharing}
"""The checks of work, by name."""
