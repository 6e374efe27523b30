"""`vlmpack demo`: two trainings that agree, with the numbers to show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_app import check_keys
from PIL import Image
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.demo import DemoOptions
from vlmpack.cli.training import Run, Trainings, packed_against_alone
from vlmpack.data import save_processor, to_conversation
from vlmpack.layout import Segments
from vlmpack.model import engine
from vlmpack.model.row import RowContext
from vlmpack.testing import SyntheticReceipts, tiny_model, tiny_processor

STEPS, BATCH = 3, 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that trains in no time."""
    folder = tmp_path_factory.mktemp("model")
    processor = tiny_processor("qwen2_5_vl", max_pixels=64 * 28 * 28)
    tiny_model("qwen2_5_vl", processor=processor, hidden=32, layers=2, lively=False).save_pretrained(folder)
    save_processor(processor, folder)
    return folder


@pytest.fixture(scope="module")
def receipts() -> list[dict[str, Any]]:
    return [to_conversation(record) for record in SyntheticReceipts(num=3, scale=0.35)]


@pytest.mark.slow
def test_packed_trains_as_padded_does_on_fewer_tokens(tmp_path: Path) -> None:
    arguments = ["demo", "--steps", str(STEPS), "--batch-size", str(BATCH), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--seed", "1"])
    assert result.exit_code == 0, result.output
    said, numbers = result.stdout, json.loads((tmp_path / "demo.json").read_text())
    check_keys("demo", numbers)
    assert "━" not in said  # no bars behind a pipe
    padded, packed = numbers["padded"], numbers["packed"]
    assert padded["lengths"] == packed["lengths"]
    assert len(packed["lengths"]) == STEPS
    assert all(len(step) == BATCH for step in packed["lengths"])
    assert sum(packed["physical"]) == sum(map(sum, packed["lengths"])) < sum(padded["physical"])
    assert padded["losses"] == pytest.approx(packed["losses"], abs=2e-5)
    assert len(set(packed["losses"])) == STEPS
    assert numbers["gradients"]["cosine"] > 1 - 1e-6
    assert packed["peak_bytes"] < padded["peak_bytes"]
    for picture in ("rows.png", "losses.png"):
        with Image.open(tmp_path / picture) as image:
            assert min(image.size) > 200
    for text in ("physical tokens", "fill", " 100 ", "step time", "peak memory", "largest loss difference", "cosine"):
        assert text in said


@pytest.mark.slow
def test_bfloat16_runs_and_pixels_have_the_type_of_the_weights(small: Path) -> None:
    """Not every model casts them."""
    options = DemoOptions(model=str(small), dtype="bfloat16", steps=1, batch_size=2)
    trainings, seen = Trainings(options), set[torch.dtype]()
    model = trainings.make_model()
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.add(kwargs["pixel_values"].dtype), with_kwargs=True)
    losses = [
        trainings.train(layout, each, report=lambda done: None).losses
        for layout, each in (("padded", model), ("packed", trainings.make_model()))
    ]
    assert seen == {torch.bfloat16}
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_what_the_demo_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "2 + 2?", "completion": "4"}')
    (tmp_path / "config.json").write_text("{}")
    refusals = {
        ("--data", tmp_path / "nothing"): "nothing",
        ("--data", tmp_path / "chats.jsonl"): "holds 1; take at most that many",
        ("--model", tmp_path): f"processor {tmp_path} cannot be read (Unrecognized model",
        ("--out", tmp_path / "chats.jsonl"): f"{tmp_path / 'chats.jsonl'} cannot be written: ",
    }
    for options, fault in refusals.items():
        result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *map(str, options)])
        assert result.exit_code == 2
        assert result.stderr.startswith("vlmpack: ") and fault in result.stderr


# ---------------------------------------------------------------------- the proof can fail


def test_the_cosine_of_a_leaking_row_is_not_1(receipts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = tiny_processor()
    model = tiny_model(processor=processor, hidden=32)
    assert packed_against_alone(model, processor, receipts).cosine > 1 - 1e-9

    def one_segment(**metadata: Any) -> RowContext:
        return RowContext(**{**metadata, "segments": Segments.from_lengths([metadata["segments"].total])})

    monkeypatch.setattr(engine, "RowContext", one_segment)
    assert packed_against_alone(model, processor, receipts).cosine < 0.999


# ---------------------------------------------------------------------- what is measured


def a_run(layout: Any = "packed", **changes: Any) -> Run:
    given: dict[str, Any] = {
        "layout": layout,
        "lengths": ((3, 5), (2, 4), (7, 7)),
        "physical": (10, 8, 14),
        "seconds": (9.0, 1.0, 2.0),
        "losses": (3.0, 2.0, 1.0),
        "peak_bytes": 2**21,
    }
    return Run(**{**given, **changes})


def test_speed_leaves_out_the_first_step_and_fill_does_not() -> None:
    measures = a_run().measures()
    assert measures["fill ratio, %"] == 100 * 28 / 32
    assert measures["step time, ms"] == 1500
    assert measures["real tokens/s"] == (6 + 14) / 2 / 1.5
    single = a_run(lengths=((3, 5),), physical=(10,), seconds=(4.0,), losses=(3.0,))
    assert single.measures()["real tokens/s"] == 2
