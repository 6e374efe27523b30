"""The model-step service: packed training steps and sampling behind the Tinker API."""

from __future__ import annotations

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.server import Base, Service, ServiceSettings, bind, check_key, load_base, read_key

__all__ = ["Base", "Service", "ServiceLimits", "ServiceSettings", "bind", "check_key", "load_base", "read_key"]
