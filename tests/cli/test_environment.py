"""What doctor says of gated delta layers."""

from __future__ import annotations

from importlib import import_module

import pytest

from vlmpack.cli.environment import delta_serving
from vlmpack.families import family_named
from vlmpack.model import FlaCall


def test_without_fla_it_says_how_rows_are_computed() -> None:
    (entry,) = delta_serving(["cpu", "cpu"])
    assert (entry.backend, entry.device) == ("fla", "cpu")
    assert "batches of samples of like length" in entry.reasons[0]


@pytest.mark.parametrize(("version", "served"), [("0.5.2", True), ("0.4.2", False)])
def test_with_fla_it_asks_whether_this_version_may_serve(
    monkeypatch: pytest.MonkeyPatch, version: str, served: bool
) -> None:
    def rule() -> None:
        """A function of fla."""

    rule.__module__ = "fla.ops.gated_delta_rule"
    monkeypatch.setattr(import_module(family_named("qwen3_5").modelling), "torch_chunk_gated_delta_rule", rule)
    call = FlaCall(device="cuda", chip=9, fla=version, triton="3.7.1", tilelang=False, training=True)
    monkeypatch.setattr(FlaCall, "of", lambda device, training: call)
    (entry,) = delta_serving(["cuda"])
    assert (entry.reasons == ()) is served
