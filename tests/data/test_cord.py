"""CORD: receipts from every source, as conversations, and the tags read back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlmpack.collate import VLMCollator
from vlmpack.data.cord import DEEPEST, json2token, to_conversation, token2json
from vlmpack.errors import SampleError
from vlmpack.testing import SyntheticReceipts, tiny_processor

LUNCH = {
    "menu": [{"nm": "Mie Ayam", "cnt": "2 x", "price": "30,000"}, {"nm": "Es Teh", "price": "5,000"}],
    "sub_total": {"subtotal_price": "35,000", "tax_price": "3,500"},
    "total": {"total_price": "38,500"},
}
LUNCH_TEXT = (
    "<s_total><s_total_price>38,500</s_total_price></s_total>"
    "<s_sub_total><s_tax_price>3,500</s_tax_price><s_subtotal_price>35,000</s_subtotal_price></s_sub_total>"
    "<s_menu><s_price>30,000</s_price><s_nm>Mie Ayam</s_nm><s_cnt>2 x</s_cnt>"
    "<sep/><s_price>5,000</s_price><s_nm>Es Teh</s_nm></s_menu>"
)

keys = st.sampled_from(["nm", "cnt", "price", "sub", "etc"])
texts = st.text("ab1,. x\n-", min_size=1, max_size=8).map(str.strip).filter(bool)
dicts = st.deferred(lambda: st.dictionaries(keys, values, min_size=1, max_size=4))
values = texts | st.lists(texts, min_size=2, max_size=3) | dicts | st.lists(dicts, min_size=2, max_size=3)


def test_other_values_are_written_as_python_writes_them() -> None:
    assert json2token({"text_sequence": "x", "a": "1"}) == "<s_text_sequence>x</s_text_sequence><s_a>1</s_a>"
    assert json2token({"a": 3, "b": None, "c": [1.5, True]}) == "<s_c>1.5<sep/>True</s_c><s_b>None</s_b><s_a>3</s_a>"
    assert [json2token(value) for value in ({"text_sequence": "plain"}, {}, [])] == ["plain", "", ""]


@settings(max_examples=40)
@given(dicts | st.lists(dicts, min_size=2, max_size=3), st.booleans())
def test_reading_is_the_inverse_of_writing(value: Any, is_sorted: bool) -> None:
    assert token2json(json2token(value, sort_keys_descending=is_sorted)) == value


@pytest.mark.parametrize(
    ("value", "back"),
    [
        ({"a": ["1"]}, {"a": "1"}),
        ({"a": [{"b": "1"}]}, {"a": {"b": "1"}}),
        ({"a": {}}, {"a": ""}),
        ({"a": 7}, {"a": "7"}),
        ({"a": " 7 "}, {"a": "7"}),
        ({"text_sequence": "plain"}, {"text_sequence": "plain"}),
        ({}, {"text_sequence": ""}),
    ],
)
def test_what_tags_cannot_say_comes_back_in_the_plainest_form(value: Any, back: Any) -> None:
    assert token2json(json2token(value)) == back


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<s_nm>Teh", {"text_sequence": "Teh"}),
        ("<s_a>1</s_a><s_nm>Teh", {"a": "1"}),
        ("noise <s_a>1</s_a> noise <s_b>2</s_b> noise", {"a": "1", "b": "2"}),
        ("<s_a>1<s_a>2</s_a>", {"a": "1<s_a>2"}),
        ("<s_menu><s_nm>A</s_nm><sep/><s_nm>B</s_menu>", {"menu": {"nm": "A"}}),
        ("</s_a>", {"text_sequence": "</s_a>"}),
        ("<sep/><sep/>", {"text_sequence": "<sep/><sep/>"}),
        ("<s_a+(>1</s_a+(>", {"a+(": "1"}),
    ],
)
def test_malformed_text_is_read_as_far_as_it_goes(text: str, read: Any) -> None:
    back = token2json(text)
    assert back == read or (list(read) == ["text_sequence"] and list(back) == ["text_sequence"])


def test_endless_nesting_is_kept_as_text() -> None:
    depth = 5000
    value: Any = token2json("<s_a>" * depth + "x" + "</s_a>" * depth)
    for _ in range(DEEPEST):
        value = value["a"]
    assert value.startswith("<s_a><s_a>")


def record_of(**truth: Any) -> dict[str, Any]:
    return {"image": Image.new("RGB", (7, 11)), "ground_truth": json.dumps(truth)}


def test_a_record_is_the_conversation_of_nemo() -> None:
    record = record_of(gt_parse=LUNCH)
    question = [{"type": "image", "image": record["image"]}, {"type": "text", "text": "Read it."}]
    answer = [{"type": "text", "text": LUNCH_TEXT}]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert to_conversation(record, prompt="Read it.") == {"conversation": turns}
    assert to_conversation(record)["conversation"][0]["content"][1]["text"] == "Describe this image."


WITHOUT, UNREADABLE = "ground_truth_without_parse", "ground_truth_unreadable"


@pytest.mark.parametrize(
    ("truth", "reason", "seen"),
    [
        ('{"meta": {"image_id": 9}}', WITHOUT, r"holds no parse \(its keys: meta\); it needs 'gt_parse'"),
        ('{"gt_parses": []}', WITHOUT, "holds no parse"),
        ('{"gt_parses": "x"}', WITHOUT, "holds no parse"),
        ('{"gt_parse": ["x"]}', WITHOUT, "holds no parse"),
        ("{broken", UNREADABLE, "ground_truth is '{broken'; it must be a JSON string of a dict"),
        ("[1]", UNREADABLE, r"ground_truth is '\[1\]'; it must be"),
        ({"gt_parse": {}}, UNREADABLE, "ground_truth is {'gt_parse': {}}; it must be"),
        (None, "missing_column", r"the record has no ground_truth \(it has image, ground_truth\)"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(truth: Any, reason: str, seen: str) -> None:
    with pytest.raises(SampleError, match=f"^sample 4.*: .*{seen}") as caught:
        to_conversation({"image": "a.png", "ground_truth": truth}, index=4)
    assert caught.value.reason == reason
    assert caught.value.sample_id == (9 if "image_id" in str(truth) else None)


# ---------------------------------------------------------------------- tables of conversations


@pytest.fixture
def receipts(datasets: Any) -> Any:
    return datasets.Dataset.from_list(list(SyntheticReceipts(split="train", num=2, seed=0, scale=0.25)))


@pytest.mark.parametrize("removed", [[], ["image", "ground_truth"]])
def test_what_map_leaves_of_them_is_refused_with_the_way_out(receipts: Any, removed: list[str]) -> None:
    mapped = receipts.map(to_conversation, remove_columns=removed)
    with pytest.raises(SampleError, match=r"attributes of a PIL image, without its pixels, as datasets.map") as seen:
        VLMCollator(tiny_processor()).collate([mapped[0]])
    assert seen.value.reason == "image_source"
    assert "(dataset.with_transform)" in str(seen.value)
