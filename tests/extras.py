"""Packages that only extras of vlmpack bring: a test file that imports one is skipped by its name where it is missing.

So a machine with PyTorch, transformers and pytest alone, such as one with a GPU, runs every test that it can.
"""

from __future__ import annotations

from typing import Any

import pytest

EXTRAS = frozenset(
    {
        *("accelerate", "apted", "av", "datasets", "google", "httpx", "ipykernel", "jupyter_client"),
        *("matplotlib", "megatron", "nbclient", "nbformat", "peft", "pyarrow", "qwen_vl_utils", "rapidfuzz", "ray"),
        *("starlette", "tinker", "torchdata", "trl", "uvicorn"),
    }
)
"""By the names under which they are imported."""


class TestFile(pytest.Module):
    """A test file. One that cannot be imported for any other reason is an error, as ever."""

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
