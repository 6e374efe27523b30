"""Assemble the service (base model, engine, queue, app) and run the process that serves it.

StateFolder ──▶ load_base ──▶ Base ──Service──▶ engine, queue, routes ──run──▶ uvicorn, until SIGTERM
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import torch
import uvicorn
from safetensors import SafetensorError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from vlmpack.data.processor import load_processor
from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_named
from vlmpack.service.engine.engine import Engine, EngineConfig
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.queue.journal import ModelRow
from vlmpack.service.queue.queue import RequestQueue
from vlmpack.service.ranks import Rank, Ranks
from vlmpack.service.sampling.samplers import open_sampler
from vlmpack.service.web import status
from vlmpack.service.web.gate import KEEP_ALIVE, Connection, raise_file_limit
from vlmpack.service.web.http import Endpoints, make_app
from vlmpack.service.web.openai import OpenAI
from vlmpack.service.web.status import EVERY, History, Snapshot

log = logging.getLogger("vlmpack.service")

KEY_VARIABLE = "VLMPACK_API_KEY"
"""Environment variable of the API key."""
KEY_PREFIX = "tml-"
"""The client rejects keys without this prefix (JWTs, which begin with "eyJ", aside)."""
LAST_ANSWERS = 10
"""Seconds to finish responses in progress when the service stops."""
BACKLOG = 2048
"""Maximum number of connections waiting to be accepted: a call of many requests opens one connection for each."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """A base model with its processor and names."""

    name: str
    """The name that clients use."""
    source: str
    """Hub name or folder of the model."""
    model: Any
    """The model, on its device."""
    processor: Any
    """The model's processor; for a text model, its tokenizer."""
    tokenizer: str | None = None
    """Hub name or folder from which clients load the tokenizer; None: `source`. If `source` is a folder, clients on
    other machines cannot load it."""

    def engine(self, config: EngineConfig, ranks: Ranks | None) -> Engine:
        """Make the engine of this process. `ranks` says which rank it is; None: it runs alone."""
        tokenizer = self.tokenizer or self.source
        return Engine(self.model, self.processor, name=self.name, tokenizer_id=tokenizer, config=config, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(EngineConfig):
    """Settings of a service, on top of those of its engine."""

    key: str
    """The API key that clients send with each request."""
    sampler: str = "exact"
    """The sampler: one of `SAMPLERS` in sampling/samplers.py."""
    drain_seconds: float = 60.0
    """Seconds to finish work in progress when the service stops; unfinished work is done after the next start."""


def model_name(source: str) -> str:
    """Return the default name of a model for clients: its hub name, or the name of its folder."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def load_base(
    source: str,
    *,
    name: str | None = None,
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    shard: bool = False,
) -> Base:
    """Load a base model and its processor.

    Args:
        source: hub name or folder.
        name: the name that clients use; None: the hub name, or the folder's name.
        tokenizer: hub name or folder from which clients load the tokenizer; None: `source`.
        device: torch device.
        dtype: name of the weights' torch dtype; None: float32 on a CPU, bfloat16 elsewhere.
        shard: leave the model on the CPU, because the engine moves its shards to the device.

    Raises:
        ConfigError: no readable model is at `source`. FamilyError: the model's family is not supported.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        family = family_named(AutoConfig.from_pretrained(source).model_type)
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        model: Any = family.auto_class.from_pretrained(source, dtype=dtype, attn_implementation="sdpa")
        processor = load_processor(source) if family.has_vision else AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        remedy = "give a hub name or a model's folder"
        raise ConfigError(f"{source}: no model can be read there ({reason}); {remedy}") from error
    return Base(
        name=name or model_name(source),
        source=str(Path(source).resolve()) if Path(source).is_dir() else source,
        model=model if shard else model.to(torch.device(device)),
        processor=processor,
        tokenizer=tokenizer,
    )


def find_key(file: Path) -> str | None:
    """Return the key in `VLMPACK_API_KEY`, or else in a file; None: there is neither.

    Raises:
        ConfigError: the file cannot be read, or the client would reject the key.
    """
    key, place = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
    if not key:
        try:
            key, place = file.read_text(encoding="utf-8").strip(), f"key file {file}"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"key file {file}: {error}; name another with --key-file") from error
    if not key.startswith((KEY_PREFIX, "eyJ")) or not key.isascii() or not key.isprintable():
        raise ConfigError(f'{place}: the client takes keys that begin with "{KEY_PREFIX}", in ASCII; choose such a one')
    return key


def make_key(file: Path) -> str:
    """Write a random key into a new file that only its owner may read, and return it.

    Raises:
        ConfigError: the file cannot be written.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(key + "\n")
    except OSError as error:
        raise ConfigError(f"key file {file}: {error}; name another with --key-file") from error
    return key


# ---------------------------------------------------------------------- the service


@final
class Service:
    """The engine, queue and app of one base model.

    Args:
        base: the model.
        state: the state folder; the service closes it. Open it before you load the model, because opening may fail.
        settings: settings of the service.
        ranks: the process group, whose rank 0 is this process; None: this process runs alone.

    Raises:
        FamilyError: the model cannot be packed exactly.
    """

    def __init__(
        self, base: Base, state: StateFolder, settings: ServiceSettings, *, ranks: Ranks | None = None
    ) -> None:
        self.state, self.settings, self._processor = state, settings, base.processor
        engine = base.engine(settings, ranks)
        sampler = open_sampler(engine, settings.sampler, source=base.source)
        if settings.sampler == "exact" and base.model.dtype.itemsize < 4 and not settings.batch_invariant:
            log.info("exact sampling in 16 bits: each block of tokens is checked in a pass of its own; --sampler fast")
        self.engine: Any = engine
        """Trains: an `Engine`, or a proxy that makes the same call on all ranks."""
        self.sampler: Any = sampler
        """Samples: one of the samplers, or such a proxy if the base model is sharded."""
        self._ranks = ranks
        if ranks is not None:
            rank = Rank(ranks, engine=engine, sampler=sampler)
            self.engine = rank.mirror("engine")
            if engine.sharding is not None and settings.sampler != "vllm":
                self.sampler = rank.mirror("sampler")
        self.queue = RequestQueue(self.engine, self.sampler, state, limits=settings.limits)
        """Orders the requests and remembers their results."""
        self.history = History()
        """What the curves of the status page show."""
        self._drainer: threading.Thread | None = None

    def app(self) -> ASGIApp:
        """Make the ASGI app. The app starts the queue when it starts, and drains it when it shuts down."""
        endpoints = Endpoints(self.queue, self.engine.base, key=self.settings.key)
        openai = OpenAI(endpoints, self._processor, measure=self.engine.measure)
        routes: list[BaseRoute] = [*endpoints.routes(), *openai.routes(), *status.routes(self._snapshot, self.history)]
        return make_app(routes, endpoints=endpoints, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self.queue.start()
        recording = asyncio.create_task(self._record())
        try:
            yield
        finally:
            recording.cancel()
            self.drain()
            assert self._drainer is not None
            await asyncio.to_thread(self._drainer.join)

    async def _record(self) -> None:
        while True:
            counts, sampled = self.engine.counts, self.sampler.sampled_tokens
            self.history.add(time.monotonic(), counts["trained_tokens_total"], sampled)
            await asyncio.sleep(EVERY)

    def drain(self) -> None:
        """Stop taking requests, let work in progress finish, and save the state.

        Returns at once; a thread does the work.
        """
        if self._drainer is None:
            self._drainer = threading.Thread(target=self._drain, name="vlmpack-drain")
            self._drainer.start()

    def _drain(self) -> None:
        log.info("stopping: work under way has %g s", self.settings.drain_seconds)
        self.queue.close(drain=self.settings.drain_seconds)
        if self._ranks is not None:
            self._ranks.send(None)
        log.info("stopped")

    def server(self, *, on_start: Callable[[], None] | None = None) -> uvicorn.Server:
        """Make the HTTP server of the app, and raise the process's limit of open files.

        The server drains on SIGTERM or SIGINT.

        Args:
            on_start: called once the server accepts requests.
        """
        limits, files = self.settings.limits, raise_file_limit()
        most = min(limits.connections, files // 2)
        config = uvicorn.Config(
            self.app(),
            http=partial(Connection, most=most, header_seconds=limits.header_seconds),  # pyright: ignore
            ws="none",
            access_log=False,
            log_config=None,
            lifespan="on",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_ANSWERS,
            backlog=BACKLOG,
        )
        return _Server(config, on_start=on_start, on_exit=self.drain)

    def run(self, listening: socket.socket, *, on_start: Callable[[], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Args:
            listening: a bound socket.
            on_start: called once the server accepts requests.
        """
        self.server(on_start=on_start).run(sockets=[listening])

    def _snapshot(self) -> Snapshot:
        fault = self.queue.fault
        device, now = self.engine.model.device, time.time()
        memory = {"process": _resident_bytes()}
        if device.type == "cuda":
            memory["device"] = torch.cuda.memory_allocated(device)
        space, journal = shutil.disk_usage(self.state.path), self.queue.journal
        opened = set(self.queue.sessions())
        models = [row for row in reversed(journal.rows(ModelRow)) if row.session in opened]
        numbers = {
            **self.queue.stats(),
            **self.engine.counts,
            "memory_bytes": memory,
            "disk_bytes": {"used": space.used, "free": space.free},
            "up": float(not fault),
            "sampled_tokens_total": self.sampler.sampled_tokens,
        }
        return Snapshot(title=self.engine.base.name, numbers=numbers, now=now, models=models, fault=fault)


# ---------------------------------------------------------------------- the process


def follow_rank_0(base: Base, settings: ServiceSettings, ranks: Ranks) -> None:
    """Run the commands of rank 0 until it stops.

    Raises:
        ConnectionError: the connection to rank 0 is lost.
    """
    engine = base.engine(settings, ranks)
    is_mine = settings.sampler != "vllm"  # rank 0 runs vLLM by itself
    sampler = open_sampler(engine, settings.sampler, source=base.source) if is_mine else None
    Rank(ranks, engine=engine, sampler=sampler).follow()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Port 0 picks any free port.

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


def _resident_bytes() -> int:
    """Return the resident memory of this process; where the system does not tell it, the largest so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@final
class _Server(uvicorn.Server):
    """A uvicorn server that starts to drain as soon as a signal arrives, and exits with status 0."""

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

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            for connection in [*self.server_state.connections]:
                connection.close_if_late()  # pyright: ignore
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:  # uvicorn's own would raise the signal again at the end
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self._on_exit()
