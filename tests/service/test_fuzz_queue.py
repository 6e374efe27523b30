"""Clients that send in any order, twice, too early, in part wrongly, and leave: each operation still runs once."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import slow
from service.clients import Client, create, datum, forward_backward, optim_step, sample, save, served, until
from service.fakes import FakeEngine

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import Failure, Rejected, Request

CLIENTS = 4
OPERATIONS = 20


def operations(model: str, draw: random.Random) -> list[Request]:
    """The requests of one model, in order."""
    kinds = draw.choices(["train", "look", "bad", "broken", "step", "save"], [8, 2, 1, 1, 4, 1], k=OPERATIONS)
    made = {
        "train": lambda seq: forward_backward(model, seq, *(datum(seq, n) for n in range(draw.randint(1, 5)))),
        "look": lambda seq: forward_backward(model, seq, forward_only=True),
        "bad": lambda seq: forward_backward(model, seq, datum(1), datum(-1)),
        "broken": lambda seq: forward_backward(model, seq, loss="broken"),
        "step": lambda seq: optim_step(model, seq),
        "save": lambda seq: save(model, seq, f"at{seq}"),
    }
    return [made[kind](seq) for seq, kind in enumerate(kinds, 1)]


def client_in_disorder(client: Client, seed: int) -> tuple[str, list[Any]]:
    """What came of the requests of a client that sends some ahead, many twice, and wrong ones between."""
    draw = random.Random(seed)
    session = client.queue.create_session()
    client.call(create(session, seed=seed))
    model = f"{session}:train:0"
    requests = operations(model, draw)
    sampler = client.sampler(session)
    waiting = [*requests]
    while waiting:
        window = waiting[: draw.randint(1, 6)]
        draw.shuffle(window)
        for request in window + draw.choices(window, k=draw.randint(0, 3)):
            client.post(request)
            if draw.random() < 0.2:
                with pytest.raises(Rejected):
                    client.post(forward_backward(model, request.seq_id, datum(99)))  # type: ignore
        waiting = [request for request in waiting if request not in window]
        client.post(sample(sampler, draw.randint(0, 5)))
        if draw.random() < 0.3:
            client.outcome(client.post(window[0]))
    return model, [client.call(request) for request in requests]


def done_in_order(engine: FakeEngine, model: str) -> list[int]:
    return [seq for what, owner, numbers in engine.log if what == "group" and owner == model for seq in numbers]


def expected_weights(requests: list[Request], seed: int) -> np.ndarray:
    """What the fake engine makes of the requests one by one, without any queue."""
    engine = FakeEngine()
    first = create("s", seed=seed)
    engine.create(requests[0].model_id, first.lora)  # type: ignore
    for request in requests:
        match type(request).__name__:
            case "ForwardBackward":
                if request.loss_fn == "broken" or (len(request.data) == 2 and -1 in request.data[1].chunks[0].tokens):  # type: ignore
                    continue
                work = engine.forward_backward([request])  # type: ignore
                while work.rows_left:
                    work.run_row()
            case "OptimStep":
                engine.optim_step(request.model_id, request.adam)  # type: ignore
    return engine.all[requests[0].model_id].weights  # type: ignore


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_each_request_of_each_client_runs_once_and_in_order(tmp_path: Path, seed: int) -> None:
    settings = ServiceLimits(gap_seconds=60.0, queued_requests=40, snapshot_share=0.5)
    with served(tmp_path, limits=settings) as (client, engine), ThreadPoolExecutor(CLIENTS + 1) as pool:
        seeds = [100 * seed + number for number in range(CLIENTS)]
        leaver = pool.submit(leave_again_and_again, client, seed)
        results = [*pool.map(lambda each: in_time(client, each), seeds)]
        leaver.result()
        for each, (model, outcomes) in zip(seeds, results, strict=True):
            draw = random.Random(each)
            requests = operations(model, draw)
            failed = [type(outcome) is Failure for outcome in outcomes]
            assert sum(failed) < OPERATIONS / 2
            ran = done_in_order(engine, model)
            alone = Counter(ran)
            good = [
                request.seq_id  # type: ignore
                for request, bad in zip(requests, failed, strict=True)
                if type(request).__name__ == "ForwardBackward" and not bad
            ]
            assert set(good) <= set(alone)
            assert [*dict.fromkeys(ran)] == sorted(set(ran))
            assert engine.all[model].steps == sum(type(request).__name__ == "OptimStep" for request in requests)
            np.testing.assert_allclose(engine.all[model].weights, expected_weights(requests, each), rtol=1e-6)
        stats = client.queue.stats()
        until(lambda: client.queue.stats().queued == 0)
        assert stats.fault is None
        states = {model: engine.all[model].weights for model, _ in results}
    with served(tmp_path) as (client, engine):
        until(lambda: client.queue.stats().is_restored)
        for model, weights in states.items():
            assert np.array_equal(engine.all[model].weights, weights)


def in_time(client: Client, seed: int) -> tuple[str, list[Any]]:
    """The client's requests; what is refused for want of room is sent again by `post`."""

    class Patient(Client):
        def post(self, request: Request) -> str:
            while True:
                try:
                    return super().post(request)
                except Rejected as refusal:
                    if refusal.status != 429:
                        raise

    return client_in_disorder(Patient(client.queue), seed)


def leave_again_and_again(client: Client, seed: int) -> None:
    """A client that leaves its work behind."""
    draw = random.Random(seed)
    for _ in range(6):
        session = client.queue.create_session()
        model = f"{session}:train:0"
        for request in (create(session), forward_backward(model, 1), optim_step(model, 2), forward_backward(model, 5)):
            if draw.random() < 0.8:
                try:
                    client.post(request)
                except Rejected as refusal:
                    assert refusal.status in (404, 429)
        client.queue.finish(session)
