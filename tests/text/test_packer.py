"""Packer and pack_sequences: what a script that was written for SeqPacker asks of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import plan_bins
from vlmpack.plan.planner import ALIASES, STRATEGIES
from vlmpack.text import Pack, Packer, PackMetrics, pack_sequences

LENGTHS = [1000, 800, 600, 500, 400, 300, 200, 100]
LONG_NAMES = (
    "NextFit",
    "FirstFit",
    "BestFit",
    "WorstFit",
    "FirstFitDecreasing",
    "BestFitDecreasing",
    "FirstFitShuffle",
)


def test_the_example_of_seqpackers_front_page_has_its_rows() -> None:
    result = pack_sequences(LENGTHS, capacity=1024)
    assert result.bins == [[0], [1, 6], [2, 4], [3, 5, 7]]  # SeqPacker: [0], [1, 7], [2, 4], [3, 5, 6]
    assert result.num_bins == len(result) == 4
    assert result.efficiency == 3900 / 4096
    assert repr(result).startswith("PackResult(bins=4, efficiency=95.21%, time=")


def test_packs_say_who_is_in_them() -> None:
    packs = pack_sequences(LENGTHS, 1024).packs
    assert packs[1] == Pack(sequence_ids=[1, 6], lengths=[800, 200])
    assert packs[1].used == 1000
    assert [len(pack) for pack in packs] == [1, 2, 2, 3]


def test_asking_for_packs_again_makes_no_new_ones() -> None:
    result = pack_sequences(LENGTHS, 1024)
    assert result.packs is result.packs
    assert result.bins is result.bins


def test_metrics_are_those_of_the_rows() -> None:
    result = pack_sequences(LENGTHS, 1024)
    used = np.asarray([pack.used / 1024 for pack in result.packs])
    metrics = result.metrics
    assert metrics == PackMetrics(
        num_sequences=8,
        num_packs=4,
        total_tokens=3900,
        padding_tokens=4 * 1024 - 3900,
        efficiency=3900 / 4096,
        avg_utilisation=pytest.approx(used.mean()),
        utilisation_std=pytest.approx(used.std()),
        min_utilisation=used.min(),
        max_utilisation=used.max(),
        avg_sequences_per_pack=2.0,
        packing_time_ms=result.time_ms,
    )
    assert metrics.padding_ratio == (4096 - 3900) / 4096
    assert metrics.throughput == pytest.approx(8 / (result.time_ms / 1000))
    assert result.time_ms > 0


def test_flat_rows_are_cut_by_numpy_split() -> None:
    packer = Packer(1024)
    rows = np.split(*packer.pack_flat(np.asarray(LENGTHS)))
    assert [row.tolist() for row in rows] == packer.pack(LENGTHS).bins


@pytest.mark.parametrize("name", [*ALIASES, *STRATEGIES, *LONG_NAMES, "OBFD", "Harmonic"])
def test_every_strategy_packs_every_sample_once(name: str) -> None:
    result = Packer(capacity=1024, strategy=name).pack(LENGTHS)
    assert sorted(sample for row in result.bins for sample in row) == list(range(8))
    assert max(pack.used for pack in result.packs) <= 1024


def test_strategies_lists_seqpackers_names_and_what_serves_them() -> None:
    names = dict(Packer.strategies())
    assert len(names) == 11
    assert names["obfd"] == "best_fit_decreasing"
    assert set(names.values()) <= set(STRATEGIES)


def test_a_seed_reaches_the_shuffling_strategy_alone() -> None:
    lengths = list(range(1, 60))

    def bins(strategy: str, seed: int | None) -> list[list[int]]:
        return pack_sequences(lengths, 100, strategy=strategy, seed=seed).bins

    assert bins("ffs", 1) != bins("ffs", 2)
    assert bins("ffs", None) == bins("ffs", 42)
    assert bins("nf", 1) == bins("nf", 2) == bins("nf", None)
    assert bins("next_fit", 1) != bins("next_fit", 2)  # under our own name it is our own seed


def test_the_result_holds_a_plan_for_the_rest_of_vlmpack() -> None:
    assert pack_sequences(LENGTHS, 1024).plan == plan_bins(LENGTHS, 1024, strategy="obfd")


def test_packers_and_results_can_be_pickled() -> None:
    packer, result = Packer(1024), pack_sequences(LENGTHS, 1024)
    assert pickle.loads(pickle.dumps(packer)) == packer
    assert pickle.loads(pickle.dumps(result)).bins == result.bins


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 11], "sample 1: does not fit a row of 10 tokens"),
        ([5, 0], "sample 1: has length 0"),
        ([5, -1], "sample 1: has length -1"),
        (np.asarray([5, np.nan]), "sample 1: the length of a sample is not finite"),
    ],
)
def test_a_bad_length_names_its_sample(lengths, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        pack_sequences(lengths, 10)


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 0},
        {"capacity": 8, "strategy": "best"},
        {"capacity": 8, "strategy": None},
        {"capacity": 8, "seed": -1},
    ],
)
def test_a_bad_setting_is_refused_when_the_packer_is_made(settings) -> None:
    with pytest.raises(ConfigError):
        Packer(**settings)


def test_capacities_that_end_seqpackers_interpreter_are_packed_or_refused() -> None:
    assert pack_sequences([3, 4], 2**30).bins == [[0, 1]]
    with pytest.raises(ConfigError, match="must be a whole number from 1 to"):
        pack_sequences([3, 4], 2**40)
