"""Figures of rows, prefix trees, plans, lengths, losses and benchmark ratios. The one room that imports matplotlib."""

from __future__ import annotations

from vlmpack.plots.epochs import StepCost, plot_balance, plot_costs, plot_epochs, plot_fill
from vlmpack.plots.figures import Ratio, plot_lengths, plot_losses, plot_ratios, save
from vlmpack.plots.inside import plot_mask, plot_row
from vlmpack.plots.rows import plot_rows
from vlmpack.plots.trees import plot_tree

__all__ = [
    "Ratio",
    "StepCost",
    "plot_balance",
    "plot_costs",
    "plot_epochs",
    "plot_fill",
    "plot_lengths",
    "plot_losses",
    "plot_mask",
    "plot_ratios",
    "plot_row",
    "plot_rows",
    "plot_tree",
    "save",
]
