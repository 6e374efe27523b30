"""Encoding: the same ids and patches as the processor gives, one sample at a time."""

import json

import numpy as np
import pytest
import torch
from chats import FAMILIES, Frames, chat, learnt, picture, processor_of, says, text, user
from fixtures.processors import tiny_processor

from vlmpack.collate import VLMCollator
from vlmpack.collate.encode import Encoder
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.images import ImageLimits
from vlmpack.errors import ConfigError, FamilyError, SampleError
from vlmpack.testing.processors import CHAT_TEMPLATE


def encoder(processor, train_on="assistant"):
    return Encoder(processor=processor, metadata=read_processor(processor), limits=ImageLimits(), train_on=train_on)


def encode(feature, family="qwen3_vl"):
    return encoder(processor_of(family)).encode(feature)


def refusal(feature, **settings):
    with pytest.raises(SampleError) as caught:
        encode(feature, **settings)
    return caught.value


# ---------------------------------------------------------------------- equal to the processor


@pytest.mark.parametrize("sample_fps", [2.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_is_written_as_the_processor_writes_it(family, sample_fps):
    frames = [picture(64, 64, seed=i) for i in range(4)]
    element = {"type": "video", "video": frames, "sample_fps": sample_fps}
    messages = [user([element, {"type": "text", "text": "What?"}])]
    answer = says("A cat")
    sample = encode({"messages": [*messages, answer]}, family)

    processor = tiny_processor(family)
    processor.video_processor = Frames(processor, frames, sample_fps)
    holes = [user([{"type": "video"}, {"type": "text", "text": "What?"}]), answer]
    text = processor.apply_chat_template(holes, tokenize=False)
    processed, replacements = processor._process_videos([np.stack([np.asarray(f) for f in frames])])
    (expanded,), _ = processor.get_text_with_replacements([text], videos_replacements=replacements)

    assert sample.input_ids.tolist() == processor.tokenizer(expanded)["input_ids"]
    (video,) = sample.videos
    assert torch.equal(video.pixels, processed["pixel_values_videos"])
    assert [list(video.grid)] == processed["video_grid_thw"].tolist()
    assert [video.seconds] == processed.get("second_per_grid_ts", [None])
    assert (video.seconds is not None) == (family == "qwen2_5_vl")
    assert (sample.types == 2).sum() == np.prod(video.grid) // 4


# ---------------------------------------------------------------------- what is learnt


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        ({"prompt": [user("1"), says("two")], "completion": [says("four")]}, "four<|im_end|>"),
        ({"prompt": "75,", "completion": "000"}, "000<|im_end|>"),
        ({"prompt": "a", "completion": "b<|im_end|>"}, "b<|im_end|>"),  # and no second end
        ({"prompt": "<image>", "completion": "<image>", "image": picture(64, 64)}, "<image><|im_end|>"),
    ],
)
def test_completions_are_trained_on_with_their_end(feature, text):
    assert learnt(processor_of(), encode(feature).labels) == text


# ---------------------------------------------------------------------- refusals


def answered(**more):
    return {"messages": [user("?"), {"role": "assistant", "content": "5", **more}]}


def calling(function):
    return answered(tool_calls=[{"function": function}])


TYPED = {
    **{
        f"{token} in the {place}": chat(**{place: f"look: {token}"})
        for token in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>")
        for place in ("question", "answer")
    },
    "a plain completion": {"prompt": "a", "completion": "<|image_pad|>"},
    "joined of two parts": answered(content=[text("5<|im_"), text("end|> a")]),
    "in thoughts": answered(reasoning_content="hm<|im_end|> and more"),
    "in a call": calling({"name": "sum", "arguments": {"of": ["<|im_end|>"]}}),
    "a call's key": calling({"name": "sum", "arguments": {"<|im_end|>": 1}}),
    "a key that XML ends": calling({"name": "sum", "arguments": {"at<|im_end|": 1}}),
    "a name in XML": calling({"name": "|im_end|"}),
    "a call in an array": answered(tool_calls=np.array([{"function": {"name": "sum<|im_end|>"}}], dtype=object)),
    "an id": answered(tool_call_id="<|im_end|>"),
    "a key": answered(**{"name<|im_end|>": "x"}),
    "a tool's key": chat(tools=[{"function": {"name": "sum", "parameters": {"properties": {"<|im_end|>": {}}}}}]),
    "in a tool's set": chat(tools=[{"function": {"name": "sum", "parameters": {"required": {"<|im_end|>"}}}}]),
    "a key beside a tool": chat(tools=[{"<|im_end|>": {}}]),
    "an option": chat(chat_template_kwargs={"mode": "<|im_end|>"}),
    "a key in an option": chat(chat_template_kwargs={"mode": [{"<|im_end|>": 1}]}),
}


@pytest.mark.parametrize("feature", TYPED.values(), ids=TYPED)
def test_tokens_of_the_template_typed_by_a_person_are_refused_wherever_they_stand(feature):
    error = refusal(feature)
    assert error.reason == "reserved_token_in_text"
    assert ", which only the processor and the chat template may write; remove it" in str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_markers_of_a_plain_prompt_become_placeholders(family):
    media = {"image": picture(64, 64), "videos": [[picture(64, 64, seed=1)] * 2]}
    marked = encode({"prompt": "<image> or <video>?", "completion": "5", **media}, family)
    holes = [f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")]
    written = encode({"prompt": f"{holes[0]} or {holes[1]}?", "completion": "5", **media}, family)
    assert marked.input_ids.tolist() == written.input_ids.tolist()
    assert (marked.types == 1).any()
    assert (marked.types == 2).any()


VIDEO = [[picture(64, 64)] * 2]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("prompt", "media", "reason", "seen"),
    [
        ("a", {"image": picture()}, "placeholder_mismatch", "has 0 image placeholder(s) '<|image_pad|>' for 1"),
        (
            "<image><image>",
            {"image": picture()},
            "placeholder_mismatch",
            "for 1 image(s); write <image> for each image",
        ),
        ("<|image_pad|>" * 2, {"image": picture()}, "placeholder_mismatch", "has 2 image placeholder(s)"),
        ("<|image_pad|>", {}, "placeholder_mismatch", "its text has 1 image placeholder(s) '<|image_pad|>' for 0"),
        ("<|video_pad|>", {}, "placeholder_mismatch", "has 1 video placeholder(s) '<|video_pad|>' for 0 video(s)"),
        ("<|video_pad|>" * 2, {"videos": VIDEO}, "placeholder_mismatch", "2 video placeholder(s) '<|video_pad|>' for"),
    ],
)
def test_plain_prompts_whose_places_do_not_match_their_media_are_refused(family, prompt, media, reason, seen):
    error = refusal({"prompt": prompt, "completion": "b", **media}, family=family)
    assert error.reason == reason
    assert seen in str(error)


HALF = json.loads(r'"a smile: \ud83d, halved"')
BAD_TEXTS = [
    chat(question=HALF),
    chat(answer=HALF),
    {"prompt": HALF, "completion": "b"},
    {"prompt": "a", "completion": HALF},
    {**chat(), "chat_template_kwargs": {"signature": HALF}},
]


@pytest.mark.parametrize("feature", BAD_TEXTS, ids=["question", "answer", "prompt", "completion", "argument"])
def test_half_a_character_is_refused_wherever_it_comes_from(feature):
    processor = tiny_processor(chat_template=CHAT_TEMPLATE + "{{- signature -}}")
    with pytest.raises(
        SampleError, match=r"holds '\\ud83d', half of a surrogate pair, in '.*a smile: \\ud83d, "
    ) as caught:
        encoder(processor).measure(feature)
    assert caught.value.reason == "bad_text"


HEADER = "('reply' if loop.index > 2 else message['role']) + '\\n'"
TEMPLATES = {
    "placeholder_mismatch": (
        CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""),
        r"its text has 0 image placeholder\(s\) '<\|image_pad\|>' for 1 image",
    ),
    "template_error": (
        "{{ raise_exception('Only user and assistant roles are supported!') }}",
        r"cannot write its messages .*Only user and assistant roles are supported!",
    ),
    "turn_mismatch": (CHAT_TEMPLATE.replace("message['role'] + '\\n'", HEADER), r"wrote 1 .*assistant' turns for 2"),
}


@pytest.mark.parametrize(("reason", "template", "fault"), [(name, *row) for name, row in TEMPLATES.items()])
def test_a_template_that_forgets_images_or_headers_or_fails_is_noticed(reason, template, fault):
    feature = chat("?", "x", picture())
    feature["messages"] = [*feature["messages"], *chat()["messages"]]
    with pytest.raises(SampleError, match=fault) as caught:
        encoder(tiny_processor(chat_template=template)).encode(feature)
    assert caught.value.reason == reason


def test_a_template_without_chatml_is_a_mistake_of_the_setup_with_a_remedy():
    template = CHAT_TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")
    seen = r"no '<.im_start.>assistant' turns for 1 assistant message.*train_on='all'"
    with pytest.raises(SampleError, match=seen):
        encoder(tiny_processor(chat_template=template)).encode(chat())
    with pytest.raises(SampleError, match=f"^sample 0: .*{seen}"):
        VLMCollator(tiny_processor(chat_template=template))([chat()])
    assert encoder(tiny_processor(chat_template=template), "all").encode(chat()).num_targets > 0


def test_a_processor_without_a_template_is_a_mistake_of_the_setup():
    processor = tiny_processor()
    processor.chat_template = None
    with pytest.raises(ConfigError, match=r"the processor has no chat template.*give prompt and completion as strings"):
        encoder(processor).encode(chat())
    assert encoder(processor).encode({"prompt": "a", "completion": "b"}).num_targets == 2


def test_an_image_processor_s_own_refusal_is_passed_on():
    processor = tiny_processor()
    processor.image_processor.size["longest_edge"] = 0
    with pytest.raises(
        SampleError, match="image 0: the image processor refused it: `size` dict must contain"
    ) as caught:
        encoder(processor).encode(chat("?", "x", picture()))
    assert caught.value.reason == "image_processing"


def test_a_processor_of_another_kind_is_refused():
    with pytest.raises(FamilyError, match=r"Qwen2VLImage.*, only .*Qwen2VLProcessor, .*Qwen2_5_VLPro.*Qwen3VLProc"):
        read_processor(processor_of().image_processor)


def test_a_tokenizer_without_vision_tokens_is_refused():
    processor = tiny_processor()
    processor.image_token = "<|no_such_token|>"
    with pytest.raises(ConfigError, match=r"tokenizer has no token '<.no_such_token.>'; use the tokenizer of a"):
        read_processor(processor)
