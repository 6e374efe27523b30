"""The service as a Ray Serve application for Ray clusters: rank 0 is a replica, and the other ranks are actors.

    Serve's HTTP proxies ──▶ replica: queue, journal, rank 0 ──gloo──▶ actor: rank 1, rank 2, ...

There is one replica, because the state folder has one writer. One placement group holds all ranks. If the replica or an
actor dies, all of them end. Serve then restarts the replica, which continues from the state folder. All nodes must be
able to access this folder. Run `serve run vlmpack.service.cluster:app model=MODEL state=FOLDER workers=4`, or call
`app(arguments)`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from vlmpack.errors import ConfigError, RequestError
from vlmpack.service import server
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.ranks import FAILED, Ranks, end, join_at
from vlmpack.service.wire.fields import read

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger("vlmpack.service")

ONGOING = 8192
"""Maximum number of concurrent requests of the replica; most of them are long polls."""
LAST_SECONDS = 30.0
"""Seconds, after the time to drain, until Serve kills a replica that should stop."""


@final
@dataclass(frozen=True, kw_only=True)
class ClusterSettings(server.ServiceSettings):
    """Arguments of the application.

    All fields of `ServiceSettings` and `ServiceLimits`, e.g. `row_tokens`, are arguments too, except the key. `serve
    run` passes them as strings.
    """

    model: str
    """Hub name, or a folder that all nodes can access."""
    state: str
    """State folder, which all nodes can access."""
    workers: int = 1
    """Number of ranks: the replica, and one actor for each other rank."""
    cpus: int = 1
    """CPUs of each rank."""
    gpus: int = 0
    """GPUs of each rank: 0 or 1."""
    name: str = ""
    """Name of the model for clients; empty: the default name."""
    dtype: str = ""
    """Dtype of the weights; empty: bfloat16 on a GPU, float32 on a CPU."""
    shard: bool = False
    """Shard the base model over the ranks (FSDP2)."""

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> ClusterSettings:
        """Read the arguments. Numbers and booleans may be strings.

        Raises:
            ConfigError: an argument is unknown, missing or invalid.
        """
        limits = {field.name for field in fields(ServiceLimits)}
        own = {field.name for field in fields(cls)} - {"limits", "key", "shard_on"}
        names = f"They are {', '.join([*sorted(own), *sorted(limits)])}"
        if others := sorted(arguments.keys() - own - limits):
            raise ConfigError(f"arguments of the application: {others[0]} is not one. {names}")
        values = {name: arguments[name] for name in own & arguments.keys()}
        given = {name: arguments[name] for name in limits & arguments.keys()}
        try:
            settings: ClusterSettings = read(cls, {**values, "limits": given, "key": ""})
        except RequestError as error:
            raise ConfigError(f"arguments of the application: {error}. {names}") from error
        if settings.workers < 1 or settings.gpus not in (0, 1) or settings.sampler not in ("exact", "fast"):
            raise ConfigError("workers is 1 or more, gpus is 0 or 1, sampler is exact or fast; set it so")
        return settings

    @property
    def served_name(self) -> str:
        """Name of the model for clients."""
        return self.name or server.model_name(self.model)

    @property
    def device(self) -> str:
        """Torch device of every rank. Ray shows each rank only its own GPU."""
        return "cuda" if self.gpus else "cpu"

    def load(self) -> server.Base:
        """Load the base model on this rank."""
        return server.load_base(
            self.model, name=self.served_name, device=self.device, dtype=self.dtype or None, shard=self.shard
        )

    def with_key(self, key: str) -> ClusterSettings:
        """Return the settings with the key, for one rank."""
        return replace(self, key=key, shard_on=self.device if self.shard else None)


def app(arguments: Mapping[str, Any]) -> Any:
    """Make the Ray Serve application (`ray.serve.Application`).

    The key is the value of `VLMPACK_API_KEY` if the replica has this variable (`runtime_env`); otherwise it is in
    STATE/key.

    Args:
        arguments: arguments by name, see `ClusterSettings`.

    Raises:
        ConfigError: an argument is invalid, or Ray Serve is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError("an application of Ray Serve needs Ray Serve: pip install 'ray[serve]'") from error

    settings = ClusterSettings.parse(arguments)
    resources: dict[str, float] = {"CPU": settings.cpus, "GPU": settings.gpus}

    def build() -> ASGIApp:
        from vlmpack.service import cluster  # by name: the replica imports it

        return cluster.replica(settings)

    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name="step-service",
        num_replicas=1,
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=settings.drain_seconds + LAST_SECONDS,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        placement_group_bundles=[resources] * settings.workers,
        placement_group_strategy="PACK",
    )
    return deployment.bind()


# ---------------------------------------------------------------------- on the replica


def replica(settings: ClusterSettings) -> ASGIApp:
    """Make the app of rank 0 in the replica's process. The other ranks start as actors of the replica."""
    file = Path(settings.state) / "key"
    key = server.find_key(file)
    state = StateFolder(Path(settings.state), base_model=settings.served_name)
    service = settings.with_key(key or server.make_key(file))
    ranks = _start_others(settings) if settings.workers > 1 else None
    return server.Service(settings.load(), state, service, ranks=ranks).app()


def _start_others(settings: ClusterSettings) -> Ranks:
    """Start an actor for each other rank.

    The actors end with this process, and this process ends if one of them fails.
    """
    import ray

    address = ray.util.get_node_ip_address()
    store = TCPStore(address, 0, settings.workers, is_master=True, wait_for_workers=False)
    follow = ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus, max_restarts=0)(EngineActor)
    for rank in range(1, settings.workers):
        actor: Any = follow.remote()
        ends = actor.follow.remote(settings, address, store.port, rank)
        watch = threading.Thread(target=_end_with, args=(rank, actor, ends), name=f"vlmpack-rank-{rank}", daemon=True)
        watch.start()
    return join_at(store, rank=0, size=settings.workers, gpu=0)


def _end_with(rank: int, actor: Any, ends: Any) -> None:
    """End this process if another rank fails, so that Serve restarts all of them.

    Does nothing if the rank ends because rank 0 stopped it.
    """
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(ends)
    except RayError as error:
        log.error("rank %d failed (%s), so the replica ends; Serve starts it again", rank, type(error).__name__)
        end(FAILED)


@final
class EngineActor:
    """The engine of a rank other than rank 0."""

    def follow(self, settings: ClusterSettings, address: str, port: int, rank: int) -> None:
        """Run the commands of rank 0 until it stops.

        Raises:
            ConnectionError: the connection to rank 0 is lost.
        """
        store = TCPStore(address, port, settings.workers, is_master=False)
        ranks = join_at(store, rank=rank, size=settings.workers, gpu=0)
        server.follow_rank_0(settings.load(), settings.with_key(""), ranks)
