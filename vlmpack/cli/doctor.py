"""`vlmpack doctor`: report the environment, and probe whether packed samples equal the same samples alone."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlmpack.cli import options
from vlmpack.cli.inputs import named_processor, quiet_transformers, tiny_family
from vlmpack.cli.tables import make_table, numbers, print_table, print_text, wrapped
from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from vlmpack.proof import Check, Loaded, Report

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
PARTS = {
    "isolation": "isolation: how far other samples move",
    "mechanism": "mechanisms, each by itself",
    "work": "work",
}
GRADIENT = "gradient of "
ROUTERS = ("load-balancing loss", "routers' part of the loss", "routers' gradient")
COLOURS = {"ok": "green", "exact": "green", "leaks": "red", "differs": "red", "fails": "red"}
PLAIN_COLOURS = {"exact": "green", "leaks": "yellow", "differs": "yellow", "fails": "yellow"}
CAPTION = """\
[dim]Errors are parts of the largest entry (of logits, or of each parameter's
gradient); gradients are those of the worst parameter, and seen is the worst of
all circumstances but autocast. A limit is what float32 accounts for, and twice
the error that the model makes without packing.[/]
"""
PLAIN_CAPTION = """\
[dim]leak    how far a sample's logits move when only another one changes
logits  how far they are from those of the sample alone
pairs   of query and key, a layer[/]
"""
SUMMARY_CAPTION = """\
[dim]leak   how far a sample's logits move when only another one in the row changes
rest   how far the row is from its samples alone; as parts of the largest entry
plain  unmodified transformers, given the same row with positions that restart
       and nothing else: what packing by hand comes to[/]
"""


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
        options.word(
            *options.DTYPES, help="float32 or bfloat16; by default float32, and of every family on cuda both."
        ),
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
) -> None:
    """Report versions, devices and attention back-ends; with --probe, prove that packed samples equal themselves alone.

    A probe changes one sample and watches the others; compares logits, loss and gradients of a packed row with those of
    each sample alone; runs each mechanism by itself; counts work; and gives plain transformers the same row. Where the
    weights do not fit, it probes a tiny random copy of the model's configuration.

    The exit status is 0 if everything is exact, 1 if not, 2 if it cannot be run as asked.
    """
    console = Console(quiet=as_json)
    if probe:
        reports = _probe(model, console, device=device, dtype=dtype, attention=attention, tiny=tiny)
        is_exact = all(report.verdict == "exact" for report in reports)
        answer: dict[str, Any] = {"probes": [report.to_dict() for report in reports], "healthy": is_exact}
        print_reports(reports, console, summarise=model is None or attention == ALL)
    else:
        values = {
            "MODEL": model,
            "--device": device,
            "--dtype": dtype,
            "--attention": attention,
            "--tiny": tiny or None,
        }
        if unused := [name for name, value in values.items() if value is not None]:
            raise ConfigError(f"{', '.join(unused)} only matters to a probe; add --probe, or leave it out")
        is_exact, parts = True, _environment()
        answer = {name: [entry._asdict() for entry in entries] for name, entries in parts.items()}
        print_environment(parts, console)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    raise typer.Exit(0 if is_exact else 1)


# ---------------------------------------------------------------------- environment


class Version(NamedTuple):
    """One package."""

    name: str
    """As `pip` names it."""
    version: str | None
    """None: not installed."""
    problem: str | None = None
    """The error of its import, if it is installed and does not import."""


class Device(NamedTuple):
    """One device."""

    type: str
    """"cpu" or "cuda"."""
    name: str
    """Its name for people."""


class Serving(NamedTuple):
    """Whether one back-end can serve one kind of call."""

    backend: str
    """Its name."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Element type of the call, or "any"."""
    reasons: tuple[str, ...]
    """Why it cannot; empty: it can."""


def _environment() -> dict[str, Sequence[Any]]:
    found = devices()
    types = list(dict.fromkeys(device.type for device in found))
    return {
        "versions": versions(),
        "devices": found,
        "attention": attention_serving(types),
        "gated_delta": gated_delta_serving(types),
    }


def versions() -> list[Version]:
    """Return the versions of Python and of every package that vlmpack works with."""
    installed = {name: installed_version(name) for name in PACKAGES}
    modules = {name: module for name, module in PACKAGES.items() if module and installed[name]}
    with ThreadPoolExecutor() as pool:
        problems = dict(zip(modules, pool.map(import_problem, modules.values()), strict=True))
    packages = [Version(name, installed[name], problems.get(name)) for name in PACKAGES]
    return [Version("python", platform.python_version()), *packages]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed.

    An imported module's version comes first: the build, such as "+cu132" of PyTorch, is not always in the metadata.
    """
    module = sys.modules.get(package.replace("-", "_"))
    if module is not None and (imported := vars(module).get("__version__")) is not None:
        return str(imported)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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

    from vlmpack.attention import AttentionCall, explain

    heads = {"head_dim": HEAD_DIM, "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    return [
        Serving(backend, device, str(dtype).removeprefix("torch."), tuple(reasons))
        for device in device_types
        for dtype in (torch.float32, torch.bfloat16)
        for backend, reasons in explain(AttentionCall(device=device, dtype=dtype, **heads)).items()
    ]


def gated_delta_serving(device_types: Sequence[str]) -> list[Serving]:
    """Return whether flash-linear-attention can train gated delta layers on these types of device."""
    import torch

    from vlmpack.families import FlaCall, family_named

    delta = family_named("qwen3_5").delta
    assert delta is not None
    if not delta.uses_fla():
        why = ("transformers has not found it; rows are computed in batches of samples of like length",)
        return [Serving("fla", name, "any", why) for name in device_types]
    calls = {name: FlaCall.of(torch.device(name), training=True) for name in device_types}
    return [Serving("fla", name, "any", tuple(call.unsupported())) for name, call in calls.items()]


def print_environment(parts: Mapping[str, Sequence[Any]], console: Console) -> None:
    """Print versions, devices, and what serves attention and gated delta layers."""
    console.print("[bold]Versions[/]")
    print_table(console, _versions(parts["versions"]))
    console.print("\n[bold]Devices[/]")
    for entry in parts["devices"]:
        console.print(f"  {entry.type:<5} {entry.name}")
    console.print("\n[bold]Attention back-ends[/] [dim](heads 32, key-value heads 8, head dimension 128)[/]")
    print_table(console, _serving(parts["attention"]))
    console.print("\n[bold]Gated delta layers[/] [dim](Qwen3.5, Qwen3-Next; training)[/]")
    print_table(console, _serving(parts["gated_delta"]))
    console.print(
        "\n`vlmpack doctor --probe` probes whether packed samples leak into each other here.", highlight=False
    )


def _versions(entries: Sequence[Version]) -> Table:
    table = make_table("package", "version", wrapped("problem"), header=False)
    for entry in entries:
        problem = f"[yellow]{escape(entry.problem)}[/]" if entry.problem else ""
        table.add_row(f"  {entry.name}", entry.version or "[dim]not installed[/]", problem)
    return table


def _serving(entries: Sequence[Serving]) -> Table:
    table = make_table("device", "dtype", "back-end", wrapped("serves"), header=False)
    for entry in entries:
        answer = f"[dim]no: {escape('; '.join(entry.reasons))}[/]" if entry.reasons else "[green]yes[/]"
        table.add_row(f"  {entry.device}", entry.dtype, entry.backend, answer)
    return table


# ---------------------------------------------------------------------- probes


def _probe(
    model: str | None, console: Console, *, device: str | None, dtype: str | None, attention: str | None, tiny: bool
) -> list[Report]:
    """Probe one model, or every family.

    Raises:
        ConfigError: the model cannot be read, or a back-end or device does not exist. FamilyError: the family cannot be
            packed exactly, or is unknown.
    """
    if model is not None:
        options.refuse_file("", model)
    from vlmpack.attention import BACKENDS
    from vlmpack.proof import backends_for, probe

    choices = ("auto", *BACKENDS, ALL)
    if attention is not None and attention not in choices:  # before a model is read
        raise ConfigError(f"--attention {attention}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    if model is None and attention is None:
        attention = ALL
    reports: list[Report] = []
    place = options.torch_device(device)
    with quiet_transformers(), console.status("reading the model") as status:
        for loaded in _models(model, place, dtype, tiny=tiny):
            for backend in backends_for(loaded.model) if attention == ALL else [attention]:
                family = loaded.model.config.model_type
                what = f"{family}, {backend}" if backend else family
                report = probe(
                    loaded.model,
                    loaded.processor,
                    attention=backend,
                    plain=not reports or reports[-1].family != family,
                    progress=lambda part, what=what: status.update(f"probing {what}: {part}"),
                )
                reports.append(replace(report, weights=loaded.weights))
    return reports


def _models(name: str | None, device: torch.device, dtype: str | None, *, tiny: bool) -> Iterator[Loaded]:
    """Load or make the models to be probed: the one of this name, or one of every family.

    Raises:
        ConfigError: the model cannot be read. FamilyError: the family cannot be packed exactly, or is unknown.
    """
    import torch

    from vlmpack.families import FAMILIES, family_named
    from vlmpack.families.tiny import tiny_model
    from vlmpack.proof import Loaded, load

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype is not None:
        dtypes = {dtype: dtypes[dtype]}
    elif name is not None or device.type == "cpu":
        del dtypes["bfloat16"]
    made = None if name is None else tiny_family(name)
    if name is not None and made is None:
        for each in dtypes.values():
            yield load(name, device=device, dtype=each, tiny=tiny)
        return
    for family in FAMILIES if made is None else [made]:
        processor = named_processor(name) if name and family_named(family).has_vision else None
        for each in dtypes.values():
            model = tiny_model(family, dtype=each, processor=processor).to(device)
            yield Loaded(model=model, processor=processor, weights="made here with random weights")


def print_reports(reports: Sequence[Report], console: Console, *, summarise: bool) -> None:
    """Print each report in full, or a line each; then every fault, and the verdict."""
    if summarise:
        print_table(console, _summary(reports))
        console.print(SUMMARY_CAPTION)
    else:
        for report in reports:
            print_report(report, console)
    bad = [report for report in reports if report.verdict != "exact"]
    for report in bad:
        for check in report.checks:
            if check.is_bad:
                cause = f" [bold]{check.cause}[/]:" if check.cause else ""
                print_text(console, f"[red]{check.name} {check.finding}.[/]{cause} {escape(check.detail)}")
        name = f"{report.family}, {report.attention}"
        console.print(f"[red]{name}: {report.verdict}.[/] The cause: [bold]{', '.join(report.causes)}[/].")
    if not bad:
        console.print("[green]Exact:[/] every packed sample is what it would have been alone.")
    elif all(report.verdict == "not deterministic" for report in bad):
        console.print("Nothing that could be compared leaks or differs; the rest is not proved.")
    else:
        console.print("Do not train packed rows here; please report this table.")


def print_report(report: Report, console: Console) -> None:
    """Print one report: where it was made, every check, and plain transformers for contrast."""
    console.print(f"[bold]{report.model}[/] [dim]({report.family})[/], {escape(report.weights)}", highlight=False)
    console.print(f"{report.device}, {report.dtype}, attention by {report.attention}", highlight=False)
    print_text(console, f"rows of up to {report.row_tokens} tokens: {'; '.join(report.samples)}\n")
    for table in (_checks(report.checks), _circumstances(report), _gradients(report.checks)):
        print_table(console, table)
    console.print(CAPTION)
    if report.plain:
        console.print("[bold]Plain transformers[/], given the same samples")
        print_table(console, _plain(report))
        console.print(PLAIN_CAPTION)


def _summary(reports: Sequence[Report]) -> Table:
    """Make a line for each report, and below those of a family, plain transformers."""
    seen = numbers("leak", "logits", "loss", "gradients")
    table = make_table(wrapped("family"), wrapped("row computed by"), *seen, "verdict")
    for family in dict.fromkeys(report.family for report in reports):
        of_family = [report for report in reports if report.family == family]
        rows = [_summary_row(report) for report in of_family]
        for plain in (plain for report in of_family for plain in report.plain[:-1]):
            way = f"plain, {plain.name.removeprefix('one row, ').removesuffix(' positions')}"
            cells = [_number(value) for value in (plain.leak, plain.logits, plain.loss, None)]
            rows.append([way, *cells, _coloured(plain.verdict, PLAIN_COLOURS)])
        for i, row in enumerate(rows):
            table.add_row("" if i else family, *row, end_section=i + 1 == len(rows))
    return table


def _summary_row(report: Report) -> list[str]:
    way = report.attention if report.dtype == "float32" else f"{report.attention}, {report.dtype}"
    # Mixed precision stands apart: its limits are others.
    equality = [c for c in report.checks if c.part == "equality" and not c.name.startswith("autocast: ")]
    columns = [[check for check in report.checks if check.part == "isolation"]]
    columns += [
        [check for check in equality if check.name.partition(": ")[2].startswith(what)]
        for what in ("logits", "loss", "gradient")
    ]
    return [way, *(_number(_largest(column)) for column in columns), _coloured(report.verdict)]


def _checks(checks: Sequence[Check]) -> Table:
    table = make_table("what", *numbers("seen", "allowed"), wrapped("finding"))
    for part, title in PARTS.items():
        table.add_row(f"[dim]{title}[/]")
        for check in (check for check in checks if check.part == part):
            note = f" [dim]{escape(check.detail)}[/]" if check.detail and not check.is_bad else ""
            finding = _coloured(check.finding) + note
            table.add_row(f"  {check.name}", _number(check.seen), _number(check.allowed), finding)
        table.add_section()
    return table


def _circumstances(report: Report) -> Table:
    """Make a line for each circumstance, and for each comparison that belongs to none of the columns."""
    seen = numbers("logits", "loss", "samples'", "gradients")
    table = make_table(wrapped("against each sample alone"), *seen, wrapped("finding"))
    equality = [check for check in report.checks if check.part == "equality"]
    for circumstance, title in report.circumstances.items():
        checks = {
            check.name.removeprefix(f"{circumstance}: "): check
            for check in equality
            if check.name.partition(": ")[0] == circumstance
        }
        if checks:
            columns = [[checks[key]] if key in checks else [] for key in ("logits", "loss", "sample losses")]
            columns.append([check for key, check in checks.items() if key.startswith(GRADIENT)])
            table.add_row(title, *(_number(_largest(column)) for column in columns), _findings(checks.values()))
    for check in equality:
        if check.name.partition(":")[0] not in report.circumstances:
            table.add_row(check.name, "", "", "", "", _coloured(check.finding))
    for router in ROUTERS:
        if found := [check for check in equality if check.name.endswith(router)]:
            worst = _number(_largest(found) or 0.0)
            cells = ("", "", "", worst) if "gradient" in router else ("", worst, "", "")
            table.add_row(f"  {router}", *cells, _findings(found))
    return table


def _gradients(checks: Sequence[Check]) -> Table:
    """Make a line for each group of parameters: the worst of all circumstances, and mixed precision.

    They stand below their part of the model, so that a name fits a narrow terminal.
    """
    groups: dict[str, list[Check]] = {}
    for check in checks:
        group = check.name.partition(": ")[2]
        if check.part == "equality" and group.startswith(GRADIENT):
            groups.setdefault(group, []).append(check)
    seen = numbers("seen", "allowed", "autocast")
    table = make_table(wrapped("worst parameter of each group"), *seen, wrapped("finding"))
    above = ""
    for group, found in groups.items():
        part, _, rest = group.removeprefix(GRADIENT).partition(".")
        part = part if rest else ""
        if part != above:
            table.add_section()
            if part:
                table.add_row(f"[dim]gradients of {part}[/]")
        above = part
        mixed = [check for check in found if check.name.startswith("autocast: ")]
        others = [check for check in found if check not in mixed]
        allowed = max((check.allowed for check in others if check.allowed is not None), default=None)
        cells = [_number(value) for value in (_largest(others), allowed, _largest(mixed[:1]))]
        table.add_row(f"  {rest}" if rest else group, *cells, _findings(others))
    return table


def _plain(report: Report) -> Table:
    table = make_table(wrapped("given"), *numbers("leak", "logits", "loss", "pairs"), wrapped("verdict"))
    for plain in report.plain:
        why = f": {', '.join(plain.causes)}" if plain.causes else f": {escape(plain.detail)}" if plain.detail else ""
        cells = [_number(value) for value in (plain.leak, plain.logits, plain.loss, plain.pairs)]
        table.add_row(plain.name, *cells, _coloured(plain.verdict, PLAIN_COLOURS) + why)
    return table


def _largest(checks: Iterable[Check]) -> float | None:
    return max((check.seen for check in checks if check.seen is not None), default=None)


def _findings(checks: Iterable[Check]) -> str:
    """List the findings that are not ok; ok if there are none."""
    findings = dict.fromkeys(check.finding for check in checks if check.finding != "ok")
    return ", ".join(map(_coloured, findings or ["ok"]))


def _coloured(finding: str, colours: Mapping[str, str] = COLOURS) -> str:
    return f"[{colours.get(finding, 'dim')}]{finding}[/]"


def _number(value: float | None) -> str:
    """Format errors in two digits, counts in full."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{int(value):,}" if value >= 1 and float(value).is_integer() else f"{value:.0e}"
