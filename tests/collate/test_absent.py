"""What a sample is told whose columns are not those that are read: what it has, and which remedy is its own."""

import pytest

from vlmpack.collate.conversation import read_conversation
from vlmpack.collate.refusal import Refusal

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
