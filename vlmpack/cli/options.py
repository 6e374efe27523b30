"""Options that several verbs share, and options that take one of a few words.

A word that is none of them is refused while the command line is read, before a library is loaded or a sample measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vlmpack.errors import ConfigError

OVERLENGTH = ("error", "drop", "truncate")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")


def one_of(*choices: str) -> Callable[..., str | None]:
    """The callback of an option that takes one of these words alone.

    Raises (when it is called):
        ConfigError: another word was given.
    """

    def checked(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise ConfigError(f"{param.opts[0]} {value}: choose {', '.join(choices[:-1])} or {choices[-1]}")
        return value

    return checked


DatasetArgument = Annotated[
    str,
    typer.Argument(help='A JSON, JSONL or parquet file, a folder, a hub id, or "synthetic" (receipts drawn here).'),
]
PROCESSOR_HELP = (
    'Hub id or folder of a model, for its processor (of a text model: its tokenizer); or "tiny", "tiny:FAMILY": one '
    "made here."
)
ProcessorOption = Annotated[str, typer.Option(help=PROCESSOR_HELP)]
MaxPixelsOption = Annotated[
    int | None, typer.Option(min=1, help="Largest area of an image, in pixels; by default the processor's own.")
]
SplitOption = Annotated[str, typer.Option(help="Of a data set that has several; a JSON file has one.")]
NumOption = Annotated[int | None, typer.Option(min=1, help="The first so many samples; by default all.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of synthetic receipts.")]
MaxLengthOption = Annotated[int | None, typer.Option(min=2, help="Most tokens of a sample; by default any.")]
OverlengthOption = Annotated[
    str,
    typer.Option(
        callback=one_of(*OVERLENGTH),
        help="What happens to one longer than --max-length: error, drop (left out) or truncate (between messages).",
    ),
]
WorkersOption = Annotated[int, typer.Option(min=0, help="Processes that read samples; 0: this one alone.")]
CacheOption = Annotated[str | None, typer.Option(help="File that keeps the lengths, so that they are measured once.")]
ImageRootOption = Annotated[
    Path | None,
    typer.Option(help="Folder at which relative paths of images and videos start; by default that of the data's file."),
]
PatchesOption = Annotated[int | None, typer.Option(min=1, help="Most vision patches in a row.")]
ImagesOption = Annotated[int | None, typer.Option(min=1, help="Most images and videos in a row.")]
BestDeviceOption = Annotated[
    str | None,
    typer.Option(callback=one_of(*DEVICES), help="cpu or cuda; by default cuda where there is one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
