"""Which inputs the packed forward knows, and under which names boundaries would get lost."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import METADATA_KEY, require

SINK = "vlmpack_sink"
"""The keyword under which `PackedStep` asks for the whole `StepResult`."""

_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_q_padded", "rope_cu_seqlens", "moe_padding_mask")
_TOKENS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "mm_token_type_ids")
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

ROW_KEYS = (*_BOUNDARIES, METADATA_KEY, "use_cache", "output_logits")
"""What a packed row brings with it, or a batch asks for, that the model's own forward may not have."""

_WANTED = ("output_logits", "output_hidden_states")
_BATCH_KEYS = frozenset((*_TOKENS, *_MEDIA, *_BOUNDARIES, "num_items_in_batch", *_WANTED, METADATA_KEY, SINK))

_OUTPUTS = ("output_attentions", "output_router_logits")
_GENERATION = ("past_key_values", "inputs_embeds", "use_cache", "logits_to_keep", "mm_encoder_outputs", "rope_deltas")
_SETTLED_KEYS = frozenset((*_GENERATION, *_OUTPUTS, "return_dict"))
"""Arguments of the model's own forward that a packed pass has settled: only their defaults go through it."""

_OF_MEGATRON = ("cu_seqlens_kv", "cu_seqlens_kv_padded", "cu_seqlens", "max_seqlen", "packed_seq_params")
_OF_TRANSFORMERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cu_seqlens_k")
_OF_OTHERS = ("seq_lengths", "sequence_ids", "document_ids")
_LOST_BOUNDARIES = (*_BOUNDARIES[1:], *_OF_MEGATRON, *_OF_TRANSFORMERS, *_OF_OTHERS)
"""Names under which boundaries are given elsewhere, or to us with `cu_seqlens_q` forgotten."""


def check_boundaries_kept(inputs: dict[str, Any]) -> None:
    """transformers' own attention ignores boundaries under most of their names, and says nothing.

    Raises:
        ConfigError: there are some, or positions that restart.
        LayoutError: a padded batch has lost its mask.
    """
    lost = [name for name, value in inputs.items() if value is not None and _looks_like_boundaries(name)]
    if lost:
        raise ConfigError(f"{', '.join(lost)} {_MIXED}")
    if inputs["attention_mask"] is not None:
        return
    if inputs.get(METADATA_KEY) is not None:
        raise LayoutError(
            "a padded batch came without its attention_mask, so its padding would be attended to; keep the 2D mask "
            "that the collator made"
        )
    if (positions := inputs["position_ids"]) is not None and inputs.get("past_key_values") is None:
        # The place in the sample, or time: neither goes back.
        first = positions[0] if positions.ndim == 3 else positions
        goes_back = (first[..., 1:] < first[..., :-1]).any()
        require(
            ~goes_back,
            f"position_ids that restart are how others mark the samples of a row: they {_MIXED}",
            ConfigError,
        )


@functools.cache
def _looks_like_boundaries(name: str) -> bool:
    """One of those names, or misspelt."""
    return bool(difflib.get_close_matches(name, ("cu_seqlens_q", *_LOST_BOUNDARIES), n=1, cutoff=0.88))


_MIXED = (
    "would be ignored and the samples of the row mixed; give a packed row its boundaries as cu_seqlens_q (and "
    "cu_seqlens_q_padded if it has gaps)"
)


def check_keys(inputs: dict[str, Any], *, is_row: bool) -> None:
    """transformers accepts any keyword and ignores it, or hands it to the vision tower; a packed pass does not.

    Raises:
        ConfigError: it would; says what may have been meant.
    """
    for name, value in inputs.items():
        if value is None or name in _BATCH_KEYS:
            continue
        if name not in _SETTLED_KEYS:
            close = difflib.get_close_matches(name, _BATCH_KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"a packed step knows no input {name!r}{hint} It takes {', '.join(sorted(_BATCH_KEYS))}")
        if is_row and name != "return_dict" and value is not False and not (isinstance(value, int) and value == 0):
            raise ConfigError(f"{name} cannot be combined with a packed row; leave it out")
