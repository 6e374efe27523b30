"""The queue: order, repetition, refusals, missing numbers, room, and long polls."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from service.clients import (
    Client,
    create,
    datum,
    forward_backward,
    is_failure,
    optim_step,
    sample,
    save_for_sampler,
    served,
    until,
)
from service.fakes import FakeEngine

from vlmpack.service.journal import Journal
from vlmpack.service.ledger import Rejected
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import ForwardBackward, Reply
from vlmpack.service.queue import Pending

QUICK = ServiceLimits(gap_seconds=0.2)


def steps(engine: FakeEngine) -> list[tuple[str, tuple[int, ...]]]:
    return [(what, numbers) for what, _, numbers in engine.log if what in ("group", "step")]


# ---------------------------------------------------------------------- order


def test_operations_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        names = [client.post(optim_step(model, 3)), client.post(forward_backward(model, 4))]
        names += [client.post(forward_backward(model, 2)), client.post(forward_backward(model, 1))]
        for name in names:
            client.outcome(name)
        assert steps(engine) == [("group", (1, 2)), ("step", ()), ("group", (4,))]


def test_operations_wait_for_the_creation_of_their_model(tmp_path: Path) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        client.post(create(session))
        name = client.post(forward_backward(f"{session}:train:0", 1))
        client.queue.start()
        assert client.outcome(name).metrics["loss:sum"]


def test_operations_of_a_model_that_could_not_be_created_fail_by_name(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        session = client.queue.create_session()
        assert is_failure(client.call(create(session, rank=65)), "rank 65", "user")
        assert is_failure(client.call(forward_backward(f"{session}:train:0", 1)), "was not created", "rank 65")
        assert engine.models() == ()
        assert client.call(create(session, 1)).model_id == f"{session}:train:1"


# ---------------------------------------------------------------------- repetition


def test_a_repeated_request_has_the_id_and_reply_of_the_first_and_runs_once(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
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


def test_other_content_under_a_used_number_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        client.call(forward_backward(model, 1, datum(1, 2)))
        for other in (
            forward_backward(model, 1, datum(1, 3)),
            forward_backward(model, 1, datum(1, 2), forward_only=True),
            forward_backward(model, 1, datum(1, 2), datum(1, 2)),
            optim_step(model, 1),
            create(model.split(":")[0], 0, seed=7),
        ):
            with pytest.raises(Rejected, match="a number is used once") as refusal:
                client.post(other)
            assert refusal.value.status == 400


def test_content_is_compared_and_not_its_bytes(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        request = forward_backward(model, 1)
        assert isinstance(request, ForwardBackward)
        one = replace(request, loss_config={"a": 1.0, "b": float("nan")})
        two = replace(request, loss_config={"b": float("nan"), "a": 1.0})
        assert client.post(one) == client.queue.submit(two, pickle.dumps(two) + b" ").request_id


def test_an_unnamed_save_is_repeated_with_the_next_number_of_a_sampling_session(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        first = client.post(save_for_sampler(model, 1, number=0))
        assert client.post(save_for_sampler(model, 1, number=1)) == first
        session = model.split(":")[0]
        assert client.outcome(first).sampling_session_id == f"{session}:sample:0"
        assert client.queue.session(session).sampler_ids == (f"{session}:sample:0",)


def test_every_sequence_of_a_sample_has_an_id(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        session = client.queue.create_session()
        sampler = client.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")
        request = sample(sampler, 3 * 10**9, count=3)
        first = client.queue.submit(request, pickle.dumps(request))
        assert len(set(first.sequence_ids)) == 3
        assert client.queue.submit(request, pickle.dumps(request)) == first
        assert len(client.outcome(first.request_id).sequences) == 3


# ---------------------------------------------------------------------- refusals


def test_a_refused_number_is_used_up_and_its_future_says_why(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        client.call(forward_backward(model, 1))
        name = client.queue.refuse(model, 2, "datum 3: weights are NaN").request_id
        assert client.queue.refuse(model, 2, "datum 3: weights are NaN").request_id == name
        assert client.queue.stats().queued == 0
        assert is_failure(client.outcome(name), "datum 3", "user")
        client.call(optim_step(model, 3))
        with pytest.raises(Rejected, match="a number is used once"):
            client.post(forward_backward(model, 2))
        assert steps(engine) == [("group", (1,)), ("step", ())]


def test_a_number_that_was_accepted_cannot_be_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        client.call(forward_backward(model, 1))
        with pytest.raises(Rejected, match="a number is used once"):
            client.queue.refuse(model, 1, "damaged")


def test_a_refused_request_is_refused_after_a_restart_too(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        name = client.queue.refuse(model, 1, "no").request_id
    with served(tmp_path) as (client, _):
        assert is_failure(client.outcome(name), "no")
        assert client.call(optim_step(model, 2)).metrics


def test_creations_and_samples_are_refused_in_their_futures_too(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        session = client.queue.create_session()
        name = client.queue.refuse(f"{session}:train:0", 0, "no such optimiser", is_creation=True).request_id
        assert is_failure(client.outcome(name), "no such optimiser")
        assert is_failure(client.call(optim_step(f"{session}:train:0", 1)), "was not created")
        sampler = client.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")
        refused = client.queue.refuse(sampler, 0, "pointers are not fetched", samples=2)
        assert len(set(refused.sequence_ids)) == 2
        assert is_failure(client.outcome(refused.request_id), "pointers")


def test_a_datum_that_cannot_be_encoded_fails_its_request_alone(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        after = client.post(forward_backward(model, 3))
        bad = client.post(forward_backward(model, 2, datum(1), datum(-1)))
        good = client.post(forward_backward(model, 1))
        assert is_failure(client.outcome(bad), "datum 1", "negative")
        assert client.outcome(good).metrics
        assert client.outcome(after).metrics
        assert steps(engine) == [("group", (1, 3))]


def test_unknown_models_and_sessions_are_refused_at_once(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        session = client.queue.create_session()
        for request in (optim_step(f"{session}:train:7", 1), sample(f"{session}:sample:0", 0), create("nobody")):
            with pytest.raises(Rejected) as refusal:
                client.post(request)
            assert refusal.value.status == 404
        for name in ("", "x", f"{session}:train:0:1", f"{session}:sample:0:1", ":", "a:b", "a:²"):
            assert client.reply(name) is None


# ---------------------------------------------------------------------- missing numbers


def test_requests_behind_a_number_that_never_arrives_fail_by_name_and_the_model_goes_on(tmp_path: Path) -> None:
    with served(tmp_path, limits=QUICK) as (client, engine):
        model = client.model()
        early = [client.post(forward_backward(model, 3)), client.post(optim_step(model, 5))]
        for name in early:
            assert is_failure(client.outcome(name), f"request 1 of {model} never arrived", "user")
        assert steps(engine) == []
        assert client.call(forward_backward(model, 6)).metrics
        late = client.post(forward_backward(model, 1))
        assert is_failure(client.outcome(late), "given up")
        assert steps(engine) == [("group", (6,))]


def test_a_given_up_number_stays_given_up_after_a_restart(tmp_path: Path) -> None:
    with served(tmp_path, limits=QUICK) as (client, _):
        model = client.model()
        client.outcome(client.post(forward_backward(model, 2)))
    with served(tmp_path) as (client, engine):
        assert is_failure(client.call(forward_backward(model, 1)), "given up")
        assert client.call(forward_backward(model, 3)).metrics
        assert steps(engine) == [("group", (3,))]


def test_a_gap_is_given_up_a_fixed_time_after_it_opened_whatever_arrives_meanwhile(tmp_path: Path) -> None:
    with served(tmp_path, start=False, limits=ServiceLimits(gap_seconds=0.2)) as (client, _):
        session = client.queue.create_session()
        client.post(create(session))
        model = f"{session}:train:0"
        first, opened, numbers = client.post(forward_backward(model, 2)), time.monotonic(), itertools.count(3)
        while isinstance(client.reply(first, 0.0), Pending):
            assert time.monotonic() < opened + 5
            client.post(forward_backward(model, next(numbers)))
            time.sleep(0.02)
            client.queue._tidy()
        assert time.monotonic() > opened + 0.2
        assert is_failure(client.outcome(first), f"request 1 of {model} never arrived")
        late = client.post(forward_backward(model, next(numbers)))
        client.queue.start()
        assert client.outcome(late).metrics


def test_a_gap_waits_while_a_request_of_its_model_is_being_received(tmp_path: Path) -> None:
    """The client sends the first request of a call in chunks last, after all others."""
    with served(tmp_path, start=False, limits=ServiceLimits(gap_seconds=0.05)) as (client, _):
        session = client.queue.create_session()
        names = [client.post(create(session, number)) for number in range(2)]
        models = [f"{session}:train:{number}" for number in range(2)]
        early = [client.post(forward_backward(model, 2)) for model in models]
        with client.queue.receiving(models[0]), client.queue.receiving("nobody"):
            client.queue._tidy()
            time.sleep(0.1)
            client.queue._tidy()
            assert isinstance(client.reply(early[0], 0.0), Pending)
            assert is_failure(client.outcome(early[1]), "never arrived")
            client.post(forward_backward(models[0], 1))
        client.queue.start()
        assert client.outcome(early[0]).metrics
        assert names


def test_a_number_that_arrives_in_time_is_waited_for(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(gap_seconds=30.0)) as (client, _):
        model = client.model()
        early = client.post(forward_backward(model, 2))
        client.queue._tidy()
        assert isinstance(client.reply(early, 0.0), Pending)
        client.post(forward_backward(model, 1))
        assert client.outcome(early).metrics


def test_a_number_far_ahead_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        for seq in (2**31 - 1, -1):
            with pytest.raises(Rejected) as refusal:
                client.post(forward_backward(model, seq))
            assert refusal.value.status == 400


# ---------------------------------------------------------------------- room


def test_beyond_the_room_clients_are_asked_to_try_again(tmp_path: Path) -> None:
    with served(tmp_path, start=False, limits=ServiceLimits(queued_requests=3)) as (client, _):
        session = client.queue.create_session()
        model = f"{session}:train:0"
        client.post(create(session))
        client.post(forward_backward(model, 3))
        client.post(forward_backward(model, 4))
        with pytest.raises(Rejected) as refusal:
            client.post(forward_backward(model, 5))
        assert refusal.value.status == 429
        assert refusal.value.retry_after
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
        until(lambda: client.queue.stats().queued_bytes == 0)
        assert client.call(forward_backward(model, 3, big)).metrics


def test_samples_have_a_room_of_their_own(tmp_path: Path) -> None:
    with served(tmp_path, start=False, limits=ServiceLimits(queued_samples=2)) as (client, _):
        session = client.queue.create_session()
        sampler = client.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")
        client.post(sample(sampler, 0))
        client.post(sample(sampler, 1))
        with pytest.raises(Rejected) as refusal:
            client.post(sample(sampler, 2))
        assert refusal.value.status == 429
        assert client.post(create(session))


# ---------------------------------------------------------------------- the disk


def test_on_a_full_disk_requests_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        client.call(forward_backward(model, 1))
        journal: Journal = client.queue._ledger.journal
        (pages,) = journal._writer.execute("PRAGMA page_count").fetchone()
        journal._writer.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Rejected, match="make room") as refusal:
            client.post(forward_backward(model, 2, datum(*range(20_000))))
        assert refusal.value.status == 429
        journal._writer.execute("PRAGMA max_page_count = 1000000")
        assert client.call(forward_backward(model, 2, datum(*range(20_000)))).metrics
    with served(tmp_path) as (client, engine):
        assert client.call(optim_step(model, 3)).metrics
        assert steps(engine) == [("group", (1,)), ("group", (2,)), ("step", ())]


def test_which_replies_were_fetched_is_noted_once_there_is_room(tmp_path: Path) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        client.outcome(client.queue.refuse(f"{session}:train:0", 0, "no", is_creation=True).request_id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "_commit", lambda self: self._writer.execute("INSERT INTO nowhere VALUES (1)"))
            client.queue._tidy()
        client.queue._tidy()
        (row,) = client.queue._ledger.journal.requests()
        assert row.retrieved is not None


def test_a_step_waits_for_the_disk_and_says_so(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, _):
        model = client.model()
        name = client.post(forward_backward(model, 1, datum(1), datum(2)))
        journal: Journal = client.queue._ledger.journal
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "_commit", lambda self: self._writer.execute("INSERT INTO nowhere VALUES (1)"))
            gate.release()
            until(lambda: client.queue.stats().paused is not None)
            pending = client.reply(name, 0.01)
            assert isinstance(pending, Pending)
            assert pending.state == "paused_capacity"
            assert "make room" in str(pending.reason)
        assert client.outcome(name).metrics
        assert client.queue.stats().paused is None
        assert journal.requests(model)[0].state == "done"


# ---------------------------------------------------------------------- long polls


def test_a_poll_returns_as_soon_as_there_is_a_reply(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, _), ThreadPoolExecutor(4) as pool:
        model = client.model()
        name = client.post(forward_backward(model, 1))
        polls = [pool.submit(client.reply, name, 30.0) for _ in range(4)]
        until(lambda: len(client.queue._ledger.lanes[model].entries[1].waiters) == 4)
        gate.release()
        assert len({poll.result() for poll in polls}) == 1


def test_a_poll_without_a_reply_returns_after_its_time(tmp_path: Path) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        name = client.post(create(session))
        begin = time.monotonic()
        assert client.reply(name, 0.1) == Pending()
        assert 0.09 < time.monotonic() - begin < 5
        assert client.queue._ledger.lanes[f"{session}:train:0"].entries[0].waiters == []


def test_a_poll_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def poll_and_leave(client: Client, name: str) -> None:
        poll = asyncio.create_task(client.queue.reply(name, 30.0))
        await asyncio.sleep(0)
        poll.cancel()
        with pytest.raises(asyncio.CancelledError):
            await poll

    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        asyncio.run(poll_and_leave(client, client.post(create(session))))
        assert client.queue._ledger.lanes[f"{session}:train:0"].entries[0].waiters == []


def test_polls_return_when_the_server_drains(tmp_path: Path) -> None:
    with served(tmp_path, QueueEngine := FakeEngine()) as (client, _), ThreadPoolExecutor(1) as pool:
        model = client.model()
        name = client.post(forward_backward(model, 2))
        poll = pool.submit(client.reply, name, 60.0)
        until(lambda: client.queue._ledger.lanes[model].entries[2].waiters)
        client.queue.close(drain=5.0)
        assert isinstance(poll.result(5.0), Pending)
        assert QueueEngine.all


def test_replies_beyond_the_memory_are_read_from_the_journal(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(replies_cached=1)) as (client, _):
        model = client.model()
        names = [client.post(forward_backward(model, seq)) for seq in (1, 2, 3)]
        client.outcome(names[-1])
        replies = [client.reply(name) for name in names]
        assert all(isinstance(reply, Reply) for reply in replies)
        assert len({pickle.loads(reply.body).metrics["loss:sum"] for reply in replies}) == 3


def test_a_reply_that_was_fetched_is_dropped_in_time_and_its_number_stays_used(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(result_seconds=0.05)) as (client, engine):
        model = client.model()
        name = client.post(optim_step(model, 1))
        assert client.outcome(name).metrics
        until(lambda: client.reply(name) is None)
        assert client.post(optim_step(model, 1)) == name
        assert steps(engine) == [("step", ())]


def test_a_sample_that_was_fetched_long_ago_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(result_seconds=0.05)) as (client, _):
        session = client.queue.create_session()
        sampler = client.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")
        name = client.post(sample(sampler, 0))
        client.outcome(name)
        until(lambda: client.queue._ledger.samplers[sampler].entries == {})
        assert client.reply(name) is None
        assert client.queue._ledger.journal.requests(sampler) == []


def test_numbers_that_no_column_holds_are_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        session = client.queue.create_session()
        sampler = client.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")
        for seq in (2**63, -1):
            with pytest.raises(Rejected) as refusal:
                client.post(sample(sampler, seq))
            assert refusal.value.status == 400
        assert client.call(sample(sampler, 2**63 - 1)).sequences
