"""LoRA adapters of client models over one frozen base model, added by forward hooks on its linear layers.

    y = W x + 32 / rank * B A x          A [rank, in], B [out, rank], in float32 whatever the base model is in

(Hu et al., 2021, LoRA.) The base model stays as it is: no layer is wrapped, and without an adapter in use it computes
what it did. Any number of adapters of any rank and targets lie beside it, each a few tensors. They are saved in the
format of PEFT, which loads them.

An adapter is in use for the time of `Adapters.applied`, backward pass included: gradient checkpointing computes layers
again there. Rows that several adapters share give each adapter a span of the row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from vlmpack.errors import RequestError
from vlmpack.families.family import Family
from vlmpack.service.messages import LoraConfig

ALPHA = 32
"""LoRA alpha, of every adapter."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_ATTENTION = ("self_attn", "linear_attn", "conv")
_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3")


@final
@dataclass(frozen=True, kw_only=True)
class Targets:
    """Linear layers of a model that adapters can adapt, by their names in it."""

    attention: tuple[str, ...]
    """Projections of attention, of gated delta layers and of short convolutions."""
    mlp: tuple[str, ...]
    """Projections of MLPs, of shared experts where there are experts."""
    unembed: str
    """The head."""
    has_experts: bool
    """True if some layers have routed experts, whose fused weights are not adapted."""

    def chosen(self, lora: LoraConfig) -> tuple[str, ...]:
        """The targets of an adapter.

        Raises:
            RequestError: there are none, or `train_mlp` has nothing to adapt.
        """
        if lora.train_mlp and not self.mlp:
            raise RequestError(
                "train_mlp: this model's MLPs are routed experts with fused weights, which LoRA does not adapt here; "
                "send train_mlp=False"
            )
        names = (
            *(self.attention if lora.train_attn else ()),
            *(self.mlp if lora.train_mlp else ()),
            *((self.unembed,) if lora.train_unembed else ()),
        )
        if not names:
            raise RequestError("the adapter would train nothing; set train_attn, train_mlp or train_unembed")
        return names


def find_targets(model: nn.Module, family: Family) -> Targets:
    """The linear layers of a model that adapters can adapt: those of its text part, and its head."""
    attention, mlp, has_experts = [], [], False
    text = family.language_model(model)
    prefix = f"{family.text_path}.layers"
    for name, module in text.get_submodule("layers").named_modules():
        _, _, place = name.partition(".")
        parts = place.split(".")
        has_experts = has_experts or parts[-1] == "experts"
        if not isinstance(module, nn.Linear):
            continue
        if len(parts) == 2 and parts[0] in _ATTENTION:
            attention.append(f"{prefix}.{name}")
        elif parts[0] in ("mlp", "feed_forward") and parts[-1] in _MLP and "experts" not in parts:
            mlp.append(f"{prefix}.{name}")
    return Targets(attention=tuple(attention), mlp=tuple(mlp), unembed=family.head_path, has_experts=has_experts)


# ---------------------------------------------------------------------- one adapter


@final
class Adapter:
    """The weights of one adapter."""

    def __init__(self, lora: LoraConfig, weights: Mapping[str, tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.lora = lora
        """Its settings."""
        self.weights = dict(weights)
        """(A [rank, in], B [out, rank]) of each target, by its name."""
        self.scale = ALPHA / lora.rank
        """The factor of B A x."""

    def added(self, y: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return `y` [..., out], the output of a target for `x` [..., in], with what the adapter adds, in y's type.

        The factor is applied where a token has `rank` numbers, and product and sum are one call: on a CPU passes over
        [..., out] cost more than the products.
        """
        a, b = self.weights[name]
        low = F.linear(x.to(a.dtype), a) * self.scale
        if y.dtype != b.dtype:
            return (y + F.linear(low, b)).to(y.dtype)
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b.t()).view_as(y)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters, as PEFT names them."""
        named: dict[str, nn.Parameter] = {}
        for name, (a, b) in self.weights.items():
            named[f"base_model.model.{name}.lora_A.weight"] = a
            named[f"base_model.model.{name}.lora_B.weight"] = b
        return named

    def save(self, folder: Path, *, base_name: str) -> None:
        """Write it as PEFT does."""
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self.named_parameters().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.lora.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(self.weights),
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read weights of the same rank and targets.

        Raises:
            RequestError: they are missing, damaged, or of another rank or of other targets.
        """
        copy_into(self.named_parameters(), read_tensors(folder / WEIGHTS), what="the checkpoint's adapter")


def new_adapter(lora: LoraConfig, names: Sequence[str], model: nn.Module) -> Adapter:
    """A new adapter: A uniform in +-1 / sqrt(in), as PEFT draws it, B zero. The same seed gives the same one, whatever
    else exists: numbers are drawn on the CPU, from a generator of its own.

    Args:
        lora: its settings; without a seed it is random.
        names: of its targets.
        model: that has them.
    """
    generator = torch.Generator(device="cpu")
    if lora.seed is None:
        generator.seed()
    else:
        generator.manual_seed(lora.seed)
    weights: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        device = linear.weight.device
        a = torch.empty(lora.rank, linear.in_features, device="cpu")
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        b = torch.zeros(linear.out_features, lora.rank, device=device)
        weights[name] = (nn.Parameter(a.to(device)), nn.Parameter(b))
    return Adapter(lora, weights)


# ---------------------------------------------------------------------- in use


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """The tokens of a row that one adapter computes."""

    adapter: Adapter | None
    """The adapter; None: the base model alone."""
    length: int
    """Number of tokens."""


@final
class Adapters:
    """The hooks on one base model, and the adapter in use."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.targets = find_targets(model, family)
        """Modules that adapters can adapt."""
        self.spans: tuple[Span, ...] = ()
        """The adapters in use; several share a row."""
        self._parts: dict[str, Iterator[Sequence[Span]]] = {}
        names = (*self.targets.attention, *self.targets.mlp, self.targets.unembed)
        for name in names:
            model.get_submodule(name).register_forward_hook(_Hook(self, name))

    @contextmanager
    def applied(self, *spans: Span) -> Iterator[None]:
        """Let the base model compute with adapters: one span, any number of tokens; or several, a row of them."""
        before, self.spans = self.spans, spans
        try:
            yield
        finally:
            self.spans = before
            self._parts.clear()

    def lay_out(self, names: Sequence[str], parts: Sequence[Sequence[Span]]) -> None:
        """Set the spans of the next calls of some targets, of a layer that computes a shared row in parts."""
        self._parts |= {name: iter(parts) for name in names}

    def adapted(self, name: str, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The output of a target with what the adapters in use add to it."""
        spans = self.spans
        if len(spans) > 1 and name in self._parts:
            spans = next(self._parts[name])
        if len(spans) == 1:
            return self.added(output, x, spans[0], name)
        if not spans or (name == self.targets.unembed and x.shape[:-1].numel() == 1):
            return output  # of several adapters each calls the head by itself
        rows_x, rows_y = x.flatten(0, -2), output.flatten(0, -2)
        lengths = [span.length for span in spans]
        parts = zip(rows_x.split(lengths), rows_y.split(lengths), spans, strict=True)
        return torch.cat([self.added(y, part, span, name) for part, y, span in parts]).view_as(output)

    @staticmethod
    def added(y: torch.Tensor, x: torch.Tensor, span: Span, name: str) -> torch.Tensor:
        """`y`, the output of a target for `x`, with what the span's adapter adds."""
        if span.adapter is None or name not in span.adapter.weights:
            return y
        return span.adapter.added(y, name, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapters:
        """Not copied with a model: a copy is trained as a whole."""
        return self


@final
class _Hook:
    """The forward hook of one linear layer."""

    def __init__(self, adapters: Adapters, name: str) -> None:
        self._adapters, self._name = adapters, name

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return self._adapters.adapted(self._name, args[0], output)


# ---------------------------------------------------------------------- files of tensors


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of tensors, which holds no code.

    Raises:
        RequestError: it is missing or damaged.
    """
    try:
        return load_file(path, device="cpu")
    except (OSError, SafetensorError) as error:
        raise RequestError(f"the checkpoint's {path.name} cannot be read: {error}; save it again") from error


def copy_into(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, what: str) -> None:
    """Copy tensors into parameters of the same names and shapes; all of them, or none.

    Raises:
        RequestError: names or shapes differ.
    """
    if different := sorted(parameters.keys() ^ tensors.keys()):
        raise RequestError(
            f"{what} has other targets than this model (such as {different[0]}); create the model with the "
            "checkpoint's train_attn, train_mlp and train_unembed"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise RequestError(
                f"{what} has {name} of shape {list(tensors[name].shape)}, but this model has "
                f"{list(parameter.shape)}; create the model with the checkpoint's rank"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
