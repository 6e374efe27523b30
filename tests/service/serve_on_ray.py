"""The demo's model as an application of Ray Serve on this machine: `python serve_on_ray.py PORT STATE WORKERS`.

It serves until SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
from local_ray import start_ray
from ray import serve

from vlmpack.cli.serve import DEMO_NAME, make_demo
from vlmpack.service.cluster import app


def main(port: str, state: str, workers: str) -> None:
    folder = Path(state)
    folder.mkdir(exist_ok=True)
    make_demo(folder / "demo-model")
    start_ray()
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    model = str(folder / "demo-model")
    serve.run(app({"model": model, "name": DEMO_NAME, "state": state, "workers": workers, "row_tokens": "40"}))
    stops = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stops.set())
    stops.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
