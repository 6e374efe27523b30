"""`vlmpack doctor`: report the environment, and probe whether packed samples equal the same samples alone."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, final

import typer
from rich.console import Console
from rich.markup import escape

from vlmpack.cli import options
from vlmpack.cli.inputs import named_processor, quiet_transformers, tiny_family
from vlmpack.cli.progress import waiting
from vlmpack.errors import ConfigError
from vlmpack.terminal import make_table, print_table, print_text, text_column

if TYPE_CHECKING:
    import torch

    from vlmpack.probing.report import Report
    from vlmpack.probing.weights import Loaded

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
"""Packages, with the modules of those that are often installed and yet do not import."""
IMPORT_TIMEOUT_S = 120
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 128, 32, 8
"""The attention of the released 8B models, by which back-ends are judged."""
ALL = "all"
MADE_HERE = "made here with random weights"


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help='What to probe: hub id or folder of a model; or "tiny", "tiny:FAMILY": a small random one made here. '
            "By default every family, made here."
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Probe packed samples against the same samples alone.")
    ] = False,
    device: options.Device = None,
    dtype: Annotated[
        str | None,
        options.word(*options.DTYPES, help="float32 or bfloat16; by default float32, of every family on cuda both."),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            "--attn",
            help="Attention back-end, or all that can serve; by default the first that can, and of every family all.",
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Probe a tiny copy of the configuration even if the weights fit.")
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Report versions, devices and attention back-ends; with --probe, compare packed samples with each sample alone.

    A probe changes one sample and watches the others; compares logits, loss and gradients of a packed row with those of
    each sample alone; runs each mechanism by itself; counts work; and gives plain transformers the same row. Where the
    weights do not fit, it probes a tiny random copy of the model's configuration.

    The exit status is 0 if everything is exact, 1 if not, 2 for a refusal.
    """
    console = Console(quiet=as_json)
    if probe:
        from vlmpack.cli.probe_tables import print_reports

        quiet = quiet or (as_json and sys.stdout.isatty())
        reports = _probe(model, quiet=quiet, device=device, dtype=dtype, attention=attention, tiny=tiny)
        if as_json:
            is_exact = _write_reports(reports)
        else:
            is_exact = print_reports(reports, console, summarise=model is None or attention == ALL)
    else:
        values = {"MODEL": model, "--device": device, "--dtype": dtype, "--attention": attention}
        unused = [name for name, value in values.items() if value is not None] + ["--tiny"] * tiny
        if unused:
            raise ConfigError(f"{', '.join(unused)} only matters to a probe; add --probe, or leave it out")
        with waiting("importing what is installed", quiet=quiet):
            is_exact, parts = True, environment()
        print_environment(parts, console)
        if as_json:
            answer = {name: [entry._asdict() for entry in entries] for name, entries in parts.items()}
            typer.echo(json.dumps(answer, indent=2))
    raise typer.Exit(0 if is_exact else 1)


# ---------------------------------------------------------------------- environment


class Version(NamedTuple):
    """One package."""

    name: str
    """Its name for `pip`."""
    version: str | None
    """None: not installed."""
    problem: str | None = None
    """The error of its import, if it is installed and does not import."""
    note: str | None = None
    """What else there is to say of it: newer than the newest version that was tested."""


class Device(NamedTuple):
    """One device."""

    type: str
    """"cpu" or "cuda"."""
    name: str
    """Its name for people."""


class Serving(NamedTuple):
    """The reasons, if any, for which a back-end cannot serve a kind of call."""

    backend: str
    """Its name."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Element type of the call, or "any"."""
    reasons: tuple[str, ...]
    """Why it cannot; empty: it can."""


def environment() -> dict[str, Sequence[Any]]:
    """Collect versions, devices, and what serves attention and gated delta layers on them."""
    parts: dict[str, Sequence[Any]] = {"versions": versions(), "devices": devices()}
    types = list(dict.fromkeys(device.type for device in parts["devices"]))
    return {**parts, "attention": attention_serving(types), "gated_delta": gated_delta_serving(types)}


def versions() -> list[Version]:
    """Return the versions of Python and of every package that vlmpack works with."""
    from vlmpack.machine import NEWEST_TESTED, is_newer_than_tested, version_of

    def note(name: str) -> str | None:
        version = installed[name]
        is_newer = version is not None and is_newer_than_tested(name, version)
        return f"newer than {NEWEST_TESTED[name]}, the newest tested: probe it" if is_newer else None

    installed = {name: version_of(name) for name in PACKAGES}
    modules = {name: module for name, module in PACKAGES.items() if module and installed[name]}
    with ThreadPoolExecutor() as pool:
        problems = dict(zip(modules, pool.map(import_problem, modules.values()), strict=True))
    packages = [Version(name, installed[name], problems.get(name), note(name)) for name in PACKAGES]
    return [Version("python", platform.python_version()), *packages]


def import_problem(module: str) -> str | None:
    """Return the last line of what importing `module` raises; None: it imports.

    It runs in another process: a torchvision that does not fit torch registers half of its operators before it fails.
    """
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    return f"does not import: {(done.stderr.strip().splitlines() or ['it ended without a word'])[-1]}"


def devices() -> list[Device]:
    """Return the CPU, and the CUDA devices if there are any."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu = Device("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")
    return [cpu, *(Device("cuda", torch.cuda.get_device_name(i)) for i in range(count))]


def attention_serving(device_types: Sequence[str]) -> list[Serving]:
    """Return the reasons of every attention back-end for calls in float32 and bfloat16 on these types of device."""
    import torch

    from vlmpack.attention.backends import AttentionCall, explain

    heads: dict[str, Any] = {"head_dim": HEAD_DIM, "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    return [
        Serving(backend, device, str(dtype).removeprefix("torch."), tuple(reasons))
        for device in device_types
        for dtype in (torch.float32, torch.bfloat16)
        for backend, reasons in explain(AttentionCall(device=device, dtype=dtype, **heads)).items()
    ]


def gated_delta_serving(device_types: Sequence[str]) -> list[Serving]:
    """Return whether flash-linear-attention can train gated delta layers on these types of device."""
    import torch

    from vlmpack.families.registry import FAMILIES
    from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla

    try:
        is_used = uses_fla(next(family for family in FAMILIES.values() if family.has("gated_delta")))
    except Exception as error:  # of transformers' module, which imports what is installed
        why = (f"the layers' module of transformers does not import ({type(error).__name__}: {error})",)
        return [Serving("fla", name, "any", why) for name in device_types]
    if not is_used:
        why = ("transformers has not found it; rows are computed in batches of samples of like length",)
        return [Serving("fla", name, "any", why) for name in device_types]
    calls = {name: FlaCall.of(torch.device(name), training=True) for name in device_types}
    return [Serving("fla", name, "any", tuple(call.unsupported())) for name, call in calls.items()]


def print_environment(parts: Mapping[str, Sequence[Any]], console: Console) -> None:
    """Print a table for each part of the environment."""
    heads = f"heads {NUM_HEADS}, key-value heads {NUM_KV_HEADS}, head dimension {HEAD_DIM}"
    sections = {
        "Versions": [_version_row(entry) for entry in parts["versions"]],
        "Devices": [(entry.type, "", "", entry.name) for entry in parts["devices"]],
        f"Attention back-ends[/] [dim]({heads})": [_serving_row(entry) for entry in parts["attention"]],
        "Gated delta layers[/] [dim](training)": [_serving_row(entry) for entry in parts["gated_delta"]],
    }
    for title, rows in sections.items():
        console.print(f"[bold]{title}[/]", highlight=False)
        table = make_table("", "", "", text_column(""), header=False)
        for name, *cells in rows:
            table.add_row(f"  {name}", *cells)
        print_table(console, table)
        console.print()
    print_text(console, "`vlmpack doctor --probe` probes whether packed samples leak into each other here.")


def _version_row(entry: Version) -> tuple[str, ...]:
    said = f"[yellow]{escape(entry.problem)}[/]" if entry.problem else f"[dim]{escape(entry.note or '')}[/]"
    return entry.name, entry.version or "[dim]not installed[/]", "", said


def _serving_row(entry: Serving) -> tuple[str, ...]:
    answer = f"[dim]no: {escape('; '.join(entry.reasons))}[/]" if entry.reasons else "[green]yes[/]"
    return entry.device, entry.dtype, entry.backend, answer


# ---------------------------------------------------------------------- probes


def _write_reports(reports: Iterable[Report]) -> bool:
    """Write one JSON object, each report as it comes, and close it also after an error or Ctrl-C.

    Returns:
        True if every report is exact.
    """
    verdicts: list[str] = []
    is_complete = False
    try:
        for report in reports:
            typer.echo("," if verdicts else '{\n  "probes": [')
            typer.echo(indent(json.dumps(report.to_dict(), indent=2), " " * 4), nl=False)  # flushes
            verdicts.append(report.verdict)
        is_complete = True
    finally:
        is_healthy = is_complete and {*verdicts} == {"exact"}
        if verdicts:
            ends = {"complete": is_complete, "healthy": is_healthy}
            typer.echo("\n  ]," + json.dumps(ends, indent=2).removeprefix("{"))
    return is_healthy


def _probe(
    model: str | None, *, quiet: bool, device: str | None, dtype: str | None, attention: str | None, tiny: bool
) -> Iterator[Report]:
    """Probe one model, or every family. Of every family, what one raises is its verdict.

    Raises:
        ConfigError: the model cannot be read, or a back-end or device does not exist. FamilyError: the family cannot be
            packed exactly, or is unknown.
    """
    if model is not None:
        options.refuse_file("", model)
    from vlmpack.attention.backends import BACKENDS

    if attention is not None:  # before a model is read
        options.check_word("--attention", attention, ("auto", *BACKENDS, ALL))
    if model is None and attention is None:
        attention = ALL
    place = options.torch_device(device)
    dtypes = _dtypes(model, place, dtype)
    recipes = _recipes(model, place, dtypes, tiny=tiny)
    total = None if model is not None else len(recipes)
    with quiet_transformers(), waiting("reading the model", quiet=quiet, total=total) as progress:
        for done, recipe in enumerate(recipes):
            plain = recipe.dtype == dtypes[0]
            try:
                yield from _probes_of(recipe, attention, plain=plain, say=lambda what, done=done: progress(what, done))
            except Exception as error:
                if recipe.family is None:
                    raise
                yield _failed_report(recipe, place.type, attention, error)


def _dtypes(name: str | None, device: torch.device, dtype: str | None) -> list[torch.dtype]:
    """List the element types to be probed: the one of this name, or float32, of every family on CUDA both."""
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype is not None:
        return [dtypes[dtype]]
    return [torch.float32] if name is not None or device.type == "cpu" else list(dtypes.values())


@final
@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """A model to be probed."""

    family: str | None
    """The family of which it is made here; None: it is the model that was named."""
    dtype: torch.dtype
    """Element type of its weights."""
    make: Callable[[], Loaded]
    """Load or make it."""


def _recipes(name: str | None, device: torch.device, dtypes: Sequence[torch.dtype], *, tiny: bool) -> list[_Recipe]:
    """List the models to be probed: the one of this name, or one of every family."""
    from vlmpack.families.registry import FAMILIES
    from vlmpack.probing.weights import load

    made_here = None if name is None else tiny_family(name)
    if name is None:
        return [
            _Recipe(family=family, dtype=each, make=partial(_made_here, family, device, each))
            for family in FAMILIES
            for each in dtypes
        ]
    if made_here is not None:
        makes = [partial(_made_here, made_here, device, each, named=name) for each in dtypes]
    else:
        makes = [partial(load, name, device=device, dtype=each, tiny=tiny) for each in dtypes]
    return [_Recipe(family=None, dtype=each, make=make) for each, make in zip(dtypes, makes, strict=True)]


def _made_here(family: str, device: torch.device, dtype: torch.dtype, *, named: str | None = None) -> Loaded:
    """Make a tiny model; one that was named goes with a processor, if there is a tiny one of its family.

    Raises:
        FamilyError: the family is unknown.
    """
    from vlmpack.families.registry import family_named
    from vlmpack.probing.weights import Loaded
    from vlmpack.testing.models import tiny_model
    from vlmpack.testing.processors import processor_families

    family_named(family)  # refuses an unknown one
    processor = named_processor(named) if named and family in processor_families() else None
    model = tiny_model(family, dtype=dtype, processor=processor).to(device)
    return Loaded(model=model, processor=processor, weights=MADE_HERE)


def _probes_of(recipe: _Recipe, attention: str | None, *, plain: bool, say: Callable[[str], None]) -> Iterator[Report]:
    """Probe a model by one back-end, or by each that can serve; `plain`: with plain transformers in the first."""
    from vlmpack.probing.run import backends_for, probe

    loaded = recipe.make()
    family = loaded.model.config.model_type
    for at, backend in enumerate(backends_for(loaded.model) if attention == ALL else [attention]):
        what = f"{family}, {backend}" if backend else family
        report = probe(
            loaded.model,
            loaded.processor,
            attention=backend,
            plain=plain and at == 0,
            progress=lambda part, what=what: say(f"{what}: {part}"),
        )
        yield replace(report, weights=loaded.weights)


def _failed_report(recipe: _Recipe, device: str, attention: str | None, error: Exception) -> Report:
    """Report what raised before anything could be checked."""
    from vlmpack.probing.report import Check, Report

    return Report(
        model="not known",
        family=str(recipe.family),
        weights=MADE_HERE,
        device=device,
        dtype=str(recipe.dtype).removeprefix("torch."),
        attention=attention or "auto",
        samples=(),
        row_tokens=0,
        checks=(Check.raised("equality", "probe", error),),
        circumstances={},
        plain=(),
    )
