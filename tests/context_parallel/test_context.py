"""One row over several ranks: loss and gradients of one rank alone, and as many bytes as formulas say.

Four processes compute the chosen cases of tests/shared_rows.py once, and write down what they saw.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from ranks import on_ranks
from shared_rows import CASES, DATA_CASES, SHORT_CASES, WAIT_CASES, Case

from vlmpack.context_parallel.vision import deal
from vlmpack.families import family_named
from vlmpack.families.media import media_of_row
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.row import without_gaps

pytestmark = pytest.mark.dist

FLOAT = 4
"""Bytes."""


def tiered(values: Iterable[Any], fast: Sequence[Any] = SHORT_CASES) -> list[Any]:
    """These values of a parameter, slow where they are not among `fast`."""
    return [value if value in fast else slow(value)[0] for value in values]


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("four_ranks")
    chosen = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    (folder / "chosen.json").write_text(json.dumps(sorted(chosen)))
    on_ranks(Path(__file__).with_name("four_ranks.py"), folder, ranks=4)
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("case", tiered(CASES), ids=str)
def test_ranks_that_share_a_row_compute_what_one_computes(case: Case, seen: dict[str, Any]) -> None:
    found = seen["shared"][str(case)]
    assert found["targets"][0] == found["targets"][1] > 0
    assert found["loss"] <= 1e-5
    assert found["sample losses"] <= 1e-5
    assert found["logits"] <= 2e-5
    assert found["compared"] > 20
    assert found["gradient"] <= 1e-5
    assert found["left out"] == []
    assert case.ranks == 1 or found["own gradient"] > 0.1, "a part of the gradient alone would pass"
    assert not case.has_experts or (found["aux loss"] <= 1e-6 and found["expert counts"])


@pytest.mark.parametrize("case", tiered(case for case in CASES if case.family != "qwen4_exp"), ids=str)
def test_the_bytes_that_are_sent_are_those_of_the_formulas(case: Case, seen: dict[str, Any]) -> None:
    sent = sum((Counter(rank) for rank in seen["shared"][str(case)]["sent"]), Counter())
    assert +sent == +expected_bytes(case)


@pytest.mark.parametrize("case", tiered(DATA_CASES, DATA_CASES[-2:-1]), ids=lambda case: " ".join(map(str, case)))
def test_gradients_add_up_over_ranks_with_images_with_text_alone_and_with_nothing(case: Any, seen: dict) -> None:
    found = seen["data"][" ".join(map(str, case))]
    assert found["targets"][0] == found["targets"][1] > 0
    assert found["compared"] > 50
    assert found["gradient"] <= 1e-5


@pytest.mark.parametrize("case", tiered(WAIT_CASES, WAIT_CASES[:1]), ids=str)
def test_the_host_waits_once_a_step_however_many_layers_there_are(case: Case, seen: dict[str, Any]) -> None:
    """For the places of targets; recomputed layers do not wait, nor does the comparison of rows."""
    assert seen["waits"][str(case)] == ["row.targets"]


# ---------------------------------------------------------------------- the formulas


def expected_bytes(case: Case) -> Counter[str]:
    """What all ranks together send in one step, forward and backward."""
    model = case.model()
    row, family = without_gaps(case.row(model), SlotRule(row_multiple=case.ranks)).row, family_named(case.family)
    text: Any = family.text_config(model.config)
    ranks, t = case.ranks, row.segments.total // case.ranks
    if ranks == 1:
        return Counter()
    mixed = family.has("gated_delta") or family.has("short_conv")
    kinds = Counter(text.layer_types if mixed else ["full_attention"] * text.num_hidden_layers)
    N, K, D = text.num_attention_heads, text.num_key_value_heads, text.hidden_size
    H = getattr(text, "head_dim", None) or D // N
    to_each = (ranks - 1) * t * FLOAT  # what a rank sends of one number for each token, if it sends it to all
    by_keys, by_heads = 2 * to_each * 2 * K * H, 2 * to_each // ranks * (2 * N + 2 * max(K, ranks)) * H
    found = Counter(attention=ranks * (by_keys if N % ranks else by_heads) * kinds["full_attention"])
    if linear := kinds["linear_attention"]:
        keys, values = (text.linear_num_key_heads, text.linear_num_value_heads)
        channels = 2 * keys * text.linear_key_head_dim + 3 * values * text.linear_value_head_dim + 2 * values
        name, bytes_ = ("whole rows", to_each * D) if keys % ranks else ("gated delta", to_each * channels // ranks)
        found[name] = ranks * 2 * bytes_ * linear
    if convolutions := kinds["conv"]:
        found["whole rows"] = ranks * 2 * to_each * D * convolutions
    if family.has_vision:
        levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
        found["images"] = 2 * moved_features(case, model, row) * D * levels * FLOAT
    if case.has_experts:
        samples = 1 if case.aux_loss == "row" else row.segments.num_samples
        numbers = (2 * samples * text.num_experts + samples) * FLOAT + text.num_hidden_layers * text.num_experts * 8
        found["routers"] = 2 * (ranks - 1) * numbers
    # log-probabilities of the targets; logits, which the test asks for
    targets = int((row.shift_labels != IGNORE).sum())
    found["loss"] = ranks * (2 * (ranks - 1) * targets * FLOAT // ranks + to_each * text.vocab_size)
    found["check"] = ranks * (ranks - 1) * 4 * 8
    return found


def moved_features(case: Case, model: Any, row: Any) -> int:
    """Image and video tokens whose features another rank computes."""
    family = FAMILIES[case.family]
    table = media_of_row(family, row, model.config)
    media = (*table.images, *table.videos)
    rank_of = deal([medium.patches for medium in media], [range(case.ranks)] * len(media), case.ranks)
    computing = [rank for rank, medium in zip(rank_of, media, strict=True) for _ in range(medium.tokens)]
    types = family.media_types(row.input_ids, model.config)[0].tolist()
    t = row.segments.total // case.ranks
    holding = [place // t for kind in (1, 2) for place, type_ in enumerate(types) if type_ == kind]
    return sum(a != b for a, b in zip(computing, holding, strict=True))
