"""Figures of rows, lengths, losses and benchmark ratios. The one room that imports matplotlib."""

from __future__ import annotations

from vlmpack.plots.figures import Ratio, plot_lengths, plot_losses, plot_ratios, save
from vlmpack.plots.rows import plot_rows

__all__ = ["Ratio", "plot_lengths", "plot_losses", "plot_ratios", "plot_rows", "save"]
