"""Gated delta layers with flash-linear-attention: one call a layer for the whole row, and packed equals alone.

transformers binds its layers to fla when they are imported, so this happens in processes of their own, where a
stand-in in plain PyTorch (`stand_ins/fla`) is on the path, and one for the package causal-conv1d. The real ones are
tested where there is a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cases import slow
from equality import alone_through, check_low_precision, gradients, limits_of
from trees import DEEP, STRANGER, samples_of, shared

from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, disable_packing
from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla
from vlmpack.testing import mixed_samples, padded, tiny_model

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GATED = [name for name, family in FAMILIES.items() if family.has("gated_delta")]
gated = pytest.mark.parametrize("family", ["qwen3_5", *slow(*(name for name in GATED if name != "qwen3_5"))])
TAPS = 3
"""Tokens before its own that the tiny models' convolution reads."""


@pytest.fixture(scope="module")
def seen(request):
    """What `fla_rows.py` saw, by family."""
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and "seen" in item.fixturenames
    ]
    families = sorted({case["family"] for case in cases})
    found = run_in_process("fla_rows.py", families, folders=("stand_ins", "stand_ins_conv"))
    assert all(entry["conv calls"] > 0 for entry in found.values())
    return found


def run_in_process(script, families, *, folders=()):
    """What a script here writes, with these folders on the path."""
    paths = [*(str(HERE / name) for name in folders), str(HERE.parent), str(HERE.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / script), *families]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@gated
def test_a_prefix_tree_is_computed_in_one_call_a_level_each_node_from_its_parents_state(seen, family):
    tree = seen[family]["tree"]
    assert tree["logits"] <= 1e-4
    assert tree["gradient"] <= 1e-3
    physical, real = tree["tokens"]
    assert tree["delta_tokens"] == physical + TAPS * tree["nodes"] < real
    assert tree["calls"] == seen[family]["exact"]["layers"] * tree["depth"]


@gated
@pytest.mark.parametrize("broken", ["no states", "no taps", "behind their taps"])
def test_a_tree_is_wrong_without(seen, family, broken):
    assert seen[family]["broken trees"][broken]["logits"] > 0.01


@gated
def test_where_states_cannot_be_handed_on_a_tree_goes_along_the_paths_of_its_samples(seen, family):
    tree = seen[family]["broken trees"]["refused"]
    assert tree["logits"] <= 1e-4
    assert tree["gradient"] <= 1e-3
    physical, real = tree["tokens"]
    assert tree["delta_tokens"] > real > physical


@gated
def test_packed_equals_alone_with_poison_in_every_gap(seen, family):
    """A norm near zero enlarges rounding up to a hundredfold; what reads a poisoned gap is off by 1e-2 and more."""
    assert seen[family]["fla"]
    limits = replace(limits_of(family), logits=1e-4, loss=1e-5, gradient=1e-3)
    for run in ("exact", "checkpointing"):
        assert seen[family][run]["logits"] <= limits.logits
        assert seen[family][run]["loss"] <= limits.loss
        assert seen[family][run]["gradient"] <= limits.gradient


@gated
def test_the_whole_row_goes_through_a_layer_in_one_call(seen, family):
    run = seen[family]["exact"]
    *others, last = run["lengths"]
    edges = [*accumulate((n + TAPS for n in others), initial=0)]
    edges.append(edges[-1] + last)  # nothing comes after the last one, so it needs no zeros
    assert run["layers"] == 3
    assert [call["cu_seqlens"] for call in run["calls"]] == [edges] * 3
    assert [call["shape"][:2] for call in run["calls"]] == [[1, edges[-1]]] * 3
    assert run["delta_tokens"] == edges[-1] == sum(run["lengths"]) + TAPS * len(others)


@gated
def test_gradient_checkpointing_gives_a_layer_the_same_boundaries_again(seen, family):
    once, again = seen[family]["exact"], seen[family]["checkpointing"]
    assert again["calls"] == 2 * once["calls"]


@gated
def test_without_the_zeros_the_convolution_leaks_and_without_the_boundaries_the_recurrence(seen, family):
    assert seen[family]["no zeros"] > 0.1
    assert seen[family]["no boundaries"] > 0.1


@gated
def test_a_bias_that_would_turn_the_zeros_into_something_else_is_refused(seen, family):
    assert seen[family]["bias"].startswith("ConfigError: a projection before the convolution")
    assert "lora_bias=False" in seen[family]["bias"]


@gated
def test_a_model_on_the_cpu_is_refused_before_triton_fails(seen, family):
    assert seen[family]["refused"].startswith(
        "BackendError: transformers computes the gated delta layers with fla 0.6.0"
    )
    assert "move the model" in seen[family]["refused"]


@gated
def test_a_row_of_padding_alone_keeps_every_parameter_in_the_graph(seen, family):
    assert seen[family]["padding alone"] == {"loss": 0.0, "largest gradient": 0.0, "delta_tokens": 0}


# ---------------------------------------------------------------------- the real one


@pytest.mark.gpu
@pytest.mark.slow
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
