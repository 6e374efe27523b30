"""SeqPacker's names: plans, streams, data sets, tensors; and rows of text as a model trains them."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections import deque
from functools import cache
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from equality import Alone, alone_through, check_gradients, gradients, limits_of
from torch.utils.data import DataLoader
from training import Gradients, arguments, logged
from transformers import Trainer, default_data_collator

from vlmpack.errors import ConfigError, SampleError
from vlmpack.interop import seqpacker
from vlmpack.interop.seqpacker import (
    ALIASES,
    Pack,
    Packer,
    RowCollator,
    StreamPacker,
    pack_dataset,
    pack_dataset_from_result,
    pack_result_to_tensors,
    pack_sequences,
    packed_collate_fn,
)
from vlmpack.layout import METADATA_KEY, PackedRow
from vlmpack.model import enable_packing
from vlmpack.plan import plan_bins
from vlmpack.plan.plan import STRATEGIES
from vlmpack.testing import tiny_model

# ---------------------------------------------------------------------- a script that was written for SeqPacker

LOOP = """
import torch
from torch.utils.data import DataLoader
from seqpacker import pack_sequences
from seqpacker.torch_utils import PackedBatch, pack_result_to_tensors, packed_collate_fn

loader = DataLoader(token_ids, batch_size=4, collate_fn=packed_collate_fn(capacity=24, padding_value=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for batch in loader:
    assert isinstance(batch, PackedBatch)
    loss = model(
        input_ids=batch.input_ids.to("cpu"),
        attention_mask=batch.attention_mask.to("cpu"),
        position_ids=batch.position_ids.to("cpu"),
        labels=batch.labels.to("cpu"),
    ).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

result = pack_sequences([len(ids) for ids in token_ids], 24)
whole = pack_result_to_tensors(result=result, token_ids=token_ids)
assert whole.input_ids.shape == (result.num_bins, 24)
assert max(int(boundaries[-1]) for boundaries in whole.cu_seqlens) <= 24
"""


def test_a_script_runs_with_its_imports_changed() -> None:
    script, names = LOOP, {"model": tiny_model("qwen3")}
    names["token_ids"] = [[6 + (7 * i + k) % 80 for k in range(3 + 5 * i % 11)] for i in range(12)]
    for module in ("seqpacker.torch_utils", "seqpacker"):
        script = script.replace(f"from {module} import", "from vlmpack.interop.seqpacker import")
    exec(script, names)
    assert names["losses"][-1] < names["losses"][0]


def test_every_name_of_seqpacker_is_there() -> None:
    plans = {"__version__", "Pack", "PackMetrics", "PackResult", "Packer", "StreamPacker", "pack_sequences"}
    rows = {"pack_dataset", "pack_dataset_from_result", "PackedBatch", "pack_result_to_tensors", "packed_collate_fn"}
    assert plans | rows <= set(vars(seqpacker))


def test_planning_imports_nothing_heavy() -> None:
    code = "from vlmpack.interop.seqpacker import *\npack_sequences([1], 2)\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "datasets", "pyarrow"}.isdisjoint(run.stdout.split()) and "numpy" in run.stdout


# ---------------------------------------------------------------------- plans

LENGTHS = [1000, 800, 600, 500, 400, 300, 200, 100]
LONG_NAMES = ("NextFit", "FirstFit", "BestFit", "WorstFit", "FirstFitDecreasing", "BestFitDecreasing", "Harmonic")


def test_a_result_is_a_plan_under_other_names() -> None:
    result = pack_sequences(LENGTHS, capacity=1024)
    assert result.bins == [[0], [1, 6], [2, 4], [3, 5, 7]]  # SeqPacker: [0], [1, 7], [2, 4], [3, 5, 6]
    assert result.packs[1] == Pack(sequence_ids=[1, 6], lengths=[800, 200])
    assert (result.packs[1].used, len(result.packs[1])) == (1000, 2)
    assert result.packs is result.packs
    assert result.num_bins == len(result) == 4
    assert result.efficiency == 3900 / 4096
    assert repr(result).startswith("PackResult(bins=4, efficiency=95.21%, time=")
    assert result.plan == plan_bins(LENGTHS, 1024, strategy="best_fit_decreasing")
    rows = np.split(*Packer(1024).pack_flat(np.asarray(LENGTHS)))
    assert [row.tolist() for row in rows] == result.bins
    assert pickle.loads(pickle.dumps(result)).bins == result.bins


def test_metrics_are_those_of_the_rows() -> None:
    result = pack_sequences(LENGTHS, 1024)
    used = np.asarray([pack.used / 1024 for pack in result.packs])
    metrics = result.metrics
    assert (metrics.num_sequences, metrics.num_packs, metrics.total_tokens, metrics.padding_tokens) == (8, 4, 3900, 196)
    assert (metrics.min_utilisation, metrics.max_utilisation) == (used.min(), used.max())
    assert (metrics.avg_utilisation, metrics.utilisation_std) == pytest.approx((used.mean(), used.std()))
    assert (metrics.efficiency, metrics.padding_ratio) == (3900 / 4096, 196 / 4096)
    assert (metrics.avg_sequences_per_pack, metrics.packing_time_ms) == (2.0, result.time_ms)
    assert metrics.throughput == pytest.approx(8 / (result.time_ms / 1000))


@pytest.mark.parametrize("name", [*ALIASES, *STRATEGIES, *LONG_NAMES, "OBFD"])
def test_every_strategy_packs_every_sample_once(name: str) -> None:
    result = Packer(capacity=1024, strategy=name).pack(LENGTHS)
    assert sorted(sample for row in result.bins for sample in row) == list(range(8))
    assert max(pack.used for pack in result.packs) <= 1024


def test_a_seed_reaches_the_shuffling_strategy_alone() -> None:
    def bins(strategy: str, seed: int | None) -> list[list[int]]:
        return pack_sequences(list(range(1, 60)), 100, strategy=strategy, seed=seed).bins

    assert bins("ffs", 1) != bins("ffs", 2)
    assert bins("ffs", None) == bins("ffs", 42)
    assert bins("nf", 1) == bins("nf", 2) == bins("nf", None)
    assert bins("exact_fill", 1) != bins("exact_fill", 2)  # under our own name it is our own seed


@pytest.mark.parametrize("changed", [{"capacity": 0}, {"capacity": 2**40}, {"strategy": "best"}, {"seed": -1}])
def test_a_bad_setting_is_refused_when_the_packer_is_made(changed) -> None:
    with pytest.raises(ConfigError):
        Packer(**{"capacity": 8, **changed})
    with pytest.raises(ConfigError):
        StreamPacker(10, strategy="obfd")


@pytest.mark.parametrize("strategy", ["nf", "hk", "NextFit", "harmonic"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_has_the_rows_of_all_lengths_at_once(strategy: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 97) for _ in range(300)]
    packer = StreamPacker(97, strategy=strategy)
    early = [pack for length in lengths for pack in packer.add(length)]
    packs = early + packer.finish()
    expected = pack_sequences(lengths, 97, strategy=strategy.replace("_", ""))
    assert sorted(pack.sequence_ids for pack in packs) == sorted(expected.bins)
    assert all(pack.lengths == [lengths[sample] for sample in pack.sequence_ids] for pack in packs)
    assert sum(map(len, early)) >= 300 - 64


@pytest.mark.parametrize("length", [0, -1, 11, 2.5, None])
@pytest.mark.parametrize("strategy", ["nf", "hk"])
def test_a_bad_length_of_a_stream_is_named_and_left_out(strategy: str, length) -> None:
    packer = StreamPacker(capacity=10, strategy=strategy)
    packer.add(8)
    with pytest.raises(SampleError, match="sample 1"):
        packer.add(length)
    assert packer.add(2) == []
    assert packer.sequences_added == 2
    assert packer.finish() == [Pack(sequence_ids=[0, 1], lengths=[8, 2])]
    with pytest.raises(ConfigError, match="finished"):
        packer.add(1)


# ---------------------------------------------------------------------- data sets and tensors

IDS = [[10, 20, 30], [40, 50], [60, 70, 80, 90], [100]]


def test_the_columns_are_seqpackers() -> None:
    rows = pack_dataset(IDS, 6, padding_value=1, seq_lengths=True)
    assert isinstance(rows, datasets.Dataset)
    assert rows[:] == {
        "input_ids": [[10, 20, 30, 100, 1, 1], [40, 50, 60, 70, 80, 90]],
        "attention_mask": [None, None],
        "labels": [[-100, 20, 30, -100, -100, -100], [-100, 50, -100, 70, 80, 90]],
        "position_ids": [[0, 1, 2, 0, 0, 0], [0, 1, 0, 1, 2, 3]],
        "seq_lengths": [[3, 1], [2, 4]],
    }
    assert [len(ids) for ids in pack_dataset(IDS, 6, pad_to_capacity=False)["input_ids"]] == [4, 6]
    batch = batch_of(padding_value=1, label_padding_value=-7, labels=[[-100, -100, 30], *IDS[1:]])
    for name in ("input_ids", "position_ids"):
        assert getattr(batch, name).tolist() == rows[name][:]
    assert batch.labels.tolist() == [[-7, -7, 30, -7, -7, -7], [-7, 50, -7, 70, 80, 90]]
    assert ([cu.tolist() for cu in batch.cu_seqlens], batch.max_seqlen) == ([[0, 3, 4], [0, 2, 6]], 4)


FORMS = {
    "tuples": tuple(map(tuple, IDS)),
    "a generator": (ids for ids in IDS),
    "a deque": deque(IDS),
    "arrays": [np.asarray(ids, np.uint16) for ids in IDS],
    "tensors": [torch.tensor(ids) for ids in IDS],
    "a column": datasets.Dataset.from_dict({"input_ids": IDS})["input_ids"],
    "an arrow array": pa.array(IDS),
    "arrow chunks": pa.chunked_array([IDS[:1], IDS[1:]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_depend_on_how_tokens_come_in(form: str) -> None:
    assert pack_dataset(FORMS[form], 6)[:] == pack_dataset(IDS, 6)[:]


@pytest.mark.parametrize(
    ("ids", "changed", "message"),
    [
        ([[1], [1, 2.5]], {}, "sample 1: the token ids are not a vector of whole numbers"),
        ([[1], [1, None]], {}, "sample 1: the token ids are not a vector"),
        ([[1], [[1]]], {}, "sample 1: the token ids are not a vector"),
        ([[1], 7], {}, "sample 1: the token ids are not a vector"),
        (pa.array([[1], None]), {}, "sample 1: the token ids are not a vector"),
        ([[1], []], {}, "sample 1: has length 0"),
        ([[1], [1] * 9], {}, "sample 1: does not fit a row of 6 tokens"),
        ([[1], [1, 2]], {"labels": [[1], [1]]}, "sample 1: has 2 token ids, but 1 labels"),
        ([[1], [1, 2]], {"labels": [[1]]}, "labels of 1 samples, but token ids of 2"),
        (5, {}, "one list, vector or tensor for each sample"),
        ("text", {}, "one list, vector or tensor for each sample"),
        ([[1]], {"overlength": "truncate"}, "overlength"),
        ([[1]], {"label_padding_value": 0}, "label_padding_value is 0, which may be a label"),
    ],
)
def test_a_bad_sample_or_setting_is_named(ids: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises((SampleError, ConfigError), match=message):
        pack_dataset(ids, 6, **changed)


def test_a_result_of_other_samples_is_refused() -> None:
    for lengths in ([3, 2, 4], [3, 2, 5, 1]):
        with pytest.raises(ConfigError, match="these are not the samples that were packed"):
            pack_dataset_from_result(pack_sequences(lengths, 6), IDS)


def test_samples_above_the_capacity_can_be_left_out() -> None:
    assert pack_dataset(IDS, 3, overlength="drop", pad_to_capacity=False)["input_ids"][:] == [
        [10, 20, 30],
        [40, 50, 100],
    ]
    for ids in ([], [[1] * 9]):
        rows = pack_dataset(ids, 6, overlength="drop")
        assert (len(rows), rows.features) == (0, pack_dataset(IDS, 6).features)
    batch = packed_collate_fn(2, overlength="drop")([[1, 2, 3]])
    assert batch.input_ids.shape == (0, 2)
    with pytest.raises(ConfigError, match=r"no sample: each exceeds the capacity of 2 tokens.*raise the capacity"):
        batch.to_hf()


def batch_of(**changed):
    return pack_result_to_tensors(pack_sequences([3, 2, 4, 1], 6), IDS, **changed)


def test_the_mask_lets_a_token_see_its_own_sample_up_to_itself() -> None:
    sees = batch_of().attention_mask == 0
    assert sees.shape == (2, 1, 6, 6)
    drawn = ["".join(".x"[int(cell)] for cell in row) for row in sees[0, 0]]
    # padding sees itself: a row of nothing would be NaN
    assert drawn == ["x.....", "xx....", "xxx...", "...x..", "....x.", ".....x"]


def test_one_row_for_the_model_has_all_samples_and_no_padding() -> None:
    for changed in ({}, {"label_padding_value": -1}):
        row = PackedRow.from_hf(batch_of(**changed).to_hf())
        assert row.segments.lengths == (3, 1, 2, 4)
        assert row.input_ids.tolist() == [[10, 20, 30, 100, 40, 50, 60, 70, 80, 90]]
        assert row.shift_labels is not None
        assert row.shift_labels.tolist() == [[20, 30, -100, -100, 50, -100, 70, 80, 90, -100]]
        assert row.metadata.num_targets == 6
    assert {t.device.type for t in (batch_of(device="meta").labels, batch_of(device="meta").cu_seqlens[0])} == {"meta"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_packs_each_batch(workers) -> None:
    collate = pickle.loads(pickle.dumps(packed_collate_fn(capacity=6, strategy="obfd")))
    context = "fork" if workers else None
    loader = DataLoader(IDS, batch_size=3, collate_fn=collate, num_workers=workers, multiprocessing_context=context)  # pyright: ignore
    assert [batch.input_ids.shape for batch in loader] == [(2, 6), (1, 6)]


@pytest.mark.parametrize("name", ["labels", "loss_mask", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize("collate", [packed_collate_fn(6), RowCollator(bare_row="one_sample")])
def test_columns_beside_the_ids_mark_padding_and_what_is_trained_on(name: str, collate) -> None:
    marks = {"labels": [-100, -100, 3, 0]}.get(name, [0, 0, 1, 1])
    sample = {"input_ids": [1, 2, 3, 0], name: marks, "attention_mask": [1, 1, 1, 0]}
    batch = collate([sample, {"input_ids": torch.tensor([5, 6]), name: None}])
    batch = batch if isinstance(batch, dict) else batch.to_hf()
    assert batch["input_ids"].tolist() == [[1, 2, 3, 5, 6]]
    assert batch["labels"].tolist() == [[-100, -100, 3, -100, 6]]


# ---------------------------------------------------------------------- rows for models


def rows_of(**changed: Any) -> list[Any]:
    return list(pack_dataset(IDS[:3], 6, **changed))


@pytest.mark.parametrize("changed", [{}, {"seq_lengths": True}, {"pad_to_capacity": False}])
def test_padding_is_left_out_and_boundaries_are_kept(changed) -> None:
    batch = RowCollator()(rows_of(**changed))
    assert batch["input_ids"].tolist() == [[10, 20, 30, 40, 50, 60, 70, 80, 90]]
    assert PackedRow.from_hf(batch).segments.lengths == (3, 2, 4)
    assert batch["position_ids"][batch["labels"] == -100].tolist() == [0, 0, 0]
    assert batch["use_cache"] is False
    assert batch[METADATA_KEY].num_targets == 6


@pytest.mark.parametrize(("position_rows", "shape"), [(0, None), (1, (1, 9)), (4, (4, 1, 9))])
def test_positions_have_as_many_rows_as_the_model_takes(position_rows, shape) -> None:
    positions = RowCollator(position_rows=position_rows)(rows_of()).get("position_ids")
    assert (None if positions is None else positions.shape) == shape


def test_columns_that_agree_are_one_row() -> None:
    told = {
        "labels": [-100, 2, 3, -100, 5, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 0],
        "attention_mask": [1, 1, 1, 1, 1, 0, 0],
        "seq_lengths": [3, 2],
    }
    names = ("attention_mask", "position_ids", "labels", "seq_lengths")
    for left_out in [set(), {"attention_mask", "labels"}, *({name} for name in names)]:
        row = {"input_ids": [1, 2, 3, 4, 5, 0, 0], **{name: told[name] for name in told if name not in left_out}}
        assert RowCollator()([row])["cu_seqlens_q"].tolist() == [0, 3, 5]
    for padding in ([0, 0], [1, 1], [9, 5]):  # positions of padding that do not count on
        row = {"input_ids": [1, 2, 3, 0, 0], "position_ids": [0, 1, 2, *padding], "seq_lengths": [3]}
        assert RowCollator()([row])["cu_seqlens_q"].tolist() == [0, 3]


SIX = {"input_ids": [1, 2, 3, 4, 5, 6]}


@pytest.mark.parametrize(
    "row",
    [
        {**SIX, "seq_lengths": [3]},
        {**SIX, "seq_lengths": [4], "labels": [-100, 2, 3, 4, -100, 6]},
        {**SIX, "seq_lengths": [4], "loss_mask": [0, 0, 0, 0, 0, 1]},
        {**SIX, "seq_lengths": [], "labels": [-100] * 6},
        {**SIX, "seq_lengths": [2, 4], "attention_mask": [1, 1, 1, 0, 0, 0]},
        {**SIX, "seq_lengths": [2], "attention_mask": [1, 1, 1, 0, 0, 0]},
        {**SIX, "seq_lengths": [2, 4], "position_ids": [0, 1, 2, 0, 1, 2]},
        {**SIX, "seq_lengths": [3], "position_ids": [0, 1, 2, 0, 1, 2]},
        {**SIX, "seq_lengths": [6], "position_ids": [0, 1, 2, 0, 1, 2]},
        {**SIX, "seq_lengths": [3, 3], "position_ids": [0, 1, 2, 3, 4, 5]},
        {**SIX, "seq_lengths": [3, 3], "position_ids": [0, 1, 2, 0, 1, 9]},
        {**SIX, "seq_lengths": [2, 1, 2], "position_ids": [0, 1, 0, 0, 0, 1]},  # one boundary too many, one missing
        {**SIX, "seq_lengths": [2, 5]},
        {**SIX, "seq_lengths": [6, 0]},
        {**SIX, "attention_mask": [1, 1, 2, 2, 0, 0]},
        {**SIX, "attention_mask": [0, 1, 1, 1, 1, 1]},
        {**SIX, "attention_mask": [0] * 6},
        {**SIX, "loss_mask": [0, 1, 2, 1, 1, 1]},
        {**SIX, "loss_mask": [1] * 5},
        {**SIX, "labels": [1] * 6, "completion_mask": [1] * 6},
        {**SIX, "loss_weights": [0.5] * 6},
        {**SIX, "topk_ids": [[1]] * 6},
        {**SIX, "position_ids": [1, 2, 3, 4, 5, 6]},
        {**SIX, "position_ids": [0, 1, 5, 6, 7, 8]},
        {"input_ids": []},
        {"tokens": [1]},
        {"input_ids": "text"},
    ],
)
def test_columns_that_contradict_each_other_are_refused(row) -> None:
    with pytest.raises(SampleError, match=r"^sample 1: the "):
        RowCollator(bare_row="one_sample")([{"input_ids": [1, 2]}, row])


def test_a_row_that_lost_its_boundaries_on_the_way_is_refused() -> None:
    kept = {name: rows_of()[0][name] for name in ("input_ids", "labels")}
    with pytest.raises(SampleError, match=r"sample 0: .*boundaries are unknown. If a trainer removed"):
        RowCollator()([kept])


def test_a_rank_without_rows_has_one_token_and_no_target() -> None:
    batch = RowCollator()([])
    assert (batch["input_ids"].tolist(), batch["labels"].tolist(), batch["vlmpack"].num_targets) == ([[0]], [[-100]], 0)


@pytest.mark.parametrize("changed", [{"position_rows": 3}, {"bare_row": "sample"}])
def test_a_setting_that_does_not_exist_is_refused(changed) -> None:
    with pytest.raises(ConfigError, match=r"text models take 1, Qwen-VL models 4|refuse, one_sample"):
        RowCollator(**changed)


# ---------------------------------------------------------------------- against every sample alone

CAPACITY = 16


@cache
def fresh(family: str) -> Any:
    return tiny_model(family)


def model_of(family: str = "qwen3") -> Any:
    """An untouched model, the same each time."""
    return copy.deepcopy(fresh(family))


@cache
def samples() -> tuple[dict[str, torch.Tensor], ...]:
    """Of unlike length; some tokens of each are not trained on."""
    rng = torch.Generator().manual_seed(5)
    ids = [torch.randint(6, 90, (n,), generator=rng) for n in (7, 5, 3, 11, 2, 8, 6)]
    masks = [torch.rand(len(each), generator=rng) < 0.7 for each in ids]
    return tuple({"input_ids": i, "labels": i.masked_fill(~m, -100)} for i, m in zip(ids, masks, strict=True))


@cache
def truth(family: str = "qwen3") -> Alone:
    return alone_through(model_of(family), samples())


def rows() -> Any:
    ids, labels = ([sample[name].tolist() for sample in samples()] for name in ("input_ids", "labels"))
    return pack_dataset(ids, CAPACITY, labels=labels)


def check(model: Any, loss: torch.Tensor, family: str = "qwen3") -> None:
    loss.backward()
    assert torch.isclose(loss, truth(family).loss, rtol=2e-6, atol=0)
    check_gradients(truth(family), gradients(model), limits_of(family))


@pytest.mark.parametrize(
    ("family", "position_rows"), [("qwen3", 1), ("qwen3_next", 1), ("qwen3_vl", 0), ("qwen3_vl", 4)]
)
def test_an_enabled_model_trains_the_rows_of_a_data_set_exactly(family, position_rows) -> None:
    model = enable_packing(model_of(family))
    check(model, model(**RowCollator(position_rows=position_rows)(list(rows()))).loss, family)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_model_trains_columns_masks_and_shifted_labels_exactly(attention) -> None:
    batch = packed_collate_fn(CAPACITY)(samples())
    columns: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    for kwargs in (
        {**default_data_collator(list(rows())), "use_cache": False},  # as HF Trainer sets it
        {**columns, "labels": batch.labels, "attention_mask": batch.attention_mask},  # SeqPacker's loop
        batch.to_hf(),
    ):
        model = model_of()
        model.set_attn_implementation(attention)
        check(model, model(**kwargs).loss)
    model = model_of()
    logits = model(**columns, use_cache=False).logits
    check(model, F.cross_entropy(logits.flatten(0, 1), batch.shift_labels.flatten()))


@pytest.mark.parametrize(
    ("with_packing", "collator"),
    [(True, RowCollator()), (False, RowCollator()), (False, default_data_collator)],
    ids=["enabled", "plain", "plain, with its own collator"],
)
def test_trainer_trains_the_rows_of_a_data_set_exactly(collator, with_packing, tmp_path) -> None:
    model = enable_packing(model_of()) if with_packing else model_of()
    args = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=1)
    run, seen = Trainer(model, args, collator, rows()), Gradients()
    run.add_callback(seen)
    run.train()
    assert logged(run) == [pytest.approx(truth().loss.item(), rel=1e-6)]
    check_gradients(truth(), {name: g for name, g in seen.steps[0].items() if g.any()}, limits_of("qwen3"))
