"""One sample after encoding: token ids, labels, and media as patches or as grids only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest
from math import prod
from typing import Literal

import numpy as np
import torch

from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.formats import KINDS, Kind
from vlmpack.data.messages import MediaRef
from vlmpack.errors import SampleError
from vlmpack.families.spans import media_runs, prefix_length
from vlmpack.layout.media import AUDIO, IMAGE, TEXT, VIDEO, Grid, Runs, runs_of_equal
from vlmpack.layout.row import IGNORE
from vlmpack.plan.lengths import OVERLENGTH, TRUNCATING, Overlength


@dataclass(frozen=True, kw_only=True, eq=False)
class Visual:
    """One image or video (as patches or tiles) or one audio (as log-mel frames). It may also be only measured."""

    grid: Grid | None = None
    """(frames, rows, columns) of patches; None: the family's media have no grid, or only their tokens were counted."""
    pixels: torch.Tensor | None
    """Floats [P, C], P = frames * rows * columns of `grid`; any shape without a grid; None: only measured."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors of the medium under the model's names (`image_sizes`, `pixel_attention_mask`, ...)."""
    runs: tuple[int, ...] = ()
    """Length of each run of placeholders that the processor wrote; (): as many as the grid needs."""
    written: str = ""
    """The processor's replacement text for the template's placeholder; "": the ids already contain it."""

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The pixels and other float tensors (tiles, for example); (): only measured."""
        tensors = (self.pixels, *self.tensors.values())
        return tuple(tensor for tensor in tensors if tensor is not None and tensor.is_floating_point())

    @property
    def patch_grid(self) -> Grid:
        """The grid, for a family whose media have one."""
        assert self.grid is not None, "an image without a grid"
        return self.grid

    seconds: float | None = None
    """Seconds from one grid of a video to the next; None: an image, or a family that does not take seconds."""
    timestamps: tuple[float, ...] = ()
    """Time of each grid of a video in seconds, which some families write into the text; (): an image."""
    source: MediaRef | None = None
    """Where the medium was read from; None: it was given as patches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A sample of n tokens, all on the host."""

    input_ids: np.ndarray
    """int64 [n]."""
    labels: np.ndarray
    """int64 [n], not shifted; -100 where not trained on."""
    weights: np.ndarray | None = None
    """float32 [n]: weight of each label in the loss; None: all 1."""
    types: np.ndarray
    """int64 [n]: 0 text, 1 image, 2 video, 3 audio."""
    teacher: Mapping[str, np.ndarray] = field(default_factory=dict)
    """A teacher's entries, [n, K] under each name of `TEACHER`; empty: it has none."""
    images: tuple[Visual, ...] = ()
    """In the order of their placeholders."""
    videos: tuple[Visual, ...] = ()
    """In the order of their placeholders."""
    audios: tuple[Visual, ...] = ()
    """In the order of their placeholders. Each has log-mel frames [1, mel, f] as `pixels`, and one run of tokens."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further token columns that the family needs (`Family.token_columns`), by name, int64 [n] each."""
    whole: tuple[tuple[int, int], ...] = ()
    """(start, stop) of tokens that truncation must not split: media with their border tokens, and ends of answers."""
    num_cut: int = 0
    """Number of tokens that truncation removed."""
    sample_id: int | str | None = None
    """The sample's own id, if it has one."""
    channel: str | None = None
    """Name of its dataset, if it has one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens (n)."""
        return len(self.input_ids)

    @property
    def media(self) -> Mapping[Kind, tuple[Visual, ...]]:
        """Images, videos and audios by kind."""
        return {"image": self.images, "video": self.videos, "audio": self.audios}

    @property
    def media_runs(self) -> Runs:
        """The prefix as one run in a family with prefixes; otherwise the runs of media tokens."""
        if not self.columns:
            return media_runs(self.types)
        return ((0, self.prefix),) if self.prefix else ()

    @property
    def prefix(self) -> int:
        """Length of the prefix in a family with prefixes; otherwise 0."""
        column = next(iter(self.columns.values()), None)
        return 0 if column is None else prefix_length(column)

    @property
    def targets(self) -> np.ndarray:
        """int64 [num_targets]: the tokens that are predicted."""
        return 1 + np.flatnonzero(self.labels[1:] != IGNORE)

    @cached_property
    def num_targets(self) -> int:
        """Number of labeled next-token targets. The first token is not a target."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE))


def check_sample(sample: Encoded, metadata: ProcessorMetadata) -> None:
    """Raise a `SampleError` for the first fault of a sample (reasons: docs/troubleshooting.md)."""
    check_ids(sample.input_ids, metadata)
    _check_labels(sample.labels, metadata)
    for visual in chain.from_iterable(sample.media.values()):
        if visual.grid is not None:
            _check_grid(visual.grid, metadata)
        check_pixels(visual, metadata)
    for video in sample.videos:
        if video.grid is not None and video.grid[0] % metadata.frames_per_token:
            raise SampleError(
                f"a video has {video.grid[0]} frames, no multiple of {metadata.frames_per_token}", "bad_grid"
            )
    highest = sample.types.max(initial=0)  # most samples have no video, and many no image: nothing to look for
    for kind, visuals in sample.media.items():
        if visuals or highest >= TYPES[kind]:
            check_runs(sample.types, visuals, metadata, kind=kind)
    if metadata.video_ends and sample.images and sample.videos:
        seen = f"{len(sample.images)} image(s) and {len(sample.videos)} video(s)"
        raise SampleError(f"it has {seen}, but its model takes one kind; give frames as images", "ambiguous_media")
    if sample.num_targets == 0:
        fault = f"none of its {sample.num_tokens} tokens is trained on; it needs an assistant turn or a completion"
        raise SampleError(f"{fault} with text in it, or train_on='all', or labels that are not all -100", "no_targets")


def check_ids(input_ids: np.ndarray, metadata: ProcessorMetadata) -> None:
    """Check that there are ids, and that the embedding has a row for each."""
    if len(input_ids) == 0:
        raise SampleError("it has no tokens at all; leave it out of the data set", "empty")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= metadata.vocab_size:
        fault = f"it holds the token id {low if low < 0 else high}, but ids run from 0 to {metadata.vocab_size - 1}"
        raise SampleError(f"{fault}; use this processor's tokenizer, or pass vocab_size=", "id_out_of_range")


def check_runs(types: np.ndarray, visuals: Sequence[Visual], metadata: ProcessorMetadata, *, kind: Kind) -> None:
    """Check that each run of placeholders has the length that its image, frame or audio needs, in order."""
    lengths = [stop - start for start, stop in runs_of_equal(np.where(types == TYPES[kind], 0, -1))]
    needed = [n for visual in visuals for n in tokens_of(visual, metadata, kind=kind)]
    is_joined = sum(lengths) == sum(needed) and {*accumulate(lengths)} <= {*accumulate(needed)}
    if lengths == needed or (metadata.by_processor and is_joined):  # runs that touch are one run in the ids
        return
    if not visuals:
        raise SampleError(
            f"it has {sum(lengths)} {kind} tokens but no {kind} {_VALUES[kind]}", f"{kind}_tokens_without_pixels"
        )
    if not lengths:
        raise SampleError(f"it has {len(visuals)} {kind}(s) but no {kind} token", f"pixels_without_{kind}_tokens")
    at = next(i for i, (a, b) in enumerate(zip_longest(lengths, needed)) if a != b)
    wanted = f"its grids need {_some(needed)}: frames * rows * columns / {metadata.merge_size**2} tokens in each run"
    if metadata.by_processor or kind == "audio":
        wanted = f"its processor writes {_some(needed)} for its {len(visuals)} {kind}(s)"
    seen = f"its runs of {kind} tokens are {_some(lengths)} long but {wanted} (first difference at run {at})"
    raise SampleError(f"{seen}; take ids and pixels from one call of the processor", f"{kind}_token_mismatch")


_VALUES: Mapping[Kind, str] = {
    **dict.fromkeys(("image", "video"), "pixels; add pixels and grid, or remove the tokens"),
    "audio": "frames; add input_features and feature_attention_mask, or remove the tokens",
}
"""Tensors of each kind of medium, and the remedy if one is missing."""


TYPES: Mapping[Kind, int] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
"""Type of the placeholders of each kind of medium."""
PIXELS: Mapping[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
"""The model's name of each kind of medium's tensor."""


def tokens_of(visual: Visual, metadata: ProcessorMetadata, *, kind: Kind) -> list[int]:
    """Return the lengths of the runs of placeholders for one medium."""
    if visual.grid is None or visual.runs:
        return list(visual.runs)
    frames, rows, columns = visual.grid
    merged = rows * columns // metadata.merge_size**2
    frames = frames // metadata.frames_per_token if kind == "video" else frames
    return [merged] * frames if kind == "video" and metadata.frame_timestamps else [frames * merged]


def _check_labels(labels: np.ndarray, metadata: ProcessorMetadata) -> None:
    in_range = np.count_nonzero(labels.view(np.uint64) < metadata.vocab_size)  # unsigned: negative labels become large
    if in_range + np.count_nonzero(labels == IGNORE) < len(labels):
        odd = labels[(labels != IGNORE) & ((labels < 0) | (labels >= metadata.vocab_size))]
        fault = f"it holds the label {int(odd[0])}; labels are -100 or ids from 0 to {metadata.vocab_size - 1}"
        raise SampleError(fault, "label_out_of_range")


def check_labels_are_ids(sample: Encoded) -> None:
    """Check that each label is its token's id or -100. A token that samples share is predicted only once.

    Raises:
        SampleError: a label is something else (`label_not_its_id`).
    """
    foreign = np.flatnonzero((sample.labels != sample.input_ids) & (sample.labels != IGNORE))
    foreign = foreign[foreign > 0]  # nothing predicts the first token
    if len(foreign):
        at = int(foreign[0])
        seen = f"token {at} has the label {sample.labels[at]} and the id {sample.input_ids[at]}"
        raise SampleError(f"{seen}; labels that are not ids need share_prefixes=False", "label_not_its_id")


def check_pixels(visual: Visual, metadata: ProcessorMetadata) -> None:
    """Check that patches are floats of the grid's shape. Whether they are finite is checked when they are joined.

    If the processor encodes samples itself, only the number of patches is checked, not their other axes.
    """
    if (pixels := visual.pixels) is None:
        return
    if visual.grid is not None:
        axes = 1 if metadata.by_processor else 2
        expected = (prod(visual.grid), metadata.patch_dim)[:axes]
        if tuple(pixels.shape[:axes]) != expected or (axes == 2 and pixels.ndim != axes):
            seen = f"the grid {grid_text(visual.grid)} needs pixels of shape {list(expected)}, got {list(pixels.shape)}"
            raise SampleError(f"{seen}; take both from one call of this processor", "pixel_shape")
    if not pixels.is_floating_point():
        raise SampleError(f"pixels are {pixels.dtype}; give the processor's normalized floats", "pixel_dtype")


def _check_grid(grid: Grid, metadata: ProcessorMetadata) -> None:
    merge = metadata.merge_size
    if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
        raise SampleError(
            f"rows and columns of the grid {grid_text(grid)} must be multiples of {merge}, above 0", "bad_grid"
        )


def grid_text(grid: Grid) -> str:
    return " x ".join(map(str, grid))


def _some(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"[{shown}{', ...' if len(numbers) > most else ''}]"


# ---- labels

TrainOn = Literal["assistant", "last", "all"]


def assistant_spans(input_ids: np.ndarray, metadata: ProcessorMetadata) -> list[tuple[int, int]]:
    """Return (start, stop) of each assistant turn, from after the header to after `<|im_end|>`.

        <|im_start|> assistant \\n  It costs 5 . <|im_end|>  \\n <|im_start|> user ...
                                   ^start                   ^stop

    A last turn without an end (a truncated sample) extends to the end of the sample.
    """
    if metadata.turn_start_id is None:
        return []
    starts, count = np.flatnonzero(input_ids == metadata.turn_start_id).tolist(), len(metadata.assistant_ids)
    spans = []
    for turn, limit in zip(starts, [*starts, len(input_ids)][1:], strict=True):
        newline = turn + 1 + count
        *role, then = input_ids[turn + 1 : newline + 1].tolist() or (None,)
        if tuple(role) == metadata.assistant_ids and then in metadata.newline_ids:
            ends = np.flatnonzero(input_ids[newline + 1 : limit] == metadata.turn_end_id)
            spans.append((newline + 1, newline + int(ends[0]) + 2 if len(ends) else limit))
    return spans


def make_labels(
    input_ids: np.ndarray,
    metadata: ProcessorMetadata,
    *,
    spans: Iterable[tuple[int, int]] | None = None,
    untrained: Iterable[slice] = (),
) -> np.ndarray:
    """Return the labels, int64 [n], not shifted: ids where trained on; -100 elsewhere, on media and on the first token.

    Args:
        input_ids: int64 [n].
        metadata: the processor's metadata.
        spans: (start, stop) pairs to train on; None: everything.
        untrained: tokens that are never trained on.
    """
    labels = input_ids.copy() if spans is None else np.full_like(input_ids, IGNORE)
    for start, stop in spans or ():
        labels[start:stop] = input_ids[start:stop]
    for tokens in untrained:
        labels[tokens] = IGNORE
    return mask_media(labels, input_ids, metadata)


def weighed(sample: Encoded, weights: np.ndarray | None) -> Encoded:
    """Return the sample with these weights, float32 [n]. Weight 0 makes a label -100; weights of all 1 become None."""
    if weights is None:
        return sample
    labels = np.where(weights == 0, IGNORE, sample.labels)
    is_weighed = (weights[labels != IGNORE] != 1).any()
    return replace(sample, labels=labels, weights=weights if is_weighed else None)


def mask_media(labels: np.ndarray, input_ids: np.ndarray, metadata: ProcessorMetadata) -> np.ndarray:
    """Copy `labels` with -100 on placeholders, on the tokens around them, and on the first token."""
    labels = labels.copy()
    for token_id in metadata.media_ids:
        labels[input_ids == token_id] = IGNORE
    labels[:1] = IGNORE
    return labels


# ---- length


def fit(sample: Encoded, metadata: ProcessorMetadata, *, max_length: int | None, overlength: Overlength) -> Encoded:
    """Return the sample if it has at most `max_length` tokens; otherwise apply the policy for overlong samples.

    Raises:
        SampleError: it does not fit (reason "overlength"), or truncation would leave no target ("truncated_away").
    """
    if max_length is None or sample.num_tokens <= max_length:
        return sample
    if overlength in TRUNCATING:
        return truncate(sample, metadata, max_length=max_length, of_start=overlength == "truncate_start")
    media = int((sample.types != TEXT).sum())
    audio = f" and {len(sample.audios)} audio(s)" if sample.audios else ""
    seen = f"{media} of them for {len(sample.images)} image(s) and {len(sample.videos)} video(s){audio}"
    fault = f"it has {sample.num_tokens} tokens ({seen}) but max_length={max_length}"
    remedy = "raise max_length, lower the processor's max_pixels, or choose overlength='drop' or 'truncate'"
    raise SampleError(f"{fault}; {remedy}", OVERLENGTH)


def truncate(sample: Encoded, metadata: ProcessorMetadata, *, max_length: int, of_start: bool = False) -> Encoded:
    """Keep the first or last `max_length` tokens, or fewer, so that no medium and no end of an answer is split.

    A token that begins a text (BOS) stays in front of the last tokens, if the sample has one. Media that are removed
    lose their tensors too. Each remaining token keeps its label, except the first token, which nothing predicts.

    Args:
        sample: longer than `max_length`.
        metadata: the processor's metadata.
        max_length: largest number of tokens.
        of_start: True: remove the start. False: remove the end.

    Raises:
        SampleError: no target would be left, or the sample's images are encoded together and not all would be left.
    """
    media = {kind: list(_media_spans(sample, metadata, kind)) for kind in KINDS}
    whole = [*sample.whole, *(_with_borders(sample, span, metadata) for each in media.values() for _, span in each)]
    lead = int(of_start and sample.input_ids[0] == metadata.bos_token_id)
    start, stop = (sample.num_tokens - max_length + lead, sample.num_tokens) if of_start else (0, max_length)
    torn = [(first, last) for first, last in whole if first < (start if of_start else stop) < last]
    if of_start:
        start = max((last for _, last in torn), default=start)
    else:
        stop = min((first for first, _ in torn), default=stop)
    kept = {f"{kind}s": tuple(x for x, (a, b) in each if start <= a and b <= stop) for kind, each in media.items()}
    names = ("input_ids", "labels", "types", *(() if sample.weights is None else ("weights",)))
    left = np.r_[:lead, start:stop]
    parts = {name: getattr(sample, name)[left] for name in names}
    parts["labels"][:1] = IGNORE
    columns, teacher = (
        {name: column[left] for name, column in named.items()} for named in (sample.columns, sample.teacher)
    )
    num_cut = sample.num_tokens - len(left)
    shorter = replace(sample, **parts, **kept, columns=columns, teacher=teacher, whole=(), num_cut=num_cut)
    fault, seen = "", f"{len(shorter.images)} of its {len(sample.images)} images"
    if (metadata.images_together or sample.columns) and len(shorter.images) < len(sample.images):
        fault = f"max_length={max_length} would keep {seen}, which its processor encodes together"
    elif shorter.num_targets == 0:
        fault = f"max_length={max_length} keeps its tokens {start} to {stop} of {sample.num_tokens}, none is a target"
    if fault:
        raise SampleError(f"{fault}; raise max_length", "truncated_away")
    return shorter


def _media_spans(sample: Encoded, metadata: ProcessorMetadata, kind: Kind) -> Iterator[tuple[Visual, tuple[int, int]]]:
    """Yield each medium of a kind, with the (start, stop) of its placeholders."""
    at = np.flatnonzero(sample.types == TYPES[kind]).tolist()
    ends = accumulate((sum(tokens_of(visual, metadata, kind=kind)) for visual in sample.media[kind]), initial=0)
    for visual, (first, last) in zip(sample.media[kind], pairwise(ends), strict=True):
        yield visual, (at[first], at[last - 1] + 1)


def _with_borders(sample: Encoded, span: tuple[int, int], metadata: ProcessorMetadata) -> tuple[int, int]:
    """Extend a medium's placeholders by the start and end tokens beside them."""
    (start, stop), ids = span, sample.input_ids.tolist()
    starts = (metadata.vision_start_id, metadata.audio_start_id, *metadata.video_ends[:1])
    ends = (metadata.vision_end_id, metadata.audio_end_id, *metadata.video_ends[1:])
    while start and ids[start - 1] in starts:
        start -= 1
    while stop < len(ids) and ids[stop] in ends:
        stop += 1
    return start, stop
