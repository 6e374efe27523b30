"""The HTTP API on a queue with a tiny engine: statuses, names, refusals, limits, the key."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service.asgi import BASE, KEY, Client, client_of
from service.wire.test_codec import ADAM, SAMPLE

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.queue import Pending
from vlmpack.service.wire import schema_pb2


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with client_of(tmp_path, ServiceLimits()) as client:
        yield client


def training(model_id: str, seq_id: int = 1, *, datums: int = 1, **fields: Any) -> bytes:
    """A training request of short datums."""
    message = schema_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", **fields)
    for _ in range(datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        targets = datum.loss_fn_inputs.add(key="target_tokens").value
        targets.dense, targets.dtype = np.array([2, 3], "<i8").tobytes(), schema_pb2.INT64
    return message.SerializeToString()


def error_of(client: Client, request_id: str) -> str:
    """Text of a request that failed by its client's fault."""
    reply = client.retrieve(request_id)
    assert reply.status == 200
    assert reply.json()["category"] == "user"
    return reply.json()["error"]


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize(
    "headers", [{}, {"x-api-key": "tml-other"}, {"authorization": "Bearer tml-x"}, {"x-api-key": "é"}]
)
def test_without_the_key_nothing_is_served(client: Client, headers: dict[str, str]) -> None:
    for method, path in [("POST", "/api/v1/create_session"), ("GET", "/api/v1/sessions"), ("GET", "/anything")]:
        answer = client.send(method, path, b"{}", headers=headers, key=None)
        assert answer.status == 401
        assert "X-API-Key" in answer.json()["detail"]
    assert client.queue.sessions() == []


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}])
def test_the_key_opens_and_health_needs_none_to_be_read(client: Client, headers: dict[str, str]) -> None:
    assert client.send("GET", "/api/v1/sessions", headers=headers, key=None).status == 200
    for path in ("/healthz", "/api/v1/healthz"):
        answer = client.send("GET", path, key=None)
        assert (answer.status, answer.json()) == (200, {"status": "ok"})
        assert client.send("POST", path, b'{"model_id": "m", "seq_id": 1}', key=None).status == 401


def test_the_log_has_one_line_a_request_and_no_key(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vlmpack.service"):
        client.get("sessions", access=KEY)
        client.send("GET", "/api/v1/a\nb", key="tml-wrong")
        client.send("GET", f"/api/v1/downloads/{'9' * 5000}/signature/folder/file", key=None)
    first, second, third = caplog.messages
    assert third.startswith("GET /api/v1/downloads/ 403 ")
    assert first.startswith("GET /api/v1/sessions 200 ")
    assert second.startswith(r"GET /api/v1/a\nb 401 ")
    assert KEY not in caplog.text and "tml-wrong" not in caplog.text


# ---------------------------------------------------------------------- sessions and clients


@pytest.mark.parametrize("path", ["client/config", "create_session"])
def test_a_client_that_is_too_old_is_refused_in_words(client: Client, path: str) -> None:
    answer = client.post(path, sdk_version="0.24.1", tags=[])
    assert answer.status == 400
    assert answer.json()["detail"] == "tinker 0.24.1: this service needs 0.25 or newer; pip install -U tinker"


@pytest.mark.parametrize("version", ["0.25.0", "0.38.0", "1.0.0", "unknown", ""])
def test_other_clients_are_served(client: Client, version: str) -> None:
    assert client.post("client/config", sdk_version=version).status == 200


# ---------------------------------------------------------------------- requests and results


def test_a_load_is_into_a_model_or_into_a_new_one(client: Client) -> None:
    body = {"model_id": client.model(), "seq_id": 1, "session_id": "s", "model_seq_id": 1}
    assert "send one" in client.post("load_weights", **body, path="p", optimizer=False).json()["detail"]


def test_a_result_that_is_not_there_yet(tmp_path: Path) -> None:
    with client_of(tmp_path, ServiceLimits(poll_seconds=0.01), threading.Semaphore(0)) as client:
        request_id = client.protobuf(training(client.model())).json()["request_id"]
        pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        reply = client.retrieve(request_id)
        assert (reply.status, reply.json()) == (408, pending)

        async def paused(request_id: str, timeout: float) -> Pending:
            return Pending(reason="busy")

        client.queue.reply = paused
        pending |= {"queue_state": "paused_capacity", "queue_state_reason": "busy"}
        assert client.retrieve(request_id).json() == pending


def test_a_result_that_is_lost(client: Client) -> None:
    assert client.retrieve("s0:sample:1:5").status == 410  # the client samples again
    reply = client.retrieve("s0:train:1:5")
    assert reply.status == 200
    assert reply.json()["category"] == "server"
    assert "not known" in reply.json()["error"]


def test_a_model_names_its_newest_checkpoint_of_each_kind_though_the_clock_goes_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(10**9, -1)
    monkeypatch.setattr("time.time", lambda: float(next(clock)))

    def last(model_id: str) -> list[str | None]:
        run = client.get(f"training_runs/{model_id}").json()
        return [run[name] and run[name]["checkpoint_id"] for name in ("last_checkpoint", "last_sampler_checkpoint")]

    model_id, other = client.model(), client.model()
    assert last(model_id) == [None, None]
    saves = [("save_weights", "b"), ("save_weights", "a"), ("save_weights_for_sampler", "c")]
    for seq_id, (kind, path) in enumerate(saves, 1):
        client.retrieve(client.post(kind, model_id=model_id, seq_id=seq_id, path=path).json()["request_id"])
    unnamed = {"model_id": model_id, "seq_id": 4, "sampling_session_seq_id": 0}
    client.retrieve(client.post("save_weights_for_sampler", **unnamed).json()["request_id"])
    assert (last(model_id), last(other)) == (["weights/a", "sampler_weights/c"], [None, None])
    client.send("DELETE", f"/api/v1/training_runs/{model_id}/checkpoints/weights/a")
    assert last(model_id) == ["weights/b", "sampler_weights/c"]


# ---------------------------------------------------------------------- refusals use the number up


@pytest.mark.parametrize(
    ("limits", "change", "message"),
    [
        ({"fields": 20}, lambda sent: None, "more than 20 fields"),
        ({}, lambda sent: setattr(sent.data[2].model_input[0].dmel, "dmel", b"sound"),
         "datum 2: a dmel chunk: this service takes text and images, no audio"),
    ],
)  # fmt: skip
def test_a_bad_training_request_fails_in_its_future_and_uses_its_number_up(
    tmp_path: Path, limits: dict[str, int], change: Callable[[Any], Any], message: str
) -> None:
    with client_of(tmp_path, ServiceLimits(**limits)) as client:
        model_id = client.model()
        sent = schema_pb2.ForwardBackwardRequest.FromString(training(model_id, 1, datums=3))
        change(sent)
        posted = client.protobuf(sent.SerializeToString())
        assert (posted.status, posted.json()["request_id"]) == (200, f"{model_id}:1")
        assert message in error_of(client, f"{model_id}:1")


def test_another_base_model_fails_in_the_future(client: Client) -> None:
    session_id = client.session()
    posted = client.post(
        "create_model", session_id=session_id, model_seq_id=0, base_model="gpt", lora_config={"rank": 4}
    )
    assert "not 'gpt'" in error_of(client, posted.json()["request_id"])
    answer = client.post("create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model="gpt")
    assert answer.status == 400


def test_a_refused_sampling_request_names_its_sequences_too(client: Client) -> None:
    created = client.post(
        "create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model=BASE
    )
    sampler = created.json()["sampling_session_id"]
    posted = client.post("asample", **{**SAMPLE, "sampling_session_id": sampler, "record_stability_info": True}).json()
    assert len(posted["sample_sequence_ids"]) == 2
    assert "record_stability_info" in error_of(client, posted["request_id"])


def test_a_body_without_a_name_is_refused_at_once(client: Client) -> None:
    model_id = client.model()
    before = client.queue.stats()["requests_failed_total"]
    assert client.protobuf(b"\xff\xff").status == 400
    assert client.post("optim_step", seq_id=1, adam_params=ADAM).status == 400
    assert client.post("optim_step", model_id=model_id, seq_id="1", adam_params=ADAM).status == 400
    assert client.post("asample", **{**SAMPLE, "num_samples": 10**9}).status == 400
    assert client.send("POST", "/api/v1/optim_step", b"not json").status == 400
    assert client.queue.stats()["requests_failed_total"] == before


def test_what_the_queue_rejects_is_answered_with_its_status(client: Client) -> None:
    answer = client.protobuf(training(client.session() + ":train:0", 1))
    assert answer.status == 404
    assert "there is no model" in answer.json()["detail"]


# ---------------------------------------------------------------------- bodies


def test_a_body_that_is_too_large_uses_its_number_up(tmp_path: Path) -> None:
    with client_of(tmp_path, ServiceLimits(body_bytes=20_000)) as client:
        model_id = client.model()
        answer = client.protobuf(training(model_id, 1) + b"\x7a\xff\xff\xff\x07" + bytes(10**7))
        assert answer.json()["request_id"] == f"{model_id}:1"
        assert "more than 20,000 bytes" in error_of(client, f"{model_id}:1")
        assert client.protobuf(b"\xff" * 30_000).status == 413  # it has no name


def test_an_operation_whose_json_is_too_large_uses_its_number_up(tmp_path: Path) -> None:
    with client_of(tmp_path, ServiceLimits(json_bytes=200)) as client:
        model_id = client.model()
        for seq_id, path in enumerate(("save_weights", "save_weights_for_sampler", "load_weights", "optim_step"), 1):
            posted = client.post(path, path="x" * 200, model_id=model_id, seq_id=seq_id, adam_params=ADAM)
            assert posted.json()["request_id"] == f"{model_id}:{seq_id}"
            assert "at most 200" in error_of(client, f"{model_id}:{seq_id}")


def test_training_in_json_is_refused_in_words(client: Client) -> None:
    answer = client.post("forward_backward", model_id="m")
    assert answer.status == 415
    assert "tinker 0.25 or newer" in answer.json()["detail"]
    posted = client.post("forward_backward", model_id=client.model(), seq_id=1)
    assert "tinker 0.25 or newer" in error_of(client, posted.json()["request_id"])


def test_a_training_request_holds_the_gaps_of_its_model_while_it_is_received(client: Client) -> None:
    model_id, received, receiving = client.model(), [], client.queue.receiving
    client.queue.receiving = lambda model: received.append(model) or receiving(model)
    client.protobuf(training(model_id, 1))
    assert received == [model_id]


def test_a_client_that_leaves_within_a_body_changes_nothing(client: Client) -> None:
    model_id = client.model()
    body = training(model_id, 1)
    client.send(
        "POST", "/api/v1/forward_backward", body, headers={"content-type": "application/x-protobuf"}, leaves=True
    )
    assert client.retrieve(f"{model_id}:1").json()["category"] == "server"  # it is not known
    assert client.bodies.held == 0


def test_a_service_that_stops_takes_no_requests_but_gives_results(client: Client) -> None:
    model_id = client.model()
    client.protobuf(training(model_id, 1))
    assert client.retrieve(f"{model_id}:1").status == 200
    client.queue.is_draining = True
    answer = client.protobuf(training(model_id, 2))
    assert answer.status == 503
    assert float(answer.headers["retry-after"]) > 0
    assert client.retrieve(f"{model_id}:1").status == 200


# ---------------------------------------------------------------------- lists


def test_checkpoints(client: Client) -> None:
    model_id = client.model()
    client.post("save_weights", model_id=model_id, seq_id=1, path="one")
    saved = client.post("save_weights_for_sampler", model_id=model_id, seq_id=2, path="two", ttl_seconds=3600).json()
    path = client.retrieve(saved["request_id"]).json()["path"]
    second, first = client.get("checkpoints").json()["checkpoints"]
    assert (first["checkpoint_id"], first["checkpoint_type"]) == ("weights/one", "training")
    assert (second["checkpoint_id"], second["checkpoint_type"]) == ("sampler_weights/two", "sampler")
    assert first["expires_at"] is None and second["expires_at"] > second["time"]
    assert client.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"] == [second, first]
    assert client.get("checkpoints", limit=1, offset=1).json()["checkpoints"] == [first]
    adapted = {"train_unembed": True, "train_mlp": True, "train_attn": True}
    info = client.post("weights_info", tinker_path=path).json()
    assert info == {"base_model": BASE, "is_lora": True, "lora_rank": 4, **adapted}
    assert client.post("weights_info", tinker_path="nonsense").status == 400
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/one"
    for ttl in (9, None):
        assert client.send("PUT", f"{url}/ttl", json.dumps({"ttl_seconds": ttl}).encode()).status == 204
        expiries = [each["expires_at"] for each in client.get("checkpoints").json()["checkpoints"]]
        assert (expiries[1] is None) == (ttl is None)
    assert client.send("DELETE", url).status == 204
    assert client.send("DELETE", url).status == 404
    assert client.send("PUT", f"{url}/ttl", b'{"ttl_seconds": 9}').status == 404


@pytest.mark.parametrize("number", ["-1", "x", "9999999999", "١", "1e3", ""])
def test_pages_have_numbers(client: Client, number: str) -> None:
    answer = client.send(
        "GET", "/api/v1/checkpoints", parameters={"limit": number.encode().hex() if not number.isascii() else number}
    )
    assert answer.status == 400


# ---------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("path", ["forward", "an_operation_of_a_newer_client"])
def test_an_operation_that_is_not_served_fails_in_its_future_and_uses_its_number_up(client: Client, path: str) -> None:
    model_id = client.model()
    for _ in range(2):  # the client sends it again if it has lost the answer
        posted = client.post(path, model_id=model_id, seq_id=1, path="x")
        assert (posted.status, posted.json()["request_id"]) == (200, f"{model_id}:1")
        assert f"POST /api/v1/{path}: this service does not have it" in error_of(client, posted.json()["request_id"])
    assert client.post(path, model_id=model_id, seq_id=0).status == 404


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "training_runs/s:train:0/checkpoints/weights/a/publish", "whoever has the key can read all"),
        ("DELETE", "training_runs/s:train:0/checkpoints/weights/a/publish", "whoever has the key"),
        ("PUT", "sessions/s/project", "sessions have no projects"),
        ("POST", "sessions/s/trace_export", "the log of the service"),
        ("POST", "sessions/search", "list sessions"),
        ("GET", "audit", "the log of the service"),
        ("POST", "forward", "use tinker 0.25 or newer"),
        ("POST", "copy_weights", "load them by their path"),
        ("POST", "auth/token", "the key is sent as it is"),
        ("POST", "nonsense", "this service does not have it"),
        ("POST", "billing/usage/events", "bills nothing"),
        ("GET", "optim_step", "GET /api/v1/optim_step: this service does not have it"),
    ],
)
def test_what_is_not_there_is_refused_in_words(client: Client, method: str, path: str, message: str) -> None:
    answer = client.send(method, f"/api/v1/{path}", b"{}")
    assert answer.status in (404, 405)
    assert message in answer.json()["detail"]


def test_what_would_be_ignored_is_refused(client: Client) -> None:
    session_id = client.session()
    assert "no projects" in client.post("create_session", tags=[], project_id="p").json()["detail"]
    assert "no projects" in client.get("training_runs", project_id="p").json()["detail"]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    model = {"session_id": session_id, "model_seq_id": 0, "path": "tinker://m/weights/a", "optimizer": False}
    token = {"weights_access_token": "t"}
    assert "leave it out" in client.post("create_sampling_session", **sampler, **token).json()["detail"]
    posted = client.post("load_weights", **model, **token).json()
    assert "weights_access_token" in error_of(client, posted["request_id"])


def test_an_error_of_ours_is_500_without_a_word_of_it(client: Client, caplog: pytest.LogCaptureFixture) -> None:

    def broken() -> list[str]:
        raise ZeroDivisionError("secret")

    client.queue.sessions = broken
    answer = client.get("sessions")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert json.loads(answer.body)["detail"]
    assert "secret" in caplog.text  # in the log
