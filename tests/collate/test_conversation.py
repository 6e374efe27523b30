"""Conversation shapes: whatever a dataset calls its columns, the same conversation comes out."""

import pytest
from chats import picture
from PIL import Image

from vlmpack.collate.conversation import read_conversation
from vlmpack.errors import Refusal

A, B, C = (picture(20 + i, 30, seed=i) for i in range(3))
HOLE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def sources(refs):
    return [ref.source for ref in refs]


# ---------------------------------------------------------------------- the shapes

ONE_IMAGE_ROWS = {
    "TRL, placeholder": {
        "images": [A],
        "messages": [
            {"role": "user", "content": [HOLE, text("Total?")]},
            {"role": "assistant", "content": [text("5")]},
        ],
    },
    "TRL, no placeholder": {
        "images": [A],
        "messages": [{"role": "user", "content": "Total?"}, {"role": "assistant", "content": [text("5")]}],
    },
    "one image in an image column": {
        "image": A,
        "messages": [{"role": "user", "content": "Total?"}, {"role": "assistant", "content": [text("5")]}],
    },
    "LLaMA-Factory, a marker in the text": {
        "images": [A],
        "messages": [
            {"role": "user", "content": "<image>Total?"},
            {"role": "assistant", "content": [text("5")]},
        ],
    },
    "prompt and completion": {
        "images": [A],
        "prompt": [{"role": "user", "content": "Total?"}],
        "completion": [{"role": "assistant", "content": [text("5")]}],
    },
    "inline": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": A}, text("Total?")]},
            {"role": "assistant", "content": [text("5")]},
        ],
    },
    "NeMo": {
        "conversation": [
            {"role": "user", "content": [{"type": "image", "image": A}, text("Total?")]},
            {"role": "assistant", "content": [text("5")]},
        ],
    },
    "Arrow writes None where a key is missing": {
        "images": None,
        "videos": None,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": A, "text": None},
                    {"type": "text", "text": "Total?", "image": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "5", "image": None}]},
        ],
    },
    "Arrow writes a struct of None where a struct is missing": {
        "images": [A],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": {"bytes": None, "path": None}, "text": None},
                    {"type": None, "image": {"bytes": None, "path": None}, "text": "Total?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "image_url": {"url": None}, "text": "5"}]},
        ],
    },
}


@pytest.mark.parametrize("feature", ONE_IMAGE_ROWS.values(), ids=ONE_IMAGE_ROWS)
def test_every_shape_gives_the_same_conversation(feature):
    row = read_conversation(feature)
    assert row.messages == (
        {"role": "user", "content": [HOLE, text("Total?")]},
        {"role": "assistant", "content": [text("5")]},
    )
    assert sources(row.images) == [A]
    assert row.videos == ()


def test_markers_of_messages_are_holes_and_the_text_around_them_stays_as_it_is():
    row = read_conversation(
        {
            "images": [A, B],
            "videos": ["a.mp4"],
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "<image>\nand <video> or <image>? "},
                {"role": "assistant", "content": "No."},
            ],
        }
    )
    assert row.messages == (
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [HOLE, text("\nand "), {"type": "video"}, text(" or "), HOLE, text("? ")],
        },
        {"role": "assistant", "content": "No."},
    )
    assert (sources(row.images), sources(row.videos)) == ([A, B], ["a.mp4"])


def test_qwen_rows_put_images_where_their_markers_stand_and_strip_the_text_between():
    row = read_conversation(
        {
            "image": [A, B],
            "conversations": [
                {"from": "system", "value": "Be short."},
                {"from": "human", "value": "<image>\nand <image> Same?\n"},
                {"from": "gpt", "value": " No.\n"},
            ],
        }
    )
    assert row.messages == (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [HOLE, text("and"), HOLE, text("Same?")]},
        {"role": "assistant", "content": " No.\n"},
    )
    assert sources(row.images) == [A, B]


def test_qwen_rows_name_one_image_by_its_path():
    row = read_conversation({"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>"}]})
    assert sources(row.images) == ["a.jpg"]


def test_qwen_rows_hold_videos_too():
    row = read_conversation(
        {
            "video": [["1.png", "2.png"]],
            "image": A,
            "conversations": [{"from": "human", "value": "<video> or <image>?"}],
        }
    )
    assert row.messages[0]["content"] == [{"type": "video"}, text("or"), HOLE, text("?")]
    assert sources(row.videos) == [["1.png", "2.png"]]
    assert sources(row.images) == [A]


def test_conversations_with_roles_are_read_as_messages():
    assert read_conversation({"conversations": [{"role": "user", "content": "hi"}]}).messages == (
        {"role": "user", "content": "hi"},
    )


def test_images_of_several_turns_come_in_the_order_of_their_holes():
    row = read_conversation(
        {
            "images": [B],
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": A}, text("this")]},
                {"role": "assistant", "content": "ok"},
                {"role": "user", "content": [HOLE, text("that"), {"type": "image", "image": C}]},
            ],
        }
    )
    assert sources(row.images) == [A, B, C]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image", "image": A}, A),
        ({"image": "a.png"}, "a.png"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "url": "a.png"}, "a.png"),
        ({"type": "image", "bytes": b"x"}, {"bytes": b"x", "path": None}),
        ({"type": "image", "image": b"x"}, b"x"),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, {"bytes": b"x", "path": None}),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "data:image/png;base64,AA"),
    ],
)
def test_an_inline_image_may_be_written_in_many_ways(part, source):
    row = read_conversation({"messages": [{"role": "user", "content": [part]}]})
    assert sources(row.images) == [source]
    assert row.messages[0]["content"] == [HOLE]


def test_a_datasets_image_column_of_bytes_and_path():
    row = read_conversation({"images": [{"bytes": b"x", "path": None}], "messages": [{"role": "user", "content": "?"}]})
    assert sources(row.images) == [{"bytes": b"x", "path": None}]


def test_resizing_keys_stay_with_their_image_whether_in_the_part_or_in_the_column():
    row = read_conversation(
        {
            "images": [{"image": B, "min_pixels": 5}],
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": A, "max_pixels": 9, "min_pixels": None}]},
                {"role": "user", "content": [{"type": "image", "resized_height": 7}]},
            ],
        }
    )
    assert [dict(ref.options) for ref in row.images] == [{"max_pixels": 9}, {"min_pixels": 5, "resized_height": 7}]


def test_the_frames_of_one_video_or_the_paths_of_several():
    def videos(value):
        return sources(read_conversation({"video": value, "messages": [{"role": "user", "content": "?"}]}).videos)

    assert videos([A, B]) == [[A, B]]
    assert videos(["a.mp4", "b.mp4"]) == ["a.mp4", "b.mp4"]
    assert videos([[A, B], [C]]) == [[A, B], [C]]
    assert videos("a.mp4") == ["a.mp4"]
    assert videos([{"video": [A, B], "sample_fps": 4}]) == [[A, B]]


def test_only_the_turns_of_the_completion_are_learnt():
    row = read_conversation(
        {
            "prompt": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "3"},
            ],
            "completion": [{"role": "assistant", "content": "4"}],
        }
    )
    assert row.trained_turns == (False, True)
    assert [message["content"] for message in row.messages] == ["1", "2", "3", "4"]


def test_plain_prompt_and_completion_need_no_template():
    row = read_conversation({"prompt": "2 + 2 = ", "completion": "4"})
    assert row.plain == ("2 + 2 = ", "4")
    assert row.messages == ()


def test_tools_and_template_arguments_reach_the_template():
    row = read_conversation(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "t"}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert row.template_options == {"tools": [{"name": "t"}], "enable_thinking": False}


def test_a_message_keeps_its_other_keys():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "t"}]}
    assert read_conversation({"messages": [call]}).messages == (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "t"}]},
    )


def test_the_dataset_s_own_dictionaries_are_not_changed():
    feature = {"images": [A], "messages": [{"role": "user", "content": "Total?"}]}
    read_conversation(feature)
    assert feature == {"images": [A], "messages": [{"role": "user", "content": "Total?"}]}


def test_pixels_do_not_travel_through_the_template():
    row = read_conversation(ONE_IMAGE_ROWS["inline"])
    parts = [part for message in row.messages for part in message["content"]]
    assert len(parts) == 3
    assert not any(isinstance(value, Image.Image) for part in parts for value in part.values())


# ---------------------------------------------------------------------- refusals

USER = [{"role": "user", "content": "hi"}]
BAD_ROWS = {
    "fewer holes than images": (
        {"images": [A, B], "messages": [{"role": "user", "content": [HOLE]}]},
        "media_count_mismatch",
        "the messages have 1 image placeholder(s) without a source of their own, but the columns hold 2 image(s)",
    ),
    "a hole without an image": (
        {"messages": [{"role": "user", "content": [HOLE]}]},
        "media_count_mismatch",
        "have 1 image placeholder(s) without a source of their own, but the columns hold 0 image(s); give each",
    ),
    "a Qwen row with a marker too many": (
        {"image": A, "conversations": [{"from": "human", "value": "<image><image>"}]},
        "media_count_mismatch",
        "have 2 image placeholder(s) without a source of their own, but the columns hold 1 image(s)",
    ),
    "images without a user": (
        {"images": [A], "messages": [{"role": "assistant", "content": "5"}]},
        "media_count_mismatch",
        "1 image(s), but no user message to put them in",
    ),
    "a marker too few": (
        {"images": [A, B], "messages": [{"role": "user", "content": "<image> Total?"}]},
        "ambiguous_media",
        "the messages hold the text '<image>' 1 time(s), 0 of them in the assistant's turns, for 2 image(s) of the "
        "column, so it is not clear where these go; write one '<image>' for each outside the assistant's turns",
    ),
    "a marker in an answer": (
        {"images": [A], "messages": [*USER, {"role": "assistant", "content": "<image> is the tag"}]},
        "ambiguous_media",
        "the messages hold the text '<image>' 1 time(s), 1 of them in the assistant's turns, for 1 image(s)",
    ),
    "a hole, and a column of another name": (
        {"imgs": [A], "messages": [{"role": "user", "content": [HOLE]}]},
        "media_count_mismatch",
        "give each placeholder its image; it also has: imgs",
    ),
    "images in the messages and the same in a column": (
        {"image": A, **ONE_IMAGE_ROWS["inline"]},
        "media_count_mismatch",
        "but the columns hold 1 image(s); every image is in its message already: remove the column",
    ),
    "the attributes of a picture that was stored as JSON": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": {"im": 0, "mode": "RGB", "size": []}}]}]},
        "image_source",
        "the attributes of a PIL image, without its pixels, as datasets.map stores an image inside messages; make",
    ),
    "a misspelt key beside an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": A, "max_pixel": 9}]}]},
        "vision_key",
        "stands the key 'max_pixel', which is not known; did you mean 'max_pixels'?",
    ),
    "a misspelt key in a column": (
        {"videos": [{"video": [A], "total-pixels": 9}], "messages": [{"role": "user", "content": "?"}]},
        "vision_key",
        "stands the key 'total-pixels', which is not known; did you mean 'total_pixels'?",
    ),
    "two image columns": (
        {"images": [A], "image": A, "messages": USER},
        "ambiguous_media",
        "both a column image and a column images; keep one of them",
    ),
    "no messages": ({"messages": []}, "bad_row", "messages must be a non-empty list of messages, got list"),
    "messages as text": ({"messages": "hi"}, "bad_row", "must be a non-empty list of messages, got str 'hi'"),
    "a message without a role": (
        {"messages": [{"content": "hi"}]},
        "bad_row",
        "messages[0] must be a mapping with a role and a content, got dict with the keys content",
    ),
    "a message that is text": ({"messages": [USER[0], "hi"]}, "bad_row", "messages[1] must be a mapping with a role"),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]},
        "bad_row",
        "messages[0].content[0] is of type 'audio'; only text, image and video parts can be used",
    ),
    "a text part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "bad_row",
        "messages[0].content[0] is a text part without a text",
    ),
    "a number among the parts": (
        {"messages": [{"role": "user", "content": [5]}]},
        "bad_row",
        "messages[0].content[0] must be a mapping with a type, got int",
    ),
    "a Qwen turn without a value": (
        {"conversations": [{"from": "human", "text": "hi"}]},
        "bad_row",
        "conversations[0] must have a from and a value, got dict with the keys from, text",
    ),
    "a prompt of text and a completion of messages": (
        {"prompt": "hi", "completion": USER},
        "bad_row",
        "prompt and completion must both be strings or both be lists of messages",
    ),
}


MEDIA = ("image", "images", "video", "videos")
MARKED = {"messages": [{"role": "user", "content": "<image>Total?"}, {"role": "assistant", "content": "5"}]}
LOST = {
    "an empty column": ({**MARKED, "images": []}, "(its images is empty); give"),
    "a column of None": ({**MARKED, "image": None}, "(its image is None); give"),
    "a struct of None": ({**MARKED, "image": {"bytes": None, "path": None}}, "but the sample has no image to put"),
    "a text part": (
        {"messages": [{"role": "user", "content": [text("<image>"), text("?")]}], "image": None},
        "holds '<image>' 1 time",
    ),
    "a prompt of messages": (
        {"prompt": MARKED["messages"][:1], "completion": MARKED["messages"][1:], "images": []},
        "holds '<image>' 1 time(s), but the sample has no image",
    ),
    "a plain prompt": ({"prompt": "<image>Total?", "completion": "5", "image": None}, "(its image is None); give"),
    "images, but no video": (
        {"image": A, "video": None, "messages": [{"role": "user", "content": "<image> or <video>?"}]},
        "holds '<video>' 1 time(s), but the sample has no video to put there (its video is None)",
    ),
    "Qwen's turns": (
        {"conversations": [{"from": "human", "value": "<image>?"}], "image": None},
        "the columns hold 0 image(s); give each placeholder its image",
    ),
}
"""Markers in samples with a column of media in which there is none, and what is said."""


@pytest.mark.parametrize(("feature", "message"), LOST.values(), ids=LOST)
def test_a_marker_whose_medium_was_lost_is_not_learnt_as_text(feature, message):
    with pytest.raises(Refusal) as caught:
        read_conversation(feature)
    assert caught.value.reason == "media_count_mismatch"
    assert message in str(caught.value)


UNMARKED = {
    name: {key: row[key] for key in row if row[key] == A or key not in MEDIA} for name, (row, _) in LOST.items()
}


@pytest.mark.parametrize("feature", UNMARKED.values(), ids=UNMARKED)
def test_without_such_a_column_a_marker_is_text_unless_the_caller_says_otherwise(feature):
    row = read_conversation(feature)
    assert ("<video>" if "image" in feature else "<image>") in "".join(row.plain or row.texts())
    with pytest.raises(Refusal, match=r"but the sample has no|without a source of their own"):
        read_conversation(feature, markers="places")


@pytest.mark.parametrize("feature", [row for row, _ in LOST.values()], ids=LOST)
@pytest.mark.parametrize("how", [{"has_vision": False}, {"markers": "text"}], ids=["text model", "markers='text'"])
def test_where_no_marker_is_a_place_all_are_text(feature, how):
    row = read_conversation(feature, **how)
    assert ("<video>" if feature.get("image") == A else "<image>") in "".join(row.plain or row.texts())


def test_markers_that_are_text_leave_media_to_go_in_front():
    turns = [{"from": "human", "value": " Write <image>. "}, {"from": "gpt", "value": "<image>"}]
    row = read_conversation({"conversations": turns, "image": A}, markers="text")
    assert row.messages[0]["content"] == [{"type": "image"}, text("Write <image>.")]


def test_an_answer_may_speak_of_markers():
    answer = {"role": "assistant", "content": "The tag is <image>."}
    assert read_conversation({"messages": [*USER, answer]}).messages[1] == answer


@pytest.mark.parametrize(("feature", "reason", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_contradicts_itself_is_refused_with_the_remedy(feature, reason, message):
    with pytest.raises(Refusal) as caught:
        read_conversation(feature)
    assert caught.value.reason == reason
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("feature", "seen"),
    [
        ({"messages": None, "images": []}, "its messages is None"),
        ({"input_ids": None, "conversations": None}, "its input_ids and conversations is None"),
        ({"prompt": "a", "completion": None}, "its completion is None; fill it, or leave the sample out"),
    ],
)
def test_one_sample_s_empty_column_is_its_own_fault(feature, seen):
    with pytest.raises(Refusal, match=seen) as caught:
        read_conversation(feature)
    assert caught.value.reason == "bad_row"


# ---------------------------------------------------------------------- more than one


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def refusal_of(feature):
    with pytest.raises(Refusal) as caught:
        read_conversation(feature)
    assert caught.value.reason == "bad_row"
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"conversations": [{"from": "human", "value": "ha"}]}, "messages and conversations"),
        ({"prompt": "a", "completion": "b"}, "messages and prompt and completion"),
    ],
)
def test_a_sample_that_is_written_down_twice_is_refused(more, named):
    assert f"it has {named}, of which one would be read" in refusal_of({"messages": TURNS, **more})


def test_a_prompt_beside_messages_is_a_note():
    assert len(read_conversation({"messages": TURNS, "prompt": "hi"}).messages) == 2


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "completion_mask", "assistant_masks", "loss_mask"])
def test_what_belongs_to_tokens_is_refused_beside_a_conversation(name):
    assert f"it has {name}, which belongs to input_ids, and messages" in refusal_of({"messages": TURNS, name: [1]})
    assert read_conversation({"messages": TURNS, name: None, "audio": None}).messages


def test_sounds_are_refused():
    assert "it has audio, which these models cannot hear" in refusal_of({"messages": TURNS, "audio": {"path": "a.wav"}})
