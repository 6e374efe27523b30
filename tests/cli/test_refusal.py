"""Arguments of the library, told as options of the verb that runs."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.main import get_command

from vlmpack.cli.refusal import in_options

verbs = typer.Typer()


@verbs.command()
def verb(
    dataset: str,
    num: int = 1,
    row: int = 0,
    on_bad: str = "raise",
    max_length: int = 9,
    max_pixels: int = 9,
    pad_seq_to_mult: int = 1,
    attention: Annotated[str, typer.Option("--attention", "--attn")] = "auto",
    is_tiny: Annotated[bool, typer.Option("--tiny")] = False,
) -> None:
    """Has options like those of the verbs."""


@verbs.command()
def bare() -> None:
    """Has none."""


SAY = in_options(get_command(verbs).commands["verb"])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("library", "told"),
    [
        ("choose on_bad='skip'; or not", "choose --on-bad skip; or not"),
        ("but max_length=5; raise max_length, please", "but --max-length 5; raise --max-length, please"),
        ("it needs max_length=, the most", "it needs --max-length, the most"),
        ("lower the processor's max_pixels, or", "lower --max-pixels, or"),
        ("num is 9, but there are 3", "--num 9, but there are 3"),
        ("attention is 'x'; it is one of auto", "--attention x; it is one of auto"),
        ("rounded up (multiple=8)", "rounded up (--pad-seq-to-mult 8)"),
        ("choose on_bad='two words'.", "choose --on-bad 'two words'."),
    ],
)
def test_arguments_are_options(library: str, told: str) -> None:
    assert SAY(library) == told


@pytest.mark.parametrize(
    "text",
    [
        "oversize='drop' is another verb's",
        "dataset='x' is no option, and is_tiny=True takes no value",
        "the row is 48 tokens wide, and the num is a number",
        "/data/max_length/rows.jsonl and StoreSettings.max_length and row_on_bad='x'",
    ],
)
def test_all_else_is_left_as_it_is(text: str) -> None:
    assert SAY(text) == text


def test_a_verb_without_options_translates_nothing() -> None:
    say = in_options(get_command(verbs).commands["bare"])  # pyright: ignore[reportAttributeAccessIssue]
    assert say("on_bad='skip', num is 9, =, multiple=8") == "on_bad='skip', num is 9, =, multiple=8"
