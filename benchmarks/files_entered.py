"""List the files of vlmpack that one forward of a padded batch enters, in order: `python -m benchmarks.files_entered`.

Whoever follows a forward with a debugger opens these files, in this order.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

import vlmpack
from benchmarks.receipts import MEASURED, ReceiptShapes, hf_inputs, receipt_batch, receipt_model
from vlmpack import enable_packing
from vlmpack.families import family_named

PACKAGE = Path(vlmpack.__file__).parent
FAMILY = "qwen3_vl"
TINY = ReceiptShapes(
    hidden=64, layers=4, kv_heads=2, vision_hidden=32, vision_depth=2, vocab_size=131, samples=3, longest=40
)
"""Four layers, so that hybrid families have one of every kind."""


def files_entered(function: Callable[[], object]) -> list[str]:
    """List the files of vlmpack in which a function is called, each once, by its path in the package.

    Code of this thread is seen; what a module runs while it is imported counts too.

    Args:
        function: called once.
    """
    entered: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.setdefault(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    inside = f"{PACKAGE}{os.sep}"
    return [path.removeprefix(inside) for path in entered if path.startswith(inside)]


def files_of_forward(name: str = FAMILY) -> list[str]:
    """List the files that a forward with labels enters, through an enabled tiny model in train mode.

    A forward before it has loaded what is imported late and filled what is cached.

    Args:
        name: of the family, a key of `MEASURED`.

    Raises:
        FamilyError: there is no such family.
    """
    family = family_named(name)
    model = receipt_model(family, TINY)
    batch = hf_inputs(receipt_batch(family, model.config, TINY))
    enable_packing(model)

    def forward() -> torch.Tensor:
        return model(**batch).loss

    forward()
    return files_entered(forward)


def main(arguments: list[str] | None = None) -> int:
    """Print the files and their number.

    Args:
        arguments: of the command line; None: those of the process.

    Returns:
        0, the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.files_entered", description=__doc__)
    parser.add_argument("--family", default=FAMILY, choices=list(MEASURED), help=f"of the model ({FAMILY})")
    files = files_of_forward(parser.parse_args(arguments).family)
    console = Console(soft_wrap=True, highlight=False)
    for file in files:
        console.print(file, markup=False)
    console.print(f"{len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
