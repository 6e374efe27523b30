"""What a release promises besides its code: errors that name missing extras, one version everywhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vlmpack import __version__
from vlmpack.cli import app
from vlmpack.errors import ConfigError

ROOT = Path(__file__).parents[1]
CODE = {
    "train": ("accelerate", "from vlmpack import PackedTrainer; PackedTrainer()"),
    "data": ("datasets", "from vlmpack.data import open_dataset; open_dataset('rows.parquet')"),
    "plots": ("matplotlib", "import vlmpack.plots"),
    "rl": ("trl", "from vlmpack.trainer import PackedGRPOTrainer"),
    "ray": ("ray", "from vlmpack.workers import in_order; next(in_order(str, 1, executor='ray'))"),
    "megatron": ("megatron", "from vlmpack.interop.megatron import _params_class; _params_class.__wrapped__()"),
    "video": ("av", "from vlmpack.data.videos import _container; _container(None, 'video', '').__enter__()"),
    "vllm": (
        "vllm",
        "from vlmpack.service.sampling import vllm; vllm.open_vllm('a', max_context=8, limits=None)",
    ),
}
"""Extra -> a package of it, and code that needs the package."""
VERBS = {"serve": ("starlette", ["serve", "--demo"]), "demo": ("matplotlib", ["demo"])}
OF_USERS = {"peft", "qwen", "measures", "peers", "docs", "test", "dev"}
"""Extras whose packages only users, tests and the site import."""


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch, hide_package: Callable[[str], None], tmp_path: Path) -> Callable[[str], None]:
    """Hide a package, in a folder with an empty Parquet file."""
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)

    def hide(package: str) -> None:
        find_spec = importlib.util.find_spec

        def without_it(name: str, *parents: str | None) -> Any:
            return None if name == package else find_spec(name, *parents)

        monkeypatch.setattr("vlmpack.errors.find_spec", without_it)
        for name in [name for name in sys.modules if name.startswith("vlmpack.plots")]:
            monkeypatch.delitem(sys.modules, name)
        if package == "megatron":  # it is imported at once; others are looked for
            hide_package(package)

    return hide


@pytest.mark.parametrize("extra", CODE)
def test_code_names_the_extra_of_a_missing_package(extra: str, hide: Callable[[str], None]) -> None:
    package, code = CODE[extra]
    hide(package)
    with pytest.raises(ConfigError, match=rf"\b{package}\b.*pip install 'vlmpack\[{extra}\]'"):
        exec(code, {})


@pytest.mark.parametrize("extra", VERBS)
def test_a_command_names_the_extra_of_a_missing_package(extra: str, hide: Callable[[str], None]) -> None:
    package, words = VERBS[extra]
    hide(package)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert re.search(rf"\b{package}\b.*pip install 'vlmpack\[{extra}\]'", done.stderr)


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))


def test_there_is_a_case_for_every_extra_and_the_quickstart_lists_those_of_users() -> None:
    assert extras() == CODE.keys() | VERBS.keys() | OF_USERS
    page = (ROOT / "docs" / "quickstart.md").read_text().partition("## Extras")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == extras() - {"test", "dev", "peers"}


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].split(",")[0] == __version__
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, (unreleased|\d{4}-\d\d-\d\d)", heading) for heading in headings)
