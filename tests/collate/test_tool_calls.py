"""Tools and their calls in every form that people have: each sample is what transformers makes of the plain one.

The template writes calls and tools by `tojson`, as Llama 3.1's does: text would be quoted again, and keys that are None
would be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import says, text, user

from vlmpack.collate import VLMCollator
from vlmpack.data import open_dataset
from vlmpack.errors import SampleError
from vlmpack.testing import tiny_processor

TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}"
    "{%- for call in message.tool_calls or [] -%}{{- '[' + call.function | tojson + ']' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
PROCESSOR = tiny_processor(chat_template=TEMPLATE)
COLLATOR = VLMCollator(PROCESSOR, layout="packed")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": "-", "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASK, ANSWER = user("How much?"), says("It is 5.")
TOOLS = [tool("price", item={"type": "string", "enum": ["tea", "rice"]}), tool("now")]
CALLS = [call("price", item="tea"), call("now")]
MESSAGES = [
    ASK,
    says("", tool_calls=CALLS),
    {"role": "tool", "content": "5"},
    {"role": "tool", "content": "noon"},
    ANSWER,
]
ROW = {"messages": MESSAGES, "tools": TOOLS}
OTHER = {
    "messages": [ASK, says("", tool_calls=[call("move", by=[1, 2], far={"x": 1})])],
    "tools": [tool("move", by={"type": "array", "items": {"type": "integer"}}, far={"type": "object"})],
}
OPENAI = [
    {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}} for each in CALLS
]
TEXTS = [json.dumps(each["function"]) for each in CALLS]


def turns(calling: str, returning: str, role: str, content: str, texts: list[str]) -> list[dict[str, str]]:
    said = [("user", "How much?"), *((calling, text) for text in texts)]
    said += [(returning, "5"), (returning, "noon"), ("assistant", "It is 5.")]
    return [{role: who, content: text} for who, text in said]


LLAMA_FACTORY = turns("function_call", "observation", "from", "value", [json.dumps([json.loads(t) for t in TEXTS])])
SWIFT = turns("tool_call", "tool_response", "role", "content", TEXTS)


def from_arrow(_: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list([ROW, OTHER])[0]


def from_parquet(folder: Path) -> Any:
    pytest.importorskip("datasets").Dataset.from_list([ROW, OTHER]).to_parquet(str(folder / "rows.parquet"))
    return open_dataset(folder / "rows.parquet")[0]


def opened(folder: Path, *, is_described: bool) -> Any:
    (folder / "data.json").write_text(json.dumps([{"conversations": LLAMA_FACTORY, "tools": json.dumps(TOOLS)}]))
    (folder / "dataset_info.json").write_text(
        json.dumps(
            {
                "x": {
                    "file_name": "data.json",
                    "formatting": "sharegpt",
                    "tags": {"user_tag": "user", "assistant_tag": "assistant"},
                }
            }
        )
    )
    return open_dataset(folder / "data.json", columns=folder / "dataset_info.json" if is_described else None)[0]


FORMS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda _: ROW,
    "datasets.Dataset": from_arrow,
    "parquet": from_parquet,
    "OpenAI": lambda _: {"messages": [ASK, {**MESSAGES[1], "tool_calls": OPENAI}, *MESSAGES[2:]], "tools": TOOLS},
    "calls as text": lambda _: {
        "messages": [ASK, {**MESSAGES[1], "tool_calls": json.dumps(OPENAI)}, *MESSAGES[2:]],
        "tools": TOOLS,
    },
    "tools as text": lambda _: {**ROW, "tools": json.dumps(TOOLS)},
    "each tool as text": lambda _: {**ROW, "tools": [json.dumps(tool) for tool in TOOLS]},
    "LLaMA-Factory": lambda _: {"conversations": LLAMA_FACTORY, "tools": json.dumps(TOOLS)},
    "its file": lambda folder: opened(folder, is_described=False),
    "its file, described": lambda folder: opened(folder, is_described=True),
    "ms-swift": lambda _: {"messages": SWIFT, "tools": json.dumps(TOOLS)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_is_what_transformers_makes_of_the_plain_one(form: str, tmp_path: Path) -> None:
    plain = PROCESSOR.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert PROCESSOR.tokenizer.decode(COLLATOR.collate([FORMS[form](tmp_path)]).input_ids[0]) == plain


@pytest.mark.parametrize("tools", ["", " ", "[]", [], None])
def test_no_tools_are_none(tools: Any) -> None:
    rows = [{"messages": [ASK, ANSWER], **columns} for columns in ({}, {"tools": tools})]
    one, other = (COLLATOR.collate([row]).input_ids for row in rows)
    assert torch.equal(one, other)


def test_a_call_joins_what_was_said_before_it() -> None:
    said = [ASK, says("Let me see."), {"role": "tool_call", "content": TEXTS[0]}]
    plain = [ASK, says("Let me see.", tool_calls=CALLS[:1])]
    ids = COLLATOR.collate([{"messages": said}]).input_ids[0]
    assert PROCESSOR.tokenizer.decode(ids) == PROCESSOR.apply_chat_template(plain, tokenize=False)


NULL = '{"name": "price", "arguments": {"item": null}}'


@pytest.mark.parametrize(
    "said",
    [
        [says("", tool_calls=[{"function": {"name": "price", "arguments": '{"item": null}'}}])],
        [{"role": "tool_call", "content": NULL}, {"role": "tool_call", "content": TEXTS[1]}],
        [says([{"type": "tool_call", "value": NULL}])],
    ],
    ids=["arguments", "turns", "a part"],
)
def test_a_null_that_json_text_holds_is_kept(said: list[dict[str, Any]]) -> None:
    text = PROCESSOR.tokenizer.decode(COLLATOR.collate([{"messages": [ASK, *said]}]).input_ids[0])
    assert '"arguments": {"item": null}' in text


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "arguments": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "tea"}}]}]},
        "arguments of a tool call that are no JSON: 'tea'",
    ),
    "arguments that are a list": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        r"arguments of a tool call that are the JSON of no object: '\[1\]'",
    ),
    "a call": ({"messages": [ASK, {"role": "tool_call", "content": "price of tea"}]}, "a function call that is no"),
    "no call": ({"messages": [ASK, {"role": "tool_call", "content": "[]"}]}, "a function call that is no JSON of a"),
    "a medium in a call": (
        {"messages": [ASK, {"role": "tool_call", "content": [{"type": "image"}, text(TEXTS[0])]}]},
        "a function call with a part of type 'image'; a call is JSON text",
    ),
    "tools": ({"messages": [ASK, ANSWER], "tools": "price, now"}, "it has tools that are no JSON: 'price"),
    "tools that are a number": (
        {"messages": [ASK, ANSWER], "tools": "5"},
        "it has tools that are no list, and no JSON",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_json_is_refused(name: str) -> None:
    row, message = BAD[name]
    with pytest.raises(SampleError, match=message) as seen:
        COLLATOR.collate([row])
    assert seen.value.reason == "bad_row"
