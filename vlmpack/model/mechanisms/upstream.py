"""Compare masks, positions and logits of the model's own code with its family's descriptor. No weight is read.

    masks        a copy of the text model runs on a few embeddings, with layers that only record
    spans        the same with a copy of the backbone, for a sample with images or with a prefix
    logits       a copy of the model runs, with a backbone and a head that return fixed numbers

Each copy is shallow, with some parts replaced. It shares everything else with the model, which is never
changed, not even while a copy runs. Windows and chunks of a copy are so short that a few tokens show them (`SIZES`).

A mismatch between descriptor and model is an error when packing is enabled, or at the first row.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, cast, final

import torch
import transformers
from torch import nn
from transformers import AttentionMaskInterface

from vlmpack.attention.patterns import FULL_CAUSAL, LayerMask, Pattern, visible_keys
from vlmpack.attention.spans import Spans
from vlmpack.errors import FamilyError
from vlmpack.families.media import media_of_row
from vlmpack.families.spans import Bidirectional, Prefix
from vlmpack.layout.batch import Media
from vlmpack.layout.device import outside_graph
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, TEXT, VIDEO
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ModelParts

SIZES = {"sliding_window": 3, "attention_chunk_size": 4}
"""The copy's settings, in place of the model's."""
TYPES = (0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0)
"""Token types of a sample with two images, the first longer than the window."""
PREFIX = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
"""Token types of a sample with a prefix that is longer than the window."""
SAMPLE = Segments.from_lengths([len(TYPES)])


# ---------------------------------------------------------------------- masks of layers

_NAME = "vlmpack_masks"


def _dense_mask(
    *_: Any, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], device: Any, **__: Any
) -> torch.Tensor:
    """Return bool [1, 1, L, L']. transformers makes masks of functions of (batch, head, query, key)."""
    queries, keys = torch.arange(q_length, device=device), torch.arange(kv_length, device=device)
    return mask_function(0, 0, queries[:, None], keys[None, :]).expand(1, 1, q_length, kv_length)


AttentionMaskInterface.register(_NAME, _dense_mask)


def measure_layer_masks(text: Any) -> dict[int, LayerMask]:
    """Find the mask of each decoder layer with attention, by its `layer_idx`, as the model's own code masks it.

    Raises:
        FamilyError: a layer's mask is not causal, optionally within a window or chunk; or a layer is in two places with
            different masks.
    """
    copied, masks = _RecordingText(text), dict[int, LayerMask]()
    kinds = [
        FULL_CAUSAL,
        LayerMask(window=getattr(text.config, "sliding_window", None)),
        LayerMask(chunk=getattr(text.config, "attention_chunk_size", None)),
    ]
    for layer, mask in copied.run(functools.partial(type(text).forward, copied.module)):
        alike = (kind for kind in kinds if torch.equal(mask[0, 0], _visible(kind)))
        if (kind := next(alike, None)) is None:
            raise FamilyError(
                f"layer {layer} attends to other tokens than those before them, or a window or chunk of those, in the "
                "model's own code, which packed rows cannot do; train this model without packing"
            )
        if masks.setdefault(layer, kind) != kind:
            raise FamilyError(
                f"layers with the layer_idx {layer} have different masks, {masks[layer]} and {kind}: layers were "
                "removed or shared. Give each the number of its place, or train this model without packing"
            )
    return masks


def layer_numbers(text: Any) -> list[int]:
    """Return the `layer_idx` of each decoder layer in use, by which layers call attention; its place if it has none."""
    layers = islice(text.layers, text.config.num_hidden_layers)
    return [getattr(getattr(layer, "self_attn", None), "layer_idx", place) for place, layer in enumerate(layers)]


def _visible(mask: LayerMask, spans: Spans | None = None) -> torch.Tensor:
    """Return bool [L, L']: what the tokens of the sample attend to in a layer of a copy; `mask`: the model's."""
    window = None if mask.window is None else SIZES["sliding_window"]
    chunk = None if mask.chunk is None else SIZES["attention_chunk_size"]
    pattern = Pattern(window=window, chunk=chunk, spans=spans)
    return visible_keys(SAMPLE, SAMPLE, torch.device("cpu"), causal=True, pattern=pattern)


@final
class _AllCalledError(Exception):
    """Raised when all layers were called: the rest need not run."""


class _Substitute(nn.Module):
    """A substitute for a part of a model. It has the part's attributes, and returns the same value whatever its
    input."""

    def __init__(self, part: nn.Module | None, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(part=part, **attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["part"], name)

    def forward(self, *args: Any, **_: Any) -> Any:
        vars(self).update(given=args[0] if args else None)
        return self.value


@final
class _Recorder(_Substitute):
    """A substitute for a decoder layer. It records its mask."""

    def forward(self, hidden: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        self.masks[self.number] = kwargs.get("attention_mask")
        if len(self.masks) == self.layers:
            raise _AllCalledError
        return hidden


@final
class _RecordingText:
    """A copy of the text model whose layers record their masks.

    It computes on the host, wherever the model is. The model may even be on the meta device, where training loops keep
    it until it is sharded.
    """

    def __init__(self, text: Any) -> None:
        self.masks: dict[int, Any] = {}
        """What each layer got as its mask."""
        self.numbers = layer_numbers(text)
        self.count = len(self.numbers)
        self.config = copy.copy(text.config)
        self.config._attn_implementation_internal = _NAME
        for name, value in {**SIZES, "hidden_size_per_layer_input": 0}.items():
            if getattr(self.config, name, None) is not None:
                setattr(self.config, name, value)
        self.zeros = torch.zeros(1, text.config.hidden_size, dtype=next(text.parameters()).dtype, device="cpu")
        common = {"masks": self.masks, "layers": self.count}
        layers = [_Recorder(layer, number=at, **common) for at, layer in enumerate(text.layers)]
        parts = {"layers": nn.ModuleList(layers), "embed_tokens": _Substitute(None, value=self.zeros)}
        # Replace parts that would be on the model's device and whose output only layers use.
        rotary = {name: part for name, part in text.named_children() if name in _ROTARY}
        parts |= {name: _Substitute(part, value=(None, None)) for name, part in rotary.items()}
        without = {name: value for name, value in _PER_TOKEN.items() if name in vars(text)}
        self.module = _shallow_copy(text, parts, config=self.config, **without)

    @torch.no_grad()
    def run(self, forward: Callable[..., Any], **inputs: Any) -> list[tuple[int, torch.Tensor]]:
        """Call a forward with embeddings of the sample, and return the `layer_idx` and mask of each layer with
        attention."""
        try:
            with torch.device("cpu"):
                forward(inputs_embeds=self.zeros.expand(1, SAMPLE.total, -1), use_cache=False, **inputs)
        except _AllCalledError:
            found = [(self.numbers[at], x) for at, x in self.masks.items() if isinstance(x, torch.Tensor)]
            return [(number, mask) for number, mask in found if mask.ndim == 4]
        name = type(self.module).__name__
        raise FamilyError(f"a {name} called {len(self.masks)} of its {self.count} layers; is its forward its own?")


_ROTARY = ("rotary_emb", "pos_emb")
"""Names of parts that compute rotary angles."""
_PER_TOKEN = {"hidden_size_per_layer_input": 0, "first_kv_shared_layer_idx": -1}
"""Values of Gemma 4's attributes in a copy: no per-layer embeddings, which need token ids, and no tokens dropped before
layers that share keys. Neither affects a mask."""


# ---------------------------------------------------------------------- spans


def check_spans(model: ModelParts, layer_masks: Mapping[int, LayerMask], bidirectional: Bidirectional | None) -> None:
    """Compare masks for a sample with images, or with a prefix, between the model's own code and its descriptor.

    Args:
        model: the model.
        layer_masks: the mask of each layer.
        bidirectional: the bidirectional spans of packed rows; None: none.

    Raises:
        FamilyError: a token attends to other tokens.
    """
    family, text = model.family, model.text
    column, *_ = *family.token_columns, family.token_types
    if column is None:
        return
    copied, backbone = _RecordingText(text), family.backbone(model.core)
    config: Any = copy.copy(backbone.config)
    config.text_config = copied.config
    parts = {family.text_path.removeprefix(f"{family.backbone_path}."): copied.module}
    whole = _shallow_copy(backbone, parts, config=config)
    positions = torch.arange(SAMPLE.total, device="cpu").expand(4, 1, -1)
    kinds, letters, contents = (PREFIX, "ps", "a prefix") if family.token_columns else (TYPES, "ti", "images")
    types = torch.tensor([kinds], device="cpu")
    inputs = {column: types, "position_ids": family.rotary_ids(positions)}
    spans = None
    if bidirectional is not None:
        columns = {column: types[0]} if isinstance(bidirectional, Prefix) else {}
        runs = bidirectional.of_sample(columns, types[0])
        spans = Spans(runs=runs, beyond_window=bidirectional.beyond_window)
    for layer, mask in copied.run(functools.partial(type(backbone).forward, whole), **inputs):
        in_layer = bidirectional is not None and bidirectional.is_in(layer_masks[layer].window)
        expected = _visible(layer_masks[layer], spans if in_layer else None)
        if differs := (mask[0, 0] != expected).nonzero().tolist():
            query, key = differs[0]
            shown = "attends" if expected[query, key] else "does not attend"
            raise FamilyError(
                f"layer {layer}: as {family.model_type} is described, token {query} of a sample with "
                f"{contents} ({''.join(letters[kind] for kind in kinds)}) {shown} to token {key}, but in the model's "
                "own code it is the other way round; train this model without packing"
            )


def _shallow_copy(module: nn.Module, parts: Mapping[str, nn.Module], **attributes: Any) -> Any:
    """Return a shallow copy with other parts and attributes. Running it changes neither the model nor its hooks."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module), _modules={**module._modules, **parts}, **attributes)
    return copied


def _copy_with_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> Any:
    """Return a copy with other parts at these paths; modules on the paths are copied too."""
    direct = {path: part for path, part in parts.items() if "." not in path}
    for holder in {path.partition(".")[0] for path in parts} - direct.keys():
        prefix = f"{holder}."
        below = {path.removeprefix(prefix): part for path, part in parts.items() if path.startswith(prefix)}
        direct[holder] = _copy_with_parts(module.get_submodule(holder), below)
    return _shallow_copy(module, direct)


# ---------------------------------------------------------------------- the head


@final
class _Output:
    """A backbone's output: hidden states, and None for every other attribute."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def check_logits(model: ModelParts) -> None:
    """Compare the model's own processing of the head's input and output with its family's descriptor.

    Raises:
        FamilyError: log-probabilities of packed rows would differ, or the model's own forward fails.
    """
    core, family = model.core, model.family
    hidden = torch.linspace(-3, 3, 6, device="cpu").reshape(1, 2, 3)
    values = torch.tensor([-900.0, -30.0, -2.0, 0.0, 0.5, 7.0, 31.0, 450.0], device="cpu").reshape(1, 2, 4)
    backbone, head = _Substitute(None, value=_Output(hidden)), _Substitute(None, value=values)
    upstream = family.upstream_class(core)
    name = upstream.__name__
    copied = _copy_with_parts(core, {family.backbone_path or family.text_path: backbone, family.head_path: head})
    ids = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
    inputs = {"inputs_embeds": hidden} if family.backbone_path is None else {"input_ids": ids}
    try:
        logits = upstream.forward(copied, **inputs, use_cache=False, return_dict=True).logits
    except Exception as error:
        raise FamilyError(
            f"the forward of a {name} fails by itself in transformers {transformers.__version__}, with "
            f"{type(error).__name__}: {error}. Use another version of transformers (Llama 4 with images: 5.24.0 is the "
            "one that cannot run it)"
        ) from error
    expected = family.logits(values, family.text_config(core.config))
    if head.given is not hidden and not torch.equal(head.given, hidden):
        raise FamilyError(
            f"a {name} changes hidden states before its head, which {family.model_type} is not described with"
        )
    if not torch.allclose(logits, expected, rtol=1e-5):
        at = int((logits - expected).abs().argmax())
        raise FamilyError(
            f"a {name} makes a logit of {logits.flatten()[at]:.6g} of its head's {values.flatten()[at]:.6g}, "
            f"but as {family.model_type} is described it would be {expected.flatten()[at]:.6g}: its log-probabilities "
            "would be others. Its configuration was changed after the model was made, or its descriptor is wrong"
        )


@outside_graph
def check_rope_index(model: ModelParts) -> None:
    """Compare positions for a sample with an image, and with a video and audio if the family takes them, with the
    model's own.

    Raises:
        FamilyError: the model's `get_rope_index` gives other positions than the family's descriptor.
    """
    family, config, backbone = model.family, model.core.config, cast(Any, model.family.backbone(model.core))
    merge, frames, seconds = family.merge(config), 30, [0.7]
    images, video = torch.tensor([[1, 2 * merge, 3 * merge]]), (2, merge, 2 * merge)
    for videos in (None, torch.tensor([video]))[: 1 + family.has_videos]:
        runs = [(IMAGE, family.media_tokens(images.tolist(), config))]
        tensors: dict[str, torch.Tensor] = {}
        if family.audio is not None:
            runs.append((AUDIO, family.audio.tokens(frames, config.audio_config)))
            tensors["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.int64)
        if videos is not None:
            runs += [(VIDEO, tokens) for tokens in family.video_runs([video], config)]
            if "video_second_per_grid" in family.media:
                tensors["video_second_per_grid"] = torch.tensor(seconds)
        ids, kinds = list[int](), list[int]()
        for kind, tokens in runs:
            name = KINDS[IMAGE if family.videos_as_images else kind]
            start = getattr(config, f"{'audio' if kind == AUDIO else 'vision'}_start_token_id", 0)
            ids += [0, start, *[getattr(config, f"{name}_token_id")] * tokens, 0]  # 0 is the id of some word
            kinds += [TEXT, TEXT, *[kind] * tokens, TEXT]
        input_ids, types = torch.tensor([ids]), torch.tensor([kinds])
        media = Media(image_grid_thw=images, video_grid_thw=videos, tensors=tensors)
        segments = Segments.from_lengths([len(ids)])
        row = PackedRow(input_ids=input_ids, segments=segments, mm_token_type_ids=types, media=media)
        expected = family.positions(media_of_row(family, row, config), segments, config=config)
        further: dict[str, Any] = {"mm_token_type_ids": types}
        if family.positions_rule.timed is not None:
            further = {"attention_mask": torch.ones_like(input_ids), "audio_seqlens": torch.tensor([frames])}
            further["second_per_grids"] = tensors.get("video_second_per_grid")
        if videos is not None:
            further["video_grid_thw"] = videos
        upstream, _ = backbone.get_rope_index(input_ids, image_grid_thw=images, **further)
        if (differs := upstream.cpu() != expected[1:]).any():
            at = int(differs.any(0)[0].int().argmax())
            kinds_seen = ", ".join(dict.fromkeys(KINDS[kind] for kind, _ in runs))
            raise FamilyError(
                f"token {at} of a sample with {kinds_seen} is at {upstream[:, 0, at].tolist()} "
                f"(time, height, width) in the code of this {type(model.core).__name__}, but {family.model_type} is "
                f"described with {expected[1:, 0, at].tolist()}: rotary positions would be wrong. Use a transformers "
                "of the supported range, and an unmodified model"
            )
