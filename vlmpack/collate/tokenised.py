"""Samples that were tokenised before: the processor's own output, one sample at a time, as lists, arrays or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from struct import error as StructError
from struct import pack
from typing import Any

import numpy as np
import torch

from vlmpack.collate.encoded import Encoded, TrainOn, Visual, assistant_spans, make_labels, mask_media, weighed
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.formats import ANSWER_COLUMN, BRANCH_COLUMN, is_empty
from vlmpack.data.messages import LABEL_COLUMNS, SECONDS_COLUMNS, WEIGHT_COLUMN
from vlmpack.errors import LayoutError, Refusal
from vlmpack.layout.batch import lengths_from_mask
from vlmpack.layout.media import AUDIO, IMAGE, TEXT, VIDEO, Grid
from vlmpack.layout.row import IGNORE

BOUNDARY_COLUMNS = ("cu_seqlens_q", "cu_seqlens", "cu_seq_lens_q", "seq_lengths", "seq_idx")
"""Columns of a row of several samples; as one sample it would let them attend to each other."""
MISSPELT_COLUMNS = ("shift_labels", "label_mask", "labels_mask", "loss_masks", "completion_masks", "assistant_mask")
"""Names that look like one of labels, and that no library writes."""
_MASKS = ("attention_mask", *LABEL_COLUMNS[1:])


def read_tokenised(feature: Mapping[str, Any], metadata: ProcessorMetadata, *, train_on: TrainOn) -> Encoded:
    """Take over `input_ids` [n] or [1, n] and what came with it.

    Padding is removed by `attention_mask`; `labels` are kept except on media and on the first token; without labels
    they are made as for any other sample, or are the ids where TRL's `completion_mask` or `assistant_masks` allow it.
    `loss_weights` weigh them.
    `mm_token_type_ids` are checked, not needed.

    Raises:
        Refusal: fields that contradict each other, or it is a packed row already.
    """
    if named := [name for name in BOUNDARY_COLUMNS if feature.get(name) is not None]:
        fault = f"samples bring {', '.join(named)}, so they are packed rows already, and would be taken for one sample"
        remedy = "give rows to the collator of what made them (PackedDataset: data_collator=dataset.collate; rows of"
        end = "text: RowCollator), or remove the column if each is one sample"
        raise Refusal("bad_row", f"{fault} each; {remedy} {end}", of_all=True)
    _check_read(feature)
    ids = _tokens(feature, "input_ids")
    count = len(ids)
    keep = _kept(feature, count)
    ids = ids[keep]
    if feature.get("position_ids") is not None:
        fault = "it brings position_ids, but positions are computed from the grids in the row; remove the column"
        raise Refusal("unexpected_positions", fault)
    types = token_types(ids, metadata)
    if feature.get("mm_token_type_ids") is not None:
        values = _tokens(feature, "mm_token_type_ids")
        if len(values) != count or (values[keep] != types).any():
            fault = (
                "mm_token_type_ids are not the kinds of its placeholders (1 image, 2 video, 3 audio); leave them out"
            )
            raise Refusal("token_type_mismatch", fault)
    if metadata.by_processor:  # not all is told by token ids of other templates and processors than Qwen's
        pixels = [name for name in ("pixel_values", "pixel_values_videos") if not is_empty(feature.get(name))]
        if pixels and not metadata.has_grids:
            fault = f"it has input_ids and {pixels[0]}, but no grids of this family's images; give messages and images"
            raise Refusal("bad_row", fault, of_all=True)
        if train_on != "all" and all(feature.get(name) is None for name in LABEL_COLUMNS):
            fault = f"its template is not ChatML; give {', '.join(LABEL_COLUMNS)} or messages, or choose train_on='all'"
            raise Refusal("turn_mismatch", fault, of_all=True)
    sample = Encoded(
        input_ids=ids,
        labels=_labels(feature, ids, count, keep, metadata, train_on),
        types=types,
        images=_visuals(feature, "pixel_values", "image_grid_thw", metadata),
        videos=_visuals(feature, "pixel_values_videos", "video_grid_thw", metadata),
    )
    return weighed(sample, _weights(feature, count, keep))


def _check_read(feature: Mapping[str, Any]) -> None:
    """Refuse a column about tokens or pixels that would not be read."""
    given = {name for name, value in feature.items() if not is_empty(value)}
    fault = ""
    if named := next((name for name in MISSPELT_COLUMNS if feature.get(name) is not None), None):
        labels = f"labels and masks, token by token and unshifted, are {', '.join(LABEL_COLUMNS)}"
        fault = f"{named}, which nothing reads; {labels}: rename it, or leave it out"
    elif named := next((name for name in (BRANCH_COLUMN, ANSWER_COLUMN) if feature.get(name) is not None), None):
        fault = f"input_ids and {named}, which takes one answer of messages; leave one out"
    for pixels, columns in (
        ("pixel_values", ("image", "images")),
        ("pixel_values_videos", ("video", "videos")),
        ("input_features", ("audio", "audios")),
    ):
        if not fault and pixels not in given and (named := next((name for name in columns if name in given), None)):
            fault = f"input_ids and {named}, but no {pixels}; give what the processor made, or leave input_ids out"
    if fault:
        raise Refusal("bad_row", f"it has {fault}")


def token_types(input_ids: np.ndarray, metadata: ProcessorMetadata) -> np.ndarray:
    """int64 [n]: 1 on image placeholders, 2 on video placeholders, 3 on audio placeholders, 0 elsewhere."""
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
    """int64 [n] from a list, array or tensor of shape [n] or [1, n]."""
    values = _array(feature[name], name)
    if values.ndim == 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 1:
        raise Refusal("bad_shape", f"{name} has shape {list(values.shape)}; one sample's are [n] (or [1, n])")
    is_mask = name in _MASKS
    if values.size and not np.issubdtype(values.dtype, np.integer) and not (is_mask and values.dtype == bool):
        raise Refusal("bad_dtype", f"{name} holds {values.dtype}; it must hold whole numbers")
    if name in LABEL_COLUMNS[1:] and ((values != 0) & (values != 1)).any():
        raise Refusal("bad_mask", f"{name} holds other values than 0 and 1; weights belong in {WEIGHT_COLUMN}")
    return values.astype(np.int64)


def _array(value: Any, name: str) -> np.ndarray:
    """Numbers of one shape, or a refusal."""
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else _as_array(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refusal("bad_shape", f"{name} is not an array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise Refusal("bad_dtype", f"{name} holds {array.dtype}; it must hold numbers")
    return array


def _as_array(value: Any) -> np.ndarray:
    """Lists of whole numbers go through `struct`, which reads them in a third of numpy's time."""
    if isinstance(value, list) and value and type(value[0]) is int:
        try:
            return np.frombuffer(pack(f"{len(value)}q", *value), np.int64)
        except StructError:  # mixed numbers: numpy finds their type
            pass
    return np.asarray(value)


def _kept(feature: Mapping[str, Any], count: int) -> slice:
    """The one unbroken run of real tokens: padding on either side is cut off."""
    if feature.get("attention_mask") is None:
        return slice(0, count)
    mask = _tokens(feature, "attention_mask")
    if len(mask) != count:
        raise Refusal("bad_shape", f"attention_mask covers {len(mask)} tokens but input_ids has {count}")
    if count == 0:
        return slice(0, 0)
    try:
        spans = lengths_from_mask(torch.from_numpy(mask)[None])
    except LayoutError as error:
        raise Refusal("bad_mask", str(error).removeprefix("row 0: ")) from error
    return slice(spans.offsets[0], spans.offsets[0] + spans.lengths[0])


def _labels(
    feature: Mapping[str, Any], ids: np.ndarray, count: int, keep: slice, metadata: ProcessorMetadata, train_on: TrainOn
) -> np.ndarray:
    values: dict[str, np.ndarray] = {}
    for name in (name for name in LABEL_COLUMNS if feature.get(name) is not None):
        column = _tokens(feature, name)
        if len(column) != count:
            raise Refusal("bad_shape", f"{name} covers {len(column)} tokens but input_ids has {count}")
        values[name] = column[keep]
    if not values:
        spans = assistant_spans(ids, metadata)[-1 if train_on == "last" else 0 :]
        return make_labels(ids, metadata, spans=None if train_on == "all" else spans)
    labels = values.pop("labels", ids)
    for mask in values.values():
        labels = np.where(mask == 0, IGNORE, labels)
    return mask_media(labels, ids, metadata)


def _weights(feature: Mapping[str, Any], count: int, keep: slice) -> np.ndarray | None:
    """float32 [n]; None: there are none."""
    if feature.get(WEIGHT_COLUMN) is None:
        return None
    values = _array(feature[WEIGHT_COLUMN], WEIGHT_COLUMN).reshape(-1).astype(np.float32)
    if len(values) != count:
        raise Refusal("bad_shape", f"{WEIGHT_COLUMN} covers {len(values)} tokens but input_ids has {count}")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise Refusal("bad_mask", f"{WEIGHT_COLUMN} holds {values.min()}; a weight is a number from 0, not trained on")
    return values[keep]


def _visuals(
    feature: Mapping[str, Any], pixel_name: str, grid_name: str, metadata: ProcessorMetadata
) -> tuple[Visual, ...]:
    """One entry an image or video: views into the given pixels, cut by the grids."""
    missing = [name for name in (pixel_name, grid_name) if is_empty(feature.get(name))]
    if len(missing) == 2:
        return ()
    if missing:
        given = grid_name if missing == [pixel_name] else pixel_name
        raise Refusal("pixel_shape", f"it has {given} but no {missing[0]}; both come from one call of the processor")
    pixels, grids = _pixels(feature[pixel_name], pixel_name), _grids(feature[grid_name], grid_name)
    rows = [frames * height * width for frames, height, width in grids]
    has_form = pixels.ndim == 2 or (metadata.by_processor and pixels.ndim > 2)  # of patches of rows and columns too
    if min(rows, default=0) < 0 or not has_form or sum(rows) != pixels.shape[0]:
        seen = f"{pixel_name} has shape {list(pixels.shape)} but {grid_name} {list(map(list, grids))} needs {sum(rows)}"
        raise Refusal("pixel_shape", f"{seen} rows of patches; both come from one call of the processor")
    seconds = _seconds(feature, len(grids)) if pixel_name == "pixel_values_videos" else [None] * len(grids)
    visuals = zip(pixels.split(rows), grids, seconds, strict=True)
    return tuple(Visual(pixels=part, grid=grid, seconds=second) for part, grid, second in visuals)


def _pixels(value: Any, name: str) -> torch.Tensor:
    """Return the values unchanged; doubles, which numpy makes of lists, become float32."""
    if isinstance(value, torch.Tensor):
        return value
    array = _array(value, name)
    if not array.flags.writeable:  # Arrow's, say: PyTorch would warn
        array = array.copy()
    pixels = torch.from_numpy(array)
    return pixels.float() if pixels.dtype == torch.float64 else pixels


def _grids(value: Any, name: str) -> list[Grid]:
    table = _array(value, name)
    if table.dtype.kind not in "iu" or table.ndim not in (1, 2) or table.shape[-1] != 3:
        raise Refusal("bad_grid", f"{name} must be whole numbers [N, 3] (frames, rows, columns), got {value!r:.80}")
    return [(frames, rows, columns) for frames, rows, columns in table.reshape(-1, 3).tolist()]


def _seconds(feature: Mapping[str, Any], count: int) -> list[float | None]:
    name = next((name for name in SECONDS_COLUMNS if feature.get(name) is not None), None)
    if name is None:
        return [None] * count
    seconds = _array(feature[name], name).reshape(-1).tolist()
    if len(seconds) != count:
        raise Refusal("bad_shape", f"{name} has {len(seconds)} entries for {count} videos")
    return seconds
