"""gpu equality: whole models on a packed row against each sample alone, both in the device's type.

The truth is each sample alone in float32. Packed may be wrong by twice what a sample alone in low precision is wrong
by, in the root mean square over all logits. Weights are drawn so that a leak would be as large as the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.gpu.patches import with_patch_products
from vlmpack.bench.gpu.run import Cell, Lab
from vlmpack.bench.gpu.shapes import GpuShapes
from vlmpack.bench.workload import alone, receipt_batch
from vlmpack.families import family_named
from vlmpack.layout import SlotRule
from vlmpack.step import PackedStep, StepConfig
from vlmpack.testing import tiny_model

CASE = "gpu equality"
LOW = torch.bfloat16
SAMPLES = 4
PASSED = Target(limit=2.0, better="lower")
GUESS = 6.0


def cells(shapes: GpuShapes) -> list[Cell]:
    """One for each family."""
    return [
        Cell(case=CASE, name=shape.family, guess=GUESS, run=lambda lab, name=shape.family: _family(lab, name))
        for shape in shapes.models
    ]


def _family(lab: Lab, name: str) -> Iterator[Figure]:
    model, family = tiny_model(name, seed=lab.settings.seed, dtype=LOW, **lab.shapes.small), family_named(name)
    model = with_patch_products(model).to(lab.device.name)
    receipts = replace(lab.shapes.receipts, samples=SAMPLES, vocab_size=family.text_config(model.config).vocab_size)
    batch = receipt_batch(family, model.config, receipts, seed=lab.settings.seed, device=lab.device.name)
    pixels = batch.media.pixel_values
    assert pixels is not None
    batch = replace(batch, media=replace(batch.media, pixel_values=pixels.to(LOW)))
    samples = alone(batch)
    with torch.no_grad():
        plain = _logits(model, samples)
        step = PackedStep(model, StepConfig(slots=SlotRule(multiple=8)))
        result = step(batch, logits=True)
        assert result.row_logits is not None
        packed = result.row_logits[0][result.segments.real_index(lab.device.name)].float()
        exact = with_patch_products(tiny_model(name, seed=lab.settings.seed, **lab.shapes.small)).to(lab.device.name)
        exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
        truth = _logits(exact, [{**sample, "pixel_values": sample["pixel_values"].float()} for sample in samples])
    error, allowed = (float((x - truth).square().mean().sqrt()) for x in (packed, plain))
    more = {"family": name, "target": PASSED}
    yield Figure(case=CASE, name="error of logits, packed / alone", value=error / allowed, unit="x", **more)
    size = float(truth.square().mean().sqrt())
    yield Figure(case=CASE, name="error of logits alone / logits", value=allowed / size, unit="x", family=name)


def _logits(model: torch.nn.Module, samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """float32 [R, V] of all samples, one by one."""
    return torch.cat([model(**sample, use_cache=False).logits[0].float() for sample in samples])
