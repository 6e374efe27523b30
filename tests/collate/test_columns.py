"""What a sample is told whose columns are not those that are read: what it has, and which remedy is its own."""

import numpy as np
import pytest
from chats import chat, picture, processor_of

from vlmpack.collate import VLMCollator
from vlmpack.collate.columns import check_unread
from vlmpack.collate.conversation import read_conversation
from vlmpack.errors import Refusal

DROPPED = "set TrainingArguments(remove_unused_columns=False)"


def told(feature):
    with pytest.raises(Refusal) as caught:
        read_conversation(feature)
    assert caught.value.reason == "no_columns"
    assert caught.value.of_all
    return str(caught.value)


@pytest.mark.parametrize("feature", [{}, {"image": 0}, {"images": [0], "id": 5}, {"image_id": 5}, {"labels": [1]}])
def test_a_sample_of_which_no_text_is_left_was_stripped_by_a_trainer(feature):
    message = told(feature)
    assert DROPPED in message
    assert "TRL's trainers keep only messages, prompt, completion, image and images" in message


@pytest.mark.parametrize(
    ("feature", "remedy"),
    [
        ({"image": 0, "ground_truth": "{}"}, "receipts as CORD has them: make a conversation of each with "
         "vlmpack.data.to_conversation, or let open_dataset read them"),
        ({"prompt": "a", "completon": "b"}, "'completon': did you mean 'completion'? Rename the column"),
        ({"Message": []}, "'Message': did you mean 'messages'?"),
        ({"prompt": "a"}, "A prompt comes with its completion: give both"),
        ({"question": "a", "answer": "b"}, "Rename the column with the conversation to messages, or make messages of"),
    ],
)  # fmt: skip
def test_any_other_sample_is_told_its_own_remedy(feature, remedy):
    message = told(feature)
    assert "of the columns input_ids, messages, conversations, conversation, prompt (with completion); it" in message
    assert f"it has: {', '.join(sorted(feature))}." in message
    assert remedy in message
    assert DROPPED not in message


def test_of_many_columns_the_first_are_named():
    assert "it has: c10, c11, c12, c13, c14, c15, c16, c17, c18, c19, c20, c21 and 8 more." in told(
        {f"c{i}": "x" for i in range(10, 30)}
    )


# ---------------------------------------------------------------------- columns that nothing reads


@pytest.mark.parametrize("name", ["image_path", "img", "picture", "IMAGE_URL", "photos", "video_path"])
@pytest.mark.parametrize("value", ["a.jpg", ["https://a/b"], {"bytes": b"1", "path": None}])
def test_a_column_that_looks_like_the_only_medium_is_not_left_out_in_silence(name, value):
    with pytest.raises(Refusal, match=f"it has a column {name}, which looks like its image or video") as caught:
        check_unread(chat(**{name: value}), has_media=False, texts=[])
    assert caught.value.reason == "unread_column"
    assert check_unread(chat(**{name: value}), has_media=True, texts=[]) == (name,)


@pytest.mark.parametrize("name", ["file_name", "path", "frames", "anything"])
def test_a_column_of_files_is_one_by_what_it_holds(name):
    media = [picture()] if name == "anything" else ["images/0001.JPG"]
    with pytest.raises(Refusal, match="looks like its image or video"):
        check_unread(chat(**{name: media}), has_media=False, texts=[])
    assert check_unread(chat(**{name: "main.py"}), has_media=False, texts=[]) == (name,)


@pytest.mark.parametrize("name", ["image_id", "num_images", "image_width", "topic"])
def test_a_note_about_an_image_is_none(name):
    assert check_unread(chat(**{name: "a.jpg", "img": None, "pics": []}), has_media=False, texts=[]) == (name,)


@pytest.mark.parametrize(
    "more",
    [
        {"rejected_response": "no"},
        {"chosen": [{"role": "assistant", "content": "yes"}]},
        {"rejected_images": ["a.jpg"]},
        {"label": False},
        {"loss_scale": [1.0, 0.5]},
        {"sample_weight": np.array([0.0, 1.0])},
    ],
    ids=str,
)
def test_preferences_and_weights_are_not_left_out_in_silence(more):
    (name,) = more
    with pytest.raises(Refusal, match=f"it has a column {name}, which says what is learnt") as caught:
        check_unread(chat(**more), has_media=True, texts=[])
    assert caught.value.reason == "unread_column"


@pytest.mark.parametrize("more", [{"label": 3}, {"loss_scale": 1.0}, {"loss_scale": [1, 1]}, {"weight": 80}], ids=str)
def test_what_changes_nothing_may_stay(more):
    assert check_unread(chat(**more), has_media=True, texts=[]) == tuple(more)


def test_grounding_rows_of_ms_swift_do_not_train_on_the_names_of_their_places():
    objects = {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}
    with pytest.raises(Refusal, match="it has a column objects, from which ms-swift fills '<bbox>' in its text"):
        check_unread(chat(objects=objects), has_media=True, texts=["Find it.", "at <bbox>"])
    assert check_unread(chat(objects=objects), has_media=True, texts=["at 1, 2"]) == ("objects",)
    assert check_unread(chat(), has_media=True, texts=["at <bbox>"]) == ()


@pytest.mark.parametrize("place", ["<bbox>", "<ref-object>", "<quad>"])
def test_each_of_these_places_is_found_in_a_whole_sample(place):
    collator = VLMCollator(processor_of(), on_bad="skip")
    collator([chat(f"Find {place}.", "5", picture(), objects={"ref": ["cat"], "bbox": [[1, 2, 3, 4]]})])
    assert collator.skip_log.reasons == {"unread_column": 1}


@pytest.mark.parametrize(
    "value", [{"bytes": b"1", "path": None}, b"\xff\xd8\xff\xe0", [b"\x89PNG"], "data:image/png;base64,aa"], ids=str
)
def test_an_encoded_image_is_one_whatever_its_column_is_called(value):
    with pytest.raises(Refusal, match="it has a column screenshot, which looks like its image or video"):
        check_unread(chat(screenshot=value), has_media=False, texts=[])


def test_other_columns_are_named_once():
    collator = VLMCollator(processor_of(), on_bad="skip")
    rows = [chat(topic="a", note="b", source="c", id=7), chat(topic="d"), chat(mood=None)]
    with pytest.warns(UserWarning, match="samples have columns that nothing reads: topic, note; this is said once"):
        collator(rows)
    collator(rows)
    assert collator.skip_log.unread == ("topic", "note")
    assert collator.skip_log.refused == 0


def test_a_collator_refuses_what_is_left_out_of_any_kind_of_sample():
    tokens = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    rows = [chat(img="a.png"), {"prompt": "a", "completion": "b", "chosen": "c"}, {**tokens, "rejected_ids": [4]}]
    collator = VLMCollator(processor_of(), on_bad="skip")
    collator(rows)
    assert collator.skip_log.reasons == {"unread_column": 3}
