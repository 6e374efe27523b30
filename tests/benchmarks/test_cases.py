"""Each case runs on tiny shapes and says what it promises to say. How fast is never asked here."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import benchmarks.__main__ as command
from benchmarks.__main__ import CASES, main
from benchmarks.cases.attention import check_same
from benchmarks.cases.collating import CollateShapes, LengthShapes, PackShapes, PixelShapes
from benchmarks.cases.planning import PlanShapes
from benchmarks.cases.sampling import SamplingShapes
from benchmarks.cases.step import CompileShapes, check_same_loss
from benchmarks.cases.tree import Rollouts, TreeShapes
from benchmarks.measuring import BenchSettings, Figure, Skipped
from benchmarks.peers import PeerShapes
from benchmarks.receipts import MEASURED, ReceiptShapes, receipt_batch, receipt_config
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout.batch import lengths_from_mask

QUICK = BenchSettings(seconds=0.0)
TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=3, longest=40
)
SHAPES = {
    "pack": PackShapes(batches=((2, 10), (3, 7))),
    "collate": CollateShapes(samples=2, max_image_tokens=9),
    "pixels": PixelShapes(images=2, grid=(1, 2, 4), patch_size=3, words=5, batches=2),
    "plan": PlanShapes(many=300, stream=200),
    "lengths": LengthShapes(images=5, files=2, size=(40, 56), part=2, processed=2),
    "peers": PeerShapes(lengths=(12, 9, 15), grid=(1, 4, 4)),
    "step": TINY,
    "tree": TreeShapes(
        receipts=TINY,
        rollouts=(Rollouts(prefix=70, branch=5, samples=3, image_tokens=8),),
        groups=(Rollouts(prefix=70, branch=30, samples=3, image_tokens=8),),
    ),
    "head": TINY,
    "sampling": SamplingShapes(receipts=replace(TINY, vocab_size=600), requests=3, shortest=4, longest=9, sampled=3),
    "host": TINY,
    "compile": CompileShapes(receipts=replace(TINY, layers=1), steps=2, samples=(1, 2), longest=(20, 30)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", CASES)
def test_a_case_measures(name):
    figures = [entry for entry in CASES[name].run(QUICK, SHAPES[name]) if isinstance(entry, Figure)]
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.case == name and (figure.value >= 0) for figure in figures)
    assert all((figure.family is not None) == CASES[name].by_family for figure in figures)


@pytest.mark.slow
def test_rows_of_a_tree_that_there_is_no_time_for_are_left_out():
    *_, left_out = CASES["tree"].run(QUICK, SHAPES["tree"])
    assert isinstance(left_out, Skipped)
    assert (left_out.name, left_out.owed) == ("qwen3_vl, 70/30 x 3", True)
    assert any("in pieces" in figure.name for figure in CASES["tree"].run(QUICK, replace(SHAPES["tree"], rollouts=())))


def test_ways_that_compute_different_things_are_not_timed():
    check_same_loss({"padded": torch.tensor(2.0), "packed": torch.tensor(2.0001)})
    for other in (2.01, float("nan")):
        with pytest.raises(VlmpackError, match="the steps do not compute the same loss"):
            check_same_loss({"padded": torch.tensor(2.0), "packed": torch.tensor(other)})
    truth = torch.ones(3)
    check_same({"oracle": truth, "way": truth + 1e-5}, "oracle")
    with pytest.raises(VlmpackError, match=r"way differs from oracle by 1\.0e-03"):
        check_same({"oracle": truth, "way": truth + 1e-3}, "oracle")


def test_layers_that_are_not_compiled_are_not_counted_as_compiled_once(monkeypatch):
    monkeypatch.setattr("benchmarks.cases.step.compile_layers", lambda model, **settings: model)
    with pytest.raises(VlmpackError, match="no layer was compiled"):
        list(CASES["compile"].run(QUICK, SHAPES["compile"]))


@pytest.mark.parametrize("name", MEASURED)
def test_every_sample_has_its_length_its_labels_and_about_its_share_of_image(name):
    family = family_named(name)
    config = receipt_config(family, TINY)
    batch = receipt_batch(family, config, TINY)
    assert batch.metadata is not None
    assert batch.labels is not None
    assert batch.metadata.lengths == lengths_from_mask(batch.attention_mask).lengths == TINY.lengths
    assert batch.metadata.num_targets == int((batch.labels[:, 1:] != -100).sum())
    if family.has_vision:
        token = config.audio_token_id if family.has_audio else config.image_token_id
        assert ((batch.input_ids == token).sum(1) > 0).all()


# ---------------------------------------------------------------------- the command


@pytest.fixture
def tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {name: replace(CASES[name], shapes=SHAPES[name]) for name in ("pack", "step")}
    monkeypatch.setattr(command, "CASES", cases)


def run(*words: str) -> tuple[int, str]:
    console = Console(file=io.StringIO())
    return main([*words, "--budget", "0"], console), console.file.getvalue()  # type: ignore[attr-defined]


def test_it_prints_figures_writes_them_and_leaves_out_what_there_is_no_time_for(tiny_cases, tmp_path):
    path, words = tmp_path / "figures.json", ("step", "--family", "qwen3", "--family", "qwen2_vl")
    status, printed = run(*words, "--json", str(path))
    assert (status, run(*words, "--check")[0]) == (0, 1)  # a check fails where something was skipped
    assert "| step qwen3 | speed-up |" in printed
    assert "skipped: step, qwen2_vl: the time was used up before its turn" in printed
    written = json.loads(path.read_text())
    assert written["settings"]["family"] == ["qwen3", "qwen2_vl"]
    assert {figure["case"] for figure in written["figures"]} == {"step"}


@pytest.mark.parametrize(("words", "seen"), [(("steps",), "there is no 'steps'"), (("--family", "gpt"), "no 'gpt'")])
def test_what_there_is_not_is_told_with_the_choices(words, seen, capsys):
    with pytest.raises(SystemExit):
        run(*words)
    assert seen in capsys.readouterr().err
