"""The model that is meant, and what others made of it that packed rows would go past."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families import Family

_HAS_HEAD = ("ForConditionalGeneration", "ForCausalLM")


def find_model(model: nn.Module) -> nn.Module:
    """The `...ForConditionalGeneration` or `...ForCausalLM` inside wrappers such as `PeftModel` or DDP.

    Raises:
        FamilyError: there is none, with what was given.
    """
    if not isinstance(model, nn.Module):
        raise FamilyError(
            f"a {type(model).__name__} is no model; load it first: AutoModelForImageTextToText.from_pretrained(...)"
        )
    found = next(_models(model), None)
    if found is None:
        raise FamilyError(
            f"no ...ForConditionalGeneration or ...ForCausalLM found in a {type(model).__name__}; give the model that "
            "AutoModelForImageTextToText (or AutoModelForCausalLM) .from_pretrained returns, or a wrapper around it"
        )
    return found


def _models(holder: nn.Module) -> Iterator[nn.Module]:
    """PeftModelForCausalLM is only a wrapper, whatever its name says."""
    for module in holder.modules():
        names = (base.__name__ for base in type(module).__mro__)
        if isinstance(module, PreTrainedModel) and any(name.endswith(_HAS_HEAD) for name in names):
            yield module


def check_is_only_one(holder: nn.Module) -> None:
    """`find_model` finds the first; nobody should think that the second packs too.

    Raises:
        ConfigError: there are several, side by side.
    """
    first, *others = _models(holder)
    within = set(map(id, first.modules()))
    if other := next((one for one in others if id(one) not in within), None):
        raise ConfigError(
            f"a {type(holder).__name__} holds several models ({type(first).__name__}, {type(other).__name__}): enable "
            "packing on each of them"
        )


def check_adapters(core: nn.Module) -> None:
    """PEFT lets an activated LoRA begin at one place of each row of `input_ids`, where a packed row needs one a sample.

    It notes its configurations on the model that it wraps.

    Raises:
        ConfigError: an adapter is of that kind.
    """
    configs = vars(core).get("peft_config") or {}
    activated = [name for name, config in configs.items() if vars(config).get("alora_invocation_tokens")]
    if activated:
        raise ConfigError(
            f"adapter {activated[0]!r} is activated by tokens (alora_invocation_tokens), which PEFT looks for once in "
            "a packed row, so that one sample alone would have it; train it on padded batches without packing"
        )


def check_own_loss(core: nn.Module) -> None:
    """Packed rows compute the loss themselves.

    Raises:
        ConfigError: the model was given another one.
    """
    if vars(core).get("_loss_function") is not None:
        raise ConfigError(
            f"this {type(core).__name__} was given a loss_function of its own, which packed rows would not be asked "
            "for: they take cross-entropy of the labelled positions. Compute yours from PackedStep's target_logprobs "
            "or row_logits, and `del model._loss_function`"
        )


def check_own_forward(core: nn.Module, family: Family) -> None:
    """Packed rows go through the family's backbone and head.

    Raises:
        ConfigError: the model's class, or the object itself, has a forward of its own around them.
    """
    own = next(klass for klass in type(core).__mro__ if klass.__name__ == family.model_class)
    if type(core).forward is not own.forward:
        raise ConfigError(
            f"{type(core).__name__} has a forward of its own over {own.__name__}'s, which packed rows would go past; "
            f"enable packing on a {own.__name__}, and compute what yours adds from PackedStep's result"
        )
    if "forward" in vars(core):
        raise ConfigError(
            f"the forward of this {type(core).__name__} was replaced on the object itself, so packing would never be "
            "asked, in whatever order. Liger: apply_liger_kernel_to_...(model=model, fused_linear_cross_entropy=False) "
            'keeps its other kernels (Trainer: liger_kernel_config={"fused_linear_cross_entropy": False}). TRL: '
            'loss_type="nll". '
            "accelerate: enable packing before it prepares the model "
            "(afterwards: accelerator.unwrap_model(model, keep_fp32_wrapper=False)). And load the model without a "
            "device_map that spreads it over several devices"
        )
