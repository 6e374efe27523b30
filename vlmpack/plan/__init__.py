"""Which samples share a row: lengths in, bins out; numpy, never torch."""

from __future__ import annotations

from vlmpack.plan.balance import EMPTY, Schedule, balance_rows
from vlmpack.plan.cost import CostModel
from vlmpack.plan.lengths import Budget, Oversize
from vlmpack.plan.plan import Plan
from vlmpack.plan.planner import plan_bins
from vlmpack.plan.strategies import ALIASES, STRATEGIES, strategy_name
from vlmpack.plan.subset import best_subset
from vlmpack.plan.waiting import WaitingRoom

__all__ = [
    "ALIASES",
    "EMPTY",
    "STRATEGIES",
    "Budget",
    "CostModel",
    "Oversize",
    "Plan",
    "Schedule",
    "WaitingRoom",
    "balance_rows",
    "best_subset",
    "plan_bins",
    "strategy_name",
]
