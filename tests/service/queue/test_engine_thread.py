"""The engine thread: groups, turns of models and samples, failures of the engine, snapshots."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from service.clients import (
    Client,
    datum,
    forward_backward,
    is_failure,
    load,
    optim_step,
    sample,
    save,
    save_for_sampler,
    served,
    until,
)
from service.fakes import FakeEngine, FakeRows, PickleCodec

from vlmpack.service.limits import ServiceLimits

SOME = tuple(datum(number, 1, 2) for number in range(7))
"""Three rows of the fake engine."""


def order(engine: FakeEngine, *kinds: str) -> list[str]:
    """Owners of the rows, steps and slices, in the order in which they ran."""
    return [owner for what, owner, _ in engine.log if what in kinds]


# ---------------------------------------------------------------------- groups


def test_a_group_holds_no_more_bytes_and_requests_than_its_limits(tmp_path: Path) -> None:
    for settings, size in ((ServiceLimits(group_requests=2), 2), (ServiceLimits(group_bytes=1), 1)):
        with served(tmp_path / str(size), limits=settings) as (client, engine):
            model = client.model()
            names = [client.post(forward_backward(model, seq)) for seq in (5, 4, 3, 2, 1)]
            for name in names:
                assert client.outcome(name).metrics
            groups = [len(numbers) for what, _, numbers in engine.log if what == "group"]
            assert max(groups) == size
            assert sum(groups) == 5


def test_only_so_much_is_encoded_ahead_and_all_of_it_runs(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    settings = ServiceLimits(encoded_bytes=1)  # of one model, and of one sample, at a time
    with served(tmp_path, FakeEngine(gate), limits=settings) as (client, _):
        models = [client.model() for _ in range(4)]
        sampler = client.sampler()
        names = [client.post(forward_backward(model, seq)) for seq in (2, 1) for model in models]
        names += [client.post(sample(sampler, seq)) for seq in range(4)]
        until(lambda: any(lane.work for lane in client.queue.lanes.values()))
        encoded = [entry.row.owner for entry in client.queue.entries.values() if entry.encoded is not None]
        assert len({*encoded}) == 2
        assert encoded.count(sampler) == 1
        gate.release(1000)
        for name in names:
            client.outcome(name)
        assert client.queue.encoded_bytes == {False: 0, True: 0}


def test_a_large_request_is_not_kept_waiting_by_small_ones_that_fit_beside_others(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate), limits=ServiceLimits(encoded_bytes=10_800)) as (client, engine):
        small, large = [client.model() for _ in range(4)], client.model()
        names = [client.post(forward_backward(model, 1)) for model in small]
        until(lambda: sum(what == "group" for what, *_ in engine.log) == 1)
        running = engine.log[0][1]
        names += [
            client.post(forward_backward(model, seq)) for seq in range(2, 8) for model in small if model != running
        ]
        assert client.queue.encoded_bytes[False] > 8000
        names.append(client.post(forward_backward(large, 1, datum(*range(600)))))  # 2,800 bytes: no room
        names += [client.post(forward_backward(running, seq)) for seq in range(2, 8)]  # 2,400 bytes, which has to wait
        gate.release(1000)
        for name in names:
            client.outcome(name)
        rows = order(engine, "row")
        assert rows.index(large) < [place for place, owner in enumerate(rows) if owner == running][1]


# ---------------------------------------------------------------------- turns


def test_models_take_turns_row_by_row(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, engine):
        models = [client.model() for _ in range(4)]
        names = [client.post(forward_backward(model, 1, *SOME)) for model in models]
        entries = client.queue.entries.values()
        until(lambda: all(entry.encoded is not None and entry.encoded.done() for entry in entries))
        gate.release(12)
        for name in names:
            client.outcome(name)
        rows = order(engine, "row")
        assert len(rows) == 12
        for model in models:
            places = [place for place, owner in enumerate(rows) if owner == model]
            assert max(np.diff(places)) <= 5


def test_samples_run_between_rows(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, engine):
        model = client.model()
        sampler = client.sampler()
        training = client.post(forward_backward(model, 1, *(datum(1) for _ in range(30))))
        samples = [client.post(sample(sampler, seq)) for seq in range(10)]
        until(lambda: all(entry.encoded is not None for entry in client.queue.new_samples))
        gate.release(1000)
        for name in (training, *samples):
            client.outcome(name)
        longest = {what: max(len([*run]) for key, run in groupby(order(engine, "row", "sample")) if key == what)
                   for what in (model, sampler)}  # fmt: skip
        assert longest[sampler] <= 2
        assert order(engine, "row", "sample").count(sampler) == 10


# ---------------------------------------------------------------------- failures


def test_a_request_that_breaks_the_engine_fails_alone_and_leaves_no_gradient(tmp_path: Path) -> None:
    def train(client, *, broken: bool) -> None:
        model = client.model()
        requests = [forward_backward(model, 4), forward_backward(model, 3, loss="broken"), forward_backward(model, 2)]
        if not broken:
            requests[1] = forward_backward(model, 3, forward_only=True)
        requests.append(forward_backward(model, 1))
        outcomes = [client.outcome(name) for name in [client.post(request) for request in requests]]
        if broken:
            assert is_failure(outcomes[1], "server", "RuntimeError: the engine broke")
        assert [type(outcome).__name__ for place, outcome in enumerate(outcomes) if place != 1] == [
            "ForwardBackwardResult"
        ] * 3
        client.call(optim_step(model, 5))

    with served(tmp_path / "a") as (client, engine):
        train(client, broken=True)
        (model,) = engine.all.values()
    with served(tmp_path / "b", limits=ServiceLimits(group_requests=1)) as (client, engine):
        train(client, broken=False)
        (expected,) = engine.all.values()
    assert np.array_equal(model.weights, expected.weights)


def test_a_step_that_fails_halfway_is_taken_back(client: Client, engine: FakeEngine, model: str) -> None:
    client.call(forward_backward(model, 1))
    client.call(optim_step(model, 2))
    client.call(forward_backward(model, 3))
    before = (engine.all[model].weights, engine.all[model].moment, engine.all[model].gradient)
    engine.step_error = MemoryError("none left")
    assert is_failure(client.call(optim_step(model, 4)), "server", "MemoryError")
    after = (engine.all[model].weights, engine.all[model].moment, engine.all[model].gradient)
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))
    assert client.call(optim_step(model, 5)).metrics["grad_norm:mean"] > 0


def test_a_load_that_fails_leaves_the_model_as_it_was(client: Client, engine: FakeEngine, model: str) -> None:
    client.call(save(model, 1, "a"))
    client.call(forward_backward(model, 2))
    client.call(optim_step(model, 3))
    before = engine.all[model].weights
    engine.save_error = OSError(28, "No space left on device")  # the snapshot that a load takes
    path = f"tinker://{model}/weights/a"
    assert is_failure(client.call(load(model, 4, path)), "server", "No space left")
    assert np.array_equal(engine.all[model].weights, before)
    engine.save_error = None
    assert client.call(load(model, 5, path)).path == path
    assert not np.array_equal(engine.all[model].weights, before)


def test_on_a_full_disk_a_save_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        engine.save_error = OSError(28, "No space left on device")
        assert is_failure(client.call(save(model, 1, "a")), "server", "Make room")
        client.call(optim_step(model, 2))  # its snapshot fails too, which no client has to know
        client.call(forward_backward(model, 3))  # begins when the snapshot has failed
        engine.save_error = None
        assert [*(tmp_path / "weights").iterdir()] == []
        assert client.call(save(model, 4, "a")).path
        assert [info.name for info in client.checkpoints()] == ["a"]


def test_a_broken_sampling_engine_or_a_bad_prompt_fails_what_it_had_and_goes_on(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, engine):
        sampler = client.sampler()
        engine.sampler.fails_next = True
        name = client.post(sample(sampler, 0))
        gate.release(100)
        assert is_failure(client.outcome(name), "server", "the sampler broke")
        assert client.call(sample(sampler, 1)).sequences
        empty = replace(sample(sampler, 2), prompt=())
        assert is_failure(client.call(empty), "user", "the prompt is empty")
        assert client.call(sample(sampler, 3)).sequences


# ---------------------------------------------------------------------- snapshots to sample from


def test_of_unnamed_saves_the_oldest_go(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(unnamed_saves=2, snapshot_share=0.0)) as (client, _):
        model = client.model()
        session = model.split(":")[0]
        for number in range(4):
            client.call(save_for_sampler(model, number + 1, number=number))
        assert client.samplers(session) == [f"{session}:sample:2", f"{session}:sample:3"]
        with pytest.raises(Exception, match="save under a name"):
            client.post(sample(f"{session}:sample:0", 0))
        until(lambda: len([*(tmp_path / "weights").iterdir()]) == 2)


# ---------------------------------------------------------------------- faults of ours


def test_a_reply_that_cannot_be_encoded_fails_its_request_alone(tmp_path: Path) -> None:
    class NoNumbers(PickleCodec):
        def encode(self, outcome):
            if isinstance(outcome, dict) and outcome["type"] == "optim_step":
                raise ValueError("not JSON")
            return super().encode(outcome)

    with served(tmp_path, codec=NoNumbers()) as (client, engine):
        model = client.model()
        client.call(forward_backward(model, 1))
        assert is_failure(client.call(optim_step(model, 2)), "server", "not JSON")
        assert client.call(forward_backward(model, 3)).metrics
        weights = engine.all[model].weights
    with served(tmp_path) as (client, engine):
        until(lambda: client.queue._thread.is_restored)
        assert np.array_equal(engine.all[model].weights, weights)  # the step was taken


def test_a_fault_of_the_thread_stops_one_model_until_the_next_start(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model, other = client.model(), client.model()
        client.call(forward_backward(model, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeRows, "results", lambda rows: [])
            waiting = client.post(forward_backward(model, 2))
            assert is_failure(client.outcome(waiting), "server", "when the server is started anew")
        assert is_failure(client.call(optim_step(model, 3)), "started anew")
        assert client.call(forward_backward(other, 1)).metrics
        assert client.queue.fault is None
    with served(tmp_path) as (client, _):
        assert client.call(optim_step(model, 4)).metrics
