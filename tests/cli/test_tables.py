"""Every table of the command: whole at a terminal of 80 columns, plain lines behind a pipe."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_analyze import table_of
from cli.test_app import check_keys
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vlmpack.cli.analyze import analysis_of, print_analysis, print_rows, row_numbers
from vlmpack.cli.demo import print_comparison
from vlmpack.cli.doctor import Device, Serving, Version, print_environment, print_reports
from vlmpack.cli.pack import print_store
from vlmpack.cli.training import Run
from vlmpack.collate import VLMCollator
from vlmpack.plan import PaddedRecipe, PrefixGroups
from vlmpack.probing import Report
from vlmpack.probing.report import Baseline, Check
from vlmpack.rows import Manifest, PackedDataset, StoreSettings, write_rows
from vlmpack.terminal import print_text
from vlmpack.testing import tiny_processor
from vlmpack.testing.comparison import GradientCosine

WIDTH = 80
DRAWN = set("─━│┃┏┓┗┛┌┐└┘├┤┡┩╇╭╮╰╯|")


def test_a_sentence_is_one_line_in_a_pipe_and_wrapped_at_a_terminal() -> None:
    sentence, printed = Text("[a] " + "word " * 40 + "end"), []
    for terminal in (False, True):
        page = io.StringIO()
        print_text(Console(file=page, width=WIDTH, force_terminal=terminal, color_system=None), sentence, indent=2)
        printed.append(page.getvalue().splitlines())
    assert printed[0] == [f"  {sentence}"]
    assert len(printed[1]) > 1 and all(len(line) <= WIDTH and line.startswith("  ") for line in printed[1])


# ---------------------------------------------------------------------- results, as long as real ones


def print_lengths(console: Console) -> None:
    lengths = np.random.default_rng(0).integers(1_000, 100_000, 300)
    groups = PrefixGroups(of_samples=np.zeros(300, int), parents=np.array([-1]), tokens=np.array([999]))
    table = replace(table_of(lengths.tolist()), groups=groups)
    recipe = PaddedRecipe(world_size=64, per_device_batch=16)
    numbers = analysis_of(table, recipe, (8_192, 131_072), source="a/data/set", min_shared=64)
    print_analysis(numbers, table, console)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"input_ids": [5] * (n % 40 + 2), "labels": [5] * (n % 40 + 2), "id": f"sample-{n}"} for n in range(200)]
    out = tmp_path_factory.mktemp("packed") / "rows"
    write_rows(rows, out, VLMCollator(tiny_processor(), layout="packed"), StoreSettings(capacity=4_000))
    return out


def rows(store: Path) -> list[dict[str, Any]]:
    dataset = PackedDataset(store)
    return [row_numbers(row, dataset.measured(row), dataset.tree(row)) for row in range(2)]


def probed() -> Report:
    limits: dict[str, Any] = {"value": 1.2345e-7, "allowed": 5.4321e-5}
    groups = ("model.language_model.layers.self_attn.q_proj", "model.visual.deepstack_merger_list.linear_fc1")
    return Report(
        model="Qwen3VLForConditionalGeneration", family="qwen3_vl_moe", weights="a tiny copy with random weights",
        device="NVIDIA H200", dtype="bfloat16", attention="sdpa_segments", samples=("text of 7 tokens",) * 9,
        row_tokens=4_096,
        checks=(
            Check(part="isolation", name="tokens of another sample are changed", finding="ok", **limits),
            Check(part="mechanism", name="gated delta", finding="ok", detail="convolution, recurrence " * 4, **limits),
            *(
                Check(part="equality", name=f"{way}: gradient of {group}", finding="ok", **limits)
                for group in groups
                for way in ("row", "padded")
            ),
            Check(part="work", name="attended pairs", finding="ok", value=123_456_789, allowed=123_456_789),
        ),
        circumstances={"row": "a packed row", "padded": "a padded batch, which the step packs"},
        plain=(
            Baseline(name="one row, [4, 1, T] positions", verdict="leaks", leak=1.2e-1, logits=3.4e-1, loss=5.6e-2,
                     pairs=123_456_789, causes=("mask", "positions")),
            Baseline(name="padded", verdict="fails", detail="RuntimeError: " + "a long message " * 6),
        ),
    )  # fmt: skip


def trained() -> Run:
    return Run(
        layout="packed", lengths=((123_456, 98_765),) * 9, physical=(987_654_321,) * 9, seconds=(1234.5,) * 9,
        losses=(3.14159,) * 9, peak_bytes=140 * 2**30,
    )  # fmt: skip


def environment() -> dict[str, list[Any]]:
    problem = "does not import: ModuleNotFoundError: No module named 'torchvision'"
    reasons = ("it runs on CUDA only, the tensors are on cpu", "it takes float16 and bfloat16 only, these are float32")
    serving = [Serving(device="cpu", dtype="bfloat16", backend="sdpa_segments", reasons=reasons)]
    return {
        "versions": [Version("transformers", "5.23.0"), Version("qwen-vl-utils", "0.1", problem)],
        "devices": [Device("cpu", "x86_64, 16 threads")],
        "attention": serving,
        "gated_delta": serving,
    }


VERBS: dict[str, Callable[[Console, Path], None]] = {
    "analyze": lambda console, _: print_lengths(console),
    "pack": lambda console, store: print_store(store, Manifest.load(store), console),
    "rows": lambda console, store: print_rows(rows(store), console),
    "demo": lambda console, _: print_comparison(
        trained(), trained(), GradientCosine(cosine=0.5, parameter="model.visual.blocks.0.attn.qkv", parameters=700),
        console, device="cpu",
    ),
    "doctor": lambda console, _: print_environment(environment(), console),
    "doctor --probe": lambda console, _: print_reports([probed()] * 3, console, summarize=True),
    "doctor --probe MODEL": lambda console, _: print_reports([probed()], console, summarize=False),
}  # fmt: skip


def test_the_page_lists_the_keys_of_probes() -> None:
    check_keys("probe", {"probes": [probed().to_dict()], "complete": True, "healthy": True})


# ---------------------------------------------------------------------- what is printed


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Table]]:
    """Those that were printed."""
    found: list[Table] = []
    own = Table.__rich_console__

    def noted(self: Table, *arguments: Any) -> Any:
        if any(isinstance(cell, str) and cell for column in self.columns for cell in column._cells):
            found.append(self)  # and not what rich puts texts side by side with
        return own(self, *arguments)

    monkeypatch.setattr(Table, "__rich_console__", noted)
    yield found


def printed(verb: str, store: Path, *, terminal: bool) -> str:
    file = io.StringIO()
    VERBS[verb](Console(file=file, width=WIDTH, force_terminal=terminal, color_system=None), store)
    return file.getvalue()


def plain(cell: Any) -> str:
    if isinstance(cell, Padding):
        return plain(cell.renderable)
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def numbers(tables: list[Table]) -> set[str]:
    """Cells of all columns in which numbers stand."""
    columns = [column for table in tables for column in table.columns if column.justify == "right"]
    return {plain(cell) for column in columns for cell in column._cells}


@pytest.mark.parametrize("verb", VERBS)
def test_a_terminal_of_80_columns_shows_every_number_whole(verb: str, store: Path, tables: list[Table]) -> None:
    said = printed(verb, store, terminal=True)
    assert max(map(len, said.splitlines())) <= WIDTH
    assert "…" not in said
    assert [number for number in numbers(tables) if number not in said] == []
    assert tables


@pytest.mark.parametrize("verb", VERBS)
def test_a_row_of_a_table_is_one_plain_line_of_a_pipe(verb: str, store: Path, tables: list[Table]) -> None:
    said = printed(verb, store, terminal=False)
    assert not (DRAWN | {"…", "\x1b"}) & set(said)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert tables
    for table in tables:
        for row in zip(*(column._cells for column in table.columns), strict=True):
            words = " ".join(" ".join(plain(cell) for cell in row).split())
            assert not words or words in lines
