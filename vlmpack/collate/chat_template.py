"""Render conversations with chat templates, and find the assistant's answers in the text.

    text        <bos><start_of_turn>user\nP0<end_of_turn>\n<start_of_turn>model\nP1<end_of_turn>\n<start_of_turn>user...
    question    after P0, with the prompt  │<end_of_turn>\n<start_of_turn>model\n│
    answer      after P1, as the last turn                                         │<end_of_turn>\n│
    trained on                                                                   P1<end_of_turn>

If a template marks its assistant's text itself (`{% generation %}`), these marks are used. For any other template, each
shape of conversation is rendered with probes in place of its texts, and so is each of its beginnings (its first k
messages). An answer starts where the text after the last probe before it departs from the generation prompt. It stops
where the text after its own last probe departs from what the template writes without the following turns. A template
may therefore end its last turn differently (gpt-oss, Phi-3), drop earlier thoughts (GLM-4-MoE, MiniCPM-V), or open
thoughts only in its generation prompt (DeepSeek). The token that ends an answer may be the start of the next turn
(GLM's `<|user|>`), or come after the marks. An empty thought that the sample does not contain is not trained on.

A template must write every text of every message, or the sample is refused:

messages   system "Be short."   user "Total?"   assistant "5"
    probes     system P0            user P1         assistant P2        rendered once for each shape of conversation
    written    <|im_start|>system\nP0<|im_end|>...P1...P2...            if a probe is missing, its text is refused
    texts      "Be short.", "Total?", "5"                               must appear in the order of their probes

A probe holds a line break and both kinds of quotation marks. If a template prints a list of parts with Python's `repr`,
the probe does not appear in it unchanged, although the words of a text would.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jinja2 import TemplateError

from vlmpack.collate.processor_metadata import ProcessorMetadata, parts_of
from vlmpack.data.formats import is_empty
from vlmpack.data.messages import Conversation, is_trained, text_of
from vlmpack.errors import ConfigError, SampleError

Span = tuple[int, int]
"""Start and stop, in characters of a text or in tokens."""
Messages = Sequence[Mapping[str, Any]]
"""Messages with a role and a content each."""
Form = Literal["text", "parts"]
"""Form of a message's content: a string, or a list of parts."""

_CALL = {"type": "function", "function": {"name": "tried", "arguments": {}}}

_OFF = ("add_generation_prompt", "continue_final_message")
"""Options that no sample may turn on: a turn would lose its answer or its end."""
_NOT_OPTIONS = {*_OFF, "messages", "raise_exception", "strftime_now", "dict", "namespace"}
"""Template variables that a sample does not choose: transformers sets them, or the sample must not set them."""
_EMPTY = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
"""An empty thought, or only its end."""
_WRITTEN_EMPTY = re.compile(r"<think>\s*</think>|^\s*</think>")
"""An empty thought in the content of an answer."""
_OPENED = re.compile(r"(?:\s|</?think>)*")
"""Text that a generation prompt may write and an answer may leave out."""
_NOTHING = re.compile("")
_LAYOUTS_KEPT = 1024
"""Number of cached layouts. Each holds everything that a template writes around texts, including tools."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Renders conversations as text."""

    processor: Any
    """The processor, or the tokenizer of a text model."""
    metadata: ProcessorMetadata
    """Its metadata."""
    is_first: Callable[[str], bool]
    """Returns whether there was no warning about an event yet."""
    add_stop: str | None = None
    """Token to append after the last answer if the template does not end it with one; None: none."""
    layouts: dict[Any, Layout] = field(default_factory=dict)
    """Key of a conversation's shape (`leaves_of`) -> how the template renders it."""

    def render(self, conversation: Conversation) -> str:
        """Render the messages of a conversation.

        Raises:
            SampleError: the template cannot write them (`template_error`), or leaves out part of their content
                (`template_ignores`).
            ConfigError: the processor has no template.
        """
        if self.processor.chat_template is None:
            fault = "the processor has no chat template; load the instruction-tuned model's, set"
            raise ConfigError(f"{fault} processor.chat_template, or give prompt and completion as strings")
        self._check_options(conversation)
        try:
            text = self._write(self._formed(conversation.messages), **conversation.template_options)
        except Exception as error:  # a template can fail in any way on messages it rejects
            fault = f"the chat template cannot write its messages ({type(error).__name__}: {error})"
            raise SampleError(f"{fault}; check their roles and contents", "template_error") from error
        self._check_texts(conversation, text)
        return text

    def answers(self, conversation: Conversation, text: str) -> list[Span]:
        """Find the text of each assistant turn, including its end, in `text`, the result of `render`.

        Raises:
            SampleError: the template marks another number of answers, or begins or ends a trained turn differently when
                other turns follow it (`turn_mismatch`).
        """
        messages = conversation.messages
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not self.marks_answers:
            layout, ends = self._located(conversation, text)
            faults = (x for x, weight in zip(layout.answers, conversation.weights, strict=True) if is_trained(weight))
            if fault := next((x for x in faults if isinstance(x, str)), None):
                remedy = "use a template with {% generation %} marks, train_on='all', or tokenized samples with labels"
                raise SampleError(f"the chat template writes {fault}; {remedy}", "turn_mismatch")
            marks = (((0, 0), (0, 0)) if isinstance(x, str) else x for x in layout.answers)
            return [(ends[one] + start, ends[other] + stop) for (one, start), (other, stop) in marks]
        spans = self._marked(conversation, text)
        for at in range(len(spans) - 1, 0, -1):  # TRL's templates mark an answer and its end as two adjacent spans
            if len(spans) > len(turns) and not text[spans[at - 1][1] : spans[at][0]].strip():
                spans[at - 1 : at + 1] = [(spans[at - 1][0], spans[at][1])]
        if len(spans) != len(turns):
            fault = f"the chat template marks {len(spans) or 'no'} answers of its {len(turns)} assistant messages"
            remedy = "repair its {% generation %}, use train_on='all', or give tokenized samples with labels"
            raise SampleError(f"{fault}; {remedy}", "turn_mismatch")
        said = ((at, self.thoughtful(messages[at], text, span)) for at, span in zip(turns, spans, strict=True))
        return [self.with_end(text, span, messages[at + 1 :]) for at, span in said]

    def is_ended(self, said: str) -> bool:
        """Return whether an answer's text ends with a token that the template writes, apart from trailing blanks."""
        return said.rstrip().endswith(self.tokens)

    def stop_of(self, text: str, span: Span) -> int:
        """Find the start of the special tokens at an answer's end; without any, return the answer's end."""
        ending = re.search(rf"(?:{self.token.pattern})*$", text[slice(*span)])
        return span[1] if ending is None else span[0] + ending.start()

    def end_of(self, conversation: Conversation, text: str, answers: Sequence[Span] | None = None) -> str:
        """Return the token to append to a conversation; "": none. Warn once about an answer without an end token.

        Args:
            conversation: the sample.
            text: its text, the result of `render`.
            answers: the trained answers in it; None: check only the last message.
        """
        if answers is None:
            is_answer = conversation.messages[-1]["role"] == "assistant"
            answers = [(0, len(text))] if is_answer and is_trained(conversation.weights[-1]) else []
        unended = [span for span in answers if not self.is_ended(text[slice(*span)])]
        if unended and self.add_stop is not None:
            return "" if text[unended[-1][1] :].strip() else self.add_stop
        if unended and self.is_first("answer without an end"):
            likely = self._behind("user") or self._tokenizer.eos_token
            warnings.warn(
                "the chat template writes no special token after an answer, so a model trained on it may never stop: "
                f"VLMCollator(add_stop={likely!r}) writes one after the last answer of a sample",
                stacklevel=2,
            )
        return ""

    @cached_property
    def _tokenizer(self) -> Any:
        return parts_of(self.processor).tokenizer

    # ------------------------------------------------------------------ answers

    @property
    def _source(self) -> str:
        template = self.processor.chat_template
        return template["default"] if isinstance(template, Mapping) else template

    @property
    def _sources(self) -> list[str]:
        """The template, or all templates of a processor with several."""
        template = self.processor.chat_template
        return [*template.values()] if isinstance(template, Mapping) else [template]

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template marks its assistant's text itself (`{% generation %}`); not read in ChatML."""
        return self.metadata.by_processor and re.search(r"\{%-?\s*generation\s*-?%\}", self._source) is not None

    def _marked(self, conversation: Conversation, text: str) -> list[Span]:
        """Return the spans of the template's own `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (written,), (spans,) = render_jinja_template(
            conversations=[self._formed(conversation.messages)],
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **conversation.template_options},
        )
        if written != text:
            fault = "apply_chat_template writes another text than the one with {% generation %} marks"
            raise SampleError(f"{fault}; use train_on='all'", "turn_mismatch")
        return [(int(start), int(stop)) for start, stop in spans]

    def _located(self, conversation: Conversation, text: str) -> tuple[Layout, list[int]]:
        """Return the layout of a conversation, and a 0 followed by the ends of its written texts in `text`."""
        leaves, key = leaves_of(conversation)
        layout = self.layouts.get(key) or self._layout(conversation, key)
        ends = layout.ends(leaves, text)
        if ends is None:  # what is no text may differ, such as tools
            layout = self._layout(conversation, key)
            ends = layout.ends(leaves, text)
        if ends is None:  # the conversation's texts change what the template writes around them
            return Layout(self, conversation.messages, conversation.template_options, ()), [0]
        return layout, ends

    def _layout(self, conversation: Conversation, key: Any) -> Layout:
        """Find out how the template writes conversations of this shape, with probes in place of their texts."""
        probes: list[Leaf] = []

        def insert(message: int, path: str, text: str) -> str:
            probes.append(Leaf(message, path, probe(len(probes))))
            return probes[-1].text

        tried = [map_texts(message, at, insert) for at, message in enumerate(conversation.messages)]
        if len(self.layouts) >= _LAYOUTS_KEPT:
            self.layouts.clear()
        self.layouts[key] = layout = Layout(self, tried, conversation.template_options, probes)
        return layout

    def thoughtful(self, message: Mapping[str, Any], text: str, span: Span) -> Span:
        """Exclude an empty thought at the start of an answer, unless the message itself has one."""
        empty = None if _WRITTEN_EMPTY.search(text_of(message)) else _EMPTY.match(text, *span)
        return span if empty is None else (empty.end(), span[1])

    def shared(self, one: str, other: str) -> int:
        """Count the characters of the common prefix. A special token is never split."""
        size = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        size = min(size, len(other))
        cut = (token.start() for text in (one, other) for token in self.token.finditer(text) if token.end() > size)
        return min((size, *cut))

    @cached_property
    def token(self) -> re.Pattern[str]:
        """Matches one of the template's special tokens."""
        longest = sorted(self.tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def with_end(self, text: str, span: Span, following: Messages) -> Span:
        """Extend an answer by the token that ends it, if the template writes one after it.

        The start of another turn counts as such an end only for a turn of a user or a tool: nothing else stops the
        model there.
        """
        start, stop = span
        if self.is_ended(text[start:stop]) or not (end := self._end.match(text, stop)):
            return span
        is_end = not following or following[0]["role"] in ("user", "tool") or end.group().strip() == self._own_end
        return (start, end.end()) if is_end else span

    @cached_property
    def prompt(self) -> str:
        """The text with which the template asks for an answer to a user."""
        question = [{"role": "user", "content": "?"}]
        plain, asked = self.tried(question) or "", self.tried(question, {"add_generation_prompt": True}) or ""
        return asked[self.shared(plain, asked) :]

    @cached_property
    def _own_end(self) -> str:
        return self._behind()

    def _behind(self, *following: str) -> str:
        """Return the special token directly after an answer that is followed by these roles; "": none."""
        turns = [{"role": role, "content": "?"} for role in ("user", "assistant", *following)]
        turns[1]["content"] = probe(0)
        text = self.tried(turns)
        end = self._end.match(text, text.find(probe(0)) + len(probe(0))) if text and is_written(text) else None
        return end.group().strip() if end else ""

    @cached_property
    def _end(self) -> re.Pattern[str]:
        """Matches one of the template's special tokens, after blanks."""
        return re.compile(rf"\s*(?:{self.token.pattern})")

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Special tokens that the template writes in trials with each role, or has in its source, in this order."""
        if self.processor.chat_template is None:
            return ()
        tried = [text for texts in self._trials.values() for text in texts.values()]
        named = self._tokenizer.special_tokens_map
        read = [str(token) for name, token in named.items() if name in self._variables]
        written = "\n".join((*tried, *self._sources, *read))
        return tuple(sorted((token for token in self.metadata.special_tokens if token in written), key=written.index))

    # ------------------------------------------------------------------ the template's forms and options

    def _formed(self, messages: Messages) -> list[dict[str, Any]]:
        """Copy messages, with contents in a form that the template writes correctly."""
        return [{**message, "content": self._form(message)} for message in messages]

    def _form(self, message: Mapping[str, Any]) -> Any:
        """Return the content in its own form, unless the template only writes the other form."""
        content = message["content"]
        if not self.metadata.has_vision:  # templates of text models take no parts
            return text_of(message)
        forms = self._forms[message["role"]]
        if isinstance(content, str):
            return _as_parts(content) if forms == ("parts",) else content
        has_media = any(part["type"] != "text" for part in content)
        return text_of(message) if forms == ("text",) and not has_media else content

    @cached_property
    def _forms(self) -> Mapping[str, tuple[Form, ...]]:
        """By role, the forms of content that the template writes as text, and not as Python's `repr`."""
        return {
            role: tuple(form for form, text in texts.items() if is_written(text))
            for role, texts in self._trials.items()
        }

    @cached_property
    def _trials(self) -> Mapping[str, Mapping[Form, str]]:
        """By role and form, the template's text of a short conversation; "": it cannot write that."""
        trials: dict[str, dict[Form, str]] = {}
        plain: dict[str, dict[str, Any]] = {}
        for role, before, after in (
            ("user", (), ()),
            ("assistant", ("user",), ()),
            ("system", (), ("user", "assistant")),
            ("tool", ("user", "call"), ()),
        ):
            trials[role] = {}
            for form in get_args(Form)[: 1 + self.metadata.has_vision]:
                asked, short = (text if form == "text" else _as_parts(text) for text in (probe(0), "?"))
                turns = [*map(plain.__getitem__, before), {"role": role, "content": asked}]
                messages = [*turns, *map(plain.__getitem__, after)]
                trials[role][form] = self.tried(messages, is_formed=True) or ""
                if role not in plain or is_written(trials[role][form]):
                    plain[role] = {"role": role, "content": short}
            plain["call"] = {**plain.get("assistant", {}), "tool_calls": [_CALL]}
        return trials

    def tried(
        self, messages: Messages, options: Mapping[str, Any] | None = None, *, is_formed: bool = False
    ) -> str | None:
        """Render messages. None: the template fails, for any reason. `is_formed`: pass contents unchanged."""
        try:
            return self._write(messages if is_formed else self._formed(messages), **(options or {}))
        except Exception:
            return None

    def _check_options(self, conversation: Conversation) -> None:
        options = {name for name, value in conversation.template_options.items() if name not in _OFF or value}
        if not (unread := options and sorted(options - self._variables)):
            return
        fault = "it has tools, which the chat template does not write; give the processor one that does"
        if "tools" not in unread:
            fault = f"chat_template_kwargs has {' and '.join(unread)}, which the chat template does not read; it reads"
            fault += f" {', '.join(sorted(self._variables - {'tools'})) or 'none'}: correct or remove it"
        raise SampleError(fault, "template_ignores")

    @cached_property
    def _variables(self) -> frozenset[str]:
        """Options that the template reads: its undeclared variables, except those that a sample does not choose.

        Raises:
            ConfigError: the template is not valid Jinja.
        """
        from transformers.utils.chat_template_utils import _get_template_variables

        try:
            read = frozenset().union(*map(_get_template_variables, self._sources))
        except TemplateError as error:
            fault = f"the processor's chat template cannot be read ({type(error).__name__}: {error})"
            raise ConfigError(f"{fault}; repair it") from error
        return read - _NOT_OPTIONS

    def _write(self, messages: Messages, **options: Any) -> str:
        return self.processor.apply_chat_template(messages, tokenize=False, **options)

    # ------------------------------------------------------------------ checks that every text is written

    def _check_texts(self, conversation: Conversation, text: str) -> None:
        """Refuse a conversation if the template did not write one of its texts into `text`, or ignores one of its keys.

        Templates may strip blanks around a text, drop the thoughts of all answers but the last, and write the results
        and arguments of tools as JSON or as Python's `repr`.

        Raises:
            SampleError: `template_ignores`.
        """
        messages, (leaves, key) = conversation.messages, leaves_of(conversation)
        layout = self.layouts.get(key) or self._layout(conversation, key)
        layout.check(leaves, messages)
        at = 0
        for number in layout.order if layout.is_written else range(len(leaves)):
            leaf = leaves[number]
            is_dropped = leaf.is_thought and not layout.is_written
            if not leaf.is_content or messages[leaf.message]["role"] == "tool" or is_dropped:
                continue
            said = leaf.text.strip()
            if (found := text.find(said, at)) < 0:
                raise refusal_of(leaf, messages)
            at = found + len(said)


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# ---------------------------------------------------------------------- probes as texts

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts, which templates may drop from all answers but the last."""
_LINKS = ("id", "type", "index")
"""Keys inside tool calls and similar values that carry no content."""
_TAGS = re.compile(r"(</?think>)")
"""Marks around thoughts inside the content of an answer."""
_THOUGHT = "thought"
"""Path of a text between such marks."""


class Leaf(NamedTuple):
    """One text of a conversation that is not blank."""

    message: int
    """Index of its message."""
    path: str
    """Location in the message: "content", "content[1]", "tool_calls[0].function.name", ..."""
    text: str
    """The text."""

    @property
    def key(self) -> str:
        """The message's key that holds the text."""
        return re.split(r"[.\[]", self.path, maxsplit=1)[0]

    @property
    def is_content(self) -> bool:
        """Whether it is part of the content, and not of another key."""
        return self.path in ("content", _THOUGHT) or self.path.startswith("content[")

    @property
    def is_thought(self) -> bool:
        """Whether it is a thought, which templates may drop from all answers but the last."""
        return self.path == _THOUGHT or (not self.is_content and self.key in THOUGHTS)


class Spot(NamedTuple):
    """The position of a text inside another one."""

    start: int
    """Its first character."""
    stop: int
    """The character after its last."""
    form: int
    """0: unchanged, 1: as JSON, 2: as Python's `repr`."""


Mark = tuple[int, int]
"""A position in a text: (number n, offset) counts characters after the n-th written leaf; n = 0: from the start."""


class _Beginning(NamedTuple):
    """A conversation's first messages, rendered alone and compared with the whole text."""

    number: int
    """Number of the last text that both have, in the order of the whole text; 0: none."""
    stop: int
    """Position after that text where the whole text departs from the partial one."""
    rest: str
    """The rest of the partial text from there on."""
    before: Mapping[int, str]
    """For each text, the partial text before it."""


class Layout:
    """Where a template writes the texts and answers of all conversations that only differ in their texts.

    Without probes, whole texts are compared, and beginnings must be written exactly as in the whole conversation.

    Args:
        template: the template.
        messages: messages whose texts are the probes; without probes, those of one conversation.
        options: arguments of the template.
        probes: the probes and their locations.
    """

    def __init__(
        self, template: ChatTemplate, messages: Messages, options: Mapping[str, Any], probes: Sequence[Leaf]
    ) -> None:
        self.template, self.messages, self.options, self.probes = template, messages, options, probes
        text = template.tried(messages, options)
        self.is_written = text is not None
        """False: the template cannot write these messages."""
        self.text = text or ""
        self._spots = self._spots_in(self.text)
        self.order = sorted(self._spots, key=self._spots.__getitem__)
        """Numbers of the w written probes, in the order of the text."""
        self._stops = [0, *(self._spots[at].stop for at in self.order)]
        starts = [*(self._spots[at].start for at in self.order), len(self.text)]
        self._literals = [self.text[stop:start] for stop, start in zip(self._stops, starts, strict=True)]
        """The w + 1 texts before each written probe and after the last one."""

    def _spots_in(self, written: str) -> dict[int, Spot]:
        roles = [message["role"] for message in self.messages]
        found = ((at, find_spot(leaf, roles[leaf.message], written)) for at, leaf in enumerate(self.probes))
        return {at: spot for at, spot in found if spot is not None}

    @cached_property
    def _unread(self) -> list[Leaf]:
        """Keys without a text that do not change the rendering."""
        tried, spoken, unread = self.messages, {(leaf.message, leaf.key) for leaf in self.probes}, []
        for at, message in enumerate(tried):
            for key in (key for key in extra_keys(message) if (at, key) not in spoken):
                without = {name: value for name, value in message.items() if name != key}
                if self.template.tried([*tried[:at], without, *tried[at + 1 :]], self.options) == self.text:
                    unread.append(Leaf(at, key, ""))
        return unread

    def check(self, leaves: Sequence[Leaf], messages: Messages) -> None:
        """Refuse messages of this shape if the template leaves out a text that is no earlier thought, or a key."""
        if not self.is_written or (len(self.order) == len(leaves) and not self._unread):
            return
        last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        unwritten = (leaf for at, leaf in enumerate(leaves) if at not in self._spots)
        missing = (leaf for leaf in unwritten if not (leaf.is_thought and leaf.message < last))
        for leaf in (*missing, *self._unread):
            raise refusal_of(leaf, messages)

    def ends(self, leaves: Sequence[Leaf], text: str) -> list[int] | None:
        """Return a 0 followed by the ends of the written leaves in a text. None: the text does not have this layout.

        A template may strip blanks around a leaf.
        """
        if not (self.is_written and text.startswith(self._literals[0])):
            return None
        ends, at = [0], len(self._literals[0])
        for number, literal in zip(self.order, self._literals[1:], strict=True):
            form = self._spots[number].form
            said = leaves[number].text.strip() if form == 0 else _forms(leaves[number].text)[form]
            start = text.find(said, at)
            is_last = len(ends) == len(self.order)
            stop = len(text) - len(literal) if is_last else text.find(literal, start + len(said))
            if start < 0 or stop < start + len(said) or (is_last and not text.endswith(literal)):
                return None
            if text[at:start].strip() or text[start + len(said) : stop].strip():
                return None
            ends.append(stop)
            at = stop + len(literal)
        return ends

    # ------------------------------------------------------------------ answers

    @cached_property
    def answers(self) -> list[tuple[Mark, Mark] | str]:
        """Start and stop of each answer, or the reason why they are unknown."""
        return [self._find(at) for at, message in enumerate(self.messages) if message["role"] == "assistant"]

    def _find(self, at: int) -> tuple[Mark, Mark] | str:
        template, text, message = self.template, self.text, self.messages[at]
        fault = f"otherwise alone than before other messages, so it is not known which tokens are messages[{at}]"
        said = [one for one in self.order if self.probes[one].message == at]
        own = [self._spots[one] for one in said]
        question, answer = self._compare(at, add_generation_prompt=True), self._compare(at + 1)
        if at == 0 and own and (prompt := text.rfind(template.prompt, 0, own[0].start)) >= 0:
            question = _Beginning(0, prompt + len(template.prompt), "", {})  # a template cannot ask after no message
        if question is None or not (_OPENED if self.probes else _NOTHING).fullmatch(question.rest):
            return f"messages[:{at}] and its prompt {fault}"
        if answer is None or (template.token.sub("", answer.rest) if self.probes else answer.rest).strip():
            return f"messages[:{at + 1}] {fault}"
        start, stop, before, number = question.stop, answer.stop, question.number, answer.number
        first = own[0].start if own else max(start, stop)
        if _WRITTEN_EMPTY.search(text_of(message)) and (empty := _EMPTY.search(text, self._stops[before], start)):
            start = start - len(empty.group().lstrip()) if empty.end() == start else start
        start, _ = template.thoughtful(message, text, (start, first))
        if template.is_ended(text[start:stop]):
            stop = start + len(text[start:stop].rstrip())
        start, stop = template.with_end(text, (start, stop), self.messages[at + 1 :])
        inside = [one for one in self._spots.values() if one.start < stop and one.stop > start]
        if said and not answer.before[said[0]].endswith(text[start : max(start, first)]):
            return f"messages[{at}] {fault}"
        if sorted(inside) != own or start > stop:
            return f"other messages inside of messages[{at}] {fault}"
        return (before, start - self._stops[before]), (number, stop - self._stops[number])

    def _compare(self, stop: int, **prompt: bool) -> _Beginning | None:
        """Render messages[:stop] alone and compare. None: the template cannot write them."""
        written = self.template.tried(self.messages[:stop], {**self.options, **prompt})
        if written is None:
            return None
        spots = self._spots_in(written)
        there = [at for at in spots if at in self._spots and self.probes[at].message < stop]
        last = max(there, key=spots.__getitem__, default=None)
        number = 0 if last is None else self.order.index(last) + 1
        alone = written if last is None else written[spots[last].stop :]
        shared = self.template.shared(alone, self._literals[number])
        before = {at: written[: spots[at].start] for at in there}
        return _Beginning(number, self._stops[number] + shared, alone[shared:], before)


def probe(number: int) -> str:
    """Return a text that appears in a rendering only if the template writes it unchanged."""
    return f'probe {number}:\n"it\'s" {number}.'


def is_written(text: str, number: int = 0) -> bool:
    """Return whether a text contains a probe unchanged."""
    return probe(number) in text


def find_spot(leaf: Leaf, role: str, text: str) -> Spot | None:
    """Find a probe. Results and arguments of tools may also be written as JSON or as Python's `repr`."""
    forms = _forms(leaf.text)[: 1 if leaf.is_content and role != "tool" else None]
    found = ((text.find(form), number, len(form)) for number, form in enumerate(forms))
    return next((Spot(at, at + length, number) for at, number, length in found if at >= 0), None)


def _forms(text: str) -> tuple[str, str, str]:
    """Return a text unchanged, as JSON, and as Python's `repr`."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]


def refusal_of(leaf: Leaf, messages: Messages) -> SampleError:
    where = f"messages[{leaf.message}] ({messages[leaf.message]['role']})"
    fault = f"{where} has {leaf.path}, which the chat template does not write, so the model would not see it"
    remedy = "write it into the content, give the processor a chat template that writes it, or take it out"
    if leaf.is_content:
        said = f"{'thinks' if leaf.path == _THOUGHT else 'says'} {leaf.text.strip()[:40]!r}"
        fault = f"{where} {said}, which the chat template does not write"
        remedy = "compare the message's role, its place and its content with what the template expects"
        if leaf.path == _THOUGHT:
            remedy = "use one that does, such as trl.chat_template_utils.get_training_chat_template(processor) returns"
    elif leaf.key != "tool_calls":
        remedy += f" (VLMCollator(ignored_keys=({leaf.key!r},)) leaves it out)"
    return SampleError(f"{fault}; {remedy}", "template_ignores")


# ---------------------------------------------------------------------- texts of messages


def map_texts(message: Mapping[str, Any], at: int, visit: Callable[[int, str, str], str]) -> dict[str, Any]:
    """Copy a message, replacing each text that is not blank by the result of `visit(message index, path, text)`.

    Ids and types of calls stay unchanged, and so do the keys that link a tool's result to its call.
    """

    def seen(path: str, text: str) -> str:
        return visit(at, path, text) if text.strip() else text

    def content(path: str, text: str) -> str:
        if message["role"] != "assistant" or "</think>" not in text:
            return seen(path, text)
        pieces = _TAGS.split(text)
        end = len(pieces) - 1 - pieces[::-1].index("</think>")
        return "".join(
            piece if number % 2 else seen(path if number > end else _THOUGHT, piece)
            for number, piece in enumerate(pieces)
        )

    def nested(path: str, value: Any) -> Any:
        if isinstance(value, str):
            return seen(path, value)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, Mapping):
            return {k: v if k in _LINKS else nested(f"{path}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [nested(f"{path}[{number}]", inner) for number, inner in enumerate(value)]
        return value

    copy = dict(message)
    given = message["content"]
    if isinstance(given, str):
        copy["content"] = content("content", given)
    else:
        copy["content"] = [
            {**part, "text": content(f"content[{number}]", part["text"])} if part["type"] == "text" else part
            for number, part in enumerate(given)
        ]
    if len(message) > 2:
        copy |= {key: nested(key, message[key]) for key in extra_keys(message)}
    return copy


def extra_keys(message: Mapping[str, Any]) -> list[str]:
    """Return the keys of a message that hold something, except role, content, and a tool result's link to its call."""
    known = ("role", "content", *(("name", "tool_call_id") if message["role"] == "tool" else ()))
    return [key for key, value in message.items() if key not in known and not is_empty(value)]


def leaves_of(conversation: Conversation) -> tuple[list[Leaf], Any]:
    """Return the texts of a conversation, and its shape: their locations, and all else that changes the rendering."""
    leaves: list[Leaf] = []

    def take(message: int, path: str, text: str) -> str:
        leaves.append(Leaf(message, path, text))
        return text

    shape: list[Any] = []
    for at, message in enumerate(conversation.messages):
        count = len(leaves)
        map_texts(message, at, take)
        content = message["content"]
        shape.append(message["role"])
        shape.append(None if isinstance(content, str) else tuple(part["type"] for part in content))
        shape.append(tuple(leaf.path for leaf in leaves[count:]))
        if len(message) > 2:
            others = ((key, message[key]) for key in extra_keys(message))
            shape.append(tuple((key, repr(x) if isinstance(x, bool) else type(x).__name__) for key, x in others))
    for name, value in conversation.template_options.items():
        shape.append((name, bool(value) if name == "tools" else repr(value)))
    return leaves, tuple(shape)


# ---------------------------------------------------------------------- characters

SHOWN = 20
"""Number of characters that an error shows on either side of an invalid one."""


def check_characters(text: str) -> None:
    """Refuse half a surrogate pair, which JSON can write and a `str` can hold, but which no text can contain.

    Raises:
        SampleError: the text holds one (`bad_text`).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        context = text[max(error.start - SHOWN, 0) : error.end + SHOWN]
        fault = f"its text holds {text[error.start]!r}, half of a surrogate pair, in {context!r}"
        remedy = "remove it, or put '?' in its place with text.encode(errors='replace').decode()"
        raise SampleError(f"{fault}; {remedy}", "bad_text") from error
