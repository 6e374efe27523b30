"""enable_packing and disable_packing: make a model accept packed rows, and undo it.

The object's class becomes a subclass of its own class with another `forward`, and each mechanism of the family attaches
to its layers. Saving, PEFT, gradient checkpointing, DDP, FSDP2, copying and `torch.compile` keep working.
`disable_packing` leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from vlmpack.context_parallel.mesh import Parallel, mesh_of, tensor_group
from vlmpack.context_parallel.plans import check_plan, fit_adapters
from vlmpack.errors import ConfigError, check_kind
from vlmpack.families.family import TRANSFORMERS, Family
from vlmpack.families.registry import check_parts, family_of, has_lm_head, is_backbone, is_classifier
from vlmpack.model.engine import PackingState, StepConfig, packing_state, stored_state
from vlmpack.model.forward import ENABLED, leave_backbone, pack_backbone, packed_backbone, packed_class
from vlmpack.model.loss_count import LossCount
from vlmpack.model.mechanisms import Mechanism, ModelParts, base_of, is_subclassed
from vlmpack.model.mechanisms.attention import Attention
from vlmpack.model.mechanisms.audio import Audio
from vlmpack.model.mechanisms.experts import Experts
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.llama4 import InnerHead, QueryScale
from vlmpack.model.mechanisms.per_sample import PerSample
from vlmpack.model.mechanisms.short_conv import ShortConv
from vlmpack.model.mechanisms.tensor_parallel import TensorParallel
from vlmpack.model.mechanisms.upstream import check_logits, check_rope_index
from vlmpack.model.mechanisms.vision import Vision
from vlmpack.model.plain import check_is_only_one, find_model

Model = TypeVar("Model", bound=nn.Module)

MECHANISMS: tuple[Mechanism, ...] = (
    *(GatedDelta(), ShortConv(), PerSample(), QueryScale()),
    *(Audio(), Vision(), Experts(), Attention(), InnerHead()),
)
"""The mechanisms that depend on the family. Its descriptor names the ones that its layers have."""


def enable_packing(model: Model, config: StepConfig | None = None, *, parallel: Parallel | None = None) -> Model:
    """Patch a Hugging Face model in place so that it accepts packed rows and packs padded batches by itself.

    Afterwards `model(**batch)` takes three kinds of input:

    1. a padded batch with its 2D `attention_mask`, padded on either side: the forward pass packs it, and the loss is
       the same as for the padded batch;
    2. a packed row with `cu_seqlens_q` (and `cu_seqlens_q_padded` if it has gaps), or with the host metadata that
       `VLMCollator(layout="packed")` adds;
    3. anything else (generation, a cache, `inputs_embeds`, `output_attentions`, no mask): passed through to the model's
       own forward. If this happens to a training batch with padding, you are warned once (`UnpackedWarning`).

    For a padded batch, `logits_to_keep` (a number, or columns), `output_hidden_states` and `return_dict=False` return
    the same values as without packing, with zeros on padding.

    A classifier or reward model (`...ForSequenceClassification`, `...ForTokenClassification`) takes only padded
    batches: its backbone packs them, and its own forward scores the result as before. A model without a head, as
    `AutoModel` loads it for embeddings, returns `last_hidden_state` [B, S, D] of a padded batch, 0 on padding, and
    [1, T, D] of a row.

    Inputs of kinds 1 and 2 may also contain:

    - `rope_cu_seqlens`, a tensor, list or tuple of whole numbers: where rotary positions restart. It must include the
      start of every sample and may include further boundaries inside a sample's text. Count them either in real tokens
      (as `cu_seqlens_q`) or in positions of the packed row (as `cu_seqlens_q_padded`). Without gaps the two are equal.
    - `position_ids`: the positions that the model takes for each sample on its own, [3, B, S] or [3, 1, T] (four rows
      if the first one is the position in the sample); [B, S] or [1, T] for a text model. They must equal the positions
      computed from boundaries, `rope_cu_seqlens` and grids. Values on padding are ignored.
    - `moe_padding_mask`, [B, S] or [1, T], True on padding: must agree with the mask or the boundaries.

    Args:
        model: a `...ForConditionalGeneration`, a `...ForCausalLM`, a classifier, a model without a head, or a module
            that holds one (a `PeftModel`, a `SentenceTransformer`). On any device: weights are not read, so the model
            may be on the meta device and be loaded afterwards.
        config: settings; None: the defaults.
        parallel: how ranks train together (one row split across several ranks, or the same calls on all of them);
            None: as the mesh says with which transformers loaded the model, or each rank by itself.

    Returns:
        The same object. Enabling packing again replaces the settings.

    Raises:
        FamilyError: the model's family cannot be packed exactly; the message names the part that leaks between samples.
        ConfigError: the forward of the model, or of a layer that needs the boundaries, was replaced on the object, so
            ours would never be called; the model has a custom forward, loss or attention function, which packing would
            bypass; its attention is not causal; or a router loss is set for a model without experts.
    """
    core = find_model(model)
    check_is_only_one(model)
    family = family_of(core)
    parallel = _on_mesh(core, parallel, family)
    check_parts(family, core)
    check_plan(core)
    fit_adapters(core)
    config = config or StepConfig()
    check_kind("config", config, StepConfig, 'StepConfig(attention="sdpa_segments")')
    if config.z_loss_coef and not family.has("experts"):
        raise ConfigError(f"z_loss_coef is {config.z_loss_coef}, but {family.model_type} has no experts; leave it out")
    before = stored_state(core)
    mechanisms = tuple(mechanism for mechanism in MECHANISMS if mechanism.is_in(family))
    mechanisms += () if tensor_group(core) is None else (TensorParallel(),)
    has_loss = has_lm_head(core)
    loss_count = None if before is None else before.loss_count
    settings = {"family": family, "config": config, "parallel": parallel, "has_head": has_loss}
    state = PackingState(**settings, mechanisms=mechanisms, loss_count=loss_count)
    if before is not None and (before.parts_of(core).vision is None) != (state.parts_of(core).vision is None):
        disable_packing(core)  # the two modes change different layers
        before = None
    if not has_loss and (config.z_loss_coef or (parallel is not None and parallel.ranks > 1)):
        raise ConfigError(
            f"the loss of a {type(core).__name__} is computed from whole samples, and not by vlmpack: leave out "
            "z_loss_coef, and ranks that share a row"
        )
    if before is None and has_loss:
        check_forward(core, family)
    state.check(core, attached=False)  # check everything before changing anything
    parts = state.parts_of(core)
    with torch.device("cpu"):  # the model, and the default device, may be an accelerator or meta
        if has_loss:
            check_logits(parts)
        if family.positions_rule.axes > 1:
            check_rope_index(parts)
    if before is None:
        core.__class__ = (packed_backbone if is_backbone(core) else packed_class)(type(core))
    core._vlmpack_state = state
    for mechanism in mechanisms:
        mechanism.attach(parts)
    ENABLED.add(core)
    if is_classifier(core) and before is None:
        pack_backbone(core)
    return model


def check_forward(core: nn.Module, family: Family) -> None:
    """Check that the model has its class's own forward, because packed rows go directly to its backbone and head.

    Raises:
        ConfigError: the model's class, or the object itself, has a custom forward.
    """
    upstream = family.upstream_class(core)
    if type(core).forward is not upstream.forward:
        raise ConfigError(
            f"{type(core).__name__} overrides the forward of {upstream.__name__}, and packed rows would bypass it; "
            f"enable packing on a {upstream.__name__}, and compute what yours adds from PackedStep's result"
        )
    if "forward" in vars(core):
        raise ConfigError(
            f"the forward of this {type(core).__name__} was replaced on the object itself, so that of packing would "
            "never be called, in whatever order. Liger: apply_liger_kernel_to_...(model=model, "
            "fused_linear_cross_entropy=False) keeps its other kernels (Trainer: "
            'liger_kernel_config={"fused_linear_cross_entropy": False}). TRL: '
            'loss_type="nll". '
            "accelerate: enable packing before it prepares the model "
            "(afterwards: accelerator.unwrap_model(model, keep_fp32_wrapper=False)). And load the model without a "
            "device_map that spreads it over several devices"
        )


_MIXED_UP = ("kimi_k25",)
"""Families whose checkpoints hold queries, keys and values in one weight. transformers 5.24 splits a part of it as if
it were the whole."""


def _on_mesh(core: nn.Module, parallel: Parallel | None, family: Family) -> Parallel | None:
    """Return the ranks that train together: as given, or as the model's mesh says.

    Raises:
        ConfigError: the mesh cannot train packed rows, or the family's images cannot be computed by ranks together.
    """
    if family.model_type in _MIXED_UP and (getattr(core, "_fsdp_size", None) or 1) > 1:
        raise ConfigError(
            f"{family.model_type} was loaded with fsdp_size={core._fsdp_size}, and transformers mixes up the queries, "
            "keys and values of its vision tower when it loads a checkpoint in parts: load it without a mesh, and call "
            "fully_shard on its layers"
        )
    reason = family.not_over_ranks
    oldest = family.oldest_over_ranks
    if oldest > TRANSFORMERS:
        reason = f"its model completes their features elsewhere before transformers {oldest[0]}.{oldest[1]}"
    if parallel is None and mesh_of(core) is not None:
        parallel = Parallel()
        parallel.find_mesh(core)
        parallel.same_calls = reason is None and parallel.data_ranks > 1
    elif parallel is not None:
        check_kind("parallel", parallel, Parallel, "Parallel()")
        if reason is not None and parallel.same_calls:
            raise ConfigError(
                f"the images of {family.model_type} cannot be computed by several ranks together, because {reason}: "
                "leave parallel= out, and give each rank different rows"
            )
        parallel.find_mesh(core)
    return parallel


def disable_packing(model: Model) -> Model:
    """Undo `enable_packing` in place. A model without packing is left alone.

    Layers that other enabled models share stay patched; disabling the last of these models restores them. Call it
    between steps: under gradient checkpointing, a backward pass after it computes the row again without boundaries.

    Raises:
        ConfigError: something else has changed the model's class since (FSDP2's `fully_shard`). Nothing is undone then.
    """
    core = find_model(model)
    state = stored_state(core)
    if state is not None:
        base, parts, kept = base_of(core), state.parts_of(core), _shared_with_others(core)
        for module in _changed(state, parts):  # check all of them before restoring any
            if id(module) not in kept and is_subclassed(module):
                base_of(module)
        for mechanism in state.mechanisms:
            mechanism.detach(parts, kept=kept)
        leave_backbone(state.family.backbone(core), core)
        del core._vlmpack_state
        core.__class__ = base
    return model


def is_packing(model: nn.Module) -> bool:
    """Return whether packing is enabled on `model` or on the model inside it."""
    return stored_state(find_model(model)) is not None


def bind_loss_metrics(model: nn.Module) -> LossCount:
    """Return the loss counter of a model, so that `loss_metrics` can replace HF Trainer's `eval_loss` (on one rank).

    Raises:
        ConfigError: packing is not enabled on the model.
    """
    core = find_model(model)
    state = packing_state(core)
    loss_count = state.loss_count or LossCount()
    core._vlmpack_state = replace(state, loss_count=loss_count)
    return loss_count


def _changed(state: PackingState, parts: ModelParts) -> list[nn.Module]:
    """Return every module that a mechanism changed."""
    return [module for mechanism in state.mechanisms for module in mechanism.find(parts)]


def _shared_with_others(core: nn.Module) -> set[int]:
    """Return the ids of modules that are also changed for other enabled models."""
    ids: set[int] = set()
    for other in ENABLED:
        if other is not core and (state := stored_state(other)) is not None:
            ids.update(map(id, _changed(state, state.parts_of(other))))
    return ids
