"""Client models over one frozen base model: LoRA adapters or full weights, gradients, AdamW, and their files.

    y = W x + 32 / rank * B A x          A [rank, in], B [out, rank], in float32 whatever the base model's dtype

(Hu et al., 2021, LoRA.) Forward hooks add the adapters to linear layers. No layer is wrapped, and the base model
computes its original output while no adapter is in use. `Adapters.applied` must enclose the backward pass too, because
gradient checkpointing computes layers again there.

Routed experts have fused weights [E, out, in]. Hooks replace them by W + 32 / rank * B A while their layer computes,
one A and B for each expert, stacked as PEFT's `target_parameters` stacks them. Their rank is the adapter's divided by
the number of experts of a token (Schulman et al., 2025, LoRA Without Regret), so that an adapter on experts stays as
small beside its weights as one on a dense MLP.

    FOLDER/adapter_model.safetensors, adapter_config.json     an adapter, in PEFT's format
    FOLDER/model.safetensors                                  all weights of a fully trained model
    FOLDER/optimizer.safetensors                              moments and step counts, if requested
    FOLDER/engine.json                                        family, LoRA settings

An adapter takes 3 x the bytes of its parameters: weights and two moments; 4 x while a gradient accumulates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from vlmpack.errors import RequestError
from vlmpack.families.family import Family
from vlmpack.service.ranks import Gradients
from vlmpack.service.wire.messages import AdamParams, LoraConfig

ALPHA = 32
"""LoRA alpha of every adapter."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_ATTENTION = ("self_attn", "linear_attn", "conv")
_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3")


@final
@dataclass(frozen=True, kw_only=True)
class Targets:
    """Names of the linear layers that adapters can adapt."""

    attention: tuple[str, ...]
    """Projections of attention, gated delta layers and short convolutions."""
    mlp: tuple[str, ...]
    """Projections of MLPs and of shared experts."""
    experts: tuple[str, ...]
    """Fused weights of routed experts."""
    experts_of_token: int
    """Number of routed experts that a token goes to; 0: there are none."""
    unembed: str
    """The language-model head."""

    def chosen(self, lora: LoraConfig) -> tuple[str, ...]:
        """Return the targets of an adapter.

        Raises:
            RequestError: the adapter has no targets.
        """
        names = (
            *(self.attention if lora.train_attn else ()),
            *((*self.mlp, *self.experts) if lora.train_mlp else ()),
            *((self.unembed,) if lora.train_unembed else ()),
        )
        if not names:
            raise RequestError("the adapter would train nothing; set train_attn, train_mlp or train_unembed")
        return names


def find_targets(model: nn.Module, family: Family) -> Targets:
    """Find what adapters can adapt: layers of the language model, and its head."""
    attention, mlp, experts = [], [], []
    text = family.language_model(model)
    prefix = f"{family.text_path}.layers"
    for name, module in text.get_submodule("layers").named_modules():
        _, _, place = name.partition(".")
        parts = place.split(".")
        if parts[-1] == "experts":
            fused = (part for part, weight in module.named_parameters(recurse=False) if weight.ndim == 3)
            experts += [f"{prefix}.{name}.{part}" for part in fused]
        if not isinstance(module, nn.Linear):
            continue
        if len(parts) == 2 and parts[0] in _ATTENTION:
            attention.append(f"{prefix}.{name}")
        elif parts[0] in ("mlp", "feed_forward") and parts[-1] in _MLP and "experts" not in parts:
            mlp.append(f"{prefix}.{name}")
    return Targets(
        attention=tuple(attention),
        mlp=tuple(mlp),
        experts=tuple(experts),
        experts_of_token=family.experts_of_token(model.config),
        unembed=family.head_path,
    )


# ---------------------------------------------------------------------- one adapter


@final
@dataclass(frozen=True, kw_only=True)
class Fused:
    """How an adapter adapts the fused weights of E experts."""

    rank: int
    """Rank for each expert."""
    transposed: bool
    """Whether the weights are [E, in, out], not [E, out, in]."""


@final
class Adapter:
    """The weights of one adapter."""

    def __init__(
        self, lora: LoraConfig, weights: Mapping[str, tuple[nn.Parameter, nn.Parameter]], experts: Mapping[str, Fused]
    ) -> None:
        self.lora = lora
        """Settings of the adapter."""
        self.weights = dict(weights)
        """(A [rank, in], B [out, rank]) by target name; of E experts, (A [E · rank, in], B [out, rank · E])."""
        self.experts = dict(experts)
        """The targets that are fused weights of experts."""
        self.scale = ALPHA / lora.rank
        """The factor of B A x of linear layers."""

    def added(self, y: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return `y + scale * B A x`, in the dtype of `y`.

        The factor is applied to the low-rank product, where a token has only `rank` numbers. `addmm` computes product
        and sum in one call: on a CPU, passes over [..., out] cost more than the products.

        Args:
            y: [..., out], the output of the target for `x`.
            name: name of the target.
            x: [..., in].
        """
        a, b = self.weights[name]
        low = F.linear(x.to(a.dtype), a) * self.scale
        if y.dtype != b.dtype:
            return (y + F.linear(low, b)).to(y.dtype)
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b.t()).view_as(y)

    def merged(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        """Return the fused weights of experts plus `scale * B A` of each one, in the dtype of `weight`.

        Args:
            weight: the weights of the base model.
            name: name of the target.
        """
        (a, b), fused = self.weights[name], self.experts[name]
        a_Eri = a.unflatten(0, (-1, fused.rank))
        b_Eor = b.unflatten(1, (fused.rank, -1)).permute(2, 0, 1)
        factors = (a_Eri.mT, b_Eor.mT) if fused.transposed else (b_Eor, a_Eri)
        return torch.baddbmm(weight.to(a.dtype), *factors, alpha=ALPHA / fused.rank).to(weight.dtype)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters under PEFT's names. PEFT wraps a module of experts once for each of its weights."""
        named: dict[str, nn.Parameter] = {}
        wrapped: dict[str, str] = {}
        for name, (a, b) in reversed(self.weights.items()):
            place = name
            if name in self.experts:
                module = name.rpartition(".")[0]
                place = wrapped.get(module, module)
                wrapped[module] = f"{place}.base_layer"
            named[f"base_model.model.{place}.lora_B.weight"] = b
            named[f"base_model.model.{place}.lora_A.weight"] = a
        return dict(reversed(named.items()))

    def save(self, folder: Path, *, base_name: str) -> None:
        """Write the adapter in PEFT's format."""
        write_tensors(folder / WEIGHTS, self.named_parameters())
        linear = sorted(self.weights.keys() - self.experts.keys())
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.lora.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": linear,
            "inference_mode": True,
        }
        if self.experts:  # PEFT warns of a rank_pattern for parameters: it is for the linear layers then
            (rank,) = {fused.rank for fused in self.experts.values()}
            ranks = dict.fromkeys(map(re.escape, linear), self.lora.rank)
            config |= {"r": rank, "rank_pattern": ranks, "target_parameters": list(self.experts)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def new_adapter(lora: LoraConfig, targets: Targets, model: nn.Module) -> Adapter:
    """Make a new adapter: A uniform in +-1 / sqrt(in), as PEFT draws it, and B zero.

    The same seed always gives the same adapter: numbers are drawn on the CPU, from the adapter's own generator.

    Args:
        lora: settings of the adapter; without a seed the weights are random.
        targets: what adapters of the model can adapt.
        model: the model that has the targets.

    Raises:
        RequestError: the adapter has no targets.
    """
    generator = torch.Generator(device="cpu")
    if lora.seed is None:
        generator.seed()
    else:
        generator.manual_seed(lora.seed)
    weights: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    experts: dict[str, Fused] = {}
    for name in targets.chosen(lora):
        if name in targets.experts:
            weight, rank = model.get_parameter(name), max(1, lora.rank // targets.experts_of_token)
            transposed = getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False)
            experts[name] = Fused(rank=rank, transposed=transposed)
            count, out, size = weight.mT.shape if transposed else weight.shape
        else:
            weight, rank, count = model.get_parameter(f"{name}.weight"), lora.rank, 1
            out, size = weight.shape
        a = torch.empty(count * rank, size, device="cpu")
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        b = torch.zeros(out, rank * count, device=weight.device)
        weights[name] = (nn.Parameter(a.to(weight.device)), nn.Parameter(b))
    return Adapter(lora, weights, experts)


# ---------------------------------------------------------------------- in use


@final
class Adapters:
    """The hooks on one base model, and the adapter in use."""

    def __init__(self, model: nn.Module, family: Family, *, mode: AbstractContextManager[Any] | None = None) -> None:
        self.targets = find_targets(model, family)
        """Modules that adapters can adapt."""
        self._mode = mode or nullcontext()
        self._adapter: Adapter | None = None
        for name in (*self.targets.attention, *self.targets.mlp, self.targets.unembed):
            model.get_submodule(name).register_forward_hook(partial(self._adapted, name))
        self._originals: list[tuple[nn.Module, str, nn.Parameter]] = []
        for path in {name.rpartition(".")[0] for name in self.targets.experts}:
            model.get_submodule(path).register_forward_pre_hook(partial(self._merge, path))
            model.get_submodule(path).register_forward_hook(self._restore, always_call=True)

    @contextmanager
    def applied(self, adapter: Adapter | None) -> Iterator[None]:
        """Run the base model with an adapter inside the block; None: without one."""
        before, self._adapter = self._adapter, adapter
        try:
            with self._mode:
                yield
        finally:
            self._adapter = before

    def _adapted(self, name: str, module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if self._adapter is None or name not in self._adapter.weights:
            return output
        return self._adapter.added(output, name, args[0])

    def _merge(self, path: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Replace the fused weights of experts while their forward computes."""
        if self._adapter is None:
            return
        for part, weight in [*module.named_parameters(recurse=False)]:
            if (name := f"{path}.{part}") in self._adapter.experts:
                self._originals.append((module, part, weight))
                module._parameters[part] = self._adapter.merged(weight, name)  # pyright: ignore[reportArgumentType]

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._originals:
            holder, part, weight = self._originals.pop()
            holder._parameters[part] = weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapters:
        """Return the same hooks: they stay on the base model, and a copied model is trained as a whole."""
        return self


# ---------------------------------------------------------------------- files of tensors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, path, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file, which cannot contain code.

    Raises:
        RequestError: the file is missing or damaged.
    """
    try:
        return load_file(path, device="cpu")
    except (OSError, SafetensorError) as error:
        raise RequestError(f"the checkpoint's {path.name} cannot be read: {error}; save it again") from error


def copy_into(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's tensors into parameters of the same names and shapes: all of them, or none.

    Raises:
        RequestError: names or shapes differ.
    """
    if different := sorted(parameters.keys() ^ tensors.keys()):
        remedy = "create the model with the checkpoint's train_attn, train_mlp and train_unembed"
        raise RequestError(f"the checkpoint has other targets than this model (such as {different[0]}); {remedy}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, but this model has {list(parameter.shape)}"
            raise RequestError(f"the checkpoint has {name} of shape {shapes}; create the model with its rank")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


# ---------------------------------------------------------------------- a client's model


MODEL, OPTIMIZER, SETTINGS = "model.safetensors", "optimizer.safetensors", "engine.json"


@final
class ClientModel:
    """An adapter over the base model, or a full copy of the base model, with its gradient and optimizer."""

    def __init__(self, model: nn.Module, adapter: Adapter | None) -> None:
        self.model = model
        """The module to call: the base model, or a copy of it that is trained as a whole."""
        self.adapter = adapter
        """The adapter; None: all weights are trained."""
        self.named = dict(model.named_parameters()) if adapter is None else adapter.named_parameters()
        """The trained parameters by name."""
        self.parameters: tuple[nn.Parameter, ...] = tuple(self.named.values())
        """The trained parameters."""
        self.gradients: Gradients | None = None
        """The accumulated gradient; None: there is none."""
        self.optimizer = self._new_optimizer()
        """AdamW with step count and moments of the parameters that have taken a step."""

    @property
    def lora(self) -> LoraConfig | None:
        """Settings of the adapter; None: all weights are trained."""
        return None if self.adapter is None else self.adapter.lora

    def _new_optimizer(self) -> torch.optim.AdamW:
        # fused: no temporary copies of all parameters on a GPU
        return torch.optim.AdamW(self.parameters, foreach=False, fused=self.parameters[0].is_cuda)

    # ------------------------------------------------------------------ gradients and steps

    @contextmanager
    def with_grad(self, gradients: Gradients | None) -> Iterator[None]:
        """Set `.grad` of the parameters inside the block; None: they have none."""
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters), strict=True):
            parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def add(self, gradients: Gradients) -> None:
        """Add to the accumulated gradient. The tensors may be kept and changed in place."""
        if self.gradients is None:
            self.gradients = gradients
            return
        for at, gradient in enumerate(gradients):
            ours = self.gradients[at]
            if ours is None or gradient is None:
                self.gradients[at] = gradient if ours is None else ours
            else:
                ours += gradient

    def step(self, adam: AdamParams) -> dict[str, float]:
        """Take a step of torch's AdamW with the accumulated gradient, clear it, and return metrics by `name:reduction`.

        Without a gradient nothing changes, and the metrics say so.

        Raises:
            RequestError: the gradient is not finite. It is dropped, and no step is taken.
        """
        if self.gradients is None:
            return {"grad_norm:mean": 0.0, "no_gradient:sum": 1.0}
        gradients, self.gradients = self.gradients, None
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if g is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not math.isfinite(norm.item()):
            raise RequestError(
                "the accumulated gradient is not finite: it was dropped, and no step taken; look at the weights, "
                "advantages and log-probabilities sent, and at the learning rate of earlier steps"
            )
        self.optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        with self.with_grad(gradients):
            if adam.grad_clip_norm > 0:
                nn.utils.clip_grads_with_norm_(self.parameters, adam.grad_clip_norm, norm)
            self.optimizer.step()
        return {"grad_norm:mean": norm.item()}

    # ------------------------------------------------------------------ files

    def save(self, folder: Path, *, optimizer: bool, base_name: str, model_type: str) -> None:
        """Write the weights, and the optimizer's moments if requested, into an empty folder."""
        if self.adapter is None:
            write_tensors(folder / MODEL, self.named)
        else:
            self.adapter.save(folder, base_name=base_name)
        if optimizer:
            states = {name: self.optimizer.state.get(parameter, {}) for name, parameter in self.named.items()}
            flat = {f"{key}.{name}": value for name, state in states.items() for key, value in state.items()}
            write_tensors(folder / OPTIMIZER, flat)
        settings = {"model_type": model_type, "lora": None if self.lora is None else asdict(self.lora)}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read the weights, and either read or reset the optimizer's moments. The gradient is dropped.

        Raises:
            RequestError: the checkpoint has another rank or other targets, or its files are missing or damaged. The
                model then stays unchanged.
        """
        state = read_tensors(folder / OPTIMIZER) if optimizer else {}
        copy_into(self.named, read_tensors(folder / (MODEL if self.adapter is None else WEIGHTS)))
        self.gradients, self.optimizer = None, self._new_optimizer()
        for key, value in state.items():
            kind, _, name = key.partition(".")
            parameter = self.named[name]
            self.optimizer.state[parameter][kind] = value.to(parameter.device)


def read_settings(folder: Path, *, model_type: str) -> LoraConfig | None:
    """Return the LoRA settings of a saved model; None: it was trained as a whole.

    Raises:
        RequestError: the checkpoint cannot be read, or belongs to another family.
    """
    try:
        settings: Mapping[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        lora, saved_type = settings["lora"], settings["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"the checkpoint cannot be read ({type(error).__name__}); save it again") from error
    if saved_type != model_type:
        raise RequestError(f"the checkpoint is of a {saved_type} model, and this server has a {model_type}")
    return None if lora is None else LoraConfig(**lora)
