"""The model-step service: packed training steps and sampling behind the Tinker API."""

from __future__ import annotations

from vlmpack.service.distributed import join, launch
from vlmpack.service.engine import Engine, EngineConfig
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import Datum, ForwardBackward, ImageChunk, LoraConfig, TextChunk
from vlmpack.service.server import (
    Base,
    Service,
    ServiceSettings,
    bind,
    check_key,
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
    "LoraConfig",
    "Service",
    "ServiceLimits",
    "ServiceSettings",
    "TextChunk",
    "bind",
    "check_key",
    "follow_rank_0",
    "join",
    "launch",
    "load_base",
    "read_key",
]
