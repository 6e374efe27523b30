"""`vlmpack doctor`: healthy here; and when isolation is broken on purpose, it says so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from vlmpack.cli import app, environment
from vlmpack.cli.environment import import_problem, serving, versions
from vlmpack.families import FAMILIES, registry
from vlmpack.layout import Segments
from vlmpack.model import inputs
from vlmpack.model.row import RowContext
from vlmpack.testing import tiny_config

FEW = ("qwen3_vl", "qwen3_5")


@pytest.fixture
def few_families() -> Iterator[None]:
    """Two families for all: `tests/proof` probes every one."""
    every = dict(FAMILIES)
    for name in every.keys() - set(FEW):
        del registry.FAMILIES[name]
    yield
    registry.FAMILIES.clear()
    registry.FAMILIES.update(every)  # in their order


@pytest.fixture(autouse=True)
def fast_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying to import qwen-vl-utils and the like takes a process and seconds each time."""
    monkeypatch.setattr(environment, "import_problem", lambda module: None)


def run_doctor(*args: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json", *args])
    return result.exit_code, json.loads(result.stdout)


def test_a_model_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, told in ((tmp_path, "nothing there can be read (Unrecognized"), (tmp_path / "config.json", "is a file")):
        result = CliRunner().invoke(app, ["doctor", "--model", str(name), "--device", "cpu"])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"vlmpack: --model {name}")
        assert told in result.stderr


def test_a_model_is_read_before_anything_is_printed_and_the_hub_is_asked_again_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise OSError("no connection\nread the manual.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    result = CliRunner().invoke(app, ["doctor", "--model", "Qwen/Qwen3-VL-2B-Instruct", "--device", "cpu"])
    (line,) = result.output.splitlines()
    assert "nothing there can be read (no connection read the manual); give a hub id" in line


def test_tiny_means_the_model_that_is_made_here_as_in_probe() -> None:
    status, report = run_doctor("--device", "cpu", "--model", "tiny:qwen3")
    assert status == 0
    assert {probe["family"] for probe in report["probes"]} == {"qwen3"}


def test_a_healthy_machine_gets_exit_status_0_and_a_probe_of_every_family(few_families: None) -> None:
    status, report = run_doctor("--device", "cpu")
    assert status == 0
    assert report["healthy"]
    probes = {(probe["family"], probe["attention"]) for probe in report["probes"]}
    assert probes == {(family, name) for family in FAMILIES for name in ("sdpa_segments", "eager_mask")}
    assert all(probe["verdict"] == "exact" for probe in report["probes"])
    plain = [one for probe in report["probes"] for one in probe["plain"]]
    assert {one["verdict"] for one in plain} == {"leaks", "exact"}
    assert {entry["name"] for entry in report["versions"]} >= {"python", "torch", "transformers", "torchvision"}


def test_the_tables_for_people_name_families_verdicts_and_reasons(few_families: None) -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for text in ("torchvision", "sdpa_segments", "it runs on CUDA only", *FEW, "exact", "Nothing leaks", "leaks"):
        assert text in result.stdout


def test_a_leak_is_reported_and_the_exit_status_is_1(monkeypatch: pytest.MonkeyPatch, few_families: None) -> None:
    def one_segment(**metadata: Any) -> RowContext:
        return RowContext(**{**metadata, "segments": Segments.from_lengths([metadata["segments"].total])})

    monkeypatch.setattr(inputs, "RowContext", one_segment)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "qwen3_vl, sdpa_segments: leaks, by mask." in said
    assert "what a sample attends to moves by" in said
    assert "not safe here" in said


def test_a_crash_is_a_finding_and_the_exit_status_is_1(monkeypatch: pytest.MonkeyPatch, few_families: None) -> None:
    def broken(**metadata: Any) -> RowContext:
        raise TypeError("this transformers hands over something else")

    monkeypatch.setattr(inputs, "RowContext", broken)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 1
    assert "fails. TypeError: this transformers hands over something else" in " ".join(result.stdout.split())
    assert "not safe here" in result.stdout


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_next"])
def test_the_configuration_of_a_users_model_is_probed_small(family: str, tmp_path: Path) -> None:
    tiny_config(family, hidden=96, heads=4, kv_heads=2, layers=3).save_pretrained(tmp_path)
    status, report = run_doctor("--device", "cpu", "--model", str(tmp_path))
    assert status == 0
    assert {probe["family"] for probe in report["probes"]} == {family}


def test_a_model_of_another_family_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "qwen2_5_omni cannot be packed exactly yet" in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_device_that_is_not_there_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "tpu"])
    assert result.exit_code == 2
    assert "--device tpu: choose cpu or cuda" in result.stderr


def test_every_back_end_answers_for_every_device_and_dtype() -> None:
    entries = serving(["cpu", "cuda", "cuda"])
    assert len(entries) == 2 * 2 * len({entry.backend for entry in entries})
    refused = [entry for entry in entries if entry.backend == "torch_varlen" and entry.dtype == "float32"]
    assert all("float16 and bfloat16 only" in "; ".join(entry.reasons) for entry in refused)


def test_versions_say_which_packages_are_missing_and_which_do_not_import() -> None:
    assert {entry.name: entry.version for entry in versions()}["torch"] == torch.__version__
    assert import_problem("json") is None
    assert "No module named 'no_such_module'" in str(import_problem("no_such_module"))
