"""Every format that people have, as its own documentation shows it: opened, and collated with the text and the images.

Each example is written down as in the documentation of the library that is named, with its pictures drawn here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from chats import gpt, human, says, text, user
from measured import encoded

from vlmpack.collate import VLMCollator
from vlmpack.data import open_dataset
from vlmpack.data.formats import as_messages
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import PackedRow
from vlmpack.testing import tiny_processor

PROCESSOR = tiny_processor()
COLLATOR = VLMCollator(PROCESSOR, layout="packed")


def written(rows: Any, folder: Path, name: str = "data.jsonl") -> Path:
    """The rows in a file, with the pictures that examples name beside it."""
    for picture in ("0.png", "x.jpg", "x.png", "images/1.jpg", "GCC_train_002582585.jpg"):
        path = folder / picture
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(64, 64, "PNG"))
    is_list = name.endswith(".json")
    (folder / name).write_text(json.dumps(rows) if is_list else "".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def read(sample: dict[str, Any]) -> tuple[str, int]:
    """The text that a sample becomes, its image tokens as one, and the number of its images."""
    row = COLLATOR.collate([sample])
    assert isinstance(row, PackedRow)
    ids = row.input_ids[0].tolist()
    pad = PROCESSOR.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    said = PROCESSOR.tokenizer.decode([i for at, i in enumerate(ids) if i != pad or ids[at - 1] != pad])
    return said, len(row.metadata.media.images)


def chat(*turns: str) -> str:
    """The text of turns by user and assistant, as the tiny template writes them."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[at % 2]}\n{turn}<|im_end|>\n" for at, turn in enumerate(turns))


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM = "<|im_start|>system\n<system><|im_end|>\n"
PNG = base64.b64encode(encoded(64, 64, "PNG")).decode()
FOUR = SYSTEM + chat("<query1>", "<response1>", "<query2>", "<response2>")
ALPACA = {"instruction": "human instruction", "input": "human input", "output": "model response", "images": ["x.jpg"]}

CALL = {"name": "sum", "arguments": {"a": 1}}
CALLED = {"type": "function", "function": CALL}
CALLED_IN_TEXT = {"type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
IMAGE_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
V1_QUESTION = [{"type": "image_url", "value": "0.png"}, {"type": "text", "value": "What is it?"}]
PAIRS = [{"human": f"<query{at}>", "assistant": f"<response{at}>"} for at in (1, 2)]


def turns(question: str, answer: str) -> list[dict[str, Any]]:
    """LLaVA's."""
    return [human(question), gpt(answer)]


DOCUMENTED = {
    "LLaVA, Finetune_Custom_Data.md": (
        {"id": "997bb945", "image": "x.jpg", "conversations": turns("<image>\nWhat is it?", "Art.")},
        chat(f"{IMAGE}What is it?", "Art."),
    ),
    "ms-swift, Custom-dataset.md: ShareGPT": ({"system": "<system>", "conversation": PAIRS}, FOUR),
    "ms-swift, Custom-dataset.md: Query-Response": (
        {
            "system": "<system>",
            "query": "<query2>",
            "response": "<response2>",
            "history": [["<query1>", "<response1>"]],
        },
        FOUR,
    ),
    "LLaMA-Factory, data/README.md: Alpaca": (ALPACA, chat(f"{IMAGE}human instruction\nhuman input", "model response")),
    "The Cauldron and FineVision, dataset cards": (
        {"images": ["0.png"], "texts": [{"user": "Where is it?", "assistant": "Here.", "source": "x"}], "source": "y"},
        chat(f"{IMAGE}Where is it?", "Here."),
    ),
    "LLaMA-Factory v1, data_preparation/data_processing.md": (
        {"messages": [user(V1_QUESTION, loss_weight=0.0), says([{"type": "text", "value": "Art."}], loss_weight=1.0)]},
        chat(f"{IMAGE}What is it?", "Art."),
    ),
    "transformers, chat_templating_multimodal.md: base64": (
        {"messages": [user([{"type": "image", "base64": PNG}, text("?")]), says("Art.")]},
        chat(f"{IMAGE}?", "Art."),
    ),
    "MiniCPM-V, finetune/readme.md": (
        {
            "id": "1",
            "image": {"<image_00>": "0.png", "<image_01>": "x.png"},
            "conversations": [user("<image_01>\n<image_00>\nCompare them."), says("They are alike.")],
        },
        chat(f"{IMAGE}\n{IMAGE}\nCompare them.", "They are alike."),
    ),
    "ms-swift and the first Qwen-VL: media in texts": (
        {"query": "Picture 1:<img>0.png</img>\nWhat is it?", "response": "Art."},
        chat(f"Picture 1:{IMAGE}\nWhat is it?", "Art."),
    ),
    "the same in LLaVA's turns": (
        {"conversations": turns("<img>0.png</img>?", "<img>0.png</img>")},
        chat(f"{IMAGE}?", "<img>0.png</img>"),
    ),
    "Anthropic, vision.md": (
        {"messages": [user([IMAGE_PART, text("What?", cache_control={"type": "ephemeral"})]), says([text("Art.")])]},
        chat(f"{IMAGE}What?", "Art."),
    ),
    "OpenAI, images and vision: responses": (
        {
            "messages": [
                user(
                    [
                        {"type": "input_text", "text": "What is it?"},
                        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
                    ]
                ),
                says([{"type": "output_text", "text": "Art.", "annotations": []}]),
            ]
        },
        chat(f"What is it?{IMAGE}", "Art."),
    ),
    "Qwen, qwen-vl-finetune: a folder for each sample": (
        {"data_path": "images", "image": "1.jpg", "conversations": turns("<image>\nWhat?", "Art.")},
        chat(f"{IMAGE}What?", "Art."),
    ),
    "A-OKVQA and CLEVR: a number": (
        {"image": "0.png", "question": "How many?", "answer": 4},
        chat(f"{IMAGE}How many?", "4"),
    ),
    "VQAv2: ten answers": (
        {"image": "0.png", "question": "Color?", "answers": [{"answer": a} for a in ("red", "pink", "rose", "pink")]},
        chat(f"{IMAGE}Color?", "pink"),
    ),
    "TextVQA: answers of equal number": (
        {"image": "0.png", "question": "Brand?", "answers": ["nokia", "Nokia"]},
        chat(f"{IMAGE}Brand?", "nokia"),
    ),
}
THOUGHT = {"type": "thinking", "thinking": "Add.", "signature": "x"}
USED = {"type": "tool_use", "id": "t1", "name": "sum", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [text("2")]}
TURNS = {
    "Anthropic: tools": (
        [user("1 + 1?"), says([THOUGHT, text("Let me see."), USED]), user([RESULT, text("Go on."), text("Please.")])],
        [
            user("1 + 1?"),
            says([text("Let me see.")], tool_calls=[{"id": "t1", **CALLED}], reasoning_content="Add."),
            {"role": "tool", "tool_call_id": "t1", "content": [text("2")]},
            user([text("Go on."), text("Please.")]),
        ],
    ),
    "LLaMA-Factory v1: thoughts, calls and weights": (
        [
            says(
                [{"type": "reasoning", "value": "Add."}, {"type": "tool_call", "value": json.dumps(CALL)}],
                loss_weight=0.5,
            )
        ],
        [says("", weight=0.5, tool_calls=[CALLED_IN_TEXT], reasoning_content="Add.")],
    ),
    "OpenAI: audio": (
        [user([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}])],
        [user([{"type": "audio", "audio": "data:audio/wav;base64,AAAA"}])],
    ),
    "a medium's keys stay beside it": (
        [user([{"type": "video", "base64": "AAAA", "fps": 2}])],
        [user([{"type": "video", "video": "data:video;base64,AAAA", "fps": 2}])],
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_parts_of_other_libraries_are_written_as_messages(name: str) -> None:
    given, messages = TURNS[name]
    assert as_messages({"messages": given}) == {"messages": messages}
    assert as_messages({"messages": messages}) == {"messages": messages}


def test_anthropics_system_and_tools_are_columns() -> None:
    row = {
        "system": [text("Be brief.")],
        "tools": [{"name": "sum", "description": "Adds.", "input_schema": {"type": "object"}}],
    }
    function = {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}
    assert as_messages(row) == {"system": "Be brief.", "tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"image": {"<image_00>": "a"}, "messages": [user("?")]}, "has images <image_00>, which"),
        ({"messages": [says([{"type": "tool_call", "value": "{"}])]}, "is no JSON of a name"),
        ({"messages": [says([USED, {"type": "text"}])]}, "has a part of type 'text' where its place"),
        ({"messages": [says([THOUGHT], reasoning_content="a")]}, "has reasoning_content beside the message and in its"),
        ({"question": "?", "answer": True}, "no text for answer, but True"),
        ({"question": "?", "choices": ["a", "b"], "answer": 1}, "has choices, which its question does not show"),
        ({"question": "?", "answers": []}, r"no text for answers, but \[\]"),
        ({"instruction": "Double it.", "input": 0, "output": "0"}, "no text for input, but 0"),
        ({"input": "2 + 2?", "response": "4"}, "has input and response, but no question"),
        ({"query": None, "history": [["?", "A"]], "response": "4"}, "has history and response, but no question"),
        ({"image": {"<image_00>": None}, "messages": [user("<image_00>?"), says("A")]}, "places <image_00>, but that"),
    ],
)
def test_what_contradicts_itself_is_refused(row: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        as_messages(row)
    with pytest.raises(SampleError, match=expected):
        COLLATOR.collate([row])


@pytest.mark.filterwarnings("ignore:columns that nothing reads")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_row_is_read_as_its_library_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, expected = DOCUMENTED[name]
    assert read(open_dataset(written([row], tmp_path))[0]) == (expected, expected.count(IMAGE))
    monkeypatch.chdir(tmp_path)  # from memory, paths start in the working directory
    assert read(row) == (expected, expected.count(IMAGE))


def test_with_markers_text_a_path_in_a_text_is_text(tmp_path: Path) -> None:
    row = {"messages": [user("<img>0.png</img>"), says("HTML.")]}
    collator = VLMCollator(PROCESSOR, layout="packed", markers="text")
    assert "<img>0.png</img>" in PROCESSOR.tokenizer.decode(collator.collate([row]).input_ids[0])


def test_samples_may_lie_in_lists(tmp_path: Path) -> None:
    """Qwen's finetuning code packs the samples of an inner list."""
    rows = [{"id": str(at), "query": "?", "response": "!"} for at in range(5)]
    nested = [rows[0], [rows[1], rows[2]], [], [rows[3]], rows[4]]
    for written_as in (json.dumps(nested), json.dumps(rows[:2]) + "\n" + json.dumps(rows[2:])):
        (tmp_path / "nested.json").write_text(written_as)
        assert [sample["id"] for sample in open_dataset(tmp_path / "nested.json")] == list("01234")


class TestColumns:
    def test_ms_swifts_option_as_text_and_as_a_mapping(self, tmp_path: Path) -> None:
        path = written([{"text1": "2 + 2?", "text2": "4", "pic": "0.png"}], tmp_path)
        names = {"text1": "query", "text2": "response", "pic": "image"}
        for columns in (names, json.dumps(names)):
            assert read(open_dataset(path, columns=columns)[0]) == (chat(f"{IMAGE}2 + 2?", "4"), 1)

    def test_an_image_folders_metadata(self, tmp_path: Path) -> None:
        """The `metadata.jsonl` of `datasets`' ImageFolder, with captions."""
        path = written([{"file_name": "0.png", "text": "This is a golden retriever"}], tmp_path, "metadata.jsonl")
        sample = open_dataset(path, columns={"file_name": "image", "text": "response"})[0]
        assert read(sample) == (chat(IMAGE, "This is a golden retriever"), 1)

    def test_chosen_answers_are_learnt_without_the_rejected_ones(self, tmp_path: Path) -> None:
        question, chosen, rejected = user("2 + 2?"), [says("4")], [says("5")]
        pairs = written([{"prompt": [question], "chosen": chosen, "rejected": rejected}], tmp_path)
        sample = open_dataset(pairs, columns={"chosen": "completion"})[0]
        assert sample == {"prompt": [question], "completion": chosen, "id": 0}
        assert read(sample) == (chat("2 + 2?", "4"), 0)
        whole = written([{"chosen": [question, *chosen], "rejected": [question, *rejected]}], tmp_path)
        assert open_dataset(whole, columns={"chosen": "messages"})[0] == {"messages": [question, *chosen], "id": 0}
        with pytest.raises(ConfigError, match=r"PackedDPOTrainer .* columns=\{'chosen': 'messages'\}"):
            open_dataset(whole)
        with pytest.raises(SampleError, match=r"PackedDPOTrainer .* columns=\{'chosen': 'completion'\}"):
            read({"prompt": [question], "chosen": chosen, "rejected": rejected})

    @pytest.mark.parametrize(
        ("columns", "expected"),
        [
            ({"text9": "query"}, "has no column 'text9', which columns= reads as query; it has text1, text2"),
            ({"text1": "querry"}, r"reads a column as 'querry', which nothing reads \(did you mean 'query'\?\)"),
            ({"text1": "rejected_response"}, "for preferences: PackedDPOTrainer"),
            ({"text1": "query", "text2": "query"}, "two columns that would be read as 'query'"),
            ({"text1": 3}, "columns has to be a mapping of names"),
            ("{text1: query}", "is no JSON"),
            ("absent.json", "cannot be read"),
            (None, "columns={'your column': 'messages'}"),
        ],
    )
    def test_names_that_do_not_fit_are_refused(self, columns: Any, expected: str, tmp_path: Path) -> None:
        path = written([{"text1": "2 + 2?", "text2": "4"}], tmp_path)
        with pytest.raises(ConfigError, match=expected):
            open_dataset(path, columns=columns)

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"query": "2 + 2?", "response": True}, "no text for response, but True"),
            ({"query": "?", "response": "4", "history": ["a"]}, "a history that is no list of"),
            ({"q": "?", "query": "?", "response": "4"}, "two columns that would be read as 'query'"),
        ],
    )
    def test_a_row_that_cannot_be_converted_is_one_bad_sample(self, row: Any, expected: str, tmp_path: Path) -> None:
        good = {"q": "2 + 2?", "response": "4"}
        samples = open_dataset(written([good, row, good], tmp_path), columns={"q": "query"})
        assert samples[0]["messages"] == samples[2]["messages"]
        with pytest.raises(SampleError, match=expected) as caught:
            samples[1]
        assert caught.value.index == 1


def test_a_first_row_that_cannot_be_converted_is_the_data_sets_fault(tmp_path: Path) -> None:
    path = written([{"q": "2 + 2?", "a": False}], tmp_path)
    with pytest.raises(ConfigError, match=r"the first sample of .* cannot be read: it has no text for response"):
        open_dataset(path, columns={"q": "query", "a": "response"})


class TestDatasetInfo:
    """LLaMA-Factory's `dataset_info.json`, its examples from data/README.md."""

    def info(self, folder: Path, **entry: Any) -> Path:
        path = folder / "dataset_info.json"
        path.write_text(json.dumps({"other": {"file_name": "other.json"}, "dataset_name": entry}))
        return path

    def test_alpaca(self, tmp_path: Path) -> None:
        row = {"q": "human instruction", "more": "input", "a": "model response", "pics": ["x.jpg"], "sys": "<system>"}
        columns = {"prompt": "q", "query": "more", "response": "a", "images": "pics", "system": "sys"}
        path = written([row], tmp_path, "data.json")
        sample = open_dataset(path, columns=self.info(tmp_path, file_name="data.json", columns=columns))[0]
        assert read(sample) == (SYSTEM + chat(f"{IMAGE}human instruction\ninput", "model response"), 1)

    def test_sharegpt_with_tags(self, tmp_path: Path) -> None:
        talk = [{"who": "person", "said": "human instruction"}, {"who": "bot", "said": "model response"}]
        tags = {"role_tag": "who", "content_tag": "said", "user_tag": "person", "assistant_tag": "bot"}
        entry = {"file_name": "data.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags}
        path = written([{"talk": talk}], tmp_path, "data.json")
        sample = open_dataset(path, columns=self.info(tmp_path, **entry))[0]
        assert read(sample) == (chat("human instruction", "model response"), 0)

    def test_it_is_a_data_set_by_itself(self, tmp_path: Path) -> None:
        """Its names are listed, and one is chosen; `columns=` is not needed."""
        written([ALPACA], tmp_path, "data.json")
        info = self.info(tmp_path, file_name="data.json")
        for source in (info, tmp_path):
            assert open_dataset(f"{source}#dataset_name")[0]["images"] == [str(tmp_path / "x.jpg")]
            with pytest.raises(ConfigError, match=r"describes other, dataset_name; choose one .*#other'"):
                open_dataset(source)
            with pytest.raises(ConfigError, match=r"describes other, dataset_name, and no 'mine'; choose one"):
                open_dataset(f"{source}#mine")
        with pytest.raises(ConfigError, match=r"'other' of .* is at .*other.json, which does not exist"):
            open_dataset(f"{info}#other")
        with pytest.raises(ConfigError, match="describes its own columns"):
            open_dataset(f"{info}#dataset_name", columns={"a": "query"})

    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            ({"file_name": "data.json", "num_samples": 5}, "has a subset, folder or num_samples"),
            ({"file_name": "another.json"}, "describes other, dataset_name, and none of them is"),
            ({"file_name": "data.json", "ranking": True}, "has preferences"),
            ({"file_name": "data.json", "columns": {"prompt": "text"}}, "has no response, as those for pre-training"),
            ({"file_name": "data.json", "columns": {"response": "a", "sounds": "b"}}, "columns sounds"),
            ({"file_name": "data.json", "formatting": "dpo"}, "formatting 'dpo'"),
            ({"file_name": "data.json", "columns": {"prompt": "q", "response": "output"}}, "has no column 'q'"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, entry: dict[str, Any], expected: str, tmp_path: Path) -> None:
        path = written([ALPACA], tmp_path, "data.json")
        with pytest.raises(ConfigError, match=expected):
            open_dataset(path, columns=self.info(tmp_path, **entry))


@pytest.mark.usefixtures("datasets")
def test_bytes_in_parquet_under_other_names(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"jpeg": [encoded(64, 64, "PNG")], "question": ["2 + 2?"], "answer": ["4"]})
    parquet.write_table(table, tmp_path / "data.parquet")
    columns = {"jpeg": "image", "question": "query", "answer": "response"}
    samples = open_dataset(tmp_path / "data.parquet", columns=columns)
    assert read(samples[0]) == (chat(f"{IMAGE}2 + 2?", "4"), 1)
    assert len(open_dataset(tmp_path / "data.parquet", columns=columns, branches="turns")) == 1
