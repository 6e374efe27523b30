"""What the tests of data share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with a cache of the test's own."""
    module = pytest.importorskip("datasets", reason="waits for the datasets library (extra [data])")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    module.disable_progress_bars()
    return module
