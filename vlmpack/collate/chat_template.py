"""Chat templates: conversations as text, and the places in it of what an assistant says.

    text      <bos><start_of_turn>user\n...<end_of_turn>\n<start_of_turn>model\nIt costs 5.<end_of_turn>\n
    question  ─────────── with the generation prompt ─────────────────────────▶│                         │
    answer    ─────────── with the answer, without what follows ─────────────────────────────────────────▶│
    learnt                                                                     │It costs 5.<end_of_turn>│

A template that marks its assistant's text itself (`{% generation %}`) is taken at its word. Of any other one the
conversation is written turn by turn: what an answer adds to the text before it is learnt, up to the token that ends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser

from vlmpack.collate.columns import is_empty
from vlmpack.collate.conversation import Conversation, text_of
from vlmpack.collate.processor_metadata import parts_of
from vlmpack.errors import ConfigError, Refusal

Span = tuple[int, int]
"""Start and stop, in characters of a text or in tokens."""
Contents = Literal["as given", "parts", "texts"]
"""Form in which a template takes contents: as messages have them, all as lists of parts, or all as texts."""

_TRIAL = ("vlmpack asks", "vlmpack answers")
"""Texts of a short conversation."""
_ROLES = ("user", "assistant")
_TOOL = {
    "type": "function",
    "function": {"name": "tried", "description": "-", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"type": "function", "function": {"name": "tried", "arguments": {}}}

_OFF = ("add_generation_prompt", "continue_final_message")
"""Options that no sample may turn on: a turn would have no answer, or no end."""
_NOT_OPTIONS = {*_OFF, "messages", "tools", "raise_exception", "strftime_now", "dict", "namespace"}
"""Variables of a template that no sample chooses: those that transformers sets, and those that no sample may set."""


class _Generation(Extension):
    """The grammar of `{% generation %}`, by which templates mark the assistant's text, as transformers reads it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own annotation is a set)

    def parse(self, parser: Parser) -> list[Node]:
        """The statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@final
@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Writes conversations as text."""

    processor: Any
    """The processor, or the tokenizer of a text model."""
    takes_parts: bool
    """True if the content of a message may be a list of parts: templates of text models take none."""
    end_tokens: tuple[str, ...] = ()
    """Special tokens, one of which may end a turn; needed for `answers` alone."""

    def render(self, conversation: Conversation) -> str:
        """The text of its messages.

        Raises:
            Refusal: the template cannot write them (`template_error`), or leaves out what they hold
                (`template_ignores`).
            ConfigError: the processor has no template.
        """
        if self.processor.chat_template is None:
            raise ConfigError(
                "the processor has no chat template, so messages cannot become text; load the instruction-tuned "
                "model's processor, set processor.chat_template, or give prompt and completion as strings"
            )
        self._check_written(conversation)
        return self._text(conversation.messages, conversation.template_options)

    def answers(self, conversation: Conversation, text: str) -> list[Span]:
        """Find what each of the assistant's turns says in `text`, which `render` returned, its end included.

        Raises:
            Refusal: the template writes another number of answers, or writes a turn otherwise when others follow it
                (`turn_mismatch`); or it leaves out a text (`template_ignores`).
        """
        self._check_texts(conversation, text)
        roles = [message["role"] for message in conversation.messages]
        if self.marks_answers:
            spans = self._marked(conversation, text)
        else:
            spans = [self._added(conversation, text, at) for at, role in enumerate(roles) if role == "assistant"]
        if len(spans) != roles.count("assistant"):
            raise Refusal(
                "turn_mismatch",
                f"the chat template marks {len(spans) or 'no'} answers ({{% generation %}}) of its "
                f"{roles.count('assistant')} assistant messages, so it is not known which tokens to learn; repair the "
                "template, use train_on='all', or give tokenised samples with labels",
                of_all=not spans,
            )
        return spans

    def ends(self, conversation: Conversation, text: str) -> list[int]:
        """Find the ends of its messages in `text`, of those that the template writes alike without what follows."""
        prefixes = [self._prefix(conversation, stop) for stop in range(1, len(conversation.messages))]
        return [*(len(prefix) for prefix in prefixes if prefix and text.startswith(prefix)), len(text)]

    def _text(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            return self._write(self._formed(messages), **options)
        except Exception as error:  # a template can fail in any way on messages it rejects
            raise Refusal(
                "template_error",
                f"the chat template cannot write its messages ({type(error).__name__}: {error}); "
                "compare roles and content with what the template expects",
            ) from error

    # ------------------------------------------------------------------ answers

    def _check_texts(self, conversation: Conversation, text: str) -> None:
        """Insist that the template writes each message's texts, save for thoughts and white space around them.

        What tools return may be written as JSON.
        """
        for at, message in enumerate(conversation.messages):
            if message["role"] == "tool":
                continue
            texts = [part["text"].split("</think>")[-1] for part in _as_parts(message["content"]) if "text" in part]
            if lost := next((one for one in texts if one.strip() not in text), None):
                raise Refusal(
                    "template_ignores",
                    f"messages[{at}] ({message['role']}) says {lost[:40]!r}, which the chat template does not write; "
                    "compare the message's role and content with what the template expects",
                )

    @property
    def _source(self) -> str:
        template = self.processor.chat_template
        return template["default"] if isinstance(template, Mapping) else template

    @cached_property
    def marks_answers(self) -> bool:
        """Return whether the template marks its assistant's text itself (`{% generation %}`)."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._source) is not None

    def _marked(self, conversation: Conversation, text: str) -> list[Span]:
        """Spans of the template's own `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (written,), (spans,) = render_jinja_template(
            conversations=[self._formed(conversation.messages)],
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            **{**parts_of(self.processor).tokenizer.special_tokens_map, **conversation.template_options},
        )
        if written != text:
            raise Refusal(
                "turn_mismatch",
                "the processor's apply_chat_template writes its messages otherwise than the template with its "
                "{% generation %} marks does, so it is not known which tokens to learn; use train_on='all'",
                of_all=True,
            )
        return [(int(start), int(stop)) for start, stop in spans]

    def _added(self, conversation: Conversation, text: str, at: int) -> Span:
        """Find what the answer `messages[at]` adds to the text before it."""
        question = self._prefix(conversation, at, add_generation_prompt=True)
        answer = text if at + 1 == len(conversation.messages) else self._prefix(conversation, at + 1)
        for written, name in ((answer, f"messages[:{at + 1}]"), (question, f"messages[:{at}] and its prompt")):
            if written is None or not text.startswith(written):
                raise Refusal(
                    "turn_mismatch",
                    f"the chat template writes {name} otherwise alone than at the beginning of the whole conversation, "
                    f"so it is not known which tokens are the answer of messages[{at}]; use a template with "
                    "{% generation %} marks, train_on='all', or tokenised samples with labels",
                )
        assert question is not None
        assert answer is not None
        said = answer[len(question) :].rstrip()
        return len(question), len(question) + len(said) if said.endswith(self.end_tokens) else len(answer)

    def _prefix(self, conversation: Conversation, stop: int, **options: bool) -> str | None:
        """Write the first messages alone; None: the template cannot."""
        try:
            return self._text(conversation.messages[:stop], {**conversation.template_options, **options})
        except Refusal:
            return None

    # ------------------------------------------------------------------ what the template takes

    def _formed(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copy messages with their contents in the form that the template takes."""
        form = {"as given": lambda m: m["content"], "texts": text_of, "parts": lambda m: _as_parts(m["content"])}
        return [{**message, "content": form[self._contents](message)} for message in messages]

    @cached_property
    def _contents(self) -> Contents:
        """The form of contents in which a question and an answer are both written."""
        if not self.takes_parts:
            return "texts"
        trials = {form: self._try_form(form) for form in ("as given", "parts")}
        fitting = [form for form, text in trials.items() if text is not None and all(part in text for part in _TRIAL)]
        return "parts" if fitting == ["parts"] else "as given"

    def _try_form(self, form: str) -> str | None:
        contents = [_as_parts(text) if form == "parts" else text for text in _TRIAL]
        turns = [{"role": role, "content": content} for role, content in zip(_ROLES, contents, strict=True)]
        try:
            return self._write(turns)
        except Exception:  # see `_text`
            return None

    def _check_written(self, conversation: Conversation) -> None:
        holders = (*conversation.messages, conversation.template_options)
        used = {key for holder in holders for key, value in holder.items() if not is_empty(value)}
        if ignored := sorted(used & self._ignored):
            raise Refusal(
                "template_ignores",
                f"it has {' and '.join(ignored)}, which the chat template does not write: the model would learn an "
                "answer without it; give the processor a chat template that does, or write it into the content",
            )
        options = {name for name, value in conversation.template_options.items() if name not in _OFF or value}
        if unread := sorted(options - {"tools"} - (self._variables if options else frozenset())):
            raise Refusal(
                "template_ignores",
                f"chat_template_kwargs has {' and '.join(unread)}, which the chat template does not read; it reads "
                f"{', '.join(sorted(self._variables)) or 'none'}: see how it is spelt there, or leave it out",
            )

    @cached_property
    def _ignored(self) -> frozenset[str]:
        """Which of tools, tool calls and thoughts never come into the text: each is tried once."""
        plain = self._try()
        trials = {
            "tools": self._try(tools=[_TOOL]),
            "tool_calls": self._try({"tool_calls": [_CALL]}),
            "reasoning_content": self._try({"reasoning_content": "tried"}),
        }
        return frozenset(key for key, text in trials.items() if text is not None and text == plain)

    def _try(self, answer: Mapping[str, Any] | None = None, **options: Any) -> str | None:
        """A short conversation as text; None: the template cannot write it."""
        question, reply = ([{"type": "text", "text": text}] if self.takes_parts else text for text in "?!")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply, **(answer or {})}]
        try:
            return self._write(turns, **options)
        except Exception:  # see `render`
            return None

    @cached_property
    def _variables(self) -> frozenset[str]:
        """The options that the template reads: its undeclared variables, but for those that are not a sample's choice.

        Raises:
            ConfigError: the template is no Jinja template.
        """
        template = self.processor.chat_template
        sources = template.values() if isinstance(template, Mapping) else [template]
        grammar = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
        try:
            read = {name for source in sources for name in find_undeclared_variables(grammar.parse(source))}
        except TemplateError as error:
            raise ConfigError(
                f"the processor's chat template cannot be read ({type(error).__name__}: {error}); repair it"
            ) from error
        return frozenset(read - _NOT_OPTIONS)

    def _write(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.processor.apply_chat_template(messages, tokenize=False, **options)


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# ---------------------------------------------------------------------- characters

SHOWN = 20
"""Characters on either side of one that cannot be used, in an error."""


def check_characters(text: str) -> None:
    """Refuse half a character: JSON can write one of two surrogates, which is legal in a `str` and in no text.

    Raises:
        Refusal: there is one (`bad_text`).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        context = text[max(error.start - SHOWN, 0) : error.end + SHOWN]
        raise Refusal(
            "bad_text",
            f"its text holds {text[error.start]!r}, half of a surrogate pair, in {context!r}: it is no character, and "
            "no tokenizer takes it; remove it, or put '?' in its place with text.encode(errors='replace').decode()",
        ) from error
