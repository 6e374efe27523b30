"""Bin packing: choose from the lengths alone which samples share a row. Uses numpy, never torch."""

from __future__ import annotations

from vlmpack.plan.balance import CostModel, Schedule, balance_rows
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import Budget
from vlmpack.plan.packing_buffer import PackingBuffer
from vlmpack.plan.plan import Plan, plan_bins
from vlmpack.plan.prefix_groups import PrefixGroups, attended_pairs
from vlmpack.plan.simulation import PaddedRecipe, Simulation, simulate

__all__ = [
    "Budget",
    "CostModel",
    "LengthTable",
    "PackingBuffer",
    "PaddedRecipe",
    "Plan",
    "PrefixGroups",
    "Schedule",
    "Simulation",
    "attended_pairs",
    "balance_rows",
    "plan_bins",
    "simulate",
]
