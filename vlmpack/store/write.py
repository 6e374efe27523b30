"""write_rows: plan the rows of a data set and write them to files.

    samples ──measure──▶ lengths.zip ──plan──▶ plan.zip, left_out.jsonl ──write──▶ rows-*.parquet ──▶ manifest.json

Every arrow ends in files that are there whole or not at all. A run that was killed is started again, goes on behind the
last of them, and ends with the same bytes. A sample's digest is stored with its row, and compared when a store is
continued or asked for again: samples of two data sets that are equally long do not share a store.

OUT/.work/lock             held by the one process that writes; the system frees it when that process dies
OUT/.work/settings.json    settings of the store that is being made, so that no other is continued into it
OUT/.work/unfinished/      files that are being written; those that a killed run left are removed by the next one
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from vlmpack.collate.collator import VLMCollator, sample_id_of
from vlmpack.collate.encoded import Encoded
from vlmpack.collate.skipped import SkipLog
from vlmpack.errors import (
    ConfigError,
    SampleError,
    check_choice,
    check_kind,
    check_whole_number,
    skipped_are_reported,
)
from vlmpack.files import FULL, atomic_file, unreadable, unwritable, write_text, writing
from vlmpack.layout.segments import SlotRule
from vlmpack.loading.resumable import MapStyle, check_samples, sample_at
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import (
    OVERSIZE,
    Budget,
    Oversize,
    check_seed,
    divided_up,
    refuse_too_large,
    round_up,
    too_large,
)
from vlmpack.plan.plan import Plan
from vlmpack.plan.planner import STRATEGIES, plan_bins, split_rows
from vlmpack.store.content import check_storable, sample_digest
from vlmpack.store.executors import Executor, InOrder, executor_of
from vlmpack.store.manifest import (
    LEFT_OUT,
    LENGTHS,
    NAME,
    PLAN,
    WORK,
    Counts,
    FixedSizes,
    Manifest,
    Shard,
    check_files,
    differences,
    fingerprint,
    is_store,
    sha256_of,
    shard_name,
)
from vlmpack.store.measure import measure_with, undecoded
from vlmpack.store.read import SAMPLES, ShardFiles
from vlmpack.store.records import COMPRESSION, each_medium_once, json_text, pyarrow, record_of, schema

Progress = Callable[[str, int, int | None], None]
"""Is called with the stage ("measure" samples, "compare" or "write" files), how many are done, and of how many."""

PLANNED = "vlmpack.plan"
"""Key of a file's footer: the digest of the plan."""
NAMED = 5
"""Changed samples that a refusal lists."""


@final
@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of the plan and of the files of a store."""

    capacity: int
    """Tokens that a row may hold."""
    max_patches: int | None = None
    """Most patches of the vision tower in a row; None: no limit."""
    max_images: int | None = None
    """Most images and videos in a row; None: no limit."""
    strategy: str = "exact_fill"
    """Placement of samples: see `plan_bins`."""
    oversize: Oversize = "error"
    """Treatment of a sample that exceeds a row by itself: "error", "drop" (listed) or "own_row"."""
    seed: int | None = None
    """Shuffles samples and rows; None: samples keep their order."""
    rows_multiple: int = 1
    """Rows of many samples are cut in two until the number of rows is a multiple of this: ranks times accumulation."""
    shard_rows: int = 128
    """Rows of a file. A kill costs the work on one file."""

    def __post_init__(self) -> None:
        for name in ("capacity", "max_patches", "max_images", "rows_multiple", "shard_rows"):
            value = getattr(self, name)
            if value is not None or name not in ("max_patches", "max_images"):
                object.__setattr__(self, name, check_whole_number(f"StoreSettings.{name}", value))
        check_seed(self.seed)
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("oversize", self.oversize, OVERSIZE)


def write_rows(
    dataset: MapStyle,
    out: str | Path,
    collator: VLMCollator,
    settings: StoreSettings,
    *,
    workers: int = 0,
    executor: Executor = "local",
    cache: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Plan the rows of a data set and write them to a folder, images encoded, never as pixels.

    What was written before by the same call is kept: run it again after it was interrupted. The files do not depend
    on `workers`, `executor` or interruptions.

    Args:
        dataset: map-style, of samples that the collator takes.
        out: the folder; what is in it must be of the same call.
        collator: with `layout="packed"`. Its `slots` decide what samples are rounded up to, which the plan counts. With
            `share_prefixes` samples with a common prefix share rows, and each image of a row is written once.
        settings: of the plan and the files.
        workers: processes that measure and write; 0: this one alone.
        executor: "ray" measures and writes as Ray tasks, on machines that all see `out`, instead of by `workers`.
        cache: file that keeps lengths between calls; None: as long as this one is not finished (on Ray: none).
        progress: is called as the work goes on.

    Returns:
        The manifest, with the sizes that CUDA graphs need.

    Raises:
        SampleError: a sample cannot be used and the collator's `on_bad` is "raise", or one exceeds a row and
            `oversize` is "error".
        ConfigError: something of another kind (a path, a processor), settings that contradict each other or what is in
            the folder, samples that were changed since they were packed, a finished store that lost a file, too many
            bad samples, a full disk, a worker that died, or an extra that is missing.
    """
    in_order = executor_of(executor, workers)
    check_kind("collator", collator, VLMCollator, 'VLMCollator(processor, layout="packed")')
    check_kind("settings", settings, StoreSettings, "StoreSettings(capacity=4096)")
    _check_collator(collator, settings)
    dataset, folder = _with_places(dataset), WorkFolder(out=Path(out))
    sharing = collator.share_prefixes
    measure = partial(
        measure_with,
        in_order,
        cache=folder.path / "lengths.sqlite" if cache is None and executor == "local" else cache,
        progress=partial(progress, "measure"),
        min_shared=None if sharing is None else sharing.min_shared,
    )
    run = _Run(
        dataset=dataset,
        collator=collator,
        settings=settings,
        folder=folder,
        in_order=in_order,
        measure=measure,
        progress=progress,
        description=_description(dataset, collator, settings),
    )
    manifest = run.finished()
    if manifest is None:
        folder.check_free()
    if manifest is None or folder.path.exists():  # a run may have been killed just before it removed its work folder
        with folder.locked():
            manifest = manifest or run.finished() or run.write()
            with writing(folder.path):
                shutil.rmtree(folder.path)
    return manifest


def _with_places(dataset: Any) -> MapStyle:
    """Return the data set, images left encoded.

    Raises:
        ConfigError: it is a path or empty, or its samples have no places.
    """
    check_samples(dataset)
    if not isinstance(dataset, MapStyle):
        raise ConfigError(
            f"rows are planned over samples with places, which a {type(dataset).__name__} does not have: give a data "
            "set with len() and [i], such as vlmpack.data.open_dataset(...), one split of it"
        )
    if not len(dataset):
        raise ConfigError("the data set is empty: there is nothing to pack")
    return undecoded(dataset)


def _check_collator(collator: VLMCollator, settings: StoreSettings) -> None:
    """Refuse the collator unless its rows can be stored.

    Raises:
        ConfigError: its samples have more than a row can hold; it pads, fixes sizes that are fixed when rows are read,
            or has slots that do not fit the capacity.
    """
    check_storable(collator)
    slots = collator.slots
    if collator.layout != "packed":
        raise ConfigError("rows are stored by VLMCollator(layout='packed'); this one has layout='padded'")
    if slots.pad_to is not None:
        raise ConfigError(
            f"slots.pad_to={slots.pad_to}: rows are stored without padding, and get a fixed width when they are read, "
            "by PackedDataset(pad_to_max_length=True); leave it out"
        )
    unit = lcm(slots.multiple, slots.row_multiple)
    if settings.capacity % unit:
        raise ConfigError(
            f"a capacity of {settings.capacity} tokens is no multiple of {unit}, which slots and rows are rounded up "
            f"to (multiple={slots.multiple}, row_multiple={slots.row_multiple}); choose "
            f"{settings.capacity // unit * unit or unit} or {(settings.capacity // unit + 1) * unit}"
        )


# ---------------------------------------------------------------------- the folder


@final
@dataclass(frozen=True, kw_only=True)
class WorkFolder:
    """The folder of a store, and the folder in it that is deleted when the store is complete."""

    out: Path

    @property
    def path(self) -> Path:
        return self.out / WORK

    @property
    def unfinished(self) -> Path:
        return self.path / "unfinished"

    @property
    def begun(self) -> Path:
        return self.path / "settings.json"

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", folder=self.unfinished)

    def check_free(self) -> None:
        """Refuse a folder that is a file, or holds something that is no part of a store."""
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file, and a store is a folder; name one that is empty or not there yet")
        if self.out.is_dir() and not self.begun.is_file():
            self._check_empty()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make and lock the work folder for this process, and remove unfinished files of a killed run.

        Not by `flock`, which a forked worker would go on holding.

        Raises:
            ConfigError: another process writes the same store, or there can be no such folder.
        """
        import fcntl  # not on every system, and needed for writing only

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            if error.errno in FULL:
                raise unwritable(self.out, error) from error
            raise ConfigError(f"{self.out} cannot be made a folder of rows: {error}; name another one") from error
        with lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                fault = "another process is writing to"
                raise ConfigError(f"{fault} {self.out}; wait for it, or choose another folder") from error
            except OSError as error:
                raise ConfigError(f"{lock.name} cannot be locked: {error}; choose a folder on another disk") from error
            with writing(self.unfinished):
                shutil.rmtree(self.unfinished, ignore_errors=True)
                self.unfinished.mkdir(parents=True, exist_ok=True)
            yield

    def claim(self, description: Mapping[str, Any]) -> None:
        """Refuse a folder with parts of another store, and note the settings of this one.

        Until there is a plan, settings and samples may change: lengths are then measured again, out of their cache.
        """
        stored = self._stored()
        if stored and (self.out / PLAN).is_file():
            _check_same(stored, description, self.out)
        elif stored != description:
            self._check_empty()
            with writing(self.out / LENGTHS):
                (self.out / LENGTHS).unlink(missing_ok=True)
            self.write_json(self.begun, description)

    def _stored(self) -> dict[str, Any]:
        """Read the description with which a store was begun; empty: there is none."""
        try:
            stored = json.loads(self.begun.read_text(encoding="utf-8")) if self.begun.is_file() else {}
            return {**stored}
        except OSError as error:
            raise unreadable(self.begun, error) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.begun} is damaged ({error}); remove {self.out} and pack again") from error

    def _check_empty(self) -> None:
        try:
            others = sorted(path.name for path in self.out.iterdir() if path.name not in (WORK, LENGTHS))
        except OSError as error:
            raise unreadable(self.out, error) from error
        if others:
            raise ConfigError(f"{self.out} is no store and not empty ({', '.join(others[:5])}); choose another folder")


def _check_same(stored: Mapping[str, Any], current: Mapping[str, Any], out: Path) -> None:
    """Refuse a description of a store that differs from the one it was begun or finished with."""
    if lines := list(differences(stored, current)):
        raise ConfigError(
            f"{out} holds rows that were made otherwise: {'; '.join(lines)}. Pack into another folder, or remove this "
            "one"
        )


# ---------------------------------------------------------------------- one run


@final
@dataclass(frozen=True, kw_only=True)
class _Run:
    """One call of `write_rows`."""

    dataset: MapStyle
    collator: VLMCollator
    settings: StoreSettings
    folder: WorkFolder
    in_order: InOrder
    measure: Callable[[MapStyle, VLMCollator], LengthTable]
    progress: Progress
    description: Mapping[str, Any]

    def finished(self) -> Manifest | None:
        """Return the manifest of a folder in which this very store was finished before; None: there is none.

        Raises:
            ConfigError: another store was finished there (names the differences), or this one has lost a file since.
        """
        out = self.folder.out
        if not is_store(out):
            return None
        manifest = Manifest.load(out)
        _check_same({"settings": manifest.settings, "processor": manifest.processor}, self.description, out)
        check_files(out, manifest, others=(PLAN, LENGTHS, LEFT_OUT))
        self._compare(manifest.shards)
        return manifest

    def write(self) -> Manifest:
        """Write whatever is not written yet."""
        out = self.folder.out
        self.folder.claim(self.description)
        table, plan = self._planned()
        jobs = _jobs(table, plan, self.settings.shard_rows)
        shards = {job.file: shard for job in jobs if (shard := _finished_shard(out / job.file, plan.digest))}
        self._compare(list(shards.values()))
        entries = _left_out(table, plan, self.dataset)
        for entry in entries:
            entry["digest"] = sample_digest(sample_at(self.dataset, entry["index"]), self.collator)
        lines = "".join(json_text(entry) + "\n" for entry in entries)
        write_text(out / LEFT_OUT, lines, folder=self.folder.unfinished)
        self._write_shards(jobs, shards, table, plan)
        tokens = plan.sums(table.tokens, None if table.groups is None else table.groups.tokens)
        manifest = Manifest(
            settings=self.description["settings"],
            processor=self.description["processor"],
            plan=plan.digest,
            counts=_count(table, plan),
            reasons=dict(Counter(entry["reason"] for entry in entries).most_common()),
            fill_ratio=round(float(tokens.sum() / np.maximum(plan.tree_tokens, plan.capacity).sum()), 6),
            sizes=_fixed_sizes(table, plan, self.collator.slots),
            shards=tuple(shards[job.file] for job in jobs),
        )
        self.folder.write_json(out / NAME, manifest.to_json())
        return manifest

    def _planned(self) -> tuple[LengthTable, Plan]:
        """Load lengths and plan; make and save both where one is missing.

        Until there is a plan lengths are measured anew, out of their cache: a sample that stopped the run before may
        be a better one now.
        """
        lengths, planned = self.folder.out / LENGTHS, self.folder.out / PLAN
        is_planned = lengths.is_file() and planned.is_file()
        with skipped_are_reported():  # by an error, or in the list of samples in no row
            table = LengthTable.load(lengths) if is_planned else self.measure(self.dataset, self.collator)
        _check_refused(table, self.collator)
        plan = _plan_rows(table, self.settings, self.collator.slots, self.dataset)
        if is_planned and Plan.load(planned).digest != plan.digest:
            raise ConfigError(f"{planned} is not the plan of {lengths}; remove {self.folder.out} and pack again")
        for path, content in () if is_planned else ((lengths, table), (planned, plan)):
            with atomic_file(path, folder=self.folder.unfinished) as temporary, writing(path):
                content.save(temporary)
        return table, plan

    def _write_shards(
        self, jobs: Sequence[_ShardJob], shards: dict[str, Shard], table: LengthTable, plan: Plan
    ) -> None:
        """Write the files that are missing in `shards`, and put them there."""
        writer = _ShardWriter(
            dataset=self.dataset,
            collator=self.collator,
            folder=self.folder,
            has_media=bool((table.images + table.videos).any()),
            jobs=tuple(job for job in jobs if job.file not in shards),
            plan=plan.digest,
        )
        self.progress("write", len(shards), len(jobs))
        with closing(self.in_order(writer, len(writer.jobs))) as written:
            for shard in written:
                shards[shard.file] = shard
                self.progress("write", len(shards), len(jobs))

    def _compare(self, shards: Sequence[Shard]) -> None:
        """Compare the samples that a store holds, or lists as left out, with the data set.

        Raises:
            ConfigError: a sample was changed; lists places. A file is damaged.
        """
        out, names = self.folder.out, tuple(shard.file for shard in shards)
        listed = _listed_digests(out / LEFT_OUT)
        work = partial(_changed, self.dataset, self.collator, ShardFiles(out, shards), names, listed)
        total, changed = len(names) + bool(listed), []
        with closing(self.in_order(work, total)) as parts:
            for done, part in enumerate(parts, 1):
                changed += part
                self.progress("compare", done, total)
        if changed:
            places = ", ".join(map(str, sorted(changed)[:NAMED]))
            raise ConfigError(
                f"{out} holds other samples than the data set: {len(changed)} were changed since they were packed (at "
                f"{places}{', ...' * (len(changed) > NAMED)}). Pack into another folder, or remove this one"
            )


def _listed_digests(path: Path) -> list[tuple[int, str]]:
    """Read (place, digest) of the samples in no row; empty where there is no list."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []  # texts may hold U+2028
        return [(int(entry["index"]), str(entry["digest"])) for entry in map(json.loads, lines)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged ({error!r:.200}); restore it, or remove the folder and pack again"
        ) from error


def _changed(
    dataset: MapStyle,
    collator: VLMCollator,
    files: ShardFiles,
    names: Sequence[str],
    listed: Sequence[tuple[int, str]],
    part: int,
) -> list[int]:
    """The places of samples of a file, or of those left out, that differ from the data set."""
    stored = files.digests(names[part]) if part < len(names) else listed
    return [
        place
        for place, digest in stored
        if not 0 <= place < len(dataset) or sample_digest(sample_at(dataset, place), collator) != digest
    ]


def _description(dataset: MapStyle, collator: VLMCollator, settings: StoreSettings) -> dict[str, Any]:
    """Describe everything besides the samples that decides the bytes of a store, as JSON has it."""
    sharing, slots = collator.share_prefixes, asdict(collator.slots)
    del slots["pad_to"]
    names = ("max_length", "overlength", "train_on", "on_bad", "markers", "add_stop")
    decided = {
        **{name: getattr(collator, name) for name in names},
        "ignored_keys": sorted(collator.ignored_keys),
        "share_prefixes": None if sharing is None else asdict(sharing),
        "sampling": asdict(collator.file_rules.sampling),
        "limits": asdict(collator.limits),
    }
    data = {"samples": len(dataset)}
    description = {
        "settings": {**asdict(settings), "slots": slots, "collator": decided, "data": data},
        "processor": fingerprint(collator),
    }
    return json.loads(json.dumps(description, default=_json_value))


def _json_value(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else value.item()


# ---------------------------------------------------------------------- the plan


def _check_refused(table: LengthTable, collator: VLMCollator) -> None:
    """Raise unless the collator would go on with the samples that are left.

    Raises:
        SampleError: a sample was refused, and `on_bad` is "raise".
        ConfigError: more were refused than the collator's limit of skipped samples allows, or all.
    """
    skip_log = SkipLog(limit=collator.skip_log.limit)
    refused = {refusal.index: refusal for refusal in table.refused}
    with skip_log.at_once():
        for before, place in pairwise([-1, *sorted(refused), table.measured]):
            if place - before > 1:
                skip_log.use(place - before - 1)
            if place == table.measured:
                break
            refusal = refused[place]
            error = SampleError(refusal.detail, index=place, reason=refusal.reason, sample_id=refusal.sample_id)
            if collator.leaves_out(error.reason):
                skip_log.note(error)
            elif collator.on_bad == "skip":
                skip_log.refuse(error)
            else:
                remedy = "on_bad='skip' (--on-bad skip) leaves them out and lists them"
                count = f"{len(refused)} sample(s) cannot be used in all; {remedy}"
                raise SampleError(
                    f"{error.detail}. {count}", index=place, reason=error.reason, sample_id=error.sample_id
                )
    if not len(table):
        raise ConfigError(f"none of {table.measured} samples can be packed: {table.reasons or 'the data set is empty'}")


def _plan_rows(table: LengthTable, settings: StoreSettings, slots: SlotRule, dataset: MapStyle) -> Plan:
    """Plan which samples share a row; a sample's id in the plan is its place in the table.

    Samples count as long as their slots are, and prefixes that a table has groups of once a row. The data set is read
    for the id of a sample that is refused.

    Raises:
        SampleError: samples exceed a row by themselves, and `oversize` is "error"; lists their places.
        ConfigError: there are too few samples for `rows_multiple`.
    """
    lengths = round_up(table.tokens, slots.multiple)
    budgets = table.budgets(patches=settings.max_patches, images=settings.max_images)
    if slots.max_segments is not None:
        budgets = (*budgets, Budget(name="samples", costs=np.ones_like(lengths), limit=slots.max_segments))
    if settings.oversize == "error":
        _refuse_too_large(table, lengths, settings.capacity, budgets, dataset)
    plan = plan_bins(
        lengths,
        settings.capacity,
        strategy=settings.strategy,
        budgets=budgets,
        oversize=settings.oversize,
        seed=settings.seed,
        groups=table.groups,
    )
    if not len(plan):
        raise ConfigError(f"all {len(table)} samples exceed a row of {settings.capacity} tokens; raise the capacity")
    return split_rows(plan, settings.rows_multiple)


def _refuse_too_large(
    table: LengthTable, lengths: np.ndarray, capacity: int, budgets: tuple[Budget, ...], dataset: MapStyle
) -> None:
    """Refuse samples as `plan_bins` does, by their places in the data set instead of those in the table."""
    by_place = [dataclasses.replace(budget, costs=table.by_place(budget.costs)) for budget in budgets]
    lengths = table.by_place(lengths)
    try:
        refuse_too_large(too_large(lengths, capacity, by_place), lengths, capacity, by_place)
    except SampleError as error:
        name = None if error.index is None else sample_id_of(sample_at(dataset, error.index))
        raise SampleError(error.detail, index=error.index, reason=error.reason, sample_id=name) from None


# ---------------------------------------------------------------------- samples in no row, and totals


def _left_out(table: LengthTable, plan: Plan, dataset: MapStyle) -> list[dict[str, Any]]:
    """List the samples that are in no row, by their places.

    Args:
        table: with the refused ones.
        plan: with those that exceed a row.
        dataset: of which the ids of the latter are read.
    """
    entries = [*(dataclasses.asdict(refusal) for refusal in table.refused), *_dropped(table, plan, dataset)]
    return sorted(entries, key=lambda entry: entry["index"])


def _dropped(table: LengthTable, plan: Plan, dataset: MapStyle) -> Iterator[dict[str, Any]]:
    limits = [("tokens", plan.lengths, plan.capacity), *((b.name, b.costs, b.limit) for b in plan.budgets)]
    for at in plan.dropped.tolist():
        over = ", ".join(f"{costs[at]} {name} (a row holds {most})" for name, costs, most in limits if costs[at] > most)
        place = int(table.sample_ids[at])
        yield {
            "index": place,
            "sample_id": sample_id_of(sample_at(dataset, place)),
            "reason": "oversize",
            "detail": f"it exceeds a row by itself: {over}; raise the limit, or choose oversize='own_row'",
        }


def _count(table: LengthTable, plan: Plan) -> Counts:
    """Count samples, rows and what is in them."""
    packed = plan.sample_ids
    return Counts(
        total=table.measured,
        refused=len(table.refused),
        dropped=len(plan.dropped),
        samples=len(packed),
        rows=len(plan),
        tokens=int(table.tokens[packed].sum()),
        targets=int(table.targets[packed].sum()),
        images=int(table.images[packed].sum()),
        videos=int(table.videos[packed].sum()),
        patches=int(_media_sums(table, plan)["patches"].sum()),
    )


def _media_sums(table: LengthTable, plan: Plan) -> dict[str, np.ndarray]:
    """int64 [G] each: patches and media that each row computes, those of shared prefixes once."""
    groups = table.groups
    needs = {"patches": (table.patches, None), "media": (table.images + table.videos, None)}
    if groups is not None:
        needs = {"patches": (table.patches, groups.patches), "media": (needs["media"][0], groups.images)}
    return {name: plan.sums(*values) for name, values in needs.items()}


def _fixed_sizes(table: LengthTable, plan: Plan, slots: SlotRule) -> FixedSizes:
    """Return the largest sizes of any row."""
    widths, media = round_up(plan.tokens, slots.row_multiple), _media_sums(table, plan)
    return FixedSizes(
        longest_row=int(widths.max()),
        longest_segment=int(table.tokens[plan.sample_ids].max()),
        most_segments=int(np.diff(plan.bounds).max()),
        most_images=int(media["media"].max()),
        most_patches=int(media["patches"].max()),
    )


# ---------------------------------------------------------------------- one file


class _PlannedSample(NamedTuple):
    """One sample of a planned row, as it was measured for the plan."""

    place: int
    tokens: int
    targets: int


@final
@dataclass(frozen=True, kw_only=True)
class _ShardJob:
    """Which rows go into a file."""

    file: str
    rows: tuple[tuple[_PlannedSample, ...], ...]


def _jobs(table: LengthTable, plan: Plan, shard_rows: int) -> list[_ShardJob]:
    columns = (column.tolist() for column in (table.sample_ids, table.tokens, table.targets))
    samples = list(map(_PlannedSample, *columns))
    rows = [tuple(samples[at] for at in row) for row in plan]
    files = divided_up(len(rows), shard_rows)
    return [
        _ShardJob(file=shard_name(number, files), rows=tuple(rows[number * shard_rows : (number + 1) * shard_rows]))
        for number in range(files)
    ]


@final
@dataclass(frozen=True, kw_only=True)
class _ShardWriter:
    """Writes files of rows; pickles to workers."""

    dataset: MapStyle
    collator: VLMCollator
    folder: WorkFolder
    has_media: bool
    """Some sample has images or videos."""
    jobs: tuple[_ShardJob, ...]
    plan: str
    """Digest of the plan; a file of another one is not continued."""

    def __call__(self, at: int) -> Shard:
        """Write the file of one job.

        Raises:
            SampleError: a sample is not what was measured, or its image cannot be read; names its place.
            ConfigError: a sample cannot be stored, or the disk is full.
        """
        job = self.jobs[at]
        with atomic_file(self.folder.out / job.file, folder=self.folder.unfinished) as path:
            self._write(job, path)
            shard = _shard_of(path)
        return dataclasses.replace(shard, file=job.file)

    def _write(self, job: _ShardJob, path: Path) -> None:
        """Write the rows one by one, each as a row group; an error that the data set raises is no error of the file."""
        columns = schema(
            has_media=self.has_media,
            is_shared=self.collator.share_prefixes is not None,
            has_runs=self.collator.metadata.by_processor,
        )
        samples = hashlib.sha256()
        options = {"compression": COMPRESSION, "use_dictionary": False, "write_statistics": False}
        with pyarrow().parquet.ParquetWriter(path, columns, write_page_checksum=True, **options) as writer:
            for planned in job.rows:
                record = self._record(planned)
                samples.update(json.dumps([record["places"], record["digests"]]).encode())
                row = pyarrow().Table.from_pylist([{name: record[name] for name in columns.names}], schema=columns)
                with writing(self.folder.out / job.file):
                    writer.write_table(row)
            writer.add_key_value_metadata({PLANNED: self.plan, SAMPLES: samples.hexdigest()})

    def _record(self, planned: Sequence[_PlannedSample]) -> dict[str, Any]:
        features = [self.dataset[sample.place] for sample in planned]
        record = record_of(
            [self._measured(feature, sample) for feature, sample in zip(features, planned, strict=True)],
            [sample.place for sample in planned],
            [sample_digest(feature, self.collator) for feature in features],
            self.collator.limits,
            self.collator.file_rules.limits,
        )
        return record if self.collator.share_prefixes is None else each_medium_once(record)

    def _measured(self, feature: Any, planned: _PlannedSample) -> Encoded:
        sample = self.collator.measure(feature, planned.place)
        if (sample.num_tokens, sample.num_targets) != (planned.tokens, planned.targets):
            raise SampleError(
                f"it has {sample.num_tokens} tokens and {sample.num_targets} targets, and had {planned.tokens} tokens "
                f"and {planned.targets} targets when it was measured: the data set was changed meanwhile; pack into "
                "another folder",
                index=planned.place,
                reason="changed",
                sample_id=sample.sample_id,
            )
        return sample


def _shard_of(path: Path) -> Shard:
    """Describe a file that is whole."""
    metadata = pyarrow().parquet.read_metadata(path)
    samples = metadata.metadata[SAMPLES.encode()].decode()
    size = path.stat().st_size
    return Shard(file=path.name, rows=metadata.num_rows, bytes=size, sha256=sha256_of(path), samples=samples)


def _finished_shard(path: Path, plan: str) -> Shard | None:
    """Describe a file that an interrupted run has finished, for the same plan; None: there is none."""
    try:
        stored = pyarrow().parquet.read_metadata(path).metadata
    except (OSError, ValueError):  # not there, or damaged: it is written anew
        return None
    return _shard_of(path) if stored.get(PLANNED.encode()) == plan.encode() else None
