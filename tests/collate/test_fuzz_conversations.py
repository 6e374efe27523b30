"""Conversations by the hundred, valid and changed, in every format: right as the processor has it, or refused.

A *scene* says what a conversation is. It is written down in one of the formats (`WRITERS`), and then changed: not at
all or in ways that mean the same (`same`), or at random. The first must be what the processor itself makes of the
scene; the second, where it is accepted, must hold every turn and text of the row, train on what the assistant says and
nothing else, and have a run for every image. What is measured is what is collated.
"""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from chats import Frames, picture

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.testing import tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE

CASES = 400
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- if mood -%}{{- mood -}}{%- endif -%}"
    + CHAT_TEMPLATE.replace(
        "{%- if message['content'] is string -%}",
        "{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}"
        "{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}"
        "{%- if message['content'] is string -%}",
        1,
    )
)
TEXTS = (
    *("What is the total?", "2 + 2 = 4", "x", "Ä日本😀", "a\nb", "a  b\t.", "<b>bold</b>", "</s>", "{'a': 1}"),
    *("if x < 3 and y > 4:", "<|im_", "im_end|>", "assistant", "<|endoftext", "75,000 Rp.", "<bbox>", "a" * 70),
)
pytestmark = pytest.mark.filterwarnings("ignore:a user's text holds:UserWarning")  # words like <video> are meant
MARKED = ("<img src='a'/> or <image>?", "<video> tag", "the word <image> in <image>")
SIZES = ((28, 28), (61, 43), (32, 90))
RESERVED = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
JUNK = (
    *(None, 5, "", [], {}, ["x"], "text", True, float("nan"), b"x", -1),
    *({"type": "image"}, [[]], {"a": None}, "<image>"),
)
START, END = "<|im_start|>", "<|im_end|>"

Row = dict[str, Any]


@lru_cache
def processor_of(family: str) -> Any:
    return tiny_processor(family, chat_template=TEMPLATE)


@lru_cache
def picture_of(seed: int) -> Any:
    return picture(*SIZES[seed % len(SIZES)], seed=seed)


# ---------------------------------------------------------------------- scenes


class Scene:
    """Turns of parts: a text, an image (its seed), or a video (its seeds)."""

    def __init__(self, rng: random.Random) -> None:
        self.kind = rng.choice(("none", "image", "image", "video"))
        self.tools = [{"type": "function", "function": {"name": rng.choice("fgh")}}] * (rng.random() < 0.15)
        self.options = {"mood": "calm "} if rng.random() < 0.1 else {}
        self.turns: list[Row] = []
        texts = TEXTS if self.kind != "none" else (*TEXTS, *MARKED)
        if rng.random() < 0.2:
            self.turns.append({"role": "system", "parts": [rng.choice(texts)]})
        for _ in range(rng.randint(1, 3)):
            self.turns.append({"role": "user", "parts": self._parts(rng, texts)})
            answer: Row = {"role": "assistant", "parts": [rng.choice(texts)]}
            if rng.random() < 0.15:
                answer["reasoning_content"] = rng.choice(TEXTS)
            if rng.random() < 0.15:
                answer["tool_calls"] = [{"function": {"name": "f", "arguments": {"at": rng.choice(TEXTS)}}}]
            self.turns.append(answer)
        if self.kind == "video":  # one of them: that is what the stand-in for torchvision's processor can write
            first = next(turn for turn in self.turns if turn["role"] == "user")
            first["parts"].insert(0, [rng.randrange(3) * 3 for _ in range(rng.randint(1, 5))])

    def _parts(self, rng: random.Random, texts: tuple[str, ...]) -> list[Any]:
        images = [rng.randrange(9) for _ in range(rng.randint(0, 2))] if self.kind == "image" else []
        return rng.sample([*images, rng.choice(texts)], len(images) + 1)

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but turns of texts and media."""
        return not self.tools and not any(
            key in turn for turn in self.turns for key in ("reasoning_content", "tool_calls")
        )

    @property
    def images(self) -> list[int]:
        return [part for turn in self.turns for part in turn["parts"] if isinstance(part, int)]

    @property
    def video(self) -> list[int] | None:
        return next((part for turn in self.turns for part in turn["parts"] if isinstance(part, list)), None)

    def messages(self, of_part: Callable[[Any], Row] | None = None) -> list[Row]:
        """With holes for the media, or what `of_part` puts there."""
        rest = [{key: value for key, value in turn.items() if key != "parts"} for turn in self.turns]
        contents = [[self._part(part, of_part) for part in turn["parts"]] for turn in self.turns]
        return [{**turn, "content": content} for turn, content in zip(rest, contents, strict=True)]

    @staticmethod
    def _part(part: Any, of_part: Callable[[Any], Row] | None) -> Row:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return of_part(part) if of_part else {"type": "image" if isinstance(part, int) else "video"}

    def media(self) -> Row:
        images, video = self.images, self.video
        return {
            **({"images": [picture_of(seed) for seed in images]} if images else {}),
            **({"videos": [[picture_of(seed) for seed in video]]} if video else {}),
        }

    def settings(self) -> Row:
        return {
            **({"tools": self.tools} if self.tools else {}),
            **({"chat_template_kwargs": self.options} if self.options else {}),
        }


# ---------------------------------------------------------------------- how the processor writes it


def truth(processor: Any, scene: Scene, learnt: list[bool]) -> tuple[list[int], list[int], Any]:
    """(ids, labels, patches) of a scene by the processor's own call; labels by the places of turns in its text."""
    options = {**scene.options, **({"tools": scene.tools} if scene.tools else {})}
    text = processor.apply_chat_template(scene.messages(), tokenize=False, **options)
    patches = None
    if scene.video:
        frames = [picture_of(seed) for seed in scene.video]
        processor.video_processor = Frames(processor, frames)
        processed, replacements = processor._process_videos([np.stack([np.asarray(frame) for frame in frames])])
        (text,), _ = processor.get_text_with_replacements([text], videos_replacements=replacements)
        processor.video_processor, patches = None, processed["pixel_values_videos"]
    if not scene.images:
        ids = processor.tokenizer(text)["input_ids"]
        return ids, expected_labels(processor, text, ids, learnt), patches
    out = processor(text=text, images=[picture_of(seed) for seed in scene.images], return_tensors="pt")
    ids = out["input_ids"][0].tolist()
    return ids, expected_labels(processor, text, ids, learnt), out["pixel_values"]


def expected_labels(processor: Any, text: str, ids: list[int], learnt: list[bool]) -> list[int]:
    """The tokens that lie inside an answer, by their characters; a run of image tokens is one in the text."""
    found = re.finditer(re.escape(START) + r"assistant\n(.*?" + re.escape(END) + ")", text, re.DOTALL)
    spans = [match.span(1) for match, is_learnt in zip(found, learnt, strict=True) if is_learnt]
    short = processor.tokenizer(text, return_offsets_mapping=True)
    in_answer = [any(a <= start and stop <= b for a, b in spans) for start, stop in short["offset_mapping"]]
    image, places = processor.image_token_id, iter(zip(short["input_ids"], in_answer, strict=True))
    labels: list[int] = []
    for token, before in zip(ids, [None, *ids], strict=False):
        if not (token == image and before == image):
            at, is_learnt = next(places)
            assert at == token
        labels.append(token if is_learnt and token != image else -100)
    return labels


# ---------------------------------------------------------------------- how data sets write it


def trl(scene: Scene, _: random.Random) -> Row:
    return {"messages": scene.messages(), **scene.media(), **scene.settings()}


def texts(scene: Scene, _: random.Random) -> Row:
    """Messages of strings, with markers in the users' texts."""
    messages = [{**message, "content": marked(message["content"])} for message in scene.messages()]
    return {"messages": messages, **scene.media(), **scene.settings()}


def marked(content: list[Row]) -> str:
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def inline(scene: Scene, rng: random.Random) -> Row:
    def of_part(part: Any) -> Row:
        if isinstance(part, list):
            return {"type": "video", "video": [picture_of(seed) for seed in part]}
        return {"type": rng.choice(("image", "image_url")), rng.choice(("image", "path")): picture_of(part)}

    return {"conversation": scene.messages(of_part), **scene.settings()}


def sharegpt(scene: Scene, _: random.Random) -> Row | None:
    if not scene.is_plain or any(
        part != part.strip() for turn in scene.turns for part in turn["parts"] if isinstance(part, str)
    ):
        return None
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": marked(m["content"])} for m in scene.messages()]
    media = {name.removesuffix("s"): value for name, value in scene.media().items()}
    return {"conversations": turns, **media, **scene.settings()}


def prompt_completion(scene: Scene, _: random.Random) -> Row:
    *prompt, answer = scene.messages()
    return {"prompt": prompt, "completion": [answer], **scene.media(), **scene.settings()}


WRITERS = (trl, texts, inline, sharegpt, prompt_completion)


# ---------------------------------------------------------------------- changes


def same(row: Row, rng: random.Random) -> Row:
    """What means the same: keys of None, names, other names of roles, one text instead of a list of one."""
    names = ({}, {"id": "s 1"}, {"sample_id": 7}, {"tools": row.get("tools")}, {"videos": row.get("videos")})
    row = {**row, **rng.choice(names)}
    for turn in turns_of(row):
        if rng.random() < 0.3:
            turn.update({"tool_calls": turn.get("tool_calls"), "name": None})
        if rng.random() < 0.2 and turn.get("role") == "system":
            turn["role"] = "developer"
        content = turn.get("content")
        if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text" and rng.random() < 0.5:
            turn["content"] = rng.choice((content[0]["text"], [content[0]["text"]], content[0]))
        elif isinstance(content, list) and rng.random() < 0.3:
            turn["content"] = [{"text": None, **part} for part in content]
    return {
        name: value for name, value in row.items() if value is not None or (rng.random() < 0.5 and name not in MEDIA)
    }


MEDIA = ("image", "images", "video", "videos")


def turns_of(row: Row) -> list[Row]:
    """All turns, those of a prompt and its completion too."""
    names = ("messages", "conversation", "conversations", "prompt", "completion")
    return [turn for name in names for turn in row.get(name, [])]


def at_random(row: Row, rng: random.Random) -> None:
    """Change one to three places anywhere in the row."""
    for _ in range(rng.randint(1, 3)):
        holder: Any = row
        while True:
            places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not places:
                break
            place = rng.choice(places)
            if isinstance(holder[place], dict | list) and holder[place] and rng.random() < 0.75:
                holder = holder[place]
                continue
            change(holder, place, rng)
            break


def change(holder: Any, place: Any, rng: random.Random) -> None:
    action = rng.randrange(4)
    if action == 0:
        del holder[place]
    elif action == 1 or (isinstance(holder, dict) and action == 2):
        holder[place] = copy.copy(rng.choice(JUNK))
    elif isinstance(holder, dict):
        holder[rng.choice(("content", "role", "text", "type", "image", "images", "tools", "x", f"{place}s"))] = (
            holder.pop(place)
        )
    elif action == 2:
        holder.insert(place, holder[place])
    else:
        rng.shuffle(holder)


# ---------------------------------------------------------------------- what must hold


def check_equal(batch: Row, processor: Any, scene: Scene, row: Row) -> None:
    answers = [turn for turn in scene.turns if turn["role"] == "assistant"]
    learnt = [("prompt" not in row or turn is answers[-1]) for turn in answers]
    ids, labels, patches = truth(processor, scene, learnt)
    assert batch["input_ids"][0].tolist() == ids
    assert batch["labels"][0].tolist() == [-100, *labels[1:]]
    given = batch.get("pixel_values", batch.get("pixel_values_videos"))
    assert (given is None) == (patches is None)
    assert patches is None or torch.equal(given, patches)


def check_sound(batch: Row, processor: Any, row: Row) -> None:
    """Of a row that was changed at random, and accepted."""
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    text, tokens = processor.tokenizer.decode(ids), processor.tokenizer.convert_ids_to_tokens(ids)
    turns = turns_of(row)
    assert tokens.count(START) == len(turns) + bool(
        row.get("tools") or (row.get("chat_template_kwargs") or {}).get("tools")
    )
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
    assert labels[0] == -100
    assert any(label != -100 for label in labels)
    for at, token in enumerate(tokens):
        assert labels[at] == -100 or (is_answer(processor, ids, at) and token not in RESERVED[2:]), (at, token)
    for kind, token in (("image", processor.image_token), ("video", processor.video_token)):
        grids = batch.get(f"{kind}_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        assert tokens.count(token) == int(grids.prod(-1).sum()) // 4
    for said in said_in(turns):
        assert said in text, said


def is_answer(processor: Any, ids: list[int], at: int) -> bool:
    """Whether a token is of the assistant's turn, its end included, by its text."""
    turn = processor.tokenizer.decode(ids[: at + 1]).rsplit(START, 1)[-1]
    return turn.startswith("assistant\n") and END not in turn.removesuffix(END)


def said_in(turns: list[Row]) -> list[str]:
    """All that turns say, between the markers."""
    found = []
    for turn in turns:
        content = turn.get("content", turn.get("value", ""))
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            said = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            found += [piece.strip() for piece in re.split("<image>|<video>", said or "")]
    return found


# ---------------------------------------------------------------------- the run


def case(rng: random.Random) -> tuple[str, Scene, Row]:
    """How it was changed, what it was, and the row."""
    while True:
        scene = Scene(rng)
        row = rng.choice(WRITERS)(scene, rng)
        if row is not None:
            break
    row = {name: copy_nested(value) for name, value in row.items()}
    how = rng.choice(("same", "random"))
    if how == "same":
        return how, scene, same(row, rng)
    at_random(row, rng)
    return how, scene, row


def copy_nested(value: Any) -> Any:
    """A copy of all but the pictures."""
    if isinstance(value, dict):
        return {key: copy_nested(inner) for key, inner in value.items()}
    return [copy_nested(inner) for inner in value] if isinstance(value, list) else value


def judge(collator: VLMCollator, how: str, scene: Scene, row: Row) -> str:
    """What became of a case, which is as it must be."""
    try:
        batch = collator([row])
    except (SampleError, ConfigError) as error:
        assert str(error).startswith("sample 0")
        assert not isinstance(error, SampleError) or error.reason != "unexpected", error
        assert how != "same", error
        return f"refused ({how})"
    assert collator.measure(row).input_ids.tolist() == batch["input_ids"][0].tolist()
    if how == "same":
        check_equal(batch, collator.processor, scene, row)
    else:
        check_sound(batch, collator.processor, row)
    return f"accepted ({how})"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:samples have columns that nothing reads")
def test_every_conversation_is_what_the_processor_makes_of_it_or_is_refused() -> None:
    outcomes: Counter[str] = Counter()
    collators = [VLMCollator(processor_of(family)) for family in FAMILIES]
    for number in range(CASES):
        how, scene, row = case(random.Random(number))
        try:
            outcomes[judge(collators[number % len(FAMILIES)], how, scene, row)] += 1
        except Exception as error:
            raise AssertionError(f"case {number} ({how}, {FAMILIES[number % len(FAMILIES)]}): {row}") from error
    assert min(outcomes["accepted (same)"], outcomes["accepted (random)"], outcomes["refused (random)"]) > CASES / 50
