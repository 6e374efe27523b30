"""`vlmpack probe`: is every packed sample of this model what it would have been alone, on this machine?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmpack.cli.options import DTYPES, BestDeviceOption, JsonOption, one_of
from vlmpack.cli.processors import named_processor, refuse_file, tiny_family
from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from vlmpack.proof import Loaded


def probe(
    model: Annotated[
        str, typer.Argument(help='Hub id or folder of a model; or "tiny", "tiny:FAMILY": a small random one made here.')
    ],
    device: BestDeviceOption = None,
    dtype: Annotated[str, typer.Option(callback=one_of(*DTYPES), help="float32 or bfloat16.")] = "float32",
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            "--attn",
            help="Attention back-end (`vlmpack doctor` lists them); by default the first that can.",
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Probe a tiny copy of the configuration even if the weights fit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that packed samples are what they are alone, mechanism by mechanism; name the cause if they are not.

    One sample is changed and the others are watched; logits, loss and gradients of a packed row are compared with those
    of each sample alone; work is counted; and plain transformers is given the same row. Where the weights do not fit, a
    tiny random copy of the model's configuration is probed.

    The exit status is 0 if everything is exact, 1 if not, 2 if it cannot be run as asked.
    """
    refuse_file("", model)

    from rich.console import Console

    from vlmpack.attention import BACKENDS
    from vlmpack.cli.device import best_device, checked_device, quiet_transformers
    from vlmpack.cli.probe_table import print_report
    from vlmpack.proof import probe as examine

    choices = ("auto", *BACKENDS)
    if attention is not None and attention not in choices:  # before a model is read
        raise ConfigError(f"--attention {attention}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    where = checked_device(device or best_device())
    console = Console(quiet=as_json)
    with quiet_transformers(), console.status("reading the model") as status:
        loaded = _loaded(model, where, _dtype(dtype), tiny=tiny)
        report = examine(
            loaded.model,
            loaded.processor,
            attention=attention,
            progress=lambda part: status.update(f"probing: {part}"),
        )
    report = replace(report, weights=loaded.weights)
    print_report(report, console)
    if as_json:
        result: dict[str, Any] = report.to_dict()
        typer.echo(json.dumps(result, indent=2))
    raise typer.Exit(0 if report.verdict == "exact" else 1)


def _loaded(name: str, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Loaded:
    """The model to be probed: one that is made here with its processor, or what the name stands for.

    Raises:
        ConfigError: nothing can be read there. FamilyError: the family cannot be packed exactly, or is not known.
    """
    from vlmpack.families import family_named
    from vlmpack.proof import Loaded, load
    from vlmpack.testing import tiny_model

    family = tiny_family(name)
    if family is None:
        return load(name, device=device, dtype=dtype, tiny=tiny)
    processor = named_processor(name) if family_named(family).has_vision else None
    model = tiny_model(family, dtype=dtype, processor=processor)
    return Loaded(model=model.to(device), processor=processor, weights="made here with random weights")


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
