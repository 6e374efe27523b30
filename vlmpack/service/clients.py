"""A client's model: its weights, accumulated gradient, AdamW, and the files it is saved in.

    FOLDER/adapter_model.safetensors, adapter_config.json     an adapter, as PEFT writes it
    FOLDER/model.safetensors                                  all weights of a model that is trained as a whole
    FOLDER/optimizer.safetensors                              moments and step counts, if they were asked for
    FOLDER/engine.json                                        family, LoRA settings

An adapter takes 3 x the bytes of its parameters: weights and two moments; 4 x while a gradient accumulates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from vlmpack.errors import RequestError
from vlmpack.service.adapters import Adapter, copy_into, read_tensors
from vlmpack.service.messages import AdamParams, LoraConfig, OptimStepResult

MODEL, OPTIMIZER, SETTINGS = "model.safetensors", "optimizer.safetensors", "engine.json"
_STEP, _MOMENTS = "step", ("exp_avg", "exp_avg_sq")

Gradients = list[torch.Tensor | None]
"""The gradient of each parameter, in order; None: it has none."""


@final
class ClientModel:
    """An adapter over the base model, or a model of its own."""

    def __init__(self, model: nn.Module, adapter: Adapter | None) -> None:
        self.model = model
        """The module that is called: the base model, or a copy of it that is trained as a whole."""
        self.adapter = adapter
        """Its adapter; None: all weights are trained."""
        named = dict(model.named_parameters()) if adapter is None else adapter.named_parameters()
        self.names: tuple[str, ...] = tuple(named)
        """Names of its parameters."""
        self.parameters: tuple[nn.Parameter, ...] = tuple(named.values())
        """Its parameters."""
        self.gradients: Gradients | None = None
        """The accumulated gradient; None: there is none."""
        self._optimizer = self._new_optimizer()

    @property
    def lora(self) -> LoraConfig | None:
        """Settings of its adapter; None: all weights are trained."""
        return None if self.adapter is None else self.adapter.lora

    def _new_optimizer(self) -> torch.optim.AdamW:
        # fused: no temporary copies of all parameters on a GPU
        return torch.optim.AdamW(self.parameters, foreach=False, fused=self.parameters[0].is_cuda)

    # ------------------------------------------------------------------ gradients and steps

    def add(self, gradients: Gradients) -> None:
        """Add to the accumulated gradient."""
        if self.gradients is None:
            self.gradients = gradients
            return
        for at, gradient in enumerate(gradients):
            ours = self.gradients[at]
            if ours is None or gradient is None:
                self.gradients[at] = gradient if ours is None else ours
            else:
                ours += gradient

    def step(self, adam: AdamParams) -> OptimStepResult:
        """Take a step of torch's AdamW with the accumulated gradient, and clear it.

        Raises:
            RequestError: settings out of range; a gradient that is not finite, which is dropped.
        """
        _check_adam(adam)
        if self.gradients is None:
            return OptimStepResult(metrics={"grad_norm:mean": 0.0, "no_gradient:sum": 1.0})
        gradients, self.gradients = self.gradients, None
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if g is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not math.isfinite(norm.item()):
            raise RequestError(
                "the accumulated gradient is not finite, so the step was not taken and the gradient was dropped; look "
                "at the weights, advantages and log-probabilities sent, and at the learning rate of earlier steps"
            )
        if adam.grad_clip_norm > 0:
            factor = (adam.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                if gradient is not None:
                    gradient *= factor
        self._apply(gradients, adam)
        return OptimStepResult(metrics={"grad_norm:mean": norm.item()})

    def optimizer_state(self) -> Mapping[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Step count and moments of the parameters that have taken a step."""
        return self._optimizer.state

    def _apply(self, gradients: Gradients, adam: AdamParams) -> None:
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        try:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    # ------------------------------------------------------------------ files

    def save(self, folder: Path, *, optimizer: bool, base_name: str, model_type: str) -> None:
        """Write weights, and moments if asked for, into an empty folder."""
        if self.adapter is None:
            save_file(self._tensors(), folder / MODEL, metadata={"format": "pt"})
        else:
            self.adapter.save(folder, base_name=base_name)
        if optimizer:
            save_file(self._state(), folder / OPTIMIZER)
        settings = {"model_type": model_type, "lora": None if self.lora is None else asdict(self.lora)}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read weights, and moments if asked for; otherwise the optimiser starts anew. The gradient is dropped.

        Raises:
            RequestError: another rank or other targets; files that are missing or damaged. Nothing is changed then.
        """
        state = self._checked_state(read_tensors(folder / OPTIMIZER)) if optimizer else {}
        if self.adapter is None:
            copy_into(dict(zip(self.names, self.parameters, strict=True)), read_tensors(folder / MODEL), what="it")
        else:
            self.adapter.load(folder)
        self.gradients = None
        self._optimizer = self._new_optimizer()
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if f"{_STEP}.{name}" in state:
                moments = {key: state[f"{key}.{name}"].to(parameter) for key in _MOMENTS}
                step = state[f"{_STEP}.{name}"]
                on = parameter.device if parameter.is_cuda else step.device
                self._optimizer.state[parameter] = {_STEP: step.to(on), **moments}

    def _tensors(self) -> dict[str, torch.Tensor]:
        parameters = zip(self.names, self.parameters, strict=True)
        return {name: parameter.detach().cpu().contiguous() for name, parameter in parameters}

    def _state(self) -> dict[str, torch.Tensor]:
        """Moments and step count of each parameter that has taken a step."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self.optimizer_state().get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.detach().cpu().contiguous()
        return tensors

    def _checked_state(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = dict(zip(self.names, (parameter.shape for parameter in self.parameters), strict=True))
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            if name not in shapes or (kind in _MOMENTS and tensor.shape != shapes[name]):
                raise RequestError(
                    f"the checkpoint's optimiser state ({key}) belongs to an adapter of another rank or other targets; "
                    "create the model with the checkpoint's, or load without the optimiser"
                )
        return tensors


def read_settings(folder: Path, *, model_type: str) -> LoraConfig | None:
    """The LoRA settings of a saved model; None: it was trained as a whole.

    Raises:
        RequestError: no such checkpoint, or one of another family.
    """
    try:
        settings: Mapping[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        lora, saved_type = settings["lora"], settings["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"the checkpoint cannot be read ({type(error).__name__}); save it again") from error
    if saved_type != model_type:
        raise RequestError(f"the checkpoint is of a {saved_type} model, and this server has a {model_type}")
    return None if lora is None else LoraConfig(**lora)


def _check_adam(adam: AdamParams) -> None:
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        value = vars(adam)[name]
        if not math.isfinite(value) or value < 0:
            raise RequestError(f"adam_params: {name} is {value!r}; it has to be a finite number of at least 0")
    for name in ("beta1", "beta2"):
        if vars(adam)[name] >= 1:
            raise RequestError(f"adam_params: {name} is {vars(adam)[name]}; it has to be below 1")
    if np.float32(adam.eps) == 0:
        raise RequestError(
            f"adam_params: eps is {adam.eps}, which is 0 in float32, so that a step without a gradient would be 0 / 0; "
            "send 1e-12 or more"
        )
