"""What a caller says of rotary positions is checked, not trusted: position ids, and where they restart."""

import functools
import re

import pytest
import torch
from cases import slow

from vlmpack.errors import LayoutError
from vlmpack.families import family_of
from vlmpack.layout import Segments, SlotRule, pack
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.model.engine import rope_segments
from vlmpack.testing import alone, mixed_samples, padded, tiny_model

each_family = pytest.mark.parametrize("family", ["qwen3_vl", "qwen3", *slow("qwen2_5_vl")])
GAPS = SlotRule(multiple=8, row_multiple=16)
SMALL = {"layers": 1, "vision_depth": 1, "hidden": 48}
POISON = -7
"""Stands at pads, where nothing may read it."""


class Case:
    """Four samples, their model, and what `get_rope_index` of the unmodified model says of each alone."""

    def __init__(self, family, kinds=("image", "text", "images", "video")):
        self.model = tiny_model(family, **SMALL).eval()
        self.has_vision = family_of(self.model).has_vision
        self.samples = mixed_samples(self.model.config, seed=3, kinds=kinds if self.has_vision else ("text",) * 3)
        self.positions = [self.alone(sample) for sample in self.samples]
        enable_packing(self.model, StepConfig(slots=GAPS))

    def alone(self, sample):
        """[3, n] of a vision family, [1, n] of a text family."""
        if not self.has_vision:
            return torch.arange(len(sample["input_ids"]))[None]
        given = {name: x for name, x in alone(sample).items() if "pixel" not in name and name != "labels"}
        return self.model.model.get_rope_index(**given)[0][:, 0]

    def batch(self, side="right", *, metadata=True):
        return padded(self.samples, side, metadata=metadata)

    def on_batch(self, side="right"):
        """[3, B, S], or [B, S] of a text family, poison at pads."""
        mask = self.batch(side).attention_mask.bool()
        out = torch.full((len(self.positions[0]), *mask.shape), POISON)
        out[:, mask] = torch.cat(self.positions, 1)
        return out if self.has_vision else out[0]

    def on_row(self, rule=None):
        """[3, 1, T], or [1, T] of a text family, poison in gaps."""
        segments = self.row(rule).segments
        out = torch.full((len(self.positions[0]), segments.total), POISON)
        out[:, segments.real_index()] = torch.cat(self.positions, 1)
        return out[:, None] if self.has_vision else out

    def row(self, rule=None):
        return pack(self.batch(), rule=rule)

    def with_text_row(self, positions, segments):
        text = torch.full((1, *positions.shape[1:]), POISON)
        text[0, 0, segments.real_index()] = segments.position_in_segment()[segments.real_index()]
        return torch.cat([text, positions])


@functools.cache
def case_of(family):
    return Case(family)


@pytest.fixture
def case():
    return case_of("qwen3_vl")


# ---------------------------------------------------------------------- positions that are right


@pytest.mark.parametrize(("side", "metadata"), [("right", True), ("left", False)])
@each_family
def test_positions_of_the_padded_batch_are_accepted_whatever_stands_at_pads(family, side, metadata):
    case = case_of(family)
    batch = case.batch(side, metadata=metadata).to_hf()
    given = case.on_batch(side)
    assert (given == POISON).any()
    assert torch.equal(case.model(**batch, position_ids=given).loss, case.model(**batch).loss)


@pytest.mark.parametrize("rule", [None, GAPS], ids=["no gaps", "gaps"])
@each_family
def test_positions_of_a_row_are_accepted_whatever_stands_in_gaps(family, rule):
    case = case_of(family)
    row, given = case.row(rule), case.on_row(rule)
    assert (given == POISON).any() == (rule is not None)
    expected = case.model(**row.to_hf()).loss
    more = case.with_text_row(given, row.segments) if case.has_vision else given[None]
    for positions in (given, more, given.int()):
        assert torch.equal(case.model(**row.to_hf(), position_ids=positions).loss, expected)


# ---------------------------------------------------------------------- positions that are wrong


@each_family
def test_positions_that_run_on_are_named_with_their_sample_and_place(family):
    case = case_of(family)
    lengths = case.row().segments.lengths
    given = case.on_row()
    given[..., lengths[0] :] += 5
    seen, right = ([n] * len(case.positions[0]) for n in (5, 0))
    message = re.escape(f"sample 1, token 0 has {seen}, where {right} is right: position_ids are not what each")
    with pytest.raises(LayoutError, match=f"{message}.*leave position_ids out"):
        case.model(**case.row().to_hf(), position_ids=given)


def test_a_device_asserts_what_a_host_tells(case):
    given = case.on_row(GAPS)
    with nothing_on_host():
        case.model(**case.row(GAPS).to_hf(), position_ids=given)
        given[:, :, 3] += 1
        with pytest.raises(RuntimeError, match=r"position_ids are not what each sample has alone\. They must restart"):
            case.model(**case.row(GAPS).to_hf(), position_ids=given)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
@pytest.mark.parametrize("rows", [None, 1, 2, 3, 4, 5])
def test_positions_of_another_shape_are_refused(family, rows):
    case = case_of(family)
    total = case.row().segments.total
    given = torch.zeros(total).expand(1, total) if rows is None else torch.zeros(rows, 1, total)
    if rows in ((3, 4) if case.has_vision else (None, 1)):
        message = "not what each sample has alone"
    else:
        message = rf"position_ids is \[.*{total}\], but {family} needs \[.*leave position_ids out"
    with pytest.raises(LayoutError, match=message):
        case.model(**case.row().to_hf(), position_ids=given)


def test_positions_that_are_no_tensor_are_refused(case):
    for batch in (case.row(), case.batch()):
        with pytest.raises(LayoutError, match=r"position_ids must be a tensor.* got list"):
            case.model(**batch.to_hf(), position_ids=[0, 1, 2])


# ---------------------------------------------------------------------- restarts that a caller gives


def restarted(segments, *, tokens=(4,), sample=1):
    """Boundaries in real tokens: the row's own, and some inside a sample."""
    return sorted({*segments.real, *(segments.real[sample] + token for token in tokens)})


def in_places(boundaries, segments):
    """The same, counted in places of the row."""
    return [int(place) for place in segments.real_index()[torch.tensor(boundaries[:-1])]] + [segments.total]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
@each_family
def test_restarts_inside_a_sample_mean_the_same_on_every_kind_of_input(family, kind):
    """In real tokens or in places of the row, on a padded batch and on a row: another loss, and the same one."""
    case = case_of(family)
    gaps, tight = case.row(GAPS).segments, case.row().segments
    tokens = restarted(gaps)
    given = [
        (case.batch("right"), tokens),
        (case.batch("left", metadata=False), tokens),
        (case.batch("left"), in_places(tokens, gaps)),
        (case.row(GAPS), tokens),
        (case.row(GAPS), in_places(tokens, gaps)),
        (case.row(), in_places(tokens, tight)),
    ]
    assert tokens != in_places(tokens, gaps)
    losses = [case.model(**x.to_hf(), rope_cu_seqlens=kind(boundaries)).loss for x, boundaries in given]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
    assert abs(losses[0] - case.model(**case.row().to_hf()).loss) > 1e-5


def test_given_positions_and_restarts_have_to_agree(case):
    row = case.row(GAPS)
    boundaries = restarted(row.segments)
    given = case.on_row(GAPS)
    with pytest.raises(LayoutError, match=r"sample 1, token 4 has \[4, 4, 4\], where \[0, 0, 0\] is.*rope_cu_seqlens"):
        case.model(**row.to_hf(), position_ids=given, rope_cu_seqlens=boundaries)
    start, stop = row.segments.spans[1]
    given[:, 0, start:stop] = torch.cat([torch.arange(4), torch.arange(stop - start - 4)])
    both = case.model(**row.to_hf(), position_ids=given, rope_cu_seqlens=boundaries)
    assert torch.equal(both.loss, case.model(**row.to_hf(), rope_cu_seqlens=boundaries).loss)
    with pytest.raises(LayoutError, match=r"sample 1, token 4 has \[0, 0, 0\], where \[4, 4, 4\] is right"):
        case.model(**row.to_hf(), position_ids=given)


# ---------------------------------------------------------------------- restarts that are refused

ROW = Segments.from_boundaries([0, 3, 8, 10], [0, 4, 12, 16], total=20)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 10], "no boundary where sample 1 starts, at place 4 of the row.*run on from the sample before"),
        ([0, 4, 20], "no boundary where sample 2 starts, at place 12 of the row.*keep every boundary of cu_seqlens_q"),
        ([0, 5, 10], "no boundary where sample 1 starts"),
        ([0, 3, 12, 16], "no boundary where sample 1 starts"),
        ([0, 3, 8, 9], r"ends at 9, but the row has 10 real tokens and its last sample ends at place 14 of 20"),
        ([0, 4, 12, 13], r"ends at 13, but the row has"),
        ([0, 4, 12, 21], r"ends at 21, but the row has"),
        ([0, 8, 3, 10], "must never decrease, but segment 1 runs from 8 to 3"),
        ([3, 8, 10], r"must start at 0 and hold at least two boundaries, got \[3, 8, 10\]"),
        ([0], "must start at 0 and hold at least two"),
        ([], "must start at 0 and hold at least two"),
        (
            torch.tensor([[0, 3, 8, 10]]),
            r"must be whole numbers in a tensor \[segments \+ 1\].*got torch.int64 \[1, 4\]",
        ),
        (torch.tensor([0.0, 3.0]), r"must be whole numbers .* got torch.float32 \[2\]"),
        ([0, 3.5, 10], r"must be whole numbers .* got list \[0, 3.5, 10\]"),
        ("0, 10", "must be whole numbers .* got str '0, 10'"),
        (10, "must be whole numbers .* got int 10"),
    ],
)
def test_restarts_that_cannot_be_are_named(boundaries, message):
    with pytest.raises(LayoutError, match=rf"rope_cu_seqlens (has )?{message}"):
        rope_segments(boundaries, ROW)


@pytest.mark.parametrize("given", ["padded", "row"])
def test_a_restart_inside_an_image_is_refused(case, given):
    ids = case.samples[0]["input_ids"]
    first = int((ids == case.model.config.image_token_id).nonzero()[0])
    batch, segments = case.batch() if given == "padded" else case.row(GAPS), case.row(GAPS).segments
    step = PackedStep(case.model)
    assert torch.isfinite(step(batch, rope_cu_seqlens=restarted(segments, tokens=(first,), sample=0)).loss)
    with pytest.raises(LayoutError, match="restarts positions inside image tokens of sample 0; move the boundary"):
        step(batch, rope_cu_seqlens=restarted(segments, tokens=(first + 1,), sample=0))
