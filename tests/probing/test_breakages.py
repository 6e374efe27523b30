"""One line of vlmpack broken on purpose, in whole probes: what the report says of it, and nothing that is not at fault.

`test_every_family.py` breaks every mechanism of every family.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import breakages
import pytest
import torch
from breakages import BREAKAGES, Patch
from cases import slow

from vlmpack.attention.backends import SdpaSegments
from vlmpack.families import family_named
from vlmpack.layout import Segments
from vlmpack.layout import row as packing
from vlmpack.model import engine, head, result
from vlmpack.model.mechanisms import experts
from vlmpack.model.row import RowContext
from vlmpack.probing import Report, probe
from vlmpack.testing import tiny_model

pytestmark = pytest.mark.usefixtures("shared_references")
Break = Callable[[Any, Patch], None]


def probed(model: Any) -> Report:
    return probe(model, plain=False, share_prefixes=False)


def bad(report: Report, *parts: str) -> list[str]:
    return [check.name for check in report.checks if check.part in parts and check.is_bad]


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Break:
    """`owner.name(...)` gives `change(what it gave, ...)`."""

    def break_it(model: Any, patch: Patch) -> None:
        own = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **metadata: change(own(*args, **metadata), *args, **metadata))

    return break_it


def attended(**settings: Callable[[Any], Any]) -> Break:
    """The attention back-end of the text model is called with other settings, or with other keys."""

    def break_it(model: Any, patch: Patch) -> None:
        own = SdpaSegments.__call__

        def call(self: Any, q: Any, k: Any, v: Any, segments: Segments, *, causal: bool, **metadata: Any) -> Any:
            given = {"k": k, "causal": causal, **metadata}
            if causal:
                given |= {name: change(given[name]) for name, change in settings.items()}
            return own(self, q, given.pop("k"), v, segments, **given)

        patch.setattr(SdpaSegments, "__call__", call)

    return break_it


def joined(when: Callable[[Segments, Any], bool]) -> Break:
    """Text attention takes rows for one sample, in some circumstances."""

    def break_it(model: Any, patch: Patch) -> None:
        def context(**metadata: Any) -> RowContext:
            segments: Segments = metadata["segments"]
            whole = Segments.from_lengths([segments.total]) if when(segments, model) else segments
            return RowContext(**{**metadata, "segments": whole})

        patch.setattr(engine, "RowContext", context)

    return break_it


def mixing_gradients(name: str) -> Break:
    """A module mixes the tokens of its output's gradient."""
    return lambda model, patch: model.get_submodule(name).register_full_backward_pre_hook(
        lambda module, gradients: (gradients[0] + gradients[0].mean(1, keepdim=True),)
    )


def no_offsets(model: Any, patch: Patch) -> None:
    """A left-padded batch is read from its first column on."""
    own = packing._Take.__init__

    def read(self: Any, segments: Segments, offsets: Any, input_ids: torch.Tensor) -> None:
        own(self, segments, [0] * len(offsets), input_ids)

    patch.setattr(packing._Take, "__init__", read)


def mixing(name: str, share: float = 0.1) -> Break:
    """A module mixes the tokens of its output."""

    def break_it(model: Any, patch: Patch) -> None:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda module, args, output: output + share * output.mean(1, keepdim=True))

    return break_it


def without_gaps(change: Callable[[Any], Any], name: str = "_segments") -> Callable[..., Any]:
    return lambda x, self, *args: x if getattr(self, name).has_padding else change(x)


def shifted_chunks(model: Any, patch: Patch) -> None:
    """Where labelled positions go through the head in several chunks, targets are one place off."""
    own = head.scores_by_chunk

    def scores(hidden: torch.Tensor, targets: torch.Tensor, head: Any, *, chunk: int, scoring: Any) -> torch.Tensor:
        return own(hidden, targets if len(targets) <= chunk else targets.roll(1), head, chunk=chunk, scoring=scoring)

    patch.setattr(head, "scores_by_chunk", scores)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A line that is broken, and what the probe has to say."""

    breaks: Break
    causes: tuple[str, ...]
    family: str = "qwen3"
    verdicts: tuple[str, ...] = ("differs",)
    shown: frozenset[str] = frozenset()
    """Some of the checks that are bad."""
    mechanism: list[str] | None = None
    """The checks of mechanisms that are bad."""
    silent: tuple[str, ...] = ()
    """Parts in which none is."""


def of_table(what: str, family: str = "qwen3") -> Broken:
    """The others of the table are in `test_every_family.py`."""
    each = BREAKAGES[what]
    return Broken(breaks=lambda model, patch: each.breaks(family, patch), causes=each.causes, family=family)


LEAKS, RAISES = ("leaks",), ("differs", "fails")
"""Our own checks refuse some of what is made."""
LOSSES = frozenset({"row: loss", "padded: loss"})
LOGITS = frozenset({"row: logits", "padded: logits"})
MASK: dict[str, Any] = {"causes": ("mask",), "mechanism": ["mask"], "verdicts": LEAKS}

FAST = {
    **{what: of_table(what) for what in ("targets", "divisor", "sample results", "head")},
    "router losses": of_table("router losses", "qwen3_next"),
    "padding in the work alone": Broken(
        breaks=lambda model, patch: breakages.padding_for_tokens("qwen3_vl", patch),
        causes=("mask",),
        family="qwen3_vl",
        shown=frozenset({"attended pairs"}),
        silent=("isolation", "equality", "mechanism"),
    ),
    "two faults": Broken(
        breaks=lambda model, patch: [
            each(model.config.model_type, patch) for each in (breakages.one_mask, breakages.one_picture)
        ],  # pyright: ignore
        causes=("mask", "vision"),
        family="qwen2_5_vl",
        verdicts=LEAKS,
    ),
    "a module that mixes": Broken(
        breaks=mixing("model.language_model.norm"), causes=("unknown",), family="qwen3_vl", verdicts=LEAKS
    ),
    "a leak of a ten-thousandth": Broken(breaks=mixing("model.norm", 1e-4), causes=("unknown",), verdicts=LEAKS),
    "joined without gaps": Broken(breaks=joined(lambda segments, model: not segments.has_padding), **MASK),
    "joined from five samples on": Broken(breaks=joined(lambda segments, model: segments.num_samples > 4), **MASK),
    "joined from 128 tokens on": Broken(breaks=joined(lambda segments, model: segments.max_length >= 128), **MASK),
    "joined in train mode": Broken(breaks=joined(lambda segments, model: model.training), **MASK),
    "joined in eval mode": Broken(breaks=joined(lambda segments, model: not model.training), **MASK),
    "joined under autocast": Broken(breaks=joined(lambda *_: torch.is_autocast_enabled("cpu")), **MASK),
    "targets of a row one place late": Broken(
        breaks=wrapped(packing._Take, "targets", without_gaps(lambda row: row.roll(1, -1))),
        causes=("loss count",),
        verdicts=RAISES,
        shown=frozenset({"left: loss"}),
    ),
    "no offsets": Broken(breaks=no_offsets, causes=("packing",), verdicts=RAISES, shown=frozenset({"left: logits"})),
    "logits on the left": Broken(
        breaks=lambda model, patch: patch.setattr(
            result,
            "unpack",
            lambda row, segments, *, width, offsets, own=result.unpack: own(row, segments, width=width),
        ),
        causes=("sample results",),
        shown=frozenset({"left: logits"}),
        silent=("isolation",),
    ),
    "num_items_in_batch ignored": Broken(
        breaks=wrapped(engine, "divisor", lambda x, given, targets: targets), causes=("loss count",), shown=LOSSES
    ),
    "losses of each other": Broken(
        breaks=wrapped(result, "sums_by_sample", lambda x, *_, **__: tuple(each.flip(0) for each in x)),
        causes=("sample results",),
        shown=frozenset({"gaps: sample losses", "row: sample losses"}),
    ),
    "shifted chunks": Broken(
        breaks=shifted_chunks, causes=("head",), shown=frozenset({"row: loss", "left: loss"}), silent=("isolation",)
    ),
    "twice the coefficient": Broken(
        breaks=wrapped(experts, "coefficient", lambda x, *_: 2 * x),
        causes=("router",),
        family="qwen3_next",
        shown=frozenset({"row: routers' part of the loss"}),
    ),
    "keys of another head": Broken(breaks=attended(k=lambda k: k.roll(1, 1)), causes=("mask",)),
    "gradients of keys that mix": Broken(
        breaks=mixing_gradients("model.layers.0.self_attn.k_proj"), causes=("mask",), mechanism=["backward pass"]
    ),
    "seconds of videos": Broken(
        breaks=wrapped(
            type(family_named("qwen2_5_vl")),
            "placements",
            lambda x, *_, **__: [replace(each, interval=each.interval / 2) for each in x],
        ),
        causes=("positions",),
        family="qwen2_5_vl",
    ),
    "a loss without gradient": Broken(
        breaks=wrapped(head, "scores_by_chunk", lambda x, *_, **__: x.detach() + 0.5 * (x - x.detach())),
        causes=("unknown",),
    ),
}
SLOW = {
    "a head that mixes, which is no module of a sample": Broken(
        breaks=mixing("lm_head"), causes=("sample results",), verdicts=LEAKS, shown=LOGITS
    ),
    "a balance without gradient": Broken(
        breaks=wrapped(experts, "balance_of", lambda x, *_, **__: x.detach()), causes=("router",), family="qwen3_next"
    ),
}


@pytest.mark.parametrize("what", [*FAST, *slow(*SLOW)])
def test_what_is_broken_is_named_and_nothing_else(what: str, monkeypatch: Patch) -> None:
    broken = {**FAST, **SLOW}[what]
    model = tiny_model(broken.family)
    broken.breaks(model, monkeypatch)
    monkeypatch.setattr(sys.modules["vlmpack.model.enable"], "check_rope_index", lambda model: None)  # it would notice
    report = probed(model)
    assert report.verdict in broken.verdicts, report
    assert report.causes == broken.causes, report
    assert {*bad(report, "equality", "work")} >= broken.shown
    assert broken.mechanism in (None, bad(report, "mechanism"))
    assert bad(report, *broken.silent) == []


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj", *slow("model.embed_tokens", "model.layers.1.self_attn.o_proj")],
)
def test_the_module_is_named_whose_output_differs_first(name: str, monkeypatch: Patch) -> None:
    model = tiny_model("qwen3")
    mixing(name)(model, monkeypatch)
    checks = [check for check in probed(model).checks if check.is_bad]
    assert len([check for check in checks if check.part == "isolation"]) > 5
    assert [check.detail.split()[0] for check in checks if check.part == "mechanism"] == [name]


@pytest.mark.parametrize(("name", "causes"), [("mlp", ("unknown",)), ("self_attn.o_proj", ("mask",))])
def test_where_samples_share_a_prefix_no_module_behind_a_leak_is_blamed(
    name: str, causes: Any, monkeypatch: Patch
) -> None:
    model = tiny_model("qwen3")
    mixing(f"model.layers.0.{name}")(model, monkeypatch)
    report = probe(model, plain=False)
    assert report.causes == causes, report
    details = [check.detail for check in report.checks if check.is_bad and check.part == "mechanism"]
    assert all(f"model.layers.0.{name} gives" in detail for detail in details), details


def test_the_module_of_a_broken_mask_is_named(monkeypatch: Patch) -> None:
    breakages.no_windows("mistral", monkeypatch)
    (mask,) = [check for check in probed(tiny_model("mistral")).checks if check.name == "mask"]
    assert mask.detail.startswith("model.layers.0.self_attn.o_proj gives other numbers of a sample than alone"), mask


# ---------------------------------------------------------------------- below rounding, and without any packing


@pytest.mark.parametrize("family", ["qwen3", *slow("qwen3_next")])
def test_a_leak_far_below_rounding_shows_in_low_precision(family: str, monkeypatch: Patch) -> None:
    """The same row again is the same bit for bit, so whatever moves with another sample is a leak."""
    model = tiny_model(family, dtype=torch.bfloat16)
    mixing("model.norm", 0.003)(model, monkeypatch)
    report = probed(model)
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


def test_a_little_noise_is_not_put_down_to_packing() -> None:
    model = tiny_model("qwen3")
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output + 0.01 * torch.randn_like(output))
    assert probe(model).verdict == "not deterministic"


def test_a_model_that_is_random_in_train_mode_is_proved_in_eval_mode() -> None:
    model = tiny_model("qwen3")
    model.model.norm.register_forward_hook(random_numbers(lambda module: module.training))
    report = probed(model)
    assert (report.verdict, report.causes) == ("not deterministic", ("not deterministic",))
    assert [check.name for check in report.checks if check.is_bad] == [
        "row",
        "padded",
        "autocast",
    ]
    assert {"gaps: logits", "left: logits"} <= {check.name for check in report.checks if check.finding == "ok"}


def test_dropout_is_off_and_hides_no_leak(monkeypatch: Patch) -> None:
    model = tiny_model("qwen3")
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.5))
    assert probed(model).verdict == "exact"
    joined(lambda segments, model: model.training)(model, monkeypatch)
    assert probed(model).causes == ("mask",)


def test_a_model_that_is_another_in_train_mode_is_compared_with_itself() -> None:
    model = tiny_model("qwen3")

    def louder(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return 1.5 * output if module.training else None

    model.model.norm.register_forward_hook(louder)
    report = probed(model)
    assert report.verdict == "exact", report
