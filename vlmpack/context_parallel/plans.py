"""Tensor-parallel plans for transformers' meshes, with the rules that transformers' own plans lack; PEFT's adapters.

A plan maps modules, by name with `*` for a layer's number, to how their weights are divided. A rank has some heads of
every layer. A norm of heads (`q_norm`, `k_norm`) is whole on every rank but normalizes that rank's heads alone, so its
gradients must be summed over ranks: without a rule, each rank trains its norm apart, and nothing says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlmpack.context_parallel.mesh import mesh_of
from vlmpack.errors import ConfigError, check_whole_number
from vlmpack.families.family import Family
from vlmpack.families.registry import family_named

SUMMED = "replicated_with_grad_allreduce"
"""The rule of a weight that is whole on every rank, and whose gradients are summed over ranks."""
_QWEN, _LLAMA4 = "model.language_model.layers.*.", "layers.*.feed_forward.shared_expert."
_GPT_OSS = "model.layers.*.self_attn"


def _lfm2(layers: str) -> dict[str, str]:
    """Return the rules of LFM 2: attention and dense MLPs are divided, short convolutions are whole on every rank."""
    columns = [*(f"self_attn.{name}_proj" for name in "qkv"), "feed_forward.w1", "feed_forward.w3"]
    rules = dict.fromkeys(columns, "colwise") | dict.fromkeys(("self_attn.out_proj", "feed_forward.w2"), "rowwise")
    return {f"{layers}.layers.*.{name}": rule for name, rule in rules.items()}


def _latent(layers: str) -> dict[str, str]:
    """Return the rules of multi-head latent attention: what a token has for all heads is whole on every rank."""
    columns = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj"), "colwise")
    rules = {**columns, "kv_a_proj_with_mqa": "mla_kv_a_proj", "o_proj": "rowwise"}
    return {f"{layers}.layers.*.self_attn.{name}": rule for name, rule in rules.items()}


_ADDED: Mapping[str, Mapping[str, str]] = {
    "qwen3_vl": {
        **{f"{_QWEN}self_attn.{name}_proj": "colwise" for name in "qkv"},
        **{f"{_QWEN}mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        **dict.fromkeys((f"{_QWEN}self_attn.o_proj", f"{_QWEN}mlp.down_proj"), "rowwise"),
    },
    # Sinks are divided by heads, and attention reads its own.
    "gpt_oss": {
        **dict.fromkeys((f"{_GPT_OSS}.{name}_proj" for name in "qkv"), "colwise"),
        **dict.fromkeys((f"{_GPT_OSS}.o_proj", f"{_GPT_OSS}.sinks"), "rowwise"),
        _GPT_OSS: "local_params",
    },
    "deepseek_v3": _latent("model"),
    "kimi_k25": _latent("model.language_model"),
    "lfm2": _lfm2("model"),
    "lfm2_moe": _lfm2("model"),
    "lfm2_vl": _lfm2("model.language_model"),
    # Checkpoints hold experts transposed, and transformers transposes them after it has divided them. Experts of a
    # tensor rank would be mixed up; whole experts, and those of an expert rank, come out right.
    "qwen3_vl_moe": {f"{_QWEN}mlp.experts{name}": "replicate" for name in ("", ".gate_up_proj", ".down_proj")},
    # The model adds to the output of this layer in place, which autograd refuses if the layer is divided.
    "llama4": {f"language_model.model.{_LLAMA4}{name}_proj": "replicate" for name in ("gate", "up", "down")},
    "llama4_text": {f"model.{_LLAMA4}{name}_proj": "replicate" for name in ("gate", "up", "down")},
    # The model reads the embedding of padding from the weight, which it shares with the head.
    "gemma4": {"model.language_model.embed_tokens": "replicate", "lm_head": "replicate"},
}
"""Rules that families need beside, or instead of, transformers' own."""


def plan_for(config: Any, *, tp_size: int) -> dict[str, str]:
    """Return the tensor-parallel plan of a model: transformers' own, with the rules that it lacks.

        mesh = DistributedConfig(tp_size=2, tp_plan=plan_for(config, tp_size=2))
        model = AutoModelForImageTextToText.from_pretrained(name, distributed_config=mesh)

    Args:
        config: configuration of the model, from `AutoConfig.from_pretrained`.
        tp_size: number of tensor ranks.

    Raises:
        FamilyError: the family is unknown.
        ConfigError: there is no plan for the layers of the family; transformers is too old for it; or `tp_size` does
            not divide the heads of a layer: names the sizes that do.
    """
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    check_whole_number("tp_size", tp_size, at_least=1)
    family = family_named(config.model_type)
    model = _skeleton(family, config)
    there = {pattern_of(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    added = {name: rule for name, rule in _ADDED.get(family.model_type, {}).items() if name in there}
    plan = {**model.tp_plan, **added}
    plan |= {pattern_of(name): SUMMED for name, _ in _norms_of_heads(model, plan)}
    if not any(name.startswith(f"{family.text_path}.layers.") for name in plan):
        raise ConfigError(
            f"{family.model_type} has no tensor-parallel plan for its layers, in transformers or in vlmpack: divide "
            "the model with fsdp_size=, or experts with ep_size="
        )
    if unknown := sorted({*plan.values()} - {*ALL_PARALLEL_STYLES.valid_keys()}):
        raise ConfigError(
            f"the plan of {family.model_type} needs the rule {unknown[0]!r}, which this transformers does not have; "
            "upgrade it"
        )
    _check_heads(model, plan, tp_size)
    return plan


def check_plan(model: Any) -> None:
    """Check that the tensor-parallel plan that a model was loaded with gives exact gradients.

    Raises:
        ConfigError: a head would be divided, or gradients of norms of heads would not be summed over tensor ranks.
    """
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return
    _check_heads(model, model.tp_plan, model._tp_size)
    apart = [name for name, norm in _norms_of_heads(model, model.tp_plan) if norm.weight.requires_grad]
    if apart:
        raise ConfigError(
            f"{model.config.model_type} was loaded with tp_size={model._tp_size}, and its plan does not sum the "
            f"gradients of {len(apart)} norms of heads over ranks ({apart[0]}): load it with "
            "DistributedConfig(tp_plan=plan_for(config, tp_size=...)) of vlmpack.context_parallel, or freeze them"
        )


def _skeleton(family: Family, config: Any) -> Any:
    """Return the model without weights."""
    with torch.device("meta"):
        return family.auto_class.from_config(deepcopy(config))


def _norms_of_heads(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield norms with one weight for each channel of a head, in divided attention, that the plan has no rule for."""
    for name, attention in model.named_modules():
        for at in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            norm = attention._modules.get(at)
            if norm is None or plan.get(f"{pattern_of(name)}.{at[0]}_proj") != "colwise":
                continue
            weight = norm._parameters.get("weight")
            is_of_heads = weight is not None and weight.numel() == getattr(attention, "head_dim", None)
            if is_of_heads and f"{pattern_of(name)}.{at}" not in plan:
                yield f"{name}.{at}", norm


def _check_heads(model: Any, plan: Mapping[str, str], tp_size: int) -> None:
    """Check that every rank gets whole heads; other layers may be divided unevenly."""
    counts = []
    for name, attention in model.named_modules():
        divided = {at for at in ("k_proj", "kv_b_proj") if plan.get(f"{pattern_of(name)}.{at}") == "colwise"}
        if isinstance(keys := attention._modules.get("k_proj"), nn.Linear) and "k_proj" in divided:
            counts.append(keys.out_features // attention.head_dim)
        elif "kv_b_proj" in divided:
            counts.append(attention.num_heads)
    heads = gcd(*counts)
    if heads % tp_size:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ConfigError(
            f"tp_size={tp_size} does not divide the {heads} key-value heads of {model.config.model_type}: use one of "
            f"{sizes}, and fsdp_size= for the other ranks"
        )


def pattern_of(name: str) -> str:
    """Return the name by which a plan knows a module: numbers of layers are `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# ---------------------------------------------------------------------- adapters


def fit_adapters(core: Any) -> None:
    """Make adapters fit the layers of a divided model.

    PEFT 0.21 sizes an adapter by this rank's part of a weight, except with FSDP ranks alone. With tensor ranks alone it
    then divides the adapter as well, but leaves `in_features` at this rank's inputs. transformers 5.24 reads those of
    all ranks there, so they are set.

    Raises:
        ConfigError: an adapter has another size than its layer, or adapts experts that tensor or expert ranks divide.
    """
    if mesh_of(core) is None:
        return
    wrong = []
    for name, layer in core.named_modules():
        for adapter, first in (getattr(layer, "lora_A", None) or {}).items():
            if hasattr(layer, "get_param"):  # adapts a parameter of experts
                weight = layer.get_param()
                dimensions = (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()
                fits = not {"tp", "ep"} & {*dimensions}
            else:
                base, last = layer.get_base_layer(), layer.lora_B[adapter]
                if isinstance(first.weight, DTensor):
                    first.in_features = first.weight.shape[1]
                fits = _has_size(first.weight, 1, base.in_features) and _has_size(last.weight, 0, base.out_features)
            wrong += [] if fits else [name]
    if wrong:
        raise ConfigError(
            f"adapters do not fit their layers on this mesh ({wrong[0]}; {len(wrong)} in all), because PEFT sizes them "
            "by this rank's part of a weight: leave these layers out of target_modules and target_parameters, or load "
            "the model with fsdp_size= and no other size"
        )


def _has_size(weight: torch.Tensor, dim: int, size: int) -> bool:
    """Return whether a weight has `size` entries along a dimension, over all ranks that have parts of it."""
    if isinstance(weight, DTensor):
        part, _ = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        if tuple(part) != tuple(weight.to_local().shape):
            return False
    return weight.shape[dim] == size
