"""The model-step service: packed training steps and sampling behind the Tinker API."""

from __future__ import annotations
