"""Figures of rows, prefix trees, lengths, losses and benchmark ratios. The one room that imports matplotlib."""

from __future__ import annotations

from vlmpack.plots.figures import Ratio, plot_lengths, plot_losses, plot_ratios, save
from vlmpack.plots.rows import plot_rows
from vlmpack.plots.trees import plot_tree

__all__ = ["Ratio", "plot_lengths", "plot_losses", "plot_ratios", "plot_rows", "plot_tree", "save"]
