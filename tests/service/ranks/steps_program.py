"""A short training run of the unmodified client: `python steps_program.py URL KEY FILE`; writes what it saw as JSON.

Datums with and without images, steps of plain gradient descent, log-probabilities, samples, and a checkpoint from which
the run goes on. With a further argument `faulty` the network loses requests, loses replies and doubles requests; with
`awaited` each call waits for the one before it, so that which requests share rows does not depend on time.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import numpy as np
import tinker
from PIL import Image
from tinker import types

STEPS, RATE = 3, 3e-4
"""Log-probabilities stay small, so that a difference of 1e-5 shows."""
SELDOM = ("retrieve_future", "telemetry", "session_heartbeat", "client/config")
"""Paths that fail only now and then: they are asked for all the time, or the client never repeats them."""
TOKEN_SIDE = 32
"""Pixels of a side of an image of which Qwen3-VL makes one token."""


class Setup:
    """A client of the server, and datums for its model."""

    def __init__(self, url: str, key: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.name = self.service.get_server_capabilities().supported_models[0].model_name
        tokenizer = self.model().get_tokenizer()
        self.before, self.after = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        self.plain = [i for i in range(5, len(tokenizer)) if i not in special]

    def model(self, **settings: Any) -> Any:
        return self.service.create_lora_training_client(base_model=self.name, **{"rank": 4, "seed": 3, **settings})

    def text(self, seed: int, length: int) -> list[int]:
        return random.Random(seed).choices(self.plain, k=length)

    def inputs(self, seed: int, length: int, *, image_at: int | None = None) -> types.ModelInput:
        tokens = self.text(seed, length)
        if image_at is None:
            return types.ModelInput.from_ints(tokens)
        columns, file = 2 + seed % 3, io.BytesIO()
        size = (2 * TOKEN_SIDE, columns * TOKEN_SIDE, 3)
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)).save(file, "PNG")
        chunk = types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=2 * columns)
        before, after = [*tokens[:image_at], self.before], [self.after, *tokens[image_at:]]
        return types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=before), chunk, types.EncodedTextChunk(tokens=after)]
        )

    def datum(self, seed: int, length: int, *, image_at: int | None = None, loss: str = "cross_entropy") -> types.Datum:
        model_input, draw = self.inputs(seed, length, image_at=image_at), np.random.default_rng(seed)
        n = model_input.length
        values = {"target_tokens": draw.choice(self.plain, n).astype(np.int64)}
        if loss == "cross_entropy":
            values["weights"] = draw.normal(size=n).astype(np.float32)
        else:
            values["logprobs"] = (draw.normal(size=n) * 0.3 - 6).astype(np.float32)
            values["advantages"] = draw.normal(size=n).astype(np.float32)
        inputs = {name: types.TensorData.from_numpy(array) for name, array in values.items()}
        return types.Datum(model_input=model_input, loss_fn_inputs=inputs)

    def overflowing(self) -> list[types.Datum]:
        """One of these has a ratio that float32 cannot hold."""
        data = self.mixed("importance_sampling")
        inputs = data[3].loss_fn_inputs
        inputs["logprobs"] = types.TensorData.from_numpy(inputs["logprobs"].to_numpy() - 1000)
        return data

    def mixed(self, loss: str = "cross_entropy") -> list[types.Datum]:
        lengths = ((1, 12, None), (2, 5, 2), (3, 31, None), (4, 9, 9), (5, 1, None), (6, 17, 0))
        return [self.datum(seed, n, image_at=at, loss=loss) for seed, n, at in lengths]


def break_network() -> Counter[str]:
    """Break the network by a fixed rule for the requests of each path; returns how often it did what."""
    counts, done, send = Counter(), Counter(), httpx.AsyncClient.send

    async def faulty(self: Any, request: httpx.Request, **options: Any) -> httpx.Response:
        counts[request.url.path] += 1
        n = counts[request.url.path]
        if request.url.path.endswith(SELDOM):
            n = 1 if n % 3 else n // 3
        fault = "doubled" if n % 3 == 0 else "reply lost" if n % 5 == 2 else "lost" if n % 7 == 4 else "none"
        done[fault] += 1
        if fault in ("doubled", "reply lost"):
            await (await send(self, request, **options)).aread()
        if fault in ("lost", "reply lost"):
            raise httpx.RemoteProtocolError("the server disconnected without sending a response", request=request)
        return await send(self, request, **options)

    httpx.AsyncClient.send = faulty
    return done


def check_refused(call: Callable[[], Any], words: str) -> None:
    """Check that a call fails by its client's fault, and why."""
    try:
        call()
    except tinker.RequestFailedError as error:
        assert words in str(error) and str(error.category).lower().endswith("user"), error
    else:
        raise AssertionError(f"accepted: {words}")


def descend(client: Any) -> Any:
    """One step of plain gradient descent, so that a wrong scale of the gradient shows."""
    adam = types.AdamParams(
        learning_rate=RATE * 1e4, beta1=0.0, beta2=0.0, eps=1e4, weight_decay=0.0, grad_clip_norm=0.0
    )
    return client.optim_step(adam).result()


def train(s: Setup, *, is_awaited: bool) -> dict[str, Any]:
    """What a client sees of one service; the same of another one with the same base model."""
    model = s.model(rank=4, seed=11)
    seen: dict[str, Any] = {"losses": [], "norms": []}

    def step(model: Any, step: int) -> None:
        pending = model.forward_backward(s.mixed(), "cross_entropy")
        if is_awaited:
            pending.result()
        more = model.forward_backward([s.datum(70 + step, 8)], "cross_entropy")
        seen["norms"].append(descend(model).metrics["grad_norm:mean"])
        seen["losses"] += [pending.result().metrics["loss:sum"], more.result().metrics["loss:sum"]]

    def logprobs(model: Any) -> list[list[float]]:
        output = model.forward(s.mixed("importance_sampling"), "importance_sampling").result()
        return [one["logprobs"].tolist() for one in output.loss_fn_outputs]

    for number in range(STEPS):
        step(model, number)
    check_refused(lambda: s.model(rank=300).get_info(), "rank is 300")
    overflow = model.forward_backward(s.overflowing(), "importance_sampling")
    check_refused(overflow.result, "datum 3: its loss or gradient is not finite")  # and no gradient is left, see below
    seen["logprobs"] = logprobs(model)
    sampler = model.save_weights_and_get_sampling_client()
    for name, temperature in (("greedy", 0.0), ("seeded", 1.0)):
        params = types.SamplingParams(max_tokens=12, seed=5, temperature=temperature, stop=[])
        sampled = sampler.sample(s.inputs(3, 6, image_at=2), 2, params).result()
        seen[name] = [list(sequence.tokens) for sequence in sampled.sequences]
    seen["prompt"] = sampler.compute_logprobs(types.ModelInput.from_ints(s.text(9, 7))).result()[1:]
    seen["path"] = model.save_state("end").result().path
    resumed = s.service.create_training_client_from_state_with_optimizer(seen["path"])
    for each in (model, resumed):
        step(each, STEPS)
    for ours, theirs, before in zip(logprobs(resumed), logprobs(model), seen["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert ours != before
    try:
        whole = s.model(rank=0)
        whole.get_info()  # a future stands for it
    except tinker.RequestFailedError as error:  # of a sharded base model
        assert "LoRA adapters only" in str(error)
    else:
        step(whole, STEPS)
    return seen


def main(url: str, key: str, file: str, network: str = "") -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of the client: a future stands for its result
    faults = break_network() if network == "faulty" else {}
    setup = Setup(url, key)
    Path(file).write_text(json.dumps({**train(setup, is_awaited=network == "awaited"), "faults": faults}))
    if hasattr(setup.service, "close"):  # not of the oldest client
        setup.service.close("success").result()


if __name__ == "__main__":
    main(*sys.argv[1:])
