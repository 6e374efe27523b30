"""Figures of rows, prefix trees, plans, lengths and losses. The only package that imports matplotlib."""

from __future__ import annotations

from vlmpack.errors import check_extra

check_extra("plots", "matplotlib", needed_by="vlmpack.plots")
from vlmpack.plots.figures import (  # noqa: E402
    StepCost,
    plot_balance,
    plot_costs,
    plot_epochs,
    plot_fill,
    plot_lengths,
    plot_losses,
    save,
)
from vlmpack.plots.rows import plot_mask, plot_row, plot_rows, plot_tree  # noqa: E402

__all__ = [
    "StepCost",
    "plot_balance",
    "plot_costs",
    "plot_epochs",
    "plot_fill",
    "plot_lengths",
    "plot_losses",
    "plot_mask",
    "plot_row",
    "plot_rows",
    "plot_tree",
    "save",
]
