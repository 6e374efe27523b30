"""Options that several verbs share, and how the fields of a dataclass become options.

A field is an option; its annotation has the kind and the bounds, and the line under it is the help:

    num: Annotated[int | None, Option(min=1, metavar="N")] = None
    \"\"\"Use only the first N samples.\"\"\"

A wrong value is refused before anything heavy is imported.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option
from typer.models import OptionInfo

from vlmpack.errors import ConfigError
from vlmpack.files import writing

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Overlength = Literal["error", "drop", "truncate", "truncate_start", "own_row"]
TrainOn = Literal["assistant", "last", "all"]
Branches = Literal["conversation", "turns", "answers"]
Strategy = Literal["exact_fill", "best_fit_decreasing", "rolling_fill"]
Method = Literal["lora", "full"]
AtLeast1 = Annotated[int, Option(min=1, metavar="N")]
Limit = Annotated[int | None, Option(min=1, metavar="N")]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is printed."""

    PANEL = "Output"

    as_json: Annotated[bool, Option("--json")] = False
    """Print one JSON object instead of tables."""
    quiet: Annotated[bool, Option("--quiet", "-q")] = False
    """Show no progress."""

    def print_json(self, numbers: Mapping[str, Any]) -> None:
        """Print the output for programs, if it was asked for."""
        if self.as_json:
            typer.echo(json.dumps(numbers, indent=2))


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set, how its samples are encoded, and how its rows are planned."""

    PANEL = "Data and rows"

    dataset: Annotated[str, Argument()]
    """JSON, JSONL or parquet file, folder, hub id, or "synthetic" (generated receipts)."""
    processor: str | None = None
    """Hub id or folder of a model whose processor or tokenizer to use; or built-in: "tiny", "tiny:FAMILY"."""
    split: str = "train"
    """Split to read."""
    num: Limit = None
    """Use only the first N samples."""
    columns: Annotated[list[str] | None, Option("--columns")] = None
    """JSON that maps your columns to the names vlmpack reads, or a LLaMA-Factory dataset_info.json; for one data set of
    a mix: SOURCE=MAP. Repeatable."""
    image_root: Path | None = None
    """Folder that image paths are relative to; by default that of the data file."""
    branches: Branches = "conversation"
    """What counts as a sample."""
    mix: Annotated[list[str] | None, Option("--mix", metavar="SOURCE[=WEIGHT]")] = None
    """Mix in another data set, with WEIGHT samples for each sample of DATASET. Repeatable."""
    seed: Annotated[int, Option(min=0, max=2**32 - 1)] = 0
    """Seed for the order of a mix and for synthetic receipts."""
    max_length: Annotated[int | None, Option(min=2, metavar="N")] = None
    """Maximum tokens of a sample."""
    overlength: Overlength = "error"
    """What to do with a sample longer than --max-length, or than a row."""
    max_pixels: Limit = None
    """Maximum pixels of an image; by default the processor's."""
    train_on: TrainOn = "assistant"
    """Which tokens to train on."""
    add_stop: Annotated[str | None, Option(metavar="TOKEN")] = None
    """Stop token to add after the last answer, if the template adds none."""
    ignored_keys: Annotated[list[str] | None, Option("--ignored-key", metavar="KEY")] = None
    """Key of messages to ignore. Repeatable."""
    workers: Annotated[int, Option(min=0)] = 0
    """Processes that read samples; 0: none, read in this process."""
    cache: Annotated[str | None, Option(metavar="FILE")] = None
    """File to keep measured lengths in."""
    strategy: Annotated[Strategy, Option(metavar="NAME")] = "exact_fill"
    """exact_fill: no more rows than best fit; rolling_fill: mixes long and short samples."""
    max_patches: Limit = None
    """Maximum vision patches of a row."""
    min_shared: Annotated[int | None, Option(min=0, metavar="N")] = None
    """Share prefixes of at least N tokens; 0: do not look for any."""

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

    model: str
    """Hub id or folder of the model; or "tiny", "tiny:FAMILY": a small random one."""
    method: Method = "lora"
    """Train LoRA adapters, or all weights."""
    freeze_vision: bool = True
    """Freeze the vision tower; false: train it, or adapters in it, too."""
    lora_rank: AtLeast1 = 16
    """Rank of the adapters."""
    lora_alpha: Limit = None
    """Scale of the adapters, times their rank; by default twice the rank."""
    lora_dropout: Annotated[float, Option(min=0, max=0.99)] = 0.0
    """Dropout before the adapters."""
    lora_targets: str | list[str] = "all-linear"
    """Layers to adapt: a list of names, or a regular expression; all-linear: every one of the language model."""
    dtype: Dtype | None = None
    """Weights; by default bfloat16 for LoRA on cuda, else float32."""


def help_of(settings: type) -> dict[str, str]:
    """Return the line under each field of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for owner in reversed(settings.__mro__[:-1]):
        definition: Any = ast.parse(inspect.getsource(owner)).body[0]
        for field, line in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(line, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(line.value).split())
    return found


def with_options(verb: Callable[[Any], None]) -> Callable[..., None]:
    """Give a verb an option for each field of the dataclass that it takes."""
    (parameter,) = inspect.signature(verb, eval_str=True).parameters.values()
    settings: Any = parameter.annotation

    @wraps(verb)
    def run(**values: Any) -> None:
        verb(settings(**values))

    run.__signature__ = inspect.Signature([*_options_of(settings)])  # pyright: ignore[reportAttributeAccessIssue]
    return run


def kind_and_option(annotation: Any) -> tuple[Any, Any]:
    """Return the type of a field, and its `Option` or `Argument`."""
    if get_origin(annotation) is not Annotated:
        return annotation, Option()
    kind, option = get_args(annotation)
    return kind, copy(option)


def _options_of(settings: Any) -> Iterator[inspect.Parameter]:
    kinds, helps = get_type_hints(settings, include_extras=True), help_of(settings)
    owners = {name: owner for owner in reversed(settings.__mro__[:-1]) for name in vars(owner)["__annotations__"]}
    for field in fields(settings):
        kind, option = kind_and_option(kinds[field.name])
        option.help = helps[field.name]
        if isinstance(option, OptionInfo):
            option.rich_help_panel = vars(owners[field.name]).get("PANEL")
            if field.default is False and option.default is ...:  # a switch needs no --no-
                option.param_decls = [f"--{field.name.replace('_', '-')}"]
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        annotation: Any = Annotated[kind, option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def make_folder(folder: Path) -> None:
    """Make the output folder of a verb, and write to it, before anything is computed.

    Raises:
        ConfigError: the folder cannot be made, or not be written to.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


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
