"""The attention functions that a model with packing enabled uses, under names of their own in transformers' registry.

A call that carries a `RowContext` goes to a vlmpack back-end. A call without one (generation, a cache, a plain padded
batch) goes to the implementation that the model had before: the name of ours ends in the name of that one.

    text model    vlmpack|sdpa
    vision tower  vlmpack_flash|sdpa    transformers hands a vision tower's images over in one call only to
                                        implementations with "flash" in their name; others get them one by one
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.torch_version import TorchVersion
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmpack.attention import AttentionCall, choose
from vlmpack.errors import ConfigError
from vlmpack.layout import FACTS_KEY, Segments, outside_graph
from vlmpack.step.context import CONTEXT, RowContext

TEXT, VISION = "vlmpack|", "vlmpack_flash|"


def install(text: nn.Module, vision: nn.Module | None) -> None:
    """Let every attention layer of the two towers ask vlmpack first; nothing outside these modules changes."""
    for prefix, tower, make in ((TEXT, text, _text_attention), (VISION, vision, _vision_attention)):
        for config in _configs(tower):
            original = original_name(config)
            AttentionInterface.register(prefix + original, make(original))
            if original in ALL_MASK_ATTENTION_FUNCTIONS:  # an implementation of the user's own may have none
                AttentionMaskInterface.register(prefix + original, ALL_MASK_ATTENTION_FUNCTIONS[original])
            # set_attn_implementation would look for a kernel of this name on the hub.
            config._attn_implementation_internal = _NAME(prefix + original)


def uninstall(text: nn.Module, vision: nn.Module | None, *, still_asking: Sequence[nn.Module | None] = ()) -> None:
    """Give every attention layer its own implementation back.

    Args:
        text: the text part of the model.
        vision: its vision tower; None: there is none.
        still_asking: towers of other models: a configuration object of theirs is left as it is.
    """
    shared = {id(config) for tower in still_asking for config in _configs(tower)}
    for tower in (text, vision):
        for config in _configs(tower):
            if id(config) not in shared:
                config._attn_implementation_internal = original_name(config)


def is_installed(text: nn.Module, vision: nn.Module | None) -> bool:
    """Whether the attention layers still ask vlmpack: `set_attn_implementation` would have made them stop."""
    return all(
        str(config._attn_implementation_internal).startswith(prefix)
        for prefix, tower in ((TEXT, text), (VISION, vision))
        for config in _configs(tower)
    )


def original_name(config: PreTrainedConfig) -> str:
    """The implementation that the model had, whether or not ours is installed."""
    return _original_of(str(config._attn_implementation))


def _original_of(name: str) -> str:
    return name.removeprefix(TEXT).removeprefix(VISION)


@final
class _Asking(str):
    """The name of one of ours in a model's configuration. Copies, which may be for new models, get the original's: no
    model can be made with a name that has "flash" in it and is no package's."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return _original_of(str(self))

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (_original_of(str(self)),)


_NAME = _Asking if TorchVersion(torch.__version__) >= "2.12" else str
"""torch 2.11 compiles no model whose configuration names its attention by an instance of a subclass of `str`: it cannot
look that up in a dictionary. There, copies of the configuration keep our name; the README has the remedy."""


def _configs(tower: nn.Module | None) -> list[PreTrainedConfig]:
    """Every configuration object that a module of the tower reads its attention implementation from, once.

    Each step looks. `Module.modules()`, which puts together names, takes four times as long.
    """
    found: dict[int, PreTrainedConfig] = {}
    waiting = [tower]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
        waiting.extend(module._modules.values())
    return list(found.values())


def _text_attention(original: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs):
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is None:
            check_not_bypassed(kwargs)
            return _original(original, module)(module, query, key, value, *args, **kwargs)
        return _packed(query, key, value, row, **_settings(kwargs)), None

    return attention


def _vision_attention(original: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs):
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is not None:
            return _packed(query, key, value, row, vision=kwargs["cu_seq_lens_q"], **_settings(kwargs)), None
        if "flash" in original:
            return _original(original, module)(module, query, key, value, *args, **kwargs)
        return _image_by_image(_original(original, module), module, query, key, value, *args, **kwargs), None

    return attention


def check_not_bypassed(kwargs: dict[str, Any]) -> None:
    """transformers hands keywords that nobody took down to every layer: boundaries that arrive here were ignored."""
    if kwargs.get(FACTS_KEY) is not None or kwargs.get("cu_seqlens_q") is not None:
        raise ConfigError(
            "the batch reached the attention layers without passing through the packed forward, which would mix its "
            "samples: the model's forward was replaced, or its backbone called directly, after enable_packing (Liger's "
            "fused cross-entropy, TRL's fused head). Switch that off: vlmpack's own head is chunked already"
        )


def _settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"scale": kwargs["scaling"], "dropout": kwargs.get("dropout", 0.0)}


@outside_graph
def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: RowContext,
    *,
    scale: float,
    dropout: float,
    vision: torch.Tensor | None = None,
) -> torch.Tensor:
    """transformers' [1, N, T, H] in, its [1, T, N, H] out. `vision`: boundaries of a vision block; None: text."""
    segments = row.segments if vision is None else row.vision.find(vision, query.shape[2])
    q_TNH, k_TKH, v_TKH = (_in_autocast(x.squeeze(0).transpose(0, 1)) for x in (query, key, value))
    if not segments.num_tokens:  # nothing but padding; the projections keep their place in the graph
        nothing = sum(x[:0].sum() for x in (q_TNH, k_TKH, v_TKH))
        return v_TKH.new_zeros(1, *q_TNH.shape[:2], v_TKH.shape[2]) + nothing

    def attend(
        q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, segments: Segments, **keys: Segments
    ) -> torch.Tensor:
        backend = choose(AttentionCall.of(q_TNH, k_TKH, dropout=dropout), row.backend)
        return backend(q_TNH, k_TKH, v_TKH, segments, causal=vision is None, scale=scale, dropout=dropout, **keys)

    if vision is not None:  # all patches of an image are on one rank
        return attend(q_TNH, k_TKH, v_TKH, segments)[None]
    return row.share.attention(attend, q_TNH, k_TKH, v_TKH, segments)[None]


def _in_autocast(x: torch.Tensor) -> torch.Tensor:
    """What autocast would hand to PyTorch's own attention; kernels that it does not know get the same.

    Under autocast the rotary embedding leaves q and k in float32, which flash kernels refuse, beside a v of bfloat16.
    """
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _original(name: str, module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that transformers would have called; "eager" is one that each modelling file has of its own."""
    files = [vars(sys.modules[klass.__module__]) for klass in type(module).__mro__ if klass.__module__ in sys.modules]
    eager = next(file["eager_attention_forward"] for file in files if "eager_attention_forward" in file)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _image_by_image(
    attention: Callable[..., tuple[torch.Tensor, Any]], module: nn.Module, *qkv: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """What a vision tower does itself for implementations that know no boundaries: one call an image."""
    sizes = kwargs.pop("cu_seq_lens_q").diff().tolist()
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    images = zip(*(x.split(sizes, dim=2) for x in qkv), strict=True)
    return torch.cat([attention(module, *image, **kwargs)[0] for image in images], dim=1)
