"""A Ray on this machine, small and without anything outside."""

from __future__ import annotations

from typing import Any

import ray

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
