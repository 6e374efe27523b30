"""Every public method, loss and option of the installed client is served, or refused by name with a remedy."""

from __future__ import annotations

import pytest

tinker = pytest.importorskip("tinker", reason="the client needs Python 3.11")

from service.web import surface  # noqa: E402


def test_the_page_says_what_becomes_of_every_call_of_the_client() -> None:
    text = surface.PAGE.read_text(encoding="utf-8")
    assert set(surface.methods()) == surface.CALLS.keys(), "a new client: say which endpoint the method asks"
    assert surface.written(text) == text, "run python tests/service/web/surface.py"


def test_a_new_method_loss_or_option_of_a_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker.TrainingClient, "distill", lambda self: None, raising=False)
    assert "distill" in set(surface.methods()) - surface.CALLS.keys()
    with pytest.raises(ValueError, match="not enough values"):
        surface.verdict("distill")
    monkeypatch.delitem(surface.REFUSED, "custom")
    with pytest.raises(KeyError, match="custom"):
        surface.losses()
    monkeypatch.delitem(surface.codec.REFUSED, "record_stability_info")
    with pytest.raises(KeyError, match="record_stability_info"):
        surface.options()
