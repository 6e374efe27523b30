"""Gated delta layers with flash-linear-attention, whose stand-in, and that of causal-conv1d, need a process apart.

The real ones are tested where there is a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from equality import alone_through, check_low_precision, gradients
from trees import DEEP, STRANGER, samples_of, shared

from vlmpack.families import family_named
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, disable_packing
from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla
from vlmpack.testing import mixed_samples, padded, tiny_model

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TAPS = 3
"""Tokens before its own that the tiny models' convolution reads."""


def test_with_its_stand_in_packed_equals_alone() -> None:
    paths = [HERE / "stand_ins", HERE / "stand_ins_conv", HERE.parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", HERE / "fla_rows.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True], ids=["row", "tree"])
def test_on_a_gpu_the_real_kernels_are_as_close_to_float32_as_the_samples_alone(share):
    """Waits for a CUDA device with fla-core."""
    pytest.importorskip("fla", reason="waits for the package fla-core")
    reasons = FlaCall.of(torch.device("cuda", 0), training=True).unsupported()
    if reasons:
        pytest.skip(f"waits for an fla that serves this GPU: {reasons}")
    assert uses_fla(family_named("qwen3_5"))
    model = tiny_model("qwen3_5", seed=3, layers=4).cuda()
    samples = mixed_samples(model.config, seed=5, kinds=("text", "text", "text"), text=(20, 60))
    if share:
        samples = samples_of(model.config, DEEP, STRANGER)
    on_gpu = [{name: x.cuda() for name, x in sample.items()} for sample in samples]
    exact = alone_through(model, on_gpu)
    plain = alone_through(model.to(torch.bfloat16), on_gpu)
    row = shared(samples) if share else pack(padded(samples), rule=SlotRule(multiple=4))
    result = PackedStep(model)(row, logits=True)
    result.loss.backward()
    found = gradients(model)
    disable_packing(model)
    tokens, spaces = (row.tree.num_tokens, len(row.tree.lengths)) if share else (sum(exact.lengths), len(samples) - 1)
    assert result.work.delta_tokens == tokens + TAPS * spaces
    check_low_precision(exact, plain, result, found)
