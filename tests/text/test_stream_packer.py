"""StreamPacker: lengths one by one, the rows of the same strategy with all lengths at once."""

from __future__ import annotations

import random

import pytest

from vlmpack.errors import ConfigError, SampleError
from vlmpack.text import Pack, StreamPacker, pack_sequences


def streamed(lengths: list[int], capacity: int, strategy: str) -> list[Pack]:
    packer = StreamPacker(capacity, strategy=strategy)
    packs = [pack for length in lengths for pack in packer.add(length)]
    return packs + packer.finish()


@pytest.mark.parametrize("strategy", ["nf", "hk"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_the_same_strategy_with_all_lengths(strategy: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 97) for _ in range(300)]
    expected = pack_sequences(lengths, 97, strategy=strategy)
    packs = streamed(lengths, 97, strategy)
    assert sorted(pack.sequence_ids for pack in packs) == sorted(expected.bins)
    assert all(pack.lengths == [lengths[sample] for sample in pack.sequence_ids] for pack in packs)


def test_next_fit_gives_a_row_out_when_the_next_sample_does_not_fit() -> None:
    packer = StreamPacker(capacity=10)
    assert packer.add(6) == packer.add(4) == []
    assert packer.add(1) == [Pack(sequence_ids=[0, 1], lengths=[6, 4])]
    assert packer.sequences_added == 3
    assert packer.finish() == [Pack(sequence_ids=[2], lengths=[1])]


def test_rows_come_before_the_end_and_few_samples_wait() -> None:
    packer = StreamPacker(capacity=100, strategy="hk")
    out = [pack for _ in range(1000) for pack in packer.add(30)]
    assert sum(map(len, out)) >= 1000 - 64


@pytest.mark.parametrize("name", ["NF", "NextFit", "next_fit", "hk", "harmonic"])
def test_seqpackers_names_are_known(name: str) -> None:
    assert StreamPacker(10, strategy=name).finish() == []


@pytest.mark.parametrize("length", [0, -1, 11, 2.5, None])
@pytest.mark.parametrize("strategy", ["nf", "hk"])
def test_a_bad_length_is_named_and_left_out(strategy: str, length) -> None:
    packer = StreamPacker(capacity=10, strategy=strategy)
    packer.add(8)
    with pytest.raises(SampleError, match="sample 1"):
        packer.add(length)
    assert packer.add(2) == []
    assert packer.finish() == [Pack(sequence_ids=[0, 1], lengths=[8, 2])]


def test_a_finished_packer_says_so() -> None:
    packer = StreamPacker(capacity=10)
    packer.finish()
    for call in (packer.finish, lambda: packer.add(1)):
        with pytest.raises(ConfigError, match="finished"):
            call()


@pytest.mark.parametrize(
    "settings", [{"strategy": "obfd"}, {"strategy": None}, {"strategy": "hk", "k": 0}, {"capacity": 0}]
)
def test_settings_that_cannot_be_are_refused(settings) -> None:
    with pytest.raises(ConfigError):
        StreamPacker(**{"capacity": 10, **settings})


def test_the_state_shows() -> None:
    packer = StreamPacker(capacity=10)
    packer.add(3)
    assert repr(packer) == "StreamPacker(strategy='nf', added=1, 1 buffered)"
