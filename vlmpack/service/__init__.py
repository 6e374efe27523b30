"""The model-step service: packed training steps and sampling behind the Tinker API."""

from __future__ import annotations

from vlmpack.service.checkpoints import StateFolder
from vlmpack.service.engine import Engine, EngineConfig
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import Datum, ForwardBackward, ImageChunk, LoraConfig, TextChunk
from vlmpack.service.server import Base, Service, ServiceSettings, bind

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
    "StateFolder",
    "TextChunk",
    "bind",
]
