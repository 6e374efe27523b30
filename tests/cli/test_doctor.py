"""`vlmpack doctor`: the environment; with --probe, tables and an exit status, and a leak named by its cause."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_app import check_keys
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.doctor import gated_delta_serving, import_problem, versions
from vlmpack.cli.layers import attention_layers
from vlmpack.families import registry
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments
from vlmpack.machine import NEWEST_TESTED
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.probing import Report
from vlmpack.probing.report import Baseline, Check
from vlmpack.testing import tiny_model

FEW = ("qwen3_vl", "qwen3")


@pytest.fixture
def few_families() -> Iterator[None]:
    """Two families for all: `tests/probing` probes every one."""
    every = dict(FAMILIES)
    for name in every.keys() - set(FEW):
        del registry.FAMILIES[name]
    yield
    registry.FAMILIES.clear()
    registry.FAMILIES.update(every)  # in their order


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_model("qwen3_vl").save_pretrained(tmp_path)
    return str(tmp_path)


def run(*args: str) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["doctor", *args])


def run_probe(*args: str) -> Any:
    return run("--probe", "--device", "cpu", *args)


def answer(result: Any) -> Any:
    return json.loads(result.stdout)


def words(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------------- environment


def test_the_environment_is_versions_devices_and_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmpack.cli.doctor.import_problem", lambda module: None)  # a process and seconds each time
    result = run()
    assert result.exit_code == 0, result.output
    for text in (
        "torchvision",
        "sdpa_segments",
        "it runs on CUDA only",
        "Gated delta layers",
        "vlmpack doctor --probe",
    ):
        assert text in result.stdout
    parts = answer(run("tiny:gpt_oss", "--json"))
    check_keys("doctor", parts)
    assert [(layer["part"], layer["backend"]) for layer in parts["layers"]] == [("text", "sdpa_segments")] * 2
    assert "window, sinks" in parts["layers"][0]["heads"]
    assert {entry["name"] for entry in parts["versions"]} >= {"python", "torch", "transformers", "torchvision"}
    assert parts["devices"][0]["type"] == "cpu"
    assert {entry["backend"] for entry in parts["attention"] if not entry["reasons"]} >= {"sdpa_segments", "eager_mask"}


def test_options_of_a_probe_need_one() -> None:
    for arguments, names in (
        (["tiny", "--attn", "all"], "--attention"),
        (["--device", "cpu", "--tiny", "--mesh", "tp=2"], "--mesh, --device, --tiny"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr == f"vlmpack: {names} only applies to a probe; add --probe, or leave it out\n"


KERNELS = {
    "qwen2_5_vl": {("vision", "torch_varlen", "FlashAttention 2"), ("text", "torch_varlen", "FlashAttention 2")},
    "gpt_oss": {("text", "torch_varlen", "FlashAttention 2")},
    "gemma2": {("text", "sdpa_segments", "scores in memory")},  # without flash-attn and Triton
}


@pytest.mark.parametrize("family", KERNELS)
def test_the_kernel_of_each_layer_is_named(family: str) -> None:
    """Of a device that this machine does not have, and of each pattern."""
    kinds = attention_layers(tiny_model(family, layers=2).config, device="cuda", dtype="bfloat16")
    assert {(kind["part"], kind["backend"], kind["kernel"]) for kind in kinds} == KERNELS[family]
    assert sum(kind["layers"] for kind in kinds if kind["part"] == "text") == 2
    assert all(("it needs Triton" in str(kind["reasons"])) == (kind["backend"] == "sdpa_segments") for kind in kinds)


def test_versions_say_what_is_missing_does_not_import_or_is_newer_than_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_problem("json") is None
    assert "No module named 'no_such_module'" in str(import_problem("no_such_module"))
    monkeypatch.setattr("vlmpack.cli.doctor.import_problem", lambda module: None)
    assert {entry["name"]: entry["version"] for entry in versions()}["torch"] == torch.__version__
    monkeypatch.setattr("vlmpack.machine.version_of", {"torch": "2.13.0+cu132", "transformers": "99.1.0"}.get)
    notes = {entry["name"]: entry["note"] for entry in versions()}
    assert notes["transformers"] == f"newer than {NEWEST_TESTED['transformers']}, the newest tested version: probe it"
    assert notes["torch"] is None


def test_without_fla_it_says_how_rows_are_computed_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(family: Any) -> bool:
        raise AttributeError("module 'triton' has no attribute 'jit'")

    said = [
        "samples of similar length are computed in batches",
        "does not import (AttributeError: module 'triton' has no attribute",
    ]
    for reason in said:
        (entry,) = gated_delta_serving(["cpu"])
        assert (entry["backend"], entry["device"]) == ("fla", "cpu") and reason in entry["reasons"][0]
        monkeypatch.setattr("vlmpack.model.mechanisms.gated_delta_fla.uses_fla", broken)


# ---------------------------------------------------------------------- probes of every family


class Probes:
    """Takes the place of `probe`: notes its arguments and what was printed; all but those of `raising` report."""

    def __init__(self) -> None:
        self.raising: dict[str, BaseException] = {}
        self.printed: dict[str, str] = {}
        self.probed: list[tuple[Any, Any, str]] = []

    def __call__(self, model: Any, processor: Any, *, attention: str, **settings: Any) -> Report:
        family = model.config.model_type
        self.probed.append((model, processor, attention))
        self.printed[family] = sys.stdout.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]
        if error := self.raising.get(family):
            raise error
        return replace(report_of(), family=family, attention=attention)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, few_families: None) -> Probes:
    probes = Probes()
    monkeypatch.setattr("vlmpack.probing.run.probe", probes)
    return probes


def verdicts(result: Any) -> list[tuple[str, str]]:
    return [(probe["family"], probe["verdict"]) for probe in answer(result)["probes"]]


def test_what_one_family_raises_is_its_verdict(probes: Probes) -> None:
    probes.raising["qwen3_vl"] = KeyError("a [key]")
    result = run_probe("--attention", "sdpa_segments")
    assert result.exit_code == 1
    for text in ("qwen3_vl sdpa_segments fails", "qwen3 sdpa_segments exact", "probe fails. KeyError: 'a [key]'"):
        assert text in words(result.stdout)
    result = run_probe("--attention", "sdpa_segments", "--json")
    assert result.exit_code == 1
    assert verdicts(result) == [("qwen3_vl", "fails"), ("qwen3", "exact")]
    assert (answer(result)["complete"], answer(result)["healthy"]) == (True, False)


def test_a_verdict_is_written_before_the_next_probe(probes: Probes) -> None:
    assert run_probe("--attention", "sdpa_segments").exit_code == 0
    assert probes.printed["qwen3_vl"] == ""
    assert "qwen3_vl" in probes.printed["qwen3"] and "exact" in probes.printed["qwen3"]


def test_what_was_found_before_ctrl_c_is_kept(probes: Probes) -> None:
    probes.raising["qwen3"] = KeyboardInterrupt()
    result = run_probe("--attention", "sdpa_segments")
    assert result.exit_code == 130
    assert "qwen3_vl sdpa_segments exact" in words(result.stdout)
    assert "Not finished: only the listed models were probed." in result.stdout
    assert "Exact:" not in result.stdout
    result = run_probe("--attention", "sdpa_segments", "--json")
    assert result.exit_code == 130
    assert verdicts(result) == [("qwen3_vl", "exact")]
    assert (answer(result)["complete"], answer(result)["healthy"]) == (False, False)


# ---------------------------------------------------------------------- probes of a model


def test_an_exact_model_has_exit_status_0_and_tables_of_everything(folder: str) -> None:
    result = run_probe(folder)
    assert result.exit_code == 0, result.output
    for text in (
        "Qwen3VLForConditionalGeneration (qwen3_vl), its own weights",
        "change sample 4 (2 images)",
        "a left-padded batch",
        "recurrent state absent",
        "gradient of visual.patch_embed.proj",
        "one row, [4, 1, T] positions",
        "leaks: cache, loss count",
        "Exact: every packed sample gets what it would get on its own.",
    ):
        assert text in words(result.stdout)


@pytest.mark.slow
def test_a_leak_has_exit_status_1_and_a_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_segment(self: VisionRow, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        return Segments.from_lengths([num_patches])

    monkeypatch.setattr(VisionRow, "find", one_segment)  # the vision tower takes all images for one
    result = run_probe(folder)
    assert result.exit_code == 1
    said = words(result.stdout)
    assert "vision leaks. vision: model.visual.blocks.0.attn.proj gives other numbers of a sample than alone" in said
    assert "qwen3_vl, sdpa_segments: leaks. The cause: vision." in said
    assert "Do not train packed rows on this machine" in said


def test_a_tiny_copy_is_probed_in_a_precision_by_every_back_end(folder: str, probes: Probes) -> None:
    result = run_probe(folder, "--tiny", "--dtype", "bfloat16", "--attention", "all", "--json")
    seen = [(attention, model.dtype) for model, _, attention in probes.probed]
    assert seen == [(name, torch.bfloat16) for name in ("sdpa_segments", "eager_mask")]
    assert {each["weights"] for each in answer(result)["probes"]} == {"a tiny copy with random weights: as asked"}


@pytest.mark.parametrize(("name", "family"), [("tiny", "qwen3_vl"), ("tiny:qwen3", "qwen3")])
def test_a_model_can_be_made_here(name: str, family: str, probes: Probes) -> None:
    result = run_probe(name, "--json")
    assert result.exit_code == 0
    ((model, processor, _),) = probes.probed
    assert model.config.model_type == family
    assert (processor is not None) == (family == "qwen3_vl")
    assert answer(result)["probes"][0]["weights"] == "random weights"


# ---------------------------------------------------------------------- refusals


def test_what_cannot_be_probed_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    refusals = {
        ("nowhere/at-all",): "model nowhere/at-all cannot be read (",
        ("x", "--attention", "flash"): "--attention must be one of auto, torch_varlen, ",
        (tmp_path,): "cannot be read (Unrecognized model",
        (tmp_path / "config.json",): f"{tmp_path / 'config.json'} is a file; give its folder: {tmp_path}",
        (tmp_path / "other",): "qwen2_5_omni cannot be packed exactly yet",
    }
    for arguments, fault in refusals.items():
        result = run_probe(*map(str, arguments))
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("vlmpack: ") and fault in words(result.stderr)
        assert "Traceback" not in result.stderr


def test_a_model_that_cannot_be_probed_is_no_answer_about_leaks(folder: str) -> None:
    result = run_probe(folder, "--attn", "torch_varlen")
    assert result.exit_code == 2
    assert "it runs on CUDA only" in words(result.stderr)
    (Path(folder) / "model.safetensors").write_bytes(b"cut")
    result = run_probe(folder)
    assert result.exit_code == 2
    assert "the weights of " in result.stderr and "--tiny probes a small copy" in words(result.stderr)


# ---------------------------------------------------------------------- tables


def report_of(*checks: Check) -> Report:
    return Report(
        model="M", family="f", weights="w", device="cpu", dtype="float32", attention="a", samples=(), row_tokens=1,
        checks=checks, circumstances={}, plain=(),
    )  # fmt: skip


def test_the_page_lists_the_keys_of_probes() -> None:
    checked = report_of(Check(part="work", name="pairs", finding="ok", value=9, allowed=9))
    report = replace(checked, circumstances={"row": "a packed row"}, plain=(Baseline(name="padded", verdict="fails"),))
    check_keys("probe", {"probes": [report.to_dict()], "complete": True, "healthy": True})
