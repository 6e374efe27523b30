"""Records to conversations as NeMo writes them, and the tags read back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
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
texts = st.text("ab1,. x\n-", min_size=1, max_size=8).filter(lambda text: text == text.strip())
dicts = st.deferred(lambda: st.dictionaries(keys, values, min_size=1, max_size=4))
values = texts | st.lists(texts, min_size=2, max_size=3) | dicts | st.lists(dicts, min_size=2, max_size=3)


class TestJson2Token:
    def test_keys_are_sorted_descending_and_items_joined(self) -> None:
        assert json2token(LUNCH) == LUNCH_TEXT

    def test_the_order_of_the_dict_is_kept_on_request(self) -> None:
        assert json2token({"a": "1", "b": "2"}, sort_keys_descending=False) == "<s_a>1</s_a><s_b>2</s_b>"
        assert json2token({"a": "1", "b": "2"}) == "<s_b>2</s_b><s_a>1</s_a>"

    def test_a_text_sequence_is_its_text(self) -> None:
        assert json2token({"text_sequence": "plain"}) == "plain"
        assert json2token({"text_sequence": "x", "a": "1"}) == "<s_text_sequence>x</s_text_sequence><s_a>1</s_a>"

    def test_other_values_are_written_as_python_writes_them(self) -> None:
        assert (
            json2token({"a": 3, "b": None, "c": [1.5, True]}) == "<s_c>1.5<sep/>True</s_c><s_b>None</s_b><s_a>3</s_a>"
        )

    def test_nothing_is_an_empty_text(self) -> None:
        assert json2token({}) == json2token([]) == ""


class TestToken2Json:
    def test_it_reads_what_json2token_wrote(self) -> None:
        assert token2json(LUNCH_TEXT) == LUNCH

    @given(dicts | st.lists(dicts, min_size=2, max_size=3))
    def test_it_is_the_inverse(self, value: Any) -> None:
        assert token2json(json2token(value)) == value

    @given(dicts)
    def test_it_is_the_inverse_whatever_the_order_of_keys(self, value: dict[str, Any]) -> None:
        assert token2json(json2token(value, sort_keys_descending=False)) == value

    def test_every_synthetic_receipt_comes_back(self) -> None:
        receipts = SyntheticReceipts(num=60, seed=5, scale=0.25)
        parses = [json.loads(receipts[at]["ground_truth"])["gt_parse"] for at in range(60)]
        assert [token2json(json2token(parse)) for parse in parses] == parses

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
    def test_what_tags_cannot_say_comes_back_in_the_plainest_form(self, value: Any, back: Any) -> None:
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
    def test_malformed_text_is_read_as_far_as_it_goes(self, text: str, read: Any) -> None:
        back = token2json(text)
        assert back == read or (list(read) == ["text_sequence"] and list(back) == ["text_sequence"])

    @given(st.lists(st.sampled_from(["<s_a>", "</s_a>", "<s_b>", "</s_b>", "<sep/>", "x", "<s_", ">"]), max_size=25))
    def test_no_text_makes_it_fail(self, pieces: list[str]) -> None:
        assert isinstance(token2json("".join(pieces)), dict | list)

    def test_endless_nesting_is_kept_as_text(self) -> None:
        depth = 5000
        value: Any = token2json("<s_a>" * depth + "x" + "</s_a>" * depth)
        for _ in range(DEEPEST):
            value = value["a"]
        assert value.startswith("<s_a><s_a>")


class TestConversation:
    def record(self, **truth: Any) -> dict[str, Any]:
        return {"image": Image.new("RGB", (7, 11)), "ground_truth": json.dumps(truth)}

    def test_it_is_the_conversation_of_nemo(self) -> None:
        record = self.record(gt_parse=LUNCH)
        assert to_conversation(record) == {
            "conversation": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": record["image"]},
                        {"type": "text", "text": "Describe this image."},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": LUNCH_TEXT}]},
            ]
        }

    def test_the_prompt_can_be_chosen(self) -> None:
        user, _ = to_conversation(self.record(gt_parse=LUNCH), prompt="Read it.")["conversation"]
        assert user["content"][1]["text"] == "Read it."

    def test_of_several_parses_the_first_is_taken(self) -> None:
        _, assistant = to_conversation(self.record(gt_parses=[{"a": "1"}, {"a": "2"}]))["conversation"]
        assert assistant["content"][0]["text"] == "<s_a>1</s_a>"

    @pytest.mark.parametrize(
        "truth", [{"meta": {"image_id": 9}}, {"gt_parses": []}, {"gt_parses": "x"}, {"gt_parse": ["x"]}]
    )
    def test_a_record_without_parse_is_refused(self, truth: dict[str, Any]) -> None:
        with pytest.raises(SampleError, match=r"sample 4.*holds no parse.*it needs 'gt_parse'") as caught:
            to_conversation(self.record(**truth), index=4)
        assert caught.value.reason == "ground_truth_without_parse"
        assert caught.value.sample_id == truth.get("meta", {}).get("image_id")

    @pytest.mark.parametrize(
        ("text", "seen"),
        [
            ("{broken", r"a string that is not JSON \(.*\): '\{broken'"),
            ("[1]", "JSON of a list"),
            (None, "NoneType"),
            ({"gt_parse": {}}, "dict"),
        ],
    )
    def test_an_unreadable_ground_truth_is_refused(self, text: Any, seen: str) -> None:
        with pytest.raises(SampleError, match=f"sample 0: ground_truth is {seen}; it must be a JSON string") as caught:
            to_conversation({"image": None, "ground_truth": text})
        assert caught.value.reason == "ground_truth_unreadable"

    def test_a_record_without_its_columns_is_refused(self) -> None:
        with pytest.raises(
            SampleError, match=r"^sample 3: the record has no ground_truth \(it has image, text\)"
        ) as seen:
            to_conversation({"image": None, "text": "x"}, index=3)
        assert seen.value.reason == "missing_column"


class TestDatasets:
    """A table of receipts of the datasets library."""

    @pytest.fixture
    def receipts(self) -> Any:
        datasets = pytest.importorskip("datasets", reason="waits for the datasets library (extra [data])")
        datasets.disable_progress_bars()
        return datasets.Dataset.from_list(list(SyntheticReceipts(split="train", num=2, seed=0, scale=0.25)))

    def test_the_recipe_makes_conversations_when_they_are_asked_for(self, receipts: Any) -> None:
        readme = Path(__file__).parents[2] / "vlmpack" / "data" / "README.md"
        (recipe,) = re.findall(r"```py\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
        names: dict[str, Any] = {"receipts": receipts}
        exec(compile(recipe, str(readme), "exec"), names)
        chats = names["chats"]
        batch = VLMCollator(tiny_processor()).collate([chats[0], chats[1]])
        truth = VLMCollator(tiny_processor()).collate([to_conversation(record) for record in receipts])
        assert batch.input_ids.tolist() == truth.input_ids.tolist()

    @pytest.mark.parametrize("removed", [[], ["image", "ground_truth"]])
    def test_what_map_leaves_of_them_is_refused_with_the_way_out(self, receipts: Any, removed: list[str]) -> None:
        mapped = receipts.map(to_conversation, remove_columns=removed)
        with pytest.raises(
            SampleError, match=r"attributes of a PIL image, without its pixels, as datasets.map"
        ) as seen:
            VLMCollator(tiny_processor()).collate([mapped[0]])
        assert seen.value.reason == "image_source"
        assert "(dataset.with_transform)" in str(seen.value)
