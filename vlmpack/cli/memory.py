"""Estimate the memory of training from a model without weights, and propose how to divide it over GPUs.

Activations are counted from the modules of each layer: what PyTorch keeps of them for the backward pass, if attention
scores are never materialized (SDPA, FlashAttention). Per token or patch that is:

- the input of each linear layer that is trained, once for layers that share it (with autocast, or adapters of a wider
  dtype, each has its own copy);
- queries, keys, values, and other outputs of linear layers that are not added to the residual stream;
- the input of a norm in float32, and the normalized copy if the norm's weight is trained;
- of gated MLPs, the output of the activation; of experts, all of this for each expert that the token goes to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from torch import nn
from transformers import TrainingArguments

from vlmpack.context_parallel.plans import plan_for
from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_of
from vlmpack.model.engine import StepConfig
from vlmpack.model.plain import find_model
from vlmpack.terminal import format_bytes

COMPUTED_IN = 2
"""Bytes of a number in the dtype of computation on a GPU, bfloat16."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Names in TrainingArguments since transformers 5.23, and before."""
MEANINGS = {
    "weights": "all weights, divided over fsdp and tensor ranks",
    "gradients": "those of trained weights, divided in the same way",
    "optimizer": "two moments of AdamW for each trained weight, divided in the same way",
    "copies": "trained weights in the dtype of computation, and buckets of DDP; with fsdp: embedding, head, towers and "
    "two layers, gathered, and gradients of one layer and these",
    "activations": "what the backward pass needs of each layer, of which checkpointing keeps inputs alone; pixels. "
    "Gated delta layers with PyTorch's kernels need about twice as much",
    "temporary": "the larger of a layer's gradients (with what is recomputed of it) and the logits of some targets",
}
"""Parts of the memory of a rank, and what they count."""


@final
@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Bytes of a layer."""

    weights: int
    """Weights in the dtype of computation, without experts."""
    experts: int
    """Weights of experts, in the dtype of computation."""
    kept: int
    """Kept of each token or patch for the backward pass."""
    input: int
    """Input of each token or patch, which is all that checkpointing keeps."""
    gradients: int
    """Gradients of each token or patch that are in memory together in the backward pass."""


@final
@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Bytes of a model."""

    weights: int
    """All weights."""
    trained: int
    """Weights that are trained."""
    trained_share: float
    """Trained weights / all weights, by number."""
    cast: int
    """Copies of trained weights in the dtype of computation."""
    outside: int
    """Weights outside text layers (embedding, head, towers), in the dtype of computation."""
    text: tuple[LayerSizes, ...]
    """Layers of the text model."""
    vision: tuple[LayerSizes, ...]
    """Blocks of the vision tower; empty if it is frozen, because nothing of it is kept then."""
    token: int
    """Kept of each token outside layers: input of the last norm, its output, input of the head."""
    patch: int
    """Pixels of each patch, and what the tower keeps of it outside blocks."""
    target: int
    """Logits of one target in the backward pass: log-probabilities and two gradients in float32, and the head's."""


@final
@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How ranks divide a model and its rows."""

    replicate: int = 1
    """Ranks with copies of the model."""
    fsdp: int = 1
    """Ranks that each hold a part of all weights, and gather a layer at a time."""
    context: int = 1
    """Ranks that share a row. They are some of the fsdp ranks."""
    tensor: int = 1
    """Ranks that each compute some heads."""
    expert: int = 1
    """Ranks that each compute some experts. They are the fsdp ranks."""
    checkpointing: bool = False
    """Whether layers are recomputed in the backward pass."""

    def __str__(self) -> str:
        """Return, for example, `fsdp=8, checkpointing`."""
        sizes = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ", ".join([*sizes, *(["checkpointing"] if self.checkpointing else [])]) or "one rank"


# ---------------------------------------------------------------------- one rank


def memory_of(sizes: ModelSizes, mesh: Mesh, *, tokens: int, patches: int) -> dict[str, int]:
    """Return the bytes of each part of `MEANINGS` on a rank in a training step with AdamW.

    Args:
        sizes: of the model.
        mesh: how ranks divide it.
        tokens: tokens of the largest row.
        patches: patches of that row.
    """
    split, again = mesh.fsdp * mesh.tensor, mesh.checkpointing
    tokens, patches = -(-tokens // mesh.context), -(-patches // mesh.context)
    rows = [*((layer, tokens) for layer in sizes.text), *((block, patches) for block in sizes.vision)]
    copies = sizes.cast + sizes.trained * (mesh.replicate > 1)
    if mesh.fsdp > 1:
        largest = max(each.weights + each.experts / mesh.expert for each in sizes.text)
        copies = sizes.outside + 2 * largest + sizes.trained_share * (sizes.outside + largest)

    def kept(layer: LayerSizes) -> float:
        whole = min(layer.kept, 8 * layer.input)  # norms and inputs, which tensor ranks do not divide
        return whole + (layer.kept - whole) / mesh.tensor

    in_layers = sum(count * (each.input if again else kept(each)) for each, count in rows)
    gradients = max(count * (each.gradients + kept(each) * again) for each, count in rows)
    logits = min(tokens, StepConfig().head_chunk) * sizes.target / mesh.tensor
    found = {
        "weights": sizes.weights / split,
        "gradients": sizes.trained / split,
        "optimizer": 2 * sizes.trained / split,
        "copies": copies / mesh.tensor,
        "activations": in_layers + tokens * sizes.token + patches * sizes.patch,
        "temporary": max(logits, gradients),
    }
    return {name: int(size) for name, size in found.items()}


def memory_of_training(model: nn.Module, args: TrainingArguments, *, tokens: int, patches: int) -> dict[str, int]:
    """Return the memory of a rank that trains a model with Trainer, see `memory_of`."""
    mesh = Mesh(
        **{"fsdp" if args.fsdp else "replicate": args.world_size},
        checkpointing=any(getattr(args, name, False) for name in CHECKPOINTING),
    )
    size = COMPUTED_IN if args.bf16 else next(model.parameters()).element_size()
    return memory_of(model_sizes(model, size=size), mesh, tokens=tokens, patches=patches)


# ---------------------------------------------------------------------- a proposal


@final
@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The simplest way to train that fits, or the one that needs least if none does."""

    fits: bool
    mesh: Mesh
    capacity: int
    """Tokens of a row."""
    parts: Mapping[str, int]
    """Memory of each rank, in bytes, see `MEANINGS`."""
    rejected: Mapping[str, str]
    """Simpler ways, and why they do not fit."""


def propose(sizes: ModelSizes, config: Any, *, gpus: int, limit: int, rows: Mapping[int, int]) -> Proposal:
    """Propose mesh, checkpointing and capacity: data parallel, then FSDP2, checkpointing, and shared rows or layers.

    LoRA is not divided over tensor or expert ranks.

    Args:
        sizes: of the model.
        config: configuration of the whole model.
        gpus: number of ranks.
        limit: bytes that may be used on each.
        rows: tokens of a row, and the largest number of patches in it; the largest row that fits is proposed.
    """
    rejected: dict[str, str] = {}
    tried: list[Proposal] = []
    smallest = min(rows)
    for mesh in _meshes(gpus, has_experts=any(each.experts for each in sizes.text), is_full=sizes.trained_share > 0.5):
        if mesh.tensor > 1:
            try:
                plan_for(config, tp_size=mesh.tensor)
            except ConfigError as error:
                rejected[str(mesh)] = str(error)
                continue
        needed = {tokens: memory_of(sizes, mesh, tokens=tokens, patches=patches) for tokens, patches in rows.items()}
        if fitting := [tokens for tokens, parts in needed.items() if sum(parts.values()) <= limit]:
            capacity = max(fitting)
            return Proposal(fits=True, mesh=mesh, capacity=capacity, parts=needed[capacity], rejected=rejected)
        parts = needed[smallest]
        tried.append(Proposal(fits=False, mesh=mesh, capacity=smallest, parts=parts, rejected=rejected))
        most = max(parts, key=parts.__getitem__)
        rejected[str(mesh)] = (
            f"rows of {smallest:,} need {format_bytes(sum(parts.values()))}; most is {most}, "
            f"{format_bytes(parts[most])}"
        )
    return min(tried, key=lambda each: sum(each.parts.values()))


def _meshes(gpus: int, *, has_experts: bool, is_full: bool) -> Iterator[Mesh]:
    """Yield meshes, the simplest first."""
    again = {"checkpointing": True}
    yield Mesh(replicate=gpus)
    if gpus == 1:
        yield Mesh(**again)
        return
    yield Mesh(fsdp=gpus)
    yield Mesh(fsdp=gpus, **again)
    if has_experts and is_full:
        yield Mesh(fsdp=gpus, expert=gpus, **again)
    sizes = [size for size in range(2, gpus + 1) if gpus % size == 0]
    for size in sizes:
        yield Mesh(fsdp=gpus, context=size, **again)
    for size in sizes if is_full else ():
        yield Mesh(fsdp=gpus // size, tensor=size, **again)


# ---------------------------------------------------------------------- modules


def model_sizes(model: nn.Module, *, size: int) -> ModelSizes:
    """Measure a model by its modules; its weights may be on the meta device.

    Args:
        model: the model, with adapters if it has any; `requires_grad` tells what is trained.
        size: bytes of a number in the dtype of computation.
    """
    plain: Any = find_model(model)
    family = family_of(plain)
    config = family.text_config(plain.config)
    blocks, tower = family.vision_blocks(plain), family.vision_tower(plain)
    trained = [each for each in model.parameters() if each.requires_grad]
    weights = sum(each.numel() for each in model.parameters())
    experts_of_token = family.experts_of_token(plain.config)
    layers = plain.get_submodule(family.text_path).layers
    text = tuple(_layer(each, config.hidden_size, experts_of_token, size) for each in layers)
    of_pixel = 4 if size == 4 else 4 + size  # pixels are float32, and cast
    patch = of_pixel * family.patch_channels(plain.config) if family.has_grids else 0
    vision: tuple[LayerSizes, ...] = ()
    if tower is not None and any(each.requires_grad for each in tower.parameters()):
        width = next(each.in_features for each in blocks[0].modules() if isinstance(each, nn.Linear))
        vision = tuple(_layer(each, width, 0, size) for each in blocks)
        inside = {module for block in blocks for module in block.modules()}
        for name, module in tower.named_modules():  # mergers take several patches together
            if module not in inside and _has_own_layers(name, module):
                first = next((each for each in module.children() if hasattr(each, "in_features")), None)
                patch += int(_kept(module, size) / max(1, getattr(first, "in_features", width) // width))
    return ModelSizes(
        weights=sum(each.nbytes for each in model.parameters()),
        trained=sum(each.nbytes for each in trained),
        trained_share=sum(each.numel() for each in trained) / weights,
        cast=sum(each.numel() * size for each in trained if each.ndim > 1 and each.element_size() > size),
        outside=weights * size - sum(each.weights + each.experts for each in text),
        text=text,
        vision=vision,
        token=(4 + 2 * size) * config.hidden_size,
        patch=patch,
        target=config.vocab_size * (12 if size == 4 else 12 + size),
    )  # fmt: skip


def _layer(layer: nn.Module, hidden: int, experts_of_token: int, size: int) -> LayerSizes:
    experts = [each for name, each in layer.named_parameters() if each.ndim == 3 and "conv" not in name]
    kept = sum(_kept(each, size) for name, each in layer.named_modules() if _has_own_layers(name, each))
    inner = max((each.in_features for each in layer.modules() if isinstance(each, nn.Linear)), default=0)
    if experts:  # of each expert: the gathered token, gate and up, activation, product, output
        widths = [each.numel() // each.shape[0] // hidden for each in experts]
        kept += experts_of_token * size * (sum(widths) + min(widths) + 2 * hidden)
        inner = max(inner, experts_of_token * max(*widths, hidden))
    of_experts = sum(each.numel() for each in experts) * size
    weights = sum(each.numel() for each in layer.parameters()) * size - of_experts
    gradients = size * (inner + 2 * hidden)
    return LayerSizes(weights=weights, experts=of_experts, kept=int(kept), input=hidden * size, gradients=gradients)


def _has_own_layers(name: str, module: nn.Module) -> bool:
    return "lora_" not in name and not hasattr(module, "in_features")


def _kept(module: nn.Module, size: int) -> float:
    """Return the bytes of a position that a module's own linear layers and norms keep."""
    children = dict(module.named_children())
    linears: list[Any] = [each for each in children.values() if hasattr(each, "in_features")]
    total = 0.0
    for name, norm in children.items():
        weight: Any = norm._parameters.get("weight")
        if "Norm" not in type(norm).__name__ or weight is None:
            continue
        heads: Any = children.get(name.replace("norm", "proj"))  # q_norm normalizes each head of q_proj
        width = heads.out_features if hasattr(heads, "out_features") else weight.numel()
        is_fused = isinstance(norm, nn.LayerNorm)
        total += width * (size if is_fused else 4 + weight.element_size() * weight.requires_grad)
    if not linears:
        return total
    *inner, last = linears
    for part in (inner, [last]):
        trained = [each for each in part if any(w.requires_grad for w in each.parameters())]
        apart = any(w.element_size() > size for each in trained for w in each.parameters() if w.requires_grad)
        widths = [each.in_features for each in trained]
        total += size * sum(widths if apart else {*widths})
        for each in trained:
            if any(isinstance(x, nn.Dropout) for x in getattr(each, "lora_dropout", nn.ModuleDict()).values()):
                total += (size + 1) * each.in_features
    outs = sum(each.out_features for each in inner)
    total += size * outs
    if any(name.startswith("act") for name in children):
        total += size * last.in_features * (outs >= 2 * last.in_features)
    elif len(inner) == 1:  # one layer for queries, keys and values: rotated ones are copies
        total += size * outs * 2 / 3
    return total
