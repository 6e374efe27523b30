"""The endpoints `/v1/completions` and `/v1/chat/completions`, for OpenAI's clients and evaluation tools.

    messages ──chat template──▶ text ──tokenizer──▶ chunks ──queue──▶ sampler ──▶ choices
    prompt ─────────────────────┘                   an ordinary `Sample`: journaled, seeded, within the limits

`model` is the base model's name, or the `tinker://` path of a checkpoint. These samples belong to a session that the
server itself opens. A stream sends each choice only when it is complete, because tokens are final only once they are
checked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import isnan
from typing import Annotated, Any, Literal, final

import numpy as np
from jinja2 import TemplateError
from pydantic import BeforeValidator, FailFast, PlainValidator, StrictBool
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vlmpack.collate.processor_metadata import parts_of, read_processor
from vlmpack.errors import RequestError
from vlmpack.service.engine.datums import MeasuredSize
from vlmpack.service.queue.journal import CheckpointRow
from vlmpack.service.queue.queue import Pending
from vlmpack.service.web.gate import answer
from vlmpack.service.web.http import Endpoints, status_of
from vlmpack.service.wire import codec, messages, schema_pb2
from vlmpack.service.wire.fields import STRICT, Count, between, parse, read_object, settings, shown

REFUSED = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias"), "the distribution is the model's own"),
    **dict.fromkeys(("tools", "tool_choice", "functions"), "describe them in the system message"),
    **dict.fromkeys(("response_format", "modalities"), "it answers in text; ask for a form in the prompt"),
    "best_of": "send n, and choose",
    "suffix": "put it into the prompt",
}
"""Fields of OpenAI's API that this service does not have, and what to do instead. A field that is off is accepted."""
OFF = {"best_of": 1, "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
"""Values that switch a field off, in addition to null, 0 and empty values."""
DATA_URL = re.compile(r"data:image/(png|jpe?g);base64,(.*)", re.DOTALL)
SILENT_SECONDS = 10.0
"""Seconds of silence after which a stream sends a comment, so that proxies and clients do not consider it dead."""


def _prompts(value: Any) -> Sequence[str | list[int]]:
    """Read strings or lists of ids; a single prompt needs no enclosing list."""
    is_one = isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value))
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not all(isinstance(each, str | list) for each in prompts):
        raise ValueError("a text, a list of ids, or a list of those is needed")
    return prompts


@final
@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: StrictBool = False


@dataclass(frozen=True, kw_only=True)
class Wanted(messages.SamplingParams):
    """Fields of both endpoints. `top_k` is an extension of OpenAI's API."""

    model: str
    n: Annotated[int, between(1)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()


@final
@dataclass(frozen=True, kw_only=True)
class Completions(Wanted):
    """Body of a request to `/v1/completions`."""

    prompt: Annotated[Sequence[str | list[int]], PlainValidator(_prompts)]
    max_tokens: Count | None = 16
    logprobs: messages.TopCount | None = None
    echo: StrictBool = False


def _data_url(value: Any) -> tuple[str, str]:
    """Read an image's format and its bytes in base64."""
    if not isinstance(value, str) or (match := DATA_URL.fullmatch(value)) is None:
        raise ValueError("nothing is fetched here: send data:image/png;base64,...")
    messages.read_base64(match[2])
    return "png" if match[1] == "png" else "jpeg", match[2]


@final
@dataclass(frozen=True, kw_only=True)
class ImageUrl:
    """An image in a message."""

    __pydantic_config__ = STRICT

    url: Annotated[tuple[str, str], PlainValidator(_data_url)]
    detail: Literal["auto"] = "auto"


@final
@dataclass(frozen=True, kw_only=True)
class ContentPart:
    """A text or image part of a message."""

    __pydantic_config__ = STRICT

    type: Literal["text", "image_url"]
    text: str = ""
    image_url: Annotated[ImageUrl | None, settings(ImageUrl)] = None

    def in_template(self) -> dict[str, Any]:
        """Return the part in the format of chat templates."""
        return {"type": "image"} if self.image_url else {"type": "text", "text": self.text}


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


@final
@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of a chat."""

    __pydantic_config__ = STRICT

    role: str
    content: Annotated[tuple[Annotated[ContentPart, settings(ContentPart)], ...], FailFast(), BeforeValidator(_parts)]


@final
@dataclass(frozen=True, kw_only=True)
class Chat(Wanted):
    """Body of a request to `/v1/chat/completions`."""

    messages: Annotated[tuple[Annotated[Message, settings(Message)], ...], FailFast()]
    max_completion_tokens: Annotated[int, between(1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: messages.TopCount = 0


Asked = tuple[str, messages.Sample]
"""Id of a submitted request, and the request."""
Words = list[dict[str, Any]]
"""Tokens of a reply in the format of `/v1/chat/completions`."""
Measure = Callable[[Sequence[messages.Chunk]], MeasuredSize]


@final
class OpenAI:
    """OpenAI's endpoints.

    Args:
        endpoints: the endpoints of the service.
        processor: the model's processor; for a text model, its tokenizer.
        measure: checks the chunks of a prompt and counts their tokens, without decoding images.
    """

    def __init__(self, endpoints: Endpoints, processor: Any, *, measure: Measure) -> None:
        self._endpoints, self._queue, self._base = endpoints, endpoints.queue, endpoints.base
        self._processor, self._tokenizer = processor, parts_of(processor).tokenizer
        self._image = read_processor(processor).image_token or None
        self._measure = measure
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._session, self._samplers = "", {}
        """The session, and its sampling sessions by checkpoint folder; the base model has the empty name."""

    def routes(self) -> list[Route]:
        """Return the route of each endpoint."""
        posts = {"completions": Completions, "chat/completions": Chat}
        return [
            *(Route(f"/v1/{path}", partial(self._serve, kind), methods=["POST"]) for path, kind in posts.items()),
            Route("/v1/models", self._models, methods=["GET"]),
        ]

    async def _models(self, request: Request) -> Response:
        saved = await run_in_threadpool(self._queue.journal.rows, CheckpointRow)
        names = [self._base.name, *(row.path for row in reversed(saved) if row.kind == "sampler_weights")]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "vlmpack"} for name in names]
        return answer({"object": "list", "data": models})

    async def _serve(self, kind: type[Any], request: Request) -> Response:
        try:
            body = await self._endpoints.body(request, most=self._endpoints.limits.sample_bytes)
            wanted, asked = await run_in_threadpool(self._submit, kind, body)
            if wanted.stream:
                return StreamingResponse(self._events(wanted, asked), media_type="text/event-stream")
            return answer(await self._whole(wanted, asked))
        except RequestError as error:
            return _refusal(error)

    # ------------------------------------------------------------------ requests

    def _submit(self, kind: type[Any], body: bytes) -> tuple[Any, list[Asked]]:
        """Return the body, and one submitted request per prompt; none if one of them is refused."""
        wanted, is_chat = _read(kind, body), kind is Chat
        count, most = 1 if is_chat else len(wanted.prompt), self._endpoints.limits.samples
        if count * wanted.n > most:
            seen = f"{count:,} prompts, n {wanted.n:,}: {count * wanted.n:,} sequences in a request"
            raise RequestError(f"{seen}; at most {most:,} are served, so send fewer at a time")
        prompts = [self._chunks(wanted.messages)] if is_chat else [*map(self._tokens, wanted.prompt)]
        most = (wanted.max_completion_tokens if is_chat else None) or wanted.max_tokens
        top, echo = (wanted.top_logprobs if is_chat else wanted.logprobs) or 0, not is_chat and wanted.echo
        params = {column.name: getattr(wanted, column.name) for column in fields(messages.SamplingParams)}
        params["max_tokens"] = None if most is None else max(most, 1)
        common = {
            "num_samples": wanted.n,
            "sampling_params": params,
            "topk_sample_logprobs": top,
            "prompt_logprobs": echo,
            "topk_prompt_logprobs": top if echo else 0,
        }
        requests = []
        for chunks in prompts:
            names = {"sampling_session_id": self._sampler(wanted.model), "seq_id": next(self._numbers)}
            body = codec.to_json({**names, **common, "prompt": {"chunks": chunks}})
            request: Any = codec.decode("Sample", body)
            requests.append((request, body))
        return wanted, [(self._queue.submit(request, body), request) for request, body in requests]

    def _sampler(self, model: str) -> str:
        """Return a sampling session for a model.

        Opens a new session if the last one is gone, and a new sampling session if the model has none.
        """
        is_base = model == self._base.name
        if not is_base and not model.startswith("tinker://"):
            message = f"model {shown(model)}: this service has {self._base.name!r}, and tinker:// paths of checkpoints"
            raise messages.Rejected(message, status=404)
        folder = "" if is_base else self._queue.journal.checkpoint(model).folder
        with self._lock:
            if self._session not in self._queue.sessions():
                self._session, self._samplers = self._queue.create_session(messages.NewSession(tags=("openai",))), {}
            self._queue.heartbeat(self._session)
            try:
                return self._queue.journal.sampler(self._samplers.get(folder, "")).id
            except messages.Rejected:
                of = {"path": None, "base_model": model} if is_base else {"path": model, "base_model": None}
                name = self._queue.create_sampling_session(self._session, next(self._numbers), **of)
                self._samplers[folder] = name
                return name

    def _tokens(self, prompt: Any) -> list[dict[str, Any]]:
        ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return [{"type": "encoded_text", "tokens": ids}]

    def _chunks(self, chat: Sequence[Message]) -> list[dict[str, Any]]:
        """Apply the model's chat template, and return text chunks with an image chunk at each image placeholder."""
        urls = [part.image_url.url for message in chat for part in message.content if part.image_url]
        if not chat or (urls and self._image is None):
            raise RequestError("messages: none" if not chat else "messages: an image, but this is a text model")
        images = [{"type": "image", "format": kind, "data": data} for kind, data in urls]
        turns = []
        for message in chat:
            content: Any = [part.in_template() for part in message.content]
            if self._image is None:
                content = "".join(part.text for part in message.content)
            turns.append({"role": message.role, "content": content})
        try:
            text = self._processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, TemplateError) as error:
            raise RequestError(f"messages: the model's chat template refused them: {error}") from error
        pieces = [text] if self._image is None else text.split(self._image)
        if len(pieces) != len(images) + 1:
            raise RequestError(f"messages: {len(images)} images, but {len(pieces) - 1} times {self._image} in the text")
        begins = self._tokenizer.bos_token is not None and text.startswith(self._tokenizer.bos_token)
        adds = [self._image is not None and not begins, *[False] * len(images)]  # as transformers' processors do
        tokens = [self._tokenizer(each, add_special_tokens=add) for each, add in zip(pieces, adds, strict=True)]
        texts = [{"type": "encoded_text", "tokens": each["input_ids"]} for each in tokens]
        return [chunk for pair in zip(texts, [*images, {}], strict=True) for chunk in pair if chunk]

    # ------------------------------------------------------------------ answers

    async def _reply(self, request_id: str) -> Any:
        """Wait for the samples.

        Raises:
            Rejected: sampling failed.
        """
        while isinstance(reply := await self._queue.reply(request_id, self._endpoints.limits.poll_seconds), Pending):
            self._queue.check_running()
        if reply is None:
            raise messages.Rejected("the request is not known any more: send it again", status=500)
        if reply.content_type == codec.JSON:
            failure = json.loads(reply.body)
            raise messages.Rejected(failure["error"], status=400 if failure["category"] == "user" else 500)
        return schema_pb2.SampleResponse.FromString(reply.body)

    async def _whole(self, wanted: Any, asked: Sequence[Asked]) -> dict[str, Any]:
        responses = await asyncio.gather(*(self._reply(request_id) for request_id, _ in asked))
        return await run_in_threadpool(self._answer, wanted, asked, responses)

    async def _events(self, wanted: Any, asked: Sequence[Asked]) -> AsyncIterator[str]:
        waits = asyncio.ensure_future(self._whole(wanted, asked))
        while not (await asyncio.wait([waits], timeout=SILENT_SECONDS))[0]:
            yield ": sampling\n\n"
        try:
            whole = waits.result()
        except RequestError as error:
            yield f"data: {bytes(_refusal(error).body).decode()}\n\n"
            return
        choices, usage = whole.pop("choices"), whole.pop("usage")
        is_chat = isinstance(wanted, Chat)
        begin = {**whole, "object": "chat.completion.chunk" if is_chat else "text_completion"}
        for choice in choices:
            content = {"delta": choice.pop("message")} if is_chat else {"text": choice["text"]}
            end = {"delta": {}} if is_chat else {"text": ""}
            for part in ({**choice, **content, "finish_reason": None}, {**choice, **end, "logprobs": None}):
                yield f"data: {json.dumps({**begin, 'choices': [part]})}\n\n"
        if wanted.stream_options.include_usage:
            yield f"data: {json.dumps({**begin, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _answer(self, wanted: Any, asked: Sequence[Asked], responses: Sequence[Any]) -> dict[str, Any]:
        each = zip(asked, responses, strict=True)
        found = [(request, response, one) for (_, request), response in each for one in response.sequences]
        is_chat, name = isinstance(wanted, Chat), asked[0][0]
        before = sum(self._measure(request.prompt).tokens for _, request in asked)
        after = 0 if wanted.max_tokens == 0 else sum(len(one.tokens) // 4 for _, _, one in found)
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": wanted.model,
            "choices": [{"index": at, **self._choice(wanted, *one)} for at, one in enumerate(found)],
            "usage": {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after},
        }

    def _choice(self, wanted: Any, request: messages.Sample, response: Any, sequence: Any) -> dict[str, Any]:
        """Return one choice: its text up to what ended it, and the tokens of this text."""
        ids, is_stop = np.frombuffer(sequence.tokens, "<i4").tolist(), sequence.stop_reason == 0
        words = self._words(ids, _floats(sequence.logprobs), sequence.topk_sampled_logprobs)
        if wanted.max_tokens == 0 or (is_stop and ids[-1] in self._base.eos):
            ids, words = ids[:-1], words[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if cuts := [at for at in map(text.find, request.params.stop_strings) if at >= 0]:
            text = text[: min(cuts)]
            words = [word for word, at in zip(words, _offsets(words), strict=True) if at < len(text)]
        end = {"finish_reason": "stop" if is_stop else "length"}
        if isinstance(wanted, Chat):
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"message": message, "logprobs": {"content": words} if wanted.logprobs else None, **end}
        if wanted.echo and isinstance(prompt := request.prompt[0], messages.TextChunk):
            known = _floats(response.prompt_logprobs)
            words = [*self._words(prompt.tokens.tolist(), known, response.topk_prompt_logprobs), *words]
            text = self._tokenizer.decode(prompt.tokens, clean_up_tokenization_spaces=False) + text
        return {"text": text, "logprobs": None if wanted.logprobs is None else _table(words), **end}

    def _words(self, ids: Sequence[int], logprobs: Sequence[float], top: Any) -> Words:
        """Describe tokens with their log-probabilities. NaN means that a log-probability is unknown."""
        likeliest: Sequence[Any] = [()] * len(ids)
        if top.k:
            shape = (top.length, top.k)
            pairs = (np.ndarray(shape, "<i4", top.token_ids).tolist(), np.ndarray(shape, "<f4", top.logprobs).tolist())
            likeliest = [[*zip(*pair, strict=True)] for pair in zip(*pairs, strict=True)]
        tops = [{"top_logprobs": [self._word(*each) for each in best]} for best in likeliest]
        return [self._word(token, logprob) | top for token, logprob, top in zip(ids, logprobs, tops, strict=True)]

    def _word(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return {"token": text, "logprob": None if isnan(logprob) else logprob, "bytes": [*text.encode()]}


def _table(words: Words) -> dict[str, Any]:
    """Return tokens in the format of `/v1/completions`."""
    tops = [{each["token"]: each["logprob"] for each in (word, *word["top_logprobs"])} for word in words]
    return {
        "tokens": [word["token"] for word in words],
        "token_logprobs": [word["logprob"] for word in words],
        "top_logprobs": [None if word["logprob"] is None else top for word, top in zip(words, tops, strict=True)],
        "text_offset": _offsets(words),
    }


def _offsets(words: Words) -> list[int]:
    return [*itertools.accumulate((len(word["token"]) for word in words), initial=0)][:-1]


def _floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


def _read(kind: type[Any], body: bytes) -> Any:
    """Read a body. A null field counts as absent, also a number: OpenAI's clients send None as null.

    Raises:
        RequestError: a field is unknown, or this service does not have it.
    """
    values = parse(body)
    codec.refuse(values, REFUSED, OFF)
    given = {name: value for name, value in values.items() if name not in REFUSED and value is not None}
    return read_object(kind, given)


def _refusal(error: RequestError) -> Response:
    """Return an error in the format of OpenAI's clients."""
    status = status_of(error)
    kind = "invalid_request_error" if status["status"] < 500 else "server_error"
    return answer({"error": {"message": str(error), "type": kind, "param": None, "code": None}}, **status)
