"""A server that is killed again and again, and a client that goes on; started by test_kill.py.

    python killed_servers.py serve FOLDER LIVES SEED    serves until SIGTERM; LIVES processes are killed before the last
    python killed_servers.py train FOLDER STEPS LIVES   trains STEPS steps at least, and until the last process serves

Every server is a process of its own, forked from one that has loaded the model and listens. It kills itself by SIGKILL
before or after a commit, a rename, a row or a step, or at any time at all: seeded. FOLDER/lives has a line for each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEY = "tml-killed-and-killed-again"
NAME = "vlmpack/tiny"


# ---------------------------------------------------------------------- the server


def serve(folder: Path, lives: int, seed: int) -> None:
    from vlmpack.service import ServiceLimits, bind
    from vlmpack.service.server import load_base
    from vlmpack.testing import tiny_model, tiny_processor

    processor = tiny_processor()
    for part in (processor, tiny_model(processor=processor)):
        part.save_pretrained(folder / "model")
    base = load_base(str(folder / "model"), name=NAME)
    listening = bind("127.0.0.1", 0)
    listening.listen(128)
    (folder / "port.new").write_text(str(listening.getsockname()[1]))
    (folder / "port.new").rename(folder / "port")
    draw = random.Random(seed)
    for life in range(lives + 1):
        death = None if life == lives else (draw.choice("mmt"), draw.randint(1, 16), draw.uniform(0.02, 1.5))
        child = os.fork()
        if child == 0:
            _live(folder, base, listening, ServiceLimits(), life, death)
            os._exit(0)
        signal.signal(signal.SIGTERM, lambda *_, child=child: os.kill(child, signal.SIGTERM))
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or life == lives, status


def _live(
    folder: Path, base: Any, listening: Any, limits: Any, life: int, death: tuple[str, int, float] | None
) -> None:
    from vlmpack.service import Service, ServiceSettings
    from vlmpack.service.checkpoints import StateFolder
    from vlmpack.service.engine import Engine
    from vlmpack.service.journal import Journal
    from vlmpack.service.rows import RowWork

    with (folder / "lives").open("a") as file:
        file.write(json.dumps({"life": life, "death": death}) + "\n")
    moments = iter(range(1, sys.maxsize))

    def moment() -> None:
        if death is not None and death[0] == "m" and next(moments) == death[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            moment()
            result = call(*args, **kwargs)
            moment()
            return result

        return wrapped

    Journal._commit = watched(Journal._commit)
    StateFolder.publish = watched(StateFolder.publish)
    RowWork.run_row = watched(RowWork.run_row)
    Engine.optim_step = watched(Engine.optim_step)
    if death is not None and death[0] == "t":
        timer = threading.Timer(death[2], os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    settings = ServiceSettings(key=KEY, limits=limits, drain_seconds=5.0)
    Service(base, StateFolder(folder / "state", base_model=base.name), settings).run(listening)


# ---------------------------------------------------------------------- the client


def train(folder: Path, steps: int, lives: int) -> None:
    """Two models: one in order, whose bits have to agree; one that is never waited for, as fast as it goes."""
    from client_program import Setup
    from tinker import types

    warnings.simplefilter("ignore", FutureWarning)  # of a method that it means to drop
    adam = types.AdamParams(learning_rate=3.0, beta1=0.9, beta2=0.95, eps=1e4)
    setup = Setup(f"http://127.0.0.1:{(folder / 'port').read_text()}", KEY)
    patient, hasty = setup.model(rank=4, seed=1), setup.model(rank=2, seed=2)
    prompt, params = types.ModelInput.from_ints([30, 31, 32]), types.SamplingParams(max_tokens=4, seed=7)
    seen: dict[str, list[Any]] = {"patient": [], "hasty": [], "tokens": []}
    step = 0
    while step < steps or len((folder / "lives").read_text().splitlines()) <= lives:
        short, pictured = setup.datum(10 * step + 5, 9), setup.datum(10 * step + 6, 5, image_at=1)
        pending = [hasty.forward_backward([setup.datum(10 * step + n, 4 + n)], "cross_entropy") for n in range(3)]
        stepping = hasty.optim_step(adam)
        loss = patient.forward_backward([short, pictured], "cross_entropy").result()
        patient.optim_step(adam).result()
        seen["patient"].append(loss.metrics["loss:sum"])
        seen["hasty"].append(sum(future.result().metrics["loss:sum"] for future in pending))
        stepping.result()
        if step % 5 == 4:
            path = patient.save_state(f"step{step}").result().path
            hasty.load_state(hasty.save_state(f"step{step}").result().path)
            patient.load_state_with_optimizer(path).result()
            sampler = patient.save_weights_and_get_sampling_client()
            seen["tokens"].append(list(sampler.sample(prompt, 1, params).result().sequences[0].tokens))
        step += 1
    ends = [training.save_state("end").result().path for training in (patient, hasty)]
    (folder / "seen.json").write_text(json.dumps({"steps": step, "ends": ends, **seen}))


if __name__ == "__main__":
    role, where, *numbers = sys.argv[1:]
    {"serve": serve, "train": train}[role](Path(where), *map(int, numbers))
