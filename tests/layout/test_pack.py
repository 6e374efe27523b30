"""pack and unpack: the row is the samples one after the other, and comes apart into the samples again."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_pack
from torch.torch_version import TorchVersion

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import HostMetadata, PackedRow, PaddedBatch, Segments, SlotRule, pack, unpack
from vlmpack.layout.media import MediaTable, Medium
from vlmpack.layout.row import without_gaps

samples_lists = st.lists(st.integers(1, 11), min_size=1, max_size=7).map(
    lambda lengths: [[100 * i + at + 1 for at in range(n)] for i, n in enumerate(lengths)]
)


def padded(samples, *, side="right", width=None, fill=-7, **fields):
    """A batch of these id lists; labels are ids + 50000; padding holds an id that must never show up."""
    width = width or max(map(len, samples))
    ids = torch.full((len(samples), width), fill)
    mask = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        start = 0 if side == "right" else width - len(sample)
        ids[row, start : start + len(sample)] = torch.tensor(sample, dtype=torch.long)
        mask[row, start : start + len(sample)] = 1
    return PaddedBatch(input_ids=ids, attention_mask=mask, labels=(ids + 50000).masked_fill(mask == 0, -100), **fields)


@given(samples=samples_lists, multiple=st.integers(1, 5), side=st.sampled_from(["right", "left"]))
def test_the_row_is_what_a_plain_loop_gives_whichever_side_is_padded(samples, multiple, side):
    row = pack(padded(samples, side=side, width=12), rule=SlotRule(multiple=multiple))
    truth = naive_pack(samples, [[i + 50000 for i in s] for s in samples], multiple=multiple)
    assert row.input_ids[0].tolist() == truth.input_ids
    assert row.shift_labels is not None
    assert row.shift_labels[0].tolist() == truth.shift_labels
    assert row.moe_padding_mask[0].tolist() == truth.padding
    # Work done, not only values: a layout that takes slots for lengths would show here.
    assert row.segments.num_tokens == sum(map(len, samples))


@given(samples=samples_lists, multiple=st.integers(1, 5), side=st.sampled_from(["right", "left"]))
def test_unpack_gives_the_batch_back(samples, multiple, side):
    batch = padded(samples, side=side, width=12, fill=0)
    row = pack(batch, rule=SlotRule(multiple=multiple))
    assert row.metadata is not None
    again = unpack(row.input_ids, row.segments, width=12, offsets=row.metadata.offsets)
    assert torch.equal(again, batch.input_ids)


def test_all_tensors_go_through_the_same_index_and_keep_their_dtype():
    samples = [[1, 2, 3], [4, 5]]
    ids = padded(samples, fill=0).input_ids
    batch = padded(
        samples,
        position_ids=torch.stack([ids * 10, ids * 100, ids * 1000]).int(),
        mm_token_type_ids=(ids % 3).to(torch.uint8),
        extras={
            "advantages": ids.double(),
            "both": torch.stack([ids, ids]).half(),
            "low": ids.bfloat16(),  # numpy has no such dtype
            "trained": ids.double().requires_grad_(),
        },
    )
    row = pack(batch, rule=SlotRule(multiple=4))
    real = ~row.moe_padding_mask[0]
    kept = row.input_ids[:, real]
    assert row.position_ids is not None
    assert row.position_ids.shape == (3, 1, 8)
    assert row.position_ids.dtype == torch.int32
    assert torch.equal(row.position_ids[:, :, real], torch.stack([kept * 10, kept * 100, kept * 1000]).int())
    assert row.mm_token_type_ids is not None
    assert row.mm_token_type_ids.dtype == torch.uint8
    for name in ("advantages", "low", "trained"):
        assert row.extras[name].dtype == batch.extras[name].dtype
        assert torch.equal(row.extras[name][:, real].double(), kept.double())
        assert row.extras[name].requires_grad == (name == "trained")
    assert row.extras["both"].shape == (2, 1, 8)
    assert row.extras["both"].dtype == torch.float16


def test_unpack_takes_any_trailing_dimensions_and_is_differentiable():
    segments = Segments.from_lengths([3, 2], SlotRule(multiple=4))
    row = torch.randn(1, 8, 5, 7, requires_grad=True)
    batch = unpack(row, segments, fill=2.0)
    assert batch.shape == (2, 3, 5, 7)
    assert torch.equal(batch[1, :2], row[0, 4:6])
    assert (batch[1, 2] == 2.0).all()
    batch.sum().backward()
    assert row.grad is not None
    assert torch.equal(row.grad[0, :, 0, 0], (~segments.padding_mask()).float())


def test_no_value_is_read_when_the_lengths_are_known():
    batch = padded([[1, 2, 3], [4, 5]])
    pack(on_fake_device(replace(batch, metadata=HostMetadata(lengths=(3, 2)))))
    with pytest.raises(NotImplementedError, match="meta"):
        pack(on_fake_device(batch))


def on_fake_device(batch):
    """The batch on the meta device: reading any of its values fails, as waiting for an accelerator would cost."""
    return PaddedBatch(**{k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()})


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="waits for torch 2.12, which traces dataclasses")
def test_packing_compiles():
    def ids_and_labels(input_ids, attention_mask, labels):
        row = pack(PaddedBatch(input_ids=input_ids, attention_mask=attention_mask, labels=labels))
        return row.input_ids, row.shift_labels

    compiled = torch.compile(ids_and_labels, backend="aot_eager")
    for samples in ([[1, 2, 3], [4, 5]], [[1], [2, 3, 4, 5], [6, 7]]):
        batch = padded(samples)
        given = (batch.input_ids, batch.attention_mask, batch.labels)
        for ours, theirs in zip(compiled(*given), ids_and_labels(*given), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda row, _: pack({"input_ids": row}),
            r"batch has to be a PaddedBatch, such as .*, got a dict",
        ),
        (lambda *_: pack(pack(padded([[1]]))), "got a PackedRow"),
        (
            lambda row, segments: unpack({"x": row}, segments),
            r"tensor has to be a Tensor, such as .*, got a dict",
        ),
        (lambda row, _: unpack(row, [0, 2, 3]), r"segments has to be a Segments, such as row\.segments, got a list"),
    ],
)
def test_what_is_no_batch_or_row_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(torch.ones(1, 3), Segments.from_lengths([2, 1]))


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum), multiple=st.integers(1, 5))
def test_a_row_without_gaps_has_the_samples_one_after_the_other_and_spread_is_the_inverse(lengths, multiple):
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = (torch.arange(mask.numel()).view_as(mask) + 1) * mask
    batch = PaddedBatch(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~mask, -100), extras={"x": ids * 2})
    row = pack(batch, rule=SlotRule(multiple=multiple), keep_empty=True)
    compact, tight = without_gaps(row), pack(batch, keep_empty=True)
    for name in ("input_ids", "shift_labels"):
        assert torch.equal(getattr(compact.row, name), getattr(tight, name))
    assert torch.equal(compact.row.extras["x"], tight.extras["x"])
    assert compact.row.segments.sample_lengths == tight.segments.lengths
    assert torch.equal(compact.spread(compact.row.input_ids), row.input_ids)
    assert torch.equal(compact.place(torch.arange(sum(lengths))), row.segments.real_index())


def test_an_all_zero_row_is_refused_or_kept_as_an_empty_segment():
    batch = PaddedBatch(
        input_ids=torch.tensor([[1, 2], [0, 0], [3, 0]]), attention_mask=torch.tensor([[1, 1], [0, 0], [1, 0]])
    )
    with pytest.raises(LayoutError, match=r"row 1: attention_mask is all zeros.* or pass keep_empty=True"):
        pack(batch)
    row = pack(batch, keep_empty=True)
    assert row.segments.lengths == (2, 0, 1)
    assert row.segments.num_samples == 3
    assert unpack(row.input_ids, row.segments).tolist() == [[1, 2], [0, 0], [3, 0]]


def test_a_batch_of_empty_rows_alone_needs_a_fixed_width():
    nothing = PaddedBatch(input_ids=torch.zeros(2, 3).long(), attention_mask=torch.zeros(2, 3).long())
    with pytest.raises(LayoutError, match=r"all zeros in all 2 rows.* SlotRule\(pad_to=\.\.\.\)"):
        pack(nothing, keep_empty=True)
    row = pack(nothing, keep_empty=True, rule=SlotRule(pad_to=4))
    assert row.segments.padding_mask().all()
    assert unpack(row.input_ids, row.segments, width=3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_media_of_an_empty_row_are_an_error():
    batch = PaddedBatch(input_ids=torch.zeros(2, 2).long(), attention_mask=torch.tensor([[1, 1], [0, 0]]))
    image = Medium(kind=1, sample=1, runs=((0, 1),))
    metadata = HostMetadata(lengths=(2, 0), media=MediaTable(media=(image,)))
    with pytest.raises(LayoutError, match=r"the host's lengths \[2, 0\] do not describe"):
        pack(PaddedBatch(**{**vars(batch), "metadata": metadata}), keep_empty=True)
    types = torch.tensor([[0, 0], [1, 1]])
    with pytest.raises(LayoutError, match="row 1: attention_mask hides tokens of images, videos or audio"):
        pack(PaddedBatch(**{**vars(batch), "mm_token_type_ids": types}), keep_empty=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask is \[2, 4\] but input_ids is \[2, 3\]"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, "got 4D"),
        ({"attention_mask": None}, "attention_mask must be a tensor .*, got NoneType"),
        ({"attention_mask": None, "metadata": HostMetadata(lengths=(3, 2))}, "attention_mask must be a tensor"),
        ({"input_ids": [[1, 2, 3], [4, 5, 0]]}, "input_ids must be a tensor .*, got list"),
        ({"labels": torch.ones(2, 2)}, r"labels is \[2, 2\] but input_ids is \[2, 3\]"),
        ({"labels": torch.ones(2, 3)}, r"labels is torch.float32, but must hold whole numbers with a sign"),
        ({"labels": torch.ones(2, 3, dtype=torch.uint8)}, r"labels is torch.uint8, but must"),
        ({"input_ids": torch.ones(6)}, r"input_ids must be \[batch, width\], got \[6\]"),
        ({"extras": {"advantages": torch.ones(3, 3)}}, r"advantages is \[3, 3\]"),
        ({"metadata": HostMetadata(lengths=(3,))}, "do not describe this attention_mask.*dispatch_batches=False"),
        ({"metadata": HostMetadata(lengths=(3, 3))}, r"the host's lengths \[3, 3\] do not describe"),
        ({"labels": torch.tensor([[1, 2, 3], [4, 5, 6]])}, "row 1: labels hold targets where attention_mask is 0"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change, message):
    batch = padded([[1, 2, 3], [4, 5]])
    with pytest.raises(LayoutError, match=message):
        pack(PaddedBatch(**{**vars(batch), **change}))


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (2, {}, r"expected 1 x 5 tokens .* got a tensor of shape \[2, 5\]"),
        (1, {"width": 2}, "row 0: 3 tokens do not fit width 2"),
        (1, {"offsets": (0,)}, "1 offsets for the 2 samples"),
    ],
)
def test_unpack_refuses_what_is_not_a_row_of_these_segments(rows, more, message):
    with pytest.raises(LayoutError, match=message):
        unpack(torch.zeros(rows, 5), Segments.from_lengths([3, 2]), **more)


def test_a_batch_that_was_cut_after_its_lengths_were_noted_is_refused_on_a_device_too():
    batch = padded([[1, 2, 3, 4], [5]])
    cut = {name: x[:, :3] for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    stale = PaddedBatch(**{**vars(batch), **cut, "metadata": HostMetadata(lengths=(4, 1))})
    with pytest.raises(LayoutError, match=r"the host's lengths \[4, 1\] do not describe"):
        pack(on_fake_device(stale))


def test_targets_of_no_sample_of_a_row_are_refused():
    row = pack(padded([[1, 2, 3], [4, 5]]), rule=SlotRule(multiple=4)).to_hf()
    del row["vlmpack"]
    row["labels"][0, 6] = 9
    with pytest.raises(LayoutError, match="between its samples or behind the last one"):
        PackedRow.from_hf(row)
    whole = pack(padded([[1, 2, 3], [4, 5]])).to_hf()
    short = {"cu_seqlens_q": [0, 3], "cu_seqlens_q_padded": [0, 3]}
    with pytest.raises(LayoutError, match="give the boundary that is missing in cu_seqlens_q"):
        PackedRow.from_hf({"input_ids": whole["input_ids"], "labels": whole["labels"], **short})


def test_boundaries_of_real_tokens_leave_open_where_padding_is():
    """Between the samples, as here, or behind the last one, as they would be read; labels need not show it."""
    row = pack(padded([[1, 2, 3], [4, 5]]), rule=SlotRule(multiple=4)).to_hf()
    bare = {"input_ids": row["input_ids"], "cu_seqlens_q": row["cu_seqlens_q"]}
    with pytest.raises(
        LayoutError, match=r"cu_seqlens_q ends at 5, but the row is 8 tokens wide, .*cu_seqlens_q_padded"
    ):
        PackedRow.from_hf(bare)
    with pytest.raises(LayoutError, match="cu_seqlens_q ends at 5"):
        PackedRow.from_hf({**bare, "labels": torch.full((1, 8), -100)})
    assert PackedRow.from_hf({**bare, "cu_seqlens_q_padded": row["cu_seqlens_q_padded"]}).segments.slots == (4, 4)
    behind = PackedRow.from_hf({**bare, "cu_seqlens_q_padded": row["cu_seqlens_q"]})
    assert behind.segments.spans == ((0, 3), (3, 5))


def test_labels_and_shifted_labels_of_a_row_say_the_same():
    row = pack(padded([[1, 2, 3], [4, 5]]), rule=SlotRule(multiple=4))
    both = {**row.to_hf(), "shift_labels": row.shift_labels}
    assert torch.equal(PackedRow.from_hf(both).shift_labels, row.shift_labels)
    across = torch.roll(both["labels"], -1)
    across[0, 2] = 4
    for other in (across, torch.full((1, 8), -100), both["labels"]):
        with pytest.raises(LayoutError, match="labels and shift_labels of the row say different things"):
            PackedRow.from_hf({**both, "shift_labels": other})
    with pytest.raises(LayoutError, match=r"shift_labels is \[1, 7\], but the row is \[1, 8\]"):
        PackedRow.from_hf({**both, "shift_labels": row.shift_labels[:, 1:]})


@given(samples=samples_lists, multiple=st.integers(1, 5))
def test_a_row_survives_the_trip_through_a_dictionary(samples, multiple):
    batch = padded(samples)
    row = pack(replace(batch, loss_weights=batch.labels / 7), rule=SlotRule(multiple=multiple))
    mapping = row.to_hf()
    again = PackedRow.from_hf(mapping)
    assert again.segments == row.segments
    assert row.shift_labels is not None
    assert again.shift_labels is not None
    assert torch.equal(again.shift_labels, row.shift_labels)
    assert torch.equal(again.shift_weights, row.shift_weights)
    is_target = row.shift_labels != -100
    assert torch.equal(row.shift_weights[is_target], row.shift_labels[is_target] / 7)  # shifted as their labels
    # The count of a trainer that knows nothing of rows is the number of targets.
    assert int((mapping["labels"][..., 1:] != -100).sum()) == int((row.shift_labels != -100).sum())
    del mapping["vlmpack"]  # boundaries alone are enough, as lists or as tensors
    assert PackedRow.from_hf(mapping).segments == row.segments
    assert PackedRow.from_hf({**mapping, "cu_seqlens_q": mapping["cu_seqlens_q"].tolist()}).segments == row.segments


IDS = torch.arange(5)[None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": IDS[:, 1:]}, r"\[1, 5\] by its boundaries but input_ids is \[1, 4\]; .*dispatch_batches=False"),
        ({"input_ids": IDS.float()}, "input_ids is torch.float32, but must hold whole numbers"),
        ({"input_ids": IDS.tolist()}, "input_ids must be a tensor .*, got list"),
        ({"shift_labels": IDS > 0}, "shift_labels is torch.bool, but must hold whole numbers"),
        ({"shift_labels": IDS[:, 1:]}, r"shift_labels is \[1, 4\], but the row is \[1, 5\]"),
        ({"input_ids": IDS[:, :0], "segments": Segments.from_lengths([0])}, "a packed row of no tokens"),
    ],
)
def test_columns_that_do_not_fit_the_boundaries_of_a_row_are_refused(change, message):
    with pytest.raises(LayoutError, match=message):
        PackedRow(**{"input_ids": IDS, "segments": Segments.from_lengths([3, 2])} | change)


def test_a_row_holds_int64():
    row = PackedRow(input_ids=IDS.int(), shift_labels=IDS.short(), segments=Segments.from_lengths([5]))
    assert row.input_ids.dtype == row.shift_labels.dtype == torch.int64


def test_a_row_needs_its_boundaries():
    with pytest.raises(LayoutError, match="needs its boundaries: cu_seqlens_q"):
        PackedRow.from_hf({"input_ids": torch.zeros(1, 4).long()})
