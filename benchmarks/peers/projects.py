"""The peers: calls of each project, ours for the same work, and the case that times them.

Hugging Face transformers, TRL (its packer is measured by the case `plan`), SeqPacker, Megatron-Bridge, NeMo Automodel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from benchmarks.cases.plan import LENGTH_SETS
from benchmarks.figures import BenchSettings, Figure, Skipped
from benchmarks.peers.contest import (
    Contest,
    Peer,
    PeerShapes,
    PeerWork,
    Sample,
    Way,
    check_equal,
    peer,
    read_padded,
    read_row,
)
from benchmarks.timing import alternate, one_thread
from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.interop.seqpacker import RowCollator, packed_collate_fn
from vlmpack.layout import IGNORE, PackedRow, PaddedBatch, pack
from vlmpack.plan import plan_bins


def rows_joined(features: Sequence[Mapping[str, Any]]) -> Way:
    """Text by `RowCollator`, which checks shapes, with positions and boundaries."""
    collate = RowCollator(bare_row="one_sample")
    return Way(call=lambda: collate(features), read=lambda row: read_row(row, row["cu_seqlens_q"].tolist()))


def collated(features: Sequence[Mapping[str, Any]], work: PeerWork) -> Way:
    """Text by `VLMCollator`, which checks every sample, and its positions, which a step computes by itself."""
    collate = VLMCollator(work.tokenizer, layout="packed")

    def call() -> dict[str, Any]:
        batch = collate(features)
        return {**batch, "position_ids": batch["vlmpack"].segments.position_in_segment()}

    return Way(call=call, read=lambda row: read_row(row, row["cu_seqlens_q"].tolist()))


def collated_images(work: PeerWork) -> Way:
    """Text and images by `VLMCollator`, and the three rows of their positions; without each sample's last token."""
    collate = VLMCollator(work.processor, layout="packed")

    def call() -> tuple[PackedRow, torch.Tensor]:
        row = collate.collate(work.images)
        assert isinstance(row, PackedRow)
        assert row.metadata is not None
        grids = row.metadata.image_grids
        return row, work.family.positions(row.mm_token_type_ids, row.segments, config=work.config, image_grids=grids)

    def read(result: tuple[PackedRow, torch.Tensor]) -> list[Sample]:
        row, position_41T = result
        batch = {"input_ids": row.input_ids, "labels": row.shift_labels, "position_ids": position_41T[1:]}
        return [sample.without_last_token() for sample in read_row(batch, row.segments.real, shifted=True)]

    return Way(call=call, read=read)


@peer(
    "Hugging Face, DataCollatorForSeq2Seq", "transformers", "transformers.data.data_collator", "DataCollatorForSeq2Seq"
)
def hf_padded(transformers: ModuleType, work: PeerWork) -> Iterator[Contest]:
    collate = transformers.DataCollatorForSeq2Seq(work.tokenizer)
    our_collate = VLMCollator(work.tokenizer, layout="padded")
    features = [{**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in work.lists]
    yield Contest(
        peer=Way(call=lambda: collate(features), read=read_padded),
        vlmpack={"VLMCollator": Way(call=lambda: our_collate(work.lists), read=read_padded)},
    )


@peer(
    "Hugging Face, DataCollatorWithFlattening",
    "transformers",
    "transformers.data.data_collator",
    "DataCollatorWithFlattening",
)
def hf_flattened(transformers: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """Compare rows without `seq_idx`, which repeats the boundaries."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def contest(kind: str, features: Sequence[Mapping[str, Any]]) -> Contest:
        return Contest(
            peer=Way(call=lambda: collate(features), read=lambda row: read_row(row, row["cu_seq_lens_q"])),
            vlmpack={"RowCollator": rows_joined(features), "VLMCollator": collated(features, work)},
            work=kind,
        )

    yield contest("lists", work.lists)
    yield contest("tensors", work.tensors)


@peer("TRL, padding-free", "trl", "trl.trainer.sft_trainer", "DataCollatorForLanguageModeling")
def trl_padding_free(trl: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """Lists only, which is what its trainer hands it; it also gives `seq_idx`."""
    collate = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    yield Contest(
        peer=Way(call=lambda: collate(work.lists), read=lambda row: read_row(row, row["cu_seq_lens_q"])),
        vlmpack={"RowCollator": rows_joined(work.lists), "VLMCollator": collated(work.lists, work)},
        work="lists",
    )


@peer("SeqPacker, packed_collate_fn", "seqpacker", "seqpacker.torch_utils", "packed_collate_fn")
def seqpacker_collate(torch_utils: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """It takes no labels: every token is learnt. Both lay the longest sample first, where they please among equals."""
    samples = [sample["input_ids"] for sample in work.lists]
    peer_collate, our_collate = torch_utils.packed_collate_fn(work.tokens), packed_collate_fn(work.tokens)
    yield Contest(
        peer=Way(call=lambda: peer_collate(samples), read=lambda row: _read_seqpacker(row, row.labels)),
        vlmpack={
            "packed_collate_fn": Way(
                call=lambda: our_collate(samples), read=lambda batch: _read_seqpacker(batch, batch.shift_labels)
            )
        },
        work="ids only",
    )


def _read_seqpacker(batch: Any, targets: Any) -> list[Sample]:
    """One row of both projects' `PackedBatch`, its samples in an order of their own."""
    (boundaries,) = batch.cu_seqlens
    row = {"input_ids": batch.input_ids, "labels": targets, "position_ids": batch.position_ids}
    return sorted(read_row(row, boundaries, shifted=True), key=lambda sample: sample.input_ids)


@peer("SeqPacker, pack_sequences", "seqpacker", "seqpacker", "pack_sequences")
def seqpacker_plan(package: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """Equal is the number of rows: among rows as full as each other, choices differ."""
    capacity = work.shapes.capacity
    lengths = LENGTH_SETS["CORD"].lengths(work.shapes.planned, work.seed).clip(max=capacity)
    yield Contest(
        peer=Way(
            call=lambda: package.pack_sequences(lengths, capacity).bins,
            read=lambda bins: _rows_of_all(bins, len(lengths)),
        ),
        vlmpack={
            "plan_bins": Way(
                call=lambda: plan_bins(lengths, capacity, strategy="best_fit_decreasing").bins,
                read=lambda rows: _rows_of_all(rows, len(lengths)),
            )
        },
        work=f"{work.shapes.planned:,} lengths",
        target=None,
    )


def _rows_of_all(rows: Sequence[Sequence[int]], samples: int) -> tuple[int, bool]:
    """Return (number of rows, whether every sample is in exactly one of them)."""
    return len(rows), sorted(sample for row in rows for sample in row) == list(range(samples))


@peer(
    "Megatron-Bridge",
    "megatron-bridge",
    "megatron.bridge.data.packing.in_batch",
    "build_mcore_thd_sequence_batch_from_rows",
    "pack_right_padded_sequence_batch_to_mcore_thd",
)
def bridge_rows(in_batch: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """It checks shapes, as we do; positions are given to it, one row of them, while we compute ours."""
    rows = [{**sample, "position_ids": torch.arange(len(sample["input_ids"]))} for sample in work.tensors]
    batch = work.padded()

    def join_padded() -> Mapping[str, Any]:
        copied = dict(batch)
        in_batch.pack_right_padded_sequence_batch_to_mcore_thd(copied)
        return copied

    yield Contest(
        peer=Way(call=lambda: in_batch.build_mcore_thd_sequence_batch_from_rows(rows), read=_read_bridge),
        vlmpack={"RowCollator": rows_joined(work.tensors)},
        work="tensors, positions given",
    )
    yield Contest(
        peer=Way(call=join_padded, read=_read_bridge),
        vlmpack={"pack": _packed_by_us(batch)},
        work="a padded batch",
    )


@peer(
    "Megatron-Bridge, pack_batch_sequences",
    "megatron-bridge",
    "megatron.bridge.training.vlm_step",
    "pack_batch_sequences",
)
def bridge_batch(vlm_step: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """It takes lengths from the ids, so that a real token of the padding's id at a sample's end would be cut off."""
    batch = work.padded()
    loss_mask = (batch["labels"] != IGNORE).float()

    def call() -> Mapping[str, Any]:
        names = ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids", "cu_seqlens_q", "max_seqlen")
        values = vlm_step.pack_batch_sequences(
            batch["input_ids"], batch["labels"], loss_mask, None, batch["position_ids"]
        )
        return dict(zip(names, values, strict=True))

    yield Contest(
        peer=Way(call=call, read=_read_bridge),
        vlmpack={"pack": _packed_by_us(batch, loss_mask=loss_mask)},
        work="a padded batch",
    )


def _packed_by_us(batch: Mapping[str, Any], **extras: torch.Tensor) -> Way:
    """`pack` without host metadata: the mask is read and checked."""
    padded = PaddedBatch(**batch, extras=extras)

    def read(row: PackedRow) -> list[Sample]:
        batch = {"input_ids": row.input_ids, "labels": row.shift_labels, "position_ids": row.position_ids}
        return read_row(batch, row.segments.real, shifted=True)

    return Way(call=lambda: pack(padded), read=read)


def _read_bridge(row: Mapping[str, Any]) -> list[Sample]:
    return read_row(row, row["cu_seqlens_q"])


@peer(
    "NeMo Automodel",
    "nemo-automodel",
    "nemo_automodel.components.datasets.vlm.neat_packing_vlm",
    "_compute_mrope_position_ids",
    "_shift_sample",
    "_build_packed_vlm_sample",
)
def automodel_row(packing: ModuleType, work: PeerWork) -> Iterator[Contest]:
    """Make a row as its packed data set does: positions by the model's function, shift, join. Pixels are joined too.

    Each sample loses its last token on the way, whose target nothing is.
    """
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(work.config)
    samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in work.images]

    def placed(sample: dict[str, Any]) -> dict[str, Any]:
        positions = packing._compute_mrope_position_ids(sample, model.model.get_rope_index)
        return packing._shift_sample({**sample, "position_ids": positions}, has_mrope=True)

    def call() -> dict[str, Any]:
        return packing._build_packed_vlm_sample([placed(sample) for sample in samples], work.tokens, 0, has_mrope=True)

    yield Contest(
        peer=Way(call=call, read=_read_automodel),
        vlmpack={"VLMCollator": collated_images(work)},
        work="images, without last tokens",
    )


def _read_automodel(row: dict[str, Any]) -> list[Sample]:
    return read_row(row, [0, *accumulate(row["seq_lens"])], shifted=True)


PEERS: tuple[Peer, ...] = (
    hf_padded,
    hf_flattened,
    trl_padding_free,
    seqpacker_collate,
    seqpacker_plan,
    bridge_rows,
    bridge_batch,
    automodel_row,
)
"""In the order in which they are measured."""

CASE = "peers"
THEIRS = "theirs"


def measure_peers(settings: BenchSettings, shapes: PeerShapes) -> list[Figure | Skipped]:
    """Time every peer that is installed, with one thread, as in a DataLoader's worker."""
    work = PeerWork.of(shapes, seed=settings.seed)
    figures: list[Figure | Skipped] = []
    contests: list[tuple[str, Contest]] = []
    for project in PEERS:
        try:
            module = project.load()
        except ConfigError as error:
            figures.append(Skipped(case=CASE, name=project.name, why=str(error)))
            continue
        contests += [(_title(project, contest), contest) for contest in project.contests(module, work)]
    for title, contest in contests:
        figures += _measure_contest(title, contest, settings, seconds=settings.seconds / len(contests))
    return figures


def _title(project: Peer, contest: Contest) -> str:
    return f"{project.name} {project.version}" + f" ({contest.work})" * bool(contest.work)


def _measure_contest(
    title: str, contest: Contest, settings: BenchSettings, *, seconds: float
) -> Iterator[Figure | Skipped]:
    try:
        check_equal(contest)
    except VlmpackError as error:
        yield Skipped(case=CASE, name=title, why=str(error), owed=True)
        return
    ways = {THEIRS: contest.peer.call, **{name: way.call for name, way in contest.vlmpack.items()}}
    with one_thread():
        timings = alternate(ways, seconds=seconds)
    yield Figure.timed(CASE, title, timings, THEIRS, settings)
    for name in contest.vlmpack:
        of = (THEIRS, name)
        yield Figure.compared(CASE, f"{title} / {name}", timings, of, settings, target=contest.target)
