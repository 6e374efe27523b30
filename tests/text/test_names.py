"""Names and modules: a script that was written for SeqPacker runs when `seqpacker` is replaced in its imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from training import arguments, logged
from transformers import Trainer

import vlmpack.text
from vlmpack.testing import tiny_model

HEAVY = ("torch", "transformers", "datasets", "pyarrow")

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

TRAINER = """
import seqpacker
from seqpacker.hf_utils import pack_dataset

rows = pack_dataset(token_ids=token_ids, capacity=24, padding_value=1)
assert rows.column_names == ["input_ids", "attention_mask", "labels", "position_ids"]
run = Trainer(model=model, args=args, train_dataset=rows)
run.train()
"""

PLANS = """
import numpy as np
from seqpacker import Packer, StreamPacker

packer = Packer(capacity=24, strategy="ffd")
for pack in packer.pack(np.array([len(ids) for ids in token_ids])).packs:
    assert pack.used == sum(pack.lengths) and len(pack) == len(pack.sequence_ids)
stream = StreamPacker(capacity=24, strategy="nf")
packs = [pack for ids in token_ids for pack in stream.add(len(ids))] + stream.finish()
assert stream.sequences_added == len(token_ids)
"""


def run(script: str, **names) -> dict:
    """Run a script of SeqPacker's with our imports."""
    for module in ("seqpacker.hf_utils", "seqpacker.torch_utils", "seqpacker"):
        script = script.replace(f"from {module} import", "from vlmpack.text.seqpacker import")
    exec(script.replace("import seqpacker\n", "import vlmpack.text.seqpacker as seqpacker\n"), names)
    return names


@pytest.fixture
def given(tmp_path: Path) -> dict:
    token_ids = [[6 + (7 * i + k) % 80 for k in range(3 + 5 * i % 11)] for i in range(12)]
    args = arguments(tmp_path, per_device_train_batch_size=2, max_steps=3)
    return {"token_ids": token_ids, "model": tiny_model("qwen3"), "Trainer": Trainer, "args": args}


def test_a_loop_over_a_data_loader_runs_and_learns(given) -> None:
    losses = run(LOOP, **given)["losses"]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_trainer_script_runs(given) -> None:
    assert len(logged(run(TRAINER, **given)["run"])) == 3


def test_a_planning_script_runs(given) -> None:
    assert len(run(PLANS, **given)["packs"]) > 1


def test_every_name_of_seqpacker_is_in_its_place() -> None:
    top = {"__version__", "Pack", "PackMetrics", "PackResult", "Packer", "StreamPacker", "pack_sequences"}
    data_sets = {"pack_dataset", "pack_dataset_from_result"}
    tensors = {"PackedBatch", "pack_result_to_tensors", "packed_collate_fn"}
    for module in (vlmpack.text, vlmpack.text.seqpacker):
        assert top | data_sets | tensors <= set(vars(module))


def test_every_public_name_can_be_imported_from_the_room() -> None:
    for name in vlmpack.text.__all__:
        assert eval(f"text.{name}", {"text": vlmpack.text}) is not None
    with pytest.raises(AttributeError, match="no attribute 'pack_everything'"):
        _ = vlmpack.text.pack_everything


@pytest.mark.parametrize(
    ("code", "loaded"),
    [("from vlmpack.text import pack_sequences\npack_sequences([1], 2)", ""), ("import pyarrow", "pyarrow")],
)
def test_planning_brings_in_nothing_heavy(code: str, loaded: str) -> None:
    report = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == loaded


def test_a_missing_package_is_named_with_its_extra(monkeypatch) -> None:
    from vlmpack import errors
    from vlmpack.errors import ConfigError

    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'vlmpack\[data\]'"):
        vlmpack.text.pack_dataset([[1]], 2)
