"""The queue on a tiny engine: numbers, repetitions, gaps, room, long polls, sessions, samplers, checkpoints."""

from __future__ import annotations

import asyncio
import pickle
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from service.clients import (
    Client,
    Clock,
    create,
    create_from,
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
from service.fakes import FakeEngine

from vlmpack.errors import RequestError
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue import journal as journals
from vlmpack.service.queue.journal import Journal, RequestRow
from vlmpack.service.queue.queue import MOST_GAPS, Pending
from vlmpack.service.wire.messages import ForwardBackward, Rejected, Reply


def status(call, *args, **kwargs) -> int:
    """Status of a refusal."""
    with pytest.raises(RequestError) as refusal:
        call(*args, **kwargs)
    return refusal.value.status if isinstance(refusal.value, Rejected) else 400


def steps(engine: FakeEngine) -> list[tuple[str, tuple[int, ...]]]:
    return [(what, numbers) for what, _, numbers in engine.log if what in ("group", "step")]


# ---------------------------------------------------------------------- order


def test_operations_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in(
    client: Client, engine: FakeEngine, model: str
) -> None:
    names = [client.post(optim_step(model, 3)), client.post(forward_backward(model, 4))]
    names += [client.post(forward_backward(model, 2)), client.post(forward_backward(model, 1))]
    for name in names:
        client.outcome(name)
    assert steps(engine) == [("group", (1, 2)), ("step", ()), ("group", (4,))]


def test_operations_of_a_model_that_could_not_be_created_fail_by_name(client: Client, engine: FakeEngine) -> None:
    session = client.queue.create_session()
    assert is_failure(client.call(create(session, rank=65)), "rank 65", "user")
    assert is_failure(client.call(forward_backward(f"{session}:train:0", 1)), "was not created", "rank 65")
    assert engine.models() == ()
    assert client.call(create(session, 1)).model_id == f"{session}:train:1"


# ---------------------------------------------------------------------- repetition


def test_a_repeated_request_has_the_id_and_reply_of_the_first_and_runs_once(
    client: Client, engine: FakeEngine, model: str
) -> None:
    first = client.post(forward_backward(model, 1))
    reply = client.reply(first)
    assert client.post(forward_backward(model, 1)) == first
    assert client.reply(first) == reply
    client.call(optim_step(model, 2))
    client.call(optim_step(model, 2))
    assert steps(engine) == [("group", (1,)), ("step", ())]


def test_a_request_sent_twice_at_once_runs_once(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine), ThreadPoolExecutor(8) as pool:
        model = client.model()
        names = set(pool.map(client.post, [optim_step(model, 1)] * 8))
        client.outcome(names.pop())
        assert names == set()
        assert steps(engine) == [("step", ())]


def test_other_content_under_a_used_number_is_refused(client: Client, model: str) -> None:
    client.call(forward_backward(model, 1, datum(1, 2)))
    for other in (
        forward_backward(model, 1, datum(1, 3)),
        forward_backward(model, 1, datum(1, 2), forward_only=True),
        forward_backward(model, 1, datum(1, 2), datum(1, 2)),
        optim_step(model, 1),
        create(model.split(":")[0], 0, seed=7),
    ):
        with pytest.raises(Rejected, match="use a number once") as refusal:
            client.post(other)
        assert refusal.value.status == 400


def test_content_is_compared_and_not_its_bytes(client: Client, model: str) -> None:
    request = forward_backward(model, 1)
    assert isinstance(request, ForwardBackward)
    one = replace(request, loss_config={"a": 1.0, "b": float("nan")})
    two = replace(request, loss_config={"b": float("nan"), "a": 1.0})
    assert client.post(one) == client.queue.submit(two, pickle.dumps(two) + b" ")


def test_an_unnamed_save_is_repeated_with_the_next_number_of_a_sampling_session(client: Client, model: str) -> None:
    first = client.post(save_for_sampler(model, 1, number=0))
    assert client.post(save_for_sampler(model, 1, number=1)) == first
    session = model.split(":")[0]
    assert client.outcome(first).sampling_session_id == f"{session}:sample:0"
    assert client.samplers(session) == [f"{session}:sample:0"]


# ---------------------------------------------------------------------- refusals


def test_a_refused_number_is_used_up_and_its_future_says_why(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        client.call(forward_backward(model, 1))
        name = client.queue.refuse(model, 2, "datum 3: weights are NaN")
        assert client.queue.refuse(model, 2, "datum 3: weights are NaN") == name
        assert client.queue.stats()["queued_requests"] == 0
        assert is_failure(client.outcome(name), "datum 3", "user")
        client.call(optim_step(model, 3))
        with pytest.raises(Rejected, match="use a number once"):
            client.post(forward_backward(model, 2))
        with pytest.raises(Rejected, match="use a number once"):
            client.queue.refuse(model, 1, "damaged")
        assert steps(engine) == [("group", (1,)), ("step", ())]
    with served(tmp_path) as (client, _):
        assert is_failure(client.outcome(name), "datum 3")
        assert client.call(optim_step(model, 4)).metrics


def test_a_datum_that_cannot_be_encoded_fails_its_request_alone(client: Client, engine: FakeEngine, model: str) -> None:
    after = client.post(forward_backward(model, 3))
    bad = client.post(forward_backward(model, 2, datum(1), datum(-1)))
    good = client.post(forward_backward(model, 1))
    assert is_failure(client.outcome(bad), "datum 1", "negative")
    assert client.outcome(good).metrics
    assert client.outcome(after).metrics
    assert steps(engine) == [("group", (1, 3))]


def test_unknown_models_and_sessions_are_refused_at_once(client: Client) -> None:
    session = client.queue.create_session()
    for request in (optim_step(f"{session}:train:7", 1), sample(f"{session}:sample:0", 0)):
        assert status(client.post, request) == 404
    assert status(client.post, create("nobody")) == 410
    for name in ("", "x", f"{session}:train:0:1", f"{session}:sample:0:1", ":", "a:b", "a:²"):
        assert client.reply(name) is None


def test_a_model_takes_no_samples_and_a_sampling_session_no_operations(client: Client, model: str) -> None:
    sampler = client.queue.create_sampling_session(model.split(":")[0], 0, path=None, base_model="base/fake")
    assert status(client.post, sample(model, 1)) == 400
    assert status(client.post, optim_step(sampler, 1)) == 400
    assert client.queue.stats()["queued_requests"] == client.queue.stats()["queued_samples"] == 0
    assert not is_failure(client.call(optim_step(model, 1)))


# ---------------------------------------------------------------------- missing numbers


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_requests_behind_a_lost_number_fail_by_name_and_the_model_goes_on(tmp_path: Path, clock: Clock) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        early = [client.post(forward_backward(model, 3)), client.post(optim_step(model, 5))]
        until(lambda: client.queue.lanes[model].gap == 1)
        clock.now += 60
        for name in early:
            assert is_failure(client.outcome(name), f"request 1 of {model} never arrived", "user")
        assert steps(engine) == []
        assert client.call(forward_backward(model, 6)).metrics
        late = client.post(forward_backward(model, 1))
        assert is_failure(client.outcome(late), "came too late")
        assert steps(engine) == [("group", (6,))]
    with served(tmp_path) as (client, _):
        assert is_failure(client.call(forward_backward(model, 4)), "came too late")
        assert client.call(forward_backward(model, 7)).metrics


def test_a_gap_ends_a_fixed_time_after_it_opened_whatever_arrives(tmp_path: Path, clock: Clock) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        client.post(create(session))
        model = f"{session}:train:0"
        first = client.post(forward_backward(model, 2))
        client.queue.tidy()
        for number in range(3, 15):
            assert client.reply(first, 0.0) == Pending()
            client.post(forward_backward(model, number))
            clock.now += 5
            client.queue.tidy()
        assert is_failure(client.outcome(first), f"request 1 of {model} never arrived")
        late = client.post(forward_backward(model, 15))
        client.queue.start()
        assert client.outcome(late).metrics


def test_a_gap_waits_while_a_request_of_its_model_is_being_received(tmp_path: Path, clock: Clock) -> None:
    """The client sends the first request of a call in chunks last, after all others."""
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        for number in range(2):
            client.post(create(session, number))
        models = [f"{session}:train:{number}" for number in range(2)]
        early = [client.post(forward_backward(model, 2)) for model in models]
        with client.queue.receiving(models[0]), client.queue.receiving("nobody"):
            client.queue.tidy()
            clock.now += 61
            client.queue.tidy()
            assert isinstance(client.reply(early[0], 0.0), Pending)
            assert is_failure(client.outcome(early[1]), "never arrived")
            client.post(forward_backward(models[0], 1))
            unfinished = client.post(forward_backward(models[0], 4))
            client.queue.tidy()
            clock.now += 60 * MOST_GAPS
            client.queue.tidy()
            assert is_failure(client.outcome(unfinished), "never arrived")  # it does not wait for ever
        client.queue.start()
        assert client.outcome(early[0]).metrics


def test_a_number_far_ahead_is_refused(client: Client) -> None:
    assert status(client.post, forward_backward(client.model(), 2**31 - 1)) == 400
    assert client.call(sample(client.sampler(), 2**63 - 1)).sequences


# ---------------------------------------------------------------------- room


def test_beyond_the_room_clients_are_asked_to_try_again(tmp_path: Path) -> None:
    limits = ServiceLimits(queued_requests=4, queued_samples=1)
    with served(tmp_path, start=False, limits=limits) as (client, _):
        session = client.queue.create_session()
        model = f"{session}:train:0"
        client.post(create(session))
        client.post(forward_backward(model, 3))
        sampler = client.sampler(session)
        client.post(sample(sampler, 0))
        assert status(client.post, sample(sampler, 1)) == 429
        client.post(forward_backward(model, 4))
        with pytest.raises(Rejected) as refusal:
            client.post(forward_backward(model, 5))
        assert refusal.value.status == 429
        assert client.post(forward_backward(model, 3)) == f"{model}:3"  # a repetition takes no room


def test_the_number_that_others_wait_for_is_let_in_however_full_it_is(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(queued_requests=3)) as (client, _):
        model = client.model()
        names = [client.post(forward_backward(model, seq)) for seq in (4, 3, 2, 1)]
        for name in names:
            assert client.outcome(name).metrics


def test_bytes_take_room_and_give_it_back(tmp_path: Path) -> None:
    big = datum(*range(3000))
    with served(tmp_path, limits=ServiceLimits(queued_bytes=20_000)) as (client, _):
        model = client.model()
        client.post(forward_backward(model, 2, big))
        with pytest.raises(Rejected, match="try again"):
            client.post(forward_backward(model, 3, big))
        client.call(forward_backward(model, 1))
        until(lambda: client.queue.stats()["queued_bytes"] == 0)
        assert client.call(forward_backward(model, 3, big)).metrics


# ---------------------------------------------------------------------- the disk


def test_on_a_full_disk_requests_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        client.call(forward_backward(model, 1))
        journal: Journal = client.queue.journal
        (pages,) = journal._writer.execute("PRAGMA page_count").fetchone()
        journal._writer.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Rejected, match="make room") as refusal:
            client.post(forward_backward(model, 2, datum(*range(20_000))))
        assert refusal.value.status == 429
        assert "make room" in str(client.queue.fault)
        journal._writer.execute("PRAGMA max_page_count = 1000000")
        assert client.call(forward_backward(model, 2, datum(*range(20_000)))).metrics
    with served(tmp_path) as (client, engine):
        assert client.call(optim_step(model, 3)).metrics
        assert steps(engine) == [("group", (1,)), ("group", (2,)), ("step", ())]


def test_what_runs_out_while_the_disk_is_full_is_noted_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """Replies that were fetched, and sessions whose client fell silent."""
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        refused = client.queue.refuse(f"{session}:train:0", 0, "no", is_creation=True)
        client.outcome(refused)
        clock.now += 601
        client.queue.heartbeat(session)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "_commit", lambda self: self._writer.execute("INSERT INTO nowhere VALUES (1)"))
            client.queue.tidy()
            client.queue.tidy()
        assert len(caplog.messages) == 1  # it is tried twice a second, and logged once
        client.queue.tidy()
        assert client.reply(refused) is None
        clock.now += 601
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "_commit", lambda self: self._writer.execute("INSERT INTO nowhere VALUES (1)"))
            client.queue.tidy()
        assert client.queue.sessions() == [session]
        client.queue.tidy()
        assert client.queue.sessions() == []


def test_a_step_waits_for_the_disk_and_says_so(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, _):
        model = client.model()
        name = client.post(forward_backward(model, 1, datum(1), datum(2)))
        journal: Journal = client.queue.journal
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "_commit", lambda self: self._writer.execute("INSERT INTO nowhere VALUES (1)"))
            gate.release()
            until(lambda: client.queue.fault is not None)
            pending = client.reply(name, 0.01)
            assert isinstance(pending, Pending)
            assert "make room" in str(pending.reason)
        assert client.outcome(name).metrics
        assert client.queue.fault is not None  # a while longer: small writes may pass while large ones fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journals, "FAULT_SECONDS", 0.0)
            until(lambda: client.queue.fault is None)
        assert journal.rows(RequestRow, owner=model)[0].state == "done"


# ---------------------------------------------------------------------- long polls


def test_a_poll_returns_as_soon_as_there_is_a_reply(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, _), ThreadPoolExecutor(4) as pool:
        model = client.model()
        name = client.post(forward_backward(model, 1))
        polls = [pool.submit(client.reply, name, 30.0) for _ in range(4)]
        until(lambda: len(client.queue.lanes[model].entries[1].polls_end._done_callbacks) == 4)  # pyright: ignore
        gate.release()
        assert len({poll.result() for poll in polls}) == 1


def test_a_poll_returns_after_its_time_or_when_it_is_cancelled_and_spoils_no_other(tmp_path: Path) -> None:
    async def poll_and_leave(client: Client, name: str) -> None:
        poll = asyncio.create_task(client.queue.reply(name, 30.0))
        await asyncio.sleep(0)
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll

    with served(tmp_path, start=False) as (client, _):
        name = client.post(create(client.queue.create_session()))
        begin = time.monotonic()
        assert client.reply(name, 0.1) == Pending()
        assert time.monotonic() - begin > 0.09
        asyncio.run(poll_and_leave(client, name))
        client.queue.start()
        assert client.outcome(name).model_id


def test_polls_return_when_the_server_drains(tmp_path: Path) -> None:
    with served(tmp_path, QueueEngine := FakeEngine()) as (client, _), ThreadPoolExecutor(1) as pool:
        model = client.model()
        name = client.post(forward_backward(model, 2))
        poll = pool.submit(client.reply, name, 60.0)
        until(lambda: client.queue.lanes[model].entries[2].polls_end._done_callbacks)  # pyright: ignore
        client.queue.close(drain=5.0)
        assert isinstance(poll.result(5.0), Pending)
        assert QueueEngine.all


def test_a_reply_that_was_fetched_is_dropped_in_time_and_its_number_stays_used(tmp_path: Path) -> None:
    """A sample leaves nothing at all."""
    with served(tmp_path, limits=ServiceLimits(result_seconds=0.05)) as (client, engine):
        model, sampler = client.model(), client.sampler()
        name, sampled = client.post(optim_step(model, 1)), client.post(sample(sampler, 0))
        assert client.outcome(name).metrics
        client.outcome(sampled)
        until(lambda: client.reply(name) is None)
        assert client.post(optim_step(model, 1)) == name
        assert steps(engine) == [("step", ())]
        until(lambda: client.queue.journal.rows(RequestRow, owner=sampler) == [])
        assert client.reply(sampled) is None


# ---------------------------------------------------------------------- sessions


def test_a_finished_session_gives_everything_back_but_its_checkpoints(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        session = model.split(":")[0]
        done = client.post(forward_backward(model, 1))
        client.outcome(done)
        client.call(save(model, 2, "kept"))
        client.call(save_for_sampler(model, 3, number=0))
        early = client.post(forward_backward(model, 9))
        client.queue.finish(session)
        client.queue.finish(session)
        until(lambda: engine.models() == ())
        assert client.reply(done) is None
        assert client.reply(early) is None
        assert status(client.queue.heartbeat, session) == 410
        assert status(client.post, forward_backward(model, 4)) == 410
        assert status(client.post, sample(f"{session}:sample:0", 0)) == 410
        assert status(client.post, create(session, 1)) == 410
        assert client.queue.stats()["queued_requests"] == 0
        assert client.queue.stats()["queued_bytes"] == 0
        until(lambda: len([*(tmp_path / "weights").iterdir()]) == 1)
        assert [info.name for info in client.checkpoints()] == ["kept"]
    with served(tmp_path) as (client, engine):
        until(lambda: client.queue._thread.is_restored)
        assert engine.models() == ()
        assert status(client.queue.heartbeat, session) == 410


def test_a_silent_session_ends_and_heartbeats_or_polls_keep_one(tmp_path: Path, clock: Clock) -> None:
    with served(tmp_path) as (client, engine):
        silent, kept, polled = (client.model() for _ in range(3))
        clock.now += 301
        client.queue.heartbeat(kept.split(":")[0])
        client.reply(f"{polled}:1", 0.0)
        clock.now += 300
        until(lambda: engine.models() == (kept, polled))
        assert status(client.queue.heartbeat, silent.split(":")[0]) == 410


def test_the_longest_silent_model_gives_its_place_to_a_new_one(tmp_path: Path, clock: Clock) -> None:
    limits = ServiceLimits(models=2)
    with served(tmp_path, FakeEngine(most_models=2), limits=limits) as (client, engine):
        without, silent, kept = client.queue.create_session(), client.model(), client.model()
        session = kept.split(":")[0]
        assert is_failure(client.call(create(session, 1)), "as many as this server has")
        clock.now += 61
        assert client.call(create(session, 2)).model_id == f"{session}:train:2"
        assert {*engine.models()} == {kept, f"{session}:train:2"}
        assert status(client.queue.heartbeat, silent.split(":")[0]) == 410
        assert {*client.queue.sessions()} == {without, session}


def test_the_longest_silent_session_gives_its_place_to_a_new_one(tmp_path: Path, clock: Clock) -> None:
    with served(tmp_path, start=False, limits=ServiceLimits(sessions=2)) as (client, _):
        silent, kept = client.queue.create_session(), client.queue.create_session()
        assert status(client.queue.create_session) == 429
        clock.now += 61
        client.queue.heartbeat(kept)
        new = client.queue.create_session()
        assert client.queue.sessions() == [new, kept]
        assert status(client.queue.heartbeat, silent) == 410


# ---------------------------------------------------------------------- a slow disk


def test_nobody_waits_for_the_disk_with_the_lock_that_every_answer_needs(tmp_path: Path) -> None:
    """Another process writes to the journal: what has to be committed waits, all else is answered."""
    with served(tmp_path) as (client, _), ThreadPoolExecutor(3) as pool:
        model = client.model()
        session = model.split(":")[0]
        path = client.call(save(model, 1, "a")).path
        begin, delete = client.queue.create_sampling_session, client.delete_checkpoint
        with closing(sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            begun = pool.submit(begin, session, 0, path=None, base_model="base/fake")
            deleted = pool.submit(delete, path)
            for _ in range(10):
                time.sleep(0.01)
                answered = pool.submit(client.reply, f"{model}:1", 1.0)
                if not wait([answered], 5.0).done:
                    other.execute("ROLLBACK")
                assert isinstance(answered.result(), Reply)
            are_done = [begun.done(), deleted.done()]
            other.execute("ROLLBACK")
        assert are_done == [False, False]
        assert begun.result(20.0) == f"{session}:sample:0"
        deleted.result(20.0)
        assert client.checkpoints() == []


def test_a_deletion_that_a_save_has_overtaken_deletes_what_it_saw_alone(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        path = client.call(save(model, 1, "a")).path
        old = client.queue.journal.checkpoint(path)
        client.call(save(model, 2, "a", overwrite=True))
        client.queue.journal.drop_checkpoint(old)
    with served(tmp_path) as (client, _):
        assert client.queue.journal.checkpoint(path)


# ---------------------------------------------------------------------- sampling sessions


def test_of_many_sampling_sessions_the_oldest_idle_ones_go(tmp_path: Path) -> None:
    with served(tmp_path, start=False, limits=ServiceLimits(samplers_kept=2)) as (client, _):
        session = client.queue.create_session()

        def begin(number: int, base: str = "base/fake") -> str:
            return client.queue.create_sampling_session(session, number, path=None, base_model=base)

        first, second = begin(0), begin(1)
        client.post(sample(first, 0))
        assert status(begin, 2, base="another") == 400
        assert client.samplers(session) == [first, second]
        third = begin(2)
        assert client.samplers(session) == [first, second, third]  # the oldest is busy
        fourth = begin(3)
        assert client.samplers(session) == [first, third, fourth]
    with served(tmp_path) as (client, _):
        assert client.samplers(session) == [first, third, fourth]


def test_a_sampling_session_is_begun_once_a_number(client: Client, model: str) -> None:
    session = model.split(":")[0]
    path = client.call(save_for_sampler(model, 1, "a")).path
    begin = client.queue.create_sampling_session
    sampler = begin(session, 0, path=path, base_model=None)
    assert begin(session, 0, path=path, base_model=None) == sampler
    assert client.queue.journal.sampler(sampler).path == path
    assert status(begin, session, 0, path=None, base_model="base/fake") == 400
    assert status(begin, session, 1, path=None, base_model="another") == 400
    assert status(begin, session, 1, path=None, base_model=None) == 400
    assert status(begin, session, 1, path=f"tinker://{model}/weights/none", base_model=None) == 404
    assert status(begin, session, 1, path="/etc/passwd", base_model=None) == 400
    assert status(begin, "nobody", 1, path=path, base_model=None) == 410
    assert status(client.queue.journal.sampler, f"{session}:sample:1") == 404


def test_a_sampling_session_outlives_its_checkpoint(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        session = model.split(":")[0]
        path = client.call(save_for_sampler(model, 1, "a")).path
        sampler = client.queue.create_sampling_session(session, 0, path=path, base_model=None)
        before = client.call(sample(sampler, 0)).sequences[0].logprobs
        client.delete_checkpoint(path)
    with served(tmp_path) as (client, _):
        assert np.array_equal(client.call(sample(sampler, 1)).sequences[0].logprobs, before)
        client.queue.finish(session)
        until(lambda: not [*(tmp_path / "weights").iterdir()])


# ---------------------------------------------------------------------- models and checkpoints


def test_models_are_listed_newest_first_and_stay_while_they_have_checkpoints(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        models = [client.model() for _ in range(3)]
        client.call(save(models[0], 1, "a"))
        assert [row.id for row in client.queue.models()] == models[::-1]
        for model in models:
            client.queue.finish(model.split(":")[0])
        assert [row.id for row in client.queue.models()] == [models[0]]
    with served(tmp_path) as (client, _):
        assert [row.id for row in client.queue.models()] == [models[0]]


def test_checkpoints_are_saved_listed_loaded_overwritten_and_deleted(
    client: Client, engine: FakeEngine, model: str
) -> None:
    client.call(forward_backward(model, 1))
    client.call(optim_step(model, 2))
    path = client.call(save(model, 3, "a")).path
    saved = engine.all[model].weights
    client.call(forward_backward(model, 4))
    client.call(optim_step(model, 5))
    assert is_failure(client.call(save(model, 6, "a")), "exists", "another name")
    assert client.call(load(model, 7, path)).path == path
    assert np.array_equal(engine.all[model].weights, saved)
    client.call(forward_backward(model, 8))
    client.call(optim_step(model, 9))
    assert client.call(save(model, 10, "a", overwrite=True)).path == path
    session = client.queue.create_session()
    made = client.call(create_from(session, 0, path))
    assert (made.model_id, made.path) == (f"{session}:train:0", path)
    assert np.array_equal(engine.all[made.model_id].weights, engine.all[model].weights)
    assert np.array_equal(engine.all[made.model_id].moment, engine.all[model].moment)
    (info,) = client.checkpoints()
    assert (info.path, info.kind, info.model) == (path, "weights", model)
    assert info.size > 100
    client.delete_checkpoint(path)
    assert status(client.delete_checkpoint, path) == 404
    assert status(client.queue.journal.checkpoint, path) == 404
    assert is_failure(client.call(load(model, 11, path)), "no checkpoint")
    assert client.checkpoints() == []
    assert status(client.queue.journal.model, "nobody") == 404


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".hidden", "a\0", "x" * 129, "é", "a b", "-"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        assert is_failure(client.call(save(model, 1, name)), "cannot be named", "user")
        assert is_failure(client.call(save_for_sampler(model, 2, name)), "cannot be named", "user")
        path = f"tinker://{model}/weights/{name}"
        assert is_failure(client.call(load(model, 3, path)), "no path of a checkpoint")
        assert [*(tmp_path / "weights").iterdir()] == []


def test_a_checkpoint_expires_and_its_time_can_be_changed(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        paths = [client.call(save(model, seq, f"a{seq}", ttl=ttl)).path for seq, ttl in ((1, 1), (2, 1), (3, None))]
        first, second, third = paths
        assert client.queue.journal.checkpoint(first).expires == pytest.approx(
            client.queue.journal.checkpoint(first).created + 1
        )
        client.set_ttl(second, None)
        client.set_ttl(third, 3600)
        until(lambda: len(client.checkpoints()) == 2)
        assert status(client.set_ttl, first, 1) == 404
        until(lambda: len([*(tmp_path / "weights").iterdir()]) == 2)
        assert client.queue.journal.checkpoint(second).expires is None
        assert client.queue.journal.checkpoint(third).expires == pytest.approx(time.time() + 3600, abs=60)
        client.queue.journal.set_expiry(client.queue.journal.checkpoint(third), 0.0)
    with served(tmp_path) as (client, _):
        until(lambda: [one.path for one in client.checkpoints()] == [second])


def test_an_expired_checkpoint_stays_while_a_load_waits_or_a_sampling_session_has_it(tmp_path: Path) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        model = f"{session}:train:0"
        for request in (create(session), save(model, 1, "a", ttl=3600), save_for_sampler(model, 2, "b", ttl=3600)):
            client.post(request)
        loading = client.post(load(model, 4, f"tinker://{model}/weights/a"))  # 3 is missing
        client.queue.start()
        client.outcome(f"{model}:2")
        sampler = client.queue.create_sampling_session(
            session, 0, path=f"tinker://{model}/sampler_weights/b", base_model=None
        )
        for row in client.checkpoints():
            client.queue.journal.set_expiry(row, 0.0)
        client.queue.tidy()
        assert len(client.checkpoints()) == 2
        client.post(optim_step(model, 3))
        assert client.outcome(loading).path
        until(lambda: client.checkpoints() == [])
        assert client.call(sample(sampler, 0)).sequences


def test_a_snapshot_to_sample_from_has_no_optimizer_to_load(client: Client, engine: FakeEngine, model: str) -> None:
    path = client.call(save_for_sampler(model, 1, "a")).path
    assert is_failure(client.call(load(model, 2, path, optimizer=True)), "no optimizer")
    saved = engine.all[model].weights
    client.call(forward_backward(model, 3))
    client.call(optim_step(model, 4))
    client.call(load(model, 5, path, optimizer=False))
    assert np.array_equal(engine.all[model].weights, saved)
