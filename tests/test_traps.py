"""The silent traps of packed rows in transformers: each gives wrong numbers without an error.

Every test shows the trap in the untouched model, and that an enabled model is exact or refuses the input. Equality in
general, and what breaks it, is tested in `tests/oracle` and `tests/probing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import ATTENTION, DELTA
from training import KINDS, receipts
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families import family_of
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import enable_packing
from vlmpack.testing import alone, padded, tiny_model
from vlmpack.testing.comparison import distance, run_alone

LEAK = 0.02
"""Smallest difference of logits that a leak makes, as a part of the largest logit."""
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
HYBRID = tuple(name for name, family in FAMILIES.items() if family.has("gated_delta"))
ATTENTION_ALONE = tuple(name for name in VISION if name not in HYBRID)
"""Families that transformers itself can pack, if one knows how."""
TEXT = ("text",) * 4


class Case:
    """Four samples as one packed row, and the logits of each alone."""

    def __init__(
        self, family: str = "qwen3_vl", *, rule: SlotRule | None = None, kinds: Any = None, **settings: Any
    ) -> None:
        self.model = tiny_model(family, **settings).eval()
        self.samples = receipts(self.model, kinds=kinds or (KINDS[:4] if family in VISION else TEXT))
        self.packed = pack(padded(self.samples), rule=rule)
        self.expected = run_alone(self.model, self.samples, gradients=False).logits
        self.exact = DELTA.logits if family in HYBRID else ATTENTION.logits

    @property
    def row(self) -> dict[str, Any]:
        return self.packed.to_hf()

    @property
    def bare_row(self) -> dict[str, Any]:
        """The row without host metadata: boundaries as tensors only."""
        return {name: value for name, value in self.row.items() if isinstance(value, torch.Tensor)}

    @property
    def plain_row(self) -> dict[str, Any]:
        """The row as transformers itself takes it: [4, 1, T] positions, the text row first, and no boundaries."""
        assert self.packed.metadata is not None
        family = family_of(self.model)
        ids = family.positions(self.packed.metadata.media, self.packed.segments, config=self.model.config)
        names = ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        row = {name: self.row[name] for name in names if name in self.row}
        return {**row, "position_ids": ids if family.has_vision else ids[0], "use_cache": False}

    @property
    def block_diagonal(self) -> torch.Tensor:
        sample = self.packed.segments.seq_idx("cpu")
        return (sample[:, None] == sample[None, :]).tril()[None, None]

    @property
    def flat_positions(self) -> torch.Tensor:
        return self.packed.segments.position_in_segment("cpu").reshape(1, -1)

    @property
    def flash_names(self) -> dict[str, Any]:
        """Boundaries under the names of Flash Attention."""
        cu_seqlens, longest = self.packed.segments.cu_seqlens(), self.packed.segments.max_length
        names = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        return {**names, "max_length_q": longest, "max_length_k": longest}

    @torch.no_grad()
    def error(self, **inputs: Any) -> float:
        """Largest difference of any sample's logits from its logits alone, as a part of the largest."""
        logits, spans = self.model(**inputs).logits[0], self.packed.segments.spans
        return max(distance(logits[start:stop], own) for (start, stop), own in zip(spans, self.expected, strict=True))


# ---------------------------------------------------------------------- rows that leak

LEAKS: dict[str, tuple[tuple[str, ...], dict[str, Any], Callable[[Case], dict[str, Any]]]] = {
    # transformers looks for samples in the positions only without a cache, which the text model makes by default
    "a cache": ((*ATTENTION_ALONE, "qwen3"), {}, lambda case: {"use_cache": True}),
    # what `get_rope_index` returns
    "three rows of positions": (ATTENTION_ALONE, {}, lambda case: {"position_ids": case.plain_row["position_ids"][1:]}),
    "positions without images": (VISION, {}, lambda case: {"position_ids": case.flat_positions}),
    "a mask of ones": (("qwen3_vl",), {}, lambda case: {"attention_mask": torch.ones_like(case.row["input_ids"])}),
    # eager attention adds a boolean mask instead of applying it
    "a boolean 4D mask": (
        ("qwen3_vl",),
        {"attn_implementation": "eager"},
        lambda case: {"attention_mask": case.block_diagonal},
    ),
    # other implementations ignore these; with images, older versions hand them to the vision tower and stop
    "boundaries of Flash Attention": (
        ("qwen3_vl",),
        {"kinds": TEXT},
        lambda case: {**case.flash_names, "position_ids": None, "use_cache": None},
    ),
    # neither positions nor masks reach them
    "gated delta layers": (HYBRID, {}, lambda case: {}),
    "gated delta layers and a mask": (HYBRID, {}, lambda case: {"attention_mask": case.block_diagonal}),
}


@pytest.mark.parametrize(("trap", "family"), [(trap, family) for trap in LEAKS for family in LEAKS[trap][0]])
def test_a_plain_row_leaks_and_an_enabled_model_is_exact(trap: str, family: str) -> None:
    _, settings, change = LEAKS[trap]
    case = Case(family, **settings)
    assert case.error(**case.plain_row | change(case)) > LEAK
    enable_packing(case.model)
    assert case.error(**case.row, output_logits=True) < case.exact


@pytest.mark.parametrize("family", [*ATTENTION_ALONE, "qwen3"])
def test_four_rows_of_positions_without_cache_and_mask_keep_samples_apart(family: str) -> None:
    case = Case(family)
    assert case.error(**case.plain_row) < case.exact


# ---------------------------------------------------------------------- inputs that are refused

GAPS = SlotRule(multiple=8)
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Case], dict[str, Any]], str]] = {
    "positions without images": (
        {},
        lambda case: {**case.row, "position_ids": case.flat_positions},
        "images lose their places",
    ),
    "seq_idx of kernels": (
        {"family": HYBRID[0], "kinds": TEXT},
        lambda case: {"input_ids": case.row["input_ids"], "seq_idx": case.packed.segments.seq_idx("cpu")[None]},
        "seq_idx would be ignored",
    ),
    "real boundaries alone, labels in the gaps": (
        {"rule": GAPS},
        lambda case: without(case.bare_row, "cu_seqlens_q_padded"),
        r"labels of the row hold targets between its samples.*cu_seqlens_q_padded",
    ),
    "real boundaries alone, a mask of the gaps": (
        {"rule": GAPS},
        lambda case: without(case.bare_row, "cu_seqlens_q_padded", "labels"),
        r"does not fit the boundaries.*both cu_seqlens_q and cu_seqlens_q_padded",
    ),
    "two rows": (
        {},
        lambda case: {name: torch.cat([value, value]) for name, value in case.bare_row.items()},
        r"a packed row is \[1, T\] but input_ids is \[2, ",
    ),
    "logits_to_keep": (  # whose integer mask would be read as positions
        {},
        lambda case: {**case.row, "logits_to_keep": (case.row["labels"] != -100).long()},
        "logits_to_keep cannot be combined with a packed row",
    ),
}


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize("trap", REFUSED)
def test_an_enabled_model_refuses(trap: str) -> None:
    settings, inputs, message = REFUSED[trap]
    case = Case(**settings)
    enable_packing(case.model)
    with pytest.raises((ConfigError, LayoutError), match=message):
        case.model(**inputs(case))


# ---------------------------------------------------------------------- routers, masks, token types, lengths


@pytest.mark.parametrize("family", ATTENTION_ALONE)
def test_an_attention_without_a_mask_function_drops_the_2d_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only left padding shows it. An enabled model keeps its attention's name, and so its mask function."""
    untouched, model = tiny_model(family).eval(), enable_packing(tiny_model(family)).eval()
    batch = padded(receipts(model)[:4], "left", metadata=False).to_hf()
    batch |= {"use_cache": True, "labels": None}  # with a cache it goes through the model's own forward
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = untouched(**batch).logits
        assert torch.equal(model(**batch).logits[real], expected[real])
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "maskless", ALL_ATTENTION_FUNCTIONS["sdpa"])
        for config in (untouched.config, untouched.config.get_text_config()):
            config._attn_implementation_internal = "maskless"
        assert (untouched(**batch).logits - expected)[real].abs().max() > LEAK


def test_qwen2_5_vl_without_token_types_forgets_where_images_are() -> None:
    """vlmpack reads the types from the ids."""
    case = Case("qwen2_5_vl")
    sample = alone(next(sample for sample in case.samples if "pixel_values" in sample))
    with torch.no_grad():
        lost = case.model(**without(sample, "mm_token_type_ids")).logits - case.model(**sample).logits
    assert lost.abs().max() > LEAK
    enable_packing(case.model)
    assert case.error(**without(case.row, "mm_token_type_ids"), output_logits=True) < case.exact
