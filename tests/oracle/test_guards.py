"""The comparison of this suite fails when something is wrong: each of these breaks one thing on purpose.

The mistakes are the ones that packing invites, and that no error message tells of: the loss stays finite and plausible.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.packed import collator_of, outcome_of
from tests.oracle.plain import (
    CASES,
    Outcome,
    conversations,
    differences,
    encoded,
    gradients_of,
    in_one_batch,
    run_alone,
)
from vlmpack import PackedRow, PackedStep, Segments

QWEN = CASES[1]
TEXT = CASES[7]
GATED_DELTA = replace(CASES[3], has_images=False)


@lru_cache
def alone(case: Any = QWEN) -> Outcome:
    return run_alone(case.model(), [encoded(case, talk) for talk in conversations(case)])


def stepped(row: Any, case: Any = QWEN) -> Outcome:
    """A packed step on a row that was tampered with, read as if nothing had happened."""
    model = case.model()
    result = PackedStep(model)(row)
    result.loss.backward()
    return outcome_of(result, [encoded(case, talk) for talk in conversations(case)], gradients_of(model))


def packed_row(case: Any = QWEN) -> Any:
    return collator_of(case).collate(conversations(case))


def row_of_text(lengths: list[int] | None = None, labels: torch.Tensor | None = None, *, case: Any = TEXT) -> PackedRow:
    """The row of a case without images by hand, with other boundaries or labels."""
    row = packed_row(case)
    return PackedRow(
        input_ids=row.input_ids,
        shift_labels=row.shift_labels if labels is None else labels,
        segments=Segments.from_lengths(list(row.segments.lengths) if lengths is None else lengths),
    )


@pytest.mark.parametrize("case", [QWEN, TEXT, GATED_DELTA], ids=str)
def test_an_untouched_row_shows_no_difference(case: Any) -> None:
    row = packed_row(case) if case.has_images else row_of_text(case=case)
    assert differences(stepped(row, case), alone(case)) == []


def test_two_samples_with_each_others_images_are_found() -> None:
    """Both images have one size, so ids, grids and positions are the same."""
    talks = conversations(QWEN)
    first, last = (talks[i]["messages"][0]["content"] for i in (0, 3))
    first[0], last[0] = last[0], first[0]
    row = collator_of(QWEN).collate(talks)
    assert row.input_ids.equal(packed_row().input_ids)
    found = differences(stepped(row), alone())
    assert [line for line in found if line.startswith("loss of sample")] == [
        line for line in found if line.startswith(("loss of sample 0", "loss of sample 3"))
    ]
    assert sum(line.startswith("loss of sample") for line in found) == 2
    assert any("gradient of model.visual" in line for line in found)


@pytest.mark.parametrize("case", [TEXT, GATED_DELTA], ids=str)
def test_a_boundary_that_is_off_by_one_is_found(case: Any) -> None:
    lengths = list(packed_row(case).segments.lengths)
    moved = [lengths[0] + 1, lengths[1] - 1, *lengths[2:]]
    found = differences(stepped(row_of_text(moved, case=case), case), alone(case))
    assert any(line.startswith("log-probabilities of sample 1") for line in found)
    assert not any(line.startswith("loss of sample 2") for line in found), "the others have their boundaries"


def test_samples_without_a_boundary_between_them_are_found() -> None:
    """What plain transformers computes of a row without boundaries: every sample attends to those before it."""
    model = QWEN.model()
    batch = packed_row()
    samples = [encoded(QWEN, talk) for talk in conversations(QWEN)]
    inputs = {"input_ids": batch.input_ids, "labels": torch.cat([sample["labels"] for sample in samples], 1)}
    media = {name: value for name, value in in_one_batch(samples, pad=0).items() if name.startswith(("pix", "image"))}
    kinds = {"mm_token_type_ids": batch.mm_token_type_ids, "attention_mask": torch.ones_like(batch.input_ids)}
    leaked = run_alone(model, [{**inputs, **kinds, **media}])
    pieces = list(leaked.logprobs[0].split(alone().targets))
    losses = torch.stack([-piece.sum() for piece in pieces])
    found = differences(Outcome(alone().targets, losses, pieces, leaked.gradients), alone())
    assert not any("sample 0" in line for line in found), "the first sample has nothing before it"
    assert {f"loss of sample {i}" for i in (1, 2, 3)} <= {line.partition(":")[0] for line in found}


def test_one_changed_label_is_found() -> None:
    labels = packed_row(TEXT).shift_labels.clone()
    place = int((labels[0] != -100).nonzero()[0, 0])
    labels[0, place] += 1
    found = differences(stepped(row_of_text(labels=labels), TEXT), alone(TEXT))
    assert found[0].startswith("loss of sample 0")


def test_one_missing_label_is_found() -> None:
    labels = packed_row(TEXT).shift_labels.clone()
    labels[0, int((labels[0] != -100).nonzero()[0, 0])] = -100
    found = differences(stepped(row_of_text(labels=labels), TEXT), alone(TEXT))
    assert found[0] == "targets: [11, 15, 8, 17], alone [12, 15, 8, 17]"


def test_a_target_across_a_boundary_is_found() -> None:
    labels = packed_row(TEXT).shift_labels.clone()
    end = packed_row(TEXT).segments.lengths[0]
    labels[0, end - 1] = packed_row(TEXT).input_ids[0, end]
    found = differences(stepped(row_of_text(labels=labels), TEXT), alone(TEXT))
    assert found[0] == "targets: [13, 15, 8, 17], alone [12, 15, 8, 17]"


def test_wrong_positions_are_found() -> None:
    """Every other token is rotated by one position too many."""
    model = QWEN.model()
    step = PackedStep(model)
    handle = model.get_submodule("model.language_model.rotary_emb").register_forward_pre_hook(moved, with_kwargs=True)
    result = step(packed_row())
    handle.remove()
    result.loss.backward()
    samples = [encoded(QWEN, talk) for talk in conversations(QWEN)]
    found = differences(outcome_of(result, samples, gradients_of(model)), alone())
    assert sum(line.startswith("loss of sample") for line in found) == 4


def moved(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = named["position_ids"] if "position_ids" in named else arguments[1]
    return arguments[:1], {**named, "position_ids": positions + torch.arange(positions.shape[-1]) % 2}


def test_a_tower_that_is_not_trained_is_found() -> None:
    model = QWEN.model()
    model.model.visual.requires_grad_(False)
    result = PackedStep(model)(packed_row())
    result.loss.backward()
    samples = [encoded(QWEN, talk) for talk in conversations(QWEN)]
    found = differences(outcome_of(result, samples, gradients_of(model)), alone())
    assert found
    assert all(line.startswith("gradient of model.visual") for line in found)


def test_a_loss_that_averages_averages_is_found() -> None:
    """Each sample's mean weighs the same, whatever its number of targets: the gradient of another loss."""
    model = QWEN.model()
    for sample in (samples := [encoded(QWEN, talk) for talk in conversations(QWEN)]):
        inputs = {name: value for name, value in sample.items() if name != "labels"}
        model(**inputs, labels=sample["labels"], use_cache=False).loss.div(len(samples)).backward()
    found = differences(replace(alone(), gradients=gradients_of(model)), alone())
    assert len(found) > 40
    assert all(line.startswith("gradient of") for line in found)


def test_a_nan_is_a_difference() -> None:
    broken = replace(alone(), losses=alone().losses * torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    assert [line.partition(":")[0] for line in differences(broken, alone())] == ["loss of sample 1"]


def test_a_missing_gradient_is_a_difference() -> None:
    gradients = dict(alone().gradients)
    gradients.pop("lm_head.weight")
    assert differences(replace(alone(), gradients=gradients), alone()) == [
        "parameters: ['lm_head.weight'] have a gradient on one side only"
    ]


# ---------------------------------------------------------------------- of the suite itself

PUBLIC_MODULES = ("vlmpack.trainer.trl", "vlmpack.rows", "vlmpack.lengths")
"""Modules that the pages name, beside packages."""
OWN_COMPARISON = ("compare", "run_alone", "run_packed", "outcome_of", "problems", "EQUAL", "alone", "padded")
"""Names of `vlmpack.testing` by which vlmpack compares itself: the suite has to do without them."""


def imports_of_the_suite() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of each import from vlmpack and from the tests."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("vlmpack", "tests"):
                yield from ((file.name, str(node.module), alias.name) for alias in node.names)
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] in ("vlmpack", "tests") for alias in node.names)


def test_the_suite_uses_the_public_api_alone() -> None:
    """So that it outlives every change of what is behind it."""
    found = [(module, name) for _, module, name in imports_of_the_suite()]
    of_vlmpack = {(module, name) for module, name in found if module.startswith("vlmpack")}
    for module, name in of_vlmpack:
        if module not in PUBLIC_MODULES:
            public = import_module(module)
            assert hasattr(public, "__path__"), f"{module} is a module inside a package"
            assert name in public.__all__, (module, name)
    assert not {name for module, name in of_vlmpack if module == "vlmpack.testing"}.intersection(OWN_COMPARISON)
    assert len(of_vlmpack) > 20


def test_the_suite_uses_no_helper_of_other_tests() -> None:
    modules = {module for _, module, _ in imports_of_the_suite() if module.startswith("tests")}
    assert modules == {"tests.oracle.plain", "tests.oracle.packed"}
