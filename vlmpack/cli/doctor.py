"""`vlmpack doctor`: report the environment, and probe whether packed samples equal the same samples alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer import Argument, Option

from vlmpack.cli import options
from vlmpack.errors import ConfigError, check_choice
from vlmpack.terminal import number_columns, print_table, print_text, progress_lines, quiet_transformers, text_column

if TYPE_CHECKING:
    from vlmpack.probing.report import Check, Report

PACKAGES = {
    "vlmpack": None,
    "torch": None,
    "transformers": None,
    "accelerate": None,
    "peft": None,
    "flash-attn": "flash_attn",
    "fla-core": "fla",
    "causal-conv1d": "causal_conv1d",
    "qwen-vl-utils": "qwen_vl_utils",
    "torchvision": "torchvision",
}
"""Packages; with the module to import, if installed versions often fail to import."""
IMPORT_TIMEOUT_S = 120
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 128, 32, 8
"""Attention of the released 8B models, for which back-ends are checked."""
TITLES = {
    "versions": "Versions",
    "devices": "Devices",
    "attention": f"Attention back-ends[/] [dim](heads {NUM_HEADS}, key-value heads {NUM_KV_HEADS}, head dimension "
    f"{HEAD_DIM}; those without reasons serve)",
    "gated_delta": "Gated delta layers[/] [dim](training; without reasons, it serves)",
    "layers": "Attention layers of the model",
}
"""Parts of the environment, and the titles of their tables."""
ALL = "all"
PARTS = {
    "isolation": "isolation: how much other samples change",
    "equality": "equality: packed against alone",
    "autocast": "equality, under autocast",
    "mechanism": "each mechanism on its own",
    "work": "work",
}
"""Parts of a report, and their titles."""
COLORS = {"ok": "green", "exact": "green", "leaks": "red", "differs": "red", "fails": "red"}
CAPTION = """\
[dim]Errors are fractions of the largest entry (of the logits, or of a parameter's
gradient); a gradient's error is that of the worst parameter, and value is the
worst of all ways. A limit is the rounding error of float32, plus twice the error
of the model without packing.[/]
"""
PLAIN_CAPTION = """\
[dim]leak    how much a sample's logits change when only another sample changes
logits  how much they differ from those of the sample alone
pairs   of query and key, per layer[/]
"""
SUMMARY = "{:<22} {:<25} {:>6} {:>6}"
"""A line of the summary without its verdict. It is printed line by line, and fits 80 characters."""
SUMMARY_CAPTION = """
[dim]leak   how much a sample's logits change when only another sample changes
error  how much the row differs from its samples alone, relative to the largest entry[/]
"""
MESH = ("tp", "fsdp", "dp_replicate", "ep", "context")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(options.OutputOptions):
    """What is reported or probed."""

    model: Annotated[str | None, Argument()] = None
    """Hub id or folder of a model; or "tiny", "tiny:FAMILY": a small random one. Without --probe, name the kernel of
    each of its attention layers. With it, by default a small random model of every family."""
    probe: bool = False
    """Compare packed samples with the same samples alone."""
    device: options.Device | None = None
    """Device; by default cuda if there is one."""
    dtype: options.Dtype | None = None
    """By default float32; for every family on cuda, both. Without --probe, on cuda bfloat16."""
    attention: Annotated[str | None, Option("--attention", "--attn", metavar="BACKEND")] = None
    """Attention back-end, or "all" available ones; by default the first, or all if every family is probed."""
    tiny: bool = False
    """Probe a tiny copy of the configuration even if the weights fit."""
    mesh: Annotated[str | None, Option(metavar="SIZES")] = None
    """Divide MODEL over the ranks of torchrun, by one of transformers' meshes: sizes of tp, fsdp, ep and dp_replicate,
    joined by commas; context: how many of the fsdp ranks (alone: of all) share a row. Rank 0 prints."""


@options.with_options
def doctor(given: DoctorOptions) -> None:
    """Report versions, devices and attention back-ends, and which serve MODEL; with --probe, compare packed and alone.

    A probe changes one sample and checks that the others stay the same, compares logits, loss and gradients, checks
    each mechanism on its own, counts work, and shows what plain transformers makes of the same row. If the weights do
    not fit into memory, it probes a tiny random copy of the model's configuration. The exit status is 1 if something
    is not exact.
    """
    is_first = given.mesh is None or os.environ.get("RANK", "0") == "0"
    console = Console(quiet=given.as_json or not is_first)
    if given.probe:
        quiet = given.quiet or (given.as_json and sys.stdout.isatty()) or not is_first
        sizes = _mesh_sizes(given.mesh, given.model)
        with _job(sizes, given.device):
            reports = _probe(given, sizes, quiet=quiet)
            summarize = given.model is None or given.attention == ALL
            is_exact = show_reports(reports, console, summarize=summarize, as_json=given.as_json and is_first)
        raise typer.Exit(0 if is_exact else 1)
    of_probe = ("attention", "mesh", "tiny") if given.model else ("attention", "mesh", "device", "dtype", "tiny")
    if unused := [f"--{name}" for name in of_probe if getattr(given, name)]:
        raise ConfigError(f"{', '.join(unused)} only applies to a probe; add --probe, or leave it out")
    with progress_lines("importing packages", quiet=given.quiet):
        parts = environment()
    if given.model is not None:
        from vlmpack.cli.layers import attention_layers
        from vlmpack.cli.models import read_config

        device = options.torch_device(given.device).type
        dtype = given.dtype or ("bfloat16" if device == "cuda" else "float32")
        with quiet_transformers():
            parts["layers"] = attention_layers(read_config(given.model), device=device, dtype=dtype)
    print_environment(parts, console)
    given.print_json(parts)


# ---------------------------------------------------------------------- environment


Entries = list[dict[str, Any]]
"""Part of the output, ready for JSON: docs/command.md lists the keys."""


def environment() -> dict[str, Entries]:
    """Collect versions, devices, and which back-ends serve attention and gated delta layers on them."""
    here = devices()
    types = list(dict.fromkeys(device["type"] for device in here))
    serving = {"attention": attention_serving(types), "gated_delta": gated_delta_serving(types)}
    return {"versions": versions(), "devices": here, **serving, "layers": []}


def versions() -> Entries:
    """Return the versions of Python and of the packages that vlmpack works with. A missing package has none."""
    from vlmpack.machine import NEWEST_TESTED, is_newer_than_tested, version_of

    modules = {name: module for name, module in PACKAGES.items() if module and version_of(name)}
    with ThreadPoolExecutor() as pool:
        problems = dict(zip(modules, pool.map(import_problem, modules.values()), strict=True))
    entries = [{"name": "python", "version": platform.python_version(), "problem": None, "note": None}]
    for name in PACKAGES:
        version = version_of(name)
        is_newer = version is not None and is_newer_than_tested(name, version)
        note = f"newer than {NEWEST_TESTED[name]}, the newest tested version: probe it" if is_newer else None
        entries.append({"name": name, "version": version, "problem": problems.get(name), "note": note})
    return entries


def import_problem(module: str) -> str | None:
    """Return the last line of the error of importing `module`; None: it imports.

    Imports it in another process, because a torchvision that does not fit torch registers half of its operators before
    it fails.
    """
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its import takes more than {IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    return f"does not import: {(done.stderr.strip().splitlines() or ['no error message'])[-1]}"


def devices() -> Entries:
    """Return the CPU and all CUDA devices."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu = {"type": "cpu", "name": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    return [cpu, *({"type": "cuda", "name": torch.cuda.get_device_name(at)} for at in range(count))]


def attention_serving(device_types: Sequence[str]) -> Entries:
    """Check every attention back-end for calls in float32 and bfloat16 on these types of device."""
    import torch

    from vlmpack.attention.backends import AttentionCall, explain

    heads: dict[str, Any] = {"head_dim": HEAD_DIM, "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    return [
        {"backend": backend, "device": device, "dtype": str(dtype).removeprefix("torch."), "reasons": reasons}
        for device in device_types
        for dtype in (torch.float32, torch.bfloat16)
        for backend, reasons in explain(AttentionCall(device=device, dtype=dtype, **heads)).items()
    ]


def gated_delta_serving(device_types: Sequence[str]) -> Entries:
    """Return whether flash-linear-attention can train gated delta layers on these types of device."""
    import torch

    from vlmpack.families.registry import FAMILIES
    from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla

    def reasons(name: str) -> list[str]:
        try:
            is_used = uses_fla(next(family for family in FAMILIES.values() if family.has("gated_delta")))
        except Exception as error:  # of transformers' module, which imports what is installed
            return [f"the layers' module of transformers does not import ({type(error).__name__}: {error})"]
        if not is_used:
            return ["transformers has not found it; samples of similar length are computed in batches"]
        return FlaCall.of(torch.device(name), training=True).unsupported()

    return [{"backend": "fla", "device": name, "dtype": "any", "reasons": reasons(name)} for name in device_types]


def print_environment(parts: Mapping[str, Entries], console: Console) -> None:
    """Print a table for each part of the environment, of the columns that JSON has."""
    for name, entries in parts.items():
        if entries:
            console.print(f"[bold]{TITLES[name]}[/]", highlight=False)
            *columns, last = entries[0]
            rows = ([Text(_cell(value)) for value in entry.values()] for entry in entries)
            print_table(console, (*columns, text_column(last)), rows)
            console.print()
    print_text(console, "`vlmpack doctor --probe` checks whether packed samples leak into each other on this machine.")


def _cell(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else "-" if value is None else str(value)


# ---------------------------------------------------------------------- probes


def _mesh_sizes(mesh: str | None, model: str | None) -> dict[str, int]:
    """Read --mesh.

    Raises:
        ConfigError: a size has another name or is no number, the sizes are not those of the job, or no model is named.
    """
    if mesh is None:
        return {}
    given = {name: size for name, _, size in (part.partition("=") for part in mesh.split(","))}
    if not given.keys() <= {*MESH} or not all(size.isdigit() and int(size) for size in given.values()):
        raise ConfigError(f"--mesh {mesh}: give sizes of {', '.join(MESH)}, joined by commas: tp=2,ep=2")
    if model is None:
        raise ConfigError(f"--mesh {mesh} divides one model: name it, or leave --mesh out")
    sizes = {name: int(size) for name, size in given.items()}
    context, of_data = sizes.get("context", 1), sizes.get("fsdp", 1) * sizes.get("dp_replicate", 1)
    if sizes.keys() == {"context"}:
        of_data = context  # each rank has the whole model
    if of_data % context:
        raise ConfigError(f"--mesh {mesh}: context ranks are some of the fsdp ranks: give fsdp={context} or a multiple")
    ranks, job = sizes.get("tp", 1) * of_data, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != job:
        started = f"torchrun --nproc_per_node {ranks} -m vlmpack doctor --probe {model} --mesh {mesh}"
        raise ConfigError(f"--mesh {mesh} takes {ranks} ranks, and this job has {job}: {started}")
    return sizes


@contextmanager
def _job(sizes: Mapping[str, int], device: str | None) -> Iterator[None]:
    """Join the ranks of torchrun, if the model is divided over them."""
    if not sizes:
        yield
        return
    import torch
    from torch import distributed as dist

    is_cuda = options.torch_device(device).type == "cuda"
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    yield
    dist.barrier()  # no rank may leave while another one still communicates
    dist.destroy_process_group()


def _probe(given: DoctorOptions, mesh: Mapping[str, int], *, quiet: bool) -> Iterator[Report]:
    """Probe one model, or a small one of every family; an error of a family is then its verdict.

    Plain transformers is run only for a single model.

    Raises:
        ConfigError: the model cannot be read, or a back-end or device does not exist. FamilyError: the family cannot be
            packed exactly, or is unknown.
    """
    import torch

    from vlmpack.attention.backends import BACKENDS
    from vlmpack.cli.models import load
    from vlmpack.context_parallel.mesh import Parallel
    from vlmpack.families.registry import FAMILIES
    from vlmpack.model.enable import enable_packing
    from vlmpack.probing.report import Check, Report
    from vlmpack.probing.run import backends_for, probe

    model, attention = given.model, given.attention
    if attention is not None:  # before a model is loaded
        check_choice("--attention", attention, ("auto", *BACKENDS, ALL))
    elif model is None:
        attention = ALL
    place = options.torch_device(given.device)
    dtypes = [given.dtype] if given.dtype else ["float32"] if model or place.type == "cpu" else ["float32", "bfloat16"]
    cases = [*product([f"tiny:{family}" for family in FAMILIES] if model is None else [model], dtypes)]
    total = len(cases) if model is None else None
    with quiet_transformers(), progress_lines("probing", quiet=quiet) as progress:
        for done, (name, each) in enumerate(cases):
            try:
                loaded = load(name, device=place, dtype=getattr(torch, each), tiny=given.tiny, mesh=mesh)
                if "context" in mesh:
                    enable_packing(loaded.model, parallel=Parallel(context=mesh["context"]))
                for at, backend in enumerate(backends_for(loaded.model) if attention == ALL else [attention]):
                    what = ", ".join(filter(None, (loaded.model.config.model_type, backend)))
                    report = probe(
                        loaded.model,
                        loaded.processor,
                        attention=backend,
                        plain=model is not None and at == 0,
                        progress=lambda part, what=what, done=done: progress("probing", done, total, f"{part}: {what}"),
                    )
                    yield replace(report, weights=loaded.weights)
            except Exception as error:
                if model is not None:
                    raise
                failed = Check.raised("equality", "probe", error)
                yield Report(
                    model="not known", family=name.partition(":")[2], weights="random weights", device=place.type,
                    dtype=each, attention=attention or "auto", samples=(), row_tokens=0, checks=(failed,),
                    circumstances={}, plain=(),
                )  # fmt: skip


# ---------------------------------------------------------------------- tables of probes


def show_reports(reports: Iterable[Report], console: Console, *, summarize: bool, as_json: bool) -> bool:
    """Print each report as it comes, in full or as one line; then all faults and the verdict.

    After an error or Ctrl-C, the verdict covers the reports so far. With `as_json`, all of them are one object.

    Returns:
        Whether every report is exact.
    """
    known: list[Report] = []
    is_complete = False
    try:
        for report in reports:
            if summarize and not known:
                console.print(SUMMARY.format("family", "row computed by", "leak", "error"), "verdict", highlight=False)
            (print_summary if summarize else print_report)(report, console)
            console.file.flush()
            known.append(report)
        is_complete = True
    finally:
        bad = [report for report in known if report.verdict != "exact"]
        if known and summarize:
            console.print(SUMMARY_CAPTION)
        if known:
            _print_verdict(bad, console, is_complete=is_complete)
        if known and as_json:
            ends = {"complete": is_complete, "healthy": is_complete and not bad}
            typer.echo(json.dumps({"probes": [report.to_dict() for report in known], **ends}, indent=2))
    return not bad


def _print_verdict(bad: Sequence[Report], console: Console, *, is_complete: bool) -> None:
    for report in bad:
        for check in report.checks:
            if check.is_bad:
                cause = f" [bold]{check.cause}[/]:" if check.cause else ""
                print_text(console, f"[red]{check.name} {check.finding}.[/]{cause} {escape(check.detail)}")
        name = f"{report.family}, {report.attention}"
        console.print(f"[red]{name}: {report.verdict}.[/] The cause: [bold]{', '.join(report.causes)}[/].")
    if any(report.verdict != "not deterministic" for report in bad):
        console.print("Do not train packed rows on this machine; please report this table.")
    elif bad:
        console.print("Nothing that could be compared leaks or differs; the rest could not be checked.")
    elif is_complete:
        console.print("[green]Exact:[/] every packed sample gets what it would get on its own.")
    if not is_complete:
        console.print("Not finished: only the listed models were probed.")


def print_summary(report: Report, console: Console) -> None:
    """Print a report as one line."""
    way = report.attention if report.dtype == "float32" else f"{report.attention}, {report.dtype}"
    parts = _checks_by_part(report)
    errors = [_number(_largest(check.value for check in parts[part])) for part in ("isolation", "equality")]
    line = SUMMARY.format(report.family, way, *errors)
    console.print(f"{escape(line)} {_colored(report.verdict)}", highlight=False, soft_wrap=True)


def print_report(report: Report, console: Console) -> None:
    """Print a report: its setting, all checks, and plain transformers for comparison."""
    console.print(f"[bold]{report.model}[/] [dim]({report.family})[/], {escape(report.weights)}", highlight=False)
    console.print(f"{report.device}, {report.dtype}, attention by {report.attention}", highlight=False)
    print_text(console, f"rows of up to {report.row_tokens} tokens: {'; '.join(report.samples)}")
    print_text(console, f"compared in: {'; '.join(report.circumstances.values())}\n")
    columns = ("what", *number_columns("value", "allowed"), text_column("finding"))
    print_table(console, columns, _check_lines(report))
    console.print(CAPTION)
    if report.plain:
        console.print("[bold]Plain transformers[/] on the same samples")
        columns = (text_column("given"), *number_columns("leak", "logits", "loss", "pairs"), text_column("verdict"))
        print_table(console, columns, _plain_lines(report))
        console.print(PLAIN_CAPTION)


def _checks_by_part(report: Report) -> dict[str, list[Check]]:
    parts: dict[str, list[Check]] = {part: [] for part in PARTS}
    for check in report.checks:
        is_mixed = check.part == "equality" and check.name.startswith("autocast: ")  # has other limits
        parts["autocast" if is_mixed else check.part].append(check)
    return parts


def _check_lines(report: Report) -> Iterator[Sequence[str]]:
    """Yield a line for each check; for each compared quantity, that of its worst value in all circumstances."""
    for part, checks in _checks_by_part(report).items():
        compared: dict[str, list[Check]] = {}
        for check in checks:
            circumstance, _, quantity = check.name.partition(": ")
            merges = part in ("equality", "autocast") and circumstance in report.circumstances
            compared.setdefault(quantity if merges else check.name, []).append(check)
        if compared:
            yield (f"[dim]{PARTS[part]}[/]",)
        for name, alike in compared.items():
            numbers = (_number(_largest(getattr(each, of) for each in alike)) for of in ("value", "allowed"))
            findings = dict.fromkeys(each.finding for each in alike if each.finding != "ok") or ["ok"]
            notes = "; ".join(dict.fromkeys(each.detail for each in alike if each.detail and not each.is_bad))
            yield f"  {name}", *numbers, f"{', '.join(map(_colored, findings))} [dim]{escape(notes)}[/]"


def _plain_lines(report: Report) -> Iterator[Sequence[str]]:
    for plain in report.plain:
        why = ", ".join(plain.causes) or escape(plain.detail)
        numbers = map(_number, (plain.leak, plain.logits, plain.loss, plain.pairs))
        color = "green" if plain.verdict == "exact" else "yellow"
        yield plain.name, *numbers, f"[{color}]{plain.verdict}[/]{f': {why}' if why else ''}"


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _colored(finding: str) -> str:
    return f"[{COLORS.get(finding, 'dim')}]{finding}[/]"


def _number(value: float | None) -> str:
    """Format errors with one digit, and counts in full."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{int(value):,}" if value >= 1 and float(value).is_integer() else f"{value:.0e}"
