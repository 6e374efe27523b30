"""The head sees labelled positions only, a chunk at a time, and gives what it would give all at once."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.model.head import Scoring, score_targets, target_logprobs, target_positions

VOCAB, WIDTH = 13, 3


def test_never_more_than_a_chunk_of_logits():
    head = nn.Linear(WIDTH, VOCAB)
    with LargestLogits() as seen:
        target_logprobs(
            torch.randn(23, WIDTH, requires_grad=True), torch.zeros(23).long(), head, chunk=5
        ).sum().backward()
    assert seen.rows == 5
    with LargestLogits() as unchunked:
        target_logprobs(torch.randn(23, WIDTH), torch.zeros(23).long(), head, chunk=99)
    assert unchunked.rows == 23


def test_dropout_on_the_head_is_the_same_when_a_chunk_is_computed_again():
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, VOCAB, bias=False)).double()
    hidden = torch.randn(23, WIDTH, dtype=torch.float64, requires_grad=True)
    seen = []
    head[0].register_forward_hook(lambda module, inputs, out: seen.append(out.detach() != 0))
    torch.manual_seed(0)
    target_logprobs(hidden, torch.zeros(23).long(), head, chunk=5).sum().backward()
    kept, again = torch.cat(seen[:5]), torch.cat(seen[5:][::-1])
    assert torch.equal(kept, again)
    assert torch.equal(hidden.grad != 0, kept)


class LargestLogits(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == VOCAB:
            self.rows = max(self.rows, out.shape[0])
        return out


def test_targets_are_found_with_and_without_the_hosts_count():
    labels = torch.tensor([[-100, 5, -100, 0, 7]])
    assert target_positions(labels, None).tolist() == target_positions(labels, 3).tolist() == [1, 3, 4]
    with pytest.raises(LayoutError, match="counted 2 targets but the row has another number"):
        target_positions(labels, 2)


@settings(max_examples=20)
@given(count=st.integers(1, 23), chunk=st.integers(1, 25), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_scores_are_those_of_the_tempered_softmax(count, chunk, temperature):
    torch.manual_seed(count)
    head = nn.Linear(WIDTH, VOCAB).double()
    hidden = torch.randn(1, 2 * count, WIDTH, dtype=torch.float64, requires_grad=True)
    labels, index = torch.randint(VOCAB, (1, 2 * count)), torch.arange(0, 2 * count, 2)
    logprobs = (head(hidden[0, index]) / temperature).log_softmax(-1)
    truth = [logprobs[torch.arange(count), labels[0, index]], -(logprobs.exp() * logprobs).sum(-1)]
    weights = torch.linspace(0.5, 2, count)
    for entropy in (False, True):
        scoring = Scoring(temperature=temperature, entropy=entropy)
        ours = score_targets(hidden, index, labels[0, index], head, chunk=chunk, scoring=scoring)
        assert len(ours) == 1 + entropy
        for score, expected in zip(ours, truth, strict=False):
            assert score.dtype == torch.float32
            torch.testing.assert_close(score.double(), expected, rtol=1e-5, atol=1e-6)
            gradients = [
                torch.autograd.grad((x * weights).sum(), [hidden, head.weight], retain_graph=True)
                for x in (score, expected)
            ]
            for found, wanted in zip(*gradients, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_entropies_are_of_logits_that_a_cross_entropy_overwrites(monkeypatch):
    """Liger's does, when it is put in the place of PyTorch's."""
    plain = F.cross_entropy

    def overwriting(logits, targets, **settings):
        loss = plain(logits.clone(), targets, **settings)
        logits.data.fill_(7)
        return loss

    monkeypatch.setattr(F, "cross_entropy", overwriting)
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, VOCAB), torch.randn(1, 5, WIDTH, requires_grad=True)
    index = targets = torch.arange(5)
    logprobs, entropy = score_targets(hidden, index, targets, head, chunk=9, scoring=Scoring(entropy=True))
    truth = head(hidden[0]).log_softmax(-1)
    torch.testing.assert_close(logprobs, truth[index, targets])
    torch.testing.assert_close(entropy, -(truth.exp() * truth).sum(-1))
    ours, theirs = (torch.autograd.grad(x.sum(), hidden)[0] for x in (entropy, -(truth.exp() * truth).sum(-1)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), "hot", None])
def test_a_temperature_is_a_positive_number(temperature):
    with pytest.raises(ConfigError, match="it is a positive number"):
        Scoring(temperature=temperature)
