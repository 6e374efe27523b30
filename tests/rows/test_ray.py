"""Rows written on Ray Data: the same bytes as in this process. One Ray on this machine does everything in a process of
its own, which this file is started as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from chats import picture
from stores import CAPACITY, digests, encoded, packing

from vlmpack.collate import SkipLimit
from vlmpack.data import open_dataset
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.rows import StoreSettings, write_rows
from vlmpack.workers import Executor, in_order


def write(out: Path, source: Path, *, executor: Executor) -> dict[str, str]:
    """Write rows of what can be used; their files."""
    settings = StoreSettings(capacity=CAPACITY, shard_rows=2, seed=1)
    collator = packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=0.5))
    write_rows(open_dataset(source), out, collator, settings, executor=executor)
    return digests(out)


def fails(part: int) -> int:
    raise VlmpackError(f"part {part} cannot be done")


def refusal(run: Any) -> str:
    """What a run that fails says."""
    try:
        run()
    except VlmpackError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    import ray
    from local_ray import start_ray

    source = folder / "samples.jsonl"
    start_ray()
    seen: dict[str, Any] = {"whole": write(folder / "whole", source, executor="ray")}
    seen["others are left running"] = ray.is_initialized()
    seen["task failed"] = refusal(lambda: list(in_order(fails, 3, executor="ray")))
    ray.shutdown()
    (folder / "seen.json").write_text(json.dumps(seen))


@pytest.mark.slow
@pytest.mark.dist
def test_ray_writes_the_same_bytes_hands_over_refusals_and_goes_on_running(tmp_path):
    """Thirteen samples in a file of JSON lines, some with images beside it, one without anything to learn."""
    pytest.importorskip("ray", reason="waits for Ray: pip install 'vlmpack[ray]'")
    lines = []
    for n in range(13):
        (tmp_path / f"{n}.png").write_bytes(encoded(picture(40 + 8 * n, 60, seed=n)))
        asked = [{"type": "image", "image": f"{n}.png"}] * (n % 3) + [{"type": "text", "text": "why " * n}]
        answer = [{"role": "assistant", "content": "because " * (1 + n % 5)}] if n != 7 else []
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, *answer], "id": f"s{n}"}))
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DISABLE_IMPORT_WARNING": "1"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    local = write(tmp_path / "local", tmp_path / "samples.jsonl", executor="local")
    assert len([name for name in local if name.startswith("rows-")]) > 2
    assert seen["whole"] == local
    assert seen["others are left running"]
    assert seen["task failed"] == "VlmpackError: part 0 cannot be done"


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"executor='ray' needs ray, .*: pip install 'vlmpack\[ray\]'"):
        next(in_order(str, 1, executor="ray"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
