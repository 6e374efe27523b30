"""Thousands of damaged requests to a whole service on a tiny model: it goes on, and what it refuses leaves no trace.

Each request is a good one, changed by a seeded draw: bytes, fields, numbers, compression, order, repetition, or a
client that leaves. Weights and gradient of the model are compared before and after, to the bit.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from mutations import damaged
from service.asgi import KEY, Client
from service.web.test_http import training as good_training
from service.wire.test_codec import ADAM
from step_service import png

from vlmpack.service import Base, Service, ServiceLimits, ServiceSettings, StateFolder
from vlmpack.service.wire import schema_pb2
from vlmpack.testing import tiny_model, tiny_processor

NAME = "tiny"
STATUSES = {200, 204, 400, 404, 408, 410, 413, 415, 429}
LONGEST = 20.0
"""Seconds for one request: a bomb or a hang takes longer."""
SIZES = {"body_bytes": 2**18, "sample_bytes": 2**18, "json_bytes": 2**16, "image_pixels": 256 * 256}
COUNTS = {"fields": 5000, "datums": 16, "images": 8, "context": 96, "row_tokens": 128, "samples": 3, "models": 6}
LIMITS = ServiceLimits(**SIZES, **COUNTS, rank=8, poll_seconds=10.0, gap_seconds=3600.0, idle_seconds=3600.0)

NUMBERS = [None, 0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, 5e-324, True, False]
OTHERS: list[Any] = ["", "a" * 3000, "\x00", "..", "../../etc", "tinker://", "é\u202e", "\ud800", "1"]
OTHERS += [[], {}, [[]], [None], {"a": {}}]


HUGE_PNG = png(64, 64)[:16] + struct.pack(">II", 60000, 60000) + png(64, 64)[24:]
IMAGES = [png(64, 64), png(32, 32), png(64, 64)[:200], HUGE_PNG, b"", b"GIF89a" + bytes(40), png(64, 64) + b"tail"]


# ---------------------------------------------------------------------- good requests


class Subject:
    """A model of a session, the number that comes next, and all that was sent to it."""

    def __init__(self, client: Client, service: Service) -> None:
        self.client, self.service = client, service
        self.session = client.session()
        lora, body = {"rank": 2, "seed": 3}, {"session_id": self.session, "model_seq_id": 0, "base_model": NAME}
        created = client.post("create_model", lora_config=lora, **body).json()
        self.model = f"{self.session}:train:0"
        assert client.retrieve(created["request_id"]).json() == {"model_id": self.model, "type": "create_model"}
        sampler = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": NAME}
        self.sampler = client.post("create_sampling_session", **sampler).json()["sampling_session_id"]
        self.next = 1
        self.next_sample = 0
        self.done: list[tuple[str, bytes, dict[str, str]]] = []

    def state(self) -> bytes:
        """Weights and gradient, to the bit."""
        model = self.service.engine.client(self.model)
        tensors = [*model.parameters, *(tensor for tensor in model.gradients or () if tensor is not None)]
        return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)

    def close(self) -> None:
        self.client.post(f"sessions/{self.session}/finish")


def training(subject: Subject, draw: Random, **fields: Any) -> Any:
    """A message with texts, and perhaps an image behind one of them."""
    body = good_training(subject.model, subject.next, datums=draw.randint(1, 3), **fields)
    message = schema_pb2.ForwardBackwardRequest.FromString(body)
    if draw.random() < 0.5:
        datum = draw.choice(message.data)
        datum.model_input.add().image.data = IMAGES[0]
        datum.loss_fn_inputs[0].value.dense += bytes(8 * 4)
    weights = message.data[0].loss_fn_inputs.add(key="weights").value
    weights.dense, weights.dtype = bytes(len(message.data[0].loss_fn_inputs[0].value.dense) // 2), schema_pb2.FLOAT32
    return message


def bodies(subject: Subject, draw: Random) -> tuple[str, dict[str, Any]]:
    """A path and a good body in JSON."""
    number = {"model_id": subject.model, "seq_id": subject.next}
    path = f"tinker://{subject.model}/weights/a"
    image = {"data": base64.b64encode(draw.choice(IMAGES)).decode(), "format": "png", "type": "image"}
    chunks = [{"tokens": [1, 2, 3], "type": "encoded_text"}, image, {"tokens": [4], "type": "encoded_text"}]
    params = {"max_tokens": 2, "seed": 1, "temperature": 1.0, "top_k": 3, "top_p": 0.9, "stop": [7]}
    fresh = {"session_id": subject.session, "model_seq_id": draw.randint(0, 3)}
    choices: dict[str, dict[str, Any]] = {
        "optim_step": {**number, "adam_params": ADAM},
        "save_weights": {**number, "path": "a", "overwrite": True, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": {**number, "path": f"s{subject.next}", "kind": "snapshot"},
        "load_weights": {**number, "path": path, "optimizer": True},
        "create_model": {**fresh, "base_model": NAME, "lora_config": {"rank": 2, "seed": 1}},
        "asample": {
            "sampling_session_id": subject.sampler,
            "seq_id": subject.next_sample,
            "num_samples": 2,
            "prompt": {"chunks": chunks[: draw.choice([1, 3])]},
            "sampling_params": params,
            "prompt_logprobs": True,
        },
        "create_sampling_session": {"session_id": subject.session, "sampling_session_seq_id": 1, "base_model": NAME},
        "retrieve_future": {"request_id": f"{subject.model}:0", "allow_metadata_only": True},
        "get_info": {"model_id": subject.model},
        "session_heartbeat": {"session_id": subject.session},
        "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "0.38.0"},
        "weights_info": {"tinker_path": path},
        "client/config": {"sdk_version": "0.38.0"},
        "telemetry": {"events": []},
    }
    name = draw.choice([*choices, "optim_step", "asample", "save_weights"])
    return name, choices[name]


# ---------------------------------------------------------------------- damage


def damaged_json(value: Any, draw: Random) -> Any:
    """Replace or leave out one entry of a tree, somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {key: entry for key, entry in value.items() if key != name}
        return {**value, name: damaged_json(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], damaged_json(value[at], draw), *value[at + 1 :]]
    return draw.choice([*NUMBERS, *OTHERS, draw.choice(OTHERS)])


def damaged_message(message: Any, draw: Random) -> Any:
    """Change one field of a training request to something that parses."""
    datum = draw.choice(message.data)
    tensor = draw.choice(datum.loss_fn_inputs).value
    wrong = np.array([draw.choice([-1, 0, 10**6, 2**31 - 1, -(2**31)])], "<i4").tobytes()
    changes = [
        lambda: setattr(message, "seq_id", draw.choice([0, -1, 1, message.seq_id + 3, 2**31 - 1])),
        lambda: setattr(message, "model_id", draw.choice(["", "x", "s:train:9", "\x00" * 99])),
        lambda: setattr(message, "loss_fn", draw.choice(["", "ppo", "dro", "custom", "é" * 999])),
        lambda: message.loss_fn_config.add(key=draw.choice(["beta", ""]), value=draw.choice([float("nan"), 1e308])),
        lambda: message.ClearField("data"),
        lambda: datum.ClearField("model_input"),
        lambda: datum.ClearField("loss_fn_inputs"),
        lambda: datum.loss_fn_inputs.add(key="advantages"),
        lambda: setattr(datum.model_input.add().encoded_text, "tokens", draw.choice([wrong, wrong * 200, b"123"])),
        lambda: setattr(datum.model_input.add().image, "data", draw.choice(IMAGES)),
        lambda: setattr(datum.model_input.add().dmel, "dmel", b"sound"),
        lambda: setattr(
            tensor, "dense", np.full(len(tensor.dense) // 4, draw.choice([np.nan, np.inf, 3e38]), "<f4").tobytes()
        ),
        lambda: setattr(tensor, "dense", tensor.dense[: draw.randrange(len(tensor.dense) + 1)]),
        lambda: setattr(tensor, "dtype", draw.randrange(-1, 7)),
        lambda: tensor.shape.extend(draw.choice([[0], [-1], [2**62, 4], [1, 1, 1], [2**40]])),
        lambda: tensor.sparse_csr.SetInParent(),
    ]
    draw.choice(changes)()
    return message


def drawn(subject: Subject, draw: Random) -> tuple[str, bytes, dict[str, str]]:
    """Draw one request: path, body, headers."""
    if subject.done and draw.random() < 0.08:
        return draw.choice(subject.done)  # again
    headers: dict[str, str] = {}
    if draw.random() < 0.5:
        name, headers["content-type"] = "forward_backward", "application/x-protobuf"
        message = training(subject, draw, forward_only=draw.random() < 0.3)
        if draw.random() < 0.6:
            message = damaged_message(message, draw)
        body = message.SerializeToString()
    else:
        name, good = bodies(subject, draw)
        body = json.dumps(damaged_json(good, draw) if draw.random() < 0.7 else good).encode()
    if draw.random() < 0.3:
        body = damaged(body, draw) if draw.random() < 0.8 else draw.choice([b"\x1a\x00" * 4000, b"[" * 2000]) + body
    if draw.random() < 0.15:
        headers["content-encoding"] = draw.choice(["br", "zstd", "gzip", "\x7f", "identity"])
    return name, body, headers


# ---------------------------------------------------------------------- the run


def attack(service: Service, count: int, seed: int) -> Counter[str]:
    """Send so many requests; returns how many ended in which way."""
    client = Client(app=service.app())
    witness, subject = Subject(client, service), Subject(client, service)
    before = scores(witness)
    ends: Counter[str] = Counter()
    for number in range(count):
        draw = Random(seed * 1_000_003 + number)
        state, start = subject.state(), time.monotonic()
        name, body, headers = drawn(subject, draw)
        leaves = draw.random() < 0.05
        answer = client.send("POST", f"/api/v1/{name}", body, headers=headers, leaves=leaves)
        assert answer.status in STATUSES, (number, name, answer.status, answer.body[:200])
        end = ended(subject, answer, is_creation=name == "create_model")
        ends[end] += 1
        assert time.monotonic() - start < LONGEST, (number, name, end)
        if end == "held":  # for one before it that never comes
            subject.close()
            subject = Subject(client, service)
            continue
        if end != "accepted":
            assert subject.state() == state, (number, name, end, answer.body[:200])
        elif not leaves:
            subject.done.append((name, body, headers))
    assert service.queue.fault is None
    assert scores(witness) == before
    return ends


def ended(subject: Subject, answer: Any, *, is_creation: bool) -> str:
    """Wait for what comes of a request: accepted, refused, failed or held."""
    if answer.status != 200:
        return f"refused {answer.status}"
    request_id = answer.json().get("request_id")
    if request_id is None:
        return "accepted"
    used = request_id == f"{subject.model}:{subject.next}"
    subject.next += used
    subject.next_sample += request_id == f"{subject.sampler}:{subject.next_sample}"
    is_early = not used and request_id.startswith(f"{subject.model}:") and int(request_id.split(":")[-1]) > subject.next
    if is_early:
        return "held"
    reply = subject.client.retrieve(request_id)
    assert reply.status == 200, (request_id, reply.status, reply.body)
    if reply.headers["content-type"] == "application/json" and "error" in reply.json():
        assert reply.json()["category"] == "user", reply.json()
        return "failed"
    return "accepted"


def scores(subject: Subject) -> bytes:
    """Log-probabilities of a datum, to the bit."""
    posted = subject.client.protobuf(good_training(subject.model, subject.next, forward_only=True)).json()
    subject.next += 1
    output = schema_pb2.ForwardBackwardOutput.FromString(subject.client.retrieve(posted["request_id"]).body)
    return output.loss_fn_outputs[0].fields[0].value.data


@pytest.fixture(name="service")
def _service(tmp_path: Path) -> Any:
    processor = tiny_processor(max_pixels=64 * 32 * 32)
    folder = tmp_path / "model"
    processor.save_pretrained(folder)
    base = Base(name=NAME, source=str(folder), model=tiny_model(processor=processor), processor=processor)
    state = StateFolder(tmp_path / "state", base_model=NAME)
    service = Service(base, state, ServiceSettings(key=KEY, limits=LIMITS))
    service.queue.start()
    yield service
    service.queue.close()


@pytest.mark.parametrize(("count", "seed"), [(150, 0), pytest.param(600, 1, marks=pytest.mark.slow)])
def test_damaged_requests_leave_no_trace(service: Service, count: int, seed: int) -> None:
    ends = attack(service, count, seed)
    assert sum(ends.values()) == count
    assert {"accepted", "failed", "refused 400"} <= ends.keys()
    if count > 500:
        assert {"held", "refused 404", "refused 415"} <= ends.keys()
