"""Run by torchrun on two ranks: works, steps, failures and files of an engine on both; writes what rank 0 saw."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from step_service import ADAM, lora, request, some_data, tiny_engine, weights

from vlmpack.errors import RequestError
from vlmpack.service.distributed import follow, lead
from vlmpack.service.engine import Engine
from vlmpack.service.messages import Datum, Failure
from vlmpack.service.ranks import join

RATED = ("weights", "logprobs", "advantages")
LIMITS = {"row_tokens": 24}
"""So that the five datums are four rows, or so."""


def with_overflow(data: list[Datum]) -> list[Datum]:
    logprobs = np.full_like(data[2].inputs["logprobs"], -1000.0)
    return [*data[:2], replace(data[2], inputs={**data[2].inputs, "logprobs": logprobs}), *data[3:]]


def scenario(engine: Any, inner: Engine, folder: Path) -> dict[str, Any]:
    """The same calls for one rank and for two; what comes of them, as JSON."""
    seen: dict[str, Any] = {"losses": [], "norms": []}
    engine.create("a", lora(rank=2))
    engine.create("full", None)

    def run(data: list[Datum], **fields: Any) -> Any:
        work = engine.forward_backward([engine.encode(request(data, **fields))])
        seen.setdefault("rows", work.rows_left)
        while work.rows_left:
            work.run_row()
        return work.results()[0]

    for step in range(2):
        for name in ("a", "full"):
            result = run(some_data(inner, seed=step), model_id=name)
            seen["losses"].append(result.metrics["loss:sum"])
            seen["logprobs"] = [part.tolist() for part in result.logprobs]
            seen["norms"].append(engine.optim_step(name, replace(ADAM, eps=1e-3)).metrics["grad_norm:mean"])
    failure = run(with_overflow(some_data(inner, inputs=RATED)), loss_fn="importance_sampling")
    assert isinstance(failure, Failure)
    seen["failure"] = failure.message
    only = run(some_data(inner, seed=3), forward_only=True)
    seen["losses"].append(only.metrics["loss:sum"])
    seen["nothing"] = dict(engine.optim_step("a", ADAM).metrics)
    try:
        engine.create("b", lora(rank=0))
    except RequestError as error:
        seen["refused"] = str(error)
    saved = folder / "checkpoint"
    saved.mkdir(parents=True, exist_ok=True)
    engine.save("a", saved, optimizer=True)
    engine.create_from("c", saved, optimizer=True)
    engine.load("a", saved, optimizer=True)
    cancelled = engine.forward_backward([engine.encode(request(some_data(inner), model_id="c"))])
    cancelled.run_row()
    cancelled.cancel()
    seen["cancelled"] = dict(engine.optim_step("c", ADAM).metrics)
    run(some_data(inner, seed=5)[:1], model_id="c")  # one row: a rank has none
    engine.optim_step("c", replace(ADAM, eps=1e-3))
    engine.free("a")
    seen["models"] = list(engine.models())
    return seen


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = join()
    assert ranks is not None
    inner = tiny_engine(limits=LIMITS, ranks=ranks)
    if ranks.rank == 0:
        engine = lead(inner, ranks)
        seen = scenario(engine, inner, folder)
        engine.stop()
        (folder / "seen.json").write_text(json.dumps(seen))
    else:
        follow(inner, ranks)
    torch.save({name: weights(inner, name) for name in inner.models()}, folder / f"weights{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
