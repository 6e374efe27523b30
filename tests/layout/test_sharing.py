"""Sharing: what samples have in common is found by tokens and by the content of media, and nothing else is merged."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout.naive import naive_tree

from vlmpack.errors import LayoutError
from vlmpack.layout import (
    HostMetadata,
    Media,
    PackedRow,
    PrefixTree,
    Segments,
    SlotRule,
    media,
    share,
    sharing,
    unshare,
)
from vlmpack.layout.device import nothing_on_host
from vlmpack.layout.media import IMAGE, TEXT, VIDEO, Expected, MediaTable, Medium, content_numbers, place
from vlmpack.layout.row import shift_labels
from vlmpack.layout.sharing import find_prefix_tree

WORDS, PLACEHOLDER = 5, {IMAGE: 90, VIDEO: 91}
GRIDS = {IMAGE: [(1, 2, 4), (1, 4, 4)], VIDEO: [(2, 2, 2)]}
MERGED = 4
"""Patches of a token."""
WIDTH = 3
"""Values of a patch."""


class Item(NamedTuple):
    """A word, an image or a video of a sample."""

    kind: int
    word: int = 0
    content: int = 0
    """Of media with one grid: those of different content have the same tokens."""
    grid: int = 0
    time: int = 0
    """Of a video: the token written between its frames."""

    def ids(self) -> list[int]:
        if self.kind == TEXT:
            return [self.word]
        tokens = prod(GRIDS[self.kind][self.grid]) // MERGED
        ids = [PLACEHOLDER[self.kind]] * tokens
        return ids if self.kind == IMAGE else [*ids[:1], 80 + self.time, *ids[1:]]

    def symbols(self) -> list[Item]:
        """One for each token, equal only where content is."""
        return [Item(TEXT, word=word) if word not in PLACEHOLDER.values() else self for word in self.ids()]

    def types(self) -> list[int]:
        return [self.kind if word in PLACEHOLDER.values() else TEXT for word in self.ids()]

    def pixels(self) -> torch.Tensor:
        """[P, C]: different contents differ in one value."""
        values = torch.zeros(prod(GRIDS[self.kind][self.grid]), WIDTH)
        values[-1, -1] = self.content
        return values


WORD = st.integers(0, WORDS - 1).map(lambda word: Item(TEXT, word=word))
PICTURE = st.tuples(st.integers(0, 1), st.integers(0, 1)).map(lambda x: Item(IMAGE, content=x[0], grid=x[1]))
FILM = st.tuples(st.integers(0, 1), st.integers(0, 1)).map(lambda x: Item(VIDEO, content=x[0], time=x[1]))
Samples = list[list[Item]]
FEW = settings(max_examples=30)


@st.composite
def families_of_samples(draw: st.DrawFn) -> Samples:
    """Samples that go on where another one is cut, with media at every level."""
    samples: Samples = []
    for _ in range(draw(st.integers(2, 7))):
        before = draw(st.sampled_from(samples)) if samples and draw(st.integers(0, 3)) else []
        kept = before[: draw(st.integers(0, len(before)))]
        more = draw(st.lists(WORD | PICTURE | FILM, min_size=0 if kept else 1, max_size=5))
        samples.append(kept + more)
    return samples


def flat(sample: Sequence[Item], part: str) -> list:
    return [value for item in sample for value in getattr(item, part)()]


def row_of(samples: Samples) -> PackedRow:
    """The row of these samples, every token learnt."""
    ids = [flat(sample, "ids") for sample in samples]
    segments = Segments.from_lengths([len(sample) for sample in ids])
    input_ids = torch.tensor([[token for sample in ids for token in sample]])
    items = {kind: [item for sample in samples for item in sample if item.kind == kind] for kind in (IMAGE, VIDEO)}
    grids = {kind: [GRIDS[kind][item.grid] for item in of_kind] for kind, of_kind in items.items()}
    types = torch.tensor([[value for sample in samples for value in flat(sample, "types")]])
    expected = [
        Expected(
            medium=Medium(kind=kind, grid=grid, seconds=0.5 if kind == VIDEO else None), tokens=(prod(grid) // MERGED,)
        )
        for kind, of_kind in grids.items()
        for grid in of_kind
    ]
    table = place(expected, types[0].numpy(), segments, counted=(IMAGE, VIDEO))
    return PackedRow(
        input_ids=input_ids,
        segments=segments,
        shift_labels=shift_labels(input_ids, segments),
        mm_token_type_ids=types,
        media=Media(
            pixel_values=_joined(items[IMAGE]),
            image_grid_thw=torch.tensor(grids[IMAGE]) if grids[IMAGE] else None,
            pixel_values_videos=_joined(items[VIDEO]),
            video_grid_thw=torch.tensor(grids[VIDEO]) if grids[VIDEO] else None,
            second_per_grid_ts=torch.tensor([0.5] * len(grids[VIDEO])) if grids[VIDEO] else None,
        ),
        extras={"advantages": torch.arange(segments.total)[None]},
        metadata=HostMetadata(lengths=segments.lengths, media=table, sample_ids=tuple(range(len(samples)))),
    )


def _joined(items: Sequence[Item]) -> torch.Tensor | None:
    return torch.cat([item.pixels() for item in items]) if items else None


def assert_equal_rows(row: PackedRow, other: PackedRow) -> None:
    """Every tensor, and the metadata that tensors of the row hold."""
    assert row.segments == other.segments
    assert row.metadata == other.metadata
    assert row.tree == other.tree
    for name in ("input_ids", "shift_labels", "mm_token_type_ids"):
        assert torch.equal(row.__dict__[name], other.__dict__[name])
    assert torch.equal(row.extras["advantages"], other.extras["advantages"])
    assert row.media.to_hf().keys() == other.media.to_hf().keys()
    for name, tensor in row.media.to_hf().items():
        assert torch.equal(tensor, other.media.to_hf()[name])


def word(*values: int) -> list[Item]:
    return [Item(TEXT, word=value) for value in values]


CAT, DOG = Item(IMAGE, content=0), Item(IMAGE, content=1)
"""Two images of one grid: their tokens are the same."""


@given(families_of_samples(), st.integers(1, 4), st.data())
def test_the_tree_is_the_naive_one_of_tokens_and_contents(samples, min_shared, data):
    row = row_of(samples)
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(samples), max_size=len(samples)))
    shared = share(row, min_shared=min_shared, groups=groups)
    symbols = [flat(sample, "symbols") for sample in samples]
    truth = naive_tree(symbols, min_shared=min_shared, groups=groups)
    if sum(map(len, truth.nodes)) == row.segments.total:
        assert shared is row
        return
    assert shared.tree is not None
    assert shared.tree.parents == tuple(truth.parents)
    assert shared.tree.lengths == tuple(len(node) for node in truth.nodes)
    assert shared.tree.leaves == tuple(truth.leaves[i] for i in range(len(samples)))


@FEW
@given(families_of_samples(), st.integers(1, 4))
def test_unshare_is_the_inverse_and_the_tree_that_was_found_can_be_given(samples, min_shared):
    row = row_of(samples)
    shared = share(row, min_shared=min_shared)
    assert_equal_rows(unshare(shared), row)
    assert_equal_rows(share(shared, min_shared=min_shared), shared)
    if shared.tree is not None:
        assert_equal_rows(share(row, tree=shared.tree), shared)


def test_placeholders_alone_would_merge_them(monkeypatch):
    """The guard of the tests above: without contents they fail."""
    monkeypatch.setattr(sharing, "content_numbers", lambda blocks: [0] * len(blocks))
    row = row_of([[CAT, *word(1)], [DOG, *word(1)]])
    shared = share(row, min_shared=1)
    assert shared.tree.num_tokens == 3
    assert not torch.equal(unshare(shared).media.pixel_values, row.media.pixel_values)


def test_a_video_at_another_rate_is_another_one():
    row = row_of([[Item(VIDEO)], [Item(VIDEO)]])
    assert row.metadata.media.chosen(share(row).tree)[VIDEO].tolist() == [0]
    first, second = row.metadata.media.videos
    table = MediaTable(media=(first, replace(second, seconds=1.0)))
    media = replace(row.media, second_per_grid_ts=torch.tensor([0.5, 1.0]))
    other = replace(row, media=media, metadata=replace(row.metadata, media=table))
    assert share(other) is other
    assert find_prefix_tree(other, videos=[0, 0]) is None  # whose frames alone are compared


def test_media_that_agree_where_they_are_looked_at_are_compared_whole():
    first = torch.arange(2 * 3 * media.LOOKED_AT).float().view(-1, 3)
    last = first.clone()
    step = first.numel() // media.LOOKED_AT | 1
    assert step > 1
    last.view(-1)[1] += 1  # not looked at: the first value and every `step`-th are
    assert content_numbers([first, last, first.clone(), first]) == [0, 1, 0, 0]
    assert content_numbers([first, first.to(torch.bfloat16), first.view(-1, 6)]) == [0, 1, 2]
    assert content_numbers([torch.tensor([[float("nan")]]), torch.tensor([[float("nan")]])]) == [0, 0]
    assert content_numbers([torch.tensor([[0.0]]), torch.tensor([[-0.0]])]) == [0, 1]
    assert content_numbers([torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]) == [0, 0]
    assert content_numbers([torch.arange(6.0).view(2, 3).T.contiguous().T, torch.arange(6.0).view(2, 3)]) == [0, 0]


def test_samples_of_different_groups_share_nothing():
    row = row_of([word(1, 2), word(1, 3), word(1, 4), word(1, 5)])
    for groups in (["a", "b", "a", "b"], torch.tensor([1, 0, 1, 0]), list(torch.tensor([1, 0, 1, 0]))):
        assert share(row, min_shared=1, groups=groups).tree.parents == (-1, 0, 0, -1, 3, 3)
    assert share(row, min_shared=1, groups=range(4)) is row


def test_min_shared_is_64_tokens():
    prefix = [i % WORDS for i in range(64)]
    assert share(row_of([word(*prefix, 1), word(*prefix, 2)])).tree.lengths == (64, 1, 1)
    short = row_of([word(*prefix[1:], 1), word(*prefix[1:], 2)])
    assert share(short) is short
    alone = row_of([word(*prefix)])
    assert share(alone) is alone


@FEW
@given(families_of_samples())
def test_a_shared_row_travels(samples):
    row = share(row_of(samples), min_shared=1)
    batch = row.to_hf()
    assert_equal_rows(PackedRow.from_hf(batch, extras=("advantages",)), row)
    batch.pop("use_cache", None)
    assert_equal_rows(PackedRow.from_hf(pickle.loads(pickle.dumps(batch)), extras=("advantages",)), row)
    assert row.metadata.tree is None  # a row stores its tree once
    assert row.to("cpu").tree is row.tree


def test_a_shared_row_is_named_and_counts_its_distinct_targets():
    row = share(row_of([[CAT, *word(1, 2)], [CAT, *word(1, 3)]]), min_shared=1)
    assert repr(row) == "PackedRow([1, 8], 2 samples, 8 tokens, 100.00% full, 1 images, shared in 5 tokens)"
    assert row.known_metadata.num_distinct_targets == 4  # of 6: the first token is none
    assert unshare(row).known_metadata.num_distinct_targets is None


FOREIGN = row_of([word(1, 2, 3), word(1, 2, 4)])
LABELS = FOREIGN.shift_labels.clone()
LABELS[0, 4] = 0
BEHIND = FOREIGN.shift_labels.clone()
BEHIND[0, 2] = 1
PICTURES = row_of([[CAT, *word(1)], [CAT, *word(2)]])
PADDED = replace(FOREIGN, segments=Segments.from_lengths([3, 2], SlotRule(row_multiple=6)))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (replace(FOREIGN, shift_labels=LABELS), "sample 1, token 1: the label .* is not that token's own id.*unshared"),
        (replace(FOREIGN, shift_labels=BEHIND), "sample 0, token 2: the label"),
        (PADDED, "has no padding.*5 real tokens in 6"),
        (replace(PICTURES, metadata=None), "has media, and no host metadata of their places.*media_reader"),
        (replace(PICTURES, media=replace(PICTURES.media, pixel_values=torch.zeros(8, 3))), "16 patches, the row has 8"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_shared_is_refused(row, fault):
    with pytest.raises(LayoutError, match=fault):
        share(row, min_shared=1)


def test_a_row_on_a_device_is_refused():
    shared = share(PICTURES, min_shared=1)
    with nothing_on_host():
        for function, row in ((share, FOREIGN), (unshare, shared)):
            with pytest.raises(LayoutError, match="share it before it is moved"):
                function(row)


def test_settings_that_say_nothing_are_refused():
    with pytest.raises(Exception, match="min_shared"):
        share(FOREIGN, min_shared=0)
    with pytest.raises(LayoutError, match="3 groups for the 2 samples"):
        share(FOREIGN, groups=[0, 1, 0])


def test_a_tree_of_another_row_is_refused():
    tree = share(FOREIGN, min_shared=1).tree
    with pytest.raises(LayoutError, match=r"samples of \[3, 3\] tokens, the row of \[4, 3\]"):
        share(row_of([word(1, 2, 3, 4), word(1, 2, 4)]), tree=tree)
    with pytest.raises(LayoutError, match=r"sample 1, token 1: the tree takes it from a sample before.*another one"):
        share(row_of([word(1, 2, 3), word(1, 3, 4)]), tree=tree)
    merged = share(PICTURES, min_shared=1).tree
    with pytest.raises(LayoutError, match=r"sample 1.*stands for other media"):
        share(row_of([[CAT, *word(1)], [DOG, *word(2)]]), tree=merged)
    with pytest.raises(LayoutError, match="share a row after it is packed"):
        replace(row_of([word(1), word(1, 2)]), tree=tree)


def test_a_tree_that_divides_an_image_is_refused():
    row = row_of([[CAT, *word(1)], [CAT, *word(2)]])
    tree = PrefixTree(segments=row.segments, parents=(-1, 0, 0), lengths=(1, 2, 2), leaves=(1, 2))
    with pytest.raises(LayoutError, match=r"sample 1, token 1: the tree takes it.*inside an image"):
        share(row, tree=tree)


def test_media_changed_behind_a_tree_are_refused():
    shared = share(PICTURES, min_shared=1)
    changed = replace(shared, media=replace(shared.media, image_grid_thw=torch.tensor([[1, 4, 2]])))
    with pytest.raises(LayoutError, match="image_grid_thw is not what the host metadata"):
        unshare(changed)
    with pytest.raises(LayoutError, match="the metadata has 0 media but image_grid_thw is"):
        unshare(replace(shared, metadata=replace(shared.metadata, media=MediaTable())))
    with pytest.raises(LayoutError, match="has 1 media but image_grid_thw"):
        unshare(replace(shared, media=PICTURES.media))
