"""Stores written as Ray tasks: the same bytes as in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chats import picture
from store.stores import digests, encoded, packing, store

from vlmpack.collate import SkipLimit
from vlmpack.data import open_dataset
from vlmpack.errors import ConfigError
from vlmpack.store import StoreSettings, write_rows
from vlmpack.store.executors import in_order_on_ray

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirteen samples in a file of JSON lines, some with images beside it, one without anything to learn."""
    folder = tmp_path_factory.mktemp("ray")
    lines = []
    for n in range(13):
        (folder / f"{n}.png").write_bytes(encoded(picture(40 + 8 * n, 60, seed=n)))
        asked = [{"type": "image", "image": f"{n}.png"}] * (n % 3) + [{"type": "text", "text": "why " * n}]
        answer = [{"role": "assistant", "content": "because " * (1 + n % 5)}] if n != 7 else []
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, *answer], "id": f"s{n}"}))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    """What came of it on Ray."""
    pytest.importorskip("ray", reason="waits for Ray: pip install 'vlmpack[ray]'")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DISABLE_IMPORT_WARNING": "1"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rays.py")), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.fixture(scope="module")
def local(folder):
    """The files of the same store, written here; before Ray's runs change the data."""
    collator = packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=0.5))
    store(folder / "local", open_dataset(folder / "samples.jsonl"), collator, seed=1)
    return digests(folder / "local")


def test_ray_writes_the_same_bytes_and_goes_on_running(local, seen):
    assert len([name for name in local if name.startswith("rows-")]) > 2
    assert seen["whole"] == local
    assert seen["others are left running"]


def test_refusals_come_back_as_what_they_are(seen):
    assert seen["refused"].startswith("SampleError: sample ") and "does not fit a row of 24 tokens" in seen["refused"]
    assert seen["task failed"] == "VlmpackError: part 0 cannot be done"


def test_refused_samples_keep_their_places_in_the_data_set(seen):
    left_out = [json.loads(line) for line in seen["left out"].splitlines()]
    assert [(one["index"], one["sample_id"], one["reason"]) for one in left_out] == [
        (1, "s1", "image_missing"),
        (7, "s7", "no_targets"),
    ]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"executor='ray' needs ray, not installed here: pip install 'vlmpack\[ray\]'"
    ):
        list(in_order_on_ray(str, 1))


def test_an_executor_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="executor='slurm' does not exist; choose one of local, ray"):
        write_rows([], tmp_path, packing(), StoreSettings(capacity=8), executor="slurm")  # pyright: ignore
