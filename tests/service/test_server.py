"""The unmodified client on a whole service in this process; the oracle is plain transformers and numpy."""

from __future__ import annotations

import gc
import os
import socket
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from service.clients import until
from step_service import png

from vlmpack.service import Base, Service, ServiceLimits, ServiceSettings, StateFolder, bind
from vlmpack.service.server import find_key, make_key
from vlmpack.testing import tiny_model, tiny_processor

os.environ.setdefault("TINKER_TELEMETRY", "0")
tinker = pytest.importorskip("tinker", reason="the client needs Python 3.11")
types: Any = tinker.types

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of the client: a future stands for its result
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the client leaves connections open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NAME = "vlmpack/tiny"
KEY = "tml-a-key-of-the-tests"
WAIT = 60.0
TEXT = [20, 21, 22, 23, 24, 25]


@dataclass
class Running:
    address: str
    base: Base
    plain: Any
    service: Service
    server: Any


@contextmanager
def serving(folder: Path, limits: ServiceLimits, **settings: Any) -> Iterator[Running]:
    """A service on a free port, with a state folder in `folder`."""
    processor = tiny_processor(max_pixels=64 * 32 * 32)
    model = tiny_model(processor=processor)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    base = Base(name=NAME, source=str(folder / "model"), model=model, processor=processor, tokenizer="a/tokenizer")
    state = StateFolder(folder / "state", base_model=NAME)
    service = Service(base, state, ServiceSettings(key=KEY, limits=limits, **settings))
    listening, server = bind("127.0.0.1", 0), service.server()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started)
    plain = tiny_model(processor=processor).eval()
    try:
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", base, plain, service, server)
    finally:
        server.should_exit = True
        thread.join(WAIT)
    assert not thread.is_alive()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # clients leave connections open
        gc.collect()


@pytest.fixture(name="running", scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = ServiceLimits(chunk_bytes=20_000, body_bytes=200_000, row_tokens=256)
    with serving(tmp_path_factory.mktemp("service"), limits) as running:
        yield running


@pytest.fixture(name="client", scope="module")
def _client(running: Running) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=running.address, api_key=KEY)
    yield client
    client.close("success").result(WAIT)


@pytest.fixture(name="model")
def _model(client: Any) -> Any:
    return client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result(WAIT)


def tensor(values: Any, dtype: Any) -> Any:
    return types.TensorData.from_numpy(np.array(values, dtype))


def text_datum(tokens: list[int] = TEXT, weights: list[float] | None = None) -> Any:
    inputs = {
        "target_tokens": tensor([*tokens[1:], 9], np.int64),
        "weights": tensor(weights or [1.0] * len(tokens), np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def image_datum(running: Running, image: bytes, *, count: int = 4) -> Any:
    config = running.plain.config
    chunks = [
        types.EncodedTextChunk(tokens=[5, config.vision_start_token_id]),
        types.ImageChunk(data=image, format="png", expected_tokens=count),
        types.EncodedTextChunk(tokens=[config.vision_end_token_id, *TEXT]),
    ]
    length = 2 + count + 1 + len(TEXT)
    targets = [0] * (length - len(TEXT)) + [*TEXT[1:], 9]
    weights = [0.0] * (length - len(TEXT)) + [1.0] * len(TEXT)
    inputs = {"target_tokens": tensor(targets, np.int64), "weights": tensor(weights, np.float32)}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


# ---------------------------------------------------------------------- training


def test_a_call_of_many_requests_is_one_sum(running: Running, model: Any) -> None:
    """The client cuts it by size, posts number 1 last, and puts the answers together."""
    datums = [image_datum(running, png(64, 64, seed=seed)) for seed in range(6)]
    done = running.service.queue.stats
    before = done()["requests_total"].get("ForwardBackward", 0)
    result = model.forward_backward(datums, "cross_entropy").result(WAIT)
    assert done()["requests_total"]["ForwardBackward"] - before > 2
    alone = [model.forward([datum], "cross_entropy").result(WAIT).metrics["loss:sum"] for datum in datums]
    assert result.metrics["loss:sum"] == pytest.approx(sum(alone), rel=1e-5)
    assert len(result.loss_fn_outputs) == 6


def test_a_loss_of_the_client(model: Any) -> None:
    def loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        value = sum((entry**2).sum() for entry in logprobs)
        return value, {"squares": float(value.detach())}

    before = model.forward([text_datum()], "cross_entropy").result(WAIT).loss_fn_outputs[0]["logprobs"].to_numpy()
    result = model.forward_backward_custom([text_datum()], loss).result(WAIT)
    assert result.metrics["squares"] == pytest.approx(float((before**2).sum()), rel=1e-4)


# ---------------------------------------------------------------------- sampling


def test_on_policy_importance_ratios_are_exactly_1(tmp_path: Path) -> None:
    with serving(tmp_path, ServiceLimits(), batch_invariant=True) as running:
        client = tinker.ServiceClient(base_url=running.address, api_key=KEY)
        model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result(WAIT)
        for _ in range(2):
            sampler, data, sampled = model.save_weights_and_get_sampling_client(), [], []
            for prompt in (TEXT, TEXT[:2], TEXT * 20):
                params = types.SamplingParams(max_tokens=9, seed=0, stop=[])
                response = sampler.sample(types.ModelInput.from_ints(prompt), 3, params).result(WAIT)
                for sequence in response.sequences:
                    tokens, before = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
                    inputs = {
                        "target_tokens": tensor(tokens[1:], np.int64),
                        "logprobs": tensor([*before, *sequence.logprobs], np.float32),
                        "advantages": tensor([*before, *range(1, 10)], np.float32),
                    }
                    data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
                    sampled.append(sequence.logprobs)
            result = model.forward_backward(data, "importance_sampling").result(WAIT)
            for output, logprobs in zip(result.loss_fn_outputs, sampled, strict=True):
                assert output["logprobs"].to_numpy()[-9:].tolist() == logprobs
            assert result.metrics["loss:sum"] == -45.0 * len(data)  # ratio 1 times the advantages of 9 tokens
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT)
        client.close("success").result(WAIT)


def test_the_likeliest_tokens_of_a_prompt_and_scores_of_its_last_ones(client: Any, running: Running) -> None:
    sampler = client.create_sampling_client(base_model=NAME).result(WAIT)
    prompt, params = types.ModelInput.from_ints(TEXT), types.SamplingParams(max_tokens=1)
    with torch.no_grad():
        likeliest = running.plain(input_ids=torch.tensor([TEXT])).logits[0].log_softmax(-1).topk(3)
    response = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result(WAIT)
    assert response.topk_prompt_logprobs[0] is None
    for at, entries in enumerate(response.topk_prompt_logprobs[1:]):
        assert [token for token, _ in entries] == likeliest.indices[at].tolist()
        assert [value for _, value in entries] == pytest.approx(likeliest.values[at].tolist(), abs=1e-4)
    last = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result(WAIT)
    assert last.prompt_logprobs == [None] * (len(TEXT) - 2) + response.prompt_logprobs[-2:]
    with pytest.raises(tinker.RequestFailedError, match=r"prompt_logprobs_last_n is 6; the prompt has 6 tokens"):
        sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=6).result(WAIT)


# ---------------------------------------------------------------------- lists and pages


@pytest.mark.parametrize("rank", [4, 0])
def test_weights_are_downloaded_as_peft_and_transformers_load_them(client: Any, tmp_path: Path, rank: int) -> None:
    import httpx
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model = client.create_lora_training_client(NAME, rank=rank, seed=1).result(WAIT)
    info = model.get_info()
    assert (info.is_lora, info.model_data.tokenizer_id) == (rank > 0, "a/tokenizer")
    model.forward_backward([text_datum()], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT)
    logprobs = model.forward([text_datum()], "cross_entropy").result(WAIT).loss_fn_outputs[0]["logprobs"].to_numpy()
    path = model.save_weights_external("out").result(WAIT).path
    rest = client.create_rest_client()
    signed = rest.get_external_weights_urls(path).result(WAIT)
    assert signed.expires.timestamp() > time.time() + 3000
    get = partial(httpx.get, timeout=WAIT)
    for name, url in signed.urls.items():
        (tmp_path / name).write_bytes(get(url).content)
    assert get(url[:-1]).status_code == get(url.replace("/downloads/", "/downloads/1")).status_code == 403
    plain: Any = tiny_model(processor=tiny_processor(max_pixels=64 * 32 * 32)).eval()
    if rank:
        plain = PeftModel.from_pretrained(plain, tmp_path)
    else:
        plain = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([TEXT])).logits[0].log_softmax(-1)
    targets = torch.tensor(text_datum().loss_fn_inputs["target_tokens"].data)
    np.testing.assert_allclose(logits.gather(1, targets[:, None])[:, 0].numpy(), logprobs, atol=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="is for download only"):
        model.load_state(path).result(WAIT)
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT)
    assert get(url).status_code == 404


# ---------------------------------------------------------------------- connections


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection, in time."""
    connection.settimeout(WAIT)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_connections_that_send_nothing_or_slowly_or_read_nothing_are_closed_and_make_room(tmp_path: Path) -> None:
    import httpx

    limits = ServiceLimits(connections=2, header_seconds=0.5)
    with serving(tmp_path, limits) as running, ExitStack() as stack:
        port = int(running.address.rpartition(":")[2])

        def connect(sent: bytes = b"") -> socket.socket:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(sent)
            return connection

        crowd = [connect() for _ in range(5)]
        assert httpx.get(f"{running.address}/healthz").json() == {"status": "ok"}
        assert is_closed(crowd[0])
        header = connect(b"GET /healthz HTTP/1.1\r\nHost: a\r\n")
        body = connect(b"POST /api/v1/telemetry HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        assert all(is_closed(each) for each in (header, body, crowd[-1]))
        for _ in range(2):
            reads_nothing = stack.enter_context(socket.socket())
            reads_nothing.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reads_nothing.settimeout(0.3)
            reads_nothing.connect(("127.0.0.1", port))
            with pytest.raises(TimeoutError):
                reads_nothing.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10**6)

        until(lambda: sum(each.flow.write_paused for each in [*running.server.server_state.connections]) == 2, WAIT)
        assert httpx.get(f"{running.address}/healthz").json() == {"status": "ok"}


def test_a_disk_that_is_slow_for_many_requests_stops_no_answer_that_needs_none(tmp_path: Path) -> None:
    """Another process writes to the journal, while more requests wait for it than there are threads."""
    import httpx

    with serving(tmp_path, ServiceLimits()) as running, ThreadPoolExecutor(60) as pool:
        http = httpx.Client(base_url=f"{running.address}/api/v1", headers={"X-API-Key": KEY}, timeout=WAIT)
        session = http.post("create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            body = {"session_id": session, "base_model": NAME}
            posted = [
                pool.submit(http.post, "create_sampling_session", json={**body, "sampling_session_seq_id": number})
                for number in range(60)
            ]
            time.sleep(0.5)
            answers = [
                http.get("healthz", timeout=20.0),
                http.post("session_heartbeat", json={"session_id": session}, timeout=20.0),
                http.post("retrieve_future", json={"request_id": f"{session}:train:0:0"}, timeout=20.0),
            ]
            assert not any(each.done() for each in posted)
            other.execute("ROLLBACK")
        assert [each.status_code for each in answers] == [200, 200, 200]
        assert {each.result(WAIT).status_code for each in posted} == {200}
        http.close()


def test_a_run_and_a_session_say_what_their_client_said_of_them(running: Running) -> None:
    """From the first, recipes read which chat template a checkpoint was trained with."""
    client = tinker.ServiceClient({"who": "me"}, display_name="a session", base_url=running.address, api_key=KEY)
    model = client.create_lora_training_client(NAME, rank=4, user_metadata={"renderer_name": "role_colon"}).result(WAIT)
    rest = client.create_rest_client()
    assert rest.get_training_run(model.model_id).result(WAIT).last_checkpoint is None
    model.save_state("first").result(WAIT)
    path = model.save_state("second", user_metadata={"step": "2"}).result(WAIT).path
    sampler_path = model.save_weights_for_sampler("third").result(WAIT).path
    run = rest.get_training_run_by_tinker_path(path).result(WAIT)
    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert (run.last_checkpoint.tinker_path, run.last_checkpoint.user_metadata) == (path, {"step": "2"})
    assert run.last_sampler_checkpoint.tinker_path == sampler_path
    assert run in rest.list_training_runs().result(WAIT).training_runs
    session = rest.get_session(model.model_id.split(":")[0]).result(WAIT)
    assert (session.user_metadata, session.display_name) == ({"who": "me"}, "a session")
    client.close("success").result(WAIT)


def test_pages_without_a_key(running: Running) -> None:
    import httpx

    page = httpx.get(running.address)
    assert page.status_code == 200
    assert NAME in page.text
    assert "<script" not in page.text and "http://" not in page.text.replace(running.address, "")
    metrics = httpx.get(f"{running.address}/metrics").text
    assert "vlmpack_trained_tokens_total" in metrics
    assert "vlmpack_computed_tokens_total" in metrics and "\nvlmpack_up 1\n" in metrics
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.service.state.journal, "_failed", (time.monotonic(), "the disk is full: make room"))
        assert "\nvlmpack_up 0\n" in httpx.get(f"{running.address}/metrics").text
        assert "the disk is full: make room" in httpx.get(running.address).text


def test_the_key_file_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMPACK_API_KEY", raising=False)
    assert find_key(tmp_path / "new" / "key") is None
    key = make_key(tmp_path / "new" / "key")
    assert key.startswith("tml-") and len(key) > 40
    assert find_key(tmp_path / "new" / "key") == key
    assert (tmp_path / "new" / "key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
