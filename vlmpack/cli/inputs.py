"""What the verbs that read a data set share: its options, the processor by its name, and the collator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from vlmpack.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from vlmpack.collate import VLMCollator
    from vlmpack.data import OpenDataset
    from vlmpack.plan import LengthTable

TINY = "tiny"
SMALL_RECEIPTS = 0.35
"""Scale of receipts drawn for the built-in processor, whose images have at most 256 tokens."""
OVERLENGTH = ("error", "drop", "truncate")

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
SplitOption = Annotated[str, typer.Option(help="Of a data set that has several.")]
NumOption = Annotated[int | None, typer.Option(min=1, help="The first so many samples; by default all.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of synthetic receipts.")]
MaxLengthOption = Annotated[int | None, typer.Option(min=2, help="Most tokens of a sample; by default any.")]
OverlengthOption = Annotated[
    str, typer.Option(help="What happens to a longer one: error, drop (left out) or truncate (between messages).")
]
WorkersOption = Annotated[int, typer.Option(min=0, help="Processes that read samples; 0: this one alone.")]
CacheOption = Annotated[str | None, typer.Option(help="File that keeps the lengths, so that they are measured once.")]


@final
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A data set, and what makes rows of it."""

    dataset: OpenDataset
    """Samples."""
    collator: VLMCollator
    """With the processor in it."""


def open_inputs(
    dataset: str,
    *,
    processor: str,
    split: str = "train",
    num: int | None = None,
    seed: int = 0,
    max_length: int | None = None,
    overlength: str = "error",
    max_pixels: int | None = None,
    **settings: Any,
) -> Inputs:
    """Open what was named on the command line.

    Args:
        dataset: for `open_dataset`.
        processor: for `named_processor`.
        split: of the data set.
        num: the first so many samples.
        seed: of synthetic receipts.
        max_length: of a sample, in tokens.
        overlength: what happens to a longer one.
        max_pixels: largest area that images are resized to; None: the processor's own.
        settings: further ones of `VLMCollator`.

    Raises:
        ConfigError: something is not there, or settings contradict each other. FamilyError: a model of a family that
            is not supported.
    """
    from vlmpack.collate import VLMCollator
    from vlmpack.data import open_dataset

    if overlength not in OVERLENGTH:
        raise ConfigError(f"--overlength {overlength}: choose {', '.join(OVERLENGTH)}")
    scale = SMALL_RECEIPTS if is_tiny(processor) else 1.0
    opened = open_dataset(
        dataset, split=split, num=num, seed=seed, **({"scale": scale} if dataset == "synthetic" else {})
    )
    limits: dict[str, Any] = {} if max_length is None else {"max_length": max_length, "overlength": overlength}
    made = _within(named_processor(processor), max_pixels)
    return Inputs(dataset=opened, collator=VLMCollator(made, layout="packed", **limits, **settings))


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

    from vlmpack.offline import measure_lengths

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


def is_tiny(name: str) -> bool:
    """Whether the built-in processor is meant."""
    return name.partition(":")[0] == TINY


def named_processor(name: str) -> Any:
    """A processor, or of a text model its tokenizer.

    Args:
        name: a hub id, a folder, "tiny" (Qwen3-VL's) or "tiny:FAMILY".

    Raises:
        ConfigError: there is none of that name. FamilyError: the model is of a family that is not supported.
    """
    return _tiny(name.partition(":")[2] or "qwen3_vl") if is_tiny(name) else _pretrained(name)


def _within(processor: Any, max_pixels: int | None) -> Any:
    """The processor, told the largest area of an image."""
    from vlmpack.collate.processor import parts_of

    if max_pixels is None:
        return processor
    images = parts_of(processor).image_processor
    if images is None:
        raise ConfigError(f"--max-pixels {max_pixels}: a text model has no images; leave it out")
    least = images.size["shortest_edge"]
    if max_pixels < least:
        raise ConfigError(f"--max-pixels {max_pixels}: the processor enlarges images to {least} pixels at least")
    images.size = type(images.size)(shortest_edge=least, longest_edge=max_pixels)
    return processor


def _tiny(family: str) -> Any:
    from vlmpack.data.processor import CHAT_TEMPLATE, tiny_processor
    from vlmpack.families import family_named

    if family_named(family).has_vision:
        return tiny_processor(family)
    tokenizer = tiny_processor().tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pretrained(name: str) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    from vlmpack.cli.device import quiet_transformers
    from vlmpack.data.pretrained import load_processor
    from vlmpack.families import family_named

    try:
        with quiet_transformers():
            model_type = AutoConfig.from_pretrained(name).model_type
            has_vision = family_named(model_type).has_vision
            return load_processor(name) if has_vision else AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:  # transformers' own, for what is not there and for what it does not know
        raise ConfigError(
            f"--processor {name}: nothing there can be read ({error}); give a hub id, a folder with config.json and "
            "tokenizer, or tiny for one made here"
        ) from error
