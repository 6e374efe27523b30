"""The service put together: base model, engine, queue, app, and the process that serves them.

load_base ──▶ BaseFiles ──Service──▶ engine, queue, routes ──run──▶ uvicorn, until SIGTERM
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from vlmpack.data.processor import load_processor
from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_named
from vlmpack.service.bodies import BodyReader
from vlmpack.service.checkpoints import StateFolder
from vlmpack.service.distributed import DistributedEngine, follow
from vlmpack.service.engine import Engine, EngineConfig
from vlmpack.service.http import Endpoints, make_app
from vlmpack.service.journal import Journal
from vlmpack.service.queue import RequestQueue
from vlmpack.service.ranks import Ranks
from vlmpack.service.status import INTERVAL, Metric, Snapshot, Status
from vlmpack.service.vllm import set_sampler

log = logging.getLogger("vlmpack.service")

KEY_PREFIX = "tml-"
"""The client takes no key that begins otherwise."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; the client's heartbeats come every 10 s."""
LAST_ANSWERS = 10
"""Seconds that answers under way get when the service stops."""
BACKLOG = 2048
"""Connections that wait to be accepted: a call of many requests opens one for each."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """A base model and what belongs to it."""

    name: str
    """The name that clients use."""
    source: str
    """Hub name or folder, where clients find its tokenizer."""
    model: Any
    """On its device."""
    processor: Any
    """Its processor; of a text model its tokenizer."""

    def engine(self, config: EngineConfig, ranks: Ranks | None) -> Engine:
        """Make the engine of one process, which is one of `ranks`."""
        return Engine(self.model, self.processor, name=self.name, tokenizer_id=self.source, config=config, ranks=ranks)


@final
@dataclass(frozen=True, kw_only=True)
class ServiceSettings(EngineConfig):
    """Settings of a service."""

    state: Path
    """The state folder."""
    key: str
    """Clients send it with each request."""
    sampler: str = "exact"
    """One of `SAMPLERS` of vllm.py."""
    drain_seconds: float = 60.0
    """Time for work under way when the service stops; what is left is done after the next start."""


def load_base(source: str, *, name: str | None = None, device: str = "cpu", dtype: str = "float32") -> Base:
    """Load a base model and its processor.

    Args:
        source: hub name or folder.
        name: what clients call it; None: the hub name, or the folder's name.
        device: of torch.
        dtype: of the weights.

    Raises:
        ConfigError: nothing readable is there. FamilyError: the family is not supported.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    try:
        has_vision = family_named(AutoConfig.from_pretrained(source).model_type).has_vision
        auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        model: Any = auto.from_pretrained(source, dtype=torch.__dict__[dtype], attn_implementation="sdpa")
        processor = load_processor(source) if has_vision else AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{source}: no model can be read there ({reason}); give a hub name or a model's folder"
        ) from error
    folder = Path(source)
    is_folder = folder.is_dir()
    return Base(
        name=name or (folder.resolve().name if is_folder else source),
        source=str(folder.resolve()) if is_folder else source,
        model=model.to(torch.device(device)),
        processor=processor,
    )


def check_state(state: Path, base_model: str) -> None:
    """Refuse a state folder that cannot be served, before a model is read or anything else is written there.

    Args:
        state: the folder; made if there is none.
        base_model: name of the base model to be served.

    Raises:
        ConfigError: it is used by another server, damaged, foreign, or of another base model.
    """
    folder = StateFolder(state)
    try:
        Journal(folder.journal, base_model=base_model).close()
    finally:
        folder.close()


def read_key(file: Path) -> str:
    """Return the key in a file, which is made with a random key if there is none; only its owner may read it.

    Raises:
        ConfigError: the file holds no key that the client takes, or cannot be read or written.
    """
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                opened.write(KEY_PREFIX + secrets.token_urlsafe(32) + "\n")
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {file}: {error}; name another with --key-file") from error
    return check_key(key, f"key file {file}")


def check_key(key: str, place: str) -> str:
    """Return a key that the client takes.

    Raises:
        ConfigError: it does not.
    """
    if not key.startswith((KEY_PREFIX, "eyJ")) or not key.isascii() or not key.isprintable():
        raise ConfigError(f'{place}: the client takes keys that begin with "{KEY_PREFIX}", in ASCII; choose such a one')
    return key


# ---------------------------------------------------------------------- the service


@final
class Service:
    """Engine, queue and app of one base model.

    Args:
        base: the model.
        settings: of the service.
        ranks: rank 0 of several; None: this process alone.

    Raises:
        ConfigError: the state folder cannot be used. FamilyError: the model cannot be packed exactly.
    """

    def __init__(self, base: Base, settings: ServiceSettings, *, ranks: Ranks | None = None) -> None:
        self.settings = settings
        engine = base.engine(settings, ranks)
        set_sampler(engine, settings.sampler, source=base.source)
        if settings.sampler == "exact" and base.model.dtype.itemsize < 4:
            log.info("exact sampling in 16 bits: each block of tokens is checked in a pass of its own; --sampler fast")
        self.engine = engine if ranks is None else DistributedEngine(engine, ranks)
        """Computes."""
        self.queue = RequestQueue(self.engine, settings.state, limits=settings.limits)
        """Orders and remembers."""
        self.status = Status(snapshot=self._snapshot)
        """Shows."""
        self._draining = threading.Event()
        self._drainer: threading.Thread | None = None

    def app(self) -> ASGIApp:
        """Make the ASGI app; it starts the queue with itself, and stops it."""
        limits = self.settings.limits
        endpoints = Endpoints(
            queue=self.queue,
            base=self.engine.base,
            limits=limits,
            bodies=BodyReader(limits=limits),
            is_draining=self._draining.is_set,
        )
        routes: list[BaseRoute] = [*endpoints.routes(), *self.status.routes()]
        return make_app(routes, key=self.settings.key, endpoints=endpoints, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self.queue.start()
        ticks = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticks.cancel()
            self.drain()
            assert self._drainer is not None
            await asyncio.to_thread(self._drainer.join)

    async def _tick(self) -> None:
        while True:
            self.status.tick()
            await asyncio.sleep(INTERVAL)

    def drain(self) -> None:
        """Take no more requests, let the work under way finish, and save the state; returns at once."""
        if self._draining.is_set():
            return
        self._draining.set()
        self._drainer = threading.Thread(target=self._drain, name="vlmpack-drain")
        self._drainer.start()

    def _drain(self) -> None:
        log.info("stopping: work under way has %g s", self.settings.drain_seconds)
        self.queue.close(drain=self.settings.drain_seconds)
        if isinstance(self.engine, DistributedEngine):
            self.engine.stop()
        log.info("stopped")

    def run(self, listening: socket.socket, *, on_start: Callable[[], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Args:
            listening: a bound socket.
            on_start: called when requests are served.
        """
        config = uvicorn.Config(
            self.app(),
            access_log=False,
            log_config=None,
            lifespan="on",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_ANSWERS,
            backlog=BACKLOG,
        )
        _Server(config, on_start=on_start, on_exit=self.drain).run(sockets=[listening])

    def _snapshot(self) -> Snapshot:
        stats, counts = self.queue.stats(), self.engine.counts
        metrics = (
            Metric(name="uptime_seconds", help="Seconds since the start.", value=stats.uptime),
            Metric(name="up", help="1 while the engine runs, 0 after a fault.", value=float(stats.fault is None)),
            Metric(name="sessions", help="Open sessions.", value=stats.sessions),
            Metric(name="models", help="Models of open sessions.", value=stats.models),
            Metric(name="samplers", help="Sampling sessions.", value=stats.samplers),
            Metric(name="checkpoints", help="Checkpoints.", value=stats.checkpoints),
            Metric(name="queued_requests", help="Requests that wait.", value=stats.queued),
            Metric(name="queued_bytes", help="Bytes of the bodies of requests that wait.", value=stats.queued_bytes),
            Metric(name="queued_samples", help="Samples that wait or run.", value=stats.samples_waiting),
            Metric(name="requests_total", help="Requests carried out.", value=stats.requests_done),
            Metric(name="requests_failed_total", help="Requests that failed.", value=stats.requests_failed),
            Metric(name="engine_seconds_total", help="Time of the engine.", value=stats.seconds, label="use"),
            Metric(name="snapshots_total", help="States of models written.", value=stats.snapshots),
            Metric(name="rows_total", help="Packed rows.", value=counts.rows),
            Metric(name="trained_tokens_total", help="Tokens of datums.", value=counts.tokens),
            Metric(name="computed_tokens_total", help="Tokens less what datums shared.", value=counts.computed),
            Metric(name="row_tokens_total", help="Tokens that the rows had room for.", value=counts.capacity),
            Metric(name="patches_total", help="Patches of images.", value=counts.patches),
            Metric(
                name="fill_ratio", help="Computed tokens over room.", value=counts.computed / max(counts.capacity, 1)
            ),
            Metric(name="sampled_tokens_total", help="Tokens sampled.", value=self.engine.sampler.sampled_tokens),
        )
        tokens = counts.tokens + self.engine.sampler.sampled_tokens
        fault = stats.fault or stats.paused
        return Snapshot(title=self.engine.base.name, metrics=metrics, tokens=tokens, fault=fault)


# ---------------------------------------------------------------------- the process


def follow_rank_0(base: Base, settings: ServiceSettings, ranks: Ranks) -> None:
    """Compute what rank 0 says, until it stops.

    Raises:
        ConnectionError: rank 0 is gone.
    """
    engine = base.engine(settings, ranks)
    if settings.sampler != "vllm":  # which rank 0 runs by itself
        set_sampler(engine, settings.sampler, source=base.source)
    follow(engine, ranks)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; port 0: any that is free.

    Raises:
        ConfigError: the address cannot be used.
    """
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        remedy = "name another --host or --port"
        raise ConfigError(f"{host}:{port} cannot be served ({error.strerror}); {remedy}") from error
    return bound


@final
class _Server(uvicorn.Server):
    """uvicorn, which begins to drain as soon as a signal comes, and ends with status 0."""

    def __init__(
        self, config: uvicorn.Config, *, on_start: Callable[[], None] | None, on_exit: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_exit = on_exit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self._on_exit()
