"""Sessions end and give back what they held; sampling sessions, models and checkpoints are listed."""

from __future__ import annotations

import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from service.clients import (
    Client,
    create,
    create_from,
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

from vlmpack.errors import RequestError
from vlmpack.service.ledger import Rejected
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import Reply

WAIT = 20.0


def status(call, *args, **kwargs) -> int:
    """Status of a refusal."""
    with pytest.raises(RequestError) as refusal:
        call(*args, **kwargs)
    return refusal.value.status if isinstance(refusal.value, Rejected) else 400


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
        assert client.queue.stats().queued == 0
        assert client.queue.stats().queued_bytes == 0
        until(lambda: len([*(tmp_path / "weights").iterdir()]) == 1)
        assert [info.name for info in client.queue.checkpoints(model)] == ["kept"]
    with served(tmp_path) as (client, engine):
        until(lambda: client.queue.stats().is_restored)
        assert engine.models() == ()
        assert status(client.queue.heartbeat, session) == 410


def test_a_silent_session_ends_and_heartbeats_keep_one(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(idle_seconds=1.0)) as (client, engine):
        silent, kept = client.model(), client.model()
        end = time.monotonic() + 20
        while silent in engine.models() and time.monotonic() < end:
            client.queue.heartbeat(kept.split(":")[0])
            time.sleep(0.02)
        assert engine.models() == (kept,)
        assert status(client.queue.heartbeat, silent.split(":")[0]) == 410


def test_a_poll_keeps_a_session(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(idle_seconds=1.0)) as (client, _):
        model = client.model()
        for _ in range(15):
            client.reply(f"{model}:1", 0.0)
            time.sleep(0.1)
        assert client.call(optim_step(model, 1))


def test_there_are_only_so_many_sessions_at_once(tmp_path: Path) -> None:
    with served(tmp_path, limits=ServiceLimits(sessions=2)) as (client, _):
        first = client.queue.create_session()
        client.queue.create_session()
        assert status(client.queue.create_session) == 429
        client.queue.finish(first)
        assert client.queue.create_session()


def test_a_session_lists_its_models_and_samplers(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        session = client.queue.create_session(tags=["a"], user_metadata={"who": "me"}, display_name="mine")
        client.call(create(session))
        client.call(create(session, 1, rank=65))  # is refused
        sampler = client.queue.create_sampling_session(session, 0, path=None, base_model="base/fake")
        info = client.queue.session(session)
        assert (info.model_ids, info.sampler_ids) == ((f"{session}:train:0",), (sampler,))
        assert (info.row.user_metadata, info.row.display_name) == ({"who": "me"}, "mine")
        other = client.queue.create_session()
        assert client.queue.sessions() == [other, session]
        assert status(client.queue.session, "nobody") == 404
        assert status(client.queue.finish, "nobody") == 404


# ---------------------------------------------------------------------- a slow disk


def test_nobody_waits_for_the_disk_with_the_lock_that_every_answer_needs(tmp_path: Path) -> None:
    """Another process writes to the journal: what has to be committed waits, all else is answered."""
    with served(tmp_path) as (client, _), ThreadPoolExecutor(3) as pool:
        model = client.model()
        session = model.split(":")[0]
        path = client.call(save(model, 1, "a")).path
        begin, delete = client.queue.create_sampling_session, client.queue.delete_checkpoint
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
        assert begun.result(WAIT) == f"{session}:sample:0"
        deleted.result(WAIT)
        assert client.queue.checkpoints() == []


def test_a_deletion_that_a_save_has_overtaken_deletes_what_it_saw_alone(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        path = client.call(save(model, 1, "a")).path
        old = client.queue._ledger.checkpoints[model, "weights", "a"]
        client.call(save(model, 2, "a", overwrite=True))
        client.queue._ledger.journal.drop_checkpoint(old)
    with served(tmp_path) as (client, _):
        assert client.queue.checkpoint(path)


# ---------------------------------------------------------------------- sampling sessions


def test_of_many_sampling_sessions_the_oldest_idle_ones_go(tmp_path: Path) -> None:
    with served(tmp_path, start=False, limits=ServiceLimits(samplers_kept=2)) as (client, _):
        session = client.queue.create_session()

        def begin(number: int, base: str = "base/fake") -> str:
            return client.queue.create_sampling_session(session, number, path=None, base_model=base)

        first, second = begin(0), begin(1)
        client.post(sample(first, 0))
        assert status(begin, 2, base="another") == 400
        assert client.queue.session(session).sampler_ids == (first, second)
        third = begin(2)
        assert client.queue.session(session).sampler_ids == (first, second, third)  # the oldest is busy
        fourth = begin(3)
        assert client.queue.session(session).sampler_ids == (first, third, fourth)
    with served(tmp_path) as (client, _):
        assert client.queue.session(session).sampler_ids == (first, third, fourth)


def test_a_sampling_session_is_begun_once_a_number(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        session = model.split(":")[0]
        path = client.call(save_for_sampler(model, 1, "a")).path
        begin = client.queue.create_sampling_session
        sampler = begin(session, 0, path=path, base_model=None)
        assert begin(session, 0, path=path, base_model=None) == sampler
        assert client.queue.sampler(sampler).path == path
        assert status(begin, session, 0, path=None, base_model="base/fake") == 400
        assert status(begin, session, 1, path=None, base_model="another") == 400
        assert status(begin, session, 1, path=None, base_model=None) == 400
        assert status(begin, session, 1, path=f"tinker://{model}/weights/none", base_model=None) == 404
        assert status(begin, session, 1, path="/etc/passwd", base_model=None) == 400
        assert status(begin, "nobody", 1, path=path, base_model=None) == 404
        assert status(client.queue.sampler, f"{session}:sample:1") == 404


def test_a_sampling_session_outlives_its_checkpoint(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        session = model.split(":")[0]
        path = client.call(save_for_sampler(model, 1, "a")).path
        sampler = client.queue.create_sampling_session(session, 0, path=path, base_model=None)
        before = client.call(sample(sampler, 0)).sequences[0].logprobs
        client.queue.delete_checkpoint(path)
    with served(tmp_path) as (client, _):
        assert np.array_equal(client.call(sample(sampler, 1)).sequences[0].logprobs, before)
        client.queue.finish(session)
        until(lambda: not [*(tmp_path / "weights").iterdir()])


# ---------------------------------------------------------------------- models and checkpoints


def test_a_model_is_known_once_it_is_created(tmp_path: Path) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        name = client.post(create(session))
        assert status(client.queue.get_info, f"{session}:train:0") == 404
        client.queue.start()
        client.outcome(name)
        info = client.queue.get_info(f"{session}:train:0")
        assert (info.row.base_model, info.row.lora and info.row.lora.rank) == ("base/fake", 4)


def test_models_are_listed_newest_first_and_stay_while_they_have_checkpoints(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        models = [client.model() for _ in range(3)]
        client.call(save(models[0], 1, "a"))
        assert [info.row.id for info in client.queue.models()] == models[::-1]
        for model in models:
            client.queue.finish(model.split(":")[0])
        assert [info.row.id for info in client.queue.models()] == [models[0]]
    with served(tmp_path) as (client, _):
        assert [info.row.id for info in client.queue.models()] == [models[0]]


def test_a_model_names_its_newest_checkpoint_of_each_kind(tmp_path: Path) -> None:
    def last(client: Client, model: str) -> list[str | None]:
        info = client.queue.get_info(model)
        return [one and one.name for one in (info.last_checkpoint, info.last_sampler_checkpoint)]

    with served(tmp_path) as (client, _):
        model, other = client.model(), client.model()
        assert last(client, model) == [None, None]
        paths = [client.call(save(model, number, name)).path for number, name in ((1, "b"), (2, "a"))]
        client.call(save_for_sampler(model, 3, "c"))
        client.call(save_for_sampler(model, 4, number=0))  # without a name
        assert last(client, model) == ["a", "c"]
        assert last(client, other) == [None, None]
    with served(tmp_path) as (client, _):
        assert last(client, model) == ["a", "c"]
        client.queue.delete_checkpoint(paths[1])
        assert last(client, model) == ["b", "c"]
        assert [info.last_checkpoint is None for info in client.queue.models()] == [True, False]


def test_a_model_that_could_not_be_restored_is_corrupted(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        client.call(optim_step(model, 1))
        assert not client.queue.get_info(model).is_corrupted
    for folder in (tmp_path / "weights").iterdir():
        shutil.rmtree(folder)
    with served(tmp_path) as (client, _):
        client.call(optim_step(model, 2))
        assert client.queue.get_info(model).is_corrupted


def test_checkpoints_are_saved_listed_loaded_overwritten_and_deleted(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
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
        (info,) = client.queue.checkpoints()
        assert (info.path, info.kind, info.model) == (path, "weights", model)
        assert info.size > 100
        client.queue.delete_checkpoint(path)
        assert status(client.queue.delete_checkpoint, path) == 404
        assert status(client.queue.checkpoint, path) == 404
        assert is_failure(client.call(load(model, 11, path)), "no checkpoint")
        assert client.queue.checkpoints(model) == []
        assert status(client.queue.checkpoints, "nobody") == 404


def test_a_save_in_the_middle_keeps_the_gradients(tmp_path: Path) -> None:
    def train(client, *, saves: bool) -> None:
        model = client.model()
        client.call(forward_backward(model, 1))
        client.call(save(model, 2, "a") if saves else forward_backward(model, 2, forward_only=True))
        client.call(optim_step(model, 3))

    weights = []
    for saves in (False, True):
        with served(tmp_path / str(saves)) as (client, engine):
            train(client, saves=saves)
            weights += [model.weights for model in engine.all.values()]
    assert np.array_equal(*weights)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".hidden", "a\0", "x" * 129, "é", "a b", "-"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        assert is_failure(client.call(save(model, 1, name)), "cannot be named", "user")
        assert is_failure(client.call(save_for_sampler(model, 2, name)), "cannot be named", "user")
        path = f"tinker://{model}/weights/{name}"
        assert is_failure(client.call(load(model, 3, path)), "no path of a checkpoint")
        assert [*(tmp_path / "weights").iterdir()] == []


def test_a_snapshot_to_sample_from_has_no_optimiser_to_load(tmp_path: Path) -> None:
    with served(tmp_path) as (client, engine):
        model = client.model()
        path = client.call(save_for_sampler(model, 1, "a")).path
        assert is_failure(client.call(load(model, 2, path, optimizer=True)), "no optimiser")
        saved = engine.all[model].weights
        client.call(forward_backward(model, 3))
        client.call(optim_step(model, 4))
        client.call(load(model, 5, path, optimizer=False))
        assert np.array_equal(engine.all[model].weights, saved)
