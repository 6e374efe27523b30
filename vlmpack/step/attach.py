"""enable_packing and disable_packing: one model object learns to take packed rows, and forgets it again.

The object's class becomes a subclass of its own class (`subclass`), with another `forward`; so do the classes of its
layers that would run on from one sample into the next (`cut`). Saving, PEFT, gradient checkpointing, DDP, FSDP2,
copying and `torch.compile` go on working, and taking the classes back leaves nothing behind.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final
from weakref import WeakSet

import torch
from torch import distributed as dist
from torch import nn

from vlmpack.errors import ConfigError, check_kind
from vlmpack.families import Family, family_of
from vlmpack.layout import around_graph
from vlmpack.parallel import Parallel
from vlmpack.step import attention, by_sample, cut, experts
from vlmpack.step.engine import StepConfig
from vlmpack.step.forward import PackedOutput, packed_forward, plain_forward, unpackable, without_guards
from vlmpack.step.keys import ROW_KEYS
from vlmpack.step.models import check_adapters, check_is_only_one, check_own_forward, check_own_loss, find_model
from vlmpack.step.subclass import base_of, subclass
from vlmpack.step.unpacked import plain_generate

Model = TypeVar("Model", bound=nn.Module)

_STATE = "_vlmpack_state"


@final
class LossCount:
    """Count samples whose losses HF Trainer's own evaluation computed, until `loss_metrics` has read them."""

    def __init__(self) -> None:
        self.unread = 0
        """Samples whose losses `loss_metrics` has not read."""
        self.is_evaluating = False
        """Whether the next forward pass is a batch of Trainer's evaluation."""

    def add(self, output: Any) -> None:
        """Count the samples of a batch of the evaluation."""
        if self.is_evaluating and not torch.is_grad_enabled() and isinstance(output, PackedOutput):
            self.unread += 0 if output.sample_losses is None else len(output.sample_losses)
        self.is_evaluating = False

    def take(self) -> int:
        """Return the number of unread samples and begin at 0 again."""
        unread, self.unread = self.unread, 0
        return unread


@final
@dataclass(frozen=True, kw_only=True)
class PackingState:
    """What an enabled model remembers."""

    family: Family
    """Its family."""
    config: StepConfig
    """Its settings."""
    parallel: Parallel | None
    """How ranks work together on its rows; None: each by itself."""
    loss_count: LossCount | None = None
    """Set by `loss_metrics(model)`, which replaces Trainer's `eval_loss`; None: nothing does."""


def enable_packing(model: Model, config: StepConfig | None = None, *, parallel: Parallel | None = None) -> Model:
    """Make a Hugging Face Qwen model accept packed rows, and pack padded batches by itself.

    Afterwards `model(**batch)` takes three kinds of input:

    1. a padded batch with its 2D `attention_mask`, padded on either side: packed inside the forward pass, the same
       loss as padded;
    2. a packed row with `cu_seqlens_q` (and `cu_seqlens_q_padded` if it has gaps), or with the host metadata that
       `VLMCollator(layout="packed")` sends along;
    3. anything else (generation, a cache, `inputs_embeds`, `output_attentions`, no mask): passed through to the model's
       own forward. A training step with padding is warned of once (`UnpackedWarning`).

    `logits_to_keep` (a number, or columns), `output_hidden_states` and `return_dict=False` of a padded batch give what
    they give without packing, zeros on padding.

    With 1 and 2 may come:

    - `rope_cu_seqlens`, a tensor, list or tuple of whole numbers: where rotary positions restart. The start of every
      sample has to be among them; others may be, inside its text. They are counted in real tokens, sample after sample
      (as `cu_seqlens_q`), or in places of the packed row (as `cu_seqlens_q_padded`): the same where there are no gaps.
    - `position_ids`: as the model itself takes them for each sample alone, [3, B, S] or [3, 1, T], with four rows
      where the place in the sample comes first; [B, S] or [1, T] for a text model. They are compared with what is
      computed from boundaries, `rope_cu_seqlens` and grids; what stands on padding does not matter.
    - `moe_padding_mask`, [B, S] or [1, T], True on padding: has to agree with the mask or the boundaries.

    Args:
        model: a `...ForConditionalGeneration` or `...ForCausalLM`, or a module that holds one (a `PeftModel`).
        config: settings; None: the defaults.
        parallel: how ranks work together on rows (one row over several, or the same calls on all); None: each rank by
            itself.

    Returns:
        The same object. Enabling it again replaces the settings.

    Raises:
        FamilyError: the model's family cannot be packed exactly, and which part of it leaks.
        ConfigError: the forward of the model, or of a layer that has to know the boundaries, was replaced on the
            object, so that ours would never be called; the model has a forward, a loss or an attention function of its
            own, which would never be; its attention is not causal; or a router loss for a model without experts.
    """
    core = find_model(model)
    check_is_only_one(model)
    check_adapters(core)
    family = family_of(core)
    config = config or StepConfig()
    check_kind("config", config, StepConfig, 'StepConfig(attention="sdpa_segments")')
    experts.check_has_routers(family, config.z_loss_coef)
    shared = parallel is not None
    if is_packing(core) and (vars(core)[_STATE].parallel is not None) != shared:
        disable_packing(core)  # other layers have to know
    if not (enabled := is_packing(core)):
        check_own_forward(core, family)
    check_own_loss(core)
    attention.check_computed(family, core)
    cut.install(family, core, shared=shared)  # refuses, or does all
    if not enabled:
        core.__class__ = _packed_class(type(core))
    loss_count = vars(core)[_STATE].loss_count if enabled else None
    vars(core)[_STATE] = PackingState(family=family, config=config, parallel=parallel, loss_count=loss_count)
    experts.install(family, core)
    by_sample.install(family, core)
    _install_attention(core)
    return model


def disable_packing(model: Model) -> Model:
    """Undo `enable_packing`: the model is what it was before. A model without packing is left as it is, and so are
    layers that other enabled models have too: the last of them restores those.

    Raises:
        ConfigError: something else changed the model's class since (FSDP2's `fully_shard`); nothing is undone then.
    """
    core = find_model(model)
    if is_packing(core):
        base = base_of(core)
        state: PackingState = vars(core)[_STATE]
        family, kept = state.family, _shared_with_others(core)
        cut.uninstall(family, core, shared=state.parallel is not None, kept=kept)  # refuses, or does all
        experts.uninstall(family, core, kept=kept)
        by_sample.uninstall(family, core, kept=kept)
        attention.uninstall(family, core, kept=kept)
        del vars(core)[_STATE]
        core.__class__ = base
    return model


def is_packing(model: nn.Module) -> bool:
    """Whether packing is enabled on `model` or on the model that it holds."""
    return _STATE in vars(find_model(model))


def remembered(core: nn.Module) -> PackingState | None:
    """The state of a model, also where `packing_state` would find that it no longer holds; None: not enabled."""
    return vars(core).get(_STATE)


def packing_state(core: nn.Module) -> PackingState:
    """The state of an enabled model.

    Raises:
        ConfigError: packing is not enabled; or attention, the loss, gated delta layers or blocks of experts were
            exchanged after it was.
    """
    state = remembered(core)
    if state is None:
        raise ConfigError(f"packing is not enabled on this {type(core).__name__}; call enable_packing(model) first")
    if (layer := cut.changed_since(state.family, core, shared=state.parallel is not None)) is not None:
        raise ConfigError(
            f"a {type(layer).__name__} no longer knows the boundaries of a row: its class or its forward was changed "
            "after enable_packing (use_kernels, a device_map, an offloading hook); undo that"
        )
    check_own_loss(core)
    check_adapters(core)
    if not by_sample.is_installed(state.family, core):
        raise ConfigError(
            "n-gram layers are no longer told the row: the text model was exchanged or lost its hooks after "
            "enable_packing; call enable_packing(model) again"
        )
    if not experts.is_installed(state.family, core):
        raise ConfigError(
            "blocks of experts were exchanged or wrapped after enable_packing (PEFT's modules_to_save copies them), so "
            "padding would be sent to experts and counted by routers; call enable_packing(model) again"
        )
    if not attention.is_installed(state.family, core):
        raise ConfigError(
            "an attention layer was exchanged after enable_packing, or given another configuration, so that it no "
            "longer knows the boundaries of a row; call enable_packing(model) again afterwards"
        )
    attention.check_computed(state.family, core)
    return state


def bind_loss_metrics(model: nn.Module) -> LossCount:
    """Let HF Trainer evaluate this model on one rank: `loss_metrics` will replace `eval_loss` by the exact loss.

    Raises:
        ConfigError: packing is not enabled on the model.
    """
    core = find_model(model)
    state = packing_state(core)
    loss_count = state.loss_count or LossCount()
    vars(core)[_STATE] = replace(state, loss_count=loss_count)
    return loss_count


_enabled: WeakSet[nn.Module] = WeakSet()
"""Models with packing, which may have layers in common: one backbone under several heads."""


def _install_attention(core: nn.Module) -> None:
    attention.install(vars(core)[_STATE].family, core)
    _enabled.add(core)


def _shared_with_others(core: nn.Module) -> set[int]:
    """Ids of the modules that were changed for other enabled models."""
    found: set[int] = set()
    for other in _enabled:
        if other is not core and (state := remembered(other)) is not None:
            layers = cut.changed(state.family, other, shared=state.parallel is not None)
            for changed in (experts.changed, by_sample.changed, attention.changed):
                layers += changed(state.family, other)
            found.update(map(id, layers))
    return found


@functools.cache
def _packed_class(base: Any) -> type[nn.Module]:
    """A subclass of `base`, of the same name, whose forward understands rows; one a base class."""

    @functools.wraps(base.forward)  # signature and name stay: trainers and generation look at them
    def forward(
        self: nn.Module,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            **kwargs,
        }
        if not is_packing(self):  # accelerate's autocast wrapper keeps this function, beyond disable_packing
            return base.forward(self, **inputs)
        inputs, own_forward = without_guards(inputs), functools.partial(base.forward, self)
        if (reason := unpackable(self, inputs, vars(self)[_STATE].family)) is not None:
            return plain_forward(self, own_forward, inputs, reason)
        state = packing_state(self)
        output = packed_forward(self, inputs, state.family, state.config, state.parallel)
        if state.loss_count is not None:
            state.loss_count.add(output)
        return output

    vars(forward)["__signature__"] = _signature(base.forward)

    def setstate(self: nn.Module, state: dict[str, Any]) -> None:
        base.__setstate__(self, state)
        vars(self)[_STATE] = replace(vars(self)[_STATE], loss_count=None)  # loss_metrics is bound to one object
        _install_attention(self)

    @functools.wraps(base.set_attn_implementation)
    def set_attn_implementation(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # transformers finds the towers that a dictionary names by their configuration objects
        state = remembered(self)
        if state is not None:
            attention.uninstall(state.family, self, kept=frozenset())
        try:
            return base.set_attn_implementation(self, *args, **kwargs)
        finally:
            if state is not None:
                attention.install(state.family, self)

    body = {
        "__setstate__": setstate,
        "set_attn_implementation": set_attn_implementation,
        "forward": around_graph(forward),
        "generate": plain_generate(base),
        "accepts_loss_kwargs": property(CountsTargets),
    }
    return subclass(base, body, _packed_class)


@final
class CountsTargets:
    """`accepts_loss_kwargs` of an enabled model: true, for HF Trainer to count targets over the accumulated batch.

    Trainer reads its truth before each batch: with gradients in training, without in its own evaluation. That takes the
    mean loss of each batch and averages these means over samples (over rows, of packed rows). On several ranks it also
    multiplies each rank's share of the loss by their number, and cuts off some with the last batch.
    """

    def __init__(self, core: nn.Module) -> None:
        self._core = core

    def __bool__(self) -> bool:
        """Return True.

        Raises:
            ConfigError: HF Trainer's own evaluation begins, on several ranks or without `loss_metrics(model)`; or one
                has ended, and `loss_metrics` was not called with its losses.
        """
        state = remembered(self._core)
        if torch.is_grad_enabled():
            _check_was_read(state)
        elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"HF Trainer's own evaluation over {dist.get_world_size()} ranks weighs the losses of packed batches "
                "wrongly, so eval_loss would be no mean of them, and load_best_model_at_end would choose by it: use "
                "PackedTrainer of vlmpack.trainer, which takes the same arguments (eval_packing=False: the same "
                "batches; eval_capacity=: in planned rows); or evaluate of vlmpack"
            )
        elif state is not None:
            _begin_batch(state)
        return True


def _begin_batch(state: PackingState) -> None:
    if state.loss_count is None:
        raise ConfigError(
            "HF Trainer's own evaluation averages the mean losses of batches over samples, so eval_loss would change "
            "with the batch size, and load_best_model_at_end would choose by it: use PackedTrainer of "
            "vlmpack.trainer, which takes the same arguments (eval_packing=False: the same batches); or, on one rank, "
            "compute_metrics=loss_metrics(model), which makes eval_loss the mean over all targets"
        )
    state.loss_count.is_evaluating = True


def _check_was_read(state: PackingState | None) -> None:
    if state is not None and state.loss_count is not None and (unread := state.loss_count.take()):
        raise ConfigError(
            f"HF Trainer evaluated {unread} samples and did not call loss_metrics(model) with their losses, so "
            "eval_loss was a mean of batches' means: give this Trainer compute_metrics=loss_metrics(model), without "
            "prediction_loss_only, or use PackedTrainer of vlmpack.trainer. After an evaluation that was interrupted, "
            "train again"
        )


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """That of the model's own forward and what a row brings with it: HF Trainer removes what it does not find here from
    samples (`remove_unused_columns`), and a row that lost its boundaries would be taken for one sample."""
    own = inspect.signature(forward)
    brought = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ROW_KEYS]
    added = [parameter for parameter in brought if parameter.name not in own.parameters]
    ordered = sorted((*own.parameters.values(), *added), key=lambda parameter: parameter.kind)
    return own.replace(parameters=ordered)
