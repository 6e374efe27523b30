"""How stored rows are laid out when they are read: as long as they are, or all of one size.

    pad_to_max_length    every row is as wide as the capacity
    pad_cu_seqlens       every row has as many boundaries: the last one is repeated
    pad_seq_to_mult      samples start at multiples of it; decided when packing, because the plan has to count it

Names and rules are those of Megatron-Bridge's offline packing. Its real lengths end before a final end-of-text token;
here they are stored, so that a token that is learnt counts whatever its id is.
"""

from __future__ import annotations

from dataclasses import replace

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule
from vlmpack.store.manifest import Manifest


def slot_rule(
    manifest: Manifest, *, pad_to_max_length: bool, pad_cu_seqlens: bool, pad_seq_to_mult: int | None
) -> SlotRule:
    """The rule by which samples lie in the rows.

    Raises:
        ConfigError: the settings contradict each other, or what the rows were planned for.
    """
    slots = SlotRule(**manifest.settings["slots"])
    if pad_seq_to_mult is not None:
        slots = _with_multiple(slots, pad_seq_to_mult)
    if pad_cu_seqlens and not pad_to_max_length:
        raise ConfigError(
            "pad_cu_seqlens=True makes boundaries of a fixed number, for CUDA graphs, which need rows of a fixed width "
            "too: set pad_to_max_length=True"
        )
    if pad_to_max_length and manifest.sizes.longest_row > manifest.capacity:
        raise ConfigError(
            f"pad_to_max_length=True pads rows to {manifest.capacity} tokens, but the longest has "
            f"{manifest.sizes.longest_row}: a sample got a row of its own (oversize='own_row'). Pack again with "
            "oversize='drop', or with a larger capacity"
        )
    return replace(
        slots,
        pad_to=manifest.capacity if pad_to_max_length else None,
        max_segments=manifest.sizes.most_segments if pad_cu_seqlens else None,
    )


def _with_multiple(slots: SlotRule, multiple: int) -> SlotRule:
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ConfigError(f"pad_seq_to_mult must be a whole number of at least 1, got {multiple!r}")
    if slots.multiple % multiple:
        raise ConfigError(
            f"pad_seq_to_mult={multiple}, but the rows were planned for samples rounded up to {slots.multiple}: with "
            f"another multiple they may not fit. Pack again with SlotRule(multiple={multiple}) (vlmpack pack "
            f"--pad-seq-to-mult {multiple}), or give a divisor of {slots.multiple}"
        )
    return replace(slots, multiple=multiple)
