"""The HTTP API of the service: an ASGI app that reads requests, passes them to the queue, and serves results and lists.

    POST ──key──▶ body within limits ──wire──▶ request ──queue.submit──▶ its id
                                        └─ refused: the id of a future that fails, so that its number is used up
    POST retrieve_future ──queue.reply, up to 30 s──▶ result, failure, or 408: the client asks again

Handlers only enqueue. Slow work (parsing, the journal) runs in threads, never in the event loop.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, final

from pydantic import Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Lifespan

from vlmpack.errors import RequestError
from vlmpack.service.queue.journal import CheckpointRow, ModelRow, SamplingRow
from vlmpack.service.queue.queue import Pending, RequestQueue
from vlmpack.service.web.gate import DOWNLOADS, BodyReader, Gate, answer
from vlmpack.service.wire import codec, messages
from vlmpack.service.wire.codec import PROTOBUF
from vlmpack.service.wire.fields import INT32, between, get, parse
from vlmpack.service.wire.messages import Rejected

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import BaseModel

log = logging.getLogger("vlmpack.service")

SIGNED_SECONDS = 3600
"""Seconds for which a signed download path is valid."""
OWNER = "vlmpack"
"""Owner of every training run: a service has only one key."""
PAGE = {"limit": 100, "offset": 0}
"""The default page of a list."""
InUrl = Annotated[int, Field(ge=0, le=INT32)]
"""A whole number among the parameters of a URL."""
OLDEST_CLIENT = "0.25"
"""Oldest supported client version; older clients send training requests in JSON."""
NamedSamples = Annotated[int, between(1, 65_536)]
"""Number of sequences of a refused sampling request that still get ids; the client expects one for each."""
SAMPLE_ID = re.compile(r".*:sample:\d+:\d+", re.DOTALL)
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NOT_SERVED = {
    "forward": "training requests in JSON: use tinker 0.25 or newer",
    "copy_weights": "checkpoints are not copied; load them by their path",
    "create_custom_loss": "custom losses are computed in the client",
    "retrieve_futures": "results are fetched one by one, with retrieve_future",
    "cancel_future": "sampling requests are not canceled",
    "join_sampling_session": "a clone of a sampling client chooses its own numbers",
    "unload_model": "a model is freed when its session is finished",
    "token": "the key is sent as it is",
    "publish": "whoever has the key can read all checkpoints",
    "project": "sessions have no projects",
    "search": "list sessions, and look at each one",
    "trace_export": "the log of the service has a line for each request",
    "billing": "this service bills nothing; /metrics counts what it has done",
    "audit": "the log of the service has a line for each request",
}
"""What to do instead of calling endpoints that this service does not have, by a part of their paths."""


def error_response(request: Request, error: Exception) -> Response:
    """Return the response for an error: a client's mistake in words, any other one without its text."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    if not isinstance(error, RequestError):
        return answer({"detail": "an error of the service, which its log has"}, status=500)
    return answer({"detail": str(error)}, **status_of(error))


def status_of(error: RequestError) -> dict[str, Any]:
    """Return the status of a refusal, and the header that says when to try again."""
    status = error.status if isinstance(error, Rejected) else 400
    return {"status": status, "headers": {"Retry-After": "1"} if status in (429, 503) else {}}


# ---------------------------------------------------------------------- the endpoints


@final
class Endpoints:
    """The endpoints that clients call.

    Args:
        queue: the queue, which takes every request.
        base: the base model.
        key: the key, which clients send as X-API-Key or as Authorization: Bearer. It also signs the URLs of downloads,
            which need no key.
    """

    def __init__(self, queue: RequestQueue, base: BaseModel, *, key: str) -> None:
        self.queue, self.base, self.limits, self.key = queue, base, queue.limits, key
        self.bodies = BodyReader(limits=queue.limits)

    def routes(self) -> list[Route]:
        """Return the route of each endpoint."""
        run = "training_runs/{model_id}"
        posts = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish,
            "telemetry": self.telemetry,
            "create_model": partial(self.enqueue, messages.CreateModel),
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": partial(self.enqueue, messages.OptimStep),
            "save_weights": partial(self.enqueue, messages.SaveWeights),
            "save_weights_for_sampler": partial(self.enqueue, messages.SaveForSampler),
            "save_weights_external": partial(self.enqueue, messages.SaveExternal),
            "load_weights": partial(self.enqueue, messages.LoadWeights),
            "create_sampling_session": self.create_sampling_session,
            "asample": partial(self.enqueue, messages.Sample),
            "retrieve_future": self.retrieve_future,
            "weights_info": self.weights_info,
        }
        gets = {
            "get_server_capabilities": self.capabilities,
            "healthz": self.health,
            "training_runs": self.training_runs,
            run: self.training_run,
            f"{run}/checkpoints": self.checkpoints_of_run,
            f"{run}/checkpoints/{{kind}}/{{name}}/external_weights_urls": self.downloads,
            "checkpoints": self.checkpoints,
            "sessions": self.sessions,
            "sessions/{session_id}": self.session,
            "samplers/{sampler_id}": self.sampler,
        }
        return [
            *(Route(f"/api/v1/{path}", endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(f"/api/v1/{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            Route(f"/api/v1/{run}/checkpoints/{{kind}}/{{name}}", self.delete_checkpoint, methods=["DELETE"]),
            Route(f"/api/v1/{run}/checkpoints/{{kind}}/{{name}}/ttl", self.set_ttl, methods=["PUT"]),
            Route("/healthz", self.health, methods=["GET"]),
            Route(DOWNLOADS + "{expires}/{signature}/{folder}/{file}", self.download, methods=["GET"]),
        ]

    # ------------------------------------------------------------------ bodies

    async def values(self, request: Request) -> dict[str, Any]:
        """Receive a small JSON object. It is parsed here, because the threads may all be waiting for a slow disk."""
        return parse(await self.body(request, most=self.limits.json_bytes))

    async def body(self, request: Request, *, most: int, under_way: ExitStack | None = None) -> bytes:
        """Receive a body.

        For a training request, pass `under_way`: until it exits, the queue knows that a request of this model is
        arriving and does not time out missing requests.
        """
        encoding = request.headers.get("content-encoding", "").strip().lower()
        pieces = self._pieces(request, under_way)
        return await self.bodies.read(pieces, encoding=encoding, most=most)

    async def _pieces(self, request: Request, under_way: ExitStack | None) -> AsyncIterator[bytes]:
        async for piece in request.stream():
            if under_way is not None:
                with suppress(RequestError):  # the first piece has no name
                    under_way.enter_context(self.queue.receiving(codec.training_owner(piece)[0]))
                under_way = None
            yield piece

    # ------------------------------------------------------------------ clients and sessions

    async def health(self, request: Request) -> Response:
        """GET healthz."""
        return answer({"status": "ok"})

    async def client_config(self, request: Request) -> Response:
        """Return the flags that the client reads once."""
        check_client(get(await self.values(request), "sdk_version", str, ""))
        flags = {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "parallel_fwdbwd_chunks": True,
            "fwdbwd_max_chunk_len": min(self.limits.datums, 1024),
            "fwdbwd_max_chunk_bytes_count": self.limits.chunk_bytes,
            "fwdbwd_dispatch_bytes_semaphore_size": 4 * self.limits.chunk_bytes,
            "sample_max_concurrent_requests": self.limits.sample_requests,
            "create_model_via_load_weights": True,
        }
        return answer(flags)

    async def dynamic_config(self, request: Request) -> Response:
        """Return the flags that the client reads repeatedly."""
        await self.values(request)
        return answer({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

    async def capabilities(self, request: Request) -> Response:
        """Return the base model and what it supports."""
        context = {"max_context_length": self.base.max_context, "trainable": True, "sampleable": True}
        return answer({"supported_models": [{"model_name": self.base.name, **context}]})

    async def create_session(self, request: Request) -> Response:
        """Open a session."""
        session = codec.read_request(messages.NewSession, await self.values(request))
        check_client(session.sdk_version)
        session_id = await run_in_threadpool(self.queue.create_session, session)
        return answer({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: Request) -> Response:
        """Keep a session open."""
        self.queue.heartbeat(get(await self.values(request), "session_id", str))
        return answer({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """Close a session and free its models."""
        await self.body(request, most=self.limits.json_bytes)
        await run_in_threadpool(self.queue.finish, request.path_params["session_id"])
        return Response(status_code=204)

    async def telemetry(self, request: Request) -> Response:
        """Receive the client's telemetry and discard it."""
        await self.body(request, most=self.limits.json_bytes)
        return answer({"status": "accepted"})

    # ------------------------------------------------------------------ requests

    async def enqueue(self, kind: type[Any], request: Request) -> Response:
        """Receive a JSON request and submit it."""
        body = await self.body(request, most=self.limits.sample_bytes)
        return await run_in_threadpool(self._submit, kind, body)

    def _submit(self, kind: type[Any], body: bytes) -> Response:
        """Read a request, submit it, and return its id.

        A refused request fails in its future instead. So its number is used up, and later requests do not wait for it.
        """
        values = parse(body)
        if kind is messages.LoadWeights and values.get("session_id") is not None:  # create a new model
            if values.get("model_id") is not None:
                raise RequestError("model_id and session_id: send one, of a model that exists or for a new one")
            kind = messages.CreateFromCheckpoint
        owner, seq = codec.owner_of(kind, values)
        more: dict[str, Any] = {"model_id": owner} if issubclass(kind, messages.Operation) else {}
        if kind is messages.Sample:
            count = get(values, "num_samples", NamedSamples, 1)
            more = {"sample_sequence_ids": [f"{owner}:{seq}:{at}" for at in range(count)]}

        try:
            if kind is not messages.Sample and len(body) > self.limits.json_bytes:
                raise RequestError(f"a body of {len(body):,} bytes: at most {self.limits.json_bytes:,}, so send less")
            request = codec.read_request(kind, values)
        except RequestError as error:
            is_creation = issubclass(kind, messages.Creation)
            return answer({"request_id": self.queue.refuse(owner, seq, str(error), is_creation=is_creation), **more})
        return answer({"request_id": self.queue.submit(request, body), **more})

    async def forward_backward(self, request: Request) -> Response:
        """Enqueue a training request."""
        if not request.headers.get("content-type", "").startswith(PROTOBUF):
            detail = f"training requests are {PROTOBUF}: use tinker {OLDEST_CLIENT} or newer"
            return await self._refuse_unread(request, Rejected(detail, status=415))
        with ExitStack() as under_way:
            try:
                body = await self.body(request, most=self.limits.body_bytes, under_way=under_way)
            except Rejected as error:
                try:
                    owner = codec.training_owner(error.beginning)
                except RequestError:
                    raise error from None
                return await run_in_threadpool(self._refuse, *owner, str(error))
            return await run_in_threadpool(self._submit_training, body)

    def _submit_training(self, body: bytes) -> Response:
        owner = codec.training_owner(body)
        try:
            codec.check_fields(body, most=self.limits.fields)
            request = codec.decode_forward_backward(body)
            if request.owner != owner:
                raise RequestError("model_id or seq_id twice in one request: send them once")
        except RequestError as error:
            return self._refuse(*owner, str(error))
        return answer({"request_id": self.queue.submit(request, body), "model_id": owner[0]})

    def _refuse(self, model_id: str, seq_id: int, detail: str) -> Response:
        return answer({"request_id": self.queue.refuse(model_id, seq_id, detail), "model_id": model_id})

    async def not_found(self, request: Request, error: HTTPException) -> Response:
        """Answer a request for an unknown endpoint.

        An operation of a model, whatever its name, fails in its future.
        """
        path = request.url.path
        detail = f"{request.method} {path[:120]}: this service does not have it"
        if remedies := [NOT_SERVED[part] for part in path.split("/") if part in NOT_SERVED]:
            detail = f"{detail}; {remedies[-1]}"
        return await self._refuse_unread(request, Rejected(detail, status=error.status_code))

    async def _refuse_unread(self, request: Request, refusal: Rejected) -> Response:
        """Fail the future of an operation of a model; answer any other request with a status."""
        try:
            values = await run_in_threadpool(parse, await self.body(request, most=self.limits.sample_bytes))
            model_id, seq_id = codec.owner_of(messages.Operation, values)
        except RequestError:
            raise refusal from None
        return await run_in_threadpool(self._refuse, model_id, seq_id, str(refusal))

    # ------------------------------------------------------------------ models and samplers

    async def get_info(self, request: Request) -> Response:
        """Return a model's settings."""
        row = await run_in_threadpool(self.queue.journal.model, get(await self.values(request), "model_id", str))
        model = {"arch": self.base.arch, "model_name": row.base_model, "tokenizer_id": self.base.tokenizer_id}
        plain = {"type": "get_info", "model_id": row.id, "model_name": row.base_model, "model_data": model}
        return answer({**plain, **_rank(row.lora)})

    async def create_sampling_session(self, request: Request) -> Response:
        """Open a sampling session on a snapshot or on the base model."""
        wanted = codec.read_request(messages.NewSampler, await self.values(request))
        sampler = await run_in_threadpool(
            self.queue.create_sampling_session, wanted.session_id, wanted.sampling_session_seq_id,
            path=wanted.model_path, base_model=wanted.base_model,
        )  # fmt: skip
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    # ------------------------------------------------------------------ results

    async def retrieve_future(self, request: Request) -> Response:
        """Return a result, or hold the request until there is one."""
        request_id = get(await self.values(request), "request_id", str)
        reply = await self.queue.reply(request_id, self.limits.poll_seconds)
        if reply is None:
            return _lost(request_id)
        if isinstance(reply, Pending):
            is_paused = reply.reason is not None
            state = {"queue_state": "paused_capacity" if is_paused else "active"}
            reason = {"queue_state_reason": reply.reason} if is_paused else {}
            return answer({"type": "try_again", "request_id": request_id, **state, **reason}, status=408)
        return Response(reply.body, media_type=reply.content_type)

    # ------------------------------------------------------------------ lists, in Starlette's threads

    def training_runs(self, request: Request) -> Response:
        """List models, the newest first."""
        page, cursor = _page(request, self.queue.models())
        return answer({"training_runs": [self._training_run(row) for row in page], "cursor": cursor})

    def training_run(self, request: Request) -> Response:
        """Return one model."""
        return answer(self._training_run(self.queue.journal.model(request.path_params["model_id"])))

    def _training_run(self, row: ModelRow) -> dict[str, Any]:
        newest = {each.kind: each for each in self.queue.journal.rows(CheckpointRow, model=row.id)}
        return {
            "training_run_id": row.id,
            "base_model": row.base_model,
            "model_owner": OWNER,
            **_rank(row.lora),
            "last_request_time": _iso(row.last_request),
            "last_checkpoint": _checkpoint(newest.get("weights")),
            "last_sampler_checkpoint": _checkpoint(newest.get("sampler_weights")),
            "corrupted": self.queue.is_corrupted(row.id),
            "user_metadata": row.user_metadata,
        }

    def checkpoints_of_run(self, request: Request) -> Response:
        """List the checkpoints of a model, the newest first."""
        model = self.queue.journal.model(request.path_params["model_id"])
        rows = reversed(self.queue.journal.rows(CheckpointRow, model=model.id))
        return answer({"checkpoints": [*map(_checkpoint, rows)]})

    def checkpoints(self, request: Request) -> Response:
        """List all checkpoints, the newest first."""
        page, cursor = _page(request, self.queue.journal.rows(CheckpointRow)[::-1])
        return answer({"checkpoints": [*map(_checkpoint, page)], "cursor": cursor})

    def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        journal = self.queue.journal
        journal.drop_checkpoint(journal.checkpoint(_path(request)))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """Change when a checkpoint expires."""
        ttl = get(await self.values(request), "ttl_seconds", messages.Seconds, None)
        await run_in_threadpool(self._set_expiry, _path(request), None if ttl is None else time.time() + ttl)
        return Response(status_code=204)

    def _set_expiry(self, path: str, expires: float | None) -> None:
        self.queue.journal.set_expiry(self.queue.journal.checkpoint(path), expires)

    def downloads(self, request: Request) -> Response:
        """Return a signed URL for each file of external weights."""
        row = self.queue.journal.checkpoint(_path(request))
        if row.kind != "external_weights":
            raise RequestError(f"{row.path} is not for download: save with save_weights_external")
        expires = int(time.time()) + SIGNED_SECONDS
        begin = f"{str(request.base_url).rstrip('/')}{DOWNLOADS}{expires}"
        files = self.queue.state.files(row.folder)
        urls = {file: f"{begin}/{self._signature(expires, row.folder, file)}/{row.folder}/{file}" for file in files}
        return answer({"urls": urls, "expires": _iso(expires)})

    def download(self, request: Request) -> Response:
        """Send a file if its URL is signed."""
        names = ("expires", "signature", "folder", "file")
        expires, signature, folder, file = (request.path_params[name] for name in names)
        is_ours = hmac.compare_digest(signature.encode(), self._signature(expires, folder, file).encode())
        if not is_ours or int(expires) < time.time():
            raise Rejected("the signature of this URL is wrong or has expired: ask for the URLs again", status=403)
        path = self.queue.state.weights / folder / file
        if self.queue.journal.row(CheckpointRow, folder=folder) is None or not path.is_file():  # it is removed later
            raise Rejected(f"there is no file {file} any more: the checkpoint was deleted or has expired", status=404)
        return FileResponse(path, media_type="application/octet-stream")

    def _signature(self, expires: int | str, folder: str, file: str) -> str:
        return hmac.new(self.key.encode(), f"{expires}/{folder}/{file}".encode(), hashlib.sha256).hexdigest()

    async def weights_info(self, request: Request) -> Response:
        """Return the settings to create a model from a checkpoint with."""
        path = get(await self.values(request), "tinker_path", str)
        row = await run_in_threadpool(self.queue.journal.checkpoint, path)
        settings = {} if row.lora is None else asdict(row.lora)
        targets = {name: value for name, value in settings.items() if name.startswith("train_")}
        return answer({"base_model": row.base_model, **_rank(row.lora), **targets})

    async def sessions(self, request: Request) -> Response:
        """List sessions."""
        return answer({"sessions": _page(request, self.queue.sessions())[0]})

    def session(self, request: Request) -> Response:
        """Return the models and samplers of a session."""
        row, journal = self.queue.session(request.path_params["session_id"]), self.queue.journal
        models = [model.id for model in journal.rows(ModelRow, session=row.id)]
        samplers = [sampler.id for sampler in journal.rows(SamplingRow, session=row.id)]
        ids = {"training_run_ids": models, "sampler_ids": samplers}
        return answer({**ids, "user_metadata": row.user_metadata, "display_name": row.display_name})

    def sampler(self, request: Request) -> Response:
        """Return what a sampling session samples from."""
        row = self.queue.journal.sampler(request.path_params["sampler_id"])
        path = {} if row.path is None else {"model_path": row.path}
        return answer({"sampler_id": row.id, "base_model": self.base.name, **path})


def _path(request: Request) -> str:
    """Return the path of the checkpoint that a URL names."""
    names = request.path_params
    return f"tinker://{names['model_id']}/{names['kind']}/{names['name']}"


def _lost(request_id: str) -> Response:
    """Answer for an unknown request.

    The client may repeat a sampling request by itself, but must not repeat a training request.
    """
    if SAMPLE_ID.fullmatch(request_id):
        raise Rejected(f"request {request_id:.200} is not known any more: sample again", status=410)
    error = (
        f"request {request_id:.200} is not known to this service: it never arrived, or its result was kept for as long "
        "as the session was open. The model is as the requests before it left it"
    )
    return answer({"error": error, "category": "server"})


def check_client(version: str) -> None:
    """Refuse clients that send training requests in JSON.

    Raises:
        RequestError: the client is too old.
    """
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < tuple(map(int, OLDEST_CLIENT.split("."))):
        raise RequestError(f"tinker {version}: this service needs {OLDEST_CLIENT} or newer; pip install -U tinker")


def _page(request: Request, entries: Sequence[Any]) -> tuple[list[Any], Mapping[str, int]]:
    """Return (the requested entries, their position in the whole list)."""
    limit, offset = (get(request.query_params, name, InUrl, default) for name, default in PAGE.items())
    codec.refuse(request.query_params)
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return list(entries[offset : offset + limit]), cursor


def _rank(lora: messages.LoraConfig | None) -> dict[str, Any]:
    return {"is_lora": lora is not None, "lora_rank": None if lora is None else lora.rank}


def _checkpoint(row: CheckpointRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": CHECKPOINT_TYPES[row.kind],
        "time": _iso(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size,
        "public": False,
        "expires_at": None if row.expires is None else _iso(row.expires),
        "user_metadata": row.user_metadata,
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat()


# ---------------------------------------------------------------------- the app


def make_app(routes: Sequence[BaseRoute], *, endpoints: Endpoints, lifespan: Lifespan[Any] | None = None) -> ASGIApp:
    """Assemble the app from routes, the key check and error handling.

    Args:
        routes: all routes of the service.
        endpoints: holds the key, and answers for unknown paths and methods.
        lifespan: lifespan of the app.
    """

    handlers: Mapping[Any, Any] = {
        **dict.fromkeys((RequestError, ClientDisconnect, Exception), error_response),
        **dict.fromkeys((404, 405), endpoints.not_found),
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return Gate(app, key=endpoints.key, seconds=endpoints.limits.header_seconds)
