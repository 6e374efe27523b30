"""Attention along the paths of a tree keeps no gathered keys between the passes."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vlmpack.attention.backends import BACKENDS
from vlmpack.layout import PrefixTree, Segments
from vlmpack.machine import LiveBytes
from vlmpack.model.row import attend_along_paths

HEADS, KV_HEADS, DIM = 6, 2, 10


def inputs(tree, dtype=torch.float32, requires_grad=(True, True, True)):
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    made = [torch.randn(tree.num_tokens, n, DIM, generator=generator).to(dtype) for n in heads]
    return [x.requires_grad_(needed) for x, needed in zip(made, requires_grad, strict=True)]


def attend(name):
    return functools.partial(BACKENDS[name], causal=True, scale=0.3)


def plainly(attend, q, k, v, tree):
    """What the package would do if memory did not count."""
    index = tree.key_index()
    return attend(q, k.index_select(0, index), v.index_select(0, index), tree.nodes, keys=tree.keys)


def as_it_is(function):
    return function


def in_checkpoint(function):
    return functools.partial(checkpoint, function, use_reentrant=False)


LONG = PrefixTree(
    segments=Segments.from_lengths([205] * 12),
    parents=(-1, *(0,) * 12),
    lengths=(200, *(5,) * 12),
    leaves=(*range(1, 13),),
)


def kept(along, wrap=as_it_is):
    """Bytes that live between the forward and the backward pass, beside inputs and output."""
    qkv = inputs(LONG)
    with LiveBytes([*qkv, LONG.key_index()]) as live:
        before = live.now
        out = wrap(functools.partial(along, attend("sdpa_segments")))(*qkv, LONG)
        between = live.now - before - out.untyped_storage().nbytes()
    out.sum().backward()
    return between


def test_gathered_keys_are_not_kept():
    gathered = 2 * 4 * KV_HEADS * DIM * LONG.keys.total
    assert kept(plainly) >= gathered
    assert kept(attend_along_paths) <= 0.35 * gathered


@pytest.mark.parametrize("requires_grad", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("name", ["sdpa_segments", "eager_mask"])
def test_after_the_backward_pass_nothing_is_kept_while_the_output_lives(name, requires_grad):
    """A loop that keeps its losses keeps their graphs."""
    qkv = inputs(LONG, requires_grad=requires_grad)
    with LiveBytes([*qkv, LONG.key_index()]) as live:
        with torch.no_grad():
            attend_along_paths(attend(name), *qkv, LONG)  # indices and masks that the tree itself keeps
        before = live.now
        out = attend_along_paths(attend(name), *qkv, LONG)
        between = live.now - before
        out.backward(torch.ones_like(out))
        living = [out, *(x.grad for x in qkv if x.grad is not None)]
        assert live.now - before == sum(x.untyped_storage().nbytes() for x in living)
        assert between > out.untyped_storage().nbytes()  # the guard: something was kept for the backward pass


def test_inside_a_checkpoint_nothing_is_kept_at_all():
    """A hook of saved tensors that keeps tensors by itself takes them out of the checkpoint's hands."""
    assert kept(attend_along_paths, in_checkpoint) == kept(plainly, in_checkpoint) == 0


def test_gradients_of_ancestors_are_added_up_in_float32():
    """Twelve branches: a sum in bfloat16 would be rounded twelve times."""
    terms = []

    def recording(q, k, v, segments, *, keys):
        k.register_hook(lambda grad: terms.append(grad.float()))
        return attend("sdpa_segments")(q, k, v, segments, keys=keys)

    q, k, v = inputs(LONG, torch.bfloat16)
    out = attend_along_paths(recording, q, k, v, LONG)
    (grad,) = torch.autograd.grad(out.float().square().sum(), k)
    exact = torch.zeros(k.shape).index_add(0, LONG.key_index(), terms[0])
    assert torch.equal(grad, exact.bfloat16())
    rounded = torch.zeros_like(k)
    for place, term in zip(LONG.key_index(), terms[0], strict=True):
        rounded[place] += term.bfloat16()
    error, of_rounded = ((x.float() - exact).norm() for x in (grad, rounded))
    assert of_rounded > 2 * error, "which is why"
