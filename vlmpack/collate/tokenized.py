"""Read samples that are already tokenized: the processor's output for one sample, as lists, arrays or tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from struct import error as StructError
from struct import pack
from typing import Any

import numpy as np
import torch

from vlmpack.collate.encoded import Encoded, TrainOn, Visual, assistant_spans, make_labels, mask_media, weighed
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.formats import ANSWER_COLUMN, BRANCH_COLUMN, KINDS, is_empty
from vlmpack.data.messages import LABEL_COLUMNS, SECONDS_COLUMNS, WEIGHT_COLUMN
from vlmpack.errors import LayoutError, SampleError
from vlmpack.layout.batch import MOST_MASS, NO_ENTRY, NO_LOGPROBS, TEACHER, TYPES_OF_TEACHER, lengths_from_mask
from vlmpack.layout.media import AUDIO, IMAGE, TEXT, VIDEO, Grid
from vlmpack.layout.row import IGNORE

BOUNDARY_COLUMNS = ("cu_seqlens_q", "cu_seqlens", "cu_seq_lens_q", "seq_lengths", "seq_idx")
"""Columns of a packed row. Read as one sample, such a row would let its samples attend to each other."""
MISSPELT_COLUMNS = ("shift_labels", "label_mask", "labels_mask", "loss_masks", "completion_masks", "assistant_mask")
"""Names that look like a column of labels but that no library writes."""
_MASKS = ("attention_mask", *LABEL_COLUMNS[1:])


def read_tokenized(feature: Mapping[str, Any], metadata: ProcessorMetadata, *, train_on: TrainOn) -> Encoded:
    """Read `input_ids` [n] or [1, n] and the columns that belong to it.

    Padding is removed by `attention_mask`. `labels` are kept, except on media and on the first token. Without labels,
    they are made as for any other sample, or are the ids wherever TRL's `completion_mask` or `assistant_masks` allow
    it. `loss_weights` weight the labels. `mm_token_type_ids` are optional, but are checked.

    Raises:
        SampleError: columns contradict each other, or the sample is already a packed row.
    """
    _check_columns(feature)
    all_ids = _tokens(feature, "input_ids")

    def column(name: str, read: Callable[..., np.ndarray] = _tokens) -> np.ndarray:
        values = read(feature, name)
        if len(values) != len(all_ids):
            raise SampleError(f"{name} covers {len(values)} tokens but input_ids has {len(all_ids)}", "bad_shape")
        return values

    keep = slice(0, len(all_ids))
    if feature.get("attention_mask") is not None and len(mask := column("attention_mask")):
        try:  # the mask must be one unbroken run of real tokens; padding on either side is removed
            spans = lengths_from_mask(torch.from_numpy(mask)[None])
        except LayoutError as error:
            raise SampleError(str(error).removeprefix("row 0: "), "bad_mask") from error
        keep = slice(spans.offsets[0], spans.offsets[0] + spans.lengths[0])
    ids = all_ids[keep]
    types = token_types(ids, metadata)
    if feature.get("mm_token_type_ids") is not None:
        given = column("mm_token_type_ids")[keep]
        if (wrong := given != types).any():
            at, kinds = int(wrong.argmax()), ("text", *KINDS)
            fault = f"mm_token_type_ids has {given[at]} for token {at}, whose id {ids[at]} is of type {types[at]}"
            alike = "; it is 1 everywhere, as an attention_mask is" if (given == 1).all() else ""
            legend = ", ".join(f"{number} {kind}" for number, kind in enumerate(kinds))
            raise SampleError(f"{fault} ({legend}){alike}: leave the column out", "token_type_mismatch")
    masks = {name: column(name)[keep] for name in LABEL_COLUMNS if feature.get(name) is not None}
    if metadata.by_processor:  # in families encoded by their processor, token ids alone do not tell everything
        pixels = [name for name in ("pixel_values", "pixel_values_videos") if not is_empty(feature.get(name))]
        if pixels and not metadata.has_grids:
            fault = f"it has input_ids and {pixels[0]}, but no grids of its images; give messages and images"
            raise SampleError(fault, "bad_row")
        if train_on != "all" and not masks:
            fault = f"its template is not ChatML; give {', '.join(LABEL_COLUMNS)} or messages, or choose train_on='all'"
            raise SampleError(fault, "turn_mismatch")
    if masks:
        labels = masks.pop("labels", ids)
        _check_not_shifted(labels, ids)
        for mask in masks.values():
            labels = np.where(mask == 0, IGNORE, labels)
        labels = mask_media(labels, ids, metadata)
    else:
        answers = assistant_spans(ids, metadata)[-1 if train_on == "last" else 0 :]
        labels = make_labels(ids, metadata, spans=None if train_on == "all" else answers)
    weights = None if feature.get(WEIGHT_COLUMN) is None else column(WEIGHT_COLUMN, _weights)[keep]
    sample = Encoded(
        input_ids=ids,
        labels=labels,
        types=types,
        images=_visuals(feature, "pixel_values", "image_grid_thw", metadata),
        videos=_visuals(feature, "pixel_values_videos", "video_grid_thw", metadata),
    )
    sample = weighed(sample, weights)
    return with_teacher(sample, feature, start=keep.start, num_tokens=len(all_ids))


def with_teacher(sample: Encoded, feature: Mapping[str, Any], *, start: int = 0, num_tokens: int) -> Encoded:
    """Return the sample with its teacher's entries (`TEACHER`), if it has any. Tokens without a label may have none.

    Args:
        sample: the sample, of which the columns may describe more tokens.
        feature: its columns.
        start: index of its first token in the columns.
        num_tokens: number of tokens that the columns describe.

    Raises:
        SampleError: a column is missing, or does not have K log-probabilities of different ids for each target.
    """
    given = [name for name in TEACHER if not is_empty(feature.get(name))]
    targets, read = sample.targets, {}
    if not given or not len(targets):  # `check_sample` refuses a sample without targets
        return sample
    if len(given) < len(TEACHER):
        raise SampleError(f"it has {given[0]} alone; a teacher's entries are {' and '.join(TEACHER)}", "bad_row")
    for (name, dtype), kinds in zip(TYPES_OF_TEACHER.items(), ("iu", "f"), strict=True):
        entries = feature[name]
        try:
            num_entries, counts = len(entries), np.array([0 if each is None else len(each) for each in entries])
        except TypeError as error:
            fault = f"{name} holds no list for each token; give K values of each, [n, K]"
            raise SampleError(fault, "bad_shape") from error
        if num_entries != num_tokens:
            raise SampleError(f"{name} covers {num_entries} tokens, but the sample has {num_tokens}", "bad_shape")
        counts = counts[start + targets]
        width = counts.max(initial=1)
        if (wrong := counts != width).any():
            token, count = start + targets[wrong.argmax()], counts[wrong.argmax()]
            seen = f"{name} has {count} entries for token {token} and {width} for another"
            raise SampleError(f"{seen}; give as many for each token with a label", "bad_shape")
        chosen = [entries[start + target] for target in targets]
        # Through lists, because numpy takes no bfloat16 and no tensors with gradients.
        values = _array([each.tolist() if isinstance(each, torch.Tensor) else each for each in chosen], name)
        if values.shape != (len(targets), width):
            seen = f"{name} is {list(values.shape)} for the tokens with a label"
            raise SampleError(f"{seen}; give K values of each, [n, K]", "bad_shape")
        if values.dtype.kind not in kinds:
            raise SampleError(f"{name} holds {values.dtype}; ids are integers, log-probabilities floats", "bad_dtype")
        read[name] = np.zeros((sample.num_tokens, width), dtype)
        read[name][targets] = values
    if len({column.shape for column in read.values()}) > 1:
        raise SampleError(f"{' and '.join(TEACHER)} have unequal numbers of entries for a token", "bad_shape")
    taught = targets[(read[TEACHER[0]][targets] != NO_ENTRY).any(1)]
    ids, logprobs = (read[name][taught] for name in TEACHER)
    with np.errstate(over="ignore"):
        sums = np.exp(logprobs).sum(1)
    for fault, is_wrong, seen in (
        (f"{TEACHER[0]} holds a negative id, or one twice", np.diff(np.sort(ids), prepend=-1).min(1) <= 0, ids),
        (NO_LOGPROBS, ~((sums > 0) & (sums < MOST_MASS)), logprobs),
    ):
        if is_wrong.any():
            at = int(is_wrong.argmax())
            raise SampleError(f"{fault}; token {start + taught[at]} has {seen[at].tolist()!s:.80}", "bad_row")
    return replace(sample, teacher=read)


def _check_not_shifted(labels: np.ndarray, ids: np.ndarray) -> None:
    """Refuse labels that are the next token's id everywhere, and not the token's own in two places or more."""
    foreign = (labels != ids) & (labels != IGNORE)
    following = np.append(ids[1:], IGNORE)
    if np.count_nonzero(foreign) > 1 and ((labels == following) | (labels == IGNORE)).all():
        at = int(foreign.argmax())
        fault = f"its labels are shifted already: that of token {at} is {labels[at]}, the id of token {at + 1}"
        raise SampleError(f"{fault}; give labels as transformers takes them, not shifted", "labels_shifted")


_REFUSED = {
    BOUNDARY_COLUMNS: "it is a packed row already; use data_collator=dataset.collate (PackedDataset)",
    MISSPELT_COLUMNS: f"nothing reads that; labels and masks are {', '.join(LABEL_COLUMNS)}: rename it",
    (BRANCH_COLUMN, ANSWER_COLUMN): "that takes one answer of messages; leave one out",
    ("position_ids",): "positions are computed here; remove the column",
}
"""Columns that no tokenized sample may have, and what is wrong with them."""
_MADE_OF = {
    "pixel_values": ("image", "images"),
    "pixel_values_videos": ("video", "videos"),
    "input_features": ("audio", "audios"),
}
"""Tensors that the processor makes, and the columns that it makes them of."""


def _check_columns(feature: Mapping[str, Any]) -> None:
    """Refuse a column that would not be read, or whose tokens would be read wrongly."""
    for names, fault in _REFUSED.items():
        if named := [name for name in names if feature.get(name) is not None]:
            reason = "unexpected_positions" if "position_ids" in named else "bad_row"
            raise SampleError(f"it has input_ids and {', '.join(named)}: {fault}", reason)
    for made, names in _MADE_OF.items():
        named = next((name for name in names if not is_empty(feature.get(name))), None)
        if named and is_empty(feature.get(made)):
            fault = f"it has input_ids and {named}, but no {made}; give what the processor made, or leave input_ids out"
            raise SampleError(fault, "bad_row")


def token_types(input_ids: np.ndarray, metadata: ProcessorMetadata) -> np.ndarray:
    """Return each token's type, int64 [n]: 0 text, 1 image, 2 video, 3 audio placeholder."""
    types = np.full_like(input_ids, TEXT)
    types[input_ids == metadata.image_token_id] = IMAGE
    types[input_ids == metadata.video_token_id] = VIDEO
    if metadata.video_ends:
        start, end = metadata.video_ends
        is_open = np.cumsum(input_ids == start) > np.cumsum(input_ids == end)
        types[is_open & (types == IMAGE)] = VIDEO
    if metadata.has_audio:
        types[input_ids == metadata.audio_token_id] = AUDIO
    return types


def _tokens(feature: Mapping[str, Any], name: str) -> np.ndarray:
    """Read int64 [n] from a list, array or tensor of shape [n] or [1, n]."""
    values = _array(feature[name], name)
    if values.ndim == 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 1:
        raise SampleError(f"{name} has shape {list(values.shape)}; one sample's are [n] (or [1, n])", "bad_shape")
    is_mask = name in _MASKS
    if values.size and not np.issubdtype(values.dtype, np.integer) and not (is_mask and values.dtype == bool):
        raise SampleError(f"{name} holds {values.dtype}; it must hold whole numbers", "bad_dtype")
    if name in LABEL_COLUMNS[1:] and ((values != 0) & (values != 1)).any():
        raise SampleError(f"{name} holds other values than 0 and 1; weights belong in {WEIGHT_COLUMN}", "bad_mask")
    return values.astype(np.int64)


def _weights(feature: Mapping[str, Any], name: str) -> np.ndarray:
    """Read the weights of labels, float32 [n]."""
    weights = _array(feature[name], name).reshape(-1).astype(np.float32)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise SampleError(f"{name} holds {weights.min()}; weights are numbers from 0", "bad_mask")
    return weights


def _array(value: Any, name: str) -> np.ndarray:
    """Convert numbers to an array, or refuse them."""
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else _as_array(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise SampleError(f"{name} is not an array: {error}", "bad_shape") from error
    if array.dtype.kind not in "biuf":
        raise SampleError(f"{name} holds {array.dtype}; it must hold numbers", "bad_dtype")
    return array


def _as_array(value: Any) -> np.ndarray:
    """Convert to an array. Lists of integers go through `struct`, which takes a third of numpy's time."""
    if isinstance(value, list) and value and type(value[0]) is int:
        try:
            return np.frombuffer(pack(f"{len(value)}q", *value), np.int64)
        except StructError:  # mixed numbers: numpy finds their type
            pass
    return np.asarray(value)


def _visuals(
    feature: Mapping[str, Any], pixel_name: str, grid_name: str, metadata: ProcessorMetadata
) -> tuple[Visual, ...]:
    """Return one entry per image or video: views of the given pixels, split by the grids."""
    missing = [name for name in (pixel_name, grid_name) if is_empty(feature.get(name))]
    if len(missing) == 2:
        return ()
    if missing:
        given = grid_name if missing == [pixel_name] else pixel_name
        raise SampleError(
            f"it has {given} but no {missing[0]}; both come from one call of the processor", "pixel_shape"
        )
    pixels, table = feature[pixel_name], _array(feature[grid_name], grid_name)
    if not isinstance(pixels, torch.Tensor):
        array = _array(pixels, pixel_name)  # Arrow's arrays are read-only, and PyTorch would warn about them
        pixels = torch.from_numpy(array if array.flags.writeable else array.copy())
        pixels = pixels.float() if pixels.dtype == torch.float64 else pixels  # numpy makes float64 of lists
    if table.dtype.kind not in "iu" or table.ndim not in (1, 2) or table.shape[-1] != 3:
        seen = f"{feature[grid_name]!r:.80}"
        raise SampleError(f"{grid_name} must be integers [N, 3] (frames, rows, columns), got {seen}", "bad_grid")
    grids: list[Grid] = [(frames, rows, columns) for frames, rows, columns in table.reshape(-1, 3).tolist()]
    rows = [frames * height * width for frames, height, width in grids]
    has_form = pixels.ndim == 2 or (metadata.by_processor and pixels.ndim > 2)  # patches may have rows and columns
    if min(rows, default=0) < 0 or not has_form or sum(rows) != pixels.shape[0]:
        seen = f"{pixel_name} has shape {list(pixels.shape)} but {grid_name} {list(map(list, grids))} needs {sum(rows)}"
        raise SampleError(f"{seen} rows of patches", "pixel_shape")
    seconds: list[float | None] = [None] * len(grids)
    name = next((name for name in SECONDS_COLUMNS if feature.get(name) is not None), None)
    if pixel_name == "pixel_values_videos" and name is not None:
        seconds = _array(feature[name], name).reshape(-1).tolist()
        if len(seconds) != len(grids):
            raise SampleError(f"{name} has {len(seconds)} entries for {len(grids)} videos", "bad_shape")
    visuals = zip(pixels.split(rows), grids, seconds, strict=True)
    return tuple(Visual(pixels=part, grid=grid, seconds=second) for part, grid, second in visuals)
