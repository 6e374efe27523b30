"""A batch holds exactly what the model's own processor makes of each conversation: ids, pixels, types; and answers as
labels."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests.oracle.packed import collator_of
from tests.oracle.plain import CASES, Case, conversations, encoded, in_one_batch, media_of

QWEN = CASES[1]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def processed(case: Case) -> list[dict[str, torch.Tensor]]:
    return [encoded(case, talk) for talk in conversations(case)]


@every_case
def test_a_row_is_the_processors_tokens_one_sample_after_the_other(case: Case) -> None:
    samples = processed(case)
    row = collator_of(case).collate(conversations(case))
    assert row.input_ids.equal(torch.cat([sample["input_ids"] for sample in samples], 1))
    assert list(row.segments.lengths) == [sample["input_ids"].shape[1] for sample in samples]
    assert len(set(row.segments.lengths)) > 1


@every_case
def test_what_assistants_say_is_learned_with_what_ends_it_and_nothing_else(case: Case) -> None:
    row = collator_of(case).collate(conversations(case))
    none = torch.tensor([[-100]])
    expected = [torch.cat([sample["labels"][:, 1:], none], 1) for sample in processed(case)]
    assert row.shift_labels.equal(torch.cat(expected, 1)), "each token's target is the next one of its own sample"
    assert all((labels != -100).any() for labels in expected)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@every_case
def test_pixels_are_the_processors_in_the_order_of_the_samples(case: Case, layout: str) -> None:
    batch = collator_of(case, layout)(conversations(case))
    media = [media_of(sample) for sample in processed(case)]
    assert [bool(one) for one in media] == [case.has_images, False, case.has_images, case.has_images]
    for name in media[0]:
        assert batch[name].equal(torch.cat([one[name] for one in media if one])), name
    assert ("pixel_values" in batch) == case.has_images


@every_case
def test_a_padded_batch_is_the_one_that_anybody_would_make(case: Case) -> None:
    batch = collator_of(case, "padded")(conversations(case))
    expected = in_one_batch(processed(case), pad=case.tokenizer.pad_token_id)
    for name in ("input_ids", "attention_mask", "labels"):
        assert batch[name].equal(expected[name]), name
    assert not batch["attention_mask"].all(), "the samples have one length, so nothing is padded"


@pytest.mark.parametrize("case", CASES[:5], ids=str)  # those whose processors mark them
def test_image_tokens_are_marked_where_the_processor_marks_them(case: Case) -> None:
    row = collator_of(case).collate(conversations(case))
    assert row.mm_token_type_ids.equal(torch.cat([sample["mm_token_type_ids"] for sample in processed(case)], 1))
    assert row.mm_token_type_ids.any()


def test_everything_but_media_is_learned_on_request() -> None:
    row = collator_of(QWEN, train_on="all").collate(conversations(QWEN))
    media = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    ids_of_media = set(QWEN.tokenizer.convert_tokens_to_ids(list(media)))
    expected = []
    for sample in processed(QWEN):
        ids = sample["input_ids"][0].tolist()
        expected += [-100 if token in ids_of_media else token for token in ids[1:]] + [-100]
    assert row.shift_labels[0].tolist() == expected


def test_an_answer_that_says_so_is_read_and_not_learned() -> None:
    talk = conversations(QWEN)[1]
    first, said, *others = talk["messages"]
    row = collator_of(QWEN).collate([{"messages": [first, {**said, "train": False}, *others]}])
    labels = encoded(QWEN, talk)["labels"][0]
    first_answer = (labels != -100).nonzero()[:2, 0]  # "4" and its end
    labels[first_answer] = -100
    assert row.input_ids.equal(encoded(QWEN, talk)["input_ids"])
    assert row.shift_labels[0, :-1].equal(labels[1:])


@pytest.mark.parametrize("form", ["PIL", "bytes", "path"])
def test_images_come_as_pictures_bytes_or_paths(form: str, tmp_path: Path) -> None:
    talk = conversations(QWEN)[0]
    (question, answer) = talk["messages"]
    image, text = question["content"]
    file = io.BytesIO()
    image["image"].save(file, "PNG")
    Path(tmp_path, "image.png").write_bytes(file.getvalue())
    given = {"PIL": image["image"], "bytes": {"bytes": file.getvalue()}, "path": str(tmp_path / "image.png")}[form]
    sample = {"messages": [{**question, "content": [{"type": "image"}, text]}, answer], "images": [given]}
    row, expected = collator_of(QWEN)([sample]), encoded(QWEN, talk)
    assert row["input_ids"].equal(expected["input_ids"])
    assert row["pixel_values"].equal(expected["pixel_values"])
