"""The model-step service: packed training steps and sampling behind the Tinker API."""

from __future__ import annotations

from vlmpack.service.engine.engine import Engine, EngineConfig
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.sampling.samplers import open_sampler
from vlmpack.service.server import Base, Service, ServiceSettings, bind
from vlmpack.service.wire.messages import Datum, ForwardBackward, ImageChunk, LoraConfig, TextChunk

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
    "open_sampler",
]
