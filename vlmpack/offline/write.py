"""write_rows: a data set, planned and written down as packed rows.

    samples ──measure──▶ lengths.zip ──plan──▶ plan.zip, left_out.jsonl ──write──▶ rows-*.parquet ──▶ manifest.json

Every arrow ends in files that are there whole or not at all. Whoever was killed is run again, goes on from the last of
them, and ends with the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, check_kind
from vlmpack.loading import check_samples
from vlmpack.offline.files import WorkFolder, json_text, work_folder, writing
from vlmpack.offline.manifest import LEFT_OUT, LENGTHS, NAME, PLAN, Manifest, Shard, shard_name
from vlmpack.offline.measure import MapStyle, measure_lengths, undecoded
from vlmpack.offline.planning import check_refused, count, fill, fixed_sizes, left_out, plan_rows, reasons
from vlmpack.offline.repair import lost_files, whole_shards
from vlmpack.offline.settings import StoreSettings, check_collator, check_free, claim, described, finished
from vlmpack.offline.shards import ShardJob, ShardWriter, written
from vlmpack.offline.unchanged import InOrder, check_unchanged
from vlmpack.offline.workers import in_order
from vlmpack.plan import LengthTable, Plan

Executor = Literal["local", "ray"]
EXECUTORS: tuple[Executor, ...] = ("local", "ray")
Progress = Callable[[str, int, int | None], None]
"""Is told what is being done ("measure" samples, "compare" or "write" files), how many are done, and of how many."""


def _silent(stage: str, done: int, total: int | None) -> None:
    return None


def write_rows(
    dataset: MapStyle,
    out: str | Path,
    collator: VLMCollator,
    settings: StoreSettings,
    *,
    workers: int = 0,
    executor: Executor = "local",
    cache: str | Path | None = None,
    progress: Progress = _silent,
) -> Manifest:
    """Plan the rows of a data set and write them to a folder, images encoded or by reference, never as pixels.

    What was written before by the same call is kept: run it again after it was interrupted. The files do not depend
    on `workers`, `executor` or interruptions.

    Args:
        dataset: map-style, of samples that the collator takes.
        out: the folder; what is in it must be of the same call.
        collator: with `layout="packed"`. Its `slots` say what samples are rounded up to, which the plan counts.
        settings: of the plan and the files.
        workers: processes that measure and write; 0: this one alone.
        executor: "ray" hands the work out to a Ray cluster, whose machines have to see `out`, instead of to `workers`.
        cache: file that keeps lengths between calls; None: as long as this one is not finished.
        progress: is told how far it is.

    Returns:
        What was written, and the sizes that CUDA graphs need.

    Raises:
        SampleError: a sample cannot be used and the collator's `on_bad` is "raise", or one exceeds a row and
            `oversize` is "error".
        ConfigError: something of another kind (a path, a processor), settings that contradict each other or what is in
            the folder, samples that were changed since they were packed, too many bad samples, a full disk, a worker
            that died, or an extra that is missing.
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"executor={executor!r} is not known; choose one of {', '.join(EXECUTORS)}")
    check_kind("collator", collator, VLMCollator, 'VLMCollator(processor, layout="packed")')
    check_kind("settings", settings, StoreSettings, "StoreSettings(capacity=4096)")
    check_collator(collator, settings)
    dataset = _with_places(dataset)
    description, out = described(dataset, collator, settings), Path(out)
    in_order = _executor(executor, workers)
    compared = partial(check_unchanged, dataset, collator, out, in_order=in_order, told=partial(progress, "compare"))
    before = finished(out, description)
    if before is None:
        check_free(out)
    elif _is_whole(out, before):
        compared(before.shards)
        return before
    with work_folder(out) as folder:
        before = finished(out, description)  # which another process may have made meanwhile
        if before is None:
            claim(folder, description)
        else:
            _remove(out, lost_files(out, before))  # damaged ones are made anew like those that are gone
        manifest = _Writing(
            dataset=dataset,
            collator=collator,
            settings=settings,
            folder=folder,
            in_order=in_order,
            measure=_measurer(executor, folder, workers, cache, progress),
            compare=compared,
            progress=progress,
            before=before,
        ).manifest(description)
        folder.remove()
    return manifest


def _is_whole(out: Path, manifest: Manifest) -> bool:
    """Whether a store was finished, and has lost nothing since."""
    shards_are_there = len(whole_shards(out, manifest)) == len(manifest.shards)
    return shards_are_there and not WorkFolder(out=out).path.exists() and not lost_files(out, manifest)


def _remove(out: Path, names: Iterable[str]) -> None:
    for name in names:
        with writing(out / name):
            (out / name).unlink(missing_ok=True)


def _with_places(dataset: Any) -> MapStyle:
    """The data set, images left encoded.

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


def _executor(executor: Executor, workers: int) -> InOrder:
    if executor == "local":
        return partial(in_order, workers=workers)
    from vlmpack.offline.on_ray import in_order_on_ray

    return in_order_on_ray


def _measurer(
    executor: Executor, folder: WorkFolder, workers: int, cache: str | Path | None, progress: Progress
) -> Callable[[MapStyle, VLMCollator], LengthTable]:
    told = partial(progress, "measure")
    if executor == "local":
        kept = folder.path / "lengths.sqlite" if cache is None else cache
        return partial(measure_lengths, workers=workers, cache=kept, progress=told)
    from vlmpack.offline.on_ray import measure_on_ray

    return partial(measure_on_ray, folder=folder, progress=told)


@final
@dataclass(frozen=True, kw_only=True)
class _Writing:
    """One call of `write_rows`."""

    dataset: MapStyle
    collator: VLMCollator
    settings: StoreSettings
    folder: WorkFolder
    in_order: InOrder
    measure: Callable[[MapStyle, VLMCollator], LengthTable]
    compare: Callable[[Sequence[Shard]], None]
    """Raises unless the samples of some files are those of the data set."""
    progress: Progress
    before: Manifest | None
    """Of the store, if it was finished before, and files of it are lost."""

    def manifest(self, description: dict[str, Any]) -> Manifest:
        """Do whatever is left to do."""
        table, plan = self._planned()
        jobs = _jobs(table, plan, self.settings.shard_rows)
        there = self._there(jobs, plan)
        self.compare(list(there.values()))
        entries = left_out(table, plan, self.dataset, self.collator)
        self._write_text(LEFT_OUT, "".join(json_text(entry) + "\n" for entry in entries))
        manifest = Manifest(
            settings=description["settings"],
            processor=description["processor"],
            plan=plan.digest,
            counts=count(table, plan),
            reasons=reasons(entries),
            fill=round(fill(table, plan), 6),
            sizes=fixed_sizes(table, plan, self.collator.slots),
            shards=self._shards(jobs, there, table, plan),
        )
        if self.before is not None and manifest.to_json() != self.before.to_json():
            raise self._changed("has other bytes now: the data set or pyarrow")
        self._write_text(NAME, json.dumps(manifest.to_json(), indent=2, ensure_ascii=False) + "\n")
        return manifest

    def _planned(self) -> tuple[LengthTable, Plan]:
        """Lengths and plan, from their files where both belong to what is written; made and saved where not.

        Until there is a plan lengths are measured anew, out of their cache: a sample that stopped the run before may
        be a better one now.
        """
        lengths, planned = self.folder.out / LENGTHS, self.folder.out / PLAN
        is_known = lengths.is_file() and (planned.is_file() or self.before is not None)
        table = LengthTable.load(lengths) if is_known else self.measure(self.dataset, self.collator)
        check_refused(table, self.collator)
        plan = plan_rows(table, self.settings, self.collator.slots, self.dataset)
        if is_known and planned.is_file() and Plan.load(planned).digest != plan.digest:
            raise ConfigError(f"{planned} is not the plan of {lengths}; remove {self.folder.out} and pack again")
        if self.before is not None and plan.digest != self.before.plan:
            raise self._changed("cannot be made again: the data set")
        for path, content in ((lengths, table), (planned, plan)):
            if not (is_known and path.is_file()):
                with self.folder.whole_file(path) as temporary, writing(path):
                    content.save(temporary)
        return table, plan

    def _changed(self, what: str) -> ConfigError:
        return ConfigError(
            f"a file of {self.folder.out} that was lost {what} was changed since; remove the folder and pack again"
        )

    def _write_text(self, name: str, text: str) -> None:
        """Write a file, unless it is there with this very content."""
        path = self.folder.out / name
        with writing(path):
            is_there = path.is_file() and path.read_bytes() == text.encode()
        if not is_there:
            self.folder.write_text(path, text)

    def _there(self, jobs: Sequence[ShardJob], plan: Plan) -> dict[str, Shard]:
        """Files that were finished before, by name."""
        there = {} if self.before is None else dict(whole_shards(self.folder.out, self.before))
        continued = (written(self.folder, job.file, plan.digest) for job in jobs if job.file not in there)
        return {**there, **{shard.file: shard for shard in continued if shard is not None}}

    def _shards(
        self, jobs: Sequence[ShardJob], there: Mapping[str, Shard], table: LengthTable, plan: Plan
    ) -> tuple[Shard, ...]:
        shards = dict(there)
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
        with closing(self.in_order(writer, len(writer.jobs))) as made:
            for shard in made:
                shards[shard.file] = shard
                self.progress("write", len(shards), len(jobs))
        return tuple(shards[job.file] for job in jobs)


def _jobs(table: LengthTable, plan: Plan, shard_rows: int) -> Sequence[ShardJob]:
    starts = range(0, len(plan), shard_rows)
    return [
        ShardJob(
            file=shard_name(number, len(starts)),
            rows=tuple(tuple(table.sample_ids[row].tolist()) for row in rows),
            lengths=tuple(tuple(table.tokens[row].tolist()) for row in rows),
            targets=tuple(tuple(table.targets[row].tolist()) for row in rows),
        )
        for number, start in enumerate(starts)
        for rows in [[plan[at] for at in range(start, min(start + shard_rows, len(plan)))]]
    ]
