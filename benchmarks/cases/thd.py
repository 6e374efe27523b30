"""thd: a step of a model that takes boundaries, through ThdStep and called with arguments that were made before."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.receipts import ReceiptShapes, receipt_batch, receipt_config, receipt_model
from benchmarks.timing import alternate
from vlmpack.families import family_named
from vlmpack.layout import SlotRule
from vlmpack.model import ThdStep

CASE = "thd"
FAMILY = "qwen3_vl_moe"
EXAMPLE = Path(__file__).parents[2] / "examples" / "thd_model.py"
OVERHEAD = Target(limit=1.02, better="lower")


def measure_thd(settings: BenchSettings, shapes: ReceiptShapes) -> list[Figure]:
    """Time a training step of the example's model both ways: packing, checks, positions and the result are the rest."""
    family = family_named(FAMILY)
    model = receipt_model(family, shapes, seed=settings.seed, device=settings.device)
    config = receipt_config(family, shapes)
    batch = receipt_batch(family, config, shapes, seed=settings.seed, device=settings.device)
    thd = example().ThdQwen3VLMoe(model)
    step = ThdStep(thd, slots=SlotRule(multiple=16), config=config)
    inputs = step.inputs(batch)
    labels = inputs.row.shift_labels
    assert labels is not None

    def with_step() -> None:
        step(batch).loss.backward()
        thd.zero_grad()

    def with_arguments() -> None:
        output = thd(**inputs.arguments)
        (F.cross_entropy(output["logits"][0].float(), labels[0]) + output["aux_loss"]).backward()
        thd.zero_grad()

    timings = alternate(
        {"ThdStep": with_step, "arguments": with_arguments}, seconds=settings.seconds, device=settings.device
    )
    return [
        Figure.timed(CASE, "step through ThdStep", timings, "ThdStep", settings),
        Figure.compared(
            CASE, "ThdStep / finished arguments", timings, ("ThdStep", "arguments"), settings, target=OVERHEAD
        ),
    ]


def example() -> Any:
    """The module of the example, which no package holds."""
    spec = spec_from_file_location("thd_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
