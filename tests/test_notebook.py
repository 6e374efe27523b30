"""The notebook runs from top to bottom, and shows what its text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNNER = Path(__file__).with_name("notebook_runner.py")
LARGEST_FILE = 300_000
NO_WIDGETS = "ignore::Warning:tqdm.auto"
"""tqdm asks for ipywidgets whenever it finds itself in a notebook."""


def executed(number: str, where: Path) -> Any:
    """The notebook after a run without warnings that knows nothing of the machine's Jupyter and reaches no hub."""
    notebook = next(path for path in NOTEBOOKS if path.name.startswith(number))
    target = where / notebook.name
    own = {f"JUPYTER_{name}_DIR": str(where) for name in ("CONFIG", "DATA", "RUNTIME")}
    settings = {
        "IPYTHONDIR": str(where),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # pictures into the notebook, as its users get them
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONWARNINGS": NO_WIDGETS,
        "PYTHONPATH": os.pathsep.join([str(notebook.parent), os.environ.get("PYTHONPATH", "")]),  # measures.py
    }
    command = [sys.executable, str(RUNNER), str(notebook), str(target)]
    environment = {**os.environ, **own, **settings}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    done = nbformat.read(target, as_version=4)
    assert [output.text for output in outputs(done) if output.get("name") == "stderr"] == []
    return done


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pictures(notebook: Any) -> list[Any]:
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


def printed(notebook: Any) -> str:
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def first_and_last(start: str, text: str) -> tuple[float, float]:
    """Two numbers of the line that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    first, last = (float(word) for word in line.split() if word[0].isdigit())
    return first, last


@pytest.mark.slow
def test_01_receipts_are_packed_trained_on_and_read(tmp_path: Path) -> None:
    notebook = executed("01", tmp_path)
    assert len(pictures(notebook)) >= 3
    said = printed(notebook)
    losses = [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2
    for text in ("padded", "packed", "prediction", "truth", "field F1"):
        assert text in said


@pytest.mark.slow
def test_02_a_leak_is_named(tmp_path: Path) -> None:
    notebook = executed("02", tmp_path)
    assert len(pictures(notebook)) == 5
    said = printed(notebook)
    lost, packed = (float(number) for number in re.findall(r"boundaries lost (\S+), packed (\S+)", said)[0])
    assert packed < 1e-5 < 0.1 < lost
    assert "exact\n" in said
    assert "verdict leaks\ncause mask\nmask: model.language_model.layers.0.self_attn.o_proj gives other numbers" in said
    routers = {line[:25].strip(): line.split()[-1] for line in said.splitlines() if "load-balancing loss" in line}
    assert routers["tight row"] == routers["row with padding"] != routers["padding taken for tokens"]


@pytest.mark.slow
def test_03_rows_are_full_and_prefixes_are_shared(tmp_path: Path) -> None:
    notebook = executed("03", tmp_path)
    assert len(pictures(notebook)) == 4
    said = printed(notebook)
    fills = {kind: float(part) for kind, part in re.findall(r"^(padded|rows, exact).*?([\d.]+)%", said, re.MULTILINE)}
    assert fills["padded"] < 70 < 99.9 <= fills["rows, exact"]
    assert {line.split()[0] for line in said.splitlines() if "%" in line} >= {"12,288", "16,384", "20,480"}
    for kind in ("tokens computed", "patches of the tower"):
        alone, shared = (int(number.replace(",", "")) for number in re.findall(rf"{kind} +(\S+) and (\S+)", said)[0])
        assert shared < alone / 2


@pytest.mark.slow
def test_04_a_custom_loop_learns_and_rows_take_less(tmp_path: Path) -> None:
    notebook = executed("04", tmp_path)
    assert len(pictures(notebook)) == 2
    said = printed(notebook)
    summed, averaged = (float(number) for number in re.findall(r"(\S+) over one count, (\S+) as a mean", said)[0])
    assert summed < 1e-5 < 0.01 < averaged
    epochs = [line.split() for line in said.splitlines() if line.startswith("epoch")]
    losses, f1 = [float(words[3]) for words in epochs], [float(words[-1]) for words in epochs]
    assert losses[-1] < 0.2 < losses[0]
    assert f1[0] < 0.3 < max(f1)
    (memory,) = re.findall(r"(\d+)% of the memory", said)
    assert int(memory) < 80


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the client of the service needs Python 3.11")
def test_05_the_step_service_trains_and_samples(tmp_path: Path) -> None:
    said = printed(executed("05", tmp_path))
    first, last = first_and_last("loss a token", said)
    assert last < first / 2
    first, best = first_and_last("mean reward", said)
    assert best > first
    assert "the server ended with 0" in said


@pytest.mark.slow
def test_06_a_tree_equals_its_samples_and_grpo_improves(tmp_path: Path) -> None:
    notebook = executed("06", tmp_path)
    assert len(pictures(notebook)) == 3  # receipts, the tree, rewards
    said = printed(notebook)
    differences = re.findall(r"^largest difference of .* (\S+)$", said, re.MULTILINE)
    assert len(differences) == 2
    assert all(float(difference) < 1e-5 for difference in differences)
    shared, alone = (int(word.strip(",")) for word in re.findall(r"tokens: (\d+) in the tree, (\d+) alone", said)[0])
    assert shared < alone / 2
    first, best = first_and_last("mean reward", said)
    assert best > first


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_committed_is_small_and_names_no_machine(path: Path) -> None:
    assert len(NOTEBOOKS) == 6
    text = path.read_text(encoding="utf-8")
    assert len(text) <= LARGEST_FILE
    for private in (str(ROOT), str(Path.home()), sys.prefix):
        assert private not in text
