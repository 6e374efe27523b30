"""Shared helpers live beside this file as plain modules: `from samples import mixed_samples`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
