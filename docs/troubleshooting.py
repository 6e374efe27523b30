"""The page of every message of the package, read off its sources, so that none is missing."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "vlmpack"


class Message(NamedTuple):
    """One place of the package that refuses something."""

    kind: str
    """Class of the error, or "Refusal"."""
    reason: str
    """The reason in the log of skipped samples; empty for other errors."""
    text: str
    """The message, with … where values stand."""
    room: str
    """The room that it comes from."""


ERRORS = ("SampleError", "LayoutError", "BackendError", "FamilyError", "ConfigError", "RequestError")
REFUSALS = ("Refusal", "ImageError")
"""Those of one sample or image, with a reason."""


def messages() -> Iterator[Message]:
    """Read every message off the sources, so that none is missing."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    returned = {name: text for tree in trees.values() for name, text in _returned(tree).items()}
    for path, tree in trees.items():
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "vlmpack"
        texts = returned | _assigned(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in REFUSALS and len(node.args) > 1:
                reason, text = node.args[:2] if name == "Refusal" else node.args[1::-1]
                yield Message(name, _text(reason, texts), _text(text, texts), room)
            elif name in ERRORS and node.args:
                reason = next((_text(word.value, texts) for word in node.keywords if word.arg == "reason"), "")
                yield Message(name, reason, _text(node.args[0], texts), room)
            elif name == "require" and len(node.args) > 2 and isinstance(node.args[2], ast.Name):
                yield Message(node.args[2].id, "", _text(node.args[1], texts), room)


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Texts that have a name: constants of the file and variables of its functions."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_text(node.value)]
    return {target.id: node.value for node in nodes for target in node.targets if isinstance(target, ast.Name)}


def _returned(tree: ast.Module) -> dict[str, ast.expr]:
    """Texts that functions return, by the names of the functions."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    last = {function.name: function.body[-1] for function in functions}
    values = {name: node.value for name, node in last.items() if isinstance(node, ast.Return) and node.value}
    return {f"{name}()": value for name, value in values.items() if _is_text(value)}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.expr, names: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        value = node.value
        return _text(names[value.id], {}) if isinstance(value, ast.Name) and value.id in names else "…"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names) + _text(node.right, names)
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and f"{node.func.id}()" in names:
        return _text(names[f"{node.func.id}()"], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{[^}]*\}", "…", _text(node.func.value, names))
    return "…"


_HEADINGS = {
    "SampleError": "One sample cannot be used. `index`, `sample_id` and `reason` name it.",
    "LayoutError": "A batch or a row contradicts itself.",
    "BackendError": "No attention back-end can serve the call.",
    "FamilyError": "The model, or its processor, is of no family that is packed exactly.",
    "ConfigError": "Settings contradict each other, or the trainer around them.",
    "RequestError": "A client of the step service asked for what cannot be done.",
}


OF_TRANSFORMERS = {
    "Image features and image tokens do not match, tokens: …, features: …": (
        "A row whose samples share prefixes has each shared image once, and it reached a model without packing: "
        "`enable_packing(model)`, or a collator without `share_prefixes=True`. Every other packed row is refused by a "
        "message of the package; of this one the model's code compares its images first."
    ),
}
"""Messages that transformers raises of our rows before anything of ours runs, and what they mean."""


def troubleshooting() -> str:
    """The page of all messages."""
    found = [message for message in messages() if message.text.strip("… ")]
    lines = [
        "# Troubleshooting",
        "",
        "Every message of the package, read off its sources: search this page for the part of yours that has no "
        "numbers. … stands for a value. Each message names what was seen and what to do.",
        "",
        "## Reasons for which a sample is refused",
        "",
        'The collator raises a `SampleError` with the reason. With `on_bad="skip"` it writes the reason to the log of '
        "skipped samples: [bad input](bad_input.md).",
        "",
        *_table(["Reason", "Message"], {(f"`{m.reason}`", _cell(m.text)) for m in found if m.reason not in ("", "…")}),
    ]
    for kind, heading in _HEADINGS.items():
        rows = {(_cell(m.text), f"[{m.room}]({_inside(m.room)})") for m in found if m.kind == kind and not m.reason}
        if rows:
            lines += [f"## {kind}", "", heading, "", *_table(["Message", "Room"], rows)]
    lines += ["## Messages of transformers", "", "What they mean where a packed row is the cause.", ""]
    lines += _table(["Message", "Meaning and remedy"], {(_cell(text), why) for text, why in OF_TRANSFORMERS.items()})
    return "\n".join(lines)


def _inside(room: str) -> str:
    return f"inside/{room}.md" if (PACKAGE / room).is_dir() else "reference/vlmpack.md"


def _table(head: list[str], rows: set[tuple[str, str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---|---|", *(f"| {' | '.join(row)} |" for row in sorted(rows)), ""]


def _cell(text: str) -> str:
    escaped = re.sub(r"([|*_\[\]`])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
    return re.sub(r"…[…\s]*…", "…", escaped)
