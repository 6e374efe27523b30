"""Figures: where every token is, how long samples are, and how training went. The one room that imports matplotlib."""

from __future__ import annotations

from vlmpack.plots.lengths import plot_lengths
from vlmpack.plots.losses import plot_losses
from vlmpack.plots.rows import plot_rows
from vlmpack.plots.style import save

__all__ = ["plot_lengths", "plot_losses", "plot_rows", "save"]
