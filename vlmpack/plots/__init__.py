"""Figures of rows, lengths, losses and benchmark ratios. The one room that imports matplotlib."""

from __future__ import annotations

from vlmpack.plots.lengths import plot_lengths
from vlmpack.plots.losses import plot_losses
from vlmpack.plots.ratios import Ratio, plot_ratios
from vlmpack.plots.rows import plot_rows
from vlmpack.plots.style import save

__all__ = ["Ratio", "plot_lengths", "plot_losses", "plot_ratios", "plot_rows", "save"]
