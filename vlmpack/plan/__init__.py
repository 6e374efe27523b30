"""Which samples share a row: lengths in, bins out; numpy, never torch."""

from __future__ import annotations

from vlmpack.plan.balance import EMPTY, Schedule, balance_rows
from vlmpack.plan.cost import CostModel
from vlmpack.plan.describe import HistogramBin, Summary, histogram, summary
from vlmpack.plan.lengths import OVERSIZE, Budget, Oversize, check_seed, checked_capacity
from vlmpack.plan.plan import Plan
from vlmpack.plan.planner import plan_bins
from vlmpack.plan.recipe import PaddedRecipe, Padding
from vlmpack.plan.simulation import CAPACITIES, Simulation, simulate
from vlmpack.plan.split import middle, split_rows
from vlmpack.plan.strategies import ALIASES, STRATEGIES, strategy_name
from vlmpack.plan.subset import best_subset
from vlmpack.plan.table import LengthTable, Refused
from vlmpack.plan.waiting import WaitingRoom

__all__ = [
    "ALIASES",
    "CAPACITIES",
    "EMPTY",
    "OVERSIZE",
    "STRATEGIES",
    "Budget",
    "CostModel",
    "HistogramBin",
    "LengthTable",
    "Oversize",
    "PaddedRecipe",
    "Padding",
    "Plan",
    "Refused",
    "Schedule",
    "Simulation",
    "Summary",
    "WaitingRoom",
    "balance_rows",
    "best_subset",
    "check_seed",
    "checked_capacity",
    "histogram",
    "middle",
    "plan_bins",
    "simulate",
    "split_rows",
    "strategy_name",
    "summary",
]
