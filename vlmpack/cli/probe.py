"""`vlmpack probe`: is every packed sample of this model what it would have been alone, on this machine?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")


def probe(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a model.")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    attn: Annotated[
        str | None,
        typer.Option(help="Attention back-end (`vlmpack doctor` lists them); by default the first that can."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Probe a tiny copy of the configuration even if the weights fit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that packed samples are what they are alone, mechanism by mechanism; name the cause if they are not.

    One sample is changed and the others are watched; logits, loss and gradients of a packed row are compared with those
    of each sample alone; work is counted; and plain transformers is given the same row. Where the weights do not fit, a
    tiny random copy of the model's configuration is probed.

    The exit status is 0 if everything is exact, 1 if not, 2 if it cannot be run as asked.
    """
    from rich.console import Console

    from vlmpack.cli.device import checked_device, quiet_transformers
    from vlmpack.cli.probe_table import print_report
    from vlmpack.proof import load
    from vlmpack.proof import probe as examine

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: choose {' or '.join(DTYPES)}")
    where = checked_device(device or _best_device())
    console = Console(quiet=as_json)
    with quiet_transformers(), console.status("reading the model") as status:
        loaded = load(model, device=where, dtype=_dtype(dtype), tiny=tiny)
        report = examine(
            loaded.model,
            loaded.processor,
            attention=attn,
            weights=loaded.weights,
            progress=lambda part: status.update(f"probing: {part}"),
        )
    print_report(report, console)
    if as_json:
        result: dict[str, Any] = report.to_dict()
        typer.echo(json.dumps(result, indent=2))
    raise typer.Exit(0 if report.verdict == "exact" else 1)


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
