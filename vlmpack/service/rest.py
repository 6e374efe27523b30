"""Lists of what the service holds: training runs, checkpoints, sessions, samplers; and the deletion of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlmpack.errors import RequestError
from vlmpack.service.http import Endpoints, answer
from vlmpack.service.queue import CheckpointInfo, ModelInfo, RequestQueue

OWNER = "vlmpack"
"""Owner of every training run: a service has one key."""
PAGE = 100
"""Entries of a list whose request names no number."""
INT32 = 2**31 - 1


@final
@dataclass(frozen=True, kw_only=True)
class Lists:
    """The endpoints that list and delete."""

    queue: RequestQueue
    """Holds what is listed."""
    endpoints: Endpoints
    """Receive bodies."""

    def routes(self) -> list[Route]:
        """Return the route of each endpoint."""
        run = "/api/v1/training_runs/{model_id}"
        return [
            Route("/api/v1/training_runs", self.training_runs, methods=["GET"]),
            Route(run, self.training_run, methods=["GET"]),
            Route(f"{run}/checkpoints", self.checkpoints_of_run, methods=["GET"]),
            Route(f"{run}/checkpoints/{{kind}}/{{name}}", self.delete_checkpoint, methods=["DELETE"]),
            Route("/api/v1/checkpoints", self.checkpoints, methods=["GET"]),
            Route("/api/v1/weights_info", self.weights_info, methods=["POST"]),
            Route("/api/v1/sessions", self.sessions, methods=["GET"]),
            Route("/api/v1/sessions/{session_id}", self.session, methods=["GET"]),
            Route("/api/v1/samplers/{sampler_id}", self.sampler, methods=["GET"]),
        ]

    async def training_runs(self, request: Request) -> Response:
        """List models, the newest first."""
        models = await run_in_threadpool(self.queue.models)
        page, cursor = _page(request, models)
        return answer({"training_runs": [_training_run(model) for model in page], "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        """Return one model."""
        info = await run_in_threadpool(self.queue.get_info, request.path_params["model_id"])
        return answer(_training_run(info))

    async def checkpoints_of_run(self, request: Request) -> Response:
        """List the checkpoints of a model."""
        found = await run_in_threadpool(self.queue.checkpoints, request.path_params["model_id"])
        return answer({"checkpoints": [_checkpoint(one) for one in found]})

    async def checkpoints(self, request: Request) -> Response:
        """List all checkpoints."""
        page, cursor = _page(request, await run_in_threadpool(self.queue.checkpoints))
        return answer({"checkpoints": [_checkpoint(one) for one in page], "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        names = request.path_params
        path = f"tinker://{names['model_id']}/{names['kind']}/{names['name']}"
        await run_in_threadpool(self.queue.delete_checkpoint, path)
        return Response(status_code=204)

    async def weights_info(self, request: Request) -> Response:
        """Return what a model is created with from a checkpoint."""
        fields = await self.endpoints.fields(request)
        found = await run_in_threadpool(self.queue.checkpoint, fields.text("tinker_path"))
        lora = found.lora
        info: dict[str, Any] = {"base_model": found.base_model, "is_lora": lora is not None}
        if lora is not None:
            targets = {"train_unembed": lora.train_unembed, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
            info |= {"lora_rank": lora.rank, **targets}
        return answer(info)

    async def sessions(self, request: Request) -> Response:
        """List sessions."""
        page, _ = _page(request, await run_in_threadpool(self.queue.sessions))
        return answer({"sessions": page})

    async def session(self, request: Request) -> Response:
        """Return the models and samplers of a session."""
        info = await run_in_threadpool(self.queue.session, request.path_params["session_id"])
        ids = {"training_run_ids": list(info.model_ids), "sampler_ids": list(info.sampler_ids)}
        return answer({**ids, "user_metadata": dict(info.user_metadata), "display_name": info.display_name})

    async def sampler(self, request: Request) -> Response:
        """Return what a sampling session samples from."""
        info = await run_in_threadpool(self.queue.sampler, request.path_params["sampler_id"])
        path = {} if info.model_path is None else {"model_path": info.model_path}
        return answer({"sampler_id": info.sampler_id, "base_model": info.base_model, **path})


def _page(request: Request, entries: Sequence[Any]) -> tuple[list[Any], Mapping[str, int]]:
    """Return (the entries asked for, where they stand in the whole list)."""
    limit, offset = _number(request, "limit", PAGE), _number(request, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return list(entries[offset : offset + limit]), cursor


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= INT32):
        raise RequestError(f"{name}: {text[:40]!r}; a whole number from 0 to {INT32} is needed")
    return int(text)


def _training_run(info: ModelInfo) -> dict[str, Any]:
    return {
        "training_run_id": info.model_id,
        "base_model": info.base_model,
        "model_owner": OWNER,
        "is_lora": info.lora is not None,
        "lora_rank": None if info.lora is None else info.lora.rank,
        "last_request_time": _iso(info.last_request_time),
        "last_checkpoint": None if info.last_checkpoint is None else _checkpoint(info.last_checkpoint),
        "last_sampler_checkpoint": (
            None if info.last_sampler_checkpoint is None else _checkpoint(info.last_sampler_checkpoint)
        ),
        "corrupted": info.is_corrupted,
        "user_metadata": dict(info.user_metadata),
    }


def _checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{info.kind}/{info.name}",
        "checkpoint_type": "training" if info.kind == "weights" else "sampler",
        "time": _iso(info.time),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "public": False,
        "user_metadata": dict(info.user_metadata),
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat()
