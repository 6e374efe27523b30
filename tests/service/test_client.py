"""Sampling while models are trained, by the unmodified client from a service in this process; many clients at once."""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image
from step_service import plain_model, processor_for

from vlmpack.service import Service, ServiceSettings, bind
from vlmpack.service.server import Base

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the client needs Python 3.11"),
    pytest.mark.filterwarnings("ignore"),  # of the client, which leaves connections open
]

NAME, KEY = "tiny", "tml-key"
CLIENTS = 16


@contextmanager
def served(state: Path) -> Iterator[str]:
    """A service on a free port."""
    base = Base(name=NAME, source=str(state), model=plain_model(), processor=processor_for("qwen3_vl"))
    service = Service(base, ServiceSettings(state=state, key=KEY))
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(service.app(), log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        gc.collect()  # connections that the client left open, while warnings of them are ignored


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with served(tmp_path_factory.mktemp("state")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def sampler(client: Any) -> Any:
    return client.create_sampling_client(base_model=NAME)


# ---------------------------------------------------------------------- prompts


class Prompt:
    """Text, and pictures between their vision tokens."""

    def __init__(self, seed: int, *, length: int, pictures: Sequence[tuple[int, int]] = ()) -> None:
        from tinker import types

        rng = np.random.default_rng(seed)
        self.processor = processor_for("qwen3_vl")
        start, end = self.processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        tokens = rng.integers(20, 500, length).tolist()
        chunks: list[Any] = []
        self.ids: list[int] = []
        for width, height in pictures:
            picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            file = io.BytesIO()
            picture.save(file, "PNG")
            count = width // 32 * (height // 32)
            chunks += [types.EncodedTextChunk(tokens=[start])]
            chunks += [types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=count)]
            chunks += [types.EncodedTextChunk(tokens=[end])]
            self.ids += [start, *[self.processor.image_token_id] * count, end]
        self.ids += tokens
        self.input = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=tokens)])


def prompts(count: int) -> list[Prompt]:
    pictures = ((), ((64, 96),), (), ((96, 64), (64, 64)))
    return [Prompt(i, length=3 + 7 * i % 23, pictures=pictures[i % 4]) for i in range(count)]


def params(**settings: Any) -> Any:
    from tinker import types

    return types.SamplingParams(**{"max_tokens": 10, "stop": [], "seed": 5, **settings})


def sample(sampler: Any, prompt: Prompt, *, count: int = 1, more: dict[str, Any] | None = None, **settings: Any) -> Any:
    return sampler.sample(prompt.input, count, params(**settings), **(more or {})).result()


def tokens_of(response: Any) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in response.sequences]


# ---------------------------------------------------------------------- models that are trained


def trained_on(prompt: Prompt, completion: Sequence[int]) -> Any:
    """A datum of a prompt and what was sampled after it: each token's target is the next one."""
    from tinker import types

    ids = [*prompt.ids, *completion]
    chunks = [*prompt.input.chunks, types.EncodedTextChunk(tokens=list(completion))]
    targets = types.TensorData(data=[*ids[1:], 0], dtype="int64", shape=[len(ids)])
    weights = [0.0] * len(prompt.ids) + [1.0] * len(completion)
    weighted = types.TensorData(data=weights, dtype="float32", shape=[len(ids)])
    inputs = {"target_tokens": targets, "weights": weighted}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def train(training: Any, data: Sequence[Any], *, steps: int = 2) -> None:
    from tinker import types

    for _ in range(steps):
        training.forward_backward(list(data), "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def test_log_probabilities_of_sampling_are_those_of_training(client: Any) -> None:
    """The ratio of a policy gradient begins at 1: sampled, then read by the model that it was sampled from."""
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    some = prompts(4)
    train(training, [trained_on(prompt, [30, 31, 32]) for prompt in some])
    sampler = training.save_weights_and_get_sampling_client(name="policy").result()
    for prompt in some:
        for sequence in sample(sampler, prompt, count=2).sequences:
            output = training.forward([trained_on(prompt, sequence.tokens)], "cross_entropy").result()
            learner = np.asarray(output.loss_fn_outputs[0]["logprobs"].data)[:-1]
            np.testing.assert_allclose(sequence.logprobs, learner[len(prompt.ids) - 1 :], atol=1e-4)
        computed = sampler.compute_logprobs(prompt.input).result()
        np.testing.assert_allclose(computed[1:], learner[: len(prompt.ids) - 1], atol=1e-4)


def test_a_snapshot_stays_as_it_is_when_training_goes_on(client: Any, sampler: Any) -> None:
    training = client.create_lora_training_client(base_model=NAME, rank=4, seed=2).result()
    prompt = prompts(2)[1]
    data = [trained_on(prompt, [30, 31, 32])]
    train(training, data)
    snapshot = training.save_weights_and_get_sampling_client(name="early").result()
    before = tokens_of(sample(snapshot, prompt, max_tokens=30))
    assert before != tokens_of(sample(sampler, prompt, max_tokens=30))
    train(training, data, steps=4)
    assert tokens_of(sample(snapshot, prompt, max_tokens=30)) == before
    later = training.save_weights_and_get_sampling_client(name="late").result()
    assert tokens_of(sample(later, prompt, max_tokens=30)) != before


# ---------------------------------------------------------------------- many at once


def life(url: str, number: int) -> list[list[int]]:
    """One client: an adapter, two steps, samples of the snapshot, of every kind."""
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = client.create_lora_training_client(base_model=NAME, rank=2 + number % 3, seed=number).result()
    some = [Prompt(100 * number + i, length=5 + i, pictures=((64, 64),) * (i % 2)) for i in range(3)]
    train(training, [trained_on(prompt, [30 + number, 31, 32]) for prompt in some])
    sampler = training.save_weights_and_get_sampling_client(name="last").result()
    kinds = ({"temperature": 0.0}, {"top_k": 30, "seed": number}, {"top_p": 0.9, "seed": number})
    futures = [sampler.sample(p.input, 2, params(**kind)) for p, kind in zip(some, kinds, strict=True)]
    found = [tokens for future in futures for tokens in tokens_of(future.result())]
    client.close("success").result()
    return found


def test_sixteen_clients_at_once_get_what_each_gets_alone(tmp_path: Path) -> None:
    """No token depends on who else is served; nobody waits for all the others."""
    with served(tmp_path / "many") as url, ThreadPoolExecutor(CLIENTS) as pool:
        began, ended = time.monotonic(), []

        def timed(number: int) -> list[list[int]]:
            found = life(url, number)
            ended.append(time.monotonic() - began)
            return found

        together = list(pool.map(timed, range(CLIENTS)))
    assert len({str(tokens) for tokens in together}) == CLIENTS
    assert max(ended) <= 3 * sum(ended) / CLIENTS
    with served(tmp_path / "alone") as url:
        for number in (0, 5, 15):
            assert life(url, number) == together[number], number
