"""The plain Hugging Face model: find it in wrappers, check it, compile its layers, and pass calls on to it.

generate()                    plain, in every step
forward, cannot be packed     plain: a cache, embeddings, attention weights
model.model(...)              plain, unless `pack_backbone` was called: it bypasses the enabled model's forward
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from vlmpack.errors import ConfigError, FamilyError, LayoutError, UnpackedWarning
from vlmpack.families.registry import family_of, is_backbone, is_classifier
from vlmpack.layout.batch import METADATA_KEY
from vlmpack.layout.device import on_host, outside_graph, require

_HAS_HEAD = ("ForConditionalGeneration", "ForCausalLM")

CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument in models and layers. Since transformers 5.24 the first is used everywhere."""


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name of a forward's cache argument."""
    return next(name for name in CACHES if name in inspect.signature(forward).parameters)


def find_model(model: nn.Module) -> Any:
    """Find the model with a head (`...ForConditionalGeneration`, `...ForCausalLM` or a classifier) inside wrappers such
    as `PeftModel` or DDP; or else the model without a head that `AutoModel` loads.

    Raises:
        FamilyError: there is none; the message names the type that was given.
    """
    if not isinstance(model, nn.Module):
        raise FamilyError(
            f"a {type(model).__name__} is no model; load it first: AutoModelForImageTextToText.from_pretrained(...)"
        )
    core = next(chain(_models(model, _has_head), _models(model, is_backbone)), None)
    if core is None:
        raise FamilyError(
            f"no ...ForConditionalGeneration or ...ForCausalLM found in a {type(model).__name__}; give the model that "
            "AutoModelForImageTextToText (or AutoModelForCausalLM) .from_pretrained returns, or a wrapper around it"
        )
    return core


def _models(holder: nn.Module, is_one: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    return (module for module in holder.modules() if isinstance(module, PreTrainedModel) and is_one(module))


def _has_head(model: nn.Module) -> bool:
    return is_classifier(model) or any(base.__name__.endswith(_HAS_HEAD) for base in type(model).__mro__)


def check_is_only_one(holder: nn.Module) -> None:
    """Check that there is no second model: `find_model` finds the first, so the second would not pack.

    Raises:
        ConfigError: there are several models side by side.
    """
    first, *others = [*_models(holder, _has_head)] or _models(holder, is_backbone)
    within = set(map(id, first.modules()))
    if other := next((model for model in others if id(model) not in within), None):
        raise ConfigError(
            f"a {type(holder).__name__} holds several models ({type(first).__name__}, {type(other).__name__}): enable "
            "packing on each of them"
        )


Model = TypeVar("Model", bound=nn.Module)


def compile_layers(model: Model, **settings: Any) -> Model:
    """Compile every part of every layer of the text model, and of every block of the vision tower, in place.

    `torch.compile(model)` also compiles the code between the layers. That code loops over images, so it is recompiled
    for every number of images and every new size. Layers see only a row's width and its number of patches, so with
    `dynamic=True` (the default here) compiling for one row is enough. Layers of the same kind share the compiled code.

    Call it before the model is wrapped or sharded. Gradient checkpointing may be switched on or off before or after.
    Parameters, their names and the saved checkpoint do not change.

    Args:
        model: a `...ForConditionalGeneration` or `...ForCausalLM`, or a module that holds one, with or without packing.
        settings: options of `torch.compile`: `backend`, `mode`, ... With `dynamic=None`, the first length is assumed to
            be the only one, so everything is compiled at least twice.

    Returns:
        The same object.

    Raises:
        FamilyError: the model's family is not supported.
    """
    core = find_model(model)
    family = family_of(core)
    layers = [*family.language_model(core).get_submodule("layers").children(), *family.vision_blocks(core)]
    for part in (part for layer in layers for part in layer.children()):
        part.compile(**{"dynamic": True, **settings})
    return model


_passed_on: ContextVar[bool] = ContextVar("vlmpack_passed_on", default=False)
_masks_passed_on: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Masks that layers got during a passed-on forward pass. Gradient checkpointing passes them to the layers again in the
backward pass, when the forward pass is over, and on a GPU in another thread."""
_warned: set[str] = set()
"""Reasons that were warned of, and reasons for which a mask on an accelerator was read (a host–device sync)."""

PAST_THE_FORWARD = (
    "a part of the model was called directly (model.model(...), as trainers with a loss of their own do), past the "
    "forward that packs. Call the model itself: logits_to_keep and output_hidden_states come packed too"
)
_LIBRARIES = tuple(str(Path(file).parents[1]) for file in (__file__, torch.__file__, transformers.__file__))
"""The directory of vlmpack, and the ones that PyTorch, transformers and usually trainers are installed in."""


@contextmanager
def passed_on() -> Iterator[None]:
    """Mark a forward pass that the enabled model passes on to the model's own forward."""
    token = _passed_on.set(True)
    try:
        yield
    finally:
        _passed_on.reset(token)


def is_passed_on() -> bool:
    """Return whether the current forward pass was passed on to the model's own forward."""
    return _passed_on.get()


@outside_graph
def warn_past_the_forward(mask: Any) -> None:
    """Warn if padding reaches a layer in training through a call that bypassed the enabled model's forward.

    Args:
        mask: the layer's attention mask: [B, S], or [B, 1, S, S] boolean or additive.
    """
    if not isinstance(mask, torch.Tensor):
        return
    if is_passed_on():
        _masks_passed_on[mask] = True
    elif mask not in _masks_passed_on:
        warn_of_padding(mask, PAST_THE_FORWARD)


def warn_of_padding(mask: Any, reason: str) -> None:
    """Warn once that padding is computed, and why. A mask on an accelerator is read only at the first call."""
    if reason in _warned or not torch.is_grad_enabled() or not isinstance(mask, torch.Tensor):
        return
    if not on_host(mask):
        _warned.add(reason)
    if _has_padding(mask.detach()):
        _warned.add(reason)
        message = f"nothing is packed in this training step, so its padding is computed too: {reason}"
        warnings.warn(message, UnpackedWarning, stacklevel=_callers_level())


def _has_padding(mask: torch.Tensor) -> bool:
    """Look at the last query only: a causal mask hides nothing from it. A 2D mask holds 0 and 1, of any dtype."""
    last = mask[..., -1, :] if mask.ndim > 2 else mask
    return bool((last < 0).any() if mask.ndim > 2 and mask.is_floating_point() else (last == 0).any())


def check_not_bypassed(kwargs: dict[str, Any]) -> None:
    """Check the keywords of a layer that got no row. transformers passes unknown keywords to every layer, so boundaries
    that arrive here were ignored.

    Raises:
        ConfigError: boundaries are among the keywords.
    """
    if kwargs.get(METADATA_KEY) is not None or kwargs.get("cu_seqlens_q") is not None:
        raise ConfigError(
            "the batch reached the attention layers without passing through the packed forward, which would mix its "
            "samples: the model's forward was replaced, or its backbone called directly, after enable_packing (Liger's "
            "fused cross-entropy, TRL's fused head). Switch that off, vlmpack's own head is chunked already: "
            "apply_liger_kernel_to_...(model=model, fused_linear_cross_entropy=False) keeps Liger's other kernels"
        )


def _callers_level() -> int:
    """Return the `stacklevel`, for the function above, of the first caller outside the libraries."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level


# ---------------------------------------------------------------------- boundaries that the plain model would ignore

BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_q_padded", "rope_cu_seqlens", "moe_padding_mask")
"""Keywords for boundaries and for data derived from them."""

_OF_MEGATRON = ("cu_seqlens_kv", "cu_seqlens_kv_padded", "cu_seqlens", "max_seqlen", "packed_seq_params")
_OF_TRANSFORMERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cu_seqlens_k")
_OF_OTHERS = ("seq_lengths", "sequence_ids", "document_ids")
_LOST_BOUNDARIES = (*BOUNDARIES[1:], *_OF_MEGATRON, *_OF_TRANSFORMERS, *_OF_OTHERS)
"""Names of boundaries in other libraries, and our own names in case `cu_seqlens_q` was forgotten."""


def check_boundaries_kept(inputs: dict[str, Any]) -> None:
    """Check that no boundaries get lost: transformers' own attention ignores most names for them without a warning.

    Raises:
        ConfigError: there are boundaries, or positions that restart.
        LayoutError: a padded batch has lost its mask.
    """
    lost = [name for name, value in inputs.items() if value is not None and _looks_like_boundaries(name)]
    if lost:
        raise ConfigError(f"{', '.join(lost)} {_MIXED}")
    if inputs.get("attention_mask") is not None:
        return
    if inputs.get(METADATA_KEY) is not None:
        raise LayoutError(
            "a padded batch came without its attention_mask, so its padding would be attended to; keep the 2D mask "
            "that the collator made"
        )
    positions, caches = inputs.get("position_ids"), [inputs.get(name) for name in CACHES]
    if positions is not None and all(cache is None for cache in caches):
        # The first axis is the position in the sample, or time: neither decreases.
        first = positions[0] if positions.ndim == 3 else positions
        goes_back = (first[..., 1:] < first[..., :-1]).any()
        require(
            ~goes_back,
            f"position_ids that restart are how others mark the samples of a row: they {_MIXED}",
            ConfigError,
        )


@functools.cache
def _looks_like_boundaries(name: str) -> bool:
    """Return whether a name is one of these, or a misspelling of one."""
    return bool(difflib.get_close_matches(name, ("cu_seqlens_q", *_LOST_BOUNDARIES), n=1, cutoff=0.88))


_MIXED = (
    "would be ignored and the samples of the row mixed; give a packed row its boundaries as cu_seqlens_q (and "
    "cu_seqlens_q_padded if it has gaps)"
)
