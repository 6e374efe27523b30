"""VLMCollator: from sample dicts to a batch, with nothing lost on the way."""

import pytest
import torch
from cases import json_lines
from chats import FAMILIES, chat, picture, processor_of, tokenized, user
from torch.utils.data import DataLoader

from vlmpack.collate import SkipLimit, VLMCollator
from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import METADATA_KEY, SlotRule

BROKEN = {"messages": [user("?")]}
"""Nothing to learn."""


def tensors(batch):
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def test_samples_are_named_by_their_id_or_else_by_their_place():
    named = chat("?", "a", picture(), id="receipt"), chat("?", "b", picture(), picture(seed=1), sample_id=77)
    metadata = VLMCollator(processor_of())([*named, chat(), {"prompt": "2 + 3 = ", "completion": "5"}])[METADATA_KEY]
    assert metadata.sample_ids == ("receipt", 77, 2, 3)
    assert [image.sample for image in metadata.media.images] == [0, 1, 1]


# ---------------------------------------------------------------------- bad samples


def broken_pixels(seed=1, **others):
    """Two images, one value of the second is NaN."""
    hole = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>user\n{hole}{hole}?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    sample = tokenized("qwen3_vl", text, picture(50, 50, seed=seed), picture(64, 40, seed=seed))
    sample["pixel_values"][-1, 3] = float("nan")
    return {**sample, **others}


@pytest.mark.parametrize(
    ("bad", "reason", "said"),
    [
        (BROKEN, "no_targets", r"none of its \d+ tokens is trained on; it needs an assistant turn"),
        (broken_pixels(), "pixels_not_finite", "its pixels hold NaN or infinity"),
    ],
    ids=["no answer", "broken pixels"],
)
def test_a_bad_sample_is_named_with_its_place_its_id_and_the_remedy(bad, reason, said):
    collator = VLMCollator(processor_of())
    with pytest.raises(SampleError, match=rf"^sample 1 \(id 'r7'\): {said}") as caught:
        collator([chat("1", "2", picture()), {**bad, "id": "r7"}])
    assert (caught.value.index, caught.value.sample_id, caught.value.reason) == (1, "r7", reason)
    assert (collator.skip_log.received, collator.skip_log.used, collator.skip_log.reasons) == (2, 1, {reason: 1})


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_samples_with_broken_pixels_are_skipped_in_their_place(layout, tmp_path):
    path = tmp_path / "skip_log.jsonl"
    collator = VLMCollator(processor_of(), layout=layout, on_bad="skip", skip_log=path)
    good = [chat("1", "2", picture()), chat("3", "4", picture(90, 61)), chat()]
    features = [broken_pixels(id=0), good[0], BROKEN, broken_pixels(), good[1], {"messages": 5}, good[2]]
    batch, without = collator(features), VLMCollator(processor_of(), layout=layout)(good)
    for name, value in tensors(without).items():
        assert torch.equal(batch[name], value), name
    assert batch[METADATA_KEY].sample_ids == (1, 4, 6)
    assert [(line["index"], line["id"], line["reason"], line["seen"]) for line in json_lines(path)] == [
        (0, 0, "pixels_not_finite", 1),
        (2, None, "no_targets", 3),
        (3, None, "pixels_not_finite", 4),
        (5, None, "bad_row", 6),
    ]
    assert collator.skip_log.used == 3


def test_a_teacher_with_another_number_of_entries_is_skipped_beside_samples_with_and_without_one(tmp_path):
    def taught(k, **named):
        sample = chat(**named)
        count = VLMCollator(processor_of()).measure(sample).num_tokens
        return {**sample, "topk_ids": [[*range(k)]] * count, "topk_logprobs": [[-2.0] * k] * count}

    samples, path = [taught(3, id="a"), chat("1", "2", id="b"), taught(2, id="c")], tmp_path / "skip_log.jsonl"
    row = VLMCollator(processor_of(), layout="packed", on_bad="skip", skip_log=path).collate(samples)
    assert row.metadata.sample_ids == ("a", "b") and len(row.extras["topk_ids"]) == 3
    assert [(line["index"], line["reason"]) for line in json_lines(path)] == [(2, "bad_shape")]
    with pytest.raises(
        SampleError, match=r"sample 2 \(id 'c'\): its topk_ids are of the sizes \[2\], .* \[3\]: make all"
    ):
        VLMCollator(processor_of(), layout="packed")(samples)


def test_a_batch_of_broken_pixels_leaves_no_sample_and_no_memory_held():
    collator = VLMCollator(processor_of(), on_bad="skip", skip_limit=SkipLimit(max_consecutive_bad=4))
    batch = collator([broken_pixels(1), broken_pixels(2), broken_pixels(3)])
    assert batch[METADATA_KEY].sample_ids == ()
    assert torch.isfinite(batch["pixel_values"]).all()
    del batch
    assert collator.buffers.held == 0
    with pytest.raises(ConfigError, match=r"4 samples in a row .* pixels_not_finite 4"):
        collator([broken_pixels()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("features", [[BROKEN, BROKEN], []], ids=["all refused", "none given"])
def test_a_batch_without_samples_is_one_smallest_image_with_nothing_to_learn(layout, family, features):
    processor = processor_of(family)
    batch = VLMCollator(processor, layout=layout, on_bad="skip")(features)
    metadata = batch[METADATA_KEY]
    assert metadata.sample_ids == ()
    assert metadata.num_targets == 0
    assert metadata.lengths == (3,)
    assert (batch["labels"] == -100).all()
    assert processor.tokenizer.decode(batch["input_ids"][0]) == "<|vision_start|><|image_pad|><|vision_end|>"
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert batch["pixel_values"].isfinite().all()


DROPPED = r"set TrainingArguments\(remove_unused_columns=False\)"


def test_where_samples_are_skipped_one_without_columns_is_one_of_them_and_a_row_of_them_stops_the_run():
    collator = VLMCollator(processor_of(), on_bad="skip", skip_limit=SkipLimit(max_consecutive_bad=3))
    assert collator([{"image_id": 5}, chat(), {"image_id": 5}])[METADATA_KEY].sample_ids == (1,)
    assert collator.skip_log.reasons == {"no_columns": 2}
    with pytest.raises(ConfigError, match=rf"3 samples in a row .* no_columns 4. The last was .* {DROPPED}"):
        collator([{"image_id": 5}] * 2)


def nested(levels, value="x"):
    for _ in range(levels):
        value = [value]
    return value


class Broken(dict):
    """A row that fails as it is read, as a lazily decoded one may."""

    def __init__(self, error):
        super().__init__(messages=[])
        self.error = error

    def items(self):
        raise self.error


ODD_PART = user([{"type": ["text"]}])
WRONG = {
    "a type that is a list": ({"messages": [ODD_PART]}, "bad_row", ".content[0].type must be a text"),
    "lists in lists": (chat(tools=nested(100_000)), "bad_row", "it is nested too deeply to be read"),
    "a name of lists in lists": (chat(id=nested(100_000)), "bad_row", "it is nested too deeply to be read"),
    "too large": (Broken(MemoryError("no 9 GB")), "out_of_memory", "the memory does not suffice for it (no 9 GB)"),
    "an error of its own": (Broken(KeyError("shard 3")), "unexpected", "KeyError: 'shard 3' (encode.py, line "),
}


@pytest.mark.parametrize(("feature", "reason", "seen"), WRONG.values(), ids=WRONG)
def test_whatever_is_wrong_with_a_sample_it_is_counted_and_its_reason_kept(feature, reason, seen, tmp_path):
    collator = VLMCollator(processor_of(), on_bad="skip", skip_log=tmp_path / "bad.jsonl")
    assert collator([chat(), feature])[METADATA_KEY].sample_ids == (0,)
    (line,) = json_lines(tmp_path / "bad.jsonl")
    assert (line["index"], line["reason"]) == (1, reason)
    assert seen in line["detail"]
    with pytest.raises(SampleError, match="sample 0: "):
        VLMCollator(processor_of())([feature])


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lengths", "seq_idx"])
def test_rows_that_are_packed_already_stop_the_run_instead_of_becoming_one_sample(name):
    row = VLMCollator(processor_of(), layout="packed")([chat("1", "2", picture()), chat("3", "4")])
    bare = {column: row[column] for column in ("input_ids", "labels", "pixel_values", "image_grid_thw")}
    collator = VLMCollator(processor_of(), layout="packed")
    assert collator([bare])[METADATA_KEY].sample_ids == (0,)  # nothing says that these are two
    with pytest.raises(
        SampleError, match=rf"has input_ids and {name}: .*packed row already.*data_collator=dataset.collate"
    ):
        collator([{**bare, name: row["cu_seqlens_q"]}])


# ---------------------------------------------------------------------- workers


@pytest.mark.slow
def test_an_error_in_a_worker_still_says_which_sample_and_what_to_do():
    collator = VLMCollator(processor_of())
    loader = DataLoader([chat(), {**BROKEN, "id": "r7"}], batch_size=2, collate_fn=collator, num_workers=1)
    # torch rebuilds an error from its text, and a SampleError needs more than that.
    with pytest.raises(SampleError, match=r"SampleError: sample 1 \(id 'r7'\): none of its \d+ tokens is trained on"):
        next(iter(loader))


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "flat"}, "layout must be one of padded, packed, got 'flat'"),
        ({"overlength": "cut"}, "overlength must be one of error, drop, truncate, truncate_start, own_row, got 'cut'"),
        ({"overlength": "own_row"}, "overlength='own_row' is for rows: plan_bins, RowSettings"),
        ({"train_on": "user"}, "train_on must be one of assistant, last, all, got 'user'"),
        ({"on_bad": "ignore"}, "on_bad must be one of raise, skip, got 'ignore'"),
        ({"slots": SlotRule()}, "slots are of packed rows, but layout='padded'; give StepConfig(slots=...) to"),
        ({"pixel_dtype": torch.uint8}, "pixel_dtype=torch.uint8 would round normalized pixels to integers"),
        ({"overlength": "drop"}, "overlength='drop' needs max_length="),
        ({"max_length": 1}, "max_length must be a whole number of at least 2, got 1"),
        ({"max_length": 2.5}, "max_length must be a whole number of at least 2, got 2.5"),
        ({"layout": "packed", "slots": 4}, "slots has to be a SlotRule, such as SlotRule(multiple=4), got a int"),
        ({"skip_limit": 0.1}, "skip_limit has to be a SkipLimit, such as SkipLimit(max_bad_fraction=0.05), got a"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        VLMCollator(processor_of(), **settings)
    assert message in str(caught.value)


def test_one_sample_in_the_place_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"a batch of a list of samples, got one sample: give \[sample\]"):
        VLMCollator(processor_of())(chat())


def test_the_vocabulary_s_size_can_be_told():
    feature = {"input_ids": [1, 5000], "labels": [-100, 7]}
    with pytest.raises(SampleError, match="holds the token id 5000, but ids run from 0 to 813"):
        VLMCollator(processor_of())([feature])
    with pytest.raises(SampleError, match="but ids run from 0 to 299"):
        VLMCollator(processor_of(), vocab_size=300)([chat()])
    assert VLMCollator(processor_of(), vocab_size=5001)([feature])["input_ids"].tolist() == [[1, 5000]]


# ---------------------------------------------------------------------- whatever a dataset may hold
