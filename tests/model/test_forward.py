"""The three inputs of an enabled model, and what it refuses instead of ignoring."""

from dataclasses import replace

import pytest
import torch

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import PackedRow, Segments, SlotRule, pack
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.media import MediaTable
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import mixed_samples, padded, tiny_model


@pytest.fixture(scope="module")
def model():
    return enable_packing(tiny_model("qwen3_vl", seed=1).eval())


@pytest.fixture(scope="module")
def samples(model):
    return mixed_samples(model.config, seed=2)


@pytest.fixture
def row(samples):
    return pack(padded(samples)).to_hf()


def test_a_tuple_on_request(model, row):
    loss, losses, targets = model(**row, return_dict=False)
    assert loss.ndim == 0
    assert losses.shape == targets.shape == (4,)


def test_boundaries_may_come_as_lists_tensors_or_host_metadata(model, row):
    metadata = row.pop("vlmpack")
    by_tensor = model(**row).loss
    by_list = model(**{**row, "cu_seqlens_q": row["cu_seqlens_q"].tolist(), "cu_seqlens_q_padded": None}).loss
    by_metadata = model(**{**row, "cu_seqlens_q": None, "cu_seqlens_q_padded": None}, vlmpack=metadata).loss
    assert torch.equal(by_tensor, by_list)
    assert torch.equal(by_tensor, by_metadata)


def test_shifted_labels_are_taken_as_they_are(model, samples, row):
    shifted = pack(padded(samples)).shift_labels
    labels = row.pop("labels")
    assert torch.equal(model(**row, labels=labels).loss, model(**row, shift_labels=shifted).loss)


def test_targets_on_padding_are_refused(model):
    segments = Segments.from_boundaries([0, 3, 5], [0, 4, 7], total=8)
    ids = torch.arange(11, 19)[None]
    for place in (3, 6, 7):  # in a slot's tail, and in the row's
        labels = torch.full_like(ids, IGNORE)
        labels[0, place] = 11
        with pytest.raises(LayoutError, match="has targets on padding, which belongs to no sample; set them to -100"):
            PackedStep(model)(PackedRow(input_ids=ids, segments=segments, shift_labels=labels))


def test_empty_rows_are_refused_or_kept_as_configured(model, samples):
    batch = padded(samples, metadata=False)
    mask = torch.cat([batch.attention_mask, torch.zeros_like(batch.attention_mask[:1])])
    grown = {k: torch.cat([x, x[1:2]]) for k, x in batch.to_hf().items() if k in ("input_ids", "labels")}
    grown["labels"][-1] = IGNORE
    grown = {**grown, "attention_mask": mask, **batch.media.to_hf()}
    with pytest.raises(LayoutError, match="row 4: attention_mask is all zeros"):
        model(**grown)
    kept = PackedStep(enable_packing(model, StepConfig(keep_empty=True)))(grown)
    enable_packing(model)
    assert torch.equal(kept.loss, PackedStep(model)(batch).loss)
    assert kept.sample_targets[-1] == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": [0, 3]}, ConfigError, "no input 'cu_seqlens'; did you mean 'cu_seqlens_q'"),
        ({"rope_cu_seqlen": [0, 3]}, ConfigError, "no input 'rope_cu_seqlen'; did you mean 'rope_cu_seqlens'"),
        ({"max_seqlen": 5}, ConfigError, "no input 'max_seqlen'"),
        ({"attention_mask": torch.ones(1, 4)}, LayoutError, r"comes without attention_mask, got one of shape \[1, 4\]"),
        ({"moe_padding_mask": torch.ones(1, 2)}, LayoutError, r"moe_padding_mask is \[1, 2\] but input_ids is \[1, "),
        ({"use_cache": True}, ConfigError, "use_cache cannot be combined with a packed row"),
        ({"output_attentions": True}, ConfigError, "output_attentions cannot be combined with a packed row"),
        ({"rope_cu_seqlens": [0, 9999]}, LayoutError, r"rope_cu_seqlens ends at 9999, but the row has \d+ real tokens"),
        ({"cu_seqlens_q": [0, 3]}, LayoutError, r"cu_seqlens_q differs from the boundaries \[0, .*that the host metad"),
        ({"cu_seqlens_q_padded": torch.arange(5)}, LayoutError, "cu_seqlens_q_padded differs from the boundaries"),
        *(
            ({"cu_seqlens_q": given, "vlmpack": None}, LayoutError, r"whole numbers in a tensor \[segments \+ 1\]")
            for given in ("0, 3", [0.0, 3.5], torch.tensor([[0, 3]]), torch.tensor([0.0, 3.0]), 3, [[0], [3]])
        ),
        (
            {"pixel_values": None, "image_grid_thw": None},
            LayoutError,
            "media that image_grid_thw describes, but the batch has no",
        ),
        ({"pixel_values": torch.ones(4, 8)}, LayoutError, r"the grids describe \d+ patches, pixel_values has 4"),
        ({"image_grid_thw": torch.tensor([[1, 2, 2]])}, LayoutError, r"has 5 media but image_grid_thw is \[1, 3\]"),
        ({"input_ids": torch.ones(1, 7).long()}, LayoutError, "by its boundaries but input_ids is"),
        ({"vlmpack": {}}, ConfigError, "vlmpack has to be a HostMetadata, .* leave it out of a batch of your own"),
    ],
)
def test_what_a_row_cannot_be_is_refused(model, row, change, error, message):
    with pytest.raises(error, match=message):
        model(**{**row, **change})


NO_TOKENS = {"input_ids": torch.zeros(1, 0).long(), "cu_seqlens_q": [0, 0]}
NO_TOKENS |= dict.fromkeys(("attention_mask", "labels", "vlmpack"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda _: {"cu_seqlens_q_padded": [0, 3]}, ConfigError, "belongs to a packed row.*packed by its mask"),
        (lambda batch: {"shift_labels": batch["labels"]}, ConfigError, "give a padded batch its labels"),
        (lambda batch: {"pixel_values": batch["pixel_values"][:, :-6]}, LayoutError, r"a patch .* has \d+ values, but"),
        (lambda _: NO_TOKENS, LayoutError, "a packed row of no tokens cannot go through a model"),
    ],
)
def test_what_a_padded_batch_cannot_be_is_refused(model, samples, change, error, message):
    batch = padded(samples).to_hf()
    with pytest.raises(error, match=message):
        model(**{**batch, **change(batch)})


def test_seconds_of_videos_are_those_of_the_collator():
    model = enable_packing(tiny_model("qwen2_5_vl").eval())
    batch = padded(mixed_samples(model.config, kinds=("video", "images_and_video")))
    seconds = batch.media.second_per_grid_ts / 3  # which bfloat16 has to round
    media = replace(batch.media, second_per_grid_ts=seconds)
    table = batch.metadata.media
    videos = [replace(video, seconds=float(n)) for video, n in zip(table.videos, seconds, strict=True)]
    metadata = replace(batch.metadata, media=MediaTable(media=(*table.images, *videos)))
    row = pack(replace(batch, media=media, metadata=metadata)).to_hf()
    model(**{**row, "second_per_grid_ts": seconds.bfloat16()})
    for other in (2 * seconds, seconds[:0]):
        with pytest.raises(LayoutError, match=r"second_per_grid_ts is (not what the host|\[0\]; was the batch split)"):
            model(**{**row, "second_per_grid_ts": other})


@pytest.mark.parametrize("layout", ["padded", "row"])
@pytest.mark.parametrize(
    "contradict",
    [torch.zeros_like, lambda types: types.roll(1, -1), lambda types: 2 * types],
    ids=["all zero", "rolled by one", "videos for images"],
)
def test_token_types_that_contradict_the_tokens_are_refused(model, samples, layout, contradict):
    inputs = padded(samples).to_hf() if layout == "padded" else pack(padded(samples), rule=SlotRule(multiple=4)).to_hf()
    inputs["vlmpack"] = None
    expected = model(**inputs).loss
    types = inputs["mm_token_type_ids"]
    assert torch.equal(model(**{**inputs, "mm_token_type_ids": types.int()}).loss, expected)
    with pytest.raises(LayoutError, match=r"mm_token_type_ids contradicts input_ids|hides tokens of images"):
        model(**{**inputs, "mm_token_type_ids": contradict(types)})


@pytest.mark.parametrize("layout", ["padded", "row"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.Tensor.bool}, "input_ids is torch.bool, but must hold whole numbers"),
        ({"input_ids": torch.Tensor.tolist}, "input_ids must be a tensor .* got list"),
        ({"labels": torch.Tensor.bool}, "labels is torch.bool, but must hold whole numbers with a sign"),
        ({"labels": torch.Tensor.float}, "labels is torch.float32, but must"),
        ({"input_ids": lambda ids: ids + 1000}, r"input_ids is \d+, but this model's ids go from 0 to 130; use the"),
        ({"input_ids": lambda ids: ids - 1000}, r"input_ids is -\d+, but this model's ids go from 0 to 130"),
        ({"labels": lambda labels: labels.where(labels == -100, 1000)}, "a target of labels is 1000, but this model's"),
        ({"labels": lambda labels: labels.where(labels == -100, -1)}, "a target of labels is -1, but this model's"),
        ({"image_grid_thw": torch.Tensor.tolist}, r"must be a tensor \[N, 3\] of whole numbers .* got list"),
        ({"image_grid_thw": torch.Tensor.flatten}, r"must be a tensor \[N, 3\] .* got torch.int64 \[15\]"),
        ({"image_grid_thw": torch.Tensor.float}, r"image_grid_thw must be a tensor .* got torch.float32 \[5, 3\]"),
        ({"pixel_values": torch.Tensor.tolist}, r"pixel_values must be a tensor \[patches, values\], got list"),
        ({"pixel_values": lambda x: x[None]}, r"must be a tensor \[patches, values\], got torch.float32 \[1, "),
    ],
)
def test_columns_of_another_kind_are_refused(model, samples, layout, change, message):
    inputs = padded(samples).to_hf() if layout == "padded" else pack(padded(samples)).to_hf()
    inputs["vlmpack"] = None
    for name, changed in change.items():
        inputs[name] = changed(inputs[name])
    with pytest.raises(LayoutError, match=message):
        model(**inputs)


@pytest.mark.parametrize("layout", ["padded", "row"])
def test_whole_numbers_of_any_width_are_the_same(model, samples, layout):
    inputs = padded(samples).to_hf() if layout == "padded" else pack(padded(samples)).to_hf()
    narrow = {name: inputs[name].int() for name in ("input_ids", "labels", "mm_token_type_ids", "image_grid_thw")}
    assert torch.equal(model(**{**inputs, **narrow}).loss, model(**inputs).loss)


def test_seconds_of_videos_may_be_a_column():
    """As transformers takes them."""
    plain = tiny_model("qwen2_5_vl").eval()
    batch = padded(mixed_samples(plain.config, kinds=("video", "images_and_video")), metadata=False).to_hf()
    seconds = batch["second_per_grid_ts"]
    expected = plain(**batch).loss
    assert torch.equal(plain(**{**batch, "second_per_grid_ts": seconds[:, None]}).loss, expected)
    model = enable_packing(plain)
    for given in (seconds, seconds[:, None], seconds.tolist(), seconds.double()):
        assert torch.isclose(model(**{**batch, "second_per_grid_ts": given}).loss, expected, rtol=1e-6)
    for other in (seconds[None], [seconds.tolist()], "0.5", [None, 1.0]):
        with pytest.raises(LayoutError, match=r"second_per_grid_ts .*must be one number for each video, in a list"):
            model(**{**batch, "second_per_grid_ts": other})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"head_chunk": 0}, "head_chunk must be a whole number of at least 1, got 0"),
        ({"head_chunk": -1}, "head_chunk must be a whole number of at least 1, got -1"),
        ({"slots": 4}, r"slots has to be a SlotRule, such as SlotRule\(multiple=4\), got a int"),
        ({"aux_loss": "segment"}, "aux_loss must be one of row, sample, step, got 'segment'"),
        ({"z_loss_coef": -0.1}, r"z_loss_coef is -0.1; it is 0 or a positive number"),
        ({"z_loss_coef": float("nan")}, r"z_loss_coef is nan; it is 0 or a positive number"),
        ({"attention": "flash"}, "attention must be one of auto, torch_varlen, flash_attn, efficient, flex"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        StepConfig(**setting)


@pytest.mark.parametrize("name", ["cu_seqlen_q", "cu_seqlens_k", "seq_lengths", "packed_seq_params", "document_ids"])
def test_boundaries_under_another_name_are_refused(model, row, name):
    """transformers would ignore them, and the row would be one sample."""
    bare = {"input_ids": row["input_ids"], "labels": row["labels"], name: row["cu_seqlens_q"]}
    with pytest.raises(ConfigError, match=f"{name} would be ignored and the samples of the row mixed"):
        model(**bare)


def test_a_padding_mask_beside_the_mask_of_a_padded_batch_has_to_say_the_same(model, samples):
    batch = padded(samples).to_hf()
    padding = batch["attention_mask"] == 0
    assert torch.equal(model(**batch, moe_padding_mask=padding).loss, model(**batch).loss)
    with pytest.raises(LayoutError, match=r"moe_padding_mask \(True on padding\) does not fit the attention_mask"):
        model(**batch, moe_padding_mask=~padding)
    with pytest.raises(LayoutError, match=r"moe_padding_mask is \[1, \d+\] but input_ids is \[4, \d+\]"):
        model(**batch, moe_padding_mask=padding[:1])


@pytest.mark.parametrize("rows", [None, 3, 4], ids=["2D", "three rows", "four rows"])
def test_samples_that_only_restarting_positions_mark_are_refused(model, samples, rows):
    """How a flattening collator marks them: transformers would look for them in some of its own attentions only."""
    text = [samples[1]["input_ids"], samples[1]["input_ids"][:5]]
    ids, positions = torch.cat(text)[None], torch.cat([torch.arange(len(x)) for x in text])[None]
    shaped = positions if rows is None else positions.expand(rows, 1, -1)
    with pytest.raises(ConfigError, match=r"position_ids that restart are how others mark.*give a packed row its"):
        model(input_ids=ids, position_ids=shaped)
    running_on = torch.arange(ids.shape[1])[None].expand_as(shaped)
    assert model(input_ids=ids, position_ids=running_on).logits.shape[1] == ids.shape[1]


def test_labels_changed_behind_the_hosts_back_are_noticed(model, row):
    row["labels"][0, 1] = IGNORE
    with pytest.raises(LayoutError, match=r"counted \d+ targets but the row has another number.*num_targets=None"):
        model(**row)


def test_a_count_that_holds_labels_on_padding_is_noticed(model, samples):
    """Where targets were counted before, padding is not looked through again: the count tells."""
    batch = padded(samples)
    stray = batch.labels.masked_fill(batch.attention_mask == 0, 5)
    count = int((stray[:, 1:] != IGNORE).sum())
    assert count > batch.metadata.num_targets
    with pytest.raises(LayoutError, match=rf"counted {count} targets but the row has another number"):
        PackedStep(model)(replace(batch, labels=stray, metadata=replace(batch.metadata, num_targets=count)))


def test_packed_step_says_that_samples_are_collated_first(model):
    with pytest.raises(ConfigError, match=r"a list is no batch; collate first: step\(collator.collate"):
        PackedStep(model)([{"messages": []}])
    with pytest.raises(LayoutError, match=r"this one has messages, images.*VLMCollator\(processor, layout='packed'\)"):
        PackedStep(model)({"messages": [], "images": []})


def test_packed_step_leaves_extras_to_their_owner(model, samples):
    batch = padded(samples)
    plain = PackedStep(model)(batch)
    rich = replace(batch, extras={"advantages": torch.ones(batch.input_ids.shape)})
    for given in (rich, pack(rich)):
        assert torch.equal(PackedStep(model)(given).loss, plain.loss)


# ---------------------------------------------------------------------- counts that cannot be


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "num_items_in_batch is 0, but this batch alone has .* targets; count them all"),
        (-3, "num_items_in_batch is -3, but"),
        (torch.tensor(0), "num_items_in_batch is 0, but"),
        (float("nan"), "num_items_in_batch is nan, but"),
        ("12", "num_items_in_batch is a number, of the targets of all batches of a step; got '12'"),
        (torch.ones(2), "num_items_in_batch is a number"),
        (True, "num_items_in_batch is a number, of the targets of all batches of a step; got True"),
        (torch.tensor(True), "num_items_in_batch is a number"),
    ],
)
def test_targets_are_counted_by_a_positive_number(model, samples, count, message):
    with pytest.raises(ConfigError, match=message):
        PackedStep(model)(padded(samples), num_items_in_batch=count)


def test_labels_of_first_tokens_that_trainer_counts_are_refused(model, samples):
    """It counts all labels but those of the first column, which here are not first tokens."""
    labelled = [{**sample, "labels": sample["input_ids"]} for sample in samples]
    right, left = padded(labelled).to_hf(), padded(labelled, side="left").to_hf()
    row = pack(padded(labelled)).to_hf()
    row = {**row, "labels": row["input_ids"], "shift_labels": None}
    for batch in (left, row):
        with pytest.raises(LayoutError, match="the first token of a sample has a label, which no token predicts"):
            model(**batch, num_items_in_batch=100)
    expected = model(**right, num_items_in_batch=100).loss
    for batch in (left, row):  # a step counts targets itself
        assert torch.isclose(PackedStep(model)(batch, num_items_in_batch=100).loss, expected, rtol=1e-6)


def test_a_step_gives_logits_to_a_batch_that_asks_for_them(model, samples):
    batch = padded(samples).to_hf()
    expected = PackedStep(model)(batch, logits=True).logits
    assert torch.equal(PackedStep(model)({**batch, "output_logits": True}).logits, expected)
    assert torch.equal(PackedStep(model)(batch, output_logits=True).logits, expected)
