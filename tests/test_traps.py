"""The silent traps of packed Qwen-VL rows in transformers, one test a trap.

Each shows that our way around the trap is right, and that the same claim fails when the way around is taken out: by
patching it away, or by going the plain way with the untouched model. Numbers are those of the list that they came
from; 10 belongs to a family that is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import slow
from datasets import Dataset
from equality import ATTENTION, DELTA
from training import KINDS, Samples, arguments, collator, descend, receipts, train, trainer
from transformers import Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families import Family, family_of
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import MediaTable, Segments, SlotRule, pack
from vlmpack.model import disable_packing, enable_packing, forward, positions
from vlmpack.model.mechanisms import attention, per_sample
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.row import RowContext
from vlmpack.testing import alone, padded, tiny_model
from vlmpack.testing.comparison import distance, run_alone
from vlmpack.trainer import check_trainer

EXACT, EXACT_DELTA, LEAK = ATTENTION.logits, DELTA.logits, 0.02
"""Logits, as parts of the largest: the largest difference that float32 makes, and the smallest that a leak makes."""
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
WITH_ATTENTION_ALONE = tuple(name for name in VISION if not FAMILIES[name].has("gated_delta"))
"""Families that transformers itself can pack, if one knows how."""
HYBRID = tuple(name for name, family in FAMILIES.items() if family.has("gated_delta"))


class Case:
    """Four samples as one packed row, and what each comes to alone."""

    def __init__(
        self, family: str = "qwen3_vl", *, rule: SlotRule | None = None, kinds: Any = None, **settings: Any
    ) -> None:
        self.model = tiny_model(family, **settings).eval()
        self.samples = receipts(self.model, kinds=kinds or (KINDS[:4] if family in VISION else ("text",) * 4))
        self.packed = pack(padded(self.samples), rule=rule)
        reference = run_alone(self.model, self.samples, gradients=False)
        self.expected, self.loss = reference.logits, reference.loss

    @property
    def row(self) -> dict[str, Any]:
        return self.packed.to_hf()

    @property
    def bare_row(self) -> dict[str, Any]:
        """The row without host metadata: boundaries as tensors only."""
        return {name: value for name, value in self.row.items() if isinstance(value, torch.Tensor)}

    @property
    def plain_row(self) -> dict[str, torch.Tensor]:
        """The row as transformers itself takes it: [4, 1, T] positions, the text row first, and no boundaries."""
        row, model = self.row, self.model
        metadata = self.packed.metadata
        assert metadata is not None
        positions = family_of(model).positions(metadata.media, self.packed.segments, config=model.config)
        names = ("input_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        ids = positions if family_of(model).has_vision else positions[0]
        return {**{name: row[name] for name in names if name in row}, "position_ids": ids}

    def enable(self) -> Any:
        return enable_packing(self.model)

    @torch.no_grad()
    def error(self, **inputs: Any) -> float:
        """Largest difference of any sample's logits from its logits alone, as a part of the largest."""
        logits = self.model(**inputs).logits[0]
        spans = self.packed.segments.spans
        assert len(spans) == len(self.expected) == 4
        return max(distance(logits[start:stop], own) for (start, stop), own in zip(spans, self.expected, strict=True))

    @torch.no_grad()
    def loss_error(self, **inputs: Any) -> float:
        return abs(float(self.model(**inputs).loss) - self.loss)


@pytest.fixture
def no_boundaries(monkeypatch):
    """Take out the side channel: attention layers of the text model see the row as one long sample."""

    def take_out():
        packed = attention.packed_attention

        def one_sample(query, key, value, row, **settings):
            if settings.get("vision") is None:
                one = Segments.from_lengths([query.shape[2]])
                row = RowContext(segments=one, entries=row.entries)
            return packed(query, key, value, row, **settings)

        monkeypatch.setattr(attention, "packed_attention", one_sample)

    return take_out


# ---------------------------------------------------------------------- how transformers finds the samples of a row


@pytest.mark.parametrize("family", [*WITH_ATTENTION_ALONE, "qwen3"])
def test_trap_01_a_cache_switches_packed_detection_off(family, no_boundaries):
    """transformers looks for samples in the positions only if there is no cache; the text model makes one by default.

    Ours come by a side channel, and `use_cache=False` goes with them.
    """
    case = Case(family)
    family_of(case.model).text_config(case.model.config).use_cache = True
    assert case.error(**case.plain_row) > LEAK
    assert case.error(**case.plain_row, use_cache=False) < EXACT

    case.enable()
    assert case.error(**case.row, output_logits=True) < EXACT
    no_boundaries()
    assert case.error(**case.row, output_logits=True) > LEAK


@pytest.mark.parametrize("family", WITH_ATTENTION_ALONE)
def test_trap_02_three_rows_of_positions_are_never_looked_at(family, no_boundaries):
    """Three rows are what `get_rope_index` returns. We hand over three rows and boundaries beside them."""
    case = Case(family)
    plain = {**case.plain_row, "use_cache": False}
    assert case.error(**{**plain, "position_ids": plain["position_ids"][1:]}) > LEAK

    case.enable()
    for rows in (plain["position_ids"], plain["position_ids"][1:]):
        assert case.error(**case.row, position_ids=rows, output_logits=True) < EXACT
    no_boundaries()
    assert case.error(**case.row, position_ids=plain["position_ids"], output_logits=True) > LEAK


def test_trap_03_a_mask_of_ones_switches_packed_detection_off(monkeypatch):
    """A row with an attention_mask is refused; and by construction the mask would not reach the layers."""
    case = Case()
    ones = torch.ones_like(case.row["input_ids"])
    assert case.error(**case.plain_row, use_cache=False, attention_mask=ones) > LEAK

    case.enable()
    with pytest.raises(LayoutError, match="a packed row comes without attention_mask"):
        case.model(**case.row, attention_mask=ones)
    given_row = forward._row_in
    monkeypatch.setattr(forward, "_row_in", lambda inputs, family: given_row(inputs | {"attention_mask": None}, family))
    assert case.error(**case.row, attention_mask=ones, output_logits=True) < EXACT


def test_trap_04_a_boolean_4d_mask_is_added_by_eager_attention(no_boundaries):
    """Ours is a dummy of one entry that no layer reads; the samples are kept apart by other means."""
    case = Case(attn_implementation="eager")
    sample = case.packed.segments.seq_idx("cpu")
    block_diagonal = (sample[:, None] == sample[None, :]).tril()[None, None]
    assert case.error(**case.plain_row, use_cache=False, attention_mask=block_diagonal) > LEAK
    additive = torch.zeros(block_diagonal.shape).masked_fill(~block_diagonal, torch.finfo(torch.float32).min)
    assert case.error(**case.plain_row, use_cache=False, attention_mask=additive) < EXACT

    case.enable()
    assert case.error(**case.row, output_logits=True) < EXACT
    no_boundaries()
    assert case.error(**case.row, output_logits=True) > LEAK


@pytest.mark.parametrize("family", VISION)
def test_trap_05_2d_positions_lose_the_places_of_images(family, monkeypatch):
    """Positions are computed, and those that a batch brings compared with them: they never reach the model."""
    case = Case(family)
    flat = case.packed.segments.position_in_segment("cpu")
    flat = flat.reshape(1, -1)
    assert case.error(**{**case.plain_row, "position_ids": flat}, use_cache=False) > LEAK

    case.enable()
    with pytest.raises(LayoutError, match="images lose their places"):
        case.model(**case.row, position_ids=flat)
    monkeypatch.setattr(positions, "check_positions", lambda *args, **kwargs: None)
    assert case.error(**case.row, position_ids=flat, output_logits=True) < EXACT
    monkeypatch.setattr(Family, "positions", lambda *args, **kwargs: flat.expand(4, 1, -1))
    assert case.error(**case.row, output_logits=True) > LEAK


def test_trap_06_flash_attention_boundaries_are_ignored_by_other_implementations(monkeypatch):
    case = Case(kinds=("text",) * 4)  # with images, older versions hand these to the vision tower as well, and stop
    boundaries = case.row["cu_seqlens_q"]
    longest = case.packed.segments.max_length
    names = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
    plain = {name: value for name, value in case.plain_row.items() if name != "position_ids"}
    assert case.error(**plain, **names) > LEAK

    case.enable()
    with pytest.raises(ConfigError, match="cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k would be ignored"):
        case.model(**plain, **names)
    monkeypatch.setattr(forward, "check_boundaries_kept", lambda inputs: None)
    assert case.error(**plain, **names) > LEAK


def test_trap_07_real_boundaries_on_a_row_with_gaps():
    """Both boundaries travel, and never the one for the other; leaving one out contradicts labels and padding mask."""
    case = Case(rule=SlotRule(multiple=8))
    assert case.packed.segments.has_padding
    case.enable()
    assert case.error(**case.row, output_logits=True) < EXACT
    assert case.error(**case.bare_row, output_logits=True) < EXACT

    real_only = {name: value for name, value in case.bare_row.items() if name != "cu_seqlens_q_padded"}
    with pytest.raises(LayoutError, match=r"labels of the row hold targets between its samples.*cu_seqlens_q_padded"):
        case.model(**real_only)
    real_only.pop("labels")
    with pytest.raises(LayoutError, match=r"does not fit the boundaries.*both cu_seqlens_q and cu_seqlens_q_padded"):
        case.model(**real_only)
    real_only.pop("moe_padding_mask")
    with pytest.raises(LayoutError, match=r"cu_seqlens_q ends at \d+, but the row is \d+ tokens wide"):
        case.model(**real_only)

    case = Case(rule=SlotRule(multiple=8), kinds=("text",) * 4)
    case.enable()
    behind = {"cu_seqlens_q": case.row["cu_seqlens_q"], "cu_seqlens_q_padded": case.row["cu_seqlens_q"]}
    assert case.error(input_ids=case.row["input_ids"], **behind, output_logits=True) > LEAK


def test_trap_08_flash_attention_looks_for_samples_in_batches_of_one_only():
    """By construction: a packed row is [1, T]. Two of them in one batch are refused."""
    case = Case()
    case.enable()
    assert case.row["input_ids"].shape[0] == 1
    two = {name: torch.cat([value, value]) for name, value in case.bare_row.items()}
    with pytest.raises(LayoutError, match=r"a packed row is \[1, T\] but input_ids is \[2, "):
        case.model(**two)


# ---------------------------------------------------------------------- what no mask and no position reaches


@pytest.mark.parametrize("family", HYBRID)
def test_trap_09_gated_delta_layers_run_on_from_sample_to_sample(family, monkeypatch):
    """Neither positions nor masks reach them, and boundaries under transformers' names cut nothing, or raise, without
    kernels that take them; with boundaries but not `seq_idx` the convolution still leaks."""
    case = Case(family)
    plain = {**case.plain_row, "use_cache": False}
    sample = case.packed.segments.seq_idx("cpu")
    apart = (sample[:, None] == sample[None, :]).tril()[None, None]
    assert case.error(**plain) > LEAK
    assert case.error(**plain, attention_mask=apart) > LEAK

    case.enable()
    assert case.error(**case.row, output_logits=True) < EXACT_DELTA
    whole = Segments.from_lengths([case.packed.segments.total])
    monkeypatch.setattr(GatedDelta, "prepare", lambda self, setup: Buckets.cheapest(whole, call_cost=0.0))
    assert case.error(**case.row, output_logits=True) > LEAK


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("names", [("cu_seq_lens_q", "cu_seq_lens_k"), ("seq_idx",)])
def test_trap_09_boundaries_under_names_of_kernels_are_refused(family, names):
    """What transformers makes of them depends on what is installed; here they would be ignored."""
    case = Case(family, kinds=("text",) * 4)
    segments = case.packed.segments
    values = {name: segments.cu_seqlens() for name in names if name != "seq_idx"}
    values |= {name: segments.seq_idx("cpu")[None] for name in names if name == "seq_idx"}
    case.enable()
    plain = {name: value for name, value in case.plain_row.items() if name != "position_ids"}
    with pytest.raises(ConfigError, match=f"{', '.join(names)} would be ignored"):
        case.model(**plain, **values)


@pytest.mark.parametrize("uncut", ["n-gram layers", "these and sparse attention"])
def test_trap_10_n_gram_layers_run_on_beside_gated_delta_layers(uncut, monkeypatch):
    """So does the choice of sparse attention; neither is told any boundaries, under whatever name."""
    case = Case("qwen4_exp")
    case.enable()
    assert case.error(**case.row, output_logits=True) < EXACT_DELTA
    disable_packing(case.model)
    if uncut == "n-gram layers":
        monkeypatch.setattr(per_sample, "_add_row", lambda *ids_module_and_arguments: None)
    else:
        whole = Segments.from_lengths([case.packed.segments.total])
        monkeypatch.setattr(per_sample.PerSample, "prepare", lambda self, setup: Buckets.cheapest(whole, call_cost=0.0))
    case.enable()
    assert case.error(**case.row, output_logits=True) > LEAK


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_trap_11_a_router_loss_counts_padding_or_is_left_out(family):
    """A packed row has no mask, so transformers counts its pads; vlmpack keeps them away from the routers."""
    case = Case(family, rule=SlotRule(multiple=64))
    batch = {name: value for name, value in padded(case.samples).to_hf().items() if name != "vlmpack"}
    with torch.no_grad():
        with_loss, without = (case.model(**batch, output_router_logits=asked) for asked in (True, False))
        counted = case.model(**case.plain_row, use_cache=False, output_router_logits=True)
        case.enable()
        packed = case.model(**case.row, output_router_logits=True)
    assert float(with_loss.loss - without.loss) > 1e-4
    assert abs(float(packed.aux_loss - with_loss.aux_loss)) < 1e-6 * float(with_loss.aux_loss)
    assert abs(float(packed.loss - with_loss.loss)) < 1e-6 * float(with_loss.loss)
    assert abs(float(counted.aux_loss - with_loss.aux_loss)) > 0.01


# ---------------------------------------------------------------------- names, order, labels


def test_trap_12_unknown_names_are_swallowed(monkeypatch):
    case = Case()
    boundaries = case.row["cu_seqlens_q"]
    with torch.no_grad():
        plain = case.model(**case.plain_row, use_cache=False).logits
        assert torch.equal(case.model(**case.plain_row, use_cache=False, rope_cu_seqlen=boundaries).logits, plain)

    case.enable()
    for name, hint in (("rope_cu_seqlen", "did you mean 'rope_cu_seqlens'"), ("cu_seqlens", "did you mean")):
        with pytest.raises(ConfigError, match=f"takes no input '{name}'.*{hint}"):
            case.model(**case.row, **{name: boundaries})
    halves = torch.tensor(sorted({*boundaries.tolist(), 7}))
    meant = float(case.model(**case.row, rope_cu_seqlens=halves).loss.detach())
    monkeypatch.setattr(forward, "check_keys", lambda inputs, family, is_row: None)
    misspelt = float(case.model(**case.row, rope_cu_seqlen=halves).loss.detach())
    assert abs(meant - misspelt) > 1e-4


def test_trap_13_samples_in_another_order_than_their_media():
    """By construction: one function gathers ids, pixels and grids from the same list, and packing keeps its order."""
    model = enable_packing(tiny_model()).eval()
    one, other = receipts(model, kinds=("image", "image", "image"))[1:]
    other = {**one, "pixel_values": -one["pixel_values"], "input_ids": one["input_ids"].clone()}
    batches = [padded(pair) for pair in ((one, other), (other, one))]
    with torch.no_grad():
        losses = [model(**pack(batch).to_hf()).sample_losses for batch in batches]
        assert torch.equal(losses[0], losses[1].flip(0))
        swapped = replace(batches[0], media=batches[1].media)
        assert not torch.allclose(model(**pack(swapped).to_hf()).sample_losses, losses[0], atol=1e-3)


def test_trap_14_the_first_label_of_a_sample_is_learnt_from_the_sample_before(monkeypatch):
    """Labels are shifted inside each segment; and `logits_to_keep`, whose integer mask is read as positions, is not
    used: labelled positions are gathered."""
    case = Case()
    case.enable()
    assert case.loss_error(**case.row) < 1e-6 * case.loss
    with pytest.raises(ConfigError, match="logits_to_keep cannot be combined with a packed row"):
        case.model(**case.row, logits_to_keep=(case.row["labels"] != -100).long())

    def across(labels, segments):
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)

    labels = torch.cat([sample["labels"] for sample in case.samples])[None]
    bare = {**case.bare_row, "labels": labels}
    assert case.loss_error(**bare) < 1e-6 * case.loss
    monkeypatch.setattr("vlmpack.layout.row.shift_labels", across)
    assert case.loss_error(**bare) > 1e-3
    with pytest.raises(LayoutError, match="the host counted"):  # with host metadata it cannot happen unseen
        case.model(**{**case.row, "labels": labels})


@pytest.mark.parametrize("family", [VISION[0], *slow(VISION[1])])
def test_trap_15_accumulation_and_evaluation_average_averages(family, tmp_path, monkeypatch):
    reference, model = tiny_model(family), enable_packing(tiny_model(family))
    samples = receipts(model)[:6]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = descend(reference, samples, size=6, steps=1).losses[0]
    settings = {"gradient_accumulation_steps": 3, "max_steps": 1}

    run = Trainer(model, arguments(tmp_path), collator("packed"), eval_dataset=Samples(samples))
    with pytest.raises(ConfigError, match="averages the mean losses of batches over samples"):
        run.evaluate()
    run = trainer(model, samples, tmp_path)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)

    assert train(model, samples, tmp_path, **settings).losses[0] == pytest.approx(expected, rel=1e-6)
    model.load_state_dict(start)
    monkeypatch.setattr(type(model), "accepts_loss_kwargs", False)
    assert train(model, samples, tmp_path, **settings).losses[0] != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", WITH_ATTENTION_ALONE)
def test_trap_16_an_attention_without_a_mask_function_drops_the_2d_mask(family, monkeypatch):
    """Only left padding shows it. An enabled model's configuration keeps its name, and so its mask function."""
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


def test_trap_17_qwen2_5_vl_without_token_types_forgets_where_images_are(monkeypatch):
    """We read the types from the ids, whether or not the batch brings them."""
    case = Case("qwen2_5_vl")
    sample = next(sample for sample in case.samples if "pixel_values" in sample)
    untyped = {name: value for name, value in alone(sample).items() if name != "mm_token_type_ids"}
    with torch.no_grad():
        lost = case.model(**untyped).logits - case.model(**alone(sample)).logits
    assert lost.abs().max() > LEAK

    case.enable()
    row = {name: value for name, value in case.row.items() if name != "mm_token_type_ids"}
    assert case.error(**row, output_logits=True) < EXACT
    positions = Family.positions
    monkeypatch.setattr(
        Family,
        "positions",
        lambda self, table, segments, *, config, **more: positions(self, MediaTable(), segments, config=config),
    )
    assert case.error(**row, output_logits=True) > LEAK


def test_trap_18_removed_columns_take_the_lengths_along(tmp_path):
    """Trainer drops the `length` column before its sampler groups by it, and goes by other lengths without a word."""
    model = enable_packing(tiny_model())
    table = Dataset.from_dict({"input_ids": [[7] * 5] * 4, "length": [40, 30, 20, 10]})
    grouped_by = {}
    for remove in (True, False):
        settings = {"train_sampling_strategy": "group_by_length", "remove_unused_columns": remove}
        run = Trainer(model, arguments(tmp_path, **settings), collator("packed"), table)
        grouped_by[remove] = list(run._get_train_sampler(run._remove_unused_columns(table)).lengths)
        if remove:
            with pytest.raises(ConfigError, match="drops 'length' before group_by_length reads it"):
                check_trainer(run)
        else:
            check_trainer(run)
    assert grouped_by == {True: [5, 5, 5, 5], False: [40, 30, 20, 10]}


def test_every_trap_has_a_test():
    numbers = {int(name.split("_")[2]) for name in globals() if name.startswith("test_trap_")}
    assert numbers == set(range(1, 19))
