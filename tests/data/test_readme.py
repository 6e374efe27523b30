"""The example in the room's README does what it says."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "vlmpack" / "data" / "README.md"


def test_the_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
