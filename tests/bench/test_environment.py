"""A version says which build it is, where the package itself does."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vlmpack.bench import environment
from vlmpack.bench.environment import version_of


@pytest.fixture(autouse=True)
def metadata_without_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda package: "2.15.0")


def test_an_imported_package_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("some_package")
    monkeypatch.setitem(vars(module), "__version__", "2.15.0+cu132")
    monkeypatch.setitem(sys.modules, "some_package", module)
    assert version_of("some-package") == "2.15.0+cu132"


def test_an_imported_package_that_does_not_say_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_package", ModuleType("some_package"))
    assert version_of("some-package") == "2.15.0"


def test_what_is_not_imported_is_looked_up_and_stays_so() -> None:
    assert version_of("some-package") == "2.15.0"
    assert "some_package" not in sys.modules


def test_what_is_not_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert version_of("no-such-package") is None
