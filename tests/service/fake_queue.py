"""A queue without an engine: results are made up when a request comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from vlmpack.errors import RequestError
from vlmpack.service import messages, wire
from vlmpack.service.journal import CheckpointRow, ModelRow, SamplingRow, SessionRow
from vlmpack.service.ledger import Rejected
from vlmpack.service.queue import ModelInfo, Pending, SessionInfo, Submitted

BASE = "vlmpack/fake"


class FakeQueue:
    """Remembers what it was given; `pending` ids have no result yet."""

    def __init__(self) -> None:
        self.submitted: list[messages.Request] = []
        self.refused: list[tuple[Any, ...]] = []
        self.replies: dict[str, messages.Outcome] = {}
        self.pending: set[str] = set()
        self.session_ids: list[str] = []
        self.finished: set[str] = set()
        self.samplers: dict[str, str | None] = {}
        self.deleted: list[str] = []
        self.received: list[str] = []
        self.adapters: dict[str, messages.LoraConfig | None] = {}

    # ------------------------------------------------------------------ sessions

    def create_session(
        self, *, tags: Sequence[str], user_metadata: Mapping[str, str], sdk_version: str, display_name: str | None
    ) -> str:
        self.session_ids.append(f"s{len(self.session_ids)}")
        return self.session_ids[-1]

    def _check_session(self, session_id: str) -> None:
        if session_id not in self.session_ids:
            raise Rejected(f"session {session_id!r} is not known", status=404)
        if session_id in self.finished:
            raise Rejected(f"session {session_id!r} is finished", status=410)

    def heartbeat(self, session_id: str) -> None:
        self._check_session(session_id)

    def finish(self, session_id: str) -> None:
        self.finished.add(session_id)

    def create_sampling_session(
        self, session_id: str, sampling_session_seq_id: int, *, path: str | None, base_model: str | None
    ) -> str:
        self._check_session(session_id)
        sampler = f"{session_id}:sample:{sampling_session_seq_id}"
        self.samplers[sampler] = path
        return sampler

    # ------------------------------------------------------------------ requests

    @contextmanager
    def receiving(self, model_id: str) -> Iterator[None]:
        self.received.append(model_id)
        yield

    def submit(self, request: messages.Request, body: bytes) -> Submitted:
        self.submitted.append(request)
        if isinstance(request, messages.Sample):
            if request.sampling_session_id not in self.samplers:
                raise Rejected("no such sampling session", status=404)
            return self._accept_sample(request.sampling_session_id, request.seq_id, request.num_samples, _run(request))
        if isinstance(request, messages.CreateModel | messages.CreateFromCheckpoint):
            self._check_session(request.session_id)
            model_id = f"{request.session_id}:train:{request.model_seq_id}"
            self.adapters[model_id] = (
                request.lora if isinstance(request, messages.CreateModel) else messages.LoraConfig(rank=4)
            )
            return self._accept(f"{model_id}:0", _run(request))
        if request.model_id not in self.adapters:
            raise Rejected(f"model {request.model_id!r} is not known", status=404)
        return self._accept(f"{request.model_id}:{request.seq_id}", _run(request))

    def _accept(self, request_id: str, outcome: messages.Outcome) -> Submitted:
        self.replies.setdefault(request_id, outcome)
        return Submitted(request_id=request_id)

    def _accept_sample(self, sampler: str, seq_id: int, count: int, outcome: messages.Outcome) -> Submitted:
        request_id = self._accept(f"{sampler}:{seq_id}", outcome).request_id
        return Submitted(request_id=request_id, sequence_ids=tuple(f"{request_id}:{i}" for i in range(count)))

    def refuse(self, owner: str, seq: int, message: str, *, is_creation: bool = False, samples: int = 0) -> Submitted:
        self.refused.append((owner, seq, message))
        return self._accept_sample(owner, seq, samples, messages.Failure(message=message, category="user"))

    async def reply(self, request_id: str, timeout: float) -> messages.Reply | Pending | None:
        if request_id in self.pending:
            return Pending(state="paused_capacity", reason="busy")
        if request_id not in self.replies:
            return None
        return wire.encode(self.replies[request_id])

    # ------------------------------------------------------------------ lists

    def get_info(self, model_id: str) -> ModelInfo:
        if model_id not in self.adapters:
            raise Rejected(f"model {model_id!r} is not known", status=404)
        row = ModelRow(
            id=model_id,
            session=model_id.split(":")[0],
            created=1.0e9,
            last_request=1.0e9,
            base_model=BASE,
            lora=self.adapters[model_id],
        )
        return ModelInfo(row=row, last_request=1.0e9)

    def models(self) -> list[ModelInfo]:
        return [self.get_info(model_id) for model_id in self.adapters]

    def sessions(self) -> list[str]:
        return list(self.session_ids)

    def session(self, session_id: str) -> SessionInfo:
        self._check_session(session_id)
        row = SessionRow(id=session_id, created=1.0e9)
        return SessionInfo(row=row, model_ids=tuple(self.adapters), sampler_ids=tuple(self.samplers))

    def sampler(self, sampling_session_id: str) -> SamplingRow:
        if sampling_session_id not in self.samplers:
            raise Rejected("no such sampling session", status=404)
        path = self.samplers[sampling_session_id]
        return SamplingRow(id=sampling_session_id, session="s0", created=1.0e9, path=path)

    def checkpoints(self, model_id: str | None = None) -> list[CheckpointRow]:
        return [
            self.checkpoint("tinker://s0:train:0/weights/one"),
            self.checkpoint("tinker://s0:train:0/sampler_weights/two"),
        ]

    def checkpoint(self, path: str) -> CheckpointRow:
        parts = path.removeprefix("tinker://").split("/")
        if len(parts) != 3:
            raise RequestError(f"path {path!r}: tinker://MODEL/weights/NAME is needed")
        return CheckpointRow(
            model=parts[0],
            kind="weights" if parts[1] == "weights" else "sampler_weights",
            name=parts[2],
            folder="f",
            created=1.0e9,
            size=12,
            user_metadata={"a": "b"},
            base_model=BASE,
            lora=messages.LoraConfig(rank=4),
        )

    def delete_checkpoint(self, path: str) -> None:
        if path in self.deleted:
            raise Rejected(f"checkpoint {path!r} is not known", status=404)
        self.deleted.append(path)


def _run(request: messages.Request) -> messages.Outcome:
    match request:
        case messages.ForwardBackward():
            rows = tuple(np.zeros(len(datum.inputs["target_tokens"]), np.float32) for datum in request.data)
            return messages.ForwardBackwardResult(logprobs=rows, metrics={"loss:sum": 0.0})
        case messages.Sample():
            zeros = np.zeros(2, np.float32)
            sequence = messages.SampledSequence(tokens=np.array([4, 5], np.int32), logprobs=zeros, stop_reason="stop")
            return messages.SampleResult(sequences=(sequence,) * request.num_samples)
        case _:
            return messages.LoadedWeights(path="tinker://s0:train:0/weights/one")
