"""Convert CORD v2 receipts to conversations, and a model's output back to values.

    {"total": {"cashprice": "20,000"}, "menu": [{"nm": "Es Teh"}, {"nm": "Donut"}]}
        │ json2token                                        ▲ token2json
        ▼                                                   │
    <s_total><s_cashprice>20,000</s_cashprice></s_total><s_menu><s_nm>Es Teh</s_nm><sep/><s_nm>Donut</s_nm></s_menu>

A record is `{"image", "ground_truth"}`. The ground truth is JSON text whose `gt_parse` holds the values.
Source: Donut (`donut/model.py`: json2token, token2json). Keys are sorted descending, as in NeMo's CORD v2 adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from vlmpack.errors import SampleError

COLUMNS = ("image", "ground_truth")
SEPARATOR = "<sep/>"
DEEPEST = 64
"""Nesting beyond which `token2json` keeps text unparsed. No receipt is this deep; a broken model's output may be."""


def json2token(obj: Any, *, sort_keys_descending: bool = True) -> str:
    """Convert nested values to a string of tags.

    A dict becomes ``<s_key>value</s_key>`` for each key, a list its items joined by ``<sep/>``, any other value its
    `str()`. A dict with the single key ``text_sequence`` becomes that text.

    Args:
        obj: dicts, lists and plain values, nested to any depth.
        sort_keys_descending: the order of NeMo's adapters and Donut's default; False keeps the order of the dict.
    """
    if isinstance(obj, Mapping):
        if list(obj) == ["text_sequence"]:
            return str(obj["text_sequence"])
        keys = sorted(obj, reverse=True) if sort_keys_descending else list(obj)
        inner = partial(json2token, sort_keys_descending=sort_keys_descending)
        return "".join(f"<s_{key}>{inner(obj[key])}</s_{key}>" for key in keys)
    if isinstance(obj, list):
        return SEPARATOR.join(json2token(item, sort_keys_descending=sort_keys_descending) for item in obj)
    return str(obj)


def token2json(text: str) -> dict[str, Any] | list[dict[str, Any]]:
    """Parse a string of tags: the inverse of `json2token`, and tolerant of a model's mistakes.

    Information that tags cannot express is lost: numbers come back as strings, a list of one item as that item, an
    empty dict or list as ``""``, and white space around values is stripped. Text without tags becomes
    ``{"text_sequence": text}``. A value that itself contains such tags cannot be restored.

    Text whose tags do not balance is parsed as in Donut: a tag ends at the first end tag of its name, an opening tag
    without an end tag is ignored, and text between tags is skipped. There are two differences from Donut: values may
    contain line breaks, and a key may occur inside itself.
    """
    items = _read_items(text, depth=0)
    return items if len(items) > 1 else next(iter(items), {"text_sequence": text.strip()})


def to_conversation(
    record: Mapping[str, Any], *, prompt: str = "Describe this image.", index: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Convert a CORD record to NeMo's training conversation: the user gives image and prompt, the assistant tags.

    If there are several parses (`gt_parses`, as in question-answering sets), the first one is used, not a random one: a
    global random choice would differ between ranks and after a restart.

    Do not use this with `datasets.Dataset.map`, which stores its results and loses images inside messages: see
    docs/data.md.

    Args:
        record: `{"image": PIL image, "ground_truth": JSON string}`, as `datasets` reads it.
        prompt: the user's text.
        index: the record's index, for error messages.

    Raises:
        SampleError: a column is missing, or the ground truth cannot be read or holds neither `gt_parse` nor
            `gt_parses`.
    """
    answer = [{"type": "text", "text": json2token(parse_of(record, index=index))}]
    question = [{"type": "image", "image": record["image"]}, {"type": "text", "text": prompt}]
    turns = {"user": question, "assistant": answer}
    return {"conversation": [{"role": role, "content": content} for role, content in turns.items()]}


def parse_of(record: Mapping[str, Any], *, index: int = 0) -> dict[str, Any]:
    """Return the nested values in a record's `ground_truth`: its `gt_parse`, or the first of its `gt_parses`.

    Raises:
        SampleError: the record has no image, or its ground truth holds something else.
    """
    if missing := [name for name in COLUMNS if record.get(name) is None]:
        fault = f"the record has no {' and '.join(missing)} (it has {', '.join(map(str, record)) or 'nothing'}); a CORD"
        raise SampleError(f"{fault} record has an image and a ground_truth", index=index, reason="missing_column")
    truth = record["ground_truth"]
    try:
        parsed = json.loads(truth)
    except (ValueError, TypeError):
        parsed = None
    if not isinstance(parsed, dict):
        raise SampleError(
            f"ground_truth is {truth!r:.40}; it must be a JSON string of a dict with 'gt_parse', as in CORD v2",
            index=index,
            reason="ground_truth_unreadable",
        )
    parses = parsed.get("gt_parses", [parsed.get("gt_parse")])
    if not isinstance(parses, list) or not parses or not isinstance(parses[0], dict):
        meta = parsed.get("meta")
        raise SampleError(
            f"ground_truth holds no parse (its keys: {', '.join(map(str, parsed)) or 'none'}); "
            "it needs 'gt_parse' (a dict) or 'gt_parses' (a list of dicts)",
            index=index,
            reason="ground_truth_without_parse",
            sample_id=meta.get("image_id") if isinstance(meta, dict) else None,
        )
    return parses[0]


def _read_items(text: str, depth: int) -> list[dict[str, Any]]:
    """Parse the dicts of a list joined by `<sep/>`; without a separator, return one dict."""
    items: list[dict[str, Any]] = [{}]
    text = text.strip()
    while opening := re.search(r"<s_(.*?)>", text, re.IGNORECASE):
        end = _end_of(text, opening)
        if end is None:
            text = text.replace(opening.group(), "").strip()
            continue
        value = _read_value(text[opening.end() : end.start()].strip(), depth + 1)
        if value is not None:
            items[-1][opening.group(1)] = value
        text = text[end.end() :].strip()
        if text.startswith(SEPARATOR):
            text = text.removeprefix(SEPARATOR).strip()
            items.append({})
    return [item for item in items if item]


def _read_value(content: str, depth: int) -> Any:
    """Parse a leaf's text, a list of texts, a dict or a list of dicts. None: the tags hold nothing."""
    if "<s_" in content and "</s_" in content and depth < DEEPEST:
        items = _read_items(content, depth)
        return (items if len(items) > 1 else items[0]) if items else None
    leaves = [leaf.strip() for leaf in content.split(SEPARATOR)]
    return leaves if len(leaves) > 1 else leaves[0]


def _end_of(text: str, opening: re.Match[str]) -> re.Match[str] | None:
    """Return the end tag that balances an opening tag, or else the first of its name; None: there is none."""
    tags = list(re.compile(rf"<(/?)s_{re.escape(opening.group(1))}>", re.IGNORECASE).finditer(text, opening.end()))
    level = 1
    for tag in tags:
        level += -1 if tag.group(1) else 1
        if level == 0:
            return tag
    return next((tag for tag in tags if tag.group(1)), None)
