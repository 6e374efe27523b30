"""enable_packing and disable_packing: one model object accepts packed rows, and stops to.

The object's class becomes a subclass of its own class, with another `forward`, and each mechanism of its family
attaches to its layers. Saving, PEFT, gradient checkpointing, DDP, FSDP2, copying and `torch.compile` go on working, and
taking all of it back leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from vlmpack.context_parallel.mesh import Parallel
from vlmpack.errors import ConfigError, check_kind
from vlmpack.families.family import Family
from vlmpack.families.registry import check_parts, family_of, is_classifier
from vlmpack.model.backbone import leave_backbone, pack_backbone
from vlmpack.model.engine import PackingState, StepConfig, packing_state, stored_state
from vlmpack.model.forward import ENABLED, packed_class
from vlmpack.model.loss_count import LossCount
from vlmpack.model.mechanisms import Mechanism, ModelParts, base_of, is_subclassed
from vlmpack.model.mechanisms.attention import Attention
from vlmpack.model.mechanisms.audio import Audio
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.llama4 import InnerHead, QueryScale
from vlmpack.model.mechanisms.per_sample import PerSample
from vlmpack.model.mechanisms.short_conv import ShortConv
from vlmpack.model.mechanisms.stock import check_logits, check_text_positions
from vlmpack.model.mechanisms.vision import Vision
from vlmpack.model.plain import check_forward, check_is_only_one, find_model
from vlmpack.model.positions import check_rope_index

Model = TypeVar("Model", bound=nn.Module)

MECHANISMS: tuple[Mechanism, ...] = (
    *(GatedDelta(), ShortConv(), PerSample(), QueryScale()),
    *(Audio(), Vision(), Attention(), InnerHead()),
)
"""All that packing supports. A family's descriptor names those that its layers have."""


def enable_packing(model: Model, config: StepConfig | None = None, *, parallel: Parallel | None = None) -> Model:
    """Make a Hugging Face model accept packed rows, and pack padded batches by itself.

    Afterwards `model(**batch)` takes three kinds of input:

    1. a padded batch with its 2D `attention_mask`, padded on either side: packed inside the forward pass, the same
       loss as padded;
    2. a packed row with `cu_seqlens_q` (and `cu_seqlens_q_padded` if it has gaps), or with the host metadata that
       `VLMCollator(layout="packed")` sends along;
    3. anything else (generation, a cache, `inputs_embeds`, `output_attentions`, no mask): passed through to the model's
       own forward. A training step with padding is warned of once (`UnpackedWarning`).

    `logits_to_keep` (a number, or columns), `output_hidden_states` and `return_dict=False` of a padded batch give what
    they give without packing, zeros on padding.

    A classifier or reward model (`...ForSequenceClassification`, `...ForTokenClassification`) takes padded batches
    alone: its backbone packs them, and its own forward scores the result as before.

    With 1 and 2 may come:

    - `rope_cu_seqlens`, a tensor, list or tuple of whole numbers: where rotary positions restart. The start of every
      sample has to be among them; others may be, inside its text. They are counted in real tokens, sample after sample
      (as `cu_seqlens_q`), or in places of the packed row (as `cu_seqlens_q_padded`): the same where there are no gaps.
    - `position_ids`: as the model itself takes them for each sample alone, [3, B, S] or [3, 1, T], with four rows
      where the place in the sample comes first; [B, S] or [1, T] for a text model. They are compared with what is
      computed from boundaries, `rope_cu_seqlens` and grids; what stands on padding does not matter.
    - `moe_padding_mask`, [B, S] or [1, T], True on padding: has to agree with the mask or the boundaries.

    Args:
        model: a `...ForConditionalGeneration`, `...ForCausalLM` or a classifier, or a module that holds one (a
            `PeftModel`). On any device: its weights are not read, so that it may be on the meta device and be loaded
            afterwards.
        config: settings; None: the defaults.
        parallel: how ranks work together on rows (one row over several, or the same calls on all); None: each rank by
            itself.

    Returns:
        The same object. Enabling it again replaces the settings.

    Raises:
        FamilyError: the model's family cannot be packed exactly, and which part of it leaks.
        ConfigError: the forward of the model, or of a layer that needs the boundaries, was replaced on the
            object, so that ours would never be called; the model has a forward, a loss or an attention function of its
            own, which would never be; its attention is not causal; or a router loss for a model without experts.
    """
    core = find_model(model)
    check_is_only_one(model)
    family = family_of(core)
    check_parts(family, core)
    if parallel is not None:
        _check_over_ranks(family)
    config = config or StepConfig()
    check_kind("config", config, StepConfig, 'StepConfig(attention="sdpa_segments")')
    if config.z_loss_coef and not family.has("experts"):
        raise ConfigError(f"z_loss_coef is {config.z_loss_coef}, but {family.model_type} has no experts; leave it out")
    before = stored_state(core)
    if before is not None and (before.parallel is None) != (parallel is None):
        disable_packing(core)  # other layers are changed
        before = None
    classifies = is_classifier(core)
    if classifies and (config.z_loss_coef or (parallel is not None and parallel.ranks > 1)):
        raise ConfigError(
            f"a {type(core).__name__} computes its own loss from whole samples: leave out z_loss_coef, and ranks that "
            "share a row"
        )
    if before is None and not classifies:
        check_forward(core, family)
    mechanisms = tuple(mechanism for mechanism in MECHANISMS if mechanism.is_in(family))
    loss_count = None if before is None else before.loss_count
    state = PackingState(family=family, config=config, parallel=parallel, mechanisms=mechanisms, loss_count=loss_count)
    state.check(core, attached=False)  # all of it before anything is changed
    parts = state.parts_of(core)
    with torch.device("cpu"):  # the model may be on another, or on the meta device, and so may be the default
        if not classifies:
            check_logits(parts)
        if family.positions_rule.axes == 1:
            check_text_positions(parts)
        else:
            check_rope_index(parts)
    if before is None:
        core.__class__ = packed_class(type(core))
    core._vlmpack_state = state
    for mechanism in mechanisms:
        mechanism.attach(parts)
    ENABLED.add(core)
    if classifies and before is None:
        pack_backbone(core)
    return model


def _check_over_ranks(family: Family) -> None:
    if family.has_vision and not (family.has_grids and family.media_over_ranks):
        media = "images, videos and audio" if family.has_audio else "the images"
        raise ConfigError(
            f"{media} of {family.model_type} cannot be computed by several ranks together: leave parallel= out, and "
            "give each rank rows of its own"
        )


def disable_packing(model: Model) -> Model:
    """Undo `enable_packing`: the model is what it was before. A model without packing is left as it is, and so are
    layers that other enabled models have too: the last of them restores those.

    Raises:
        ConfigError: something else changed the model's class since (FSDP2's `fully_shard`); nothing is undone then.
    """
    core = find_model(model)
    state = stored_state(core)
    if state is not None:
        base, parts, kept = base_of(core), state.parts_of(core), _shared_with_others(core)
        for module in _changed(state, parts):  # all of them before anything is restored
            if id(module) not in kept and is_subclassed(module):
                base_of(module)
        for mechanism in state.mechanisms:
            mechanism.detach(parts, kept=kept)
        leave_backbone(state.family.backbone(core), core)
        del core._vlmpack_state
        core.__class__ = base
    return model


def is_packing(model: nn.Module) -> bool:
    """Return whether packing is enabled on `model` or on the model that it holds."""
    return stored_state(find_model(model)) is not None


def bind_loss_metrics(model: nn.Module) -> LossCount:
    """Let HF Trainer evaluate this model on one rank: `loss_metrics` will replace `eval_loss` by the exact loss.

    Raises:
        ConfigError: packing is not enabled on the model.
    """
    core = find_model(model)
    state = packing_state(core)
    loss_count = state.loss_count or LossCount()
    core._vlmpack_state = replace(state, loss_count=loss_count)
    return loss_count


def _changed(state: PackingState, parts: ModelParts) -> list[nn.Module]:
    """Every module that a mechanism changed."""
    return [module for mechanism in state.mechanisms for module in mechanism.find(parts)]


def _shared_with_others(core: nn.Module) -> set[int]:
    """Ids of the modules that were changed for other enabled models."""
    ids: set[int] = set()
    for other in ENABLED:
        if other is not core and (state := stored_state(other)) is not None:
            ids.update(map(id, _changed(state, state.parts_of(other))))
    return ids
