"""Rows whose samples share prefixes: exact as they are, and each way in which a tree can go wrong has its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from breakages import one_picture
from cases import slow

from vlmpack.layout import PackedRow, Segments, sharing
from vlmpack.layout.segments import ranges
from vlmpack.model import row as row_module
from vlmpack.model.mechanisms import experts
from vlmpack.model.mechanisms.recurrent_rows import LayerState
from vlmpack.model.row import RowPart
from vlmpack.probing import forward_passes, run
from vlmpack.probing.report import Check, causes_of
from vlmpack.probing.run import _setup, packed_checks, preserved_state
from vlmpack.testing import tiny_model

pytestmark = pytest.mark.usefixtures("shared_references")
Patch = pytest.MonkeyPatch


def checks_of(family: str) -> list[Check]:
    """The checks of a tree alone: the rest of a probe has its own tests."""
    model = tiny_model(family)
    setup = _setup(model, None, None)
    with preserved_state(model):
        branching = setup.branching()
        return packed_checks(branching, run.References(branching), progress=lambda part: None)


def bad(checks: list[Check]) -> set[str]:
    return {check.name.removeprefix("tree: ") for check in checks if check.is_bad}


def test_the_work_is_that_of_the_distinct_beginnings() -> None:
    checks = {check.name: check for check in checks_of("qwen3_vl")}
    setup = _setup(tiny_model("qwen3_vl"), None, None)
    samples = setup.branching().samples
    assert checks["tree: tokens"].value == 231 < sum(len(sample["input_ids"]) for sample in samples) / 1.9
    assert checks["tree: patches"].value == 152 < sum(len(sample["pixel_values"]) for sample in samples) / 1.6


# ---------------------------------------------------------------------- broken on purpose


def attending_to(keys_of: Callable[[Any, int], list[int]]) -> Callable[[Patch], None]:
    """Each node's queries get the keys of these nodes and its own."""

    def patch_it(patch: Patch) -> None:
        honest = row_module.attend_along_paths

        def attend(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Any, _: Any) -> torch.Tensor:
            nodes = [[*keys_of(tree, node), node] for node in range(len(tree.lengths))]
            starts, lengths = torch.tensor(tree.nodes.stride[:-1]), torch.tensor(tree.lengths)
            flat = [node for of_node in nodes for node in of_node]
            index = torch.from_numpy(ranges(starts[flat].numpy(), lengths[flat].numpy()))
            keys = Segments.from_lengths([sum(tree.lengths[other] for other in of_node) for of_node in nodes])
            other = SimpleNamespace(nodes=tree.nodes, keys=keys, key_index=lambda device: index)
            return honest(call, q, k, v, other)  # pyright: ignore[reportArgumentType]

        patch.setattr(row_module, "attend_along_paths", attend)

    return patch_it


def one_label_a_branch_point(patch: Patch) -> None:
    """All children of a branch point are predicted as the first one."""
    honest = RowPart.targets

    def targets(self: RowPart, index_L: torch.Tensor, labels_1T: torch.Tensor, **settings: Any) -> Any:
        found = honest(self, index_L, labels_1T, **settings)
        first = (found.predictions[:, None] == found.predictions).int().argmax(1)
        return replace(found, ids=found.ids[first])

    patch.setattr(RowPart, "targets", targets)


def counted_once(patch: Patch) -> None:
    """Shared tokens count once in the routers' losses: as if the row were its tree."""
    honest = experts._of_real_tokens

    def once(logits_RE: torch.Tensor, part: RowPart) -> torch.Tensor:
        out = honest(logits_RE, part)
        if part.tree is None:
            return out
        is_first = torch.zeros(len(out), dtype=torch.bool).index_fill_(0, part.tree.source(), True)
        return torch.where(is_first[:, None], out, out[:1])

    patch.setattr(experts, "_of_real_tokens", once)


def positions_run_on(patch: Patch) -> None:
    """Rotary positions are those of the tree's sequence."""
    honest = RowPart.cut

    def cut(self: RowPart, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        part = honest(self, row, dim=dim)
        return torch.arange(part.shape[-1]).expand_as(part) if row.ndim == 3 and not row.is_floating_point() else part

    patch.setattr(RowPart, "cut", cut)


def without_content(patch: Patch) -> None:
    """Images are told apart by their ids and grids alone."""
    patch.setattr(sharing, "content_numbers", lambda blocks: [0] * len(blocks))


def no_state(patch: Patch) -> None:
    """A node's recurrence starts from nothing."""
    patch.setattr(LayerState, "get_recurrent_state", lambda self, *place, **kwargs: None)


def no_taps(patch: Patch) -> None:
    """A node's convolution reads nothing of its parent."""
    honest = LayerState.update_conv_state

    def update(self: LayerState, *tokens: Any, **settings: Any) -> torch.Tensor:
        self.tail = None
        return honest(self, *tokens, **settings)

    patch.setattr(LayerState, "update_conv_state", update)


def state_behind_padding(patch: Patch) -> None:
    """A parent's state is that after tokens of padding, which let it decay."""
    honest = LayerState.update_recurrent_state
    patch.setattr(
        LayerState, "update_recurrent_state", lambda self, state, *place, **kwargs: honest(self, 0.9 * state, *place)
    )


def last_gradient_alone(patch: Patch) -> None:
    """Of the branches that attend to a shared key, the last one's gradient stays."""

    def added_up(grad: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
        return grad.new_zeros(rows, *grad.shape[1:]).index_copy(0, index, grad)

    patch.setattr(row_module, "_added_up", added_up)


def nothing_is_shared(patch: Patch) -> None:
    def unshared(row: PackedRow, **settings: Any) -> PackedRow:
        return row

    patch.setattr(forward_passes, "share", unshared)


BROKEN: dict[str, tuple[str, tuple[str, ...], set[str], Callable[[Patch], None]]] = {
    "an ancestor level is left out": (
        "qwen3",
        ("mask",),
        {"logits", "mask"},
        attending_to(lambda tree, node: [each for each in tree.path(node)[-2:] if each != node]),
    ),
    "siblings are seen": ("qwen3", ("mask",), {"logits", "mask"}, attending_to(lambda tree, node: [*range(node)])),
    "images are not compared": ("qwen3_vl", ("packing",), {"logits", "packing"}, without_content),
    "positions run on": ("qwen3_vl", ("positions",), {"logits", "positions"}, positions_run_on),
    "a branch point has one label": ("qwen3", ("head",), {"loss", "sample losses"}, one_label_a_branch_point),
    "router losses count a shared token once": ("qwen3_next", ("router",), {"load-balancing loss"}, counted_once),
    "no state is handed on": ("qwen3_next", ("recurrent state",), {"logits"}, no_state),
    "a state behind padding is handed on": ("qwen3_next", ("recurrent state",), {"logits"}, state_behind_padding),
    "no convolution taps are handed on": ("qwen3_next", ("recurrent state",), {"logits"}, no_taps),
    "images see each other": ("qwen3_vl", ("vision",), {"logits", "vision"}, partial(one_picture, "qwen3_vl")),
    "gradients of branches are not added up": (
        "qwen3",
        ("mask",),
        {"gradient of layers.self_attn.k_proj", "backward pass"},
        last_gradient_alone,
    ),
    "samples that begin alike share nothing": ("qwen3", ("packing",), {"packing"}, nothing_is_shared),
}
IN_FULL = (
    "a state behind padding is handed on",
    "images see each other",
    "positions run on",
    "router losses count a shared token once",
)
"""Others show the same in other rows."""


@pytest.mark.parametrize("what", [*(what for what in BROKEN if what not in IN_FULL), *slow(*IN_FULL)])
def test_each_breakage_has_its_name(what: str, monkeypatch: Patch) -> None:
    family, causes, seen, break_it = BROKEN[what]
    break_it(monkeypatch)
    checks = checks_of(family)
    assert causes_of(checks) == causes, [check for check in checks if check.is_bad]
    assert seen <= bad(checks)
