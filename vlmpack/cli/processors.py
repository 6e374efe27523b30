"""A processor by the name that the command line gives, or the one that is made here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmpack.errors import ConfigError

TINY = "tiny"
DEFAULT_FAMILY = "qwen3_vl"


def tiny_family(name: str) -> str | None:
    """The family that "tiny" (Qwen3-VL's) or "tiny:FAMILY" means; None: a hub id or a folder is meant."""
    tiny, _, family = name.partition(":")
    return (family or DEFAULT_FAMILY) if tiny == TINY else None


def refuse_file(option: str, name: str) -> None:
    """Refuse one file of a model where its folder is wanted, of which there is more to be read.

    Args:
        option: in front of the name, for the error; "" for an argument.
        name: hub id or folder.

    Raises:
        ConfigError: it is a file; names its folder.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"{f'{option} {name}'.strip()} is a file; give its folder: {path.parent}")


@contextmanager
def reading(option: str, name: str, *, remedy: str = "give a hub id or the folder of a model") -> Iterator[None]:
    """What transformers cannot read inside of this is refused by the option that names it.

    Raises:
        ConfigError: nothing is there, or nothing that transformers knows.
    """
    refuse_file(option, name)
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{option} {name}: nothing there can be read ({reason}); {remedy}") from error


def named_processor(name: str) -> Any:
    """A processor, or of a text model its tokenizer.

    Args:
        name: a hub id, a folder, "tiny" (Qwen3-VL's) or "tiny:FAMILY".

    Raises:
        ConfigError: there is none of that name. FamilyError: the model is of a family that is not supported.
    """
    family = tiny_family(name)
    return _pretrained(name) if family is None else _tiny(family)


def within(processor: Any, max_pixels: int | None) -> Any:
    """The processor, told the largest area of an image; None: its own.

    Raises:
        ConfigError: it has no images, or enlarges them beyond that.
    """
    from vlmpack.collate import parts_of

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
    from vlmpack.families import family_named
    from vlmpack.testing import CHAT_TEMPLATE, tiny_processor

    if family_named(family).has_vision:
        return tiny_processor(family)
    tokenizer = tiny_processor().tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pretrained(name: str) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    from vlmpack.cli.device import quiet_transformers
    from vlmpack.data import is_saved_alone, load_processor
    from vlmpack.families import family_named

    remedy = "give a hub id, a folder with config.json and tokenizer, or tiny for one made here"
    with reading("--processor", name, remedy=remedy), quiet_transformers():
        if is_saved_alone(name):
            return load_processor(name)
        has_vision = family_named(AutoConfig.from_pretrained(name).model_type).has_vision
        return load_processor(name) if has_vision else AutoTokenizer.from_pretrained(name)
