"""Figures of rows, prefix trees, plans, lengths, losses and benchmark ratios. The one room that imports matplotlib."""

from __future__ import annotations

from vlmpack.errors import check_extra

check_extra("plots", "matplotlib", needed_by="vlmpack.plots")
from vlmpack.plots.epochs import StepCost, plot_balance, plot_costs, plot_epochs, plot_fill  # noqa: E402
from vlmpack.plots.figures import Ratio, plot_lengths, plot_losses, plot_ratios, save  # noqa: E402
from vlmpack.plots.inside import plot_mask, plot_row  # noqa: E402
from vlmpack.plots.rows import plot_rows  # noqa: E402
from vlmpack.plots.trees import plot_tree  # noqa: E402

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
