"""Options that several verbs share, each declared once; a wrong value is refused before a library is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

import typer

from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    import torch

Device = Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="By default cuda if there is one.")]
Dtype = Literal["float32", "bfloat16"]
Overlength = Literal["error", "drop", "truncate", "truncate_start"]
TrainOn = Literal["assistant", "last", "all"]
Branches = Literal["conversation", "turns", "answers"]
Strategy = Literal["exact_fill", "best_fit_decreasing", "rolling_fill", "next_fit"]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Draw no progress.")]

SAMPLES, ROWS = "Samples", "Rows"
"""Headings in the help of a verb."""


def of_samples(*names: str, help: str, **settings: Any) -> Any:
    """Make an option below the heading "Samples"."""
    return typer.Option(*names, help=help, rich_help_panel=SAMPLES, **settings)


def of_rows(*names: str, help: str, **settings: Any) -> Any:
    """Make an option below the heading "Rows"."""
    return typer.Option(*names, help=help, rich_help_panel=ROWS, **settings)


@final
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set, how its samples are encoded, and how rows of them are planned."""

    dataset: Annotated[
        str, typer.Argument(help='JSON, JSONL or parquet file, folder, hub id, or "synthetic" (receipts drawn here).')
    ]
    processor: Annotated[
        str | None,
        of_samples(
            help='Hub id or folder of a model, for its processor or tokenizer; or "tiny", "tiny:FAMILY": one made here.'
        ),
    ] = None
    split: Annotated[str, of_samples(help="Split to read.")] = "train"
    num: Annotated[int | None, of_samples(min=1, metavar="N", help="Only the first N samples.")] = None
    columns: Annotated[
        list[str] | None,
        of_samples(
            "--columns",
            help="JSON that maps columns to the names that are read, or a LLaMA-Factory dataset_info.json; "
            "for one data set of a mix: SOURCE=MAP. Repeatable.",
        ),
    ] = None
    image_root: Annotated[
        Path | None, of_samples(help="Folder of relative image paths; by default that of the data file.")
    ] = None
    branches: Annotated[Branches, of_samples(help="A sample is a conversation, a turn or an answer.")] = "conversation"
    mix: Annotated[
        list[str] | None,
        of_samples(
            "--mix",
            metavar="SOURCE[=WEIGHT]",
            help="Another data set to mix in, with WEIGHT samples for each of DATASET. Repeatable.",
        ),
    ] = None
    seed: Annotated[int, of_samples(min=0, help="Seed of the order of a mix, and of synthetic receipts.")] = 0
    max_length: Annotated[int | None, of_samples(min=2, metavar="N", help="Most tokens of a sample.")] = None
    overlength: Annotated[Overlength, of_samples(help="What to do with a longer sample.")] = "error"
    max_pixels: Annotated[
        int | None, of_samples(min=1, metavar="N", help="Largest area of an image; by default the processor's.")
    ] = None
    train_on: Annotated[TrainOn, of_samples(help="Tokens that are trained on.")] = "assistant"
    add_stop: Annotated[
        str | None,
        of_samples(metavar="TOKEN", help="Token to add after the last answer if the template ends it in none."),
    ] = None
    ignored_keys: Annotated[
        list[str] | None, of_samples("--ignored-key", metavar="KEY", help="Key of messages to leave out. Repeatable.")
    ] = None
    workers: Annotated[int, of_samples(min=0, help="Processes that read samples; 0: this one.")] = 0
    cache: Annotated[str | None, of_samples(metavar="FILE", help="File that keeps measured lengths.")] = None
    strategy: Annotated[
        Strategy,
        of_rows(
            metavar="NAME", help="exact_fill: no more rows than best fit; rolling_fill: mixes long and short samples."
        ),
    ] = "exact_fill"
    max_patches: Annotated[int | None, of_rows(min=1, metavar="N", help="Most vision patches of a row.")] = None
    min_shared: Annotated[
        int | None, of_rows(min=0, metavar="N", help="Share prefixes of N tokens or more; 0: look for none.")
    ] = None

    @property
    def title(self) -> str:
        """The data sets as they were named."""
        return " + ".join((self.dataset, *(self.mix or ())))


def with_options(shared: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the fields of a dataclass as options, in place of its first parameter."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @wraps(verb)
        def run(**values: Any) -> None:
            given = shared(**{field.name: values.pop(field.name) for field in fields(shared)})
            verb(given, **values)

        _, *others = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [*inspect.signature(shared, eval_str=True).parameters.values(), *others]
        run.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        )
        return run

    return decorate


def make_folder(option: str, folder: Path) -> None:
    """Make the folder that a verb writes into, before anything is computed.

    Raises:
        ConfigError: a file is in its place or above it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{option} {folder} cannot be a folder ({error.strerror}); name one that is there or can be made"
        raise ConfigError(message) from error


def refuse_file(option: str, name: str) -> None:
    """Refuse a file of a model where its folder is wanted; `option` stands in front of its name in the error."""
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"{f'{option} {name}'.strip()} is a file; give its folder: {path.parent}")


def torch_device(name: str | None) -> torch.device:
    """Return the device of this name; None: CUDA if there is one, else the CPU.

    Raises:
        ConfigError: PyTorch sees no CUDA device.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return torch.device(name or ("cuda" if has_cuda else "cpu"))
