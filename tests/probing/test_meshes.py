"""`vlmpack.probe` and `vlmpack doctor --probe --mesh` of models that ranks compute together.

As a script: what each of two gloo ranks runs. Each writes its reports to FOLDER/RANK.pt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from breakages import positions_run_on
from ranks import on_ranks
from torch import distributed as dist

import vlmpack
from vlmpack.cli.models import placed
from vlmpack.context_parallel import Parallel
from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing
from vlmpack.model.mechanisms.tensor_parallel import NormSums
from vlmpack.model.row import RowOverRanks
from vlmpack.testing import tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]
EXACT: dict[str, tuple[str, dict[str, int]]] = {
    "tp": ("qwen3_vl", {"tp": 2}),
    "experts": ("qwen3_moe", {"tp": 2, "ep": 2}),
    "context": ("qwen3_vl", {"context": 2}),
    "context of fsdp": ("qwen3_moe", {"fsdp": 2, "context": 2}),
    "gathered keys": ("qwen3", {"context": 2, "heads": 3}),
    "dealt images": ("qwen3_vl", {}),
}
"""Families and their ranks; "dealt images": rows of their own."""


def one_rank_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """The gradients of norms of heads are twice as large on rank 1, and right on rank 0."""
    summed = NormSums._sum
    patch.setattr(NormSums, "_sum", lambda self, grad: summed(self, grad) * (1 + dist.get_rank()))


def labels_of_the_other_rank(patch: pytest.MonkeyPatch) -> None:
    """The last context rank trains on the targets of its part one token late."""
    targets = RowOverRanks.targets
    late = lambda row, index, labels, **how: targets(row, index, labels.roll(row.rank, -1), **how)  # noqa: E731
    patch.setattr(RowOverRanks, "targets", late)


BROKEN = {
    "positions": ("gathered keys", partial(positions_run_on, "qwen3")),
    "head": ("gathered keys", labels_of_the_other_rank),
    "norms": ("norms", one_rank_counts_twice),
}
"""Causes that are named, the ranks, and the breakage."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen: dict[str, Any] = {name: probed(*case) for name, case in EXACT.items()}
    for cause, (name, break_it) in BROKEN.items():
        with pytest.MonkeyPatch.context() as patch:
            break_it(patch)
            seen[f"broken {cause}"] = probed(*EXACT.get(name, ("qwen3", {"tp": 2})))
    try:
        vlmpack.probe(placed(tiny_model("qwen3", dtype=torch.bfloat16), torch.device("cpu"), {"fsdp": 2}))
    except ConfigError as error:
        seen["refused"] = str(error)
    torch.save(seen, folder / f"{dist.get_rank()}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def probed(family: str, sizes: dict[str, int]) -> Any:
    of_mesh = {name: size for name, size in sizes.items() if name not in ("heads", "context")}
    odd: dict[str, Any] = {"heads": 3, "kv_heads": 1, "hidden": 48} if "heads" in sizes else {}
    model = placed(tiny_model(family, **odd), torch.device("cpu"), of_mesh)
    if "context" in sizes or not sizes:
        enable_packing(model, parallel=Parallel(context=sizes.get("context", 1), balance_vision=not sizes))
    return vlmpack.probe(model, plain=False, share_prefixes=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The reports of each rank."""
    folder = tmp_path_factory.mktemp("probes")
    on_ranks(Path(__file__), folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", EXACT)
def test_ranks_together_are_exact_gradients_and_mechanisms_included(ranks: list[dict[str, Any]], name: str) -> None:
    report = ranks[0][name]
    assert report.verdict == "exact", report
    names = {check.name for check in report.checks if check.value is not None}
    assert any(name.startswith("row: gradient of") for name in names)
    assert names >= {"positions", "mask", "head", "attended pairs"}
    assert ("vision" in names) == (EXACT[name][0] == "qwen3_vl")
    assert ("row: routers' gradient" in names) == (EXACT[name][0] == "qwen3_moe")
    assert ranks[1][name] == report


@pytest.mark.parametrize("cause", ["positions", "head"])
def test_a_broken_mechanism_is_named_on_all_ranks(ranks: list[dict[str, Any]], cause: str) -> None:
    for seen in ranks:
        report = seen[f"broken {cause}"]
        assert (report.verdict, report.causes) == ("differs", (cause,)), report


def test_what_is_wrong_on_one_rank_alone_is_reported_by_all(ranks: list[dict[str, Any]]) -> None:
    reports = [seen["broken norms"] for seen in ranks]
    assert {report.verdict for report in reports} == {"differs"}
    bad = [{check.name for check in report.checks if check.is_bad} for report in reports]
    assert bad[0] == bad[1] >= {"row: gradient of layers.self_attn.q_norm"}


def test_low_precision_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "load it with dtype=torch.float32" in ranks[1]["refused"]


def test_doctor_prints_on_rank_0() -> None:
    doctor = "-m vlmpack doctor --probe tiny:qwen3 --mesh context=2 --json -q"
    command = f"-m torch.distributed.run --nproc_per_node 2 {doctor}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["probes"]
    assert (report["verdict"], report["weights"]) == ("exact", "random weights, divided over context=2")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
