"""PackedBatchSampler: distributes the rows of a plan over ranks, in another order every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, final, get_args

import numpy as np
from torch.utils.data import Sampler

from vlmpack.data.digest import LOAD_ANOTHER
from vlmpack.errors import ConfigError, check_choice, check_kind, check_whole_number
from vlmpack.plan.balance import EMPTY, ROWS_EXCHANGED, Schedule, balance_rows
from vlmpack.plan.lengths import check_seed, checked_capacity
from vlmpack.plan.plan import Plan, split_rows

Remainder = Literal["split", "empty", "drop"]


@final
class PackedBatchSampler(Sampler[list[int]]):
    """Yield rows, each a list of sample ids: the `batch_sampler` of a DataLoader over a map-style data set.

    Pass it as `DataLoader(dataset, batch_sampler=...)`. As `sampler=`, it fails with "list indices must be integers",
    because the DataLoader then uses each list of samples as one index.

    Every rank gets the same number of rows, and every epoch has the same number. Each epoch shuffles which rows share a
    step, and exchanges samples of equal length between rows, so that no row gets longer. Samples that share a prefix
    are only exchanged within their group.

    Args:
        plan: a plan from `plan_bins`.
        ranks: number of processes that train together.
        rank: rank whose rows to yield, that of this process; optional if there is only one rank. "all" yields the rows
            of all ranks in turn, for loaders that distribute batches themselves, such as accelerate's.
        accumulation: rows that a rank computes before ranks synchronize; they are balanced together.
        costs: [N]: compute cost of each sample, for balancing: `CostModel.of_samples`; None: its length.
        group_costs: [K]: compute cost of each group's prefix, if the plan has groups:
            `CostModel.of_samples(plan.groups.tokens, plan.groups.patches)`. None: the tokens of the prefix. Give both
            `costs` and `group_costs`, or neither.
        remainder: what to do with rows that do not fill the last step. "split" splits rows with many samples in two
            until there are enough, "empty" adds rows without samples, "drop" drops rows, different ones every epoch.
        seed: seed of all shuffles; None: every epoch keeps the order of the plan.

    Raises:
        ConfigError: `plan` is not a Plan, a number is not whole or is below 1, the seed is below 0, costs are negative
            or not finite, the rank or remainder does not exist, or there are too few samples to split or too few rows
            for a single step.
    """

    batch_size = None
    """Rows have different numbers of samples; accelerate reads this."""
    drop_last = False

    def __init__(
        self,
        plan: Plan,
        *,
        ranks: int = 1,
        rank: int | Literal["all"] | None = None,
        accumulation: int = 1,
        costs: np.ndarray | None = None,
        group_costs: np.ndarray | None = None,
        remainder: Remainder = "split",
        seed: int | None = 0,
    ) -> None:
        check_kind("plan", plan, Plan, "plan_bins(lengths, capacity=4096)")
        ranks, accumulation = checked_capacity(ranks, "ranks"), checked_capacity(accumulation, "accumulation")
        check_seed(seed)
        check_choice("remainder", remainder, get_args(Remainder))
        self.ranks, self.accumulation, self.seed = ranks, accumulation, seed
        self.rank: int | Literal["all"] = "all" if rank == "all" else checked_rank(rank, ranks)
        self.remainder: Remainder = remainder
        self._given = plan
        self.plan = split_rows(plan, ranks * accumulation) if remainder == "split" else plan
        """The plan whose rows are distributed, with rows split if necessary."""
        self._costs = np.asarray(plan.lengths if costs is None else costs, np.float64)
        if len(self._costs) != len(plan.lengths):
            raise ConfigError(
                f"{len(self._costs)} costs for {len(plan.lengths)} samples; of a plan of a table with refused samples, "
                "give table.by_place(costs)"
            )
        self._group_costs = _group_costs(plan, costs, group_costs)
        kinds = [plan.lengths, *(budget.costs for budget in plan.budgets), self._costs]
        self._twins = _kinds(kinds if plan.groups is None else [*kinds, plan.groups.of_samples + 1])
        self.epoch = 0
        """The current epoch, or the next one between epochs."""
        self._done = self._start = 0
        self._window = max(1, ROWS_EXCHANGED // accumulation)
        """Number of steps that exchange rows; after `load_state_dict`, that of the ranks that began the run."""
        self._rows_an_epoch = self._order(self.schedule(0)).size
        if not self._rows_an_epoch:
            raise ConfigError(
                f"{len(plan)} rows make no step of {ranks} ranks with accumulation {accumulation} and remainder "
                f"{remainder!r}; use fewer ranks or less accumulation, smaller rows, or another remainder"
            )

    def __len__(self) -> int:
        """Return the number of rows of a whole epoch, even if the current one was resumed."""
        return self._rows_an_epoch

    def __repr__(self) -> str:
        rank = "all ranks" if self.rank == "all" else f"rank {self.rank}"
        return (
            f"PackedBatchSampler({len(self)} rows an epoch of up to {self.plan.capacity} tokens, "
            f"{len(self.plan.sample_ids)} samples, {rank} of {self.ranks}, accumulation {self.accumulation}, remainder "
            f"{self.remainder!r}, seed {self.seed}; epoch {self.epoch}, {self._done} rows done)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Does nothing if it is the current one, so that a resumed epoch continues."""
        if epoch != self.epoch:
            self.epoch, self._done, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of the epoch (the remaining ones after `load_state_dict`), and advance to the next epoch."""
        start, self._start = self._start, 0
        plan, order = self.epoch_plan(self.epoch), self._order(self.schedule(self.epoch))
        for at in range(start, len(order)):
            self._done = at + 1
            yield [] if order[at] == EMPTY else plan[int(order[at])].tolist()
        self.epoch, self._done = self.epoch + 1, 0

    def epoch_plan(self, epoch: int) -> Plan:
        """Return the plan of an epoch: the same rows, with samples of equal length, budgets and costs exchanged."""
        if self.seed is None:
            return self.plan
        order = np.argsort(self._twins, kind="stable")
        drawn = np.random.default_rng([self.seed, epoch, 0]).random(len(order))
        stand_in = np.empty(len(order), np.int64)
        stand_in[order] = np.lexsort((drawn, self._twins))
        return self.plan.renamed(stand_in)

    def schedule(self, epoch: int) -> Schedule:
        """Return the schedule of an epoch: which rank computes which row in which step."""
        seed = None if self.seed is None else int(np.random.default_rng([self.seed, epoch, 1]).integers(2**31))
        return balance_rows(
            self.plan.sums(self._costs, self._group_costs),
            ranks=self.ranks,
            accumulation=self.accumulation,
            window=self._window,
            remainder="drop" if self.remainder == "drop" else "empty",
            seed=seed,
        )

    def _order(self, schedule: Schedule) -> np.ndarray:
        """Return row indices in the order in which they are yielded, int64."""
        if self.rank != "all":
            return schedule.rows[:, self.rank].reshape(-1)
        return schedule.rows.transpose(0, 2, 1).reshape(-1)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its rows yielded so far, and how rows are distributed, as plain data.

        A DataLoader with workers prefetches rows before it hands them out. `StatefulDataLoader` accounts for that; with
        another loader, set `rows` to the number of rows trained on.
        """
        dealt = {"window": self._window, "per_step": self._per_step}
        return {"epoch": self.epoch, "rows": self._done, "of": self._identity, "dealt": dealt}

    @property
    def _per_step(self) -> int:
        """Number of rows that this sampler yields for an optimizer step."""
        return self.accumulation * (self.ranks if self.rank == "all" else 1)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be equal to continue: with as many rows a step, the same rows share a step on any ranks."""
        priced = self._costs if self._group_costs is None else np.append(self._costs, self._group_costs)
        costs = hashlib.sha256(priced.astype("<f8").tobytes()).hexdigest()[:16]
        plan, rows = self._given.digest[:16], self.ranks * self.accumulation
        seed = None if self.seed is None else int(self.seed)
        return {"rows a step": rows, "plan": plan, "costs": costs, "seed": seed, "remainder": self.remainder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Skipped rows are not loaded.

        The state may be from another number of ranks, if ranks x accumulation is the same. After an optimizer step, the
        rows of each step to come are distributed over the ranks that there are now.

        Raises:
            ConfigError: the state belongs to another plan, to other settings or to another number of rows a step, it is
                from the middle of a step that other ranks began, or it is damaged.
        """
        if not isinstance(state, Mapping) or state.keys() != {"epoch", "rows", "of", "dealt"}:
            raise ConfigError(f"this is no state of a PackedBatchSampler, from its state_dict(); {LOAD_ANOTHER}")
        self._check_same(state["of"])
        window, per_step = (_state_number(state["dealt"], name, at_least=1) for name in ("window", "per_step"))
        epoch = _state_number(state, "epoch")
        rows = _state_number(state, "rows", at_most=len(self) // self._per_step * per_step)
        if per_step != self._per_step and rows % per_step:
            raise ConfigError(
                f"the state is from the middle of a step, after {rows % per_step} of its {per_step} rows: continue it "
                "on as many ranks, or take one from after an optimizer step"
            )
        rows = rows if per_step == self._per_step else rows // per_step * self._per_step
        self.epoch, self._done, self._start, self._window = epoch, rows, rows, window

    def _check_same(self, of: Any) -> None:
        """Check that a state belongs to this plan and these settings, or name what differs."""
        own, saved = self._identity, of if isinstance(of, Mapping) else {}
        differing = [name for name in own if saved.get(name) != own[name]]
        if not differing:
            return
        was, now = (", ".join(f"{name} {of.get(name)!r}" for name in differing) for of in (saved, own))
        remedy = "plan and distribute rows as before"
        if "rows a step" in differing:
            rows = saved.get("rows a step")
            remedy = f"ranks times accumulation (gradient_accumulation_steps) has to be {rows}, as before"
            if isinstance(rows, int) and not rows % self.ranks:
                remedy += f": on {self.ranks} ranks, an accumulation of {rows // self.ranks}"
        fault = f"the state is of rows of {was}, but these are of {now}"
        raise ConfigError(f"{fault}: some samples would be trained on twice and others never; {remedy}")


def _state_number(state: Any, name: str, *, at_least: int = 0, at_most: int | None = None) -> int:
    number = state.get(name) if isinstance(state, Mapping) else None
    return check_whole_number(f"the state's {name}", number, at_least=at_least, at_most=at_most, remedy=LOAD_ANOTHER)


def checked_rank(rank: int | None, ranks: int) -> int:
    """Return this process's rank; 0 if there is only one.

    Raises:
        ConfigError: the rank does not exist, or it was left out although there are several ranks, which would then all
            train on the same rows.
    """
    if rank is None and ranks > 1:
        raise ConfigError(
            f"ranks={ranks}, but rank= was left out: every process would train on the same rows; give this one's, such "
            "as rank=torch.distributed.get_rank()"
        )
    if rank is not None and rank not in range(ranks):
        raise ConfigError(f"rank must lie between 0 and {ranks - 1}, got {rank!r}")
    return rank or 0


def _group_costs(plan: Plan, costs: np.ndarray | None, group_costs: np.ndarray | None) -> np.ndarray | None:
    """Return the compute cost of each group's prefix, [K]; None: the plan has no groups.

    Raises:
        ConfigError: only one of `costs` and `group_costs` was given, or the plan has no groups to give costs for.
    """
    if plan.groups is None:
        if group_costs is not None:
            raise ConfigError("group_costs= is for a plan with groups; leave it out, or plan with groups=")
        return None
    if (costs is None) != (group_costs is None):
        given, missing = ("costs", "group_costs") if group_costs is None else ("group_costs", "costs")
        raise ConfigError(
            f"{given}= was given without {missing}=, and rows of a plan with groups cost what samples cost less what "
            "they share: give CostModel.of_samples(plan.lengths), and of (plan.groups.tokens, plan.groups.patches)"
        )
    group_costs = np.asarray(plan.groups.tokens if group_costs is None else group_costs, np.float64)
    if len(group_costs) != len(plan.groups):
        raise ConfigError(f"{len(group_costs)} group_costs for {len(plan.groups)} groups; give one per group")
    return group_costs


def _kinds(columns: list[np.ndarray]) -> np.ndarray:
    """Number samples so that samples that are equal in every column get equal numbers, int64 [N]."""
    kinds = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, values = np.unique(column, return_inverse=True)
        _, kinds = np.unique(kinds * (values.max(initial=0) + 1) + values, return_inverse=True)
    return kinds
