"""Whatever a data set calls its columns, the same conversation comes out; what contradicts itself is refused."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest
from chats import gpt, human, learnt, picture, processor_of, says, text, user
from PIL import Image

from vlmpack.collate import VLMCollator
from vlmpack.data.formats import CALLING
from vlmpack.data.messages import ROLES, read_conversation
from vlmpack.errors import SampleError

A, B, C = (picture(20 + i, 30, seed=i) for i in range(3))
HOLE, FILM = {"type": "image"}, {"type": "video"}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"name": "t"}


def asked(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [user(content), says("5")], **columns}


def sources(refs: Any) -> list[Any]:
    return [ref.source for ref in refs]


def refusal(feature: dict[str, Any], **settings: Any) -> tuple[str, str]:
    with pytest.raises(SampleError) as caught:
        read_conversation(feature, **settings)
    return caught.value.reason, str(caught.value)


# ---------------------------------------------------------------------- shapes

NONE = {"bytes": None, "path": None}
FIVE = says([text("5")])
ONE_IMAGE_ROWS = {
    "TRL, placeholder": {"images": [A], "messages": [user([HOLE, text("Total?")]), FIVE]},
    "TRL, no placeholder": {"images": [A], "messages": [user("Total?"), FIVE]},
    "one image in an image column": {"image": A, "messages": [user("Total?"), FIVE]},
    "LLaMA-Factory, a marker in the text": {"images": [A], "messages": [user("<image>Total?"), FIVE]},
    "prompt and completion": {"images": [A], "prompt": [user("Total?")], "completion": [FIVE]},
    "inline": {"messages": [user([{"type": "image", "image": A}, text("Total?")]), FIVE]},
    "NeMo": {"conversation": [user([{"type": "image", "image": A}, text("Total?")]), FIVE]},
    "Arrow writes None where a key is missing": {
        "images": None,
        "messages": [
            user([{"type": "image", "image": A, "text": None}, {**text("Total?"), "image": None}]),
            says([text("5", image=None)]),
        ],
    },
    "Arrow writes a struct of None where a struct is missing": {
        "images": [A],
        "messages": [
            user([{"type": "image", "image": NONE, "text": None}, {"type": None, "image": NONE, "text": "Total?"}]),
            says([{"type": "text", "image_url": {"url": None}, "text": "5"}]),
        ],
    },
}


@pytest.mark.parametrize("feature", ONE_IMAGE_ROWS.values(), ids=ONE_IMAGE_ROWS)
def test_every_shape_gives_the_same_conversation(feature: dict[str, Any]) -> None:
    row = read_conversation(feature)
    assert row.messages == (user([HOLE, text("Total?")]), FIVE)
    assert (sources(row.media["image"]), row.media["video"]) == ([A], ())
    assert not any(isinstance(value, Image.Image) for part in row.messages[0]["content"] for value in part.values())


PLAIN = {
    "conversations with roles": ({"conversations": [user("hi")]}, [user("hi")]),
    "a prompt beside messages is a note": ({"messages": [user("hi")], "prompt": "ho"}, [user("hi")]),
    "a column of empty media": (asked("2 + 2?", image="", videos=[NONE]), [user("2 + 2?"), says("5")]),
    "empty keys": ({"messages": [user([text("?", image=NONE)], images=[])]}, [user([text("?")], images=[])]),
    "an answer that speaks of markers": ({"messages": [says("<image>")]}, [says("<image>")]),
    "a call without content": ({"messages": [says(None, tool_calls=[CALL])]}, [says("", tool_calls=[CALL])]),
    "a thought without content": ({"messages": [says(None, reasoning_content="x")]}, [says("", reasoning_content="x")]),
    "a system column": ({"system": "Be short.", **asked("?")}, [SYSTEM, user("?"), says("5")]),
    "the same in messages": ({"system": "Be short.", "messages": [SYSTEM, user("?")]}, [SYSTEM, user("?")]),
    "an empty system column": ({"system": "", "messages": [user("?")]}, [user("?")]),
}
READ = {
    "markers are placeholders, and the text around them stays as it is": (
        {"images": [A, B], "videos": ["a.mp4"], "messages": [SYSTEM, user("<image>\nand <video> or <image>? ")]},
        [SYSTEM, user([HOLE, text("\nand "), FILM, text(" or "), HOLE, text("? ")])],
        ([A, B], ["a.mp4"]),
    ),
    "Qwen's rows strip the text between markers": (
        {"image": [A, B], "conversations": [human("<image>\nand <image> Same?\n"), gpt(" No.\n")]},
        [user([HOLE, text("and"), HOLE, text("Same?")]), says(" No.\n")],
        ([A, B], []),
    ),
    "Qwen's rows hold videos too, and paths": (
        {"video": [["1.png"]], "image": "a.jpg", "conversations": [human("<video> or <image>?")]},
        [user([FILM, text("or"), HOLE, text("?")])],
        (["a.jpg"], [["1.png"]]),
    ),
    "images of several turns in the order of their placeholders": (
        {"images": [B], "messages": [user([{"type": "image", "image": A}]), user([HOLE, {"image": C}])]},
        [user([HOLE]), user([HOLE, HOLE])],
        ([A, B, C], []),
    ),
    "parts by their index": (
        asked([{**HOLE, "index": 1}, {**HOLE, "index": 0}, {**text("?"), "index": None}], images=[A, B]),
        [user([HOLE, HOLE, text("?")]), says("5")],
        ([B, A], []),
    ),
    "an image column of datasets": (
        {"images": [{"bytes": b"x", "path": None}], "messages": [user("?")]},
        [user([HOLE, text("?")])],
        ([{"bytes": b"x", "path": None}], []),
    ),
    **{name: (*row, ([], [])) for name, row in PLAIN.items()},
}


@pytest.mark.parametrize(("feature", "messages", "media"), READ.values(), ids=READ)
def test_rows_are_read(feature: dict[str, Any], messages: list[Any], media: tuple[list[Any], list[Any]]) -> None:
    before = json.dumps(feature, default=str)
    row = read_conversation(feature)
    assert list(row.messages) == messages
    assert (sources(row.media["image"]), sources(row.media["video"])) == media
    assert json.dumps(feature, default=str) == before, "the data set's own dictionaries were changed"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"image": "a.png"}, "a.png"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "url": "a.png"}, "a.png"),
        ({"type": "image", "bytes": b"x"}, {"bytes": b"x", "path": None}),
        ({"type": "image", "image": b"x"}, b"x"),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, {"bytes": b"x", "path": None}),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "data:image/png;base64,AA"),
    ],
)
def test_an_inline_image_may_be_written_in_many_ways(part: dict[str, Any], source: Any) -> None:
    row = read_conversation({"messages": [user([part])]})
    assert (sources(row.media["image"]), row.messages[0]["content"]) == ([source], [HOLE])


def test_resizing_keys_stay_with_their_image_whether_in_the_part_or_in_the_column() -> None:
    keyed = [{"type": "image", "image": A, "max_pixels": 9, "min_pixels": None}, {**HOLE, "resized_height": 7}]
    row = read_conversation({"images": [{"image": B, "min_pixels": 5}], "messages": [user(keyed)]})
    options = [dict(ref.options) for ref in row.media["image"]]
    assert options == [{"max_pixels": 9}, {"min_pixels": 5, "resized_height": 7}]


@pytest.mark.parametrize(
    ("value", "videos"),
    [
        ([A, B], [[A, B]]),
        (["a.mp4", "b.mp4"], ["a.mp4", "b.mp4"]),
        ([[A, B], [C]], [[A, B], [C]]),
        ("a.mp4", ["a.mp4"]),
        ([{"video": [A, B], "sample_fps": 4}], [[A, B]]),
    ],
)
def test_the_frames_of_one_video_or_the_paths_of_several(value: Any, videos: list[Any]) -> None:
    assert sources(read_conversation({"video": value, "messages": [user("?")]}).media["video"]) == videos


@pytest.mark.parametrize(("alias", "role"), [pair for pair in ROLES.items() if pair[0] not in CALLING])
def test_other_names_of_roles_are_understood_in_either_shape(alias: str, role: str) -> None:
    assert read_conversation({"messages": [{"role": alias, "content": "x"}]}).messages[0]["role"] == role
    assert read_conversation({"conversations": [{"from": alias, "value": "x"}]}).messages[0]["role"] == role


# ---------------------------------------------------------------------- refusals

TWICE = "of which only one would be read"
PATH = "a.png"
BAD_ROWS = {
    "no messages": ({"messages": []}, "messages must be a non-empty list of messages, got list"),
    "messages as text": ({"messages": "hi"}, "must be a non-empty list of messages, got str 'hi'"),
    "a message without a role": ({"messages": [{"content": "hi"}]}, "messages[0] must be a mapping with a"),
    "a message that is text": ({"messages": [user("?"), "hi"]}, "messages[1] must be a mapping with a role"),
    "sound": (asked([{"type": "audio", "audio": "a.wav"}]), "messages[0].content[0] is of type 'audio'"),
    "a text part without text": (asked([{"type": "text"}]), "content[0] is a text part without a text"),
    "a number among the parts": (asked([5]), "content[0] must be a mapping with a type, got int"),
    "a Qwen turn without a value": ({"conversations": [{"from": "human", "text": "hi"}]}, "conversations[0] must have"),
    "a prompt of text and a completion of messages": (
        {"prompt": "hi", "completion": [user("?")]},
        "prompt and completion must both be strings or both be lists of messages",
    ),
    "a message without content": (
        {"messages": [user("?"), {"role": "assistant", "text": "4", "content": None}]},
        "messages[1] (assistant) has no content; it has the keys role, text, content (None)",
    ),
    "an empty call": ({"messages": [says(None, tool_calls=[])]}, "has no content"),
    "an image beside a text": (asked([{**text("?"), "image": PATH}]), "content[0] has 'image'"),
    "a text beside an image": (asked([{"image": PATH, "text": "?"}]), "content[0] has 'text'"),
    "a video beside an image": (asked([{"image": PATH, "video": [PATH]}]), "content[0] has 'video'"),
    "a Qwen turn that says two things": (
        {"conversations": [human("hi"), gpt("4", reasoning_content="5")]},
        "conversations[1] has 'reasoning_content' beside its value",
    ),
    "an unknown role": (
        {"messages": [user("?"), {"role": "Assistant", "content": "4"}]},
        "unknown role 'Assistant' (did you mean 'assistant'?); known are system,",
    ),
    "an unknown role of Qwen": (
        {"conversations": [{"from": "Assistant", "value": "4"}]},
        "has the unknown role 'Assistant'",
    ),
    "another system message": ({"system": "Talk.", "messages": [SYSTEM, user("?")]}, "the column system says 'Talk.'"),
    "a system column and plain strings": (
        {"system": "Talk.", "prompt": "2 + 2?", "completion": "4"},
        "it has a column system, str 'Talk.'; write it into the prompt",
    ),
    "a system column of messages": ({"system": [SYSTEM], "messages": [user("?")]}, "the column system must be a"),
    "written twice": (asked("?", conversations=[human("ha")]), TWICE),
    "written twice, as a pair": (asked("?", prompt="a", completion="b"), TWICE),
    "tools twice": (
        asked("?", tools=[CALL], chat_template_kwargs={"tools": [CALL]}),
        "it has tools in a column and in",
    ),
    "sounds": (asked("?", audio={"path": "a.wav"}), "it has audio, which these models do not take"),
    "a column of None": ({"messages": None, "images": []}, "its messages is None"),
    "columns of None": ({"input_ids": None, "conversations": None}, "its input_ids and conversations is"),
    "half a pair": ({"prompt": "a", "completion": None}, "its completion is None; fill it, or leave"),
    **{
        f"{name} beside a conversation": (asked("?", **{name: [1]}), f"it has {name}, which belongs to inp")
        for name in ("pixel_values", "image_grid_thw", "completion_mask", "assistant_masks", "loss_mask")
    },
}
COUNT, AMBIGUOUS = "media_count_mismatch", "ambiguous_media"
BAD_MEDIA = {
    "fewer placeholders than images": ({"images": [A, B], "messages": [user([HOLE])]}, COUNT, "the messages have 1 im"),
    "a placeholder without an image": (asked([HOLE]), COUNT, "have 1 image placeholder(s) without a"),
    "a Qwen row with a marker too many": (
        {"image": A, "conversations": [human("<image><image>")]},
        COUNT,
        "have 2 image placeholder(s) without a source, but the columns hold 1 image(s)",
    ),
    "images without a user": ({"images": [A], "messages": [says("5")]}, COUNT, "1 image(s), but no user message to"),
    "a marker too few": (asked("<image> Total?", images=[A, B]), AMBIGUOUS, "the messages hold '<image>' 1"),
    "a marker in an answer": (
        {"images": [A], "messages": [user("hi"), says("<image> is the tag")]},
        AMBIGUOUS,
        "the messages hold '<image>' 1 time(s), 1 of them in the assistant's turns, for 1 image(s)",
    ),
    "a placeholder, and a column of another name": (asked([HOLE], imgs=[A]), COUNT, "give each placeholder its"),
    "images in the messages and the same in a column": (
        {"image": A, **ONE_IMAGE_ROWS["inline"]},
        COUNT,
        "but the columns hold 1 image(s); every image is in its message already: remove the column",
    ),
    "the attributes of a picture that was stored as JSON": (
        asked([{"type": "image", "image": {"im": 0, "mode": "RGB", "size": []}}]),
        "image_source",
        "the attributes of a PIL image, without its pixels, as datasets.map stores it; make",
    ),
    "a misspelt key beside an image": (
        asked([{"type": "image", "image": A, "max_pixel": 9}]),
        "vision_key",
        "the key 'max_pixel' beside an image or video is unknown; did you mean 'max_pixels'?",
    ),
    "a misspelt key in a column": (
        asked("?", videos=[{"video": [A], "total-pixels": 9}]),
        "vision_key",
        "the key 'total-pixels' beside an image or video is unknown; did you mean 'total_pixels'?",
    ),
    "two image columns": (asked("?", images=[A], image=A), AMBIGUOUS, "both a column image and a column"),
    "an image that is missing among others": (asked("?", images=[A, None]), "image_missing", "image 1 of the 2 in its"),
    "a first image that is missing": (asked("?", images=[None, A]), "image_missing", "image 0 of the 2 in its"),
    "an index twice": (asked([{**HOLE, "index": 0}] * 2, images=[A, B]), AMBIGUOUS, "have the index 0, 0"),
    "an index of one": (asked([{**HOLE, "index": 0}, HOLE], images=[A, B]), AMBIGUOUS, "have the index 0, N"),
}
REFUSED = {**{name: (row, "bad_row", said) for name, (row, said) in BAD_ROWS.items()}, **BAD_MEDIA}


@pytest.mark.parametrize(("feature", "reason", "message"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_contradicts_itself_is_refused_with_the_remedy(
    feature: dict[str, Any], reason: str, message: str
) -> None:
    seen, said = refusal(feature)
    assert seen == reason
    assert message in said


# ---------------------------------------------------------------------- markers whose medium is not there

MARKED = asked("<image>Total?")
MEDIA = ("image", "images", "video", "videos")
LOST = {
    "an empty column": ({**MARKED, "images": []}, "(its images is empty); give"),
    "a column of None": ({**MARKED, "image": None}, "(its image is None); give"),
    "a struct of None": ({**MARKED, "image": NONE}, "but the sample has no image to put"),
    "another library's": (
        asked("<image_00>?", image=None),
        "holds '<image_00>' 1 time(s), but the sample has no image",
    ),
    "a text part": (asked([text("<image>"), text("?")], image=None), "holds '<image>' 1 time"),
    "a prompt of messages": (
        {"prompt": MARKED["messages"][:1], "completion": MARKED["messages"][1:], "images": []},
        "holds '<image>' 1 time(s), but the sample has no image",
    ),
    "a plain prompt": ({"prompt": "<image>Total?", "completion": "5", "image": None}, "(its image is None); give"),
    "images, but no video": (asked("<image> or <video>?", image=A, video=None), "holds '<video>' 1 time(s), but the"),
    "Qwen's turns": (
        {"conversations": [human("<image>?"), gpt("5")], "image": None},
        "the columns hold 0 image(s); give each placeholder its image",
    ),
    "audio": (asked("<audio>What is it?", audios=[None]), "holds '<audio>' 1 time(s), but the sample has no audio to"),
}
"""Markers in samples with a column of media in which there is none, and what is said."""


@pytest.mark.parametrize(("feature", "message"), LOST.values(), ids=LOST)
def test_a_marker_whose_medium_was_lost_is_not_trained_on_as_text(feature: dict[str, Any], message: str) -> None:
    reason, said = refusal(feature)
    assert reason == "media_count_mismatch"
    assert message in said
    marker = next(x for x in ("<audio>", "<video>", "<image_00>", "<image>") if x in json.dumps(feature, default=str))
    for how in ({"has_vision": False}, {"markers": "text"}):
        row = read_conversation(feature, **how)
        assert marker in "".join(row.contents())


UNMARKED = {
    name: {key: row[key] for key in row if row[key] == A or key not in (*MEDIA, "audios")}
    for name, (row, _) in LOST.items()
}


@pytest.mark.parametrize("feature", UNMARKED.values(), ids=UNMARKED)
def test_without_such_a_column_a_marker_is_a_word_and_warned_of_once(feature: dict[str, Any]) -> None:
    collator = VLMCollator(processor_of())
    with pytest.warns(UserWarning, match="a user's text holds '<.*>', read as text: its sample has no column") as said:
        collator.collate([feature])
        collator.measure(feature)
    assert len(said) == 1
    assert "Choose markers='places' to refuse such samples" in str(said[0].message)
    with pytest.raises(SampleError, match=r"but the sample has no|without a source"):
        VLMCollator(processor_of(), markers="places").measure(feature)
    VLMCollator(processor_of(), markers="text").measure(feature)  # a warning would be an error


@pytest.mark.parametrize(
    "feature",
    [
        asked([{"type": "image", "image": A}, text("Is this an <image>?")]),
        {"messages": [user("Total?"), says("The tag is <image>")]},
        {"prompt": "<image>?", "completion": "5", "images": [A]},
    ],
)
def test_other_texts_are_not_warned_of(feature: dict[str, Any]) -> None:
    VLMCollator(processor_of()).collate([feature])
    VLMCollator(processor_of().tokenizer).collate([{"prompt": "<image>?", "completion": "5"}])


# ---------------------------------------------------------------------- other libraries' places


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Picture 1: <img>images/dog</img>\nWhat is it?", "image"),
        ("<image>dog</image>What?", "image"),
        ("<video>clip</video>What?", "video"),
        ("<audio>a</audio>What?", "audio"),
    ],
)
@pytest.mark.parametrize("columns", [{}, {"images": []}, {"images": [A]}])
def test_a_path_inside_a_text_is_refused(said: str, kind: str, columns: dict[str, Any]) -> None:
    for sample in (
        asked(said, **columns),
        asked([text(said)], **columns),
        {"conversations": [human(said), gpt("A dog.")], **columns},
        {"texts": [{"user": said, "assistant": "A dog."}], **columns},
        {"prompt": said, "completion": "A dog.", **columns},
    ):
        reason, message = refusal(sample)
        assert reason == "media_in_text"
        assert f"write <{kind}> there and the path into a column {kind}s" in message


@pytest.mark.parametrize("said", ["<image_1>What?", "In <ImageHere>?", "<|image_1|>\n?", "<image 1>.", "<|image|>?"])
def test_another_librarys_place_is_not_trained_on_beside_an_image_in_front(said: str) -> None:
    reason, message = refusal(asked(said, images=[A]))
    assert reason == "ambiguous_media"
    assert "does not place the image(s) of its column; write <image>" in message


def test_what_is_meant_as_text_is_text() -> None:
    for said in ("<img>a.jpg</img>", "<image_1>?", "<audio>?", "<image>?"):
        assert said in "".join(read_conversation(asked(said, images=[A]), markers="text").contents())
    for said in ('<img src="a.jpg"/>', "<img></img>", "<image_1>", "List<image>", "<video controls>"):
        assert said in "".join(read_conversation(asked(said)).contents())
    answer = says("<img>a.jpg</img>")
    assert read_conversation({"messages": [user("Write HTML."), answer]}).messages[1] == answer
    assert read_conversation(asked("<img>a.jpg</img>"), has_vision=False).media["image"] == ()


# ---------------------------------------------------------------------- what is trained on

OFF = [("weight", 0), ("weight", 0.0), ("loss", False), ("loss", 0), ("train", False)]


def two_answers(first: Any = (), second: Any = ()) -> dict[str, Any]:
    flags = [dict([flag] if flag else []) for flag in (first, second)]
    return {"messages": [user("2 + 2?"), says("four", **flags[0]), user("3 + 3?"), says("six", **flags[1])]}


def trained_text(feature: dict[str, Any], **settings: Any) -> str:
    return learnt(processor_of(), VLMCollator(processor_of(), **settings)([feature])["labels"][0].numpy())


@pytest.mark.parametrize("flag", OFF)
def test_an_answer_may_say_that_it_is_not_trained_on(flag: tuple[str, Any]) -> None:
    assert trained_text(two_answers(first=flag)) == "six<|im_end|>"
    assert trained_text(two_answers(second=flag)) == "four<|im_end|>"
    turns = [human("?"), {"from": "gpt", "value": "a", **dict([flag])}]
    row = read_conversation({"conversations": [*turns, gpt("b")]})
    assert row.turn_weights == ((("", 0),), (("", 1),))


def test_only_the_completion_is_trained_on_and_flags_do_not_bring_its_prompt_back() -> None:
    row = read_conversation({"prompt": [user("1"), says("2"), user("3")], "completion": [says("4")]})
    assert row.turn_weights == ((("", 0),), (("", 1),))
    turns = two_answers(second=("weight", 0))["messages"]
    row = read_conversation({"prompt": [user("?"), says("4", weight=1), user("?")], "completion": turns[1:]})
    assert row.turn_weights == ((("", 0),), (("", 1),), (("", 0),))


def test_training_on_everything_takes_them_too() -> None:
    off = two_answers(first=("weight", 0))
    assert trained_text(off, train_on="all") == trained_text(two_answers(), train_on="all")
    with pytest.raises(SampleError) as caught:
        trained_text(two_answers(("weight", 0), ("weight", 0)))
    assert caught.value.reason == "no_targets"


def range_of(first: Any, last: Any, *, train: Any = True) -> dict[str, Any]:
    return {"begin_offset": first, "end_offset": last, "train": train}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        *(([user("?"), says("4", weight=x)], f"].weight is {x!r}; a w") for x in (-1, "0", [0], float("nan"), 1e300)),
        *(([user("?"), says("4", train=x)], f"].train is {x!r}; a flag is true") for x in (2, 0.5, "false")),
        ([user("?"), says("4", weight=0, train=True)], "has {'weight': 0, 'train': True}, which contradict"),
        ([user("?"), says("4", weight=2, loss_scale=3)], "has {'weight': 2, 'loss_scale': 3}, which contradict"),
        ([user("?"), says([{**text("4"), "weight": -2}])], "messages[1].content[0].weight is -2; a weight"),
        ([user("?", weight=0.5), says("4")], "messages[0].weight is 0.5; only the assistant's turns have weights"),
        *(
            ([user("?"), says("4", train_detail=ranges)], "messages[1].train_detail is ")
            for ranges in (
                [{"begin_offset": 0}],
                [range_of(1, 0)],
                [range_of(0, "1")],
                [range_of(0, 1, train="no")],
                "4",
            )
        ),
        ([user("?", train_detail=[range_of(0, 0)]), says("4")], "(of the last character) and train, beside the text"),
        ([user("?"), says([text("4")], train_detail=[range_of(0, 0)])], "messages[1].train_detail is "),
    ],
)
def test_a_weight_that_means_nothing_is_refused(messages: list[Any], said: str) -> None:
    assert said in refusal({"messages": messages})[1]


def weighed(said: str, weight: Any) -> dict[str, Any]:
    return text(said, weight=weight)


END = "<|im_end|>"
WEIGHED = {
    "an answer": (says("It is 4.", weight=0.5), [(f"It is 4.{END}", 0.5)]),
    "ms-swift's name": (says("It is 4.", loss_scale=3), [(f"It is 4.{END}", 3)]),
    "axolotl's ranges": (
        says("5? No, 4.", weight=2, train_detail=[range_of(0, 2, train=False), range_of(2, 5)]),
        [(" No,", 2)],
    ),
    "texts of it": (says([{**text("5? "), "train": False}, weighed("No, 4.", 2)]), [(f" No, 4.{END}", 2)]),
    "one without": (says([weighed("It is", 1), text(" 4.")], weight=0.5), [("It is", 1), (f" 4.{END}", 0.5)]),
    "a token of two": (says([weighed("It i", 2), weighed("s 4.", 1)]), [("It", 2), (f" is 4.{END}", 1)]),
    "blanks": (says([weighed(" It\n", 2), weighed("\n  is 4. ", 1)]), [(" It\n\n ", 2), (f" is 4. {END}", 1)]),
}


@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl", "padded"), ("qwen3_vl", "packed"), ("internvl", "packed")])
@pytest.mark.parametrize(("answer", "expected"), WEIGHED.values(), ids=WEIGHED)
def test_a_weight_comes_with_each_label(answer: dict[str, Any], expected: list[Any], family: str, layout: str) -> None:
    batch = VLMCollator(processor_of(family), layout=layout)([{"messages": [user("2 + 2?"), answer]}])
    labels, weights = batch["labels"][0], batch.get("loss_weights")
    if weights is None:  # of a row, as its targets
        weights = batch["shift_weights"].roll(1, -1)
    runs = groupby(zip(labels.tolist(), weights[0].tolist(), strict=True), key=lambda pair: (pair[0] >= 0, pair[1]))
    decode = processor_of(family).tokenizer.decode
    assert [(decode([x for x, _ in run]), weight) for (is_label, weight), run in runs if is_label] == expected


def test_a_weight_that_nothing_would_weigh_is_refused() -> None:
    with pytest.raises(SampleError, match=r"has the weight 0\.5, but train_on='all' weights every token"):
        trained_text(two_answers(first=("weight", 0.5)), train_on="all")
    around = says([weighed("4", 0), {"type": "image", "image": A}, weighed("4", 1)])
    with pytest.raises(SampleError, match="the template does not write '44' once in it"):
        trained_text({"messages": [user("2 + 2?"), around]})


# ---------------------------------------------------------------------- answers without text


def shapes(blank: str) -> dict[str, dict[str, Any]]:
    turns = [human("2 + 2?"), gpt(blank)]
    ask = user("2 + 2?")
    return {
        "messages": {"messages": [ask, says(blank)]},
        "parts": {"messages": [ask, says([text(blank)])]},
        "no parts": {"messages": [ask, says([])]},
        "two answers": {"messages": [ask, says(blank)] * 2},
        "ShareGPT": {"conversations": turns},
        "pairs": {"texts": [{"user": "2 + 2?", "assistant": blank}]},
        "completion": {"prompt": "2 + 2 =", "completion": blank},
        "completion of messages": {"prompt": [ask], "completion": [says(blank)]},
        "not trained on beside it": {"messages": [ask, says("4", weight=0), ask, says(blank)]},
        "of one question": {"messages": [ask, says("4"), ask, says(blank)], "branch_turn": 1},
    }


@pytest.mark.parametrize("blank", ["", "  ", "\n\t"])
def test_an_empty_answer_is_refused_as_it_has_no_targets(blank: str) -> None:
    collator = VLMCollator(processor_of())
    for name, feature in shapes(blank).items():
        for use in (collator.measure, lambda sample: collator.collate([sample])):
            with pytest.raises(SampleError, match="only the end of a turn would be trained on") as caught:
                use(feature)
            assert (name, caught.value.reason) == (name, "no_targets")


def test_an_empty_answer_beside_one_with_text_is_kept() -> None:
    collator = VLMCollator(processor_of())
    both, alone = [user("?"), says("4"), user("?"), says("")], [user("?"), says("4")]
    assert collator.measure({"messages": both}).num_targets > collator.measure({"messages": alone}).num_targets > 1
    row = VLMCollator(processor_of(), train_on="all").collate([{"messages": [user("2 + 2?"), says("")]}])
    assert "2 + 2?" in learnt(processor_of(), row.labels)
