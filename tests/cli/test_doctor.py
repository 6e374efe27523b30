"""`vlmpack doctor`: healthy here; and when isolation is broken on purpose, it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vlmpack.cli import app, environment
from vlmpack.cli.environment import import_problem, serving, versions
from vlmpack.cli.probe import Probe, probe_model
from vlmpack.cli.probe_samples import make_sample, perturbed, row_of
from vlmpack.cli.shrink import shrink, small_copy
from vlmpack.errors import FamilyError
from vlmpack.families import FAMILIES, family_named
from vlmpack.families.tiny import tiny_config, tiny_model
from vlmpack.layout import Segments
from vlmpack.step import engine
from vlmpack.step.context import RowContext, VisionSegments

FAMILY_NAMES = sorted(FAMILIES)


@pytest.fixture(autouse=True)
def fast_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying to import qwen-vl-utils and the like takes a process and seconds each time."""
    monkeypatch.setattr(environment, "import_problem", lambda module: None)


def run_doctor(*args: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json", *args])
    return result.exit_code, json.loads(result.stdout)


def ours(probes: list[Probe]) -> list[Probe]:
    return [probe for probe in probes if not probe.plain]


def plain(probes: list[Probe]) -> list[Probe]:
    return [probe for probe in probes if probe.plain]


def test_a_healthy_machine_gets_exit_status_0_and_a_probe_of_every_family() -> None:
    status, report = run_doctor("--device", "cpu")
    assert status == 0
    assert report["healthy"]
    mine = [probe for probe in report["probes"] if not probe["plain"]]
    assert {probe["family"] for probe in mine} == set(FAMILIES)
    assert all(probe["verdict"] == "exact" for probe in mine)
    # Experts multiply the tokens of all samples at once, and how that rounds depends on how many there are.
    assert all(probe["leak"] <= 1e-6 * ("moe" in probe["family"]) for probe in mine)
    assert {entry["name"] for entry in report["versions"]} >= {"python", "torch", "transformers", "torchvision"}


def test_the_tables_for_people_name_families_verdicts_and_reasons() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for text in ("torchvision", "sdpa_segments", "it runs on CUDA only", *FAMILIES, "exact", "Nothing leaks"):
        assert text in result.stdout


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_same_row_leaks_through_the_unmodified_model(family: str) -> None:
    three_rows = plain(list(probe_model(tiny_model(family), "cpu")))[0]
    assert three_rows.verdict == "leaks"
    assert three_rows.leak is not None
    assert three_rows.leak > 1e-2


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_text_attention_across_samples_is_reported_as_a_leak(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_segment(**facts: Any) -> RowContext:
        return RowContext(**{**facts, "segments": Segments.from_lengths([facts["segments"].total])})

    monkeypatch.setattr(engine, "RowContext", one_segment)
    probes = ours(list(probe_model(tiny_model(family), "cpu")))
    assert probes
    assert all(probe.verdict == "leaks" for probe in probes)
    assert "only its neighbour in the row changes" in probes[0].detail


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_vision_attention_across_images_is_reported_as_a_leak(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_image(self: VisionSegments, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        return Segments.from_lengths([num_patches])

    monkeypatch.setattr(VisionSegments, "find", one_image)
    probes = ours(list(probe_model(tiny_model(family), "cpu")))
    assert probes
    assert all(probe.verdict == "leaks" for probe in probes)


def test_a_row_that_is_isolated_but_wrong_is_reported_as_different(monkeypatch: pytest.MonkeyPatch) -> None:
    family = type(family_named("qwen3_vl"))
    honest = family.positions

    def scaled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * honest(self, *args, **kwargs)

    monkeypatch.setattr(family, "positions", scaled)
    probes = ours(list(probe_model(tiny_model("qwen3_vl"), "cpu")))
    assert [probe.verdict for probe in probes] == ["differs"] * len(probes)
    assert "logits off by" in probes[0].detail


def test_a_crash_is_a_finding_and_the_exit_status_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**facts: Any) -> RowContext:
        raise TypeError("this transformers hands over something else")

    monkeypatch.setattr(engine, "RowContext", broken)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 1
    assert "fails. TypeError: this transformers hands over something else" in " ".join(result.stdout.split())
    assert "not safe here" in result.stdout


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_configuration_of_a_users_model_is_probed_small(family: str, tmp_path: Path) -> None:
    tiny_config(family, hidden=96, heads=4, kv_heads=2, layers=3, vision_depth=3).save_pretrained(tmp_path)
    status, report = run_doctor("--device", "cpu", "--model", str(tmp_path))
    assert status == 0
    assert {probe["family"] for probe in report["probes"]} == {family}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_shrinking_keeps_what_is_peculiar_and_cuts_what_is_large(family: str) -> None:
    large = tiny_config(family, hidden=192, heads=4, kv_heads=2, layers=5, vision_depth=5).to_dict()
    small = shrink(large)
    assert small["text_config"]["num_hidden_layers"] == small["vision_config"]["depth"] == 2
    assert small["text_config"]["rope_parameters"] == large["text_config"]["rope_parameters"]
    assert small["vision_config"]["patch_size"] == large["vision_config"]["patch_size"]
    assert small["text_config"]["hidden_size"] == 2 * 48


def test_a_model_of_another_family_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "qwen3_5_moe cannot be packed exactly yet" in result.stderr
    assert "Traceback" not in result.output
    with pytest.raises(FamilyError, match="qwen3_5_moe"):
        small_copy(str(tmp_path))


def test_a_device_that_is_not_there_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "tpu"])
    assert result.exit_code == 1
    assert "--device tpu: choose cpu or cuda" in result.stderr


def test_perturbing_changes_every_word_and_pixel_and_nothing_else() -> None:
    config = tiny_config("qwen3_vl")
    sample = make_sample(family_named("qwen3_vl"), config, words=5, grid=(1, 4, 6), seed=1)
    other = perturbed(sample)
    same = sample.input_ids == other.input_ids
    assert set(sample.input_ids[same].tolist()) == {2, 3, 4}  # vision start and end, image
    assert (sample.pixels != other.pixels).all()
    assert row_of([sample, other]).segments.lengths == (len(same), len(same))


def test_every_back_end_answers_for_every_device_and_dtype() -> None:
    entries = serving(["cpu", "cuda", "cuda"])
    assert len(entries) == 2 * 2 * len({entry.backend for entry in entries})
    refused = [entry for entry in entries if entry.backend == "torch_varlen" and entry.dtype == "float32"]
    assert all("float16 and bfloat16 only" in "; ".join(entry.reasons) for entry in refused)


def test_versions_say_which_packages_are_missing_and_which_do_not_import() -> None:
    assert {entry.name: entry.version for entry in versions()}["torch"] == torch.__version__
    assert import_problem("json") is None
    assert "No module named 'no_such_module'" in str(import_problem("no_such_module"))
