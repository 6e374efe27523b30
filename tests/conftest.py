"""What every test may rely on: one thread, no hub, no network, the same random numbers in every run.

Shared helpers are plain modules beside this file: `from chats import processor_of`.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read once, when these libraries are first imported: so before anything imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two threads on busy cores would spin

import hypothesis
import pytest
import torch
from torch._dynamo.utils import counters
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

sys.path.insert(0, str(Path(__file__).parent))

import pretend_cuda
from fixtures.processors import MissingPackageError

hypothesis.settings.register_profile(
    "vlmpack",
    deadline=None,  # a shared machine is slow now and then, and that is no fault of the example
    max_examples=50,
    derandomize=True,  # the same examples in every run; HYPOTHESIS_PROFILE=search looks for new ones
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("search", hypothesis.settings.get_profile("vlmpack"), derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "vlmpack"))

# transformers 5.24.0 cannot run Llama 4 with images: it reads this of its text part's output, which has no such thing.
MoeCausalLMOutputWithPast.image_outputs = MoeModelOutputWithPast.image_outputs = None

torch.set_num_threads(1)  # pytest-xdist runs one worker a core
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # s that a loader which is garbage waits for each of its workers
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
NO_PRETEND_CUDA = pretend_cuda.missing()
EXTRAS = frozenset(
    {
        *("accelerate", "apted", "av", "datasets", "google", "httpx", "ipykernel", "jupyter_client"),
        *("matplotlib", "megatron", "nbclient", "nbformat", "peft", "pyarrow", "qwen_vl_utils", "rapidfuzz", "ray"),
        *("starlette", "tinker", "torchdata", "trl", "uvicorn"),
    }
)
"""Modules of packages that only extras install. Test files that import a missing one are skipped."""


class TestFile(pytest.Module):
    """A test file. One that cannot be imported for another reason is an error."""

    def _getobj(self) -> Any:
        from vlmpack.errors import ConfigError  # not above: who breaks a copy of the package comes by here first

        try:
            return super()._getobj()
        except self.CollectError as error:
            cause = error.__cause__
            package = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
            if package not in EXTRAS:
                raise
            needed = f"needs the package {package}"
        except ConfigError as error:  # of a package of vlmpack that an extra serves
            if "not installed here" not in str(error):
                raise
            needed = str(error)
        return pytest.skip(needed, allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, tests marked `gpu` run on the pretend one."""
    if not torch.cuda.is_available() and not NO_PRETEND_CUDA:
        from pretend_cuda import child

        config.pluginmanager.register(child)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> TestFile:
    return TestFile.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that needs a GPU, or a family of another transformers, is skipped where there is none."""
    from vlmpack.families.registry import DESCRIBED, FAMILIES

    newer = {family.model_type for family in DESCRIBED} - FAMILIES.keys()

    for item in items:
        if item.get_closest_marker("gpu") and NO_PRETEND_CUDA and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=f"waits for a CUDA device; {NO_PRETEND_CUDA}"))
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for family in (value for value in parameters if isinstance(value, str)):
            if family in newer:
                item.add_marker(pytest.mark.skip(reason=f"{family} is no family of this transformers"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that makes a processor whose package is not installed is skipped, and no other test of its family."""
    try:
        return (yield)
    except MissingPackageError as error:
        pytest.skip(str(error))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collection, which took a third of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_old_garbage() -> Iterator[None]:
    """The same for what the tests of one file import and keep: each HF Trainer collects garbage when it starts."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed the CPU. (`torch.manual_seed` would note a stack trace for each device that is not there.)"""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def short_device_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse on every device what CUDA's assertion refuses: a message of 255 bytes, even when the condition holds."""
    assert_async = torch._assert_async

    def as_on_cuda(condition: torch.Tensor, message: str) -> None:
        assert len(message.encode()) < 255, f"CUDA refuses this message of {len(message.encode())} bytes: {message}"
        assert_async(condition, message)

    monkeypatch.setattr(torch, "_assert_async", as_on_cuda)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and nothing was counted."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def hide_package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hide a package: importing it fails, even if another test has imported it."""

    def hide(name: str) -> None:
        for module in [name, *(module for module in sys.modules if module.startswith(f"{name}."))]:
            monkeypatch.setitem(sys.modules, module, None)

    return hide


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that connects to another machine fails."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in THIS_MACHINE:
            raise AssertionError(f"a test tried to reach {address[0]}: the suite must run without a network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
