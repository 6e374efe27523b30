"""The circumstances in which samples are packed: five of them, in which any two choices that a user has meet.

    name      computed by  given                slots       mode   precision  divided by      head       host metadata
    gaps      PackedStep   a packed row         with gaps   eval   own        its targets     at once    yes
    row       the model    a packed row         no gaps     train  own        another tensor  in pieces  yes
    padded    PackedStep   a right-padded one   with gaps   train  own        another number  at once    yes
    left      the model    a left-padded one    the user's  eval   own        its targets     in pieces  no
    autocast  the model    a packed row         no gaps     train  bfloat16   its targets     at once    no

`row` is what a training loop runs by default, and `autocast` what it runs with `bf16=True`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from vlmpack.layout import SlotRule
from vlmpack.model import StepConfig
from vlmpack.proof.samples import ProbeSample

TIGHT = SlotRule()
"""No gaps."""


@final
@dataclass(frozen=True, kw_only=True)
class Circumstance:
    """How samples are packed and computed."""

    name: str
    """Short, as checks have it before their colon."""
    title: str
    """For people."""
    by_model: bool
    """Call the model with a dictionary, as trainers do; otherwise `PackedStep`."""
    padded: Literal["", "left", "right"] = ""
    """The side on which a batch is padded that the step packs itself; "": a packed row."""
    slots: Literal["none", "gaps", "own"] = "none"
    """Slots without gaps, with gaps, or those of the user's settings."""
    train: bool = False
    """Train mode, with its graph for the backward pass; dropout modules stay in eval mode."""
    autocast: bool = False
    """Mixed precision."""
    counted: bool = False
    """Divide by a `num_items_in_batch` that is not the number of the batch's own targets."""
    chunked: bool = False
    """Send the labelled positions through the head in several chunks."""
    metadata: bool = True
    """Hand over the host metadata."""

    def settings(self, own: StepConfig, samples: Sequence[ProbeSample]) -> StepConfig:
        """The settings of the step; `own`: the user's, whose fixed sizes were made for other rows."""
        rules = {
            "none": TIGHT,
            "gaps": gappy(samples),
            "own": replace(own.slots, pad_to=None, max_segments=None),
        }
        targets = sum(sample.num_targets for sample in samples)
        chunk = max(targets * 2 // 5, 1) if self.chunked else own.head_chunk
        return replace(own, slots=rules[self.slots], head_chunk=chunk)

    def items(self, samples: Sequence[ProbeSample]) -> int | None:
        """What the loss is divided by; None: the samples' own targets."""
        return 2 * sum(sample.num_targets for sample in samples) + 3 if self.counted else None


GAPS = Circumstance(name="gaps", title="a packed row with gaps", by_model=False, slots="gaps")
ROW = Circumstance(name="row", title="a packed row, train mode", by_model=True, train=True, counted=True, chunked=True)
PADDED = Circumstance(
    name="padded",
    title="a right-padded batch, train mode",
    by_model=False,
    padded="right",
    slots="gaps",
    train=True,
    counted=True,
)
LEFT = Circumstance(
    name="left", title="a left-padded batch", by_model=True, padded="left", slots="own", chunked=True, metadata=False
)
AUTOCAST = Circumstance(
    name="autocast", title="a packed row, autocast", by_model=True, train=True, autocast=True, metadata=False
)
CIRCUMSTANCES = (GAPS, ROW, PADDED, LEFT, AUTOCAST)


def gappy(samples: Sequence[ProbeSample]) -> SlotRule:
    """Slots that leave room behind a sample at least, and at the end of the row."""
    lengths = [len(sample.input_ids) for sample in samples]
    multiple = next(m for m in (8, 12, 20, 2 * max(lengths)) if any(n % m for n in lengths))
    return SlotRule(multiple=multiple, row_multiple=4 * multiple)


@contextmanager
def computed_in(model: nn.Module, circumstance: Circumstance, autocast: torch.dtype) -> Iterator[None]:
    """Set mode, graph and precision. Dropout stays off: what is drawn for a row is not what is drawn for a sample.

    Args:
        model: in eval mode, and again afterwards.
        circumstance: the circumstance.
        autocast: element type of mixed precision, for circumstances that have it.
    """
    device = next(model.parameters()).device.type
    model.train(circumstance.train)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    try:
        with (
            torch.set_grad_enabled(circumstance.train),
            torch.autocast(device, dtype=autocast, enabled=circumstance.autocast),
        ):
            yield
    finally:
        model.eval()
