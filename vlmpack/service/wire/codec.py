"""Decode bodies into requests, and encode outcomes into bodies: JSON, or the protobuf messages of `schema.proto`.

JSON      ──owner_of──▶ model_id, seq_id ──read_request──▶ request                 outcome ──encode──▶ JSON
protobuf  ──training_owner──▶ model_id, seq_id ──check_fields──▶ few enough ──decode──▶ ForwardBackward
          ForwardBackwardResult, SampleResult ──encode──▶ protobuf
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from vlmpack.errors import RequestError
from vlmpack.service.wire import messages, schema_pb2
from vlmpack.service.wire.fields import Count, get, parse, read_object, shown
from vlmpack.service.wire.schema_pb2 import BFLOAT16, FLOAT32, INT32, INT64

JSON, PROTOBUF = "application/json", "application/x-protobuf"

REFUSED = {
    "optimizer_params": "this service has AdamW alone; send adam_params",
    "optimizer_config": "this service has adamw alone",
    "weights_access_token": "the key opens all checkpoints of this service; leave it out",
    "age_encryption_recipients": "files are stored as they are; encrypt what you download",
    "project_id": "this service has no projects; leave it out",
    "record_stability_info": "it is for stable_reinforce, whose formula is not published; leave it out, and train with "
    "importance_sampling, ppo, cispo or gspo",
}
"""Client options that this service does not have, and what to do instead."""
ADAMW = {"optimizer_config": {"type": "adamw"}}


def decode(kind: str, body: bytes) -> messages.Request:
    """Parse a body that was accepted before.

    Args:
        kind: name of the request's class.
        body: body of the request.

    Raises:
        RequestError: the body cannot be read, or requests something that this service does not do.
    """
    if kind == messages.ForwardBackward.__name__:
        return decode_forward_backward(body)
    return read_request(getattr(messages, kind), parse(body))


def read_request(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Read a request from a parsed body.

    Raises:
        RequestError: a field is invalid, or the body has an option that this service does not have.
    """
    refuse(values)
    return read_object(kind, values)


def refuse(values: Mapping[str, Any], refused: Mapping[str, str] = REFUSED, off: Mapping[str, Any] = ADAMW) -> None:
    """Refuse client options that this service does not have, unless they are off.

    Args:
        values: a body, or the parameters of a URL.
        refused: the options, and what to do instead.
        off: values that switch an option off, in addition to null, 0, false and empty ones.

    Raises:
        RequestError: such an option is set.
    """
    for name in refused.keys() & values.keys():
        if (value := values[name]) and value != off.get(name):
            raise RequestError(f"{name} {shown(value)}: this service does not have it; {refused[name]}")


def owner_of(kind: type[Any], values: Mapping[str, Any]) -> tuple[str, int]:
    """Return the id of a request's model or sampling session, and the request's number, before reading the rest.

    Raises:
        RequestError: the id or the number is missing or invalid.
    """
    if issubclass(kind, messages.Creation):
        return f"{get(values, 'session_id', str)}:train:{get(values, 'model_seq_id', Count)}", 0
    if issubclass(kind, messages.Operation):
        return get(values, "model_id", str), get(values, "seq_id", messages.OperationNumber)
    return get(values, "sampling_session_id", str), get(values, "seq_id", messages.LargeCount)


def encode(outcome: messages.Outcome) -> messages.Reply:
    """Encode a result or a failure as the client expects it."""
    if isinstance(outcome, messages.ForwardBackwardResult | messages.SampleResult):
        return messages.Reply(content_type=PROTOBUF, body=encode_result(outcome))
    if isinstance(outcome, messages.Failure):
        outcome = {"error": outcome.message, "category": outcome.category}
    return messages.Reply(content_type=JSON, body=to_json(outcome))


def to_json(value: Mapping[str, Any]) -> bytes:
    """Encode an object."""
    return json.dumps(value, allow_nan=False).encode("utf-8")


# ---------------------------------------------------------------------- protobuf


DTYPES: Mapping[int, str] = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
NO_LOGPROB = -99999.0
"""Value sent for positions without a log-probability."""
STOP_REASONS = {"stop": schema_pb2.STOP, "length": schema_pb2.LENGTH}

NESTED = {("Request", 3): "Datum", ("Datum", 1): "Chunk", ("Datum", 2): "Entry", ("Entry", 2): "Tensor"}
"""Fields that are messages themselves, by message and field number. "Entry" covers two kinds of entries, because both
have their tensor in field 2."""

SHAPE_BYTES = 100
"""Maximum encoded length of a shape: each byte of it can be a dimension."""


# ---------------------------------------------------------------------- training requests in protobuf


def training_owner(body: bytes) -> tuple[str, int]:
    """Return the model_id and seq_id of a training request, and ignore everything after them.

    Raises:
        RequestError: model_id or seq_id is missing, or the bytes before them are not a protobuf message.
    """
    model_id, seq_id = "", 0
    for number, value in _fields(body, 0, len(body)):
        if number == 1 and isinstance(value, slice):
            model_id = body[value].decode("utf-8", errors="replace")
        elif number == 2 and isinstance(value, int):
            seq_id = value
        if model_id and seq_id:
            break
    if not model_id or not 1 <= seq_id < 2**31:
        raise RequestError(f"model_id {model_id!r}, seq_id {seq_id}: a training request has both, numbers from 1")
    return model_id, seq_id


def check_fields(body: bytes, *, most: int) -> None:
    """Count the fields of a training request without building any message: a 2-byte message takes 100 bytes in memory.

    Args:
        body: the encoded message.
        most: maximum number of fields, over all nested messages.

    Raises:
        RequestError: there are more fields, a shape has too many dimensions, or the body is not a protobuf message.
    """
    count, waiting = 0, [("Request", 0, len(body))]
    while waiting:
        kind, start, end = waiting.pop()
        for number, value in _fields(body, start, end):
            count += 1
            if count > most:
                raise RequestError(f"more than {most:,} fields in a request: send fewer datums at a time")
            if not isinstance(value, slice):
                continue
            if (kind, number) in NESTED:
                waiting.append((NESTED[kind, number], value.start, value.stop))
            elif (kind, number) == ("Tensor", 4) and value.stop - value.start > SHAPE_BYTES:
                raise RequestError("a tensor with a shape of many dimensions: send one number for each token")


def _fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int | slice]]:
    """Yield (field number, varint or slice of the bytes) of the message at body[start:end]."""
    while start < end:
        tag, start = _varint(body, start, end)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, start = _varint(body, start, end)
            yield number, value
            continue
        if wire == 2:
            size, start = _varint(body, start, end)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise RequestError("the body is not a protobuf message of this service: send it again")
        if size > end - start:
            raise RequestError("the body ends within a field: send it again, whole")
        yield number, slice(start, start + size)
        start += size


def _varint(body: bytes, start: int, end: int) -> tuple[int, int]:
    """Return (value, index after it)."""
    value = 0
    for index in range(start, min(end, start + 10)):
        byte = body[index]
        value |= (byte & 0x7F) << 7 * (index - start)
        if byte < 0x80:
            return value & (2**64 - 1), index + 1
    raise RequestError("the body ends within a number, or is not a protobuf message: send it again, whole")


def decode_forward_backward(body: bytes) -> messages.ForwardBackward:
    """Parse a training request.

    Raises:
        RequestError: the message is damaged, or has inputs that this service does not take; the error names the datum.
    """
    parsed = schema_pb2.ForwardBackwardRequest()
    try:
        parsed.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not a protobuf message of this service ({error}): send it again") from error
    return messages.ForwardBackward(
        model_id=parsed.model_id,
        seq_id=parsed.seq_id,
        data=tuple(_datum(index, datum) for index, datum in enumerate(parsed.data)),
        loss_fn=parsed.loss_fn,
        loss_config=_loss_config(parsed),
        forward_only=parsed.forward_only,
    )


def _fill(tensor: Any, given: np.ndarray | messages.SparseMatrix) -> None:
    """Write an int64 or float32 tensor, dense or as compressed rows (CSR)."""
    values = given.values if isinstance(given, messages.SparseMatrix) else given
    tensor.dtype = INT64 if values.dtype.kind in "iu" else FLOAT32
    data = np.ascontiguousarray(values, DTYPES[tensor.dtype]).tobytes()
    if isinstance(given, messages.SparseMatrix) and not given.is_dense:
        rows, columns = np.divmod(given.keys, max(given.shape[1], 1))
        ends = np.searchsorted(rows, np.arange(given.shape[0] + 1)).astype("<i8")
        tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = ends.tobytes(), columns.tobytes()
        tensor.sparse_csr.values = data
    else:
        tensor.dense = data
    tensor.shape.extend(given.shape)


def _loss_config(parsed: Any) -> Mapping[str, float | str]:
    """Read the settings of a loss. Floats are in both fields; strings are in `loss_fn_config_v2` only."""
    if not parsed.loss_fn_config_v2:
        return {entry.key: entry.value for entry in parsed.loss_fn_config}
    settings: dict[str, float | str] = {}
    for entry in parsed.loss_fn_config_v2:
        kind = entry.value.WhichOneof("kind")
        if kind is None:
            raise RequestError(f"loss_fn_config {entry.key!r}: neither a number nor a text")
        settings[entry.key] = entry.value.number if kind == "number" else entry.value.text
    return settings


def _datum(index: int, parsed: Any) -> messages.Datum:
    try:
        chunks = tuple(_chunk(chunk) for chunk in parsed.model_input)
        inputs = {entry.key: _tensor(entry.key, entry.value) for entry in parsed.loss_fn_inputs}
    except RequestError as error:
        raise RequestError(f"datum {index}: {error}") from error
    return messages.Datum(chunks=chunks, inputs=inputs)


def _chunk(parsed: Any) -> messages.Chunk:
    kind = parsed.WhichOneof("kind")
    if kind == "encoded_text":
        return messages.TextChunk(tokens=_array("tokens", parsed.encoded_text.tokens, "<i4"))
    if kind == "image":
        image = parsed.image
        if image.HasField("dimensions"):
            raise RequestError("an image with override_dimensions: the model's image processor decides its size")
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return messages.ImageChunk(data=image.data, format=image.format, expected_tokens=expected)
    if kind == "dmel":
        raise RequestError("a dmel chunk: this service takes text and images, no audio")
    raise RequestError("a chunk of an unknown kind: this service takes text and images")


def _tensor(name: str, parsed: Any) -> np.ndarray | messages.SparseMatrix:
    """Read a tensor; bfloat16 becomes float32. Without a shape it has one dimension."""
    if parsed.dtype not in DTYPES:
        raise RequestError(f"{name}: dtype {parsed.dtype}; send float32 or int64")
    is_sparse = parsed.WhichOneof("kind") == "sparse_csr"
    values = _array(name, parsed.sparse_csr.values if is_sparse else parsed.dense, DTYPES[parsed.dtype])
    if parsed.dtype == BFLOAT16:
        values = (values.astype("<u4") << 16).view("<f4")
    shape = tuple(parsed.shape) or (len(values),)
    if is_sparse:
        ends = _array(name, parsed.sparse_csr.crow_indices, "<i8")
        return messages.SparseMatrix.of_rows(
            name, ends, _array(name, parsed.sparse_csr.col_indices, "<i8"), values, shape
        )
    if len(shape) > 2:  # thousands would be multiplied for minutes, and numpy has at most 64
        raise RequestError(f"{name}: a shape of {len(shape)} dimensions; send [tokens], or [tokens, K]")
    if min(shape) < 0 or prod(shape) != len(values):
        raise RequestError(f"{name}: {len(values)} numbers, but shape {list(shape)}")
    return values.reshape(shape)


def _array(name: str, data: bytes, dtype: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise RequestError(f"{name}: {len(data)} bytes are no whole number of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype=dtype)


# ---------------------------------------------------------------------- results in protobuf


def encode_result(result: messages.ForwardBackwardResult | messages.SampleResult) -> bytes:
    """Encode the result of a training or sampling request."""
    if isinstance(result, messages.ForwardBackwardResult):
        return _output(result)
    response = schema_pb2.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        added = response.sequences.add(stop_reason=STOP_REASONS[sequence.stop_reason])
        added.tokens = np.asarray(sequence.tokens, dtype="<i4").tobytes()
        added.logprobs = np.asarray(sequence.logprobs, dtype="<f4").tobytes()
        if sequence.top is not None:
            _fill_top(added.topk_sampled_logprobs, sequence.top)
    if (scores := result.scores) is not None:
        response.prompt_logprobs = np.asarray(scores.logprobs, dtype="<f4").tobytes()
        if scores.top.ids.size:
            _fill_top(response.topk_prompt_logprobs, scores.top)
        if scores.targets is not None:
            _fill(response.target_prompt_logprobs, scores.targets)
        if scores.drawn is not None:
            _fill(response.prompt_alt_tokens.tokens, scores.drawn.ids)
            _fill(response.prompt_alt_tokens.logprobs, scores.drawn.logprobs)
    return response.SerializeToString()


def _fill_top(message: Any, top: messages.TopTokens) -> None:
    known = np.isfinite(top.logprobs)
    message.length, message.k = known.shape
    message.token_ids = np.where(known, top.ids, 0).astype("<i4").tobytes()
    message.logprobs = np.where(known, top.logprobs, NO_LOGPROB).astype("<f4").tobytes()


def _output(result: messages.ForwardBackwardResult) -> bytes:
    output = schema_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, group in groupby(result.logprobs, lambda logprobs: logprobs.shape[1:]):  # one record has one shape
        pieces = [np.ascontiguousarray(logprobs, dtype="<f4") for logprobs in group]
        record = output.loss_fn_outputs.add(num_datums=len(pieces))
        tensor = record.fields.add(key="logprobs").value
        tensor.data = b"".join(piece.tobytes() for piece in pieces)
        tensor.offsets = np.cumsum([0, *(piece.nbytes for piece in pieces)]).astype("<i8").tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(trailing)
    for name, value in sorted(result.metrics.items()):
        output.metrics.add(key=name, value=value)
    return output.SerializeToString()
