"""`vlmpack.probe` and `vlmpack doctor --probe --mesh` of models that transformers has divided over two gloo ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from probing.mesh_probes import EXACT
from ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The reports of each rank."""
    folder = tmp_path_factory.mktemp("probes")
    on_ranks(Path(__file__).with_name("mesh_probes.py"), folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("family", EXACT)
def test_a_divided_model_is_exact_gradients_and_mechanisms_included(ranks: list[dict[str, Any]], family: str) -> None:
    report = ranks[0][family]
    assert report.verdict == "exact", report
    names = {check.name for check in report.checks if check.value is not None}
    assert any(name.startswith("row: gradient of") for name in names)
    assert names >= {"positions", "mask", "head", "attended pairs"}
    assert ("row: routers' gradient" in names) == (family == "qwen3_moe")
    assert ranks[1][family] == report


def test_a_broken_mechanism_is_named_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        report = seen["positions_run_on"]
        assert (report.verdict, report.causes) == ("differs", ("positions",)), report


def test_what_is_wrong_on_one_rank_alone_is_reported_by_all(ranks: list[dict[str, Any]]) -> None:
    reports = [seen["one_rank_counts_twice"] for seen in ranks]
    assert {report.verdict for report in reports} == {"differs"}
    bad = [{check.name for check in report.checks if check.is_bad} for report in reports]
    assert bad[0] == bad[1] >= {"row: gradient of layers.self_attn.q_norm"}


def test_low_precision_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "load it with dtype=torch.float32" in ranks[1]["refused"]


def test_doctor_prints_on_rank_0() -> None:
    command = "-m torch.distributed.run --nproc_per_node 2 -m vlmpack doctor --probe tiny:qwen3 --mesh tp=2 --json -q"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (report,) = answer["probes"]
    assert (report["verdict"], report["weights"]) == ("exact", "random weights, divided over tp=2")
