"""Check and benchmark a GPU with one command: `make gpu`, or `python -m benchmarks.gpu --budget 540 --json gpu.json`.

tests       the tests for a GPU, file by file (`python -m pytest -m gpu`)
probe       each family in bfloat16, a packed row against samples alone
ceilings    matrix products with the models' shapes, and a copy: upper bounds for everything else
step        forward and backward of receipt-like batches on random models of released sizes: padded to the longest (also
            with FlashAttention, if installed), padded to a fixed width, packed, and packed with lengths padded to
            multiples of 8
syncs       host–device syncs of a step, the lines that cause them, and the time on the host
attention   the attention layers of these models, against padded batches and dense masks
head        labeled rows against all rows
tree        a step on samples that share a prompt, against the row without sharing
memory      the largest micro-batch that fits beside AdamW's state, found by doubling

In the benchmarks, the losses of all variants must agree.

The complete report is written after every cell. It lists cells that failed, with a traceback, and cells that were
skipped because the remaining time was too short: the next run continues with these. After a failed kernel, the process
can no longer use the device, and a new process continues with the next cell. `--device cpu --shapes tiny` runs every
part on a CPU, or on the tests' pretend GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import vlmpack
from benchmarks.cases.attention import AttentionRow, Head, Site, check_same, measure_rows
from benchmarks.cases.step import check_same_loss
from benchmarks.cases.tree import Rollouts, TreePair, row_of
from benchmarks.flops import count_flops, matrix_product
from benchmarks.measuring import (
    BenchSettings,
    Failed,
    Figure,
    Report,
    Skipped,
    Spread,
    Target,
    alternate,
    environment,
    new_garbage_only,
    wait,
)
from benchmarks.receipts import ReceiptShapes, hf_inputs, receipt_samples
from vlmpack import probe
from vlmpack.attention.backends import AttentionCall, EagerMask, explain
from vlmpack.errors import VlmpackError, check_whole_number
from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PaddedBatch, SlotRule
from vlmpack.layout.batch import IGNORE
from vlmpack.machine import peak_bytes, version_of
from vlmpack.model import PackedStep, StepConfig
from vlmpack.probing.work import recorded_syncs
from vlmpack.testing import padded, tiny_config, tiny_model

R = TypeVar("R")
Entries = Iterator[Figure | Skipped]
PACKAGES = ("triton", "fla-core", "causal-conv1d", "flash-attn", "kernels", "accelerate")
"""Packages that change how a GPU computes a model, if they are installed."""
LONGEST, FLASH, FIXED, PACKED, SLOTS = "padded to longest", "padded, flash", "padded to width", "packed", "slots of 8"
PADDED_WAYS, PACKED_WAYS = (LONGEST, FLASH, FIXED), (PACKED, SLOTS)
TESTS = Path(__file__).parents[1] / "tests"
OVERTIME = 40.0
"""Seconds after the budget in which tests may still end; then they have failed."""
LOW = torch.bfloat16
OPTIMIZER_BYTES = 12
"""Bytes per parameter that are reserved during the search for the largest micro-batch: AdamW's two moments and weights
in float32."""
HIGHER, LOWER = "higher", "lower"


@final
@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a released model, for a model with random weights."""

    family: str
    sizes: Mapping[str, Any]
    """Fields of `vlmpack.testing.TinySizes`."""
    text: Mapping[str, Any]
    """Additional settings of the text model."""
    vision: Mapping[str, Any]
    """Additional settings of the vision tower."""


@final
@dataclass(frozen=True, kw_only=True)
class GpuShapes:
    """All sizes of a run."""

    tests: str
    """The files of tests to run: a pattern of their paths below `tests`."""
    probed: Sequence[str]
    """Families to probe."""
    models: Sequence[ModelShape]
    receipts: ReceiptShapes
    """Sizes of a batch; `samples` is replaced by the micro-batch size."""
    width: int
    """Padded length of recipes with a fixed sequence length, in tokens."""
    micro_batches: Sequence[int]
    recomputed: Sequence[int]
    """Micro-batch sizes with gradient checkpointing."""
    largest: int
    """Largest micro-batch size to try."""
    sites: Sequence[Site]
    rollouts: Rollouts
    square: int
    """Side of a square matrix product."""
    tokens: int
    """Rows of the matrix products with the model's shapes, and of the head."""
    copied: int
    """Bytes of a copy."""
    seconds: float
    """Time for the rounds of one cell."""


_VISION = {"vision_hidden": 1024, "vision_depth": 24, "vision_heads": 16, "patch_size": 16}
_TEXT = {"hidden": 2048, "intermediate": 6144}
_TOWER = {"intermediate_size": 4096, "num_position_embeddings": 2304}
QWEN3_VL_2B = ModelShape(
    family="qwen3_vl",
    sizes={**_TEXT, **_VISION, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    text={},
    vision={**_TOWER, "deepstack_visual_indexes": [5, 11, 17]},
)
QWEN3_5_2B = ModelShape(
    family="qwen3_5",
    sizes={**_TEXT, **_VISION, "layers": 24, "heads": 8, "kv_heads": 2, "head_dim": 256, "vocab_size": 248_320},
    text={f"linear_{name}": value for name, value in (("num_key_heads", 16), ("num_value_heads", 16))}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    vision=_TOWER,
)
_LANGUAGE, _PATCHES = (ReceiptShapes(longest=longest).lengths for longest in (1792, 4288))
FULL = GpuShapes(
    tests="**/test_*.py",
    probed=tuple(FAMILIES),
    models=(QWEN3_VL_2B, QWEN3_5_2B),
    receipts=ReceiptShapes(longest=1792, ratio=4.0, image_share=0.6, labelled_share=0.3),
    width=2048,
    micro_batches=(4, 8, 2, 16, 32),
    recomputed=(8, 16, 32),
    largest=128,
    sites=(
        Site(name="language 128", lengths=_LANGUAGE, heads=16, kv_heads=8, head_dim=128, causal=True),
        Site(name="vision 64", lengths=_PATCHES, heads=16, kv_heads=16, head_dim=64, causal=False),
        Site(name="language 256", lengths=_LANGUAGE, heads=8, kv_heads=2, head_dim=256, causal=True),
        Site(name="vision 72", lengths=_PATCHES, heads=16, kv_heads=16, head_dim=72, causal=False),
    ),
    rollouts=Rollouts(prefix=1024, branch=256, samples=8, image_tokens=768),
    square=8192,
    tokens=8192,
    copied=2**32,
    seconds=5.0,
)
_TINY = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 131}
_TINY |= {"vision_hidden": 32, "vision_depth": 1}
TINY = GpuShapes(
    tests="layout/test_batches.py",
    probed=("qwen3",),
    models=(
        ModelShape(family="qwen3_vl", sizes=_TINY, text={}, vision={"intermediate_size": 48}),
        ModelShape(family="qwen3_5", sizes=_TINY, text={"linear_num_value_heads": 2}, vision={}),
    ),
    receipts=ReceiptShapes(longest=28, ratio=4.0, image_share=0.6, labelled_share=0.3, vocab_size=131),
    width=32,
    micro_batches=(2,),
    recomputed=(2,),
    largest=4,
    sites=(Site(name="language", lengths=(7, 3, 5), heads=6, kv_heads=2, head_dim=8, causal=True),),
    rollouts=Rollouts(prefix=70, branch=5, samples=3, image_tokens=8),
    square=32,
    tokens=64,
    copied=2**16,
    seconds=0.0,
)
SHAPES = {"full": FULL, "tiny": TINY}


# ---------------------------------------------------------------------- the run


@final
class Lab:
    """Device, sizes, settings and models that all cells share."""

    def __init__(self, device: str, shapes: GpuShapes, seed: int, ends: float) -> None:
        self.device, self.shapes, self.seed, self.ends = device, shapes, seed, ends
        self.dtype = LOW if device == "cuda" else torch.float32
        self.settings = BenchSettings(device=device, seconds=shapes.seconds, seed=seed)
        self._models: Models | None = None

    def models(self, shape: ModelShape) -> Models:
        """Return the models of this shape, and free those of another shape."""
        if self._models is None or self._models.shape is not shape:
            self._models = None
            self.release()
            self._models = Models(shape, self)
        return self._models

    def release(self) -> None:
        """Free all memory that live tensors do not use."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def if_it_fits(self, function: Callable[[], R]) -> R | None:
        """Return the result of a call; None: it ran out of memory, which is now free again."""
        try:
            return function()
        except RuntimeError as error:
            words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "unable to find an engine")
            if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in words):
                raise
            traceback.clear_frames(error.__traceback__)  # local variables hold the tensors that filled the memory
        self.release()
        return None

    def works(self) -> bool:
        """Whether this process can still use the device, which is impossible after a failed kernel."""
        try:
            return torch.zeros(1, device=self.device).item() == 0
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False


@final
@dataclass(frozen=True, kw_only=True)
class Cell:
    """Figures that are measured together."""

    case: str
    name: str
    seconds: float
    """Estimated time; the cell is skipped if less time is left."""
    run: Callable[[Lab], Entries]
    """Measures and yields figures; those before an error are kept."""


def all_cells(shapes: GpuShapes) -> list[Cell]:
    """List all cells of a run, the most important first. Consecutive cells with one model reuse it on the device."""
    files = [path for path in sorted(TESTS.glob(shapes.tests)) if "mark.gpu" in path.read_text(encoding="utf-8")]
    cells = [
        Cell(case="tests", name=str(path.relative_to(TESTS)), seconds=60, run=lambda lab, path=path: _tests(lab, path))
        for path in files
    ]
    cells.append(Cell(case="ceilings", name="", seconds=20, run=_ceilings))
    for shape in shapes.models:
        cells += [_step_cell(shape, samples, recomputed=False) for samples in shapes.micro_batches[:3]]
        cells.append(Cell(case="syncs", name=shape.family, seconds=15, run=lambda lab, s=shape: _syncs(lab, s)))
        cells.append(Cell(case="tree", name=shape.family, seconds=20, run=lambda lab, s=shape: _tree(lab, s)))
    cells += [
        Cell(case="attention", name=site.name, seconds=12, run=lambda lab, site=site: _attention(lab, site))
        for site in shapes.sites
    ]
    cells.append(Cell(case="head", name="", seconds=15, run=_head))
    cells += [
        Cell(case="probe", name=name, seconds=10, run=lambda lab, name=name: _probe(lab, name))
        for name in shapes.probed
    ]
    for shape in shapes.models:
        cells.append(Cell(case="memory", name=shape.family, seconds=40, run=lambda lab, s=shape: _memory(lab, s)))
        cells += [_step_cell(shape, samples, recomputed=True) for samples in shapes.recomputed]
        cells += [_step_cell(shape, samples, recomputed=False) for samples in shapes.micro_batches[3:]]
    return cells


def run_cells(cells: Sequence[Cell], lab: Lab, report: Report, path: Path, console: Console) -> tuple[Report, bool]:
    """Run the cells that the report does not contain, and write the report after each.

    Returns:
        (the report, whether the device still works).
    """
    done: dict[str, float | None] = dict(report.settings["cells"])
    figures, skipped, failed = list(report.figures), list(report.skipped), list(report.failed)

    def save() -> Report:
        settings = {**report.settings, "cells": done}
        written = replace(report, figures=figures, skipped=skipped, failed=failed, settings=settings)
        written.save(path)
        return written

    for key in [key for key, seconds in done.items() if seconds is None]:
        case, _, name = key.partition(": ")
        failed.append(Failed(case=case, name=name, why="the process ended while it was measured"))
        done[key] = 0.0
    for cell in cells:
        key, left = f"{cell.case}: {cell.name}", lab.ends - time.time()
        if key in done:
            continue
        if cell.seconds > left:
            why = f"it takes about {cell.seconds:.0f} s, and {max(left, 0):.0f} s are left of the budget"
            skipped.append(Skipped(case=cell.case, name=cell.name, why=why, owed=True))
            continue
        console.print(f"{left:6.1f} s left  {key}", highlight=False, markup=False)
        started, done[key] = time.time(), None
        save()
        try:
            for entry in cell.run(lab):
                kept: list[Any] = figures if isinstance(entry, Figure) else skipped
                kept.append(entry)
        except Exception as error:
            why, lines = f"{type(error).__name__}: {error}"[:300], traceback.format_exc()
            failed.append(Failed(case=cell.case, name=cell.name, why=why, traceback=lines))
            traceback.clear_frames(error.__traceback__)  # a frame would keep its model on the device
        done[key] = time.time() - started
        report_now = save()
        if not lab.works():
            return report_now, False
        lab.release()
    return save(), True


# ---------------------------------------------------------------------- correctness


def _tests(lab: Lab, path: Path) -> Entries:
    """Run the tests of a file that need a GPU, in a process that ends a little after the budget at the latest."""
    settings = ("-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "--tb=short")
    command, left = [sys.executable, "-m", "pytest", *settings, str(path)], lab.ends - time.time() + OVERTIME
    done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise AssertionError(f"{done.stdout[-4000:]}{done.stderr[-1000:]}")
    passed = re.search(r"(\d+) passed", done.stdout)
    yield Figure(case="tests", name=path.stem, value=float(passed[1]) if passed else 0.0, unit="passed")


def _probe(lab: Lab, family: str) -> Entries:
    """Probe a tiny model of a family."""
    started = time.time()
    report = probe(tiny_model(family, dtype=lab.dtype).to(lab.device))
    if report.verdict != "exact":
        raise AssertionError(str(report))
    yield Figure(case="probe", name=f"{family}, exact", value=time.time() - started, unit="s")


# ---------------------------------------------------------------------- ceilings and back-ends


def _ceilings(lab: Lab) -> Entries:
    text, vision = (lab.shapes.models[0].sizes[name] for name in ("hidden", "vision_hidden"))
    tokens, side, vocabulary = lab.shapes.tokens, lab.shapes.square, lab.shapes.models[0].sizes["vocab_size"]
    where, seconds = {"device": lab.device, "dtype": lab.dtype}, lab.settings.seconds / 4
    for name, m, k, n in (
        ("square", side, side, side),
        ("text MLP", tokens, text, 3 * text),
        ("text attention", tokens, text, text),
        ("vision MLP", tokens, vision, 4 * vision),
        ("head", tokens // 4, text, vocabulary),
    ):
        left, right = torch.randn(m, k, **where), torch.randn(k, n, **where)
        timings = alternate({"product": lambda a=left, b=right: a @ b}, seconds=seconds, device=lab.device)
        name = f"product, {name}, {m} x {k} x {n}"
        yield Figure.rate("ceilings", name, timings, "product", 2e-12 * m * k * n, "TFLOP/s", "wall")
    source = torch.zeros(lab.shapes.copied // 2, dtype=torch.uint8, device=lab.device)
    target = torch.empty_like(source)
    timings = alternate({"copy": lambda: target.copy_(source)}, seconds=seconds, device=lab.device)
    yield Figure.rate("ceilings", "copy, read and written", timings, "copy", 2e-12 * source.nbytes, "TB/s", "wall")


# ---------------------------------------------------------------------- models and steps


@final
class PatchProduct(nn.Conv3d):
    """A convolution whose kernel is as large as a patch, computed as the equivalent matrix product.

    In bfloat16, some versions of cuDNN take seconds for this convolution or have no kernel.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embed patches: [P, C, T, H, W] to [P, D, 1, 1, 1]."""
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def with_patch_products(model: Any) -> Any:
    """Replace the model's patch embedding by a matrix product, in place; parameters and FLOPs do not change."""
    for module in model.modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProduct
    return model


def cast(batch: PaddedBatch, dtype: torch.dtype) -> PaddedBatch:
    """Return the batch with pixels of another dtype."""
    pixels = batch.media.pixel_values
    return batch if pixels is None else replace(batch, media=replace(batch.media, pixel_values=pixels.to(dtype)))


@final
class Models:
    """One random model, unmodified and with packing in two variants. All share one set of weights and gradients."""

    def __init__(self, shape: ModelShape, lab: Lab) -> None:
        from transformers import AutoModelForImageTextToText
        from transformers.utils.import_utils import is_flash_attn_2_available

        torch.manual_seed(lab.seed)
        self.shape, self.lab, self.family = shape, lab, family_named(shape.family)
        config = tiny_config(shape.family, **shape.sizes)
        self.family.text_config(config).update(shape.text)
        config.vision_config.update(shape.vision)
        config.tie_word_embeddings = True
        auto: Any = AutoModelForImageTextToText  # with its own type, a type checker would read every model
        with torch.device(lab.device):
            model = auto.from_config(config, dtype=lab.dtype, attn_implementation="sdpa")
        self.model = with_patch_products(model).train()
        configs = {PACKED: StepConfig(), SLOTS: StepConfig(slots=SlotRule(multiple=8))}
        self.packed = {name: PackedStep(self._twin(), config) for name, config in configs.items()}
        self.flash = None
        if is_flash_attn_2_available():
            self.flash = self._twin()
            self.flash.set_attn_implementation("flash_attention_2")

    def _twin(self) -> Any:
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def recompute(self, wanted: bool) -> None:
        """Switch gradient checkpointing on or off in all variants, and clear gradients."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming these methods
            bodies: list[Any] = [self.model, self.flash, *(step.model for step in self.packed.values())]
            for body in bodies:
                if body is not None and wanted:
                    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                elif body is not None:
                    body.gradient_checkpointing_disable()
        self.model.zero_grad(set_to_none=True)

    def batch(self, samples: int) -> tuple[PaddedBatch, list[Mapping[str, torch.Tensor]]]:
        """Return (a receipt-like batch of `samples` samples, the inputs of each sample alone)."""
        config = self.model.config
        vocabulary = self.family.text_config(config).vocab_size
        receipts = replace(self.lab.shapes.receipts, samples=samples, vocab_size=vocabulary)
        drawn = receipt_samples(self.family, config, receipts, seed=self.lab.seed)
        groups = (drawn, *([one] for one in drawn))
        batches = [cast(padded(some).to(self.lab.device), self.lab.dtype) for some in groups]
        return batches[0], [hf_inputs(batch) for batch in batches[1:]]

    def steps(self, batch: PaddedBatch) -> dict[str, Callable[[], torch.Tensor]]:
        """Return a function for each available variant that runs forward and backward and returns the loss."""

        def run(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
            self.model.zero_grad(set_to_none=True)
            loss = forward()
            loss.backward()
            return loss.detach()

        def plain(model: Any, batch: PaddedBatch) -> Callable[[], torch.Tensor]:
            inputs = hf_inputs(batch)
            return lambda: run(lambda: model(**inputs, use_cache=False).loss)

        ways = {LONGEST: plain(self.model, batch), FIXED: plain(self.model, widened(batch, self.lab.shapes.width))}
        ways |= {name: lambda step=step: run(lambda: step(batch).loss) for name, step in self.packed.items()}
        return ways if self.flash is None else {**ways, FLASH: plain(self.flash, batch)}


def widened(batch: PaddedBatch, width: int) -> PaddedBatch:
    """Return the same batch, padded to `width` tokens."""
    more = (0, width - batch.input_ids.shape[1])
    wide = {name: F.pad(getattr(batch, name), more) for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    assert batch.labels is not None
    return replace(batch, **wide, labels=F.pad(batch.labels, more, value=IGNORE))


def _step_cell(shape: ModelShape, samples: int, *, recomputed: bool) -> Cell:
    words = f"{shape.family}, micro-batch {samples}{', recomputed' * recomputed}"

    def run(lab: Lab) -> Entries:
        models = lab.models(shape)
        models.recompute(recomputed)
        try:
            yield from _step(models, samples, words)
        finally:
            models.recompute(False)

    return Cell(case="step", name=words, seconds=10 + 1.5 * samples, run=run)


def _step(models: Models, samples: int, words: str) -> Entries:
    lab, (batch, singles) = models.lab, models.batch(samples)
    ways, held = models.steps(batch), [*models.model.parameters(), *hf_inputs(batch).values()]
    losses: dict[str, torch.Tensor] = {}
    for name, way in list(ways.items()):
        lab.release()
        weigh = lambda name=name, way=way: peak_bytes(  # noqa: E731
            lambda: losses.update({name: way()}), held=held, device=lab.device
        )
        if (peak := lab.if_it_fits(weigh)) is None:
            del ways[name]
            yield Skipped(case="step", name=f"{words}, {name}", why="it does not fit into memory")
        else:
            yield Figure(case="step", name=f"{words}, {name}, peak memory", value=peak, unit="bytes")
    check_same_loss(losses, limit=2e-2)

    def all_alone() -> None:
        for inputs in singles:
            models.model(**inputs, use_cache=False).loss.backward()

    needed = count_flops(all_alone)
    ideals = {name: count_flops(way) / needed for name, way in ways.items() if name in PADDED_WAYS}
    assert batch.metadata is not None
    tokens, clock = sum(batch.metadata.lengths), lab.settings.clock
    product, flops = matrix_product(models.model, tokens=tokens, hidden=models.shape.sizes["hidden"])
    timings = alternate({**ways, "product": product}, seconds=lab.settings.seconds, device=lab.device)
    for name in ways:
        yield Figure.timed("step", f"{words}, {name}", timings, name, lab.settings)
        yield Figure.rate("step", f"{words}, {name}, samples", timings, name, samples, "samples/s", clock)
        yield Figure.rate("step", f"{words}, {name}, real tokens", timings, name, tokens, "tokens/s", clock)
        share = timings.ratio("product", name, clock, needed / flops)
        yield Figure.measured("step", f"{words}, {name}, utilization on real FLOPs", share, "share")
        for base in ideals if name in PACKED_WAYS else ():
            title, of = f"{words}, {base} / {name}", (base, name)
            yield Figure.compared("step", title, timings, of, lab.settings)
            more: dict[str, Any] = {"scale": 1 / ideals[base]}
            more["target"] = Target(limit=0.95, better=HIGHER) if base == LONGEST and name == PACKED else None
            yield Figure.compared("step", f"{title}, share of ideal", timings, of, lab.settings, **more)


def _syncs(lab: Lab, shape: ModelShape) -> Entries:
    """Count host–device syncs of a step by line, and measure the seconds until the call returns."""
    models, ours = lab.models(shape), str(Path(vlmpack.__file__).parent)
    ways = models.steps(models.batch(2)[0])
    for way in (LONGEST, *PACKED_WAYS):
        ways[way]()
        wait(lab.device)
        with recorded_syncs() as syncs:
            ways[way]()
        places = Counter(f"{line.filename}:{line.lineno} in {line.name}" for line in syncs)
        own = sum(count for place, count in places.items() if place.startswith(ours))
        target = Target(limit=0, better=LOWER) if way in PACKED_WAYS else None
        yield Figure(case="syncs", name=f"{shape.family}, {way}, of vlmpack", value=own, unit="times", target=target)
        yield Figure(case="syncs", name=f"{shape.family}, {way}, all", value=places.total(), unit="times")
        for place, count in places.most_common(8):
            short = "/".join(place.split("/")[-3:])
            yield Figure(case="syncs", name=f"{shape.family}, {way}, at {short}", value=count, unit="times")
        seconds = []
        for _ in range(5):
            wait(lab.device)
            started = time.perf_counter()
            ways[way]()
            seconds.append(time.perf_counter() - started)
        yield Figure.measured("syncs", f"{shape.family}, {way}, the host's time", Spread.of(seconds), "s")


def _tree(lab: Lab, shape: ModelShape) -> Entries:
    models = lab.models(shape)
    step, words = models.packed[PACKED], f"{shape.family}, {lab.shapes.rollouts}"
    row = row_of(models.family, step.model.config, [lab.shapes.rollouts], seed=lab.seed)
    pixels = row.media.pixel_values
    assert pixels is not None
    row = replace(row, media=replace(row.media, pixel_values=pixels.to(lab.dtype)))
    pair = TreePair(step, row, lab.device)
    check_same_loss({name: way() for name, way in pair.steps.items()}, limit=2e-2)
    timings = alternate(pair.steps, seconds=lab.settings.seconds, device=lab.device)
    tree = pair.rows["tree"].tree
    assert tree is not None
    tokens = row.segments.total / tree.num_tokens
    yield Figure(case="tree", name=f"{words}, tokens, packed / tree", value=tokens, unit="x")
    yield Figure.timed("tree", f"{words}, packed row", timings, "packed", lab.settings)
    of, target = ("packed", "tree"), Target(limit=0.9, better=HIGHER)
    yield Figure.compared("tree", f"{words}, speed-up", timings, of, lab.settings)
    name = f"{words}, speed-up / ratio of tokens"
    yield Figure.compared("tree", name, timings, of, lab.settings, scale=1 / tokens, target=target)


def _memory(lab: Lab, shape: ModelShape) -> Entries:
    """Find the largest micro-batch of each variant beside an optimizer's state, with and without checkpointing."""
    models = lab.models(shape)
    weights = sum(parameter.numel() for parameter in models.model.parameters())
    reserved = torch.empty(OPTIMIZER_BYTES * weights, dtype=torch.uint8, device=lab.device)
    for recomputed in (False, True):
        models.recompute(recomputed)
        words, largest = f"{shape.family}{', recomputed' * recomputed}", dict[str, int]()
        for way in (PACKED, LONGEST, FIXED):
            largest[way], samples = 0, 1
            while samples <= lab.shapes.largest and time.time() < lab.ends:
                if lab.if_it_fits(lambda n=samples, way=way: float(models.steps(models.batch(n)[0])[way]())) is None:
                    break
                largest[way], samples = samples, 2 * samples
            name = f"{words}, {way}, largest micro-batch"
            yield Figure(case="memory", name=name, value=largest[way], unit="samples")
        for way in (LONGEST, FIXED):
            if largest[way]:
                ratio, target = largest[PACKED] / largest[way], Target(limit=2.0, better=HIGHER)
                name = f"{words}, largest micro-batch, packed / {way}"
                yield Figure(case="memory", name=name, value=ratio, unit="x", target=target)
    models.recompute(False)
    del reserved


# ---------------------------------------------------------------------- layers


def _attention(lab: Lab, site: Site) -> Entries:
    row = AttentionRow(site, lab.settings, lab.dtype)
    reasons = explain(AttentionCall.of(*row.qkv[:2]))
    packed = [name for name, why in reasons.items() if not why and name != EagerMask.name]
    makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        name: lambda name=name: lambda: row.packed(name) for name in packed
    }
    makers |= {"padded": row.padded, "dense mask": row.dense}
    if site.causal:
        makers["padded, causal without a mask"] = lambda: row.padded(without_mask=True)
    ways, results = dict[str, Callable[[], torch.Tensor]](), dict[str, torch.Tensor]()
    for name, make in makers.items():
        way = lab.if_it_fits(make)
        result = way and lab.if_it_fits(way)
        if way is None or result is None:
            yield Skipped(case="attention", name=f"{site.name}, {name}", why="it does not fit into memory")
        else:
            ways[name], results[name] = way, result
    check_same(results, "sdpa_segments")
    timings = alternate(ways, seconds=lab.settings.seconds, device=lab.device)
    yield Figure(case="attention", name=f"{site.name}, ideal: padded / needed pairs", value=site.ideal, unit="x")
    for name in ways:
        yield Figure.timed("attention", f"{site.name}, {name}", timings, name, lab.settings)
        for other in [way for way in ways if way not in packed] if name in packed else ():
            title = f"{site.name}, {other} / {name}"
            yield Figure.compared("attention", title, timings, (other, name), lab.settings)
    for name, why in reasons.items():
        if why:
            yield Skipped(case="attention", name=f"{site.name}, {name}", why=f"refused: {'; '.join(why)}")


def _head(lab: Lab) -> Entries:
    sizes = lab.shapes.models[0].sizes
    head = Head(
        lab.shapes.tokens, sizes["hidden"], sizes["vocab_size"], seed=lab.seed, device=lab.device, dtype=lab.dtype
    )
    yield from measure_rows(head, lab.settings)


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Benchmark a GPU within the budget, and write a report after every cell.

    Returns:
        0: success; 1: a cell failed, or `--check` was given and a target was missed or skipped; 2: there is no GPU, or
        the arguments are invalid.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen, console = _parser().parse_args(arguments), console or Console()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "PyTorch sees no CUDA device here; --device cpu --shapes tiny runs every part on a CPU", style="red"
        )
        return 2
    try:
        seed, path = check_whole_number("--seed", chosen.seed, at_least=0), chosen.json
        report = Report.load(path) if chosen.resume and path.exists() else _new_report(chosen)
    except VlmpackError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    shapes = SHAPES[chosen.shapes]
    report = replace(report, skipped=[entry for entry in report.skipped if not entry.owed])
    lab = Lab(chosen.device, shapes, seed, time.time() + chosen.budget)
    with new_garbage_only():
        report, works = run_cells(all_cells(shapes), lab, report, path, console)
    if not works:  # replace this process by a new one, which frees the device's memory; the report is on disk
        again = [*arguments, "--resume", "--budget", str(max(1, round(lab.ends - time.time())))]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *again])
    report.print(console)
    return 1 if report.failed or (chosen.check and not report.complete) else 0


def _new_report(chosen: argparse.Namespace) -> Report:
    about = {**environment(chosen.device), **{name: version_of(name) for name in PACKAGES}}
    if chosen.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {"memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    settings = {"seed": chosen.seed, "cells": {}}
    return Report(figures=(), environment=about, settings=settings, shapes={"gpu": asdict(SHAPES[chosen.shapes])})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check and measure one GPU.")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="time of this run (540)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE", help="the report (gpu.json)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda, or cpu to try it out")
    parser.add_argument("--shapes", default="full", choices=list(SHAPES), help="full, or tiny to try it out")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and pixels (0)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed or skipped")
    parser.add_argument("--resume", action="store_true", help="go on where the report in --json ends, if there is one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
