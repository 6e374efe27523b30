"""Arguments and options that several verbs share, with the checks of their values.

A wrong value is refused before a library is loaded or a sample is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    import torch

OVERLENGTH = ("error", "drop", "truncate")
TRAIN_ON = ("assistant", "all")
BRANCHES = ("conversation", "turns")
STRATEGIES = (
    "exact_fill",
    "best_fit_decreasing",
    "rolling_fill",
    "next_fit",
)
STOPPING = ("first_exhausted", "all_exhausted")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")


def word(*choices: str, help: str) -> Any:
    """Make an option that takes one of these words.

    Raises (when a command line is read):
        ConfigError: the value is another word.
    """

    def checked(param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None:
            check_word(param.opts[0], value, choices)
        return value

    return typer.Option(callback=checked, help=help, autocompletion=lambda: list(choices))


def check_word(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of these words.

    Raises:
        ConfigError: it is another one.
    """
    if value not in choices:
        raise ConfigError(f"{option} {value}: choose {', '.join(choices[:-1])} or {choices[-1]}")


Dataset = Annotated[
    str,
    typer.Argument(help='A JSON, JSONL or parquet file, a folder, a hub id, or "synthetic" (receipts drawn here).'),
]
PROCESSOR_HELP = (
    'Hub id or folder of a model, for its processor (of a text model: its tokenizer); or "tiny", "tiny:FAMILY": one '
    "made here."
)
Processor = Annotated[str, typer.Option(help=PROCESSOR_HELP)]
MaxPixels = Annotated[
    int | None, typer.Option(min=1, help="Largest area of an image, in pixels; by default the processor's own.")
]
Split = Annotated[str, typer.Option(help="Of a data set that has several; a JSON file has one.")]
Num = Annotated[int | None, typer.Option(min=1, help="The first so many samples; by default all.")]
Seed = Annotated[int, typer.Option(min=0, help="Of synthetic receipts, and of the order of a mix.")]
Mix = Annotated[
    list[str] | None,
    typer.Option(
        "--mix",
        help="Another data set to mix in, once or more: SOURCE=WEIGHT has WEIGHT samples for each of the first data "
        "set's; SOURCE without weights: every sample once.",
    ),
]
Stopping = Annotated[
    str,
    word(*STOPPING, help="End of a mix's epoch: first_exhausted (before a sample comes twice) or all_exhausted."),
]
Epoch = Annotated[
    int, typer.Option(min=0, help="Of a mix: the next one goes on in each data set where this one stopped.")
]
MaxLength = Annotated[int | None, typer.Option(min=2, help="Most tokens of a sample; by default any.")]
Overlength = Annotated[
    str,
    word(*OVERLENGTH, help="A sample longer than --max-length: error, drop (left out) or truncate (between messages)."),
]
AddStop = Annotated[
    str | None,
    typer.Option(help="Token to learn after the last answer where the chat template writes none that ends it, </s>."),
]
IgnoredKeys = Annotated[
    list[str] | None,
    typer.Option("--ignored-key", help="A key of messages to leave out, once or more: others have to be written."),
]
TrainOn = Annotated[str, word(*TRAIN_ON, help="Tokens with a loss: assistant (its turns) or all.")]
Strategy = Annotated[
    str,
    typer.Option(
        help="How samples are placed: exact_fill (full rows), rolling_fill (long beside short), ...",
        autocompletion=lambda: list(STRATEGIES),
    ),
]
Workers = Annotated[int, typer.Option(min=0, help="Processes that read samples; 0: this one alone.")]
Cache = Annotated[str | None, typer.Option(help="File that keeps the lengths, so that they are measured once.")]
ImageRoot = Annotated[
    Path | None,
    typer.Option(help="Folder at which relative paths of images and videos start; by default that of the data's file."),
]
Branches = Annotated[
    str, word(*BRANCHES, help="A conversation is a sample; or each of its turns (a question and its answer) is one.")
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        help='Names of columns as they are read, {"question": "query", "answer": "response"}; or the path of a '
        "LLaMA-Factory dataset_info.json. Of one data set of a mix: SOURCE={...}, once or more.",
    ),
]
MaxPatches = Annotated[int | None, typer.Option(min=1, help="Most vision patches in a row.")]
MaxImages = Annotated[int | None, typer.Option(min=1, help="Most images and videos in a row.")]
MinShared = Annotated[
    int,
    typer.Option(min=0, help="Find samples that begin alike with so many tokens, by the bytes of images; 0: do not."),
]
Device = Annotated[str | None, word(*DEVICES, help="cpu or cuda; by default cuda where there is one.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object in place of tables; vlmpack schema VERB describes it.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Draw no progress.")]


def make_folder(option: str, folder: Path, *, mode: int = 0o777) -> None:
    """Make the folder that a verb writes into, before anything is computed.

    Args:
        option: its name, for the error.
        folder: created unless it exists.
        mode: of a folder that is created, less the umask.

    Raises:
        ConfigError: a file is in its place or above it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        message = f"{option} {folder} cannot be a folder ({error.strerror}); name one that is there or can be made"
        raise ConfigError(message) from error


def refuse_file(option: str, name: str) -> None:
    """Refuse one file of a model where its folder is wanted.

    Args:
        option: in front of the name, for the error; "" for an argument.
        name: hub id or folder.

    Raises:
        ConfigError: the name is a file's; the message has its folder.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"{f'{option} {name}'.strip()} is a file; give its folder: {path.parent}")


def torch_device(name: str | None) -> torch.device:
    """Return the device of this name; None: CUDA where there is one, else the CPU.

    Raises:
        ConfigError: PyTorch sees no CUDA device.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return torch.device(name or ("cuda" if has_cuda else "cpu"))
