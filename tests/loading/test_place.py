"""A stream that was stopped goes on as the unbroken one, in all passes to come, whatever its source does then."""

from __future__ import annotations

import pickle
from itertools import islice
from random import Random

import datasets
import pytest
from torch.utils.data import IterableDataset

from vlmpack.loading import PackedStream, RowSettings

LENGTHS = [1 + at % 7 for at in range(60)]
SETTINGS = RowSettings(capacity=20)


def hub_stream():
    rows = {"id": list(range(len(LENGTHS))), "length": LENGTHS}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=12)


class CountsAtTheEnd(IterableDataset):
    """Another order in every pass; at the end of one it stands at the start of the next."""

    def __init__(self):
        self.passes, self.at, self.start = 0, 0, 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        yield from self.rest()
        self.passes, self.at = self.passes + 1, 0

    def rest(self):
        order = [*range(len(LENGTHS))]
        Random(self.passes).shuffle(order)
        while self.at < len(order):
            self.at += 1
            yield {"id": order[self.at - 1], "length": LENGTHS[order[self.at - 1]]}

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state_dict):
        self.start, self.passes = state_dict["at"], state_dict["passes"]


class CountsAtTheStart(CountsAtTheEnd):
    """Another order in every pass; at the end of one it stands there until it is asked again."""

    def __init__(self):
        self.passes, self.at, self.start = -1, 0, None

    def __iter__(self):
        if self.start is None:
            self.passes += 1
        self.at, self.start = self.start or 0, None
        yield from self.rest()

    def load_state_dict(self, state_dict):
        self.passes = state_dict["passes"]
        self.start = None if self.passes < 0 else state_dict["at"]


class CountsForAnother(IterableDataset):
    """Tells a data set of `datasets` which pass it is."""

    def __init__(self):
        self.hub, self.passes = hub_stream(), 0

    def __iter__(self):
        self.hub.set_epoch(self.passes)
        yield from self.hub
        self.passes += 1

    def state_dict(self):
        return {"hub": self.hub.state_dict(), "passes": self.passes}

    def load_state_dict(self, state_dict):
        self.hub.load_state_dict(state_dict["hub"])
        self.passes = state_dict["passes"]


class Around(IterableDataset):
    """Hands everything on to a data set of `datasets`, which starts ever after where it was told to."""

    def __init__(self):
        self.hub = hub_stream()

    def __iter__(self):
        return iter(self.hub)

    def state_dict(self):
        return self.hub.state_dict()

    def load_state_dict(self, state_dict):
        self.hub.load_state_dict(state_dict)


COUNTING = (CountsAtTheEnd, CountsAtTheStart, CountsForAnother)
SOURCES = (*COUNTING, Around, hub_stream)
ROWS = 12
"""Of one pass, about."""


def ids(rows):
    return [[sample["id"] for sample in row] for row in rows]


def stopped(stream, rows):
    """(the ids of so many rows of a stream, its state after them)."""
    left = iter(stream)
    seen = ids(islice(left, rows))
    return seen, pickle.loads(pickle.dumps(stream.state_dict()))


def resumed(source, state, **settings):
    stream = PackedStream(source(), SETTINGS, **settings)
    stream.load_state_dict(state)
    return stream


@pytest.mark.parametrize("source", SOURCES)
def test_stopped_after_any_row_all_passes_to_come_are_those_of_the_unbroken_stream(source):
    whole = ids(islice(PackedStream(source(), SETTINGS, repeat=True), 5 * ROWS))
    ended = 0
    for done in range(0, 3 * ROWS, 2):
        seen, state = stopped(PackedStream(source(), SETTINGS, repeat=True), done)
        ended += state["ended"]
        assert seen + ids(islice(resumed(source, state, repeat=True), 5 * ROWS - done)) == whole, done
    assert 3 <= ended < ROWS  # the guard: some stops are at the end of a pass, others are not


@pytest.mark.parametrize("source", SOURCES)
def test_an_epoch_after_one_that_was_stopped_is_that_of_the_unbroken_stream(source):
    whole = PackedStream(source(), SETTINGS)
    epochs = [ids(whole) for _ in range(3)]
    for done in (0, 4, len(epochs[0]) - 1, len(epochs[0])):
        seen, state = stopped(PackedStream(source(), SETTINGS), done)
        stream = resumed(source, state)
        assert seen + ids(stream) == epochs[0]
        assert [ids(stream), ids(stream)] == epochs[1:]


@pytest.mark.parametrize("source", [Around, hub_stream])
def test_an_epoch_after_one_that_was_given_up_is_whole(source):
    once = ids(PackedStream(source(), SETTINGS))
    for rows in (0, 1, 3):
        _, state = stopped(PackedStream(source(), SETTINGS), 4)
        stream = resumed(source, state)
        assert ids(islice(stream, rows)) == once[4 : 4 + rows]
        assert ids(stream) == (once if rows else once[4:])  # nobody began the one that was loaded: it is still to come
