"""Three tiers of tests: the short one is the specification once, the full one adds what takes processes and a part of
the products of circumstances, and the exhaustive one the whole products.

`make test` leaves out what is marked `full`, `make test-full` what is marked `exhaustive`; `make test-exhaustive` runs
the rest. A function with several parameters and
the mark `pairwise` stays in the short tier with few of its cases: every pair of values of two parameters is in one of
them. With the mark `each_value` every value is. A sixth of the others is marked `full` here, the rest `exhaustive`.
Cases of a value that is itself in the full tier only stay there, and show nothing.

Of families that bring no part of the code with them a ninth is in the full tier in each test, each once, in a
circumstance that differs from family to family; their other cases are exhaustive. Tests with the mark `every_family`
are as the others. Four families that share their mechanisms with another are in every third test of the short tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest


def full(*values: Any) -> list[Any]:
    """These values of a parameter, in the full tier only."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def only_exhaustive(*values: Any) -> list[Any]:
    """These values of a parameter, in the exhaustive tier only."""
    return [pytest.param(value, marks=(pytest.mark.full, pytest.mark.exhaustive)) for value in values]


def tiers(values: Iterable[Any], short: Sequence[Any], exhaustive: Sequence[Any] = ()) -> list[Any]:
    """All these values of a parameter: those of `short`, those of `exhaustive`, and the others in the full tier."""
    mark = {True: only_exhaustive, False: full}
    return [value if value in short else mark[value in exhaustive](value)[0] for value in values]


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` what shows no new pair of values (`pairwise`) or no new value (`each_value`); ever the same."""
    products: dict[str, list[tuple[pytest.Item, set[Any]]]] = {}
    for item in items:
        if item.get_closest_marker("full") or _is_shown_by_others(item):
            continue
        together = 2 if item.get_closest_marker("pairwise") else 1
        if together == 2 or item.get_closest_marker("each_value"):
            values = [(name, repr(value)) for name, value in item.callspec.params.items()]  # pyright: ignore
            products.setdefault(item.nodeid.partition("[")[0], []).append((item, {*combinations(values, together)}))
    for cases in products.values():
        missing = set[Any]().union(*(pairs for _, pairs in cases))
        assert missing, f"{cases[0][0].nodeid} has one parameter, so that no case of it shows a pair of values"
        while missing:
            best = max(cases, key=lambda case: len(case[1] & missing))
            missing -= best[1]
            cases.remove(best)
        for item, _ in cases:
            item.add_marker(pytest.mark.full)
            if crc32(item.nodeid.encode()) % 6:
                item.add_marker(pytest.mark.exhaustive)


READ_QWEN = (
    "tests/model/test_experts.py",
    "tests/model/test_moe_precision.py",
    "tests/probing/test_weights.py",
    "tests/service/test_sampling.py",
    "tests/service/test_shared_rows.py",
    "tests/testing/test_models.py",
)
"""Tests that read parts which not every model has: a load-balancing loss, a head that is not tied, MLPs that adapters
reach, full attention in every layer. Families that others show have tests of their own."""


TAKE_TILES = (
    "tests/benchmarks/",
    "tests/collate/test_answer_ends.py",
    "tests/collate/test_answers.py",
    "tests/collate/test_audio.py",
    "tests/collate/test_by_processor.py",
    "tests/collate/test_empty_answers.py",
    "tests/collate/test_families_beyond.py",
    "tests/collate/test_processor_images.py",
    "tests/collate/test_reserved_tokens.py",
    "tests/collate/test_share_prefixes.py",
    "tests/collate/test_template_texts.py",
    "tests/collate/test_tokenised_grids.py",
    "tests/data/test_family_processors.py",
    "tests/families/test_tiles.py",
    "tests/model/test_attach.py::test_a_model_may_get_its_weights",
    "tests/model/test_audio.py",
    "tests/model/test_equality",
    "tests/model/test_generation.py",
    "tests/model/test_image_spans.py",
    "tests/model/test_passed_on.py",
    "tests/model/test_prefix_tree.py",
    "tests/model/test_sync.py::test_no_medium",
    "tests/model/test_sync.py::test_a_tower",
    "tests/model/test_vision_experts.py",
    "tests/model/test_vision_families.py",
    "tests/model/test_videos_beyond.py",
    "tests/probing/test_every_family.py",
    "tests/probing/test_image_spans.py",
    "tests/probing/test_varlen_kernels.py",
    "tests/probing/test_pixels.py",
    "tests/probing/test_run.py",
    "tests/probing/test_weights.py::test_families_whose_parts",
    "tests/probing/test_weights.py::test_such_a_copy",
    "tests/store/test_shared_prefixes.py",
    "tests/store/test_shared_rows.py",
    "tests/test_on_gpu.py",
    "tests/testing/test_models.py",
    "tests/trainer/test_checkpoint_weights.py",
    "tests/trainer/test_checkpointing.py",
    "tests/trainer/test_dpo.py",
    "tests/trainer/test_end_to_end.py",
    "tests/trainer/test_grpo.py",
    "tests/trainer/test_liger.py",
    "tests/trainer/test_peft.py",
    "tests/trainer/test_sft.py",
)
"""Tests that samples of families with other images than Qwen's go through: others read grids or videos."""


def without_others(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests, but for those of `READ_QWEN` with families that others show, and for those that read Qwen's images
    with families that have others."""
    return [item for item in items if not _reads_qwen(item)]


def _reads_qwen(item: pytest.Item) -> bool:
    if item.get_closest_marker("chosen"):
        return False
    if not item.nodeid.startswith(TAKE_TILES) and _has_family(item, other_vision()):
        return True
    return item.nodeid.startswith(READ_QWEN) and _is_shown_by_others(item)


TAKE_PROCESSORS = (
    "tests/collate/",
    "tests/data/",
    "tests/probing/test_pixels.py::test_so_it_is_with_what_its_processor_makes",
    "tests/probing/test_run.py",
    "tests/store/",
    "tests/trainer/test_dpo.py",
    "tests/trainer/test_end_to_end.py",
    "tests/trainer/test_grpo.py",
    "tests/trainer/test_sft.py",
)
"""Tests that samples of families beyond Qwen go through by their processors."""


def skip_without_packages(items: Iterable[pytest.Item]) -> None:
    """Skip tests with a family whose processor needs a package that cannot be imported, such as torchvision."""
    from fixtures.processors import RECIPES, missing_packages

    needing = frozenset(family for family, recipe in RECIPES.items() if recipe.packages)
    for item in items:
        families = _families_in(item, needing) if item.nodeid.startswith(TAKE_PROCESSORS) else ()
        for family in families:
            if missing := missing_packages(family):
                reason = f"{RECIPES[family].processor} needs {' and '.join(missing)}"
                item.add_marker(pytest.mark.skip(reason=reason))


MADE_OF_OTHERS = frozenset({"aya_vision", "cohere2_vision"})
"""Families of which every part is one of others in these tiers: InternVL's tiles, Cohere 2's text."""


def mark_families(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` one case of each test with every ninth of the families that bring no part of the code, and as
    `exhaustive` the others; ever the same ones, in another test other families, in other circumstances."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if _is_shown_by_others(item):
            item.add_marker(pytest.mark.full)
            cases.setdefault((item.nodeid.partition("[")[0], _family_of(item)), []).append(item)
    for (test, family), product in cases.items():
        number = sorted(shown_by_others()).index(family)
        is_shown = (number + crc32(test.encode())) % 9 == 0 and family not in MADE_OF_OTHERS
        kept = product[number % len(product)] if is_shown else None
        for item in product:
            if item is not kept:
                item.add_marker(pytest.mark.exhaustive)


SIBLINGS = {
    "qwen3_5": "qwen3_5_moe",
    "qwen3_next": "qwen3_5_moe",
    "qwen4_exp": "qwen3_5_moe",
    "qwen2_vl": "qwen2_5_vl",
}
"""Families that share most of their mechanisms with another: gated delta layers, and experts; positions and towers."""
WITH_SIBLINGS = (
    "tests/model/test_contract_disable.py::test_a_model_is_what_it_was",
    "tests/model/test_equality.py",
    "tests/model/test_equality_on_gpu.py",
    "tests/probing/test_breakage.py",
    "tests/probing/test_every_family.py",
)
"""Tests that go through siblings in the short tier, whatever their names: the matrix, and what must be found broken."""


def mark_siblings(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of siblings in two of three tests that go through the other family too: as `full` in one of
    them, as `exhaustive` in the other."""
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if not item.nodeid.startswith(WITH_SIBLINGS) and not item.get_closest_marker("chosen"):
            for family in (*SIBLINGS, *SIBLINGS.values()):
                if _has_family(item, frozenset({family})):
                    tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(family, []).append(item)
    for test, of_family in tests.items():
        for family, other in SIBLINGS.items():
            third = crc32(f"{test} {family}".encode()) % 3
            for item in of_family.get(family, ()) if other in of_family and third else ():
                item.add_marker(pytest.mark.full)
                if third == 2:
                    item.add_marker(pytest.mark.exhaustive)


def _family_of(item: pytest.Item) -> str:
    values = item.callspec.params.values()  # pyright: ignore[reportAttributeAccessIssue]
    return next(value for value in values if isinstance(value, str) and value in shown_by_others())


def _is_shown_by_others(item: pytest.Item) -> bool:
    """Return whether a test is about one of those families."""
    if item.get_closest_marker("chosen"):
        return False
    return not item.get_closest_marker("every_family") and _has_family(item, shown_by_others())


def _has_family(item: pytest.Item, families: frozenset[str]) -> bool:
    """Return whether a parameter of a test is one of these families."""
    return bool(_families_in(item, families))


def _families_in(item: pytest.Item, families: frozenset[str]) -> list[str]:
    """Which of these families are parameters of a test."""
    parameters = getattr(item, "callspec", None)
    values = () if parameters is None else parameters.params.values()
    return [value for value in values if isinstance(value, str) and value in families]


@cache
def shown_by_others() -> frozenset[str]:
    """Text models beside Qwen's, and families with other images: what they bring is shown once each, in
    `tests/model/test_text_families.py` and `tests/model/test_vision_families.py`.

    Imported here: whoever breaks a copy of the package imports this file before there is one.
    """
    from vlmpack.families.llama import LLAMA
    from vlmpack.families.text import TEXT

    return frozenset(family.model_type for family in (*LLAMA, *TEXT)) | other_vision()


@cache
def other_vision() -> frozenset[str]:
    """Families with vision beside Qwen's, and those with audio."""
    from vlmpack.families.registry import FAMILIES

    others = (name for name, family in FAMILIES.items() if family.has_vision and not name.startswith("qwen"))
    return frozenset(others) | {name for name, family in FAMILIES.items() if family.has_audio}
