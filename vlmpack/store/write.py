"""write_rows: plan the rows of a data set and write them to files.

    samples ──measure──▶ lengths.zip ──plan──▶ plan.zip, left_out.jsonl ──write──▶ rows-*.parquet ──▶ manifest.json

Every arrow ends in files that are there whole or not at all. A run that was killed is started again, goes on behind the
last of them, and ends with the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.collate.assemble import SharePrefixes
from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.frame_sampling import FrameSampling
from vlmpack.data.images import ImageError
from vlmpack.errors import ConfigError, SampleError, check_kind, skipped_are_reported
from vlmpack.files import atomic_file, write_text, writing
from vlmpack.loading.resumable import MapStyle, check_samples, sample_at
from vlmpack.plan.length_table import LengthTable
from vlmpack.plan.lengths import divided_up
from vlmpack.plan.plan import Plan
from vlmpack.store import planning
from vlmpack.store.executors import Executor, InOrder, executor_of
from vlmpack.store.folder import WorkFolder, check_differences, check_free, claim, locked
from vlmpack.store.manifest import (
    LEFT_OUT,
    LENGTHS,
    NAME,
    PLAN,
    Manifest,
    Shard,
    check_other_files,
    check_shard_files,
    fingerprint,
    is_store,
    shard_name,
)
from vlmpack.store.measure import measure_lengths, measure_on_ray, undecoded
from vlmpack.store.planning import StoreSettings
from vlmpack.store.records import json_text, stored_image
from vlmpack.store.shards import PlannedSample, ShardJob, ShardWriter, check_unchanged, finished_shard, sample_digest

Progress = Callable[[str, int, int | None], None]
"""Is called with the stage ("measure" samples, "compare" or "write" files), how many are done, and of how many."""

TRIED = 8
"""Samples whose images must lie in files, before all are measured for a store of references."""


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
    """Plan the rows of a data set and write them to a folder, images encoded or by reference, never as pixels.

    What was written before by the same call is kept: run it again after it was interrupted. The files do not depend
    on `workers`, `executor` or interruptions.

    Args:
        dataset: map-style, of samples that the collator takes.
        out: the folder; what is in it must be of the same call.
        collator: with `layout="packed"`. Its `slots` decide what samples are rounded up to, which the plan counts. With
            `share_prefixes` samples that begin alike share rows, and each image of a row is written once.
        settings: of the plan and the files.
        workers: processes that measure and write; 0: this one alone.
        executor: "ray" measures and writes as Ray tasks, on machines that all see `out`, instead of by `workers`.
        cache: file that keeps lengths between calls; None: as long as this one is not finished.
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
    planning.check_collator(collator, settings)
    dataset, folder = _with_places(dataset), WorkFolder(out=Path(out))
    _check_references(dataset, collator, settings)
    run = _Run(
        dataset=dataset,
        collator=collator,
        settings=settings,
        folder=folder,
        in_order=in_order,
        measure=_measurer(executor, folder, workers, cache, progress, collator.share_prefixes),
        progress=progress,
    )
    description = _description(dataset, collator, settings)
    manifest = run.finished(description)
    if manifest is None:
        check_free(folder)
    if manifest is None or folder.path.exists():  # a run may have been killed just before it removed its work folder
        with locked(folder):
            manifest = manifest or run.finished(description) or run.write(description)
            folder.remove()
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


def _check_references(dataset: MapStyle, collator: VLMCollator, settings: StoreSettings) -> None:
    """Raise unless references can be stored: the images of the first samples have to lie in files.

    Bad samples are refused later, with all others.

    Raises:
        ConfigError: one of them lies in none.
    """
    for place in range(min(TRIED, len(dataset)) if settings.images == "reference" else 0):
        try:
            for visual in collator.measure(dataset[place], place).images:
                if visual.source is not None:
                    stored_image(visual.source.source, "reference", collator.limits)
        except (SampleError, ImageError):
            continue


def _measurer(
    executor: Executor,
    folder: WorkFolder,
    workers: int,
    cache: str | Path | None,
    progress: Progress,
    sharing: SharePrefixes | None,
) -> Callable[[MapStyle, VLMCollator], LengthTable]:
    measured, min_shared = partial(progress, "measure"), None if sharing is None else sharing.min_shared
    if executor == "ray":
        return partial(measure_on_ray, folder=folder, progress=measured, min_shared=min_shared)
    kept = folder.path / "lengths.sqlite" if cache is None else cache
    return partial(measure_lengths, workers=workers, cache=kept, progress=measured, min_shared=min_shared)


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

    def finished(self, description: Mapping[str, Any]) -> Manifest | None:
        """Return the manifest of a folder in which this very store was finished before; None: there is none.

        Raises:
            ConfigError: another store was finished there (names the differences), or this one has lost a file since.
        """
        out = self.folder.out
        if not is_store(out):
            return None
        manifest = Manifest.load(out)
        check_differences({"settings": manifest.settings, "processor": manifest.processor}, description, out)
        check_shard_files(out, manifest)
        check_other_files(out, manifest)
        self._compare(manifest.shards)
        return manifest

    def write(self, description: dict[str, Any]) -> Manifest:
        """Write whatever is not written yet."""
        claim(self.folder, description)
        table, plan = self._planned()
        jobs = _jobs(table, plan, self.settings.shard_rows)
        noted = [finished_shard(self.folder, job.file, plan.digest) for job in jobs]
        shards = {shard.file: shard for shard in noted if shard is not None}
        self._compare(list(shards.values()))
        entries = planning.left_out(table, plan, self.dataset)
        for entry in entries:
            entry["digest"] = sample_digest(sample_at(self.dataset, entry["index"]), self.collator)
        lines = "".join(json_text(entry) + "\n" for entry in entries)
        write_text(self.folder.out / LEFT_OUT, lines, folder=self.folder.unfinished)
        manifest = Manifest(
            settings=description["settings"],
            processor=description["processor"],
            plan=plan.digest,
            counts=planning.count(table, plan),
            reasons=dict(Counter(entry["reason"] for entry in entries).most_common()),
            fill_ratio=round(planning.fill_ratio(table, plan), 6),
            sizes=planning.fixed_sizes(table, plan, self.collator.slots),
            shards=self._shards(jobs, shards, table, plan),
        )
        self.folder.write_json(self.folder.out / NAME, manifest.to_json())
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
        planning.check_refused(table, self.collator)
        plan = planning.plan_rows(table, self.settings, self.collator.slots, self.dataset)
        if is_planned and Plan.load(planned).digest != plan.digest:
            raise ConfigError(f"{planned} is not the plan of {lengths}; remove {self.folder.out} and pack again")
        for path, content in () if is_planned else ((lengths, table), (planned, plan)):
            with atomic_file(path, folder=self.folder.unfinished) as temporary, writing(path):
                content.save(temporary)
        return table, plan

    def _compare(self, shards: Sequence[Shard]) -> None:
        compared = partial(self.progress, "compare")
        check_unchanged(self.dataset, self.collator, self.folder.out, shards, self.in_order, compared)

    def _shards(
        self, jobs: Sequence[ShardJob], finished: Mapping[str, Shard], table: LengthTable, plan: Plan
    ) -> tuple[Shard, ...]:
        shards = dict(finished)
        writer = ShardWriter(
            dataset=self.dataset,
            collator=self.collator,
            folder=self.folder,
            images=self.settings.images,
            has_media=bool((table.images + table.videos).any()),
            jobs=tuple(job for job in jobs if job.file not in shards),
            plan=plan.digest,
        )
        self.progress("write", len(shards), len(jobs))
        with closing(self.in_order(writer, len(writer.jobs))) as written:
            for shard in written:
                shards[shard.file] = shard
                self.progress("write", len(shards), len(jobs))
        return tuple(shards[job.file] for job in jobs)


def _jobs(table: LengthTable, plan: Plan, shard_rows: int) -> list[ShardJob]:
    columns = (column.tolist() for column in (table.sample_ids, table.tokens, table.targets))
    samples = list(map(PlannedSample, *columns))
    rows = [tuple(samples[at] for at in row) for row in plan]
    files = divided_up(len(rows), shard_rows)
    return [
        ShardJob(file=shard_name(number, files), rows=tuple(rows[number * shard_rows : (number + 1) * shard_rows]))
        for number in range(files)
    ]


def _description(dataset: MapStyle, collator: VLMCollator, settings: StoreSettings) -> dict[str, Any]:
    """Describe everything besides the samples that decides the bytes of a store, as JSON has it."""
    slots = {name: value for name, value in asdict(collator.slots).items() if name != "pad_to"}
    decided = {"max_length": collator.max_length, "overlength": collator.overlength, "train_on": collator.train_on}
    decided |= {} if collator.share_prefixes is None else {"share_prefixes": asdict(collator.share_prefixes)}
    decided |= {} if collator.markers == "auto" else {"markers": collator.markers}
    decided |= {} if collator.add_stop is None else {"add_stop": collator.add_stop}
    decided |= {"ignored_keys": sorted(collator.ignored_keys)} if collator.ignored_keys else {}
    sampling = collator.file_rules.sampling
    decided |= {} if sampling == FrameSampling() else {"sampling": asdict(sampling)}
    limits = {**asdict(collator.limits), "formats": list(collator.limits.formats)}
    description = {
        "settings": {
            **asdict(settings),
            "slots": slots,
            "collator": {**decided, "on_bad": collator.on_bad, "limits": limits},
            "data": {"samples": len(dataset)},
        },
        "processor": fingerprint(collator),
    }
    return json.loads(json.dumps(description, default=np.generic.item))
