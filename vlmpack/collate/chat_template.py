"""The processor's chat template: the messages of a conversation → text, and nothing of them left out without a word.

A template is a program of somebody's. Those of Qwen2-VL to Qwen3-VL's first versions write no tools, and none but those
of thinking models write thoughts; what a template does not name is dropped by it in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser

from vlmpack.collate.columns import is_empty
from vlmpack.collate.conversation import Conversation
from vlmpack.errors import ConfigError, Refusal

_TOOL = {
    "type": "function",
    "function": {"name": "tried", "description": "-", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"type": "function", "function": {"name": "tried", "arguments": {}}}

_OFF = ("add_generation_prompt", "continue_final_message")
"""Options that no sample may turn on: a turn would have no answer, or no end."""
_NOT_OPTIONS = {*_OFF, "messages", "tools", "raise_exception", "strftime_now", "dict", "namespace"}
"""Variables of a template that no sample chooses: those that transformers sets, and these."""


class _Generation(Extension):
    """The grammar of `{% generation %}`, by which templates mark what the assistant says, as transformers reads it."""

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
    """Whether the content of a message may be a list of parts: templates of text models know none."""

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
        self._check_heard(conversation)
        messages = [dict(message) for message in conversation.messages]
        if not self.takes_parts:
            messages = [{**message, "content": _joined(message["content"])} for message in messages]
        try:
            return self._write(messages, **conversation.template_options)
        except Exception as error:  # a template can fail in any way on messages it rejects
            raise Refusal(
                "template_error",
                f"the chat template cannot write its messages ({type(error).__name__}: {error}); "
                "compare roles and content with what the template expects",
            ) from error

    def _check_heard(self, conversation: Conversation) -> None:
        holders = (*conversation.messages, conversation.template_options)
        given = {key for holder in holders for key, value in holder.items() if not is_empty(value)}
        if lost := sorted(given & self._ignored):
            raise Refusal(
                "template_ignores",
                f"it has {' and '.join(lost)}, which the chat template does not write: the model would learn an answer "
                "without it; give the processor a chat template that does, or write it into the content",
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
        tried = {
            "tools": self._try(tools=[_TOOL]),
            "tool_calls": self._try({"tool_calls": [_CALL]}),
            "reasoning_content": self._try({"reasoning_content": "tried"}),
        }
        return frozenset(key for key, text in tried.items() if text is not None and text == plain)

    def _try(self, answer: Mapping[str, Any] | None = None, **options: Any) -> str | None:
        """A short conversation as text; None: the template wants more of it than is known here."""
        texts = [[{"type": "text", "text": text}] if self.takes_parts else text for text in ("?", "!")]
        asked, said = ({"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True))
        try:
            return self._write([asked, {**said, **(answer or {})}], **options)
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


def _joined(content: Any) -> str:
    """The text of a message."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
