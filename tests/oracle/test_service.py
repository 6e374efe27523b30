"""The step service, driven by the unmodified `tinker` client, computes what transformers, PEFT and torch's AdamW do.

vlmpack serve FOLDER (a process)  ◀── HTTP ──  tinker client (this process)
PeftModel of the same folder, one datum at a time (this process): the reference
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.oracle.plain import CASES, picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the client needs Python 3.11"),
    pytest.mark.filterwarnings("ignore"),  # of the client and of PEFT, about themselves
]
QWEN = CASES[1]
KEY = "tml-oracle"
STARTS_WITHIN = 120.0  # seconds
CLOSE = 2e-5  # nats; log-probabilities are of order 10
RATE, EPSILON, BETAS = 1e-2, 1e-4, (0.9, 0.95)
TOKEN_SIDE = 32
"""Pixels of a side of an image of which Qwen3-VL makes one token."""


# ---------------------------------------------------------------------- a server and its client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    QWEN.model().save_pretrained(folder)
    QWEN.processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def state(folder: Path) -> Path:
    return folder.parent / "state"


@pytest.fixture(scope="module")
def client(folder: Path, state: Path) -> Iterator[Any]:
    command = [str(Path(sys.executable).parent / "vlmpack"), "serve", str(folder), "--name", "tiny", "--port", "0"]
    environment = {**os.environ, "VLMPACK_API_KEY": KEY, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    log = folder.parent / "log"
    with log.open("wb") as printed:
        server = subprocess.Popen(
            [*command, "--state", str(state)], env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
    try:
        import tinker

        client = tinker.ServiceClient(base_url=address(server, log), api_key=KEY)
        yield client
        client.close("success").result()
    finally:
        server.terminate()
        server.wait(60)


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address that it prints."""
    deadline = time.monotonic() + STARTS_WITHIN
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found.group()


# ---------------------------------------------------------------------- datums, for the client and for the plain model


@dataclass
class Datum:
    """Tokens, perhaps behind a picture, each with the one to predict and what its loss needs."""

    seed: int
    length: int
    size: tuple[int, int] | None = None
    """Width and height of the picture in tokens; None: there is none."""
    shared: int = 0
    """Tokens in front that all datums with some begin with: they are computed once."""
    tokens: list[int] = field(init=False)
    inputs: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        beginning = np.random.default_rng(0).integers(20, 500, self.shared).tolist()
        self.tokens = beginning + rng.integers(20, 500, self.length).tolist()
        self.inputs = {
            "target_tokens": rng.integers(20, 500, len(self.ids)),
            "weights": rng.normal(size=len(self.ids)).astype(np.float32),
            "logprobs": rng.normal(-7, 0.5, len(self.ids)).astype(np.float32),
            "advantages": rng.normal(size=len(self.ids)).astype(np.float32),
        }

    @property
    def before(self) -> list[int]:
        """Tokens of the picture, with those around it."""
        if self.size is None:
            return []
        start, pad, end = QWEN.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
        return [start, *[pad] * self.size[0] * self.size[1], end]

    @property
    def ids(self) -> list[int]:
        return [*self.before, *self.tokens]

    @property
    def image(self) -> Image.Image:
        assert self.size is not None
        return picture(self.seed, self.size[0] * TOKEN_SIDE, self.size[1] * TOKEN_SIDE)

    def prompt(self) -> Any:
        from tinker import types

        chunks: list[Any] = []
        if self.size is not None:
            file = io.BytesIO()
            self.image.save(file, "PNG")
            image = types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=self.size[0] * self.size[1])
            start, *_, end = self.before
            chunks = [types.EncodedTextChunk(tokens=[start]), image, types.EncodedTextChunk(tokens=[end])]
        return types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=self.tokens)])

    def for_client(self, loss: str) -> Any:
        from tinker import types

        names = ("target_tokens", *INPUTS[loss])
        tensors = {name: types.TensorData.from_numpy(self.inputs[name]) for name in names}
        return types.Datum(model_input=self.prompt(), loss_fn_inputs=tensors)

    def for_model(self, more: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Of the datum, and of tokens behind it."""
        ids = torch.tensor([[*self.ids, *more]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.size is not None:
            inputs |= QWEN.processor.image_processor([self.image], return_tensors="pt")
            inputs["mm_token_type_ids"] = (ids == QWEN.processor.image_token_id).long()
        return inputs


DATA = [
    Datum(1, 12),
    Datum(2, 9, (3, 2)),
    Datum(3, 31),
    Datum(4, 5, (2, 4)),
    Datum(5, 17),
    Datum(6, 7, shared=80),
    Datum(7, 11, shared=80),
]
INPUTS = {"cross_entropy": ("weights",), "importance_sampling": ("logprobs", "advantages")}


def plain_loss(loss: str, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """Scalar: a sum over tokens, as the Tinker API defines it."""
    values = {name: torch.from_numpy(array) for name, array in datum.inputs.items()}
    if loss == "cross_entropy":
        return -(values["weights"] * logprobs).sum()
    return -((logprobs - values["logprobs"]).exp() * values["advantages"]).sum()


def plain_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    logits = model(**datum.for_model(), use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]


def logprobs_of(output: Any) -> list[np.ndarray]:
    return [np.asarray(one["logprobs"].data) for one in output.loss_fn_outputs]


class PeftLoop:
    """The same adapter in PEFT, trained on one datum at a time by torch's AdamW."""

    def __init__(self, adapter: Path) -> None:
        from peft import PeftModel

        assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
        self.model = PeftModel.from_pretrained(QWEN.model(), str(adapter), is_trainable=True).eval()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0)

    def forward_backward(self, loss: str) -> tuple[list[np.ndarray], float]:
        """Log-probabilities of each datum, and the loss of all."""
        seen, total = [], 0.0
        for datum in DATA:
            logprobs = plain_logprobs(self.model, datum)
            value = plain_loss(loss, datum, logprobs)
            value.backward()
            total += value.item()
            seen.append(logprobs.detach().numpy())
        return seen, total

    def optim_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Runs:
    """Three steps of training, by the client and by PEFT."""

    client: Any
    reference: PeftLoop
    outputs: list[Any]
    """Of each `forward_backward` of the client."""
    expected: list[tuple[list[np.ndarray], float]]
    """Log-probabilities of each datum, and the loss, of PEFT's."""


@pytest.fixture(scope="module", params=[*INPUTS])
def runs(request: pytest.FixtureRequest, client: Any, state: Path) -> Runs:
    from tinker import types

    model = client.create_lora_training_client(base_model="tiny", rank=4, seed=3, train_unembed=False)
    earlier = {*state.rglob("adapter_config.json")}
    model.save_state(f"start of {request.param}".replace(" ", "-")).result()
    (saved,) = {*state.rglob("adapter_config.json")} - earlier
    reference = PeftLoop(saved.parent)
    adam = types.AdamParams(
        learning_rate=RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON, weight_decay=0.0, grad_clip_norm=0.0
    )
    runs = Runs(model, reference, [], [])
    for _ in range(3):
        data = [datum.for_client(request.param) for datum in DATA]
        runs.outputs.append(model.forward_backward(data, request.param).result())
        runs.expected.append(reference.forward_backward(request.param))
        model.optim_step(adam).result()
        reference.optim_step()
    return runs


# ---------------------------------------------------------------------- claims


def test_log_probabilities_of_a_request_are_those_of_each_datum_alone(runs: Runs) -> None:
    for seen, truth in zip(logprobs_of(runs.outputs[0]), runs.expected[0][0], strict=True):
        np.testing.assert_allclose(seen, truth, atol=CLOSE, rtol=0)


def test_the_loss_is_the_sum_over_all_datums(runs: Runs) -> None:
    assert runs.outputs[0].metrics["loss:sum"] == pytest.approx(runs.expected[0][1], rel=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_are_those_of_peft_and_adamw(runs: Runs, steps: int) -> None:
    """Log-probabilities after so many steps, seen by the next `forward_backward`."""
    before, after = runs.expected[0][0], runs.expected[steps][0]
    moved = max(np.abs(one - other).max() for one, other in zip(after, before, strict=True))
    assert moved > 0.1, "the steps were so small that any would pass"
    for seen, truth in zip(logprobs_of(runs.outputs[steps]), after, strict=True):
        np.testing.assert_allclose(seen, truth, atol=1e-3 * moved, rtol=0)


def test_a_trained_adapter_samples_as_peft_generates(runs: Runs) -> None:
    sampler = runs.client.save_weights_and_get_sampling_client()
    assert greedy(sampler, DATA[0]).tokens == generated(runs.reference.model, DATA[0])


@pytest.mark.parametrize("datum", [DATA[0], DATA[1]], ids=["text", "image"])
def test_greedy_samples_are_those_of_generate(client: Any, datum: Datum) -> None:
    sample = greedy(client.create_sampling_client(base_model="tiny"), datum)
    assert list(sample.tokens) == generated(QWEN.model().eval(), datum)


@pytest.mark.parametrize("datum", [DATA[0], DATA[1]], ids=["text", "image"])
def test_log_probabilities_of_samples_are_the_models(client: Any, datum: Datum) -> None:
    sample = greedy(client.create_sampling_client(base_model="tiny"), datum)
    inputs = datum.for_model(sample.tokens)
    with torch.no_grad():
        logprobs = QWEN.model()(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
    truth = logprobs.gather(1, inputs["input_ids"][0, 1:, None])[len(datum.ids) - 1 :, 0].numpy()
    np.testing.assert_allclose(np.asarray(sample.logprobs), truth, atol=1e-4, rtol=0)


def greedy(sampler: Any, datum: Datum) -> Any:
    """Eight tokens behind the datum's, by the service."""
    from tinker import types

    settings = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[], seed=1)
    (sample,) = sampler.sample(datum.prompt(), 1, settings).result().sequences
    return sample


def generated(model: Any, datum: Datum) -> list[int]:
    """The same by transformers."""
    config = QWEN.model().config
    media = [config.image_token_id, config.video_token_id]
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "suppress_tokens": media}
    return model.generate(**datum.for_model(), **settings)[0, len(datum.ids) :].tolist()
