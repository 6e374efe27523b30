"""The examples in the packages' READMEs do what they say, in the order in which a reader meets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from chats import chat, picture
from test_readme import ROOT, examples, run

from vlmpack import VLMCollator
from vlmpack.families import family_of
from vlmpack.testing import tiny_model, tiny_processor

PACKAGES = sorted(path.parent.name for path in (ROOT / "vlmpack").glob("*/README.md") if examples(path))


def collated() -> dict[str, Any]:
    processor = tiny_processor()
    return {"processor": processor, "tokenizer": processor.tokenizer, "feature": chat("q", "a", picture())}


def modelled() -> dict[str, Any]:
    processor = tiny_processor()
    row = VLMCollator(processor, layout="packed").collate([chat("q", "a", picture())])
    return {"processor": processor, "model": tiny_model(processor=processor), "row": row, "family_of": family_of}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "collate": collated,
    "families": modelled,
    "probing": modelled,
    "model": modelled,
}
"""What the examples of a package take as given; of the others: nothing."""


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch imports its compiler
@pytest.mark.parametrize("package", [*(package for package in PACKAGES if package != "probing"), *slow("probing")])
def test_the_examples_run(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(ROOT / "vlmpack" / package / "README.md", **GIVEN.get(package, dict)()) > 0


def test_there_are_packages_with_examples() -> None:
    assert {"collate", "plan", "trainer", *GIVEN} <= set(PACKAGES)
