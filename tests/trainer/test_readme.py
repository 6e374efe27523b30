"""The examples in the room's README do what they say, in the order in which a reader meets them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "vlmpack" / "trainer" / "README.md"


def test_the_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(README), "exec"), names)
