"""Open what the command line names: a data set, a processor, a model of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from vlmpack.cli.mixing import MixOptions, columns_by_source, mixed_sources, open_mix
from vlmpack.cli.options import refuse_file
from vlmpack.cli.progress import progress_bars
from vlmpack.errors import ConfigError, skipped_are_reported

if TYPE_CHECKING:
    from vlmpack.collate.collator import VLMCollator
    from vlmpack.data.mixed import MixedDataset
    from vlmpack.data.open import OpenDataset
    from vlmpack.plan.length_table import LengthTable

SYNTHETIC = "synthetic"
TINY = "tiny"
DEFAULT_SPLIT = "train"


@final
@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of the command line for a data set, its processor, and the length of its samples."""

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
    """Treatment of a longer sample: one of `OVERLENGTH`."""
    max_pixels: int | None = None
    """Largest area that images are resized to; None: the processor's default."""
    add_stop: str | None = None
    """Token behind the last answer where the chat template writes none that ends it."""
    ignored_keys: Sequence[str] = ()
    """Keys of messages that are left out."""
    image_root: Path | None = None
    """Folder at which paths of images start; None: that of the file that names them."""
    branches: str = "conversation"
    """Kind of sample: one of `BRANCHES`."""
    columns: Sequence[str] = ()
    """MAP or SOURCE=MAP each, see `columns_by_source`; empty: columns have known names."""
    mix: MixOptions = field(default_factory=MixOptions)
    """Data sets beside it; `num` then counts the samples of the mix, and limits are of each."""

    @property
    def title(self) -> str:
        """The data set as it was named; of a mix, all of them."""
        return " + ".join((self.dataset, *self.mix.sources))


class Inputs(NamedTuple):
    """A data set, and the collator that makes rows of it."""

    dataset: OpenDataset | MixedDataset
    """Samples."""
    collator: VLMCollator
    """Holds the processor."""


def open_inputs(options: InputOptions, **settings: Any) -> Inputs:
    """Open the data set and the processor of the command line.

    Args:
        options: names and limits.
        settings: further ones of `VLMCollator`.

    Raises:
        ConfigError: something is missing, or options contradict each other. FamilyError: the model's family is not
            supported.
    """
    from vlmpack.collate.collator import VLMCollator

    _check(options)
    sources = [each.source for each in mixed_sources(options.dataset, options.mix.sources)]
    columns = columns_by_source(options.columns, sources)

    def open_one(source: str, num: int | None = None) -> OpenDataset:
        check_source(source, split=options.split)
        return open_samples(
            source, split=options.split, num=num, seed=options.seed, image_root=options.image_root,
            branches=options.branches, columns=columns[source], small=tiny_family(options.processor) is not None,
        )  # fmt: skip

    if options.mix.sources:
        dataset = open_mix(options.dataset, options.mix, num=options.num, seed=options.seed, open_one=open_one)
    else:
        dataset = open_one(options.dataset, options.num)
    processor = limit_pixels(named_processor(options.processor), options.max_pixels)
    limits: dict[str, Any] = {"max_length": options.max_length, "overlength": options.overlength}
    limits |= {"add_stop": options.add_stop, "ignored_keys": options.ignored_keys}
    return Inputs(dataset, VLMCollator(processor, layout="packed", **limits, **settings))


def open_samples(
    source: str,
    *,
    split: str = DEFAULT_SPLIT,
    num: int | None,
    seed: int,
    small: bool,
    image_root: Path | None = None,
    branches: str = "conversation",
    columns: str | None = None,
) -> OpenDataset:
    """Open a data set, or draw receipts for "synthetic".

    Args:
        source: "synthetic", or for `open_dataset`.
        split: of the data set.
        num: the first so many samples; None: all.
        seed: of receipts.
        small: draw receipts small: images of a built-in processor have at most 256 tokens.
        image_root: folder at which paths of images start; None: that of the file that names them.
        branches: "turns" makes a sample of each question and its answer.
        columns: for `open_dataset`.

    Raises:
        ConfigError: it cannot be read, has fewer samples, names no paths for `image_root`, or has no questions to tell
            apart.
    """
    from vlmpack.data.open import open_dataset
    from vlmpack.testing.receipts import SMALLEST_LEGIBLE, receipt_conversations

    if source != SYNTHETIC:
        return open_dataset(
            source, split=split, num=num, image_root=image_root, columns=columns,
            branches=branches,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
    if columns is not None:
        raise ConfigError(
            f"--columns: {SYNTHETIC} receipts have the names that are read; leave it out, or name the data set of a "
            "mix that it is of: --columns SOURCE=MAP"
        )
    if branches != "conversation":
        raise ConfigError(f"--branches {branches}: {SYNTHETIC} receipts have one question each; leave it out")
    if image_root is not None:
        raise ConfigError(f"--image-root {image_root}: {SYNTHETIC} receipts have no paths; leave it out")
    return receipt_conversations(split=split, num=num, seed=seed, scale=SMALLEST_LEGIBLE if small else 1.0)


def _check(options: InputOptions) -> None:
    """Refuse options that contradict each other.

    Raises:
        ConfigError: a missing folder of images, or `--overlength` without `--max-length`.
    """
    root = options.image_root
    if root is not None and not root.expanduser().is_dir():
        raise ConfigError(f"--image-root {root} is no folder here; give the one at which images' paths start")
    if options.overlength != "error" and options.max_length is None:
        raise ConfigError(f"--overlength {options.overlength} needs --max-length, the most tokens of a sample")


def check_source(source: str, *, split: str) -> None:
    """Refuse a source that would be read as something else.

    Raises:
        ConfigError: a folder of packed rows, or a split of a file that has none.
    """
    from vlmpack.data.readers import JSON_FILES
    from vlmpack.store.manifest import is_store

    path = Path(source).expanduser()
    if is_store(path):
        raise ConfigError(
            f"{source} is packed already: `vlmpack pack` wrote it. `vlmpack show {source}` shows its "
            "rows; give the data set that it was made of"
        )
    check_finished(source)
    if split != DEFAULT_SPLIT and path.suffix in JSON_FILES and path.is_file():
        raise ConfigError(
            f"--split {split}: {source} is a JSON file, which is one split, whatever it is called; leave --split out"
        )


def check_finished(source: str) -> None:
    """Refuse the folder of an interrupted `vlmpack pack`.

    Raises:
        ConfigError: `source` is one.
    """
    from vlmpack.store.folder import is_unfinished_store

    if is_unfinished_store(Path(source).expanduser()):
        raise ConfigError(
            f"{source} is not packed to its end: `vlmpack pack` was interrupted there, or refused a sample. Run it "
            "again, and it goes on where it was"
        )


def measure(
    inputs: Inputs,
    *,
    quiet: bool = False,
    workers: int = 0,
    cache: str | None = None,
    estimate: bool = False,
    min_shared: int | None = None,
) -> LengthTable:
    """Measure the lengths of all samples, with a progress bar.

    Args:
        inputs: data set and collator.
        quiet: draw no bar.
        workers: processes; 0: this one alone.
        cache: a file that keeps lengths; None: every length is measured again.
        estimate: count `ceil(H/32) * ceil(W/32)` tokens an image.
        min_shared: find samples that begin alike with so many tokens or more; None: do not.

    Raises:
        ConfigError: no sample can be measured with these settings, or the cache cannot be used.
    """
    from vlmpack.store.measure import measure_lengths

    bars = progress_bars({"measure": "measuring samples"}, quiet=quiet)
    with skipped_are_reported(), bars as progress:  # `analyze` lists them
        settings: dict[str, Any] = {"workers": workers, "cache": cache, "estimate": estimate}
        settings["min_shared"] = min_shared
        return measure_lengths(*inputs, progress=partial(progress, "measure"), **settings)


# ---------------------------------------------------------------------- processors and models


def tiny_family(name: str) -> str | None:
    """Return the family of "tiny" (the default one) or "tiny:FAMILY"; None: the name is a hub id or a folder."""
    from vlmpack.testing.models import DEFAULT_FAMILY

    tiny, _, family = name.partition(":")
    return (family or DEFAULT_FAMILY) if tiny == TINY else None


def named_processor(name: str) -> Any:
    """Load or build a processor; of a text model, its tokenizer.

    Args:
        name: a hub id, a folder, "tiny" (the default family) or "tiny:FAMILY".

    Raises:
        ConfigError: nothing of that name exists. FamilyError: the model's family is not supported.
    """
    family = tiny_family(name)
    return _load_processor(name) if family is None else _tiny_processor(family)


def _tiny_processor(family: str) -> Any:
    from vlmpack.families.registry import family_named
    from vlmpack.testing.processors import CHAT_TEMPLATE, tiny_processor

    if family_named(family).has_vision:
        return tiny_processor(family)
    tokenizer = tiny_processor().tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _load_processor(name: str) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    from vlmpack.data.processor import is_saved_alone, load_processor
    from vlmpack.families.registry import family_named

    remedy = "give a hub id, a folder with config.json and tokenizer, or tiny for one made here"
    with reading("--processor", name, remedy=remedy), quiet_transformers():
        if is_saved_alone(name) or family_named(AutoConfig.from_pretrained(name).model_type).has_vision:
            return load_processor(name)
        return AutoTokenizer.from_pretrained(name)


def limit_pixels(processor: Any, max_pixels: int | None) -> Any:
    """Return a copy of a processor with this largest area of an image; None: the processor itself.

    Raises:
        ConfigError: the processor takes no images, or enlarges them beyond that area.
    """
    from vlmpack.collate.processor_metadata import parts_of

    if max_pixels is None:
        return processor
    processor = deepcopy(processor)
    images = parts_of(processor).image_processor
    if images is None:
        raise ConfigError(f"--max-pixels {max_pixels}: a text model has no images; leave it out")
    size = {name: value for name, value in dict(images.size).items() if value}
    if set(size) != {"shortest_edge", "longest_edge"}:
        raise ConfigError(
            f"--max-pixels {max_pixels}: a {type(images).__name__} sizes images by {size} and not by their area; set "
            "the size in its preprocessor_config.json"
        )
    least = size["shortest_edge"]
    if max_pixels < least:
        raise ConfigError(f"--max-pixels {max_pixels}: the processor enlarges images to {least} pixels at least")
    images.size = type(images.size)(shortest_edge=least, longest_edge=max_pixels)
    return processor


@contextmanager
def reading(option: str, name: str, *, remedy: str = "give a hub id or the folder of a model") -> Iterator[None]:
    """Turn what transformers raises on reading `name` into an error that names the option.

    Raises:
        ConfigError: nothing readable is there, or a model that transformers does not support.
    """
    refuse_file(option, name)
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{option} {name}: nothing there can be read ({reason}); {remedy}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress advice, warnings, progress bars and notes of repeated requests of transformers and the hub.

    Their errors still come through.
    """
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, bars, requests = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(requests)
        if bars:
            logging.enable_progress_bar()
