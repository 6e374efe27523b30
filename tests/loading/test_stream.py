"""PackedStream: the same rows for any number of workers, as many for every rank, and an exact continuation."""

from __future__ import annotations

import pickle
from itertools import islice

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.cases.planning import LENGTH_SETS
from vlmpack.errors import ConfigError
from vlmpack.loading import PackedStream, RowSettings

LENGTHS = LENGTH_SETS["CORD"].lengths(203).tolist()
SETTINGS = RowSettings(capacity=4096)


class Samples:
    """A source by number, which counts how often it is read."""

    def __init__(self, lengths=LENGTHS):
        self.lengths, self.read = lengths, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, at):
        self.read += 1
        return {"id": at, "length": self.lengths[at]}


class Stream(IterableDataset):
    """A source that can only be iterated."""

    def __init__(self, lengths=LENGTHS):
        self.lengths, self.read = lengths, 0

    def __iter__(self):
        for at, length in enumerate(self.lengths):
            self.read += 1
            yield {"id": at, "length": length}


class ResumableStream(IterableDataset):
    """A source that knows where it is."""

    def __init__(self, lengths=LENGTHS):
        self.lengths, self.read, self.at, self.start = lengths, 0, 0, 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        while self.at < len(self.lengths):
            self.at += 1
            self.read += 1
            yield {"id": self.at - 1, "length": self.lengths[self.at - 1]}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.start = state_dict["at"]


class Sharded(IterableDataset):
    """A source that gives each worker its share, as iterable data sets do that know of workers."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter([{"id": at, "length": LENGTHS[at]} for at in range(first, len(LENGTHS), step)])


def hub_stream():
    """An iterable data set of `datasets`, in four shards."""
    rows = {"id": list(range(len(LENGTHS))), "length": LENGTHS}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)


SOURCES = (Samples, Stream, ResumableStream, hub_stream)


def ids(rows):
    return [[sample["id"] for sample in row] for row in rows]


def identity(row):
    return row


def loader(stream, workers=0):
    return DataLoader(stream, batch_size=None, collate_fn=identity, num_workers=workers)


@given(
    lengths=st.lists(st.integers(1, 25), max_size=50),
    ranks=st.integers(1, 4),
    remainder=st.sampled_from(["split", "empty", "drop"]),
)
@settings(max_examples=80)
def test_all_ranks_end_together_and_every_sample_is_given_out_once_or_counted(lengths, ranks, remainder):
    streams = [
        PackedStream(
            Stream(lengths), RowSettings(capacity=20, oversize="drop"), ranks=ranks, rank=rank, remainder=remainder
        )
        for rank in range(ranks)
    ]
    rows = [ids(stream) for stream in streams]
    assert len({len(mine) for mine in rows}) == 1
    out = [at for mine in rows for row in mine for at in row]
    assert len(out) == len(set(out))
    assert {stream.dropped for stream in streams} == {sum(n > 20 for n in lengths)}
    assert {stream.left_out + len(out) + stream.dropped for stream in streams} == {len(lengths)}
    if remainder == "empty":
        assert streams[0].left_out == 0
    else:
        assert all(row for mine in rows for row in mine)


def test_a_round_of_rows_is_held_back_so_that_there_is_something_to_split():
    lengths = [10, 10, 20, 20]  # three rows: when the last one is known, the first two would be gone
    waits = RowSettings(capacity=20, buffer_tokens=20)
    assert ids(PackedStream(Stream(lengths), waits)) == [[0, 1], [2], [3]]
    streams = [PackedStream(Stream(lengths), waits, ranks=2, rank=rank) for rank in range(2)]
    assert [ids(stream) for stream in streams] == [[[0], [2]], [[1], [3]]]
    assert streams[0].left_out == 0


@pytest.mark.parametrize("source", [Stream, Sharded, hub_stream])
def test_rows_are_the_same_for_any_number_of_workers(source):
    alone = ids(loader(PackedStream(source(), SETTINGS, ranks=2, rank=1)))
    assert len(alone) > 20
    for workers in (1, 2):
        assert ids(loader(PackedStream(source(), SETTINGS, ranks=2, rank=1), workers)) == alone


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("done", [0, 1, 17, 54])
def test_a_stream_continues_bit_for_bit_its_buffer_included(source, done):
    whole = PackedStream(source(), SETTINGS, ranks=2, rank=1)
    rows = ids(whole)
    if done > len(rows):
        done = len(rows)
    half = PackedStream(source(), SETTINGS, ranks=2, rank=1)
    list(islice(half, done))
    state = pickle.loads(pickle.dumps(half.state_dict()))
    resumed = PackedStream(source(), SETTINGS, ranks=2, rank=1)
    resumed.load_state_dict(state)
    assert ids(resumed) == rows[done:]
    assert ids(resumed) == rows  # the next epoch is whole


@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_that_repeats_gives_pass_after_pass_and_continues_in_any(source):
    once = ids(PackedStream(source(), SETTINGS, ranks=2, rank=1))
    assert len(once) % 2 == 1  # the guard: two workers do not end a pass together
    for workers in (0, 2):
        stream = PackedStream(source(), SETTINGS, ranks=2, rank=1, repeat=True)
        assert ids(islice(loader(stream, workers), 3 * len(once) + 2)) == [*once * 3, *once[:2]]
    for done in (5, len(once), len(once) + 5):
        half = PackedStream(source(), SETTINGS, ranks=2, rank=1, repeat=True)
        assert len(list(islice(half, done))) == done
        resumed = PackedStream(source(), SETTINGS, ranks=2, rank=1, repeat=True)
        resumed.load_state_dict(pickle.loads(pickle.dumps(half.state_dict())))
        assert ids(islice(resumed, len(once) + 3)) == (once * 3)[done : done + len(once) + 3]


def test_a_source_with_a_place_is_not_read_again():
    reads = {}
    for source in (Samples, Stream, ResumableStream):
        half = PackedStream(source(), SETTINGS)
        list(islice(half, 40))
        again = source()
        resumed = PackedStream(again, SETTINGS)
        resumed.load_state_dict(half.state_dict())
        list(resumed)
        reads[source] = again.read
        if source is Samples:  # those that wait, and the last one read, are compared
            reads[source] -= len(
                {at for at, _ in half.state_dict()["packer"]["buffered"]} | {half._packer.received - 1}
            )
    assert reads[Stream] == len(LENGTHS)  # there is no other way
    assert reads[Samples] == reads[ResumableStream] < len(LENGTHS) / 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_a_stateful_data_loader_continues_in_the_middle_of_an_epoch(source, workers):
    def make():
        stream = PackedStream(source(), SETTINGS, ranks=2, rank=0)
        return StatefulDataLoader(stream, batch_size=None, collate_fn=identity, num_workers=workers)

    rows = ids(make())
    half = make()
    left = iter(half)
    assert len(list(islice(left, 9))) == 9
    state = pickle.loads(pickle.dumps(half.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert ids(resumed) == rows[9:]
    assert len(rows) > 20


def test_the_state_of_other_ranks_is_refused():
    state = PackedStream(Samples(), SETTINGS, ranks=2, rank=0).state_dict()
    with pytest.raises(ConfigError, match="the state is of 2 ranks with remainder 'split', this stream is of 1 with"):
        PackedStream(Samples(), SETTINGS).load_state_dict(state)
    with pytest.raises(ConfigError, match="this stream is of 2 with 'drop'; deal as before"):
        PackedStream(Samples(), SETTINGS, ranks=2, rank=0, remainder="drop").load_state_dict(state)
    with pytest.raises(ConfigError, match="the state is of RowSettings"):
        PackedStream(Samples(), RowSettings(capacity=5000), ranks=2, rank=0).load_state_dict(state)


def test_two_who_iterate_one_stream_do_not_share_its_rows_out_unnoticed():
    stream = PackedStream(Samples(), SETTINGS)
    one = iter(stream)
    next(one)
    other = iter(stream)
    first = next(other)
    with pytest.raises(ConfigError, match="begun anew before it ended; give each loader a stream of its own"):
        next(one)
    assert ids([first, *other]) == ids(PackedStream(Samples(), SETTINGS))  # who came last misses nothing


def test_a_source_that_can_be_read_once_is_refused():
    with pytest.raises(ConfigError, match="a generator gives its samples once, and every further pass would have none"):
        PackedStream((sample for sample in Samples()), SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 2, "rank": 2}, "rank must lie between 0 and 1, got 2"),
        ({"ranks": 2}, "ranks=2, but rank= was left out: every process would train on the same"),
        ({"ranks": 0}, "ranks must be a whole number from 1 to"),
        ({"remainder": "pad"}, "remainder must be one of split, empty, drop, got 'pad'"),
    ],
)
def test_a_rank_or_remainder_that_does_not_exist_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PackedStream(Samples(), SETTINGS, **settings)
