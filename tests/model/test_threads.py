"""Threads that share an enabled model, in the worst order: each waits for the other inside every layer."""

import threading

import pytest
import torch
from cases import slow
from moe import before_experts, decoder_layers, fresh, samples_of

from vlmpack.layout import SlotRule, pack
from vlmpack.model import enable_packing
from vlmpack.testing import alone, padded


def row_of(model, seed):
    """A row with gaps, which its experts do not compute."""
    return pack(padded(samples_of(model, seed=seed)), rule=SlotRule(multiple=16)).to_hf()


def side_by_side(model, calls):
    """Results of all calls, one a thread. No thread enters the experts of a layer before every one has left its mixer,
    also where gradient checkpointing computes the layer again."""
    barrier = threading.Barrier(len(calls), timeout=60)
    results, errors = [None] * len(calls), []

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            errors.append(error)
            barrier.abort()

    def meet(*_):
        barrier.wait()

    layers = [layer for layer in decoder_layers(model) if hasattr(layer.mlp, "experts")]
    hooks = [before_experts(layer).register_forward_hook(meet) for layer in layers]
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_vl_moe", "qwen4_exp")])
def test_rows_and_a_plain_call_in_three_threads_are_what_they_are_one_after_the_other(family):
    model = enable_packing(fresh(family))
    sample = alone(samples_of(model, seed=7)[0])
    calls = [
        lambda: model(**row_of(model, 1)).loss.detach(),
        lambda: model(**row_of(model, 2)).loss.detach(),
        lambda: model(**sample).loss.detach(),
    ]
    expected = [call() for call in calls]
    assert len({float(loss) for loss in expected}) == len(calls)
    assert side_by_side(model, calls) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_passes_in_two_threads_compute_each_its_own_row_again(reentrant):
    model = enable_packing(fresh("qwen3_vl_moe"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    rows = [row_of(model, seed) for seed in (1, 2)]

    def gradients():
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    for row in rows:
        model(**row).loss.backward()
    expected = gradients()
    losses = [model(**row).loss for row in rows]
    side_by_side(model, [loss.backward for loss in losses])
    torch.testing.assert_close(gradients(), expected, rtol=1e-5, atol=1e-6)
