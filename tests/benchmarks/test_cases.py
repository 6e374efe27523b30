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
from benchmarks.cases.attention import Head, check_same
from benchmarks.cases.collating import CollateShapes, LengthShapes, PackShapes, PixelShapes, long_batch
from benchmarks.cases.planning import PlanShapes, stream
from benchmarks.cases.step import CompileShapes, check_same_loss, share_of_ideal
from benchmarks.cases.tree import Rollouts, TreeShapes
from benchmarks.measuring import BenchSettings, Figure
from benchmarks.peers import PeerShapes
from benchmarks.receipts import MEASURED, ReceiptShapes
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout import lengths_from_mask

QUICK = BenchSettings(seconds=0.0)
TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=3, longest=40
)
SHAPES = {
    "pack": PackShapes(batches=((2, 10), (3, 7))),
    "collate": CollateShapes(samples=2, max_image_tokens=9),
    "pixels": PixelShapes(images=2, grid=(1, 2, 4), patch_size=3, words=5, batches=2),
    "plan": PlanShapes(many=300, few=100, stream=200, ranks=2),
    "lengths": LengthShapes(images=5, files=2, size=(40, 56), part=2, processed=2),
    "peers": PeerShapes(lengths=(12, 9, 15), grid=(1, 4, 4), planned=50),
    "step": TINY,
    "tree": TreeShapes(
        receipts=TINY,
        rollouts=(Rollouts(prefix=70, branch=5, samples=3, image_tokens=8),),
        long=Rollouts(prefix=66, branch=9, samples=2, image_tokens=12),
        groups=2,
    ),
    "head": TINY,
    "compile": CompileShapes(receipts=replace(TINY, layers=1), steps=4, samples=(1, 2), longest=(20, 30)),
}
TARGETS = {
    "pack": [3.0, 2.0, 3.0] * 2,
    "collate": [1.1] * 2,
    "pixels": [1.3, 1.3, 4.0],
    "plan": [*[0.4, 1.1, 1.0, 0.1, 200, 1.0] * 3, 1.5],
    "lengths": [20.0],
    "step": [0.95, 0.7],
    "tree": [0.9, 0.85, 0.02, 0.01],
    "head": [],
    "compile": [3, 0],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", CASES)
def test_a_case_measures_and_holds_its_figures_to_the_targets(name):
    figures = [entry for entry in CASES[name].run(QUICK, SHAPES[name]) if isinstance(entry, Figure)]
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.case == name and (figure.value >= 0) for figure in figures)
    assert all((figure.family is not None) == CASES[name].by_family for figure in figures)
    if name != "peers":
        assert [figure.target.limit for figure in figures if figure.target] == TARGETS[name]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_share_of_ideal_is_the_speed_up_over_the_ideal(family):
    found = {figure.name: figure for figure in CASES["step"].run(replace(QUICK, family=family), TINY)}
    share = found["speed-up"].value / found["ideal speed-up"].value
    assert found["share of ideal"].value == pytest.approx(share)
    assert found["memory, packed / padded"].value < 1
    assert {figure.family for figure in found.values()} == {family}


def test_families_with_small_products_are_held_to_less():
    limits = {name: share_of_ideal(family_named(name)).limit for name in MEASURED}
    assert {name for name, limit in limits.items() if limit == 0.85} == {
        *("qwen3_vl_moe", "qwen4_exp", "gpt_oss", "llama4_text"),  # experts
        *("qwen3_5", "qwen3_5_moe", "qwen3_next"),  # gated delta layers
        *("gemma3", "paligemma"),  # image tokens, and prefixes, that attend to later ones
    }
    assert set(limits.values()) == {0.95, 0.85}


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


def test_both_heads_give_the_same_gradients_and_chunks_take_less_memory():
    head = Head(300, 16, 1310, seed=0, device="cpu", dtype=torch.float32)
    gradients = []
    for way in (lambda: head.labelled(110, chunk=40), lambda: head.all_rows(110)):
        way()
        gradients.append((head.hidden.grad.clone(), head.head.weight.grad.clone()))
    torch.testing.assert_close(gradients[0], gradients[1])
    peaks = [head.peak(lambda chunk=chunk: head.labelled(300, chunk)) for chunk in (30, 100, 300)]
    assert peaks == sorted(peaks)


def test_the_batch_to_pack_has_the_ratio_that_was_asked_for():
    lengths = lengths_from_mask(long_batch(6, 100, ratio=5.0).attention_mask).lengths
    assert sorted(lengths) == [20, 36, 52, 68, 84, 100]


def test_a_stream_holds_every_sample_and_counts_how_long_one_stays():
    lengths = torch.randint(1, 60, (50,)).numpy()
    rows, stay = stream(lengths, capacity=100, waiting=4)
    assert rows >= -(-int(lengths.sum()) // 100)
    assert 0 < stay <= 50


# ---------------------------------------------------------------------- the command


@pytest.fixture
def tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {name: replace(CASES[name], shapes=SHAPES[name]) for name in ("pack", "step")}
    monkeypatch.setattr(command, "CASES", cases)


def run(*words: str) -> tuple[int, str]:
    console = Console(file=io.StringIO())
    return main([*words, "--budget", "0"], console), console.file.getvalue()  # type: ignore[attr-defined]


def test_it_prints_figures_writes_them_and_leaves_out_what_there_is_no_time_for(tiny_cases, tmp_path):
    path = tmp_path / "figures.json"
    status, printed = run("step", "--family", "qwen3", "--family", "qwen2_vl", "--json", str(path))
    assert status == 0
    assert "| step qwen3 | speed-up |" in printed
    assert "skipped: step, qwen2_vl: the time was used up before its turn" in printed
    written = json.loads(path.read_text())
    assert written["settings"]["family"] == ["qwen3", "qwen2_vl"]
    assert {figure["case"] for figure in written["figures"]} == {"step"}


def test_a_check_fails_where_something_was_owed(tiny_cases):
    assert run("step", "--family", "qwen3", "--family", "qwen2_vl", "--check")[0] == 1


@pytest.mark.parametrize(("words", "seen"), [(("steps",), "there is no 'steps'"), (("--family", "gpt"), "no 'gpt'")])
def test_what_there_is_not_is_told_with_the_choices(words, seen, capsys):
    with pytest.raises(SystemExit):
        run(*words)
    assert seen in capsys.readouterr().err


def test_numbers_that_cannot_be_are_refused():
    status, printed = run("pack", "--threads", "0")
    assert status == 2
    assert "--threads must be a whole number of at least 1, got 0" in printed
