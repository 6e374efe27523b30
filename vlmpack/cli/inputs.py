"""What the verbs that read a data set make of their options: samples, and the collator that makes rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from vlmpack.cli.processors import named_processor, tiny_family, within
from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from vlmpack.collate import VLMCollator
    from vlmpack.data import OpenDataset
    from vlmpack.plan import LengthTable

DEFAULT_SPLIT = "train"


@final
@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What the command line says about a data set, its processor, and the length of its samples."""

    dataset: str
    """For `open_dataset`."""
    processor: str
    """For `named_processor`."""
    split: str = DEFAULT_SPLIT
    """Of the data set."""
    num: int | None = None
    """The first so many samples; None: all."""
    seed: int = 0
    """Of synthetic receipts."""
    max_length: int | None = None
    """Of a sample, in tokens; None: any."""
    overlength: str = "error"
    """What happens to a longer one: one of `OVERLENGTH`."""
    max_pixels: int | None = None
    """Largest area that images are resized to; None: the processor's own."""
    image_root: Path | None = None
    """Folder at which paths of images start; None: that of the file that names them."""


@final
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A data set, and what makes rows of it."""

    dataset: OpenDataset
    """Samples."""
    collator: VLMCollator
    """With the processor in it."""


def open_inputs(options: InputOptions, **settings: Any) -> Inputs:
    """Open what was named on the command line.

    Args:
        options: what and how.
        settings: further ones of `VLMCollator`.

    Raises:
        ConfigError: something is not there, or settings contradict each other. FamilyError: a model of a family that
            is not supported.
    """
    from vlmpack.collate import VLMCollator
    from vlmpack.data import open_dataset
    from vlmpack.testing import SMALLEST_LEGIBLE, receipt_conversations

    _check_dataset(options)
    _check_options(options)
    split, num, image_root = options.split, options.num, options.image_root
    if options.dataset != "synthetic":
        opened = open_dataset(options.dataset, split=split, num=num, image_root=image_root)
    else:
        if image_root is not None:
            raise ConfigError("image_root is where paths in the samples start, and synthetic names none; leave it out")
        # images of the built-in processor have at most 256 tokens
        scale = 1.0 if tiny_family(options.processor) is None else SMALLEST_LEGIBLE
        opened = receipt_conversations(split=split, num=num, seed=options.seed, scale=scale)
    limits: dict[str, Any] = {"max_length": options.max_length, "overlength": options.overlength}
    made = within(named_processor(options.processor), options.max_pixels)
    return Inputs(dataset=opened, collator=VLMCollator(made, layout="packed", **limits, **settings))


def is_store(source: str) -> bool:
    """Whether a folder written by `vlmpack pack` is meant."""
    from vlmpack import store

    return store.is_store(Path(source).expanduser())


def check_finished(source: str) -> None:
    """Refuse the folder of a `vlmpack pack` that did not reach its end.

    Raises:
        ConfigError: `source` is one.
    """
    from vlmpack.store import is_unfinished_store

    if is_unfinished_store(Path(source).expanduser()):
        raise ConfigError(
            f"{source} is not packed to its end: `vlmpack pack` was interrupted there, or refused a sample. Run it "
            "again, and it goes on where it was"
        )


def _check_dataset(options: InputOptions) -> None:
    """Refuse what would be taken for something else.

    Raises:
        ConfigError: rows that are packed already, or a split of a file that has none.
    """
    from vlmpack.data import JSON_FILES

    path = Path(options.dataset).expanduser()
    if is_store(options.dataset):
        raise ConfigError(
            f"{options.dataset} is packed already: `vlmpack pack` wrote it. `vlmpack show {options.dataset}` shows its "
            "rows; give the data set that it was made of"
        )
    check_finished(options.dataset)
    if options.split != DEFAULT_SPLIT and path.suffix in JSON_FILES and path.is_file():
        raise ConfigError(
            f"--split {options.split}: {options.dataset} is a JSON file, which is one split, whatever it is called; "
            "leave --split out"
        )


def _check_options(options: InputOptions) -> None:
    """Refuse options that contradict each other, or name what is not there.

    Raises:
        ConfigError: one does.
    """
    root = options.image_root
    if root is not None and not root.expanduser().is_dir():
        raise ConfigError(f"--image-root {root} is no folder here; give the one at which images' paths start")
    if options.overlength != "error" and options.max_length is None:
        raise ConfigError(f"--overlength {options.overlength} needs --max-length, the most tokens of a sample")


def measured(
    inputs: Inputs, console: Console, *, workers: int = 0, cache: str | None = None, estimate: bool = False
) -> LengthTable:
    """The lengths of all samples, with a progress bar while they are read.

    Args:
        inputs: the data set, and what makes rows of it.
        console: where the bar is drawn.
        workers: processes; 0: this one alone.
        cache: a file that keeps lengths; None: they are measured anew.
        estimate: whether image tokens are `ceil(H/32) * ceil(W/32)`.

    Raises:
        ConfigError: no sample can be measured with these settings, or the cache cannot be used.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vlmpack.store import measure_lengths

    columns = (TextColumn("reading samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(inputs.dataset))
        return measure_lengths(
            inputs.dataset,
            inputs.collator,
            workers=workers,
            cache=cache,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
            estimate=estimate,
        )
