"""Which samples share a row: lengths in, bins out; numpy, never torch."""

from __future__ import annotations

from vlmpack.plan.balance import EMPTY, Schedule, balance_rows
from vlmpack.plan.cost import CostModel
from vlmpack.plan.exact_fill import best_subset
from vlmpack.plan.length_table import COLUMNS, HistogramBin, LengthTable, Refused, Summary, histogram, summary
from vlmpack.plan.lengths import (
    LARGEST,
    OVERSIZE,
    Budget,
    Oversize,
    check_seed,
    checked_capacity,
    checked_lengths,
    divided_up,
    refuse_too_large,
    round_up,
    too_large,
)
from vlmpack.plan.packing_buffer import LOOK_AHEAD, ROWS_BUFFERED, PackingBuffer, whole_needs
from vlmpack.plan.plan import Plan
from vlmpack.plan.planner import ALIASES, STRATEGIES, cut_group, middle, plan_bins, split_rows, strategy_name
from vlmpack.plan.prefix_groups import ALONE, PrefixGroups, attended_pairs
from vlmpack.plan.prefix_marks import PrefixMarks, groups_of_marks
from vlmpack.plan.simulation import CAPACITIES, Computed, PaddedRecipe, Padding, Simulation, simulate

__all__ = [
    "ALIASES",
    "ALONE",
    "CAPACITIES",
    "COLUMNS",
    "EMPTY",
    "LARGEST",
    "LOOK_AHEAD",
    "OVERSIZE",
    "ROWS_BUFFERED",
    "STRATEGIES",
    "Budget",
    "Computed",
    "CostModel",
    "HistogramBin",
    "LengthTable",
    "Oversize",
    "PackingBuffer",
    "PaddedRecipe",
    "Padding",
    "Plan",
    "PrefixGroups",
    "PrefixMarks",
    "Refused",
    "Schedule",
    "Simulation",
    "Summary",
    "attended_pairs",
    "balance_rows",
    "best_subset",
    "check_seed",
    "checked_capacity",
    "checked_lengths",
    "cut_group",
    "divided_up",
    "groups_of_marks",
    "histogram",
    "middle",
    "plan_bins",
    "refuse_too_large",
    "round_up",
    "simulate",
    "split_rows",
    "strategy_name",
    "summary",
    "too_large",
    "whole_needs",
]
