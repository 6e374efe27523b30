"""The chat template: whatever it would leave out of the text is told, and not learnt without."""

import pytest
from chats import chat, processor_of, says, user

from vlmpack.collate.chat_template import ChatTemplate
from vlmpack.data.messages import read_conversation
from vlmpack.errors import ConfigError, Refusal
from vlmpack.testing import tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE

ASK = user("Which way?")
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "map"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}

WRITES_ALL = (
    "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}{%- if quiet -%}{{- 'hush' -}}{%- endif -%}"
    + CHAT_TEMPLATE.replace(
        "{%- if message['content'] is string -%}",
        "{%- if message.reasoning_content and loop.last -%}{{- '<think>' + message.reasoning_content -}}{%- endif -%}"
        "{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}"
        "{%- if message['content'] is string -%}",
        1,
    )
)
"""Thoughts in the last turn only, as Qwen3's."""


class WithTemplate:
    """A processor whose template is another one, or several by name."""

    def __init__(self, processor, chat_template):
        self.processor, self.chat_template = processor, chat_template

    def apply_chat_template(self, messages, **options):
        template = self.chat_template if isinstance(self.chat_template, str) else self.chat_template["default"]
        return self.processor.apply_chat_template(messages, chat_template=template, **options)


def written(row, template=WRITES_ALL, *, takes_parts=True):
    processor = tiny_processor(chat_template=template) if template else processor_of()
    return ChatTemplate(processor=processor, takes_parts=takes_parts).render(read_conversation(row))


HOLDERS = {
    "tools": chat(tools=[TOOL]),
    "tool_calls": {"messages": [ASK, says(None, tool_calls=[CALL])]},
    "reasoning_content": {"messages": [ASK, says("Left", reasoning_content="Hm.")]},
}


@pytest.mark.parametrize("key", HOLDERS)
def test_what_the_template_never_writes_is_refused(key):
    with pytest.raises(Refusal, match=rf"has {key}[\w.\[\]]*, which the chat template does not write") as caught:
        written(HOLDERS[key], CHAT_TEMPLATE)
    assert caught.value.reason == "template_ignores"


def test_a_template_that_fails_on_what_is_tried_is_given_the_benefit_of_the_doubt():
    strict = "{%- if messages[0].content[0].text == '?' -%}{{- raise_exception('no') -}}{%- endif -%}" + CHAT_TEMPLATE
    assert "75,000" in written(chat(tools=[TOOL]), strict)


def test_an_option_that_is_none_is_absent_as_in_a_table_where_another_row_has_it():
    assert written(chat(chat_template_kwargs={"quiet": None, "of_another_row": None})) == written(chat())


@pytest.mark.parametrize("name", ["quite", "uiet", "message", "add_generation_prompt", "raise_exception"])
def test_an_option_that_is_no_variable_of_the_template_is_refused(name):
    with pytest.raises(Refusal, match=f"has {name}, which the chat template does not read; it reads quiet: correct"):
        written(chat(chat_template_kwargs={name: True}))


@pytest.mark.parametrize(
    "template",
    [
        "{%- set mode = mode | default('on') -%}{{- mode -}}" + CHAT_TEMPLATE,
        "{%- if mode is defined and mode is false -%}{{- 'off' -}}{%- endif -%}" + CHAT_TEMPLATE,
        "{%- generation -%}{{- mode -}}{%- endgeneration -%}{%- for m in messages -%}{%- break -%}{%- endfor -%}"
        + CHAT_TEMPLATE,
        {"default": CHAT_TEMPLATE + "{{- mode -}}", "tool_use": CHAT_TEMPLATE},
    ],
)
def test_a_variable_is_found_wherever_a_template_reads_it(template):
    options = chat(chat_template_kwargs={"mode": False, "add_generation_prompt": False})
    writer = ChatTemplate(processor=WithTemplate(tiny_processor(), template), takes_parts=True)
    writer.render(read_conversation(options))


def test_a_template_that_is_none_is_a_mistake_of_the_setup():
    writer = ChatTemplate(processor=WithTemplate(tiny_processor(), "{% if %}"), takes_parts=True)
    with pytest.raises(ConfigError, match=r"chat template cannot be read \(TemplateSyntaxError: Expected"):
        writer.render(read_conversation(chat(chat_template_kwargs={"mode": False})))
