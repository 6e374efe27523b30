"""`vlmpack train`: fine-tune a model on conversations in packed rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from vlmpack.cli import options
from vlmpack.cli.config import print_keys, read_config
from vlmpack.cli.inputs import print_refused
from vlmpack.errors import SkippedWarning, UnpackedWarning, check_extra
from vlmpack.terminal import format_bytes, print_facts, print_text, quiet_transformers

SHOWN = 1500
"""Number of characters of the sample that are printed."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(options.OutputOptions):
    """What the verb itself takes."""

    settings: Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...")] = None
    """Settings; they override the file."""
    config: Annotated[Path | None, Option(exists=True, dir_okay=False)] = None
    """YAML file of settings."""
    dry_run: bool = False
    """Print the plan without training; measured lengths are kept."""
    help_config: bool = False
    """List all keys with their defaults, and exit."""


@options.with_options
def train(given: TrainOptions) -> None:
    """Fine-tune a model on conversations in packed rows: LoRA or all weights; evaluate, save and merge.

    For example: vlmpack train model=Qwen/Qwen3-VL-2B-Instruct data=chats.jsonl --dry-run. The plan shows rows, steps,
    memory, a sample with its targets, and keys without effect. On several GPUs: torchrun --nproc_per_node 8
    -m vlmpack train --config train.yaml. Continue a stopped run with resume_from_checkpoint=true.
    """
    check_extra("train", "accelerate", needed_by="`vlmpack train`")
    if given.help_config:
        print_keys(Console())
        return
    keys = read_config(given.config, given.settings or ())
    with quiet_transformers(SkippedWarning, UnpackedWarning):
        from vlmpack.cli.train_run import TrainRun

        run = TrainRun(keys, quiet=given.quiet)
        console = Console(quiet=given.as_json or run.args.process_index > 0)
        numbers = run.to_dict()
        for name, table in run.measured.items():
            print_refused(table, console, of=name)
        print_plan(numbers, console)
        with redirect_stdout(sys.stderr):  # Trainer's own lines
            result = None if given.dry_run else run.train()
    if result is not None:
        print_result(result, console)
    if run.args.process_index == 0:
        given.print_json({**numbers, "result": result})


def print_plan(numbers: Mapping[str, Any], console: Console) -> None:
    """Print the plan of a training."""
    facts = {name: value for name, value in numbers.items() if isinstance(value, str | int | float)}
    facts |= {"fill": f"{numbers['fill']:.1%}", "samples_per_update": f"{numbers['samples_per_update']:,.1f}"}
    memory = {name: format_bytes(size) for name, size in numbers["memory"].items() if size is not None}
    print_facts(console, facts | {f"memory, {name}": size for name, size in memory.items()})
    text = Text()
    for part in numbers["sample"]:
        text.append(*((f"[[{part['text']}]]", "green") if part["trained_on"] else (part["text"], "dim")))
    print_text(console, Text("\nA sample, with its targets in [[brackets]]:"))
    console.print(text[:SHOWN] + Text(" ..." if len(text) > SHOWN else ""), soft_wrap=not console.is_terminal)
    for name, why in numbers["ignored"].items():
        print_text(console, Text(f"{name} has no effect: {why}", "yellow"))


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Print losses and answers before and after, and the folders of the weights."""
    for name in ("before", "after"):
        if (state := result[name]) is not None:
            answer = f", an answer: {state['answer']!r}" if state["answer"] else ""
            print_text(console, Text(f"{name}: loss on the held-out samples {state['loss']:.4f}{answer}"))
    merged = f"; with merged adapters: {result['merged']}" if result["merged"] else ""
    print_text(console, Text(f"saved: {result['saved']}{merged}"))
