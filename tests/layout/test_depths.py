"""Targets of multi-token prediction: each depth's own, counted exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.errors import LayoutError
from vlmpack.layout import IGNORE, Segments, SlotRule
from vlmpack.layout.row import DepthTargets, shift_labels


def naive_targets(labels: list[int], depth: int) -> list[int]:
    """What a head of this depth is to predict at each token of one sample; IGNORE where nothing follows."""
    return [labels[at + 1 + depth] if at + 1 + depth < len(labels) else IGNORE for at in range(len(labels))]


def test_the_drawing_in_the_docstring():
    a, b, c, d, e = range(5)
    segments = Segments.from_lengths([5])
    main = shift_labels(torch.tensor([[a, b, c, d, e]]), segments)
    assert main.tolist() == [[b, c, d, e, IGNORE]]
    depths = DepthTargets.of(main, segments, depths=2)
    assert depths.targets.tolist() == [[[c, d, e, IGNORE, IGNORE]], [[d, e, IGNORE, IGNORE, IGNORE]]]
    assert depths.counts.tolist() == [3, 2]


@given(
    samples=st.lists(st.lists(st.sampled_from([IGNORE, 1, 2, 3]), min_size=1, max_size=9), min_size=1, max_size=5),
    multiple=st.integers(1, 5),
    depths=st.integers(1, 4),
)
def test_every_depth_has_the_targets_of_each_sample_alone(samples, multiple, depths):
    segments = Segments.from_lengths([len(sample) for sample in samples], SlotRule(multiple=multiple))
    labels = torch.full((1, segments.total), 9)  # gaps hold what must never be a target
    for sample, (start, stop) in zip(samples, segments.spans, strict=True):
        labels[0, start:stop] = torch.tensor(sample)
    found = DepthTargets.of(shift_labels(labels, segments), segments, depths=depths)
    for k in range(depths):
        alone = [naive_targets(sample, k + 1) for sample in samples]
        for targets, (start, stop) in zip(alone, segments.spans, strict=True):
            assert found.targets[k, 0, start:stop].tolist() == targets
        assert found.counts[k] == sum(target != IGNORE for targets in alone for target in targets)
        assert (found.targets[k, 0] != IGNORE).sum() == found.counts[k]


def test_the_loss_of_a_depth_is_its_own_mean():
    segments = Segments.from_lengths([4, 3])
    depths = DepthTargets.of(shift_labels(torch.arange(7)[None], segments), segments, depths=2)
    token_losses = torch.arange(14.0).view(2, 1, 7)
    assert depths.counts.tolist() == [3, 1]
    assert depths.sums(token_losses).tolist() == [0 + 1 + 4, 7]
    assert depths.losses(token_losses).tolist() == pytest.approx([5 / 3, 7])


def test_a_depth_without_a_target_is_zero_and_not_nan():
    segments = Segments.from_lengths([2])
    depths = DepthTargets.of(shift_labels(torch.tensor([[1, 2]]), segments), segments, depths=2)
    token_losses = torch.full((2, 1, 2), float("nan"), requires_grad=True)
    losses = depths.losses(token_losses)
    losses.sum().backward()
    assert losses.tolist() == [0, 0]
    assert token_losses.grad is not None
    assert not token_losses.grad.any()


def test_nothing_waits_for_a_device():
    segments = Segments.from_lengths([4, 3])
    labels = torch.empty(1, 7, dtype=torch.int64, device="meta")  # without values: whoever reads one fails
    depths = DepthTargets.of(labels, segments, depths=2)
    assert depths.losses(torch.empty(2, 1, 7, device="meta")).shape == (2,)


def test_what_does_not_fit_is_refused():
    segments = Segments.from_lengths([4])
    labels = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(LayoutError, match="got depths=0"):
        DepthTargets.of(labels, segments, depths=0)
    with pytest.raises(LayoutError, match=r"expected \[2, 1, 4\], got \[2, 4\]"):
        DepthTargets.of(labels, segments, depths=2).sums(torch.zeros(2, 4))
