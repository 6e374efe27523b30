"""PackedBatch: packed rows as tensors, under SeqPacker's names. Importing it loads no torch: its methods do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from vlmpack.errors import ConfigError
from vlmpack.text.samples import IGNORE

if TYPE_CHECKING:
    import torch

    from vlmpack.layout.row import PackedRow
    from vlmpack.text.row_collator import PositionRows
    from vlmpack.text.seqpacker import Pack


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

        The block-diagonal causal mask: with it an unmodified model keeps samples apart on eager and sdpa. It takes
        4 G W² bytes; `to_hf()` needs none.
        """
        import torch

        place = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        first = place - self.position_ids  # where in the row each token's sample starts; of padding, itself
        sees = (first[:, :, None] == first[:, None, :]) & (place[:, None] >= place)
        nothing = torch.finfo(torch.float32).min
        return torch.zeros(sees.shape, device=place.device).masked_fill_(~sees, nothing)[:, None]

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
        import torch

        from vlmpack.text.row_collator import joined_row

        if not self.packs:
            raise ConfigError(
                f"the batch holds no sample: each exceeds the capacity of {self.input_ids.shape[1]} tokens, and "
                "oversize='drop' left it out; skip batches without packs, raise the capacity, or choose "
                "oversize='truncate' or 'split'"
            )
        used = [pack.used for pack in self.packs]
        learnt = self.labels != self.label_padding_value if self.learnt is None else self.learnt
        labels = self.labels.masked_fill(~learnt, IGNORE)
        columns = (self.input_ids.cpu(), labels.cpu())
        return joined_row(
            *(torch.cat([row[:n] for row, n in zip(rows, used, strict=True)]) for rows in columns),
            lengths=[n for pack in self.packs for n in pack.lengths],
            sample_ids=tuple(i for pack in self.packs for i in pack.sequence_ids),
            position_rows=position_rows,
        )

    def to_hf(self, *, position_rows: PositionRows = 1) -> dict[str, Any]:
        """All samples as the inputs of a model, on the host: what `RowCollator` gives."""
        from vlmpack.text.row_collator import model_inputs

        return model_inputs(self.to_row(position_rows=position_rows))
