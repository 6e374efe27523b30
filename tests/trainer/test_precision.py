"""bf16=True: a packed row is no further from float32 than twice what plain bfloat16 makes of the samples alone."""

from __future__ import annotations

import pytest
import torch
from training import Samples, gradients, loss_sums, receipts, train, trainer

from vlmpack.model import disable_packing, enable_packing
from vlmpack.testing import tiny_model


def alone(model, samples, *, bf16):
    """(per-sample losses [B], gradients) of the samples alone through an untouched model."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        sums, counts = loss_sums(model, samples)
    model.zero_grad()
    (sums.sum() / counts.sum()).backward()
    return (sums / counts).detach(), gradients(model)


def error(a, b):
    """Root mean square of all differences between two sets of gradients."""
    return torch.cat([(a[name] - b[name]).flatten() for name in a]).square().mean().sqrt().item()


@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl_moe", "padded"), ("qwen2_5_vl", "packed")])
def test_the_error_is_that_of_plain_low_precision(family, layout, tmp_path):
    samples = receipts(tiny_model(family))
    exact, exact_gradients = alone(tiny_model(family), samples, bf16=False)
    plain, plain_gradients = alone(tiny_model(family), samples, bf16=True)

    model = enable_packing(tiny_model(family))
    settings = {"bf16": True, "max_steps": 1, "per_device_train_batch_size": 7, "per_device_eval_batch_size": 3}
    losses, _ = trainer(model, samples, tmp_path, layout, **settings).predict(Samples(samples)).predictions
    ours = train(enable_packing(tiny_model(family)), samples, tmp_path, layout, **settings)

    assert (plain - exact).abs().max() > 1e-4, "autocast did nothing"
    assert (torch.from_numpy(losses) - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert error(ours.gradients[0], exact_gradients) <= 2 * error(plain_gradients, exact_gradients)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_bfloat16_weights(family, tmp_path):
    """What `from_pretrained(dtype="bfloat16")` gives, with and without autocast on top."""
    samples = receipts(tiny_model(family))
    exact, _ = alone(tiny_model(family), samples, bf16=False)
    plain, _ = alone(tiny_model(family, dtype=torch.bfloat16), samples, bf16=False)
    for autocast in (True, False):
        model = enable_packing(tiny_model(family, dtype=torch.bfloat16))
        run = trainer(model, samples, tmp_path, bf16=autocast, per_device_eval_batch_size=7)
        losses, _ = run.predict(Samples(samples)).predictions
        run.train()
        assert (torch.from_numpy(losses) - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_the_autocast_wrapper_outlives_packing_without_harm(tmp_path):
    """accelerate leaves its wrapper around forward on the model; what it wraps must still work afterwards."""
    model = enable_packing(tiny_model())
    samples = receipts(model)
    train(model, samples, tmp_path, bf16=True)
    assert "forward" in vars(model)

    disable_packing(model)
    untouched = tiny_model()
    untouched.load_state_dict(model.state_dict())
    sums, counts = loss_sums(model.float(), samples)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = loss_sums(untouched, samples)
    torch.testing.assert_close(sums / counts, expected / counts, rtol=1e-3, atol=1e-3)
