"""Names of inputs: what a batch, a row and a call of an enabled model may hold, and what is refused by name."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families.family import Family
from vlmpack.layout.batch import METADATA_KEY
from vlmpack.layout.device import outside_graph, require
from vlmpack.model.plain import BOUNDARIES, CACHES

STEP = "vlmpack_step"
"""The keyword of a `StepCall`."""

_TOKENS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "mm_token_type_ids")
COLUMN_OF_TYPES = "mm_token_type_ids"
"""The kinds of tokens, which some models take under another name."""
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

COLUMNS = frozenset((*_TOKENS, *_MEDIA, "cu_seqlens_q", "cu_seqlens_q_padded", "moe_padding_mask", METADATA_KEY))
"""The parts of a batch or a row."""

ROW_KEYS = (*BOUNDARIES, METADATA_KEY, "use_cache", "output_logits")
"""Keywords of a packed row, and requests of a batch, that the model's own forward may not have."""

SOUND_IN_VIDEO = "use_audio_in_video"
"""Qwen-Omni's request that audio tokens stand between those of the video that they belong to."""

_WANTED = ("output_logits", "output_hidden_states")
_BATCH_KEYS = frozenset((*_TOKENS, *_MEDIA, *BOUNDARIES, "num_items_in_batch", *_WANTED, METADATA_KEY, STEP))

_GENERATION = (*CACHES, "inputs_embeds", "use_cache", "logits_to_keep", "mm_encoder_outputs", "rope_deltas")
_SETTLED_KEYS = frozenset((*_GENERATION, "output_attentions", "output_router_logits", "return_dict"))
"""Arguments of the model's own forward that a packed pass has settled: only their defaults go through it."""


def check_keys(inputs: dict[str, Any], family: Family, *, is_row: bool) -> None:
    """transformers accepts any keyword and ignores it, or hands it to the vision tower; a packed pass does not.

    Raises:
        ConfigError: it would; names what may have been meant.
    """
    takes_others = family.has_audio or (family.has_vision and not family.has_grids)
    other_media = {*_MEDIA} - family.media.keys() if takes_others else set()
    columns = {family.token_types or "mm_token_type_ids", family.expert_types, *family.token_columns} - {None}
    known = (_BATCH_KEYS | family.media.keys() | columns) - other_media
    for name, value in inputs.items():
        if value is None or name in known:
            continue
        if name == SOUND_IN_VIDEO and family.has_audio:
            _check_apart(value)
            continue
        if name not in _SETTLED_KEYS:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"a packed step takes no input {name!r}{hint} It takes {', '.join(sorted(known))}")
        if is_row and name != "return_dict" and value is not False and not (isinstance(value, int) and value == 0):
            raise ConfigError(f"{name} cannot be combined with a packed row; leave it out")


def _check_apart(value: Any) -> None:
    if value:
        raise ConfigError(
            f"{SOUND_IN_VIDEO}={value!r} interleaves a video with its own sound, whose places in a row are not "
            "supported: give the sound as audio of its own, and leave the keyword out"
        )


def columns_in(inputs: dict[str, Any], family: Family) -> tuple[str, ...]:
    """Names of the family's own columns that are there."""
    return tuple(name for name in family.token_columns if inputs.get(name) is not None)


@outside_graph
def with_token_types(inputs: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Take the kinds of tokens, under the name that the model gives them, as `mm_token_type_ids`."""
    if name in (None, COLUMN_OF_TYPES) or (types := inputs.get(name)) is None:
        return inputs
    if (other := inputs.get(COLUMN_OF_TYPES)) is not None and (other.shape != types.shape or (other != types).any()):
        raise LayoutError(f"{name} and {COLUMN_OF_TYPES} differ; leave them out, both are made from input_ids")
    return inputs | {COLUMN_OF_TYPES: types, name: None}


@outside_graph
def check_expert_types(inputs: dict[str, Any], family: Family, config: Any) -> None:
    """Compare the kinds of tokens by which experts are chosen, where a caller gives them, with the token ids; on
    padding of a batch they do not matter.

    Raises:
        LayoutError: they differ.
    """
    name, mask = family.expert_types, inputs.get("attention_mask")
    if name is None or (types := inputs.get(name)) is None:
        return
    expected = family.expert_types_of(inputs["input_ids"], config)[name]
    if not isinstance(types, torch.Tensor) or types.shape != expected.shape:
        raise LayoutError(f"{name} must be a tensor {list(expected.shape)}, as input_ids; leave it out")
    differs = types != expected
    if mask is not None and mask.shape == differs.shape:
        differs = differs & (mask != 0)
    message = f"{name} contradicts input_ids, of which the processor makes it; leave it out, it is made from input_ids"
    require(~differs.any(), message, LayoutError)
