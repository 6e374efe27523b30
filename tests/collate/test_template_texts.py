"""Every text and every key of every message is in what the chat template writes, or the sample is refused by name."""

import pytest
from chats import chat, human, learnt, picture, processor_of, says, text, user
from fixtures.processors import tiny_processor
from fixtures.templates import GLM_TEMPLATE

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.testing.processors import CHAT_TEMPLATE

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers' own

ASK, SAY = user("2 + 2?"), says("It is 4")
SYSTEM = {"role": "system", "content": "Be short."}
CALLS = [{"type": "function", "id": "c1", "function": {"name": name, "arguments": {"at": "map"}}} for name in "ab"]


def refusal(messages, template=None, *, processor=None, reason="template_ignores", **settings):
    collator = VLMCollator(
        processor or (tiny_processor(chat_template=template) if template else processor_of()), **settings
    )
    with pytest.raises(SampleError) as caught:
        collator.collate([{"messages": messages}])
    assert caught.value.reason == reason
    with pytest.raises(SampleError) as measured:
        collator.measure({"messages": messages})
    assert measured.value.detail == caught.value.detail
    return caught.value.detail


def collated(messages, template=None, *, processor=None, **settings):
    processor = processor or tiny_processor(chat_template=template)
    batch = VLMCollator(processor, **settings)([{"messages": messages}])
    return processor.tokenizer.decode(batch["input_ids"][0]), learnt(processor, batch["labels"])


# ---------------------------------------------------------------------- texts

SYSTEM_FIRST = (
    "{%- if messages[0].role == 'system' -%}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    + CHAT_TEMPLATE.replace("for message in messages", "for message in messages if message.role != 'system'")
)
"""As Qwen3-VL's: a system message is written where it is the first message, and nowhere else."""


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("at", [1, 3], ids=["second", "later"])
def test_a_turn_that_the_template_leaves_out_is_refused(at, role, train_on):
    messages = [SYSTEM, ASK, SAY, ASK, SAY]
    messages.insert(at, {"role": role, "content": "RULE"})
    message = refusal(messages, SYSTEM_FIRST, train_on=train_on)
    assert message.startswith(f"messages[{at}] (system) says 'RULE', which the chat template does not write")


def test_and_is_not_found_in_what_another_one_says():
    censored = CHAT_TEMPLATE.replace(
        "{{- message['content'] -}}", "{{- '' if message['content'] == '4' else message['content'] -}}"
    )
    assert "which the chat template does not write" in refusal([{**ASK, "content": "4"}, SAY], censored)


def test_texts_may_be_written_in_another_order_and_without_the_blanks_around_them():
    late = CHAT_TEMPLATE.replace("for message in messages", "for message in messages[1:] + messages[:1]").replace(
        "{{- message['content'] -}}", "{{- message['content'] | trim -}}"
    )
    text, _ = collated([SYSTEM, {**ASK, "content": " \n2 + 2? "}, SAY], late)
    assert "user\n2 + 2?<|im_end|>" in text
    assert text.index("Be short.") > text.index("It is 4")


def test_each_shape_of_conversation_is_tried_once():
    processor = tiny_processor()
    collator, rendered = VLMCollator(processor), []
    write = processor.apply_chat_template
    processor.apply_chat_template = lambda *args, **options: rendered.append(0) or write(*args, **options)
    counts = []
    for messages in (
        [ASK, SAY],
        [{**ASK, "content": "3 + 3?"}, SAY],
        [ASK, SAY],
        [ASK, SAY, ASK, SAY],
        [ASK, SAY, ASK, SAY],
    ):
        rendered.clear()
        collator([{"messages": messages}])
        counts.append(len(rendered))
    assert counts[1:] == [1, 1, 2, 1]


# ---------------------------------------------------------------------- forms of contents

AS_STRINGS = GLM_TEMPLATE.replace(
    "{% if message['content'] is string %}", "{% if message['content'] is string or message['role'] != 'user' %}"
)
"""As GLM-4.1V's: a list of parts of anybody but the user is written as Python shows it."""


def parts(message):
    return {**message, "content": [text(message["content"])]}


@pytest.mark.parametrize("form", [dict, parts], ids=["strings", "parts"])
def test_a_content_is_given_in_the_form_in_which_its_role_s_are_written(form):
    processor = tiny_processor("glm4v", chat_template=AS_STRINGS)
    image = {"type": "image", "image": picture()}
    question = user([image, text("2 + 2?")])
    batch = VLMCollator(processor)([{"messages": [form(SYSTEM), question, form(SAY)]}])
    truth = processor.apply_chat_template([SYSTEM, question, SAY], tokenize=True, return_dict=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == truth["input_ids"].tolist()
    assert learnt(processor, batch["labels"]) == "It is 4"
    assert "[{'type'" in processor.apply_chat_template([parts(SYSTEM), question, SAY])


def test_parts_that_are_written_as_python_shows_them_are_refused_where_an_image_keeps_them_parts():
    answer = says([{"type": "image", "image": picture()}, text("This")])
    processor = tiny_processor("glm4v", chat_template=AS_STRINGS)
    assert "messages[1] (assistant) says 'This'" in refusal([ASK, answer], processor=processor)


def test_strings_become_parts_where_the_template_reads_parts_alone():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
        "<|im_end|>\n{% endfor %}"
    )
    text, said = collated([SYSTEM, ASK, SAY], template)
    assert "system\nBe short.<|im_end|>" in text
    assert said == "It is 4<|im_end|>"


# ---------------------------------------------------------------------- keys

KEYS = [
    ("thoughts", "two and two"),
    ("function_call", {"name": "add", "arguments": "{}"}),
    ("timestamp", 17),
    ("masked", True),
    ("metadata", {"lang": "en"}),
    ("id", "m-1"),
    ("name", "Ann"),
    ("image", "a.png"),
]


@pytest.mark.parametrize(("key", "value"), KEYS, ids=[key for key, _ in KEYS])
@pytest.mark.parametrize("shape", ["messages", "conversations", "texts"])
def test_a_key_that_nothing_reads_is_refused_by_name_and_can_be_left_out(shape, key, value):
    answers = {"messages": {**SAY, key: value}, "conversations": {"from": "gpt", "value": "It is 4", key: value}}
    questions = {"messages": ASK, "conversations": human("2 + 2?")}
    pair = {"user": "2 + 2?", "assistant": "It is 4", key: value}
    feature = {shape: [pair] if shape == "texts" else [questions[shape], answers[shape]]}
    with pytest.raises(
        SampleError, match=rf"messages\[1\] \(assistant\) has {key}.*VLMCollator\(ignored_keys=\('{key}',\)\)"
    ) as caught:
        VLMCollator(processor_of())([feature])
    assert caught.value.reason == "template_ignores"
    batch = VLMCollator(processor_of(), ignored_keys=[key])([feature])
    assert batch["input_ids"].equal(VLMCollator(processor_of())([{"messages": [ASK, SAY]}])["input_ids"])


def test_what_ties_a_result_to_its_call_says_nothing():
    writes_calls = CHAT_TEMPLATE.replace(
        "'<|im_end|>\\n'",
        "(message.tool_calls | map(attribute='function') | list | tojson if message.tool_calls else '') + "
        "'<|im_end|>\\n'",
    )
    messages = [ASK, says("", tool_calls=CALLS[:1])]
    messages += [{"role": "tool", "content": "Left", "tool_call_id": "c1", "name": "a"}, SAY]
    assert '{"name": "a", "arguments": {"at": "map"}}' in collated(messages, writes_calls)[1]
    extra = [{**CALLS[0], "function": {**CALLS[0]["function"], "reason": "why"}}]
    text, _ = collated([ASK, says("", tool_calls=extra)], writes_calls)
    assert '"reason": "why"' in text


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ("message.tool_calls[:1] | map(attribute='function.name') | join", "tool_calls[0].function.arguments.at"),
        ("message.tool_calls[0].function | tojson", "tool_calls[1].function.name"),
    ],
    ids=["names alone", "the first alone"],
)
def test_a_part_of_a_call_that_the_template_leaves_out_is_refused(written, lost):
    template = CHAT_TEMPLATE.replace("'<|im_end|>\\n'", f"({written} if message.tool_calls else '') + '<|im_end|>\\n'")
    assert f"has {lost}" in refusal([ASK, says("", tool_calls=CALLS)], template)


@pytest.mark.parametrize("written", ["tojson", "string"], ids=["as JSON", "as Python"])
def test_arguments_and_results_may_be_written_as_json_or_python_has_them(written):
    template = CHAT_TEMPLATE.replace(
        "'<|im_end|>\\n'", f"(message.tool_calls | {written} if message.tool_calls else '') + '<|im_end|>\\n'"
    )
    calls = [{"function": {"name": "look", "arguments": {"at": 'the "map"\nor Bob\'s'}}}]
    assert "look" in collated([ASK, says("", tool_calls=calls)], template)[1]


@pytest.mark.parametrize("part", [text("2 + 2?"), {"type": "image", "image": picture()}])
def test_a_key_beside_a_text_or_an_image_is_refused_too(part):
    noted = [user([{**part, "note": "A receipt"}]), SAY]
    assert "messages[0].content[0] has 'note' beside its" in refusal(noted, reason="bad_row")
    ours = VLMCollator(processor_of(), ignored_keys=("note",))([{"messages": noted}])
    assert ours["input_ids"].equal(VLMCollator(processor_of())([{"messages": [user([part]), SAY]}])["input_ids"])


@pytest.mark.parametrize("keys", ["id", [1], ("content",), ("from",)])
def test_keys_that_cannot_be_left_out_are_a_mistake_of_the_setup(keys):
    with pytest.raises(ConfigError, match="ignored_keys="):
        VLMCollator(processor_of(), ignored_keys=keys)


# ---------------------------------------------------------------------- thoughts

FORGETFUL = CHAT_TEMPLATE.replace(
    "{%- if message['content'] is string -%}{{- message['content'] -}}",
    "{%- if message.reasoning_content and loop.last -%}{{- '<think>' + message.reasoning_content + '</think>' -}}"
    "{%- endif -%}{%- if message['content'] is string -%}{{- message['content'] if loop.last else "
    "message['content'].split('</think>')[-1] -}}",
)
"""As Qwen3's: thoughts of the last answer are written, those of earlier ones are not."""
THINKING = {
    "in a key": lambda thought, text: {**SAY, "content": text, "reasoning_content": thought},
    "in the content": lambda thought, text: {**SAY, "content": f"<think>{thought}</think>{text}"},
}


@pytest.mark.parametrize("think", THINKING.values(), ids=THINKING)
def test_thoughts_of_the_last_answer_are_written_and_those_of_earlier_ones_may_be_left_out(think):
    text, said = collated([ASK, think("First.", "Four"), ASK, think("Then.", "Six")], FORGETFUL)
    assert "First." not in text
    assert said == "Four<|im_end|><think>Then.</think>Six<|im_end|>"


@pytest.mark.parametrize("think", THINKING.values(), ids=THINKING)
def test_thoughts_of_the_last_answer_that_are_left_out_are_refused(think):
    never = FORGETFUL.replace("loop.last", "false")
    message = refusal([ASK, think("Then.", "Six")], never)
    assert message.startswith(
        ("messages[1] (assistant) has reasoning_content, which", "messages[1] (assistant) thinks 'Then.', which")
    )


# ---------------------------------------------------------------------- tools and options


def written(template, **columns):
    processor = tiny_processor(chat_template=template)
    return processor.tokenizer.decode(VLMCollator(processor).collate([chat(**columns)]).input_ids[0])


TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
QUIET = "{%- if quiet -%}{{- 'hush' -}}{%- endif -%}" + CHAT_TEMPLATE


def test_tools_that_the_template_never_writes_are_refused():
    with pytest.raises(SampleError, match=r"has tools[\w.\[\]]*, which the chat template does not write") as caught:
        written(CHAT_TEMPLATE, tools=[TOOL])
    assert caught.value.reason == "template_ignores"


def test_an_option_that_is_none_is_absent_as_in_a_table_where_another_row_has_it():
    assert written(QUIET, chat_template_kwargs={"quiet": None, "of_another_row": None}) == written(QUIET)


@pytest.mark.parametrize("name", ["quite", "uiet", "message", "add_generation_prompt", "raise_exception"])
def test_an_option_that_is_no_variable_of_the_template_is_refused(name):
    with pytest.raises(SampleError, match=f"has {name}, which the chat template does not read; it reads quiet: corr"):
        written(QUIET, chat_template_kwargs={name: True})


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
    options = {"mode": False, "add_generation_prompt": False}
    VLMCollator(tiny_processor(chat_template=template)).collate([chat(chat_template_kwargs=options)])


def test_a_template_that_is_none_is_a_mistake_of_the_setup():
    with pytest.raises(ConfigError, match=r"chat template cannot be read \(TemplateSyntaxError: Expected"):
        written("{% if %}", chat_template_kwargs={"mode": False})
