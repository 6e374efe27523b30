"""Stores written as Ray tasks, started by test_ray.py: python rays.py FOLDER.

One Ray on this machine does everything, and is gone at the end. FOLDER/seen.json has what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
from store.stores import CAPACITY, digests, packing

from vlmpack.collate import SkipLimit
from vlmpack.data import open_dataset
from vlmpack.errors import VlmpackError
from vlmpack.store import StoreSettings, measure, write_rows
from vlmpack.store.executors import in_order_on_ray

ON_THIS_MACHINE: dict[str, Any] = {
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
    "_node_ip_address": "127.0.0.1",
    "object_store_memory": 80 * 2**20,
}


def start_ray(chances: int = 3) -> None:
    """Start it; it waits for its own processes for half a minute, which a very busy machine may need more than once."""
    try:
        ray.init(**ON_THIS_MACHINE)
    except Exception as error:  # a plain one
        if chances == 1 or "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start_ray(chances - 1)


def write(out: Path, source: Path, **settings: Any) -> dict[str, str]:
    """Write a store; its files."""
    made = StoreSettings(**{"capacity": CAPACITY, "shard_rows": 2, "seed": 1, **settings})
    collator = packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=0.5))
    write_rows(open_dataset(source), out, collator, made, executor="ray")
    return digests(out)


def refusal(run: Any) -> str:
    """What a run that fails says."""
    try:
        run()
    except VlmpackError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    source = folder / "samples.jsonl"
    seen: dict[str, Any] = {}
    measure.PART = 5  # several parts, of which one is not full
    start_ray()
    seen["whole"] = write(folder / "whole", source)
    seen["others are left running"] = ray.is_initialized()
    missing = folder / "missing.jsonl"
    missing.write_text(source.read_text().replace('"1.png"', '"none.png"'))
    write(folder / "missing", missing)
    seen["left out"] = (folder / "missing" / "left_out.jsonl").read_text()
    seen["refused"] = refusal(lambda: write(folder / "refused", source, capacity=24))
    seen["task failed"] = refusal(lambda: list(in_order_on_ray(_fails, 3)))
    ray.shutdown()
    (folder / "seen.json").write_text(json.dumps(seen))


def _fails(part: int) -> int:
    raise VlmpackError(f"part {part} cannot be done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
