"""Everything about a GPU in one command, run whole on a CPU with tiny shapes; and what happens when parts break."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiers import full
from torch import nn

from benchmarks.command import main
from benchmarks.figures import BenchSettings, Figure, Report
from benchmarks.gpu import checks, layers, models, steps, trees
from benchmarks.gpu.command import all_cells
from benchmarks.gpu.device import Cpu, if_it_fits, is_out_of_memory
from benchmarks.gpu.models import (
    FIXED,
    FLASH,
    LONGEST,
    PACKED,
    SLOTS,
    Models,
    PatchProduct,
    config_of,
    random_model,
    twin,
    with_patch_products,
)
from benchmarks.gpu.run import Cell, Journal, Lab, run_cells
from benchmarks.gpu.shapes import FULL, TINY
from benchmarks.report import markdown
from benchmarks.timing import new_garbage_only
from vlmpack.model import PackedStep
from vlmpack.testing import tiny_model


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collector() -> Iterator[None]:
    """As in the command itself."""
    for family in FAMILIES:
        tiny_model(family)
    with new_garbage_only():
        yield


CASES = {
    checks.CORRECTNESS,
    checks.EQUALITY,
    layers.CEILINGS,
    layers.ATTENTION,
    layers.HEAD,
    steps.STEP,
    steps.MEMORY,
    steps.SYNCS,
    trees.TREE,
}
FAMILIES = ["qwen3_vl", "qwen3_5"]


def command(*arguments: str) -> tuple[int, str]:
    page = io.StringIO()
    status = main(["gpu", *arguments], console=Console(file=page, width=200))
    return status, page.getvalue()


def lab(**more: Any) -> Lab:
    device = Cpu()
    settings = BenchSettings(seconds=0.0)
    return Lab(device=device, shapes=TINY, settings=settings, models=Models(device, seed=0), **more)


def cell(name: str, run: Any, *, guess: float = 1.0) -> Cell:
    return Cell(case="a case", name=name, guess=guess, run=run)


def figure(name: str, value: float = 1.0) -> Figure:
    return Figure(case="a case", name=name, value=value, unit="x")


def found(path: Path, case: str, family: str | None = None) -> dict[str, Figure]:
    return {one.name: one for one in Report.load(path).figures if one.case == case and one.family == family}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    words = ["--device", "cpu", "--shapes", "tiny", "--budget", "36000"]  # whatever else the machine is doing
    status, text = command(*words, "--json", str(path), "--markdown", str(path.with_suffix(".md")))
    return status, text, path


@pytest.mark.full
class TestWholeCommand:
    def test_every_cell_has_its_turn_and_none_breaks(self, run: tuple[int, str, Path]) -> None:
        status, _, path = run
        report = Report.load(path)
        assert report.failed == ()
        assert status == 0
        assert list(report.settings["cells"]) == [one.key for one in all_cells(TINY)]
        assert {one.case for one in report.figures} == CASES

    def test_back_ends_pass_or_are_refused_with_the_reason(self, run: tuple[int, str, Path]) -> None:
        errors = found(run[2], checks.CORRECTNESS)
        passed = {name for name, one in errors.items() if one.met}
        assert passed == set(errors) and "boundaries ignored" in passed
        assert sum("NaN in gaps" in name for name in errors) == 2 * len(TINY.heads)
        refused = [one for one in Report.load(run[2]).skipped if one.case == checks.CORRECTNESS]
        assert [one.name for one in refused] == [
            f"{name}, {heads}" for heads in TINY.heads for name in ("torch_varlen", "flash_attn")
        ]
        assert all("it runs on CUDA only" in one.why for one in refused)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_steps_are_measured_in_every_way(self, run: tuple[int, str, Path], family: str) -> None:
        figures = found(run[2], steps.STEP, family)
        for plan in ("micro-batch 2", "micro-batch 3", "micro-batch 2, recomputed"):
            for way in (LONGEST, FIXED, PACKED, SLOTS):
                for what in (steps.RATE, "real tokens", "utilisation on real work", "step / roofline", "peak memory"):
                    assert figures[f"{plan}, {way}, {what}"].value > 0
            assert (
                figures[f"{plan}, {FIXED}, ideal speed-up"].value > figures[f"{plan}, {LONGEST}, ideal speed-up"].value
            )
            assert figures[f"{plan}, {FIXED} / {PACKED}, share of ideal"].target == steps.SHARE
        assert [name for name in figures if name.startswith("best packed (micro-batch")]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_packing_waits_for_nothing_and_padding_s_waits_are_named(
        self, run: tuple[int, str, Path], family: str
    ) -> None:
        figures = found(run[2], steps.SYNCS, family)
        assert figures[f"{PACKED}, waits of vlmpack's own"].value == 0
        assert figures[f"{LONGEST}, waits"].value > figures[f"{PACKED}, waits"].value
        assert any("in get_rope_index" in name for name in figures)
        assert figures[f"{PACKED}, host time"].value > 0

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_largest_micro_batch_is_looked_for(self, run: tuple[int, str, Path], family: str) -> None:
        figures = found(run[2], steps.MEMORY, family)
        ends = "largest micro-batch (larger ones were not tried)"
        assert figures[f"all activations kept, {PACKED}, {ends}"].value == TINY.largest
        assert figures[f"recomputed, largest micro-batch, packed / {FIXED}"].value == 1.0

    def test_the_way_that_is_not_there_is_named_once_with_the_reason(self, run: tuple[int, str, Path]) -> None:
        missing = [one for one in Report.load(run[2]).skipped if one.name == FLASH]
        assert [(one.case, one.owed) for one in missing] == [(steps.STEP, False)]
        assert "transformers finds no flash_attn" in missing[0].why

    def test_equality_holds(self, run: tuple[int, str, Path]) -> None:
        for family in FAMILIES:
            figures = found(run[2], checks.EQUALITY, family)
            assert figures["error of logits, packed / alone"].met
            assert 0 < figures["error of logits alone / logits"].value < 0.1

    def test_it_prints_what_is_held_to_a_target_and_writes_the_table(self, run: tuple[int, str, Path]) -> None:
        _, text, path = run
        assert "reached  gpu correctness sdpa_segments, 4/2 heads of 16, causal: " in text
        assert "| gpu step qwen3_5 | micro-batch 2, packed, time |" in path.with_suffix(".md").read_text()

    def test_a_finished_run_has_nothing_to_resume(self, run: tuple[int, str, Path]) -> None:
        path, before = run[2], Report.load(run[2])
        status, _ = command("--device", "cpu", "--shapes", "tiny", "--json", str(path), "--resume")
        assert status == 0
        assert Report.load(path).figures == before.figures


class TestCells:
    def test_one_that_breaks_is_a_line_with_its_traceback_and_ends_nothing(self, tmp_path: Path) -> None:
        def breaks(_: Lab) -> Iterator[Figure]:
            yield figure("before")
            raise ValueError("of no use\nsecond line")

        journal, path = self.journal(own := lab(), tmp_path)
        run_cells([cell("bad", breaks), cell("good", lambda _: [figure("after")])], own, journal)
        report = Report.load(path)
        assert [one.name for one in report.figures] == ["before", "after"]
        (failed,) = report.failed
        assert (failed.case, failed.name, failed.why) == ("a case", "bad", "ValueError: of no use")
        assert 'raise ValueError("of no use' in failed.traceback
        assert not report.complete
        assert "failed: a case, bad: ValueError: of no use" in markdown({"run": report})

    def test_one_that_would_not_fit_is_skipped_and_owed_but_a_summary_is_not(self, tmp_path: Path) -> None:
        own = lab(ends=time.time() + 50)
        journal, path = self.journal(own, tmp_path)
        cells = [
            cell("long", lambda _: [figure("long")], guess=100.0),
            cell("short", lambda _: [figure("short")]),
            cell("summary", lambda one: [figure(f"of {len(one.figures)}")], guess=0.0),
        ]
        run_cells(cells, own, journal)
        report = Report.load(path)
        assert [one.name for one in report.figures] == ["short", "of 1"]
        assert [(one.name, one.owed) for one in report.skipped] == [("long", True)]
        assert report.skipped[0].why.startswith("it takes about 100 s, and ")

    def test_a_slow_cell_makes_the_next_of_its_pace_dearer(self, tmp_path: Path, monkeypatch: Any) -> None:
        own, clock = lab(ends=100.0), SimpleNamespace(now=0.0)
        journal, path = self.journal(own, tmp_path)
        monkeypatch.setattr("benchmarks.gpu.run.time", SimpleNamespace(time=lambda: clock.now))

        def slow(_: Lab) -> list[Figure]:
            clock.now += 30.0
            return []

        cells = [
            Cell(case="a case", name=name, guess=guess, pace=pace, run=slow)
            for name, guess, pace in (("first", 10.0, "a"), ("dear", 30.0, "a"), ("other", 30.0, "b"))
        ]
        run_cells(cells, own, journal)
        assert [one.name for one in Report.load(path).skipped] == ["dear"]  # 90 s, and 70 are left

    def test_the_report_is_whole_after_every_cell(self, tmp_path: Path) -> None:
        own = lab()
        journal, path = self.journal(own, tmp_path)
        seen = []

        def look(_: Lab) -> list[Figure]:
            seen.append([one.name for one in Report.load(path).figures])
            return [figure(f"number {len(seen)}")]

        run_cells([cell(str(i), look) for i in range(3)], own, journal)
        assert seen == [[], ["number 1"], ["number 1", "number 2"]]

    def test_a_device_that_is_lost_is_left_to_a_new_process(self, tmp_path: Path, monkeypatch: Any) -> None:
        own, restarted = lab(), []
        journal, path = self.journal(own, tmp_path)
        cells = [cell("fatal", self.fatal), cell("next", lambda _: [figure("next")])]
        monkeypatch.setattr(Cpu, "answers", lambda _: False)
        run_cells(cells, own, journal, restart=lambda: restarted.append(True))
        assert restarted == [True]
        monkeypatch.undo()
        fresh = lab()
        journal, _ = self.journal(fresh, tmp_path)
        journal.go_on_from(Report.load(path))
        report = run_cells(cells, fresh, journal)
        assert [one.name for one in report.figures] == ["next"]
        assert [one.why for one in report.failed] == ["RuntimeError: an illegal memory access"]

    def test_a_process_that_dies_in_a_cell_does_not_die_in_it_again(self, tmp_path: Path) -> None:
        def dies(_: Lab) -> list[Figure]:
            raise KeyboardInterrupt

        own = lab()
        journal, path = self.journal(own, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run_cells([cell("deadly", dies)], own, journal)
        fresh = lab()
        journal, _ = self.journal(fresh, tmp_path)
        journal.go_on_from(Report.load(path))
        report = run_cells([cell("deadly", dies)], fresh, journal)
        assert [(one.name, one.why) for one in report.failed] == [("deadly", "the process ended while it was measured")]

    @staticmethod
    def fatal(_: Lab) -> list[Figure]:
        raise RuntimeError("an illegal memory access")

    @staticmethod
    def journal(own: Lab, folder: Path) -> tuple[Journal, Path]:
        path = folder / "gpu.json"
        return Journal(own, path, started=time.time(), budget=1.0), path


class TestMemory:
    def test_only_a_lack_of_memory_is_none(self) -> None:
        def full() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        def broken() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        assert if_it_fits(full, Cpu()) is None
        assert if_it_fits(lambda: 3, Cpu()) == 3
        assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
        with pytest.raises(RuntimeError, match="illegal"):
            if_it_fits(broken, Cpu())

    def test_a_way_that_does_not_fit_is_left_out_and_the_others_are_measured(self, monkeypatch: Any) -> None:
        own = self.where_more_than(2, FIXED, monkeypatch)
        plan = steps.step_cells(TINY, TINY.models[0], [3])[0]
        kept = list(plan.run(own))
        missing = [one for one in kept if not isinstance(one, Figure)]
        assert [(one.name, one.why) for one in missing] == [
            ("qwen3_vl, micro-batch 3, padded to width", "it does not fit into memory")
        ]
        names = {one.name for one in kept}
        assert f"micro-batch 3, {PACKED}, time" in names
        assert f"micro-batch 3, {FIXED}, time" not in names

    @pytest.mark.parametrize("refused", [0, 1])
    def test_a_convolution_without_an_engine_lacks_memory_only_if_some_was_refused(
        self, refused: int, monkeypatch: Any
    ) -> None:
        counts = iter([5, 5 + refused])
        monkeypatch.setattr(Cpu, "refusals", lambda _: next(counts))

        def convolve() -> None:
            raise RuntimeError("GET was unable to find an engine to execute this computation")

        if refused:
            assert if_it_fits(convolve, Cpu()) is None
        else:
            with pytest.raises(RuntimeError, match="unable to find an engine"):
                if_it_fits(convolve, Cpu())

    def test_a_way_that_does_not_fit_beside_the_ceilings_is_left_out_and_the_rest_is_measured(
        self, monkeypatch: Any
    ) -> None:
        """The one with the highest peak is."""
        whole, tries = steps.alternate, []

        def full_at_first(callables: Any, **settings: Any) -> Any:
            tries.append(list(callables))
            if len(tries) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return whole(callables, **settings)

        monkeypatch.setattr(steps, "alternate", full_at_first)
        kept = list(steps.step_cells(TINY, TINY.models[0], [3])[0].run(lab()))
        (missing,) = [one for one in kept if not isinstance(one, Figure)]
        assert missing.name == "qwen3_vl, micro-batch 3, padded to width"
        assert missing.why.startswith("it does not fit into memory beside the product")
        assert set(tries[0]) - set(tries[1]) == {FIXED}
        assert f"micro-batch 3, {LONGEST} / {PACKED}, speed-up" in {one.name for one in kept}

    def test_the_search_stops_at_the_first_size_that_does_not_fit(self, monkeypatch: Any) -> None:
        own = self.where_more_than(2, FIXED, monkeypatch)
        (search,) = steps.memory_cells(TINY, TINY.models[0])
        figures = {one.name: one.value for one in search.run(own) if isinstance(one, Figure)}
        assert figures[f"all activations kept, {FIXED}, largest micro-batch (4 did not fit)"] == 2
        assert figures[f"all activations kept, largest micro-batch, packed / {FIXED}"] == 2.0

    @staticmethod
    def where_more_than(samples: int, way: str, monkeypatch: Any) -> Lab:
        """A lab whose memory is too small for batches of more samples in this way."""
        all_steps = models.Ways.steps.fget
        assert all_steps is not None

        def limited(self: models.Ways) -> dict[str, Any]:
            def full() -> None:
                raise torch.OutOfMemoryError("out of memory")

            return all_steps(self) | ({way: full} if len(self.batch.input_ids) > samples else {})

        monkeypatch.setattr(models.Ways, "steps", property(limited))
        return lab()


class TestModels:
    def test_the_shapes_are_those_of_the_released_models(self) -> None:
        """2.13 and 2.2 billion parameters; the head is the embedding."""
        from transformers import AutoModelForImageTextToText

        counts = []
        for shape in FULL.models:
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(config_of(shape), dtype=torch.bfloat16)
            assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}
            counts.append(sum(p.numel() for p in model.parameters()) / 1e9)
        assert counts == pytest.approx([2.13, 2.21], abs=0.05)

    def test_a_twin_has_the_same_weights_and_its_own_class(self) -> None:
        model = tiny_model("qwen3_5", layers=2)
        before = type(model)
        other = twin(model)
        PackedStep(other)
        assert type(model) is before and type(other) is not before
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        assert pairs and all(a is b for a, b in pairs)

    def test_flash_attention_is_one_more_padded_way_where_it_is_there(self, monkeypatch: Any) -> None:
        """Transformers' own dense attention stands in for it: the wiring is what is seen."""
        monkeypatch.setattr(models, "why_no_flash", lambda: None)
        monkeypatch.setattr(models, "FLASH_ATTENTION", "eager")
        own = lab()
        bodies = own.models.get(TINY.models[0])
        assert bodies.model.config._attn_implementation == "sdpa"
        assert bodies.flash.config._attn_implementation == "eager"
        figures = {one.name: one.value for one in steps.step_cells(TINY, TINY.models[0], [3])[0].run(own)}
        ideal = figures[f"micro-batch 3, {LONGEST}, ideal speed-up"]
        assert figures[f"micro-batch 3, {FLASH}, ideal speed-up"] == ideal
        assert figures[f"micro-batch 3, {FLASH} / {PACKED}, share of ideal"] > 0

    def test_ways_of_different_losses_are_refused(self) -> None:
        models.check_losses({"a": torch.tensor(11.9), "b": torch.tensor(11.95)})
        for wrong in (12.5, float("nan")):
            with pytest.raises(Exception, match="do not compute the same loss"):
                models.check_losses({"a": torch.tensor(11.9), "b": torch.tensor(wrong)})


def test_without_a_gpu_the_command_says_how_to_try_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = command()
    assert status == 2
    assert "--device cpu --shapes tiny" in text


def test_the_full_run_fits_its_budget_by_its_own_guesses() -> None:
    """What comes first fits in any case; the least important cells may not."""
    cells = all_cells(FULL)
    first = [one.guess for one in cells if "16" not in one.name and "32" not in one.name and one.case != steps.MEMORY]
    assert len(cells) > 40
    assert sum(first) < 540


@pytest.mark.gpu
@pytest.mark.full
def test_on_a_gpu_waits_are_seen_and_named() -> None:
    from benchmarks.gpu.device import Cuda

    ones = torch.ones(3, device="cuda")
    (place,) = Cuda().syncs(lambda: ones.sum().item())
    assert "test_gpu.py" in place
    assert Cuda().syncs(lambda: ones.sum()) == []


@pytest.mark.gpu
@pytest.mark.full
def test_on_a_gpu_memory_comes_back_after_it_ran_out() -> None:
    from benchmarks.gpu.device import Cuda

    device = Cuda()
    free = torch.cuda.mem_get_info()[0]

    def too_much() -> list[torch.Tensor]:
        return [torch.empty(free // 4, dtype=torch.uint8, device="cuda") for _ in range(8)]

    assert if_it_fits(too_much, device) is None
    assert torch.cuda.mem_get_info()[0] > 0.9 * free
    assert device.answers()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_convolution_with_its_gradients(bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 7, (2, 5, 4), stride=(2, 5, 4), bias=bias, dtype=torch.float64)
    patches = torch.randn(11, 3, 2, 5, 4, dtype=torch.float64)

    def seen() -> list[torch.Tensor]:
        out = convolution(patches)
        return [out, *torch.autograd.grad(out.square().sum(), list(convolution.parameters()))]

    before = seen()
    assert with_patch_products(convolution) is convolution
    assert type(convolution) is PatchProduct
    torch.testing.assert_close(seen(), before)


def test_windows_that_overlap_stay_convolutions() -> None:
    assert type(with_patch_products(nn.Conv3d(3, 7, 4, stride=2))) is nn.Conv3d


@pytest.mark.parametrize("shape", TINY.models, ids=lambda shape: shape.family)
def test_no_model_of_the_suite_has_a_convolution_over_patches(shape: Any) -> None:
    kinds = {type(module) for module in random_model(shape, Cpu(), seed=0).modules()}
    assert PatchProduct in kinds
    assert nn.Conv3d not in kinds


def test_without_a_kernel_for_the_convolution_the_product_is_measured_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_engine(*_: Any) -> torch.Tensor:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    monkeypatch.setattr(nn.Conv3d, "forward", no_engine)
    device = Cpu()
    lab = Lab(device=device, shapes=TINY, settings=BenchSettings(seconds=0.0), models=Models(device, seed=0))
    (cell,) = [cell for cell in layers.skip_limit_cells(TINY) if cell.name == layers.PATCHES]
    left_out, figure = cell.run(lab)
    assert isinstance(figure, Figure)
    assert figure.name.endswith("patches, product")
    assert not isinstance(left_out, Figure)
    assert left_out.why == "refused: GET was unable to find an engine to execute this computation"


class TestTrees:
    """Rows whose samples share prefixes, at sizes of a CPU."""

    def test_gathering_and_the_sums_of_gradients_are_measured(self) -> None:
        (attention,) = [each for each in trees.tree_cells(TINY) if "attention" in each.name]
        figures = {one.name.removeprefix("attention, 70/5 x 3, "): one for one in attention.run(lab())}
        assert {"packed", "gathered", "gathering", "packed / gathered", "gathering / gathered"} <= figures.keys()
        summed = figures["error of the prefix's gradients summed in float32 / packed"]
        assert summed.target is trees.SUMMED_RIGHT
        assert all(one.value > 0 for one in figures.values() if isinstance(one, Figure))

    def test_gradients_along_paths_are_those_of_the_samples(self) -> None:
        rollouts = TINY.trees[0]
        tree, rng = trees.tree_of(rollouts), torch.Generator().manual_seed(0)
        qkv = [torch.randn(tree.num_tokens, n, 16, generator=rng) for n in (4, 2, 2)]
        truth = trees._along_samples(tree, qkv)
        for run in (trees._along_paths, trees._summed_low):
            for x, y in zip(run(tree, qkv), truth, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("family", ["qwen3_vl", *full("qwen3_5")])
    def test_a_step_on_a_tree_is_measured_without_a_sync(self, family: str) -> None:
        (step,) = [each for each in trees.tree_cells(TINY) if each.name == f"step, {family}"]
        figures = {one.name.removeprefix("step, 70/5 x 3, "): one for one in step.run(lab()) if isinstance(one, Figure)}
        assert figures["syncs of vlmpack's"].value == 0
        assert figures["ideal"].value > 1.5
        assert figures["share of ideal"].target is trees.SHARE
