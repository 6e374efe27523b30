"""`import vlmpack.data` costs nothing, and asking for a name loads that name's file alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vlmpack.data

HEAVY = ("transformers", "datasets", "torch", "PIL", "pyarrow")


def loaded_by(code: str) -> set[str]:
    """Which heavy libraries a fresh interpreter has loaded after `code`."""
    report = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_room_loads_nothing_heavy() -> None:
    assert loaded_by("import vlmpack.data") == set()


def test_conversations_and_metrics_load_nothing_heavy() -> None:
    assert loaded_by("from vlmpack.data import json2token, token2json, to_conversation, field_f1") == set()


def test_receipts_load_pillow_alone() -> None:
    assert loaded_by("from vlmpack.data import load_cord\nload_cord(num=1, scale=0.25)[0]") == {"PIL"}


def test_the_check_can_fail() -> None:
    assert loaded_by("import vlmpack.data, PIL") == {"PIL"}


def test_every_public_name_is_there() -> None:
    assert len(vlmpack.data.__all__) > 10
    assert sorted(vlmpack.data.__all__) == dir(vlmpack.data)
    for name in vlmpack.data.__all__:
        assert callable(vlmpack.data.__getattr__(name)), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'vlmpack.data' has no attribute 'load_chord'"):
        vlmpack.data.load_chord  # noqa: B018
