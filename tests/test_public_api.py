"""The public API: which names there are, and what asking for them costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args, get_type_hints

import pytest

import vlmpack

PUBLIC = [
    "PackedBatchSampler",
    "PackedRow",
    "PackedStep",
    "PackedStream",
    "PackedTrainer",
    "PaddedBatch",
    "Plan",
    "Segments",
    "SlotRule",
    "StepConfig",
    "StepResult",
    "ThdStep",
    "VLMCollator",
    "VlmpackError",
    "compile_layers",
    "disable_packing",
    "enable_packing",
    "pack",
    "plan_bins",
    "probe",
    "unpack",
]

HEAVY = {"transformers", "datasets", "accelerate", "peft", "matplotlib", "torchvision", "qwen_vl_utils"}


def test_the_public_names_are_these_and_no_others() -> None:
    assert vlmpack.__all__ == PUBLIC
    assert dir(vlmpack) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads_and_is_the_one_its_module_has(name: str) -> None:
    public = vars(vlmpack).get(name) or vlmpack.__getattr__(name)
    home = sys.modules[public.__module__]
    assert public.__module__.startswith("vlmpack.")
    assert vars(home)[name] is public


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_public_name_takes_is_exported_by_a_package(name: str) -> None:
    public = vlmpack.__getattr__(name)
    parameters = public.__init__ if inspect.isclass(public) else public
    hints = get_type_hints(parameters)
    ours = {kind for parameter, hint in hints.items() if parameter != "return" for kind in _ours(hint)}
    packages = {kind: import_module(".".join(kind.__module__.split(".")[:2])) for kind in ours}
    private = {kind.__name__ for kind, package in packages.items() if vars(package).get(kind.__name__) is not kind}
    assert private == set()


def _ours(hint: Any) -> Iterator[type]:
    """The classes of vlmpack in a type."""
    if inspect.isclass(hint) and hint.__module__.startswith("vlmpack."):
        yield hint
    for part in get_args(hint):
        yield from _ours(part)


def test_a_name_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Packer'; it has PackedBatchSampler, .*, unpack"):
        vlmpack.__getattr__("Packer")


def test_importing_vlmpack_brings_no_torch_and_layout_planning_and_streams_no_transformers() -> None:
    light = "PaddedBatch, PackedRow, Segments, SlotRule, pack, unpack, PackedBatchSampler, PackedStream, plan_bins"
    code = f"import sys, vlmpack; print('torch' in sys.modules); from vlmpack import {light}; "
    code += f"print(*{HEAVY} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
