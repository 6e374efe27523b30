"""What a release promises beside its code: extras that are named where they are missing, one version everywhere."""

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
OF_USERS = {"peft", "qwen", "measures", "peers", "docs", "test", "dev"}
"""Extras whose packages users, tests and the site import, and no file of the package."""


def _command(*arguments: str) -> None:
    done = CliRunner().invoke(app, list(arguments))
    raise ConfigError(done.stderr)


def _plots() -> None:
    import vlmpack.plots  # noqa: F401


def _trainer() -> None:
    from vlmpack import PackedTrainer

    PackedTrainer()


def _grpo() -> None:
    from vlmpack.trainer import PackedGRPOTrainer  # noqa: F401


def _parquet() -> None:
    from vlmpack.data import open_dataset

    Path("rows.parquet").write_bytes(b"")
    open_dataset("rows.parquet")


def _ray() -> None:
    from vlmpack.workers import in_order

    next(in_order(str, 1, executor="ray"))


def _megatron() -> None:
    from vlmpack.interop.megatron import _params_class

    _params_class.__wrapped__()


def _video() -> None:
    from vlmpack.data.videos import _opened

    with _opened(Path("a.mp4"), None):  # pyright: ignore
        pass


def _vllm() -> None:
    from vlmpack.service.vllm import open_vllm

    open_vllm("a/model", None)  # pyright: ignore


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "train": (_trainer, "accelerate"),
    "data": (_parquet, "datasets"),
    "plots": (_plots, "matplotlib"),
    "rl": (_grpo, "trl"),
    "ray": (_ray, "ray"),
    "megatron": (_megatron, "megatron"),
    "video": (_video, "av"),
    "vllm": (_vllm, "vllm"),
    "serve": (lambda: _command("serve", "--demo"), "starlette"),
    "demo": (lambda: _command("demo"), "accelerate"),
}
"""Extra -> a part that needs it, and a package that is hidden from it."""
TRIED = ("megatron",)
"""Packages that are imported at once; others are looked for."""


@pytest.mark.parametrize("extra", CASES)
def test_a_missing_package_is_named_with_its_extra(
    extra: str, monkeypatch: pytest.MonkeyPatch, hide_package: Callable[[str], None], tmp_path: Path
) -> None:
    use, package = CASES[extra]
    find_spec = importlib.util.find_spec

    def without_it(name: str, *parents: str | None) -> Any:
        return None if name == package else find_spec(name, *parents)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vlmpack.errors.find_spec", without_it)
    for name in [name for name in sys.modules if name.startswith("vlmpack.plots")]:
        monkeypatch.delitem(sys.modules, name)
    if package in TRIED:
        hide_package(package)
    with pytest.raises(ConfigError, match=rf"\b{package}\b.*pip install 'vlmpack\[{extra}\]'"):
        use()


def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))


def test_there_is_a_case_for_every_extra() -> None:
    assert extras() == CASES.keys() | OF_USERS


def test_the_home_page_lists_every_extra_of_users() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == extras() - {"test", "dev", "peers"}


def test_the_citation_and_the_changes_are_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].split(",")[0] == __version__
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, (unreleased|\d{4}-\d\d-\d\d)", heading) for heading in headings)
