"""A server that stops at any moment: the state folder of every moment is opened by a new server, and clients go on."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service.clients import (
    Client,
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

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.journal import Journal, RequestRow
from vlmpack.service.wire.messages import Request

ALWAYS = ServiceLimits(snapshot_share=1e9)
ONCE = ServiceLimits(snapshot_share=0.0)
"""The first snapshot of a model shows what one costs; after it none is worth the time."""


def training(session: str) -> list[Request]:
    """Two models and a third from a checkpoint: every operation, three requests in shared rows, one that fails."""
    a, b, c = (f"{session}:train:{number}" for number in range(3))
    return [
        create(session, 0, seed=1),
        create(session, 1, seed=2),
        forward_backward(a, 3),
        forward_backward(a, 2, forward_only=True),
        forward_backward(a, 1),  # the last to arrive, as the client sends them
        forward_backward(b, 1),
        optim_step(a, 4),
        save(a, 5, "half"),
        forward_backward(a, 6),
        optim_step(b, 2),
        forward_backward(a, 7, loss="broken"),  # fails, and leaves no gradient
        save_for_sampler(a, 8, number=0),
        sample(f"{session}:sample:0", 0),
        optim_step(a, 9),
        save_for_sampler(a, 10, "named"),
        forward_backward(b, 3, loss="late"),  # fails once its rows have run
        create_from(session, 2, f"tinker://{a}/weights/half"),
        forward_backward(c, 1),
        optim_step(c, 2),
        save(a, 11, "half", overwrite=True),
        load(b, 4, f"tinker://{a}/weights/half", optimizer=False),
        forward_backward(b, 5),
        optim_step(b, 6),
        forward_backward(a, 12),
        optim_step(a, 13, rate=-1.0),  # fails, and drops the gradient
        forward_backward(a, 14),
        forward_backward(c, 3),
    ]


def carry_out(client: Client, session: str) -> list[str]:
    """The replies of the training; whatever was sent before is sent again."""
    ids = []
    for request in training(session):
        ids.append(client.post(request))
        if not (type(request).__name__ == "ForwardBackward" and ids[-1][-2:] in (":3", ":2") and ":train:0" in ids[-1]):
            client.outcome(ids[-1])
    return [repr(client.outcome(name)) for name in ids]


def weights(engine: FakeEngine) -> dict[str, tuple[bytes, bytes, bytes, int]]:
    """Everything a model consists of."""
    return {
        name: (model.weights.tobytes(), model.moment.tobytes(), model.gradient.tobytes(), model.steps)
        for name, model in engine.all.items()
    }


@contextmanager
def photographed(state: Path, album: Path) -> Iterator[list[Path]]:
    """The state folder before every commit and before and after a folder gets its name, as a kill would leave it."""
    photos: list[Path] = []
    turn = threading.Lock()  # the client's thread and the engine's both commit

    def photograph(call: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with turn:
                photos.append(_copy(state, album / str(len(photos))))
                result = call(*args)
                if after:
                    photos.append(_copy(state, album / str(len(photos))))
                return result

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "_commit", photograph(Journal._commit))
        patch.setattr(Path, "rename", photograph(Path.rename, after=True))
        yield photos


def _copy(state: Path, to: Path) -> Path:
    while True:
        try:
            return shutil.copytree(state, to, ignore=shutil.ignore_patterns("*-shm", "lock"))
        except (shutil.Error, FileNotFoundError):  # a folder that nothing refers to was removed meanwhile
            shutil.rmtree(to)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where there is such a disk: what a kill leaves does not depend on it, the time does."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        pytest.param(ALWAYS, 4, id="snapshot each step"),
        pytest.param(ALWAYS, 2, id="snapshot each step, more moments", marks=pytest.mark.slow),
        pytest.param(ONCE, 2, id="long replays, more moments", marks=pytest.mark.slow),
    ],
)
def test_whenever_it_stops_a_restart_goes_on_to_the_same_bits(
    tmp_path: Path, settings: ServiceLimits, every: int
) -> None:
    with photographed(tmp_path / "state", tmp_path / "album") as photos:
        with served(tmp_path / "state", limits=settings) as (client, engine):
            session = client.queue.create_session()
            expected = carry_out(client, session)
            final = weights(engine)
        taken = [*photos][::every]
    restarted = 0
    for photo in taken:
        with served(photo, limits=settings) as (client, engine):
            if session not in client.queue.sessions():
                continue  # before the first commit there is nothing
            restarted += 1
            assert carry_out(client, session) == expected
            assert weights(engine) == final
            assert engine.log.count(("step", f"{session}:train:0", ())) <= 3
    assert restarted > 60 // every


def test_a_group_is_replayed_as_the_group_it_was(tmp_path: Path) -> None:
    with served(tmp_path, limits=ONCE) as (client, engine):
        model = client.model()
        for seq in (4, 3, 2, 1):
            name = client.post(forward_backward(model, seq))
        client.outcome(name)
        client.call(forward_backward(model, 5))
        before = weights(engine)
    with served(tmp_path, limits=ONCE) as (client, engine):
        until(lambda: client.queue._thread.is_restored)
        groups = [numbers for what, _, numbers in engine.log if what == "group"]
        assert groups == [(1, 2, 3, 4), (5,)]
        assert weights(engine) == before


def test_seeds_are_drawn_when_a_request_is_accepted(tmp_path: Path) -> None:
    with served(tmp_path, start=False) as (client, _):
        session = client.queue.create_session()
        client.post(create(session, seed=None))
        client.post(sample(client.sampler(session), 0, seed=None))
        created, sampled = client.queue.journal.rows(RequestRow)
        assert sampled.seed is not None and created.seed is not None
    with served(tmp_path) as (client, engine):
        client.call(create(session, seed=None))
        expected = np.random.default_rng(created.seed).normal(size=5)
        assert np.array_equal(engine.all[f"{session}:train:0"].weights, expected)
        (sequence,) = client.outcome(f"{session}:sample:0:0").sequences
        assert np.array_equal(sequence.tokens, np.random.default_rng(sampled.seed).integers(0, 9, 3))


@pytest.mark.parametrize("is_open", [False, True], ids=["after a step", "with a gradient that no step has taken"])
def test_draining_writes_what_a_replay_would_cost_and_loses_no_gradient(tmp_path: Path, *, is_open: bool) -> None:
    with served(tmp_path, limits=ONCE) as (client, engine):
        model = client.model()
        for seq in range(1, 9, 2):
            client.call(forward_backward(model, seq))
            client.call(optim_step(model, seq + 1))
        if is_open:
            client.call(forward_backward(model, 9))
        before = weights(engine)
        client.queue.close(drain=10.0)
    with served(tmp_path, limits=ONCE) as (client, engine):
        until(lambda: client.queue._thread.is_restored)
        assert is_open or engine.log == []
        assert weights(engine) == before


def test_draining_finishes_the_rows_that_run_and_begins_no_more(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate)) as (client, engine):
        model = client.model()
        name = client.post(forward_backward(model, 1, *(datum(n) for n in range(7))))
        until(lambda: client.queue.lanes[model].work is not None)
        later = client.post(optim_step(model, 2))
        drain = threading.Thread(target=client.queue.close, kwargs={"drain": 30.0})
        drain.start()
        until(lambda: client.queue.is_draining)
        gate.release(100)
        drain.join(20)
        assert [what for what, *_ in engine.log] == ["group", "row", "row", "row"]
    with served(tmp_path, start=False) as (client, _):
        assert client.outcome(name).metrics  # a reply that was not fetched
        client.queue.start()
        assert client.outcome(later).metrics


def test_draining_gives_rows_up_when_its_time_is_over(tmp_path: Path) -> None:
    gate = threading.Semaphore(1)
    with served(tmp_path, FakeEngine(gate)) as (client, engine):
        model = client.model()
        name = client.post(forward_backward(model, 1, *(datum(n) for n in range(300))))
        until(lambda: client.queue.lanes[model].work is not None)
        drain = threading.Thread(target=client.queue.close, kwargs={"drain": 0.0})
        drain.start()
        until(lambda: client.queue.is_draining)
        gate.release(2)
        drain.join(20)
        assert not drain.is_alive()
        assert len(engine.log) < 10
    with served(tmp_path) as (client, _):
        assert len(client.outcome(name).logprobs) == 300


def test_a_model_whose_folder_is_gone_fails_by_name_and_others_go_on(tmp_path: Path) -> None:
    with served(tmp_path, limits=ALWAYS) as (client, _):
        lost, kept = client.model(), client.model()
        for model in (lost, kept):
            client.call(forward_backward(model, 1))
            client.call(optim_step(model, 2))
    for folder in (tmp_path / "weights").iterdir():
        if folder.name.startswith(lost.split(":")[0]):
            shutil.rmtree(folder)
    with served(tmp_path, limits=ALWAYS) as (client, _):
        assert is_failure(client.call(forward_backward(lost, 3)), "could not be restored", lost)
        assert [client.queue.is_corrupted(model) for model in (lost, kept)] == [True, False]
        assert client.call(forward_backward(kept, 3)).metrics["loss:sum"]


def test_folders_that_a_killed_server_left_are_removed(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        model = client.model()
        client.call(save(model, 1, "kept"))
    for name in (".half-written", "published-but-not-entered"):
        (tmp_path / "weights" / name).mkdir()
    with served(tmp_path) as (client, _):
        until(lambda: client.queue._thread.is_restored)
        assert [entry.name.split("-")[1] for entry in (tmp_path / "weights").iterdir()] == ["kept"]


def test_a_server_that_is_stopped_while_it_restores_stops_and_loses_nothing(tmp_path: Path) -> None:
    with served(tmp_path, limits=ONCE) as (client, engine):
        models = [client.model() for _ in range(2)]
        for model in models:
            client.call(forward_backward(model, 1))
        before = weights(engine)
    gate = threading.Semaphore(0)
    with served(tmp_path, FakeEngine(gate), limits=ONCE) as (client, engine):
        until(lambda: engine.log)  # the replay of the first model is held in its row
        drain = threading.Thread(target=client.queue.close, kwargs={"drain": 30.0})
        drain.start()
        until(lambda: client.queue._thread._drain_until is not None)
        gate.release()
        drain.join(20)
        assert len(engine.models()) == 1
    with served(tmp_path, limits=ONCE) as (client, engine):
        until(lambda: client.queue._thread.is_restored)
        assert weights(engine) == before
