"""lengths_from_mask: the one place that reads an attention mask, and what it refuses."""

import pytest
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import HostMetadata, Media, PackedRow, PaddedBatch
from vlmpack.layout.batch import lengths_from_mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_zeros_and_ones_of_any_dtype_are_read(dtype):
    assert lengths_from_mask(torch.tensor([[1, 1, 0]]).to(dtype)).lengths == (2,)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 1], [1, 0], [1, 1]]).view(3, 1, 1, 2), r"got 4D \[3, 1, 1, 2\]; .* keep the 2D mask"),
        (torch.ones(5), r"got 1D \[5\]"),
        (torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]), "row 1: attention_mask has a hole at column 1"),
        (torch.tensor([[1, 0, 1, 1, 0]]), "row 0: attention_mask has a hole at column 1.* one unbroken run"),
        (torch.tensor([[1, 1, 2, 2]]), "row 0: attention_mask holds 2 at column 2.* not sample numbers"),
        (torch.tensor([[0.0, float("-inf")]]), "row 0: attention_mask holds -inf at column 1.* not additive biases"),
        (torch.tensor([[1.0, float("nan")]]), "row 0: attention_mask holds nan at column 1"),
        (torch.tensor([[1, 1], [1, -1]]), "row 1: attention_mask holds -1 at column 1"),
        (torch.ones(2, 0, dtype=torch.long), r"got 2D \[2, 0\]"),
        (torch.tensor([[1.0, 0.5]]).to(torch.float8_e4m3fn), "row 0: attention_mask holds 0.5 at column 1"),
        ([[1, 1, 0]], "must be a tensor .* got list; keep what the tokenizer gives with return_tensors='pt'"),
        (torch.ones(1, 2).numpy(), "got ndarray"),
        (None, "attention_mask must be a tensor .* got NoneType"),
    ],
)
def test_masks_that_say_nothing_are_refused_by_row_and_remedy(mask, message):
    with pytest.raises(LayoutError, match=message):
        lengths_from_mask(mask)


@pytest.mark.parametrize("kind", [PaddedBatch, PackedRow])
def test_columns_of_samples_are_no_batch_and_the_collator_is_named(kind):
    rows = {"messages": [[{"role": "user", "content": "How much?"}]], "images": [[object()]]}
    with pytest.raises(
        LayoutError, match=r"this one has messages, images: .* VLMCollator\(processor, layout='packed'\)"
    ):
        kind.from_hf(rows)


def test_a_batch_survives_the_trip_through_a_dictionary():
    batch = PaddedBatch(
        input_ids=torch.tensor([[5, 6]]),
        attention_mask=torch.tensor([[1, 1]]),
        labels=torch.tensor([[5, 6]]),
        media=Media(pixel_values=torch.ones(4, 3), image_grid_thw=torch.tensor([[1, 2, 2]])),
        extras={"advantages": torch.tensor([[0.5, 0.25]])},
        metadata=HostMetadata(lengths=(2,)),
    )
    mapping = batch.to_hf()
    assert next(iter(mapping)) == "input_ids"
    again = PaddedBatch.from_hf(mapping, extras=("advantages",))
    assert again.to_hf().keys() == mapping.keys()
    assert all(again.to_hf()[name] is mapping[name] for name in mapping)
