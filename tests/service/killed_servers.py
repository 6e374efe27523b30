"""A server that is killed again and again, and a client that goes on; started by test_kill.py.

    python killed_servers.py serve FOLDER LIVES SEED    serves until SIGTERM; LIVES processes are killed before the last
    python killed_servers.py train FOLDER STEPS LIVES   trains STEPS steps at least, and until the last process serves

Every server is a process of its own, forked from one that has loaded the model and listens. It kills itself by SIGKILL
before or after a commit, a rename, a row or a step, or at any time at all: seeded. FOLDER/lives has a line for each.
"""

from __future__ import annotations

import io
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

from PIL import Image

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
    settings = ServiceSettings(state=folder / "state", key=KEY, limits=limits, drain_seconds=5.0)
    Service(base, settings).run(listening)


# ---------------------------------------------------------------------- the client


def train(folder: Path, steps: int, lives: int) -> None:
    """Two models: one in order, whose bits have to agree; one that is never waited for, as fast as it goes."""
    import tinker

    warnings.simplefilter("ignore", FutureWarning)  # of a method that it means to drop
    adam = tinker.AdamParams(learning_rate=3.0, beta1=0.9, beta2=0.95, eps=1e4)
    url = f"http://127.0.0.1:{(folder / 'port').read_text()}"
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    patient = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    hasty = client.create_lora_training_client(base_model=NAME, rank=2, seed=2).result()
    seen: dict[str, list[Any]] = {"patient": [], "hasty": [], "tokens": []}
    step = 0
    while step < steps or len((folder / "lives").read_text().splitlines()) <= lives:
        pending = [hasty.forward_backward([_datum(step, n)], "cross_entropy") for n in range(3)]
        stepping = hasty.optim_step(adam)
        loss = patient.forward_backward([_datum(step, 5), _datum(step, 6)], "cross_entropy").result()
        patient.optim_step(adam).result()
        seen["patient"].append(loss.metrics["loss:sum"])
        seen["hasty"].append(sum(future.result().metrics["loss:sum"] for future in pending))
        stepping.result()
        if step % 5 == 4:
            path = patient.save_state(f"step{step}").result().path
            hasty.load_state(hasty.save_state(f"step{step}").result().path)
            patient.load_state_with_optimizer(path).result()
            seen["tokens"].append(_sampled(patient))
        step += 1
    ends = [training.save_state("end").result().path for training in (patient, hasty)]
    (folder / "seen.json").write_text(json.dumps({"steps": step, "ends": ends, **seen}))


def _datum(step: int, number: int) -> Any:
    """Text; every fifth one has an image in front, of another size each step."""
    import tinker

    draw = random.Random(1000 * step + number)
    tokens = [draw.randrange(20, 500) for _ in range(draw.randint(4, 12))]
    chunks: list[Any] = [tinker.EncodedTextChunk(tokens=tokens[:-1])]
    skipped = 0
    if number == 5:
        columns = 2 + step % 3
        skipped = 1 + 2 * columns
        image = tinker.types.ImageChunk(data=_png(draw, 32 * columns, 64), format="png", expected_tokens=2 * columns)
        chunks = [tinker.EncodedTextChunk(tokens=[20]), image, *chunks]
    return tinker.Datum(
        model_input=tinker.ModelInput(chunks=chunks),
        loss_fn_inputs={
            "target_tokens": [0] * skipped + tokens[1:],
            "weights": [0.0] * skipped + [1.0] * (len(tokens) - 1),
        },
    )


def _png(draw: random.Random, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height)).save(file, "PNG")
    return file.getvalue()


def _sampled(training: Any) -> list[int]:
    import tinker

    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([30, 31, 32])
    params = tinker.SamplingParams(max_tokens=4, seed=7, temperature=1.0)
    return [*sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens]


if __name__ == "__main__":
    role, where, *numbers = sys.argv[1:]
    {"serve": serve, "train": train}[role](Path(where), *map(int, numbers))
