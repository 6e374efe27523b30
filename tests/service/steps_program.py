"""A short training run of the unmodified client: `python steps_program.py URL KEY FILE`; writes what it saw as JSON.

Datums with and without images, steps of plain gradient descent, log-probabilities, samples, and a checkpoint.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from client_program import Setup, descend, of
from tinker import types

STEPS, RATE = 3, 3e-4
"""Log-probabilities stay small, so that a difference of 1e-5 shows."""


def train(s: Setup) -> dict[str, Any]:
    """What a client sees of one service; the same of another one with the same base model."""
    model = s.model(rank=4, seed=11)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        pending = model.forward_backward(s.mixed(), "cross_entropy")
        more = model.forward_backward([s.datum(70 + step, 8)], "cross_entropy")
        seen["norms"].append(descend(model, rate=RATE).metrics["grad_norm:mean"])
        seen["losses"] += [pending.result().metrics["loss:sum"], more.result().metrics["loss:sum"]]
    output = model.forward(s.mixed("importance_sampling"), "importance_sampling").result()
    seen["logprobs"] = [values.tolist() for values in of(output)]
    sampler = model.save_weights_and_get_sampling_client()
    for name, temperature in (("greedy", 0.0), ("seeded", 1.0)):
        params = types.SamplingParams(max_tokens=12, seed=5, temperature=temperature, stop=[])
        sampled = sampler.sample(s.inputs(3, 6, image_at=2), 2, params).result()
        seen[name] = [list(sequence.tokens) for sequence in sampled.sequences]
    seen["prompt"] = sampler.compute_logprobs(types.ModelInput.from_ints(s.text(9, 7))).result()[1:]
    seen["path"] = model.save_state("end").result().path
    return seen


def main(url: str, key: str, file: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of the client: a future stands for its result
    setup = Setup(url, key)
    Path(file).write_text(json.dumps(train(setup)))
    setup.service.close("success").result()


if __name__ == "__main__":
    main(*sys.argv[1:])
