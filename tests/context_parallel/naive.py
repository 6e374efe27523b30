"""The same as plain loops over tokens: slow, obvious, and the truth for tests."""

from __future__ import annotations

from collections.abc import Sequence


def naive_mirrored(slots: Sequence[int], ranks: int) -> list[int]:
    """The rank of each token of a row of these slots."""
    out = []
    for slot in slots:
        for at in range(slot):
            chunk = at * 2 * ranks // slot
            out.append(min(chunk, 2 * ranks - 1 - chunk))
    return out


def naive_contiguous(total: int, ranks: int) -> list[int]:
    """The rank of each token of a row of `total` tokens."""
    return [at * ranks // total for at in range(total)]


def naive_halo(lengths: Sequence[int], slots: Sequence[int], owner: Sequence[int], *, depth: int) -> list[set[int]]:
    """The tokens that each rank needs to roll its own by 1 to `depth` tokens, and does not hold."""
    needed: list[set[int]] = [set() for _ in range(max(owner) + 1)]
    start = 0
    for length, slot in zip(lengths, slots, strict=True):
        for token in range(start, start + length):
            for further in range(token + 1, min(token + depth + 1, start + length)):
                if owner[further] != owner[token]:
                    needed[owner[token]].add(further)
        start += slot
    return needed
