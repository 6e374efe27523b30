"""peers: other projects on the same tokenized samples. Results must be equal before anything is timed.

The projects are Hugging Face transformers, TRL and NeMo Automodel. A project that cannot be imported is skipped, and
the report gives the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from math import prod
from typing import Any, final

import torch
from transformers import AutoModelForImageTextToText

from benchmarks.measuring import BenchSettings, Figure, Skipped, Target, alternate, one_thread
from vlmpack.collate import VLMCollator
from vlmpack.families import family_named
from vlmpack.interop.seqpacker import RowCollator
from vlmpack.layout import PackedRow
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.media import Grid
from vlmpack.testing import tiny_config, tiny_processor

FAMILY = family_named("qwen3_vl")
Features = Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, kw_only=True)
class PeerShapes:
    """Samples to collate: half of each sample's tokens are labeled; samples with images have one image each."""

    lengths: tuple[int, ...] = (768, 2154, 680, 1242, 592, 1330, 505, 2264)
    """Tokens of each sample: lengths of receipts."""
    grid: Grid = (1, 16, 24)
    """Grid of an image, in patches."""


@final
class PeerWork:
    """The samples for all peers; the same seed gives the same samples."""

    def __init__(self, shapes: PeerShapes, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.shapes, self.seed, self.tokens = shapes, seed, sum(shapes.lengths)
        self.processor, self.config = tiny_processor(FAMILY.model_type), tiny_config(FAMILY.model_type)
        # few pixels, because this case measures ids, labels and positions; the case `pixels` measures pixels
        self.processor.image_processor.patch_size = self.config.vision_config.patch_size = 2
        self.config.image_token_id = self.processor.image_token_id
        self.config.video_token_id = self.processor.video_token_id
        self.tokenizer = self.processor.tokenizer
        self.tensors = [_labelled(torch.randint(64, 192, (n,), generator=rng)) for n in shapes.lengths]
        self.lists = [{name: column.tolist() for name, column in sample.items()} for sample in self.tensors]
        self.images = [self._with_image(sample["input_ids"].clone(), rng) for sample in self.tensors]

    def _with_image(self, ids: torch.Tensor, rng: torch.Generator) -> dict[str, torch.Tensor]:
        """Replace the first tokens of the sample with an image."""
        tokens = FAMILY.media_tokens([self.shapes.grid], self.config)
        ids[0], ids[tokens + 1] = self.processor.vision_start_token_id, self.processor.vision_end_token_id
        ids[1 : tokens + 1] = self.processor.image_token_id
        sample = _labelled(ids)
        sample["labels"][: tokens + 2] = IGNORE
        pixels = torch.randn(prod(self.shapes.grid), FAMILY.patch_channels(self.config), generator=rng)
        return {**sample, "pixel_values": pixels, "image_grid_thw": torch.tensor([self.shapes.grid])}


def _labelled(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = ids.clone()
    labels[: len(labels) // 2] = IGNORE
    return {"input_ids": ids, "labels": labels}


@final
@dataclass(frozen=True)
class Sample:
    """One sample of a batch, with everything that a model is trained on."""

    input_ids: tuple[int, ...]
    targets: tuple[int, ...]
    """The target at each position; -100: none."""
    positions: tuple[tuple[int, ...], ...] = ()
    """1 or 3 rows of position ids; empty: the batch has none."""


@final
@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do the work."""

    call: Callable[[], Any]
    """Does the work; timed."""
    read: Callable[[Any], object]
    """Converts the result for comparison, usually to the list of samples; not timed."""


@final
@dataclass(frozen=True, kw_only=True)
class Contest:
    """A peer's way and our ways to do the same work."""

    peer: Way
    ours: Mapping[str, Way]
    work: str = ""
    """Short description of the input, and of what the peer leaves out."""


# ---------------------------------------------------------------------- reading batches


def read_row(batch: Mapping[str, Any], boundaries: Sequence[int], *, shifted: bool = False) -> list[Sample]:
    """Split a row into its samples.

    Args:
        batch: the row: `input_ids` and `labels`, [1, T] or [T], and optionally `position_ids`, [..., 1, T] or [..., T].
        boundaries: cumulative lengths of the samples, starting with 0.
        shifted: whether `labels` are already shifted.
    """
    ids, labels = (batch[name].reshape(-1) for name in ("input_ids", "labels"))
    positions = batch.get("position_ids")
    rows = [] if positions is None else positions.reshape(-1, ids.shape[0])
    return [
        Sample(
            _numbers(ids[start:stop]),
            _numbers(labels[start:stop]) if shifted else (*_numbers(labels[start + 1 : stop]), IGNORE),
            tuple(_numbers(row[start:stop]) for row in rows),
        )
        for start, stop in pairwise(map(int, boundaries))
    ]


def _numbers(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())


def _read_ours(row: Any) -> list[Sample]:
    return read_row(row, row["cu_seqlens_q"].tolist())


# ---------------------------------------------------------------------- ours


def joined(features: Features) -> Way:
    """Collate text with `RowCollator`, which checks shapes and adds positions and boundaries."""
    collate = RowCollator(bare_row="one_sample")
    return Way(call=lambda: collate(features), read=_read_ours)


def collated(features: Features, work: PeerWork) -> Way:
    """Collate text with `VLMCollator`, which checks every sample, and add the positions that a step would compute."""
    collate = VLMCollator(work.tokenizer, layout="packed")

    def call() -> dict[str, Any]:
        batch = collate(features)
        return {**batch, "position_ids": batch["vlmpack"].segments.position_in_segment()}

    return Way(call=call, read=_read_ours)


def collated_images(work: PeerWork) -> Way:
    """Collate text and images with `VLMCollator`, and compute the three rows of positions.

    The result is compared without each sample's last token, which the peer removes.
    """
    collate = VLMCollator(work.processor, layout="packed")

    def call() -> PackedRow:
        row = collate.collate(work.images)
        assert isinstance(row, PackedRow)
        assert row.metadata is not None
        assert row.metadata.media is not None
        positions = FAMILY.positions(row.metadata.media, row.segments, config=work.config)
        return replace(row, position_ids=positions)

    def read(row: PackedRow) -> list[Sample]:
        batch = {"input_ids": row.input_ids, "labels": row.shift_labels, "position_ids": row.position_ids}
        whole = [
            (one.input_ids, one.targets, one.positions[1:]) for one in read_row(batch, row.segments.real, shifted=True)
        ]
        return [Sample(ids[:-1], targets[:-1], tuple(axis[:-1] for axis in axes)) for ids, targets, axes in whole]

    return Way(call=call, read=read)


# ---------------------------------------------------------------------- theirs


def flattened(collate: Callable[[Features], Any], features: Features, work: PeerWork, kind: str) -> Contest:
    """Make a contest of text samples; the peer returns `cu_seq_lens_q`."""
    peer = Way(call=lambda: collate(features), read=lambda row: read_row(row, row["cu_seq_lens_q"]))
    ours = {"RowCollator": joined(features), "VLMCollator": collated(features, work)}
    return Contest(peer=peer, ours=ours, work=kind)


def hf_flattened(module: Any, work: PeerWork) -> Iterator[Contest]:
    """DataCollatorWithFlattening takes only text, and checks nothing."""
    collate = module.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    yield flattened(collate, work.lists, work, "lists")
    yield flattened(collate, work.tensors, work, "tensors")


def trl_padding_free(module: Any, work: PeerWork) -> Iterator[Contest]:
    """TRL's collator takes only lists, as its trainer passes them. It also returns `seq_idx`."""
    collate = module.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    yield flattened(collate, work.lists, work, "lists")


def automodel_row(module: Any, work: PeerWork) -> Iterator[Contest]:
    """Make a row like Automodel's packed dataset: compute positions with the model's function, shift labels, join.

    It joins pixels, too. Each sample loses its last token, which has no target.
    """
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(work.config)
    samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in work.images]

    def placed(sample: dict[str, Any]) -> dict[str, Any]:
        positions = module._compute_mrope_position_ids(sample, model.model.get_rope_index)
        return module._shift_sample({**sample, "position_ids": positions}, has_mrope=True)

    def call() -> dict[str, Any]:
        return module._build_packed_vlm_sample([placed(sample) for sample in samples], work.tokens, 0, has_mrope=True)

    yield Contest(
        peer=Way(call=call, read=lambda row: read_row(row, [0, *accumulate(row["seq_lens"])], shifted=True)),
        ours={"VLMCollator": collated_images(work)},
        work="images, without last tokens",
    )


Contests = Callable[[Any, PeerWork], Iterator[Contest]]

AUTOMODEL = "nemo_automodel.components.datasets.vlm.neat_packing_vlm"
PEERS: tuple[tuple[str, str, str, Contests], ...] = (
    ("Hugging Face, DataCollatorWithFlattening", "transformers", "transformers.data.data_collator", hf_flattened),
    ("TRL, padding-free", "trl", "trl.trainer.sft_trainer", trl_padding_free),
    ("NeMo Automodel", "nemo-automodel", AUTOMODEL, automodel_row),
)
"""(readable name, distribution, module, contests) of each peer, in the order of measurement."""


def measure_peers(settings: BenchSettings, shapes: PeerShapes) -> Iterator[Figure | Skipped]:
    """Time every installed peer with one thread, as in a DataLoader worker."""
    work = PeerWork(shapes, settings.seed)
    contests: list[tuple[str, Contest]] = []
    for name, distribution, module, make in PEERS:
        try:
            loaded = importlib.import_module(module)
            title = f"{name} {version(distribution)}"
            contests += [(f"{title} ({each.work})" if each.work else title, each) for each in make(loaded, work)]
        except PackageNotFoundError:
            yield Skipped(case="peers", name=name, why=f"{distribution} is not installed")
        except Exception as error:  # without its kernels or its Python version, a package may fail in any way
            why = f"{module} cannot be used ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            yield Skipped(case="peers", name=name, why=why)
    for title, contest in contests:
        if why := difference(contest):
            yield Skipped(case="peers", name=title, why=why, owed=True)
            continue
        ways = {"theirs": contest.peer.call, **{name: way.call for name, way in contest.ours.items()}}
        with one_thread():
            timings = alternate(ways, seconds=settings.seconds / len(contests))
        yield Figure.timed("peers", title, timings, "theirs", settings)
        for name in contest.ours:
            of = ("theirs", name)
            target = Target(limit=2.0, better="higher")
            yield Figure.compared("peers", f"{title} / {name}", timings, of, settings, target=target)


def difference(contest: Contest) -> str | None:
    """Describe the first difference between the results of a contest; None: all are equal.

    Comparing the times of ways with different results would be meaningless.
    """
    expected = contest.peer.read(contest.peer.call())
    for name, way in contest.ours.items():
        if (result := way.read(way.call())) != expected:
            return f"its result is not that of {name}: {expected!r:.60}, and not {result!r:.60}"
    return None
