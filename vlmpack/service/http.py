"""The HTTP face of the service: an ASGI app that reads requests, hands them to the queue, and serves results.

    POST ──key──▶ body under caps ──wire──▶ request ──queue.submit──▶ its id
                                       └─ refused: the id of a future that fails, so that its number is used up
    POST retrieve_future ──queue.reply, up to 30 s──▶ result, failure, or 408: the client asks again

Handlers only enqueue. What takes time (parsing, the journal) runs in threads, never in the event loop.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from vlmpack.errors import RequestError
from vlmpack.service import messages, protobuf, wire
from vlmpack.service.bodies import BodyError, BodyReader
from vlmpack.service.limits import ServiceLimits, check
from vlmpack.service.queue import Pending, Rejected, RequestQueue, Submitted
from vlmpack.service.wire import INT64, JSON, PROTOBUF, Fields, to_json

OLDEST_CLIENT = (0, 25)
"""Clients before it send training requests in JSON."""
NAMED_SAMPLES = 65_536
"""Most sequences of a refused sampling request that still get names; the client wants one for each."""
REQUEST_ID = 512
"""Longest id of a request, in characters."""
SAMPLE_ID = re.compile(r".*:sample:\d+:\d+", re.DOTALL)
NOT_SERVED = {
    "forward": "training requests in JSON: use tinker 0.25 or newer",
    "save_weights_external": "checkpoints stay in the state folder of this service",
    "copy_weights": "checkpoints are not copied; load them by their path",
    "create_custom_loss": "custom losses are computed in the client",
    "retrieve_futures": "results are fetched one by one, with retrieve_future",
    "cancel_future": "sampling requests are not cancelled",
    "join_sampling_session": "a clone of a sampling client chooses its own numbers",
    "unload_model": "a model is freed when its session is finished",
    "token": "the key is sent as it is",
    "publish": "whoever has the key sees all checkpoints",
    "ttl": "checkpoints stay until they are deleted",
    "project": "sessions have no projects",
    "search": "list sessions, and look at each one",
    "external_weights_urls": "checkpoints stay in the state folder of this service",
}
"""Remedies for endpoints that clients try and that this service does not have, by the last part of their paths."""

T = TypeVar("T")


@final
class HTTPError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, detail: str, *, retry_after: float | None = None) -> None:
        """Keep the status, the text and, for 429 and 503, the seconds until the client should try again."""
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after

    def response(self) -> Response:
        """Make the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": f"{max(self.retry_after, 0.1):g}"}
        return answer({"detail": self.detail}, status=self.status, headers=headers)


def answer(value: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make an answer in JSON."""
    return Response(to_json(value), status_code=status, media_type=JSON, headers=dict(headers or {}))


@final
@dataclass(frozen=True, kw_only=True)
class Served:
    """The base model that the service serves."""

    name: str
    """Of the base model, as clients have to name it."""
    context: int
    """Tokens of a datum, or of a prompt with what is sampled."""


@final
@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """The endpoints of clients that train and sample; lists and deletions are in `rest.py`."""

    queue: RequestQueue
    """Takes every request."""
    served: Served
    """The base model."""
    limits: ServiceLimits
    """Of the service."""
    bodies: BodyReader
    """Receives bodies."""
    is_draining: Callable[[], bool]
    """True once the service is about to stop."""

    def routes(self) -> list[Route]:
        """Return the route of each endpoint."""
        posts = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_for_sampler,
            "load_weights": self.load_weights,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
        }
        gets = {"get_server_capabilities": self.capabilities, "healthz": self.health}
        return [
            *(Route(f"/api/v1/{path}", endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(f"/api/v1/{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            Route("/healthz", self.health, methods=["GET"]),
        ]

    # ------------------------------------------------------------------ bodies

    async def fields(self, request: Request, *, most: int | None = None) -> Fields:
        """Receive a JSON object."""
        body = await self.body(request, most=most or self.limits.json_bytes)
        return await run_in_threadpool(Fields.parse, body)

    async def body(
        self, request: Request, *, most: int, decoded: int | None = None, under_way: ExitStack | None = None
    ) -> bytes:
        """Receive a body; of a training request, its model's gaps are held until `under_way` ends."""
        encoding = request.headers.get("content-encoding", "").strip().lower()
        pieces = self._pieces(request, under_way)
        return await self.bodies.read(pieces, encoding=encoding, most=most, decoded=decoded)

    async def _pieces(self, request: Request, under_way: ExitStack | None) -> AsyncIterator[bytes]:
        async for piece in request.stream():
            if under_way is not None:
                with suppress(RequestError):  # without a name in its first piece, or compressed
                    under_way.enter_context(self.queue.receiving(protobuf.identify(piece).model_id))
                under_way = None
            yield piece

    def _refuse_if_draining(self) -> None:
        if self.is_draining():
            raise HTTPError(503, "the service is being stopped; it goes on when it is started again", retry_after=2)

    # ------------------------------------------------------------------ clients and sessions

    async def health(self, request: Request) -> Response:
        """GET healthz."""
        return answer({"status": "ok"})

    async def client_config(self, request: Request) -> Response:
        """Return the flags that the client reads once."""
        fields = await self.fields(request)
        check_client(fields.text("sdk_version", ""))
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
        """Return the flags that the client reads again and again."""
        await self.fields(request)
        return answer({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

    async def capabilities(self, request: Request) -> Response:
        """Return the base model."""
        context = {"max_context_length": self.served.context, "trainable": True, "sampleable": True}
        return answer({"supported_models": [{"model_name": self.served.name, **context}]})

    async def create_session(self, request: Request) -> Response:
        """Open a session."""
        self._refuse_if_draining()
        fields = await self.fields(request)
        version = fields.text("sdk_version", "")
        check_client(version)
        tags = [wire.check_text(tag, "tags") for tag in fields.array("tags", [])]
        metadata, name = fields.metadata(), fields.text("display_name", None)
        session_id = await run_in_threadpool(
            self.queue.create_session, tags=tags, user_metadata=metadata, sdk_version=version, display_name=name
        )
        return answer({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: Request) -> Response:
        """Keep a session open."""
        fields = await self.fields(request)
        await run_in_threadpool(self.queue.heartbeat, fields.text("session_id"))
        return answer({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """Close a session and free its models."""
        await self.body(request, most=self.limits.json_bytes)
        await run_in_threadpool(self.queue.finish, request.path_params["session_id"])
        return Response(status_code=204)

    async def telemetry(self, request: Request) -> Response:
        """Take the client's telemetry and drop it."""
        await self.body(request, most=self.limits.json_bytes)
        return answer({"status": "accepted"})

    # ------------------------------------------------------------------ models

    async def create_model(self, request: Request) -> Response:
        """Enqueue the creation of a model."""
        self._refuse_if_draining()
        body = await self.body(request, most=self.limits.sample_bytes)
        return await run_in_threadpool(self._submit_creation, "CreateModel", body)

    async def load_weights(self, request: Request) -> Response:
        """Enqueue going back to a checkpoint, or the creation of a model from one."""
        self._refuse_if_draining()
        body = await self.body(request, most=self.limits.sample_bytes)
        fields = await run_in_threadpool(Fields.parse, body)
        if "model_id" in fields and "session_id" in fields:
            raise RequestError("model_id and session_id: send one of them, for a model that exists or for a new one")
        submit, kind = self._submit_operation, "LoadWeights"
        if "session_id" in fields:
            submit, kind = self._submit_creation, "CreateFromCheckpoint"
        return await run_in_threadpool(submit, kind, body)

    def _submit_creation(self, kind: str, body: bytes) -> Response:
        fields = Fields.parse(body)
        session_id, number = fields.text("session_id"), fields.integer("model_seq_id")
        try:
            request = self._read(kind, fields, body)
            assert isinstance(request, messages.CreateModel | messages.CreateFromCheckpoint)
            self._check_base(request.base_model)
        except RequestError as error:
            return answer({"request_id": self.queue.refuse_creation(session_id, number, str(error))})
        return answer({"request_id": self.queue.submit(request, body, JSON).request_id})

    def _read(self, kind: str, fields: Fields, body: bytes) -> messages.Request:
        if len(body) > self.limits.json_bytes:
            raise RequestError(f"a body of {len(body):,} bytes: at most {self.limits.json_bytes:,}, so send less in it")
        return wire.READERS[kind](fields)

    def _check_base(self, name: str | None) -> None:
        if name is not None and name != self.served.name:
            raise RequestError(f"base_model {name!r}: this service has {self.served.name!r} alone")

    async def get_info(self, request: Request) -> Response:
        """Return a model's settings."""
        fields = await self.fields(request)
        info = await run_in_threadpool(self.queue.get_info, fields.text("model_id"))
        model = {"arch": info.arch, "model_name": info.base_model, "tokenizer_id": info.tokenizer_id}
        rank = {"is_lora": info.lora is not None, "lora_rank": None if info.lora is None else info.lora.rank}
        plain = {"type": "get_info", "model_id": info.model_id, "model_name": info.base_model, "model_data": model}
        return answer({**plain, **rank})

    # ------------------------------------------------------------------ operations

    async def forward_backward(self, request: Request) -> Response:
        """Enqueue a training request."""
        self._refuse_if_draining()
        if not request.headers.get("content-type", "").startswith(PROTOBUF):
            detail = f"training requests are {PROTOBUF}: use tinker {_version(OLDEST_CLIENT)} or newer"
            return await self._refuse_unread(request, HTTPError(415, detail))
        most, decoded = self.limits.body_bytes, self.limits.decoded_bytes
        with ExitStack() as under_way:
            try:
                body = await self.body(request, most=most, decoded=decoded, under_way=under_way)
            except BodyError as error:
                try:
                    identity = protobuf.identify(error.beginning)
                except RequestError:
                    raise error from None
                return await run_in_threadpool(self._refuse, identity.model_id, identity.seq_id, error.detail)
            return await run_in_threadpool(self._submit_training, body)

    def _submit_training(self, body: bytes) -> Response:
        identity = protobuf.identify(body)
        try:
            protobuf.check_fields(body, most=self.limits.fields)
            request = protobuf.decode_forward_backward(body)
            if (request.model_id, request.seq_id) != (identity.model_id, identity.seq_id):
                raise RequestError("model_id or seq_id twice in one request: send them once")
            check(request, self.limits)
        except RequestError as error:
            return self._refuse(identity.model_id, identity.seq_id, str(error))
        return answer(
            {"request_id": self.queue.submit(request, body, PROTOBUF).request_id, "model_id": identity.model_id}
        )

    def _refuse(self, model_id: str, seq_id: int, detail: str) -> Response:
        """Let an operation fail in its future: its number is used up, and those after it do not wait for it."""
        return answer({"request_id": self.queue.refuse(model_id, seq_id, detail), "model_id": model_id})

    async def optim_step(self, request: Request) -> Response:
        """Enqueue a step of the optimiser."""
        return await self._operation("OptimStep", request)

    async def save_weights(self, request: Request) -> Response:
        """Enqueue a training checkpoint."""
        return await self._operation("SaveWeights", request)

    async def save_for_sampler(self, request: Request) -> Response:
        """Enqueue a snapshot to sample from."""
        return await self._operation("SaveForSampler", request)

    async def _operation(self, kind: str, request: Request) -> Response:
        self._refuse_if_draining()
        body = await self.body(request, most=self.limits.sample_bytes)
        return await run_in_threadpool(self._submit_operation, kind, body)

    def _submit_operation(self, kind: str, body: bytes) -> Response:
        fields = Fields.parse(body)
        model_id, seq_id = fields.text("model_id"), fields.integer("seq_id", low=1)
        try:
            request = self._read(kind, fields, body)
        except RequestError as error:
            return self._refuse(model_id, seq_id, str(error))
        return answer({"request_id": self.queue.submit(request, body, JSON).request_id})

    async def not_found(self, request: Request, error: HTTPException) -> Response:
        """Answer for an endpoint that is not here. An operation of a model, whatever its name, fails in its future."""
        path = request.url.path
        detail = f"{request.method} {path[:120]}: this service does not have it"
        if (remedy := NOT_SERVED.get(path.rpartition("/")[2])) is not None:
            detail = f"{detail}; {remedy}"
        try:
            return await self._refuse_unread(request, HTTPError(error.status_code, detail))
        except (HTTPError, RequestError, ClientDisconnect) as refusal:  # Starlette takes no errors of this handler
            response = error_response(refusal)
            assert response is not None
            return response

    async def _refuse_unread(self, request: Request, refusal: HTTPError) -> Response:
        """Let a request fail in its future if it is an operation of a model; else answer with a status."""
        try:
            fields = await self.fields(request, most=self.limits.sample_bytes)
            model_id, seq_id = fields.text("model_id"), fields.integer("seq_id", low=1)
        except (BodyError, RequestError):
            raise refusal from None
        self._refuse_if_draining()
        return await run_in_threadpool(self._refuse, model_id, seq_id, refusal.detail)

    # ------------------------------------------------------------------ sampling

    async def create_sampling_session(self, request: Request) -> Response:
        """Open a sampling session on a snapshot or on the base model."""
        self._refuse_if_draining()
        fields = await self.fields(request)
        path, base = fields.text("model_path", None), fields.text("base_model", None)
        if path is None and base is None:
            raise RequestError("neither model_path nor base_model: send one of them")
        self._check_base(base)
        session_id, number = fields.text("session_id"), fields.integer("sampling_session_seq_id", high=INT64)
        sampler = await run_in_threadpool(
            self.queue.create_sampling_session, session_id, number, path=path, base_model=base
        )
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def asample(self, request: Request) -> Response:
        """Enqueue a sampling request."""
        self._refuse_if_draining()
        body = await self.body(request, most=self.limits.sample_bytes)
        return await run_in_threadpool(self._submit_sample, body)

    def _submit_sample(self, body: bytes) -> Response:
        fields = Fields.parse(body)
        session_id, seq_id = fields.text("sampling_session_id"), fields.integer("seq_id", high=INT64)
        count = fields.integer("num_samples", 1, low=1, high=NAMED_SAMPLES)
        try:
            request = wire.READERS["Sample"](fields)
            check(request, self.limits)
        except RequestError as error:
            submitted: Submitted = self.queue.refuse_sample(session_id, seq_id, count, str(error))
        else:
            submitted = self.queue.submit(request, body, JSON)
        return answer({"request_id": submitted.request_id, "sample_sequence_ids": list(submitted.sequence_ids)})

    # ------------------------------------------------------------------ results

    async def retrieve_future(self, request: Request) -> Response:
        """Return a result, or hold the request back until there is one."""
        request_id = (await self.fields(request)).text("request_id")
        if len(request_id) > REQUEST_ID:
            raise RequestError(f"request_id: {len(request_id)} characters; no request has such an id")
        reply = await self.queue.reply(request_id, 0.0 if self.is_draining() else self.limits.poll_seconds)
        if reply is None:
            return _lost(request_id)
        if isinstance(reply, Pending):
            pending = {"type": "try_again", "request_id": request_id, "queue_state": reply.state}
            reason = {} if reply.reason is None else {"queue_state_reason": reply.reason}
            return answer({**pending, **reason}, status=408)
        return Response(reply.body, media_type=reply.content_type)


def _lost(request_id: str) -> Response:
    """Answer for a request that is not known: the client samples again by itself, but must not train again."""
    if SAMPLE_ID.fullmatch(request_id):
        raise HTTPError(410, f"request {request_id} is not known any more: sample again")
    error = (
        f"request {request_id} is not known to this service: it never arrived, or its result was kept for as long as "
        "the session was open. The model is as the requests before it left it"
    )
    return answer({"error": error, "category": "server"})


def check_client(version: str) -> None:
    """Raise for a client that sends training requests in JSON.

    Raises:
        RequestError: it is too old.
    """
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_CLIENT:
        raise RequestError(
            f"tinker {version}: this service needs {_version(OLDEST_CLIENT)} or newer; pip install -U tinker"
        )


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def error_response(error: Exception) -> Response | None:
    """Return the answer for an error that a client caused; None: the error is ours."""
    match error:
        case HTTPError():
            return error.response()
        case BodyError():
            return HTTPError(error.status, error.detail, retry_after=1 if error.status == 429 else None).response()
        case Rejected():
            return HTTPError(error.status, str(error), retry_after=error.retry_after).response()
        case RequestError():
            return HTTPError(400, str(error)).response()
        case ClientDisconnect():
            return Response(status_code=400)
    return None
