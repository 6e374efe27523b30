"""Decode bodies into requests, and encode outcomes into bodies.

JSON follows the annotations in `messages`; protobuf.py handles protobuf.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlmpack.errors import RequestError
from vlmpack.service.wire import messages, protobuf
from vlmpack.service.wire.fields import Count, get, parse, read_object, shown

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
        return protobuf.decode_forward_backward(body)
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
        return messages.Reply(content_type=PROTOBUF, body=protobuf.encode_result(outcome))
    if isinstance(outcome, messages.Failure):
        outcome = {"error": outcome.message, "category": outcome.category}
    return messages.Reply(content_type=JSON, body=to_json(outcome))


def to_json(value: Mapping[str, Any]) -> bytes:
    """Encode an object."""
    return json.dumps(value, allow_nan=False).encode("utf-8")
