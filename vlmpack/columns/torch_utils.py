"""Packed rows as tensors, under SeqPacker's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from vlmpack.columns.fill import RowFormat, fill_rows
from vlmpack.columns.learnt import read_batch
from vlmpack.columns.packer import Packer
from vlmpack.columns.result import Pack, PackResult
from vlmpack.columns.row_collator import PositionRows, joined_row, model_inputs
from vlmpack.columns.samples import IGNORE, Oversize, Samples
from vlmpack.errors import ConfigError
from vlmpack.layout import PackedRow
from vlmpack.plan import Plan


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """G rows of one width W as tensors. `model(**batch.to_hf())` trains them exactly, with packing enabled, or without
    it if all layers of the model are attention."""

    input_ids: torch.Tensor
    """[G, W] int64."""
    position_ids: torch.Tensor
    """[G, W] int64: 0, 1, 2, ... in every sample; 0 on padding."""
    labels: torch.Tensor
    """[G, W] int64, not shifted: models shift them. Each sample's first one is masked."""
    cu_seqlens: list[torch.Tensor]
    """Of each row, int32 [its samples + 1]: cumulative tokens."""
    max_seqlen: int
    """Tokens of the longest sample."""
    packs: tuple[Pack, ...]
    """The samples of each row, on the host; with `oversize="split"` their numbers count pieces."""
    label_padding_value: int = IGNORE
    """Of labels where nothing is to be learnt."""
    learnt: torch.Tensor | None = None
    """bool [G, W]: where there is a label; None: where it is not `label_padding_value`, which is then below 0 and no
    label of a token."""

    @property
    def attention_mask(self) -> torch.Tensor:
        """float32 [G, 1, W, W], made anew at each call: 0 where a token sees another, else the smallest number.

        With it an unmodified model keeps samples apart on eager and sdpa. It takes 4 G W² bytes; `to_hf()` needs none.
        """
        width, device = self.input_ids.shape[1], self.input_ids.device
        place = torch.arange(width, device=device)
        first = place - self.position_ids  # where in the row each token's sample starts; a token of padding is its own
        sees = (first[:, :, None] == first[:, None, :]) & (place[:, None] >= place)
        nothing = torch.finfo(torch.float32).min
        return torch.zeros(sees.shape, device=device).masked_fill_(~sees, nothing)[:, None]

    @property
    def shift_labels(self) -> torch.Tensor:
        """[G, W] int64: the target of each token, for a loss that does not shift: what SeqPacker calls `labels`."""
        shifted = self.labels.roll(-1, dims=-1)
        shifted[:, -1] = self.label_padding_value
        return shifted

    def to_row(self, *, position_rows: PositionRows = 1) -> PackedRow:
        """All samples in one row [1, T] without padding, on the host.

        Raises:
            ConfigError: there is no sample.
        """
        if not self.packs:
            raise ConfigError(
                f"the batch holds no sample: each exceeds the capacity of {self.input_ids.shape[1]} tokens, and "
                "oversize='drop' left it out; skip batches without packs, raise the capacity, or choose "
                "oversize='truncate' or 'split'"
            )
        used = [pack.used for pack in self.packs]
        learnt = self.labels != self.label_padding_value if self.learnt is None else self.learnt
        labels = self.labels.masked_fill(~learnt, IGNORE)

        def joined(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[:n] for row, n in zip(rows.cpu(), used, strict=True)])

        return joined_row(
            joined(self.input_ids),
            joined(labels),
            lengths=[n for pack in self.packs for n in pack.lengths],
            sample_ids=tuple(i for pack in self.packs for i in pack.sequence_ids),
            position_rows=position_rows,
        )

    def to_hf(self, *, position_rows: PositionRows = 1) -> dict[str, Any]:
        """All samples as the inputs of a model, on the host: what `RowCollator` gives."""
        return model_inputs(self.to_row(position_rows=position_rows))


def pack_result_to_tensors(
    result: PackResult | Plan,
    token_ids: Any,
    *,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    device: torch.device | str | None = None,
    labels: Any = None,
    loss_mask: Any = None,
) -> PackedBatch:
    """The rows of a result, or of any `Plan`, as tensors padded to the capacity.

    Args:
        result: which samples share a row.
        token_ids: one list, vector or tensor for each sample, or a column of a `datasets.Dataset`.
        padding_value: of `input_ids` on padding.
        label_padding_value: of `labels` where nothing is to be learnt.
        device: where the tensors go; None: they stay on the host.
        labels: like `token_ids`: labels of each token, not shifted, -100 where nothing is to be learnt; None: the ids.
        loss_mask: like `token_ids`: 1 for tokens to be learnt, 0 for others; None: all. Not beside labels.

    Raises:
        SampleError: a sample has another length than was packed, or is no vector of token ids; names it.
        ConfigError: there are more or fewer samples.
    """
    plan = result.plan if isinstance(result, PackResult) else result
    samples = Samples.read(token_ids, labels=labels, loss_mask=loss_mask)
    samples.check_lengths(plan.lengths)
    return _tensors(
        samples, plan, RowFormat(padding_value=padding_value, label_padding_value=label_padding_value), device
    )


def packed_collate_fn(
    capacity: int,
    *,
    strategy: str = "obfd",
    seed: int | None = None,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    oversize: Oversize = "error",
) -> PackedCollate:
    """A collate function for a DataLoader: packs the samples of a batch into rows.

    Args:
        capacity: tokens that a row may hold.
        strategy: SeqPacker's name or ours, see `Packer`.
        seed: of the shuffle, see `Packer`.
        padding_value: of `input_ids` on padding.
        label_padding_value: of `labels` where nothing is to be learnt.
        oversize: samples above the capacity: refuse them, leave them out, keep their first tokens, or cut them into
            samples of at most that length.
    """
    form = RowFormat(padding_value=padding_value, label_padding_value=label_padding_value)
    return PackedCollate(packer=Packer(capacity, strategy, seed), form=form, oversize=oversize)


@final
@dataclass(frozen=True, kw_only=True)
class PackedCollate:
    """What `packed_collate_fn` returns. It can be pickled, so workers may be spawned."""

    packer: Packer
    """How samples are placed."""
    form: RowFormat
    """Padding."""
    oversize: Oversize = "error"
    """What becomes of samples above the capacity."""

    def __call__(self, batch: Sequence[Any]) -> PackedBatch:
        """Pack samples: token ids (list, vector or tensor), or dictionaries with `input_ids`.

        Beside them may stand `attention_mask`, which tells padding (on the right), and one of `labels`, `loss_mask`,
        `completion_mask` and `assistant_masks`, not shifted, which tells what is learnt; without them all of it is.

        Raises:
            SampleError: a sample that is no vector of token ids, is empty, too long, or has columns that do not fit
                together; names it.
            ConfigError: no samples, or labels or a mask for some of them only.
        """
        samples = read_batch(batch).fitted(self.packer.capacity, self.oversize)
        return _tensors(samples, self.packer.plan(samples.lengths, drop_oversize=self.oversize == "drop"), self.form)


def _tensors(samples: Samples, plan: Plan, form: RowFormat, device: torch.device | str | None = None) -> PackedBatch:
    value = form.label_padding_value
    may_be_label = value >= 0  # then only what stands beside the labels can tell padding from a token of that id
    filled = fill_rows(
        samples, plan, replace(form, label_padding_value=IGNORE) if may_be_label else form, dtype=np.int64
    )
    packs = tuple(PackResult(plan=plan).packs)
    width = plan.capacity

    def tensor(column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).view(len(plan), width).to(device)

    labels = tensor(filled.labels)
    learnt = labels != IGNORE if may_be_label else None
    return PackedBatch(
        input_ids=tensor(filled.input_ids),
        position_ids=tensor(filled.position_ids),
        labels=labels if learnt is None else labels.masked_fill(~learnt, value),
        cu_seqlens=[torch.tensor([0, *np.cumsum(pack.lengths)], dtype=torch.int32, device=device) for pack in packs],
        max_seqlen=int(plan.lengths[plan.sample_ids].max(initial=0)),
        packs=packs,
        label_padding_value=value,
        learnt=learnt,
    )
