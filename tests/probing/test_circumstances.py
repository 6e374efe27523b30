"""Breakages that show in some circumstances only: in rows without gaps, with many samples, in train mode, in a loss.

Each is one line of a mechanism. The probe must name the mechanism, and nothing that is not at fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import full

from vlmpack.layout import Segments
from vlmpack.model import engine, head, result
from vlmpack.model.mechanisms import experts
from vlmpack.model.row import RowContext
from vlmpack.probing import Report, probe
from vlmpack.testing import tiny_model

pytestmark = pytest.mark.usefixtures("shared_references")
Patch = pytest.MonkeyPatch
Break = Callable[[Any, Patch], None]
"""Breaks one mechanism of the model that it is given."""

packing = sys.modules["vlmpack.layout.packing"]


def bad(report: Report, part: str) -> list[str]:
    return [check.name for check in report.checks if check.part == part and check.is_bad]


# ---------------------------------------------------------------------- one sample for all, in some rows


def joined(when: Callable[[Segments, Any], bool]) -> Break:
    """Text attention takes rows for one sample, in some circumstances."""

    def patch_it(model: Any, patch: Patch) -> None:
        def context(**metadata: Any) -> RowContext:
            segments: Segments = metadata["segments"]
            whole = Segments.from_lengths([segments.total]) if when(segments, model) else segments
            return RowContext(**{**metadata, "segments": whole})

        patch.setattr(engine, "RowContext", context)

    return patch_it


JOINED = {
    "without gaps": joined(lambda segments, model: not segments.has_gaps),
    "from five samples on": joined(lambda segments, model: segments.num_samples > 4),
    "from 128 tokens of a sample on": joined(lambda segments, model: segments.max_length >= 128),
    "in train mode": joined(lambda segments, model: model.training),
    "in eval mode": joined(lambda segments, model: not model.training),
    "with a graph": joined(lambda segments, model: torch.is_grad_enabled()),
    "under autocast": joined(lambda segments, model: torch.is_autocast_enabled("cpu")),
}


# ---------------------------------------------------------------------- what goes in and what comes back


def rolled_targets(model: Any, patch: Patch) -> None:
    """Targets of a row without gaps stand one place too late."""
    honest = packing._Take.targets

    def targets(self: Any, labels: torch.Tensor) -> torch.Tensor:
        row = honest(self, labels)
        return row if self._segments.has_gaps else row.roll(1, -1)

    patch.setattr(packing._Take, "targets", targets)


def rolled_shift(model: Any, patch: Patch) -> None:
    """The same where a row's labels are shifted when they reach the model."""
    module = sys.modules["vlmpack.layout.row"]
    honest = module.shift_labels

    def shifted(labels: torch.Tensor, segments: Segments) -> torch.Tensor:
        row = honest(labels, segments)
        return row if segments.has_gaps else row.roll(1, -1)

    patch.setattr(module, "shift_labels", shifted)


def no_offsets(model: Any, patch: Patch) -> None:
    """A left-padded batch is read from its first column on."""
    honest = packing._Take.__init__
    patch.setattr(
        packing._Take,
        "__init__",
        lambda self, segments, offsets, *, width: honest(self, segments, [0] * len(offsets), width=width),
    )


def answers_on_the_left(model: Any, patch: Patch) -> None:
    """Logits of a left-padded batch are handed back as if it were right-padded."""
    honest = result.unpack
    patch.setattr(result, "unpack", lambda row, segments, *, width, offsets: honest(row, segments, width=width))


def own_targets_only(model: Any, patch: Patch) -> None:
    """`num_items_in_batch` is ignored."""
    patch.setattr(engine, "divisor", lambda given, targets: targets)


def reversed_losses(model: Any, patch: Patch) -> None:
    """Samples are handed each other's losses."""
    honest = engine.sums_by_sample
    patch.setattr(engine, "sums_by_sample", lambda *metadata: tuple(x.flip(0) for x in honest(*metadata)))


def reversed_sums(model: Any, patch: Patch) -> None:
    """The same, and each has its own number of targets."""
    honest = engine.sums_by_sample

    def sums(*metadata: Any) -> tuple[torch.Tensor, ...]:
        first, *others = honest(*metadata)
        return first.flip(0), *others

    patch.setattr(engine, "sums_by_sample", sums)


def shifted_chunks(model: Any, patch: Patch) -> None:
    """Where labelled positions go through the head in several chunks, targets are one place off."""
    honest = head.target_logprobs

    def logprobs(hidden: torch.Tensor, targets: torch.Tensor, head: Any, *, chunk: int) -> torch.Tensor:
        return honest(hidden, targets if len(targets) <= chunk else targets.roll(1), head, chunk=chunk)

    patch.setattr(head, "target_logprobs", logprobs)


def other_coefficient(model: Any, patch: Patch) -> None:
    """The load-balancing loss counts twice as much as it should."""
    honest = experts.coefficient
    patch.setattr(experts, "coefficient", lambda *metadata: 2 * honest(*metadata))


def balance_without_gradient(model: Any, patch: Patch) -> None:
    """The load-balancing loss is right, and nothing learns from it."""
    honest = experts.balance
    patch.setattr(experts, "balance", lambda *metadata: honest(*metadata).detach())


NUMBERS: dict[str, tuple[Break, str, str, set[str]]] = {
    "rolled targets": (rolled_targets, "qwen3", "loss count", {"left: loss"}),
    "rolled shift": (
        rolled_shift,
        "qwen3",
        "loss count",
        {"autocast: sample losses", "autocast: gradient of lm_head"},
    ),
    "no offsets": (no_offsets, "qwen3", "packing", {"left: logits"}),
    "no offsets, with images": (no_offsets, "qwen2_5_vl", "packing", {"left"}),
    "answers on the left": (answers_on_the_left, "qwen3", "sample results", {"left: logits"}),
    "own targets only": (own_targets_only, "qwen3", "loss count", {"row: loss", "padded: loss"}),
    "reversed losses": (reversed_losses, "qwen3", "sample results", {"gaps: sample losses", "row: sample losses"}),
    "reversed sums": (reversed_sums, "qwen3", "sample results", {"gaps: sample losses", "row: sample losses"}),
    "shifted chunks": (shifted_chunks, "qwen3", "head", {"row: loss", "left: loss"}),
    "other coefficient": (other_coefficient, "qwen3_next", "router", {"row: routers' part of the loss"}),
    "balance without gradient": (balance_without_gradient, "qwen3_next", "router", set()),
}


@pytest.mark.parametrize("when", JOINED)
def test_samples_that_are_joined_in_some_circumstances_only(when: str, monkeypatch: Patch) -> None:
    model = tiny_model("qwen3")
    JOINED[when](model, monkeypatch)
    report = probe(model, plain=False, share_prefixes=False)
    assert (report.verdict, report.causes) == ("leaks", ("mask",)), report
    assert bad(report, "mechanism") == ["mask"]


IN_FULL = ("rolled shift", "no offsets, with images", "balance without gradient")
"""Of which the short tier has another case of the same circumstances."""


@pytest.mark.parametrize("what", [*(what for what in NUMBERS if what not in IN_FULL), *full(*IN_FULL)])
def test_numbers_that_are_wrong_in_some_circumstances_only(what: str, monkeypatch: Patch) -> None:
    broken, family, cause, seen = NUMBERS[what]
    model = tiny_model(family)
    broken(model, monkeypatch)
    report = probe(model, plain=False, share_prefixes=False)
    assert report.verdict in ("differs", "fails"), report  # fails: our own checks refuse what was made
    assert report.causes == (cause,), report
    assert seen <= set(bad(report, "equality"))
    assert bad(report, "isolation") == []


# ---------------------------------------------------------------------- below rounding, and without any packing


def mixes(share: float, *, train_only: bool = False, most: int = 10**6) -> Callable[..., torch.Tensor]:
    """A hook that adds a part of the mean over all tokens to each of them."""

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + share * output.mean(1, keepdim=True)

    return hook


@pytest.mark.parametrize("family", ["qwen3", *full("qwen3_next")])
def test_a_leak_far_below_rounding_shows_in_low_precision(family: str) -> None:
    """The same row again is the same bit for bit, so whatever moves with another sample is a leak."""
    model = tiny_model(family, dtype=torch.bfloat16)
    model.model.norm.register_forward_hook(mixes(0.003))
    report = probe(model, plain=False, share_prefixes=False)
    assert (report.verdict, report.causes) == ("leaks", ("unknown",)), report
    assert bad(report, "equality") == []


def random_numbers(when: Callable[[torch.nn.Module], bool]) -> Callable[..., torch.Tensor | None]:
    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output + torch.randn_like(output) if when(module) else None

    return hook


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_random_leaks_nothing_and_proves_nothing(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3", dtype=dtype)
    model.model.norm.register_forward_hook(random_numbers(lambda module: True))
    report = probe(model)
    (check,) = report.checks
    assert (report.verdict, report.causes) == ("not deterministic", ("not deterministic",))
    assert "set its dropout probabilities to 0" in check.detail


def test_a_model_that_is_random_in_train_mode_is_proved_in_eval_mode() -> None:
    model = tiny_model("qwen3")
    model.model.norm.register_forward_hook(random_numbers(lambda module: module.training))
    report = probe(model, plain=False, share_prefixes=False)
    assert (report.verdict, report.causes) == ("not deterministic", ("not deterministic",))
    assert [check.name for check in report.checks if check.is_bad] == [
        f"{way}: each sample alone" for way in ("row", "padded", "autocast")
    ]
    assert {"gaps: logits", "left: logits"} <= {check.name for check in report.checks if check.finding == "ok"}


def test_dropout_is_off_and_hides_no_leak(monkeypatch: Patch) -> None:
    model = tiny_model("qwen3")
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.5))
    assert probe(model, plain=False, share_prefixes=False).verdict == "exact"
    JOINED["in train mode"](model, monkeypatch)
    assert probe(model, plain=False, share_prefixes=False).causes == ("mask",)


def test_a_model_that_is_another_in_train_mode_is_compared_with_itself() -> None:
    model = tiny_model("qwen3")

    def louder(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return 1.5 * output if module.training else None

    model.model.norm.register_forward_hook(louder)
    report = probe(model, plain=False, share_prefixes=False)
    assert report.verdict == "exact", report
