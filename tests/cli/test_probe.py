"""`vlmpack probe`: a table and an exit status; a leak is named by its cause."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.probe_table import print_report
from vlmpack.layout import Segments
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.proof import Check, Report, probe
from vlmpack.testing import tiny_config, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    return str(tmp_path)


def run(*args: str) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["probe", "--device", "cpu", *args])


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision tower takes all images for one."""

    def one_segment(self: VisionRow, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        return Segments.from_lengths([num_patches])

    monkeypatch.setattr(VisionRow, "find", one_segment)


def test_an_exact_model_has_exit_status_0_and_tables_of_everything(folder: str) -> None:
    result = run(folder)
    assert result.exit_code == 0, result.output
    said = words(result.stdout)
    for text in (
        "Qwen2_5_VLForConditionalGeneration (qwen2_5_vl), its own weights",
        "change sample 4 (two images)",
        "a left-padded batch",
        "recurrent state absent",
        "gradients of visual patch_embed.proj",
        "one row, [4, 1, T] positions",
        "leaks: cache, loss count",
        "Exact: every packed sample is what it would have been alone.",
    ):
        assert text in said


@pytest.mark.usefixtures("one_picture")
def test_a_leak_has_exit_status_1_and_a_name(folder: str) -> None:
    result = run(folder)
    assert result.exit_code == 1
    said = words(result.stdout)
    assert "vision leaks. vision: a sample's image features move by" in said
    assert "Leaks. The cause: vision." in said
    assert "Do not train packed rows here" in said


@pytest.mark.usefixtures("one_picture")
def test_json_is_the_whole_report(folder: str) -> None:
    result = run(folder, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["verdict"], report["causes"]) == ("leaks", ["vision"])
    assert {check["part"] for check in report["checks"]} == {"isolation", "mechanism", "equality", "work"}


def test_a_tiny_copy_a_back_end_and_a_precision_can_be_asked_for(tmp_path: Path) -> None:
    tiny_config("qwen3", hidden=192, layers=5).save_pretrained(tmp_path)
    result = run(str(tmp_path), "--tiny", "--dtype", "bfloat16", "--attention", "eager_mask")
    assert result.exit_code == 0, result.output
    assert "a tiny copy with random weights: as asked" in words(result.stdout)
    assert "cpu, bfloat16, attention by eager_mask" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/at-all"], "no configuration can be read there"),
        (["--dtype", "int8", "x"], "--dtype int8: choose float32 or bfloat16"),
        (["--device", "tpu", "x"], "--device tpu: choose cpu or cuda"),
        (["--attention", "flash", "x"], "--attention flash: choose auto, torch_varlen, "),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in words(result.stderr)
    assert "Traceback" not in result.output


def test_the_file_of_a_model_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = run(str(tmp_path / "config.json"))
    assert result.exit_code == 2
    assert result.stderr == f"vlmpack: {tmp_path / 'config.json'} is a file; give its folder: {tmp_path}\n"


@pytest.mark.parametrize(("name", "family"), [("tiny", "qwen3_vl"), ("tiny:qwen3", "qwen3")])
def test_a_model_can_be_made_here(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def noted(model: Any, processor: Any, **settings: Any) -> Report:
        given.extend((model, processor))
        return report_of()

    monkeypatch.setattr("vlmpack.proof.probe", noted)
    result = run(name, "--json")
    assert result.exit_code == 0
    model, processor = given
    assert model.config.model_type == family
    assert (processor is not None) == (family == "qwen3_vl")
    assert json.loads(result.stdout)["weights"] == "made here with random weights"


def test_weights_that_are_cut_off_are_no_answer_about_leaks(folder: str) -> None:
    (Path(folder) / "model.safetensors").write_bytes(b"cut")
    result = run(folder)
    assert result.exit_code == 2
    assert "its weights cannot be read; --tiny probes a small copy" in words(result.stderr)
    assert "Traceback" not in result.output


def test_a_back_end_that_cannot_serve_says_why(folder: str) -> None:
    result = run(folder, "--attn", "torch_varlen")
    assert result.exit_code == 2
    assert "it runs on CUDA only" in words(result.stderr)


# ---------------------------------------------------------------------- what is printed


def printed(report: Report, *, width: int = 80) -> list[str]:
    file = io.StringIO()
    print_report(report, Console(file=file, width=width, force_terminal=True, color_system=None))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def report_of(*checks: Check) -> Report:
    return Report(
        model="M", family="f", weights="w", device="cpu", dtype="float32", attention="a", samples=(), row_tokens=1,
        checks=checks, circumstances={}, plain=(),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen4_exp", "qwen3"])
def test_every_group_of_parameters_has_a_line_of_its_own_on_80_columns(family: str) -> None:
    report = probe(tiny_model(family), plain=False)
    groups = {check.name.split("gradient of ")[1] for check in report.checks if "row: gradient of" in check.name}
    lines = printed(report)
    seen, part = set(), ""
    for line in lines[next(i for i, line in enumerate(lines) if "against each sample alone" in line) :]:
        name = line[: line.index("  ", 4)].strip() if "  " in line[4:] else line.strip()
        part = "" if not line.strip() else name.removeprefix("gradients of ") if name.startswith("gradients") else part
        seen.add(f"{part}.{name}" if part else name.removeprefix("gradient of "))
    assert len(groups) > 10
    assert not any("…" in line for line in lines)
    assert {group for group in groups if len(group) < 50} <= seen


def test_what_is_infinitely_far_is_printed() -> None:
    check = Check(part="isolation", name="change", finding="leaks", seen=float("inf"), allowed=1e-5, detail="nan")
    assert any(line.split() == ["change", "inf", "1e-05", "leaks"] for line in printed(report_of(check)))


def test_brackets_of_an_error_are_no_markup() -> None:
    check = Check(part="mechanism", name="mask", finding="fails", detail="KeyError: [red] and [/] of [a]")
    assert "mask fails. KeyError: [red] and [/] of [a]" in printed(report_of(check))
