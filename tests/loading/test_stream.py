"""PackedStream and StreamLoader: every sample measured once, as many rows on every rank, an exact continuation.

A stream that was stopped goes on as the unbroken one, in all passes to come, whatever its source does then.
"""

from __future__ import annotations

import json
import pickle
from itertools import islice

import datasets
import pytest
import torch
from cases import slow, slow_cases
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.cases.planning import LENGTH_SETS
from vlmpack.errors import ConfigError
from vlmpack.loading import PackedStream, RowSettings, StreamLoader

LENGTHS = LENGTH_SETS["CORD"].lengths(203).tolist()
SHORT = [204 * (1 + at % 7) for at in range(60)]
"""Of a pass of about twelve rows."""
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
    """A source that can only be iterated, and gives each worker its share, as is usual."""

    def __init__(self, lengths=LENGTHS):
        self.lengths, self.read = lengths, 0

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for at in range(first, len(self.lengths), step):
            self.read += 1
            yield {"id": at, "length": self.lengths[at]}


def hub_stream(shards=4, lengths=LENGTHS):
    """An iterable data set of `datasets`."""
    rows = {"id": list(range(len(lengths))), "length": lengths}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=shards)


def hub_stream_in_three():
    """Files that cannot be shared out evenly between two ranks or workers."""
    return hub_stream(3)


def hub_stream_in_the_middle():
    stream = hub_stream()
    stream.load_state_dict(stream.state_dict())
    return stream


def short_samples():
    return Samples(SHORT)


def short_hub_stream():
    return hub_stream(12, SHORT)


class Around(IterableDataset):
    """Hands everything on to a data set of `datasets`, its state, too."""

    def __init__(self):
        self.hub = short_hub_stream()

    def __iter__(self):
        return iter(self.hub)

    def state_dict(self):
        return self.hub.state_dict()

    def load_state_dict(self, state_dict):
        self.hub.load_state_dict(state_dict)


SOURCES = (Samples, Stream, hub_stream, hub_stream_in_three)
SHORT_SOURCES = (Around, short_hub_stream, short_samples)


def ids(rows):
    return [[sample["id"] for sample in row] for row in rows]


def numbers(rows):
    return sorted(sample["id"] for row in rows for sample in row)


def test_four_ranks_measure_every_sample_once_and_read_no_other():
    source, measured = Samples(), []
    for rank in range(4):
        stream = PackedStream(
            source, SETTINGS, length=lambda sample: measured.append(sample) or sample["length"], ranks=4, rank=rank
        )
        assert len(list(stream)) > 10
    assert sorted(sample["id"] for sample in measured) == list(range(len(LENGTHS)))
    assert source.read == len(LENGTHS)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (2, 2)])
def test_ranks_and_workers_share_every_sample_out_once(source, ranks, workers):
    rows = []
    for rank in range(ranks):
        stream = PackedStream(source(), SETTINGS, ranks=ranks, rank=rank)
        mine = list(DataLoader(stream, batch_size=None, collate_fn=list, num_workers=workers))
        assert len(mine) > 15
        rows += mine
    assert numbers(rows) == list(range(len(LENGTHS)))
    assert all(sum(sample["length"] for sample in row) <= SETTINGS.capacity for row in rows)


@given(
    lengths=st.lists(st.integers(1, 25), max_size=50),
    ranks=st.integers(1, 4),
)
@settings(max_examples=60)
def test_every_sample_is_given_out_once_or_counted(lengths, ranks):
    dropping = RowSettings(capacity=20, overlength="drop")
    streams = [PackedStream(Stream(lengths), dropping, ranks=ranks, rank=rank) for rank in range(ranks)]
    out = numbers([row for stream in streams for row in stream])
    assert len(out) == len(set(out))
    assert sum(stream.dropped for stream in streams) == sum(n > 20 for n in lengths)
    assert len(out) == sum(n <= 20 for n in lengths)


# ---------------------------------------------------------------------- to continue


def stopped(stream, rows):
    """(the ids of so many rows of a stream, its state after them)."""
    left = iter(stream)
    seen = ids(islice(left, rows))
    return seen, pickle.loads(pickle.dumps(stream.state_dict()))


def resumed_from(state, source, **settings):
    stream = PackedStream(source(), SETTINGS, **settings)
    stream.load_state_dict(state)
    return stream


@pytest.mark.parametrize("source", SHORT_SOURCES)
def test_stopped_after_any_row_all_passes_to_come_are_those_of_the_unbroken_stream(source):
    whole = ids(islice(PackedStream(source(), SETTINGS, repeat=True), 60))
    ended = 0
    for done in range(0, 36, 2):
        seen, state = stopped(PackedStream(source(), SETTINGS, repeat=True), done)
        ended += state["ended"]
        assert seen + ids(islice(resumed_from(state, source, repeat=True), 60 - done)) == whole, done
    assert 3 <= ended < 12  # the guard: some stops are at the end of a pass, others are not


@pytest.mark.parametrize("source", [*SOURCES, *SHORT_SOURCES])
def test_a_stream_continues_bit_for_bit_its_buffer_included_and_then_the_next_epochs(source):
    one = {"ranks": 2, "rank": 1}
    whole = PackedStream(source(), SETTINGS, **one)
    epochs = [ids(whole) for _ in range(3)]
    for done in (0, 1, len(epochs[0]) // 2, len(epochs[0]) - 1, len(epochs[0])):
        seen, state = stopped(PackedStream(source(), SETTINGS, **one), done)
        stream = resumed_from(state, source, **one)
        assert seen + ids(stream) == epochs[0]
        assert [ids(stream), ids(stream)] == epochs[1:]


@pytest.mark.parametrize("source", [Around, short_hub_stream])
def test_an_epoch_after_one_that_was_given_up_is_whole(source):
    once = ids(PackedStream(source(), SETTINGS))
    for rows in (0, 1, 3):
        _, state = stopped(PackedStream(source(), SETTINGS), 4)
        stream = resumed_from(state, source)
        assert ids(islice(stream, rows)) == once[4 : 4 + rows]
        assert ids(stream) == (once if rows else once[4:])  # nobody began the one that was loaded: it is still to come


@pytest.mark.parametrize("workers", [0, *slow(2)])
@pytest.mark.parametrize("source", [hub_stream, hub_stream_in_three, Around])
def test_a_loader_reads_the_whole_source_whatever_other_loaders_did_with_the_object(source, workers):
    shared = source()
    early, half, resumed, given_up, late = (StreamLoader(PackedStream(shared, SETTINGS)) for _ in range(5))
    whole = ids(half)
    list(islice(half, 5))
    state = half.state_dict()
    resumed.load_state_dict(state)
    assert ids(resumed) == whole[5:]
    given_up.load_state_dict(state)
    list(islice(given_up, 3))
    assert [ids(late), ids(early), ids(early), ids(half)] == [whole] * 4
    last = StreamLoader(PackedStream(shared, SETTINGS), num_workers=workers)
    assert numbers(last) == sorted(at for row in whole for at in row)


def test_two_loaders_that_read_one_source_in_turns_both_get_all_of_it():
    for shared in (hub_stream(), hub_stream_in_three()):
        one, other = (iter(StreamLoader(PackedStream(shared, SETTINGS))) for _ in range(2))
        assert ids(row for rows in zip(one, other, strict=True) for row in rows)[::2] == ids(
            PackedStream(hub_stream(shared.num_shards), SETTINGS)
        )


def test_two_streams_do_not_share_the_samples_of_one_source_with_a_state_out_unnoticed():
    shared = Around()
    one, other = (iter(PackedStream(shared, SETTINGS)) for _ in range(2))
    first, *_ = next(one), next(other)
    with pytest.raises(ConfigError, match="another stream has begun to read this Around, whose position is in the obj"):
        list(one)
    assert ids([first]) == ids(islice(PackedStream(shared, SETTINGS), 1))


def test_a_source_whose_state_is_no_place_is_read_again_from_the_start_of_the_pass():
    def numbered():
        before = []

        def number(sample):
            before[:] = [*before, sample["id"]] if sample["id"] else []
            return {**sample, "number": len(before)}

        return hub_stream().map(number)

    rows = ids(PackedStream(numbered(), SETTINGS))
    half = PackedStream(numbered(), SETTINGS)
    list(islice(half, 20))
    resumed = PackedStream(numbered(), SETTINGS)
    resumed.load_state_dict(half.state_dict())
    with pytest.warns(UserWarning, match="does not continue where its state was taken, for example because its `map`"):
        assert ids(resumed) == rows[20:]


def test_a_shuffle_buffer_continues_even_if_the_one_sample_that_is_compared_is_the_same():
    def make():
        return PackedStream(hub_stream().shuffle(seed=1, buffer_size=2), RowSettings(capacity=4096, buffer_tokens=0))

    rows = ids(make())
    for done in range(1, 12):
        resumed = make()
        resumed.load_state_dict(stopped(make(), done)[1])
        assert ids(resumed) == rows[done:]


@pytest.mark.parametrize(
    "change",
    [
        lambda hub: hub.skip(13),
        lambda hub: hub.map(dict).take(17).shuffle(seed=1, buffer_size=2),
        lambda hub: datasets.interleave_datasets([hub, hub_stream(4, SHORT)]),
    ],
)
def test_ranks_have_no_other_samples_than_the_source_alone(change):
    """File shards would each skip, take or interleave samples of their own."""
    source = change(hub_stream())
    rows = [row for rank in range(2) for row in PackedStream(source, SETTINGS, ranks=2, rank=rank)]
    assert numbers(rows) == sorted(sample["id"] for sample in source)


def test_only_samples_of_the_buffer_are_read_again():
    reads = {}
    for source in (Samples, Stream):
        half = PackedStream(source(), SETTINGS)
        list(islice(half, 40))
        again = source()
        resumed = PackedStream(again, SETTINGS)
        resumed.load_state_dict(half.state_dict())
        list(resumed)
        reads[source] = again.read
    left, buffered = len(LENGTHS) - half._last[0] - 1, len(half._packer)
    assert reads[Stream] == len(LENGTHS)  # there is no other way
    assert left + buffered <= reads[Samples] <= left + buffered + 1  # the last one read is compared, too


@pytest.mark.parametrize("workers", [0, *slow(2)])
@pytest.mark.parametrize("source", [Samples, *slow(Stream, hub_stream, hub_stream_in_three)])
def test_a_loader_continues_in_the_middle_of_an_epoch_and_in_any_pass(source, workers):
    def make():
        stream = PackedStream(source(), SETTINGS, ranks=2, rank=0, repeat=repeat)
        return StreamLoader(stream, collate_fn=list, num_workers=workers)

    for repeat, steps in ((False, (9,)), (True, (5, 40))):
        rows = ids(islice(make(), 60))
        assert len(rows) == 60 if repeat else 20 < len(rows) < 30
        for done in steps:
            half = make()
            assert ids(islice(half, done)) == rows[:done]
            resumed = make()
            resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
            assert ids(islice(resumed, 60 - done)) == rows[done:]
            if not repeat:
                ended = make()
                ended.load_state_dict(resumed.state_dict())
                assert ids(resumed) == ids(ended) == rows  # the next epoch, in the order of the unbroken run


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), *slow_cases((2, False), (2, True))])
def test_set_epoch_reaches_the_shards_of_ranks_and_workers(workers, persistent):
    source = hub_stream(8).shuffle(seed=1, buffer_size=1)
    stream = PackedStream(source, SETTINGS, ranks=2, rank=1)
    loader = StreamLoader(stream, num_workers=workers, persistent_workers=persistent)
    epochs = [(source.set_epoch(epoch), ids(loader))[1] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]


FEW, MANY = [(2, 0), (3, 0), (2, 0), (1, 0), (4, 0)], [(2, 2), (1, 0), (3, 2), (2, 0)]


def loaders(source, ranks, workers, **settings):
    streams = [PackedStream(source(), SETTINGS, ranks=ranks, rank=rank, **settings) for rank in range(ranks)]
    return [StreamLoader(stream, num_workers=workers) for stream in streams]


@pytest.mark.parametrize(
    ("source", "processes"),
    [(short_samples, FEW), *slow_cases((short_samples, MANY), (short_hub_stream, FEW))],
)
def test_other_ranks_and_workers_continue_with_the_same_rows(source, processes):
    """Each continues after six rows a rank what the one before began, into the next passes."""

    def in_turn(of_ranks, each):
        return [row for rows in zip(*(ids(islice(one, each)) for one in of_ranks), strict=True) for row in rows]

    whole, seen, states = in_turn(loaders(source, *processes[0], repeat=True), 60), [], None
    for ranks, workers in processes:
        run = loaders(source, ranks, workers, repeat=True)
        for loader in run if states else ():
            loader.load_state_dict(pickle.loads(pickle.dumps(states)))
        seen += in_turn(run, 6)
        states = json.loads(json.dumps([loader.state_dict() for loader in run]))
    assert seen == whole[: len(seen)]
    assert len(seen) > 35


@pytest.mark.parametrize(("before", "later"), [((2, 0), (3, 0)), ((3, 0), (1, 0)), *slow_cases(((1, 2), (2, 2)))])
@pytest.mark.parametrize("done", [3, None])
def test_other_ranks_share_out_what_is_left_of_an_epoch_and_the_next_one(before, later, done):
    run = loaders(Samples, *before)
    seen = numbers(row for loader in run for row in islice(loader, done))
    resumed = loaders(Samples, *later)
    for loader in resumed:
        loader.load_state_dict([loader.state_dict() for loader in run])
    epochs = [numbers(row for loader in resumed for row in loader) for _ in range(2)]
    assert sorted([*seen, *epochs[0]] if done else epochs[0]) == list(range(len(LENGTHS)))
    assert epochs[1] == list(range(len(LENGTHS)))


def test_states_that_other_ranks_cannot_continue_are_refused():
    """Of one rank, of ranks at different steps, of none; of other settings; of a part without rows to come."""
    run, (alone,) = loaders(Samples, 2, 0), loaders(Samples, 1, 0)
    list(islice(run[0], 3))
    uneven = [loader.state_dict() for loader in run]
    for state in (uneven[0], uneven, uneven[:1] * 2):
        with pytest.raises(ConfigError, match=r"rank 0 of 2 with 1 workers .* is rank 0 of 1 .* states of all ranks"):
            alone.load_state_dict(state)
    for state in ({"states": []}, [], None, 7, "state"):
        with pytest.raises(ConfigError, match="not the state of a StreamLoader"):
            alone.load_state_dict(state)
    alone.stream.settings = RowSettings(capacity=5000)
    list(islice(run[1], 3))
    alone.load_state_dict([loader.state_dict() for loader in run])
    with pytest.raises(ConfigError, match=r"the state is of .?RowSettings"):
        next(iter(alone))
    with pytest.raises(ConfigError, match=r"the state is of part 0 of a source in 2 .* this is part 0 of 1"):
        PackedStream(Samples(), SETTINGS).load_state_dict(run[0].stream.state_dict())
    (run,) = loaders(lambda: Samples([3000, 1] * 9), 1, 2)  # one of two workers has many rows, the other one row
    list(islice(run, 5))
    with pytest.raises(
        ConfigError, match="part 1 of the source in 2 has no rows left: continue with 1 ranks and 2 wor"
    ):
        alone.load_state_dict(run.state_dict())


# ---------------------------------------------------------------------- ranks that compute together


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_all_ranks_end_together_whatever_they_have(ranks, tmp_path):
    """Over a collective after each row, as training has: an uneven rank, one without samples, a stop after an end."""
    torch.multiprocessing.start_processes(_train, (ranks, tmp_path), nprocs=ranks, start_method="fork")
    seen = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(ranks)]
    for case, samples in (("many", len(LENGTHS)), ("few", ranks - 1), ("sorted", 40), ("none", 0)):
        rows = [mine[case] for mine in seen]
        assert len({len(mine) for mine in rows}) == 1
        assert sorted(at for mine in rows for row in mine for at in row) == list(range(samples))
    assert [[] in mine["sorted"] for mine in seen] != [False] * ranks  # the guard: somebody ended before


def _train(rank, ranks, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    cases = {
        "many": LENGTHS,
        "few": LENGTHS[: ranks - 1],
        "sorted": [4000 if at % ranks else 100 for at in range(40)],
        "none": [],
    }
    seen = {}
    for case, lengths in cases.items():

        def make(lengths=lengths):
            return StreamLoader(PackedStream(Samples(lengths), SETTINGS, ranks=ranks, rank=rank), collate_fn=list)

        loader, rows = make(), []
        for row in loader:
            distributed.all_reduce(torch.ones(()))
            rows.append([sample["id"] for sample in row])
        seen[case] = rows
        for done in {len(rows) // 2, max(0, len(rows) - 1)}:
            half = make()
            list(islice(half, done))
            resumed = make()
            resumed.load_state_dict(half.state_dict())
            assert ids(resumed) == rows[done:]
            assert ids(resumed) == rows
    with pytest.raises(ConfigError, match=r"would wait forever: load the stream with StreamLoader\(stream"):
        next(iter(PackedStream(Samples(), SETTINGS, ranks=ranks, rank=rank)))
    (folder / str(rank)).write_bytes(pickle.dumps(seen))
    distributed.destroy_process_group()


def test_a_rank_without_samples_cannot_repeat_them():
    loader = StreamLoader(PackedStream(Samples([5]), SETTINGS, ranks=2, rank=1, repeat=True))
    with pytest.raises(ConfigError, match="the source has no sample for rank 1 of 2 to repeat"):
        next(iter(loader))


# ---------------------------------------------------------------------- what is refused


def test_two_who_iterate_one_stream_do_not_share_its_rows_out_unnoticed():
    stream = PackedStream(Samples(), SETTINGS)
    one = iter(stream)
    next(one)
    other = iter(stream)
    first = next(other)
    with pytest.raises(ConfigError, match="started again before it ended; give each loader its own stream"):
        next(one)
    assert ids([first, *other]) == ids(PackedStream(Samples(), SETTINGS))  # who came last misses nothing


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (iter([]), {}, "a list_iterator gives its samples once, and every further pass would have none"),
        (Samples(), {"ranks": 2, "rank": 2}, "rank must lie between 0 and 1, got 2"),
        (Samples(), {"ranks": 2}, "ranks=2, but rank= was left out: every process would train on the same"),
        (Samples(), {"ranks": 0}, "ranks must be a whole number from 1 to"),
        (split_dataset_by_node(hub_stream(), 0, 2), {"ranks": 2, "rank": 0}, "split_dataset_by_node, and"),
        (hub_stream_in_the_middle(), {}, "a state was loaded into the source, and a stream reads whole data sets"),
    ],
)  # fmt: skip
def test_a_source_or_rank_that_cannot_be_is_refused(source, settings, message):
    with pytest.raises(ConfigError, match=message):
        PackedStream(source, SETTINGS, **settings)
