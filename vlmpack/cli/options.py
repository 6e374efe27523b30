"""Options that several verbs share. A wrong value is refused before anything heavy is imported."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

import typer

from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    import torch

Device = Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Device; by default cuda if there is one.")]
Dtype = Literal["float32", "bfloat16"]
Overlength = Literal["error", "drop", "truncate", "truncate_start", "own_row"]
TrainOn = Literal["assistant", "last", "all"]
Branches = Literal["conversation", "turns", "answers"]
Strategy = Literal["exact_fill", "best_fit_decreasing", "rolling_fill"]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

of_samples, of_rows, of_memory = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Samples", "Rows", "Memory")
)
"""Make an option under one of these headings."""


@final
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set, how its samples are encoded, and how its rows are planned."""

    dataset: Annotated[
        str, typer.Argument(help='JSON, JSONL or parquet file, folder, hub id, or "synthetic" (generated receipts).')
    ]
    processor: Annotated[
        str | None,
        of_samples(
            help='Hub id or folder of a model whose processor or tokenizer to use; or built-in: "tiny", "tiny:FAMILY".'
        ),
    ] = None
    split: Annotated[str, of_samples(help="Split to read.")] = "train"
    num: Annotated[int | None, of_samples(min=1, metavar="N", help="Use only the first N samples.")] = None
    columns: Annotated[
        list[str] | None,
        of_samples(
            "--columns",
            help="JSON that maps your columns to the names vlmpack reads, or a LLaMA-Factory dataset_info.json; "
            "for one data set of a mix: SOURCE=MAP. Repeatable.",
        ),
    ] = None
    image_root: Annotated[
        Path | None, of_samples(help="Folder that image paths are relative to; by default that of the data file.")
    ] = None
    branches: Annotated[Branches, of_samples(help="What counts as a sample.")] = "conversation"
    mix: Annotated[
        list[str] | None,
        of_samples(
            "--mix",
            metavar="SOURCE[=WEIGHT]",
            help="Mix in another data set, with WEIGHT samples for each sample of DATASET. Repeatable.",
        ),
    ] = None
    seed: Annotated[
        int, of_samples(min=0, max=2**32 - 1, help="Seed for the order of a mix and for synthetic receipts.")
    ] = 0
    max_length: Annotated[int | None, of_samples(min=2, metavar="N", help="Maximum tokens of a sample.")] = None
    overlength: Annotated[
        Overlength, of_samples(help="What to do with a sample longer than --max-length, or than a row.")
    ] = "error"
    max_pixels: Annotated[
        int | None, of_samples(min=1, metavar="N", help="Maximum pixels of an image; by default the processor's.")
    ] = None
    train_on: Annotated[TrainOn, of_samples(help="Which tokens to train on.")] = "assistant"
    add_stop: Annotated[
        str | None,
        of_samples(metavar="TOKEN", help="Stop token to add after the last answer, if the template adds none."),
    ] = None
    ignored_keys: Annotated[
        list[str] | None, of_samples("--ignored-key", metavar="KEY", help="Key of messages to ignore. Repeatable.")
    ] = None
    workers: Annotated[int, of_samples(min=0, help="Processes that read samples; 0: none, read in this process.")] = 0
    cache: Annotated[str | None, of_samples(metavar="FILE", help="File to keep measured lengths in.")] = None
    strategy: Annotated[
        Strategy,
        of_rows(
            metavar="NAME", help="exact_fill: no more rows than best fit; rolling_fill: mixes long and short samples."
        ),
    ] = "exact_fill"
    max_patches: Annotated[int | None, of_rows(min=1, metavar="N", help="Maximum vision patches of a row.")] = None
    min_shared: Annotated[
        int | None, of_rows(min=0, metavar="N", help="Share prefixes of at least N tokens; 0: do not look for any.")
    ] = None

    @property
    def title(self) -> str:
        """The data sets as named on the command line."""
        return " + ".join((self.dataset, *(self.mix or ())))

    @property
    def rows_overlength(self) -> Literal["drop", "own_row"]:
        """What a plan that is only looked at, or trained on, does with a sample that is too large for a row."""
        return "own_row" if self.overlength == "own_row" else "drop"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, and what of it is trained."""

    model: Annotated[
        str, typer.Option(help='Hub id or folder of the model; or "tiny", "tiny:FAMILY": a small random one.')
    ]
    method: Annotated[Literal["lora", "full"], typer.Option(help="Train LoRA adapters, or all weights.")] = "lora"
    freeze_vision: Annotated[
        bool, typer.Option(help="Freeze the vision tower; false: train it, or adapters in it, too.")
    ] = True
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16
    lora_alpha: Annotated[
        int | None, typer.Option(min=1, help="Scale of the adapters, times their rank; by default twice the rank.")
    ] = None
    lora_dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout before the adapters.")] = 0.0
    lora_targets: Annotated[
        str | list[str],
        typer.Option(
            help="Layers to adapt: a list of names, or a regular expression; all-linear: every one of the language "
            "model."
        ),
    ] = "all-linear"
    dtype: Annotated[
        Dtype | None, typer.Option(help="Weights; by default bfloat16 for LoRA on cuda, else float32.")
    ] = None


def with_options(shared: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the first parameter of a verb by one option per field of a dataclass."""

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
    """Make the output folder of a verb, before anything is computed.

    Raises:
        ConfigError: the folder cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{option} {folder} cannot be a folder ({error.strerror}); choose another one"
        raise ConfigError(message) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} may not be written to; get the right to, or choose another one")


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
