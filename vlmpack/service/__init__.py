"""The model-step service: packed training steps and sampling behind the Tinker API."""

from __future__ import annotations

from vlmpack.service.engine import Engine, EngineConfig
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import Datum, ForwardBackward, ImageChunk, LoraConfig, TextChunk
from vlmpack.service.processes import Launched, join
from vlmpack.service.protobuf import encode_forward_backward
from vlmpack.service.ranks import end
from vlmpack.service.server import (
    Base,
    Service,
    ServiceSettings,
    bind,
    check_key,
    check_state,
    follow_rank_0,
    load_base,
    read_key,
)

__all__ = [
    "Base",
    "Datum",
    "Engine",
    "EngineConfig",
    "ForwardBackward",
    "ImageChunk",
    "Launched",
    "LoraConfig",
    "Service",
    "ServiceLimits",
    "ServiceSettings",
    "TextChunk",
    "bind",
    "check_key",
    "check_state",
    "encode_forward_backward",
    "end",
    "follow_rank_0",
    "join",
    "load_base",
    "read_key",
]
