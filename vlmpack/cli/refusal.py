"""What the library says of its arguments, said of the options of a verb: `on_bad='skip'` is `--on-bad skip`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

OTHER_NAMES = {"multiple": "pad_seq_to_mult"}
"""Arguments whose option has another name: argument -> the option's name in Python."""
STATED = ("num", "attention")
"""Arguments of which the library says `name is value`, too. Of others that is a sentence: "the row is 48 tokens"."""

_VALUE = r"'[^']*'|[\w+-]+(?:\.\d+)?"

Say = Callable[[str], str]


def in_options(command: Any) -> Say:
    """A function that translates the library's messages for a verb, whose options alone it knows.

    Translated are `name=value`, `name=`, and a name by itself if it has an underscore, for which no word is mistaken.

    Args:
        command: what typer made of the verb.
    """
    options = _options(command)

    def option(match: re.Match[str]) -> str:
        found, value = match.groupdict(), match["value"] or match["stated_value"]
        name = options[next(found[group] for group in ("name", "stated", "alone") if found[group])]
        return name if value is None else f"{name} {shlex.quote(value.strip(chr(39)))}"

    pattern = re.compile(
        r"(?<![\w./-])(?:the processor's )?(?:"
        rf"{_one_of(options, 'name')}=(?P<value>{_VALUE})?"
        rf"|{_one_of([name for name in STATED if name in options], 'stated')} is (?=['0-9])(?P<stated_value>{_VALUE})"
        rf"|{_one_of([name for name in options if '_' in name], 'alone')}(?![\w./=]))"
    )
    return lambda message: pattern.sub(option, message)


def _one_of(names: Any, group: str) -> str:
    """A group of one of these names; of none, one that nothing matches."""
    return rf"(?P<{group}>{'|'.join(names) or '(?!)'})"


def _options(command: Any) -> dict[str, str]:
    """Argument of the library -> option of the verb, of those that take a value."""
    named = [param for param in command.params if param.opts[0].startswith("--") and not param.is_flag]
    own = {param.name: param.opts[0] for param in named}
    return own | {name: own[other] for name, other in OTHER_NAMES.items() if other in own}
