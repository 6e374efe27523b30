"""Which datums share a row: within two budgets, rows of like size, and what datums begin with counted once.

    datums    P a   P b   P c   d        P: a prompt with an image, a to c: its completions
    row       P a b c | d                tokens that are computed; the budget limits these

A prefix tree lies within one row of one model. Which datums have it in common depends on their contents alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from vlmpack.layout.batch import IMAGE, TEXT, HostMetadata
from vlmpack.layout.media_units import content_numbers
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.sharing import find_prefix_tree
from vlmpack.plan.lengths import Budget
from vlmpack.plan.planner import plan_bins
from vlmpack.plan.prefix_groups import ALONE, PrefixGroups
from vlmpack.service.datums import EncodedSequence

SLACK = (1.01, 1.03, 1.1, 1.2, 1.4)
"""Budgets that are tried for rows of like size, as parts of their mean."""


@final
@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Budgets of a row, and how it is computed. A datum beyond a budget has a row of its own."""

    tokens: int
    """Most tokens that are computed."""
    patches: int
    """Most patches of images."""
    recomputes: bool = False
    """True if layers are computed again in the backward pass (gradient checkpointing)."""
    min_shared: int | None = None
    """Tokens from which a beginning that datums have in common is computed once; None: each computes its own."""
    image_token: int | None = None
    """Placeholder of images; None: the model takes none."""


def plan_rows(sequences: Sequence[EncodedSequence], settings: RowSettings, *, ranks: int = 1) -> list[list[int]]:
    """Numbers of the sequences that share each row, in the order of the rows; inside a row they keep their order.

    The rows are as few as the budgets allow, rounded up to a multiple of the ranks, and of like size: ranks wait for
    the largest one, and a row that is nearly empty costs more than it computes.

    Args:
        sequences: of one model.
        settings: the budgets.
        ranks: that compute rows at the same time.
    """
    lengths = np.array([sequence.length for sequence in sequences])
    patches = np.array([sequence.patches for sequence in sequences])
    tree = None if settings.min_shared is None else _tree_of(sequences, settings.min_shared, settings.image_token)
    groups = None if tree is None else _groups_of(tree)
    shared = None if groups is None else _patches_of(sequences, groups, settings.image_token)
    limits = [Budget(name="patches", costs=patches, limit=settings.patches, shared=shared)] if patches.any() else []

    def bins(tokens: int) -> list[list[int]]:
        plan = plan_bins(lengths, tokens, budgets=limits, oversize="own_row", groups=groups)
        return [sorted(int(at) for at in row) for row in plan]

    rows = bins(settings.tokens)
    count = ranks * math.ceil(len(rows) / ranks)
    if count == 1:
        return rows
    total = lengths.sum() if tree is None else tree.num_tokens
    for slack in SLACK:
        tokens = max(int(lengths.max()), math.ceil(slack * total / count))
        if tokens < settings.tokens and len(even := bins(tokens)) <= count:
            return even
    return rows


def _tree_of(sequences: Sequence[EncodedSequence], min_shared: int, image_token: int | None) -> PrefixTree | None:
    """The tree of all sequences, as one row would have it; None: they share nothing."""
    ids = torch.from_numpy(np.concatenate([sequence.input_ids for sequence in sequences]))[None]
    images = [image for sequence in sequences for image in sequence.images]
    lengths = tuple(sequence.length for sequence in sequences)
    row = PackedRow(
        input_ids=ids,
        segments=Segments.from_lengths(lengths),
        mm_token_type_ids=None if image_token is None else torch.where(ids == image_token, IMAGE, TEXT),
        metadata=HostMetadata(
            lengths=lengths,
            image_grids=tuple(image.grid for image in images),
            images_per_sample=tuple(len(sequence.images) for sequence in sequences) if images else (),
        ),
    )
    numbers = content_numbers([image.pixel_values for image in images])
    return find_prefix_tree(row, images=numbers, min_shared=min_shared)


def _groups_of(tree: PrefixTree) -> PrefixGroups:
    """Nodes of a tree that several samples have in common, as groups of samples."""
    samples_of = np.zeros(len(tree.parents), np.int64)
    for leaf in tree.leaves:
        samples_of[list(tree.path(leaf))] += 1
    number_of = np.where(samples_of > 1, np.cumsum(samples_of > 1) - 1, ALONE)
    shared = np.flatnonzero(samples_of > 1)
    inner = [max((node for node in tree.path(leaf) if samples_of[node] > 1), default=ALONE) for leaf in tree.leaves]
    parents = np.array(tree.parents)[shared]
    return PrefixGroups(
        of_samples=np.array([ALONE if node == ALONE else number_of[node] for node in inner]),
        parents=np.where(parents == ALONE, ALONE, number_of[parents]),
        tokens=np.array([sum(tree.lengths[on] for on in tree.path(int(node))) for node in shared], np.int64),
    )


def _patches_of(sequences: Sequence[EncodedSequence], groups: PrefixGroups, image_token: int | None) -> np.ndarray:
    """int64 [K]: patches of the images in each prefix, which holds them whole."""
    found = np.zeros(len(groups), np.int64)
    for sequence, innermost in zip(sequences, groups.of_samples, strict=True):
        if sequence.images:
            is_image = sequence.input_ids == image_token
            patches_a_token = sequence.patches // np.count_nonzero(is_image)
            group = int(innermost)
            while group != ALONE:
                found[group] = patches_a_token * np.count_nonzero(is_image[: groups.tokens[group]])
                group = int(groups.parents[group])
    return found
