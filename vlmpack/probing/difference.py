"""Find the module in which packed samples first become other ones: each is given right inputs, and its output compared.

Each sample goes through the plain model by itself, and every module's outputs are kept. Then the samples go through it
together. The output of each module is compared with what it gave of each sample alone, and then replaced by that: so
the next one is given right inputs, whatever was wrong before it, and an error is the module's own. Its place in the
model says the mechanism:

    the text model's inputs    vision or audio, by the placeholders at which they differ
    vision part, projectors    vision
    rotary embeddings          positions
    attention                  mask; in layers that scale queries by position alone, positions
    gated delta layers         conv taps, recurrent state: the layer is run again with one of them disabled
    short convolutions         conv taps
    blocks with experts        router
    any other module           unknown, with its name

Layers whose inner modules compute samples apart (experts, gated delta layers, layers that run sample by sample) are
compared at their own output, and audio where it reaches the text model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from vlmpack.layout.media import AUDIO
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import expert_blocks
from vlmpack.model.plain import CACHES
from vlmpack.probing.forward_passes import ForwardPass, ForwardResult, ProbedModel
from vlmpack.probing.report import Cause
from vlmpack.testing.comparison import plain_output
from vlmpack.testing.samples import Sample, alone

LEAK = 1e-5
"""The most that may move when something else is changed, as a part of the largest entry: a real leak is 1e-2."""
LIMITS = {False: 1e-4, True: 5e-2}
"""The largest error of a module's output, as a part of the largest entry; True: in low precision. Chunks of gated delta
layers in a prefix tree begin elsewhere than alone."""
FORGETS_EVERYTHING = 20.0
"""A_log of a gated delta layer whose state is multiplied by exp(-exp(20) * softplus(...)) = 0 at every token."""
DELTA = "gated delta layers"
"""The role of layers with two mechanisms."""
PIXELS = ("pixel_values", "pixel_values_videos")
"""Images and videos go through a tower in calls of their own, in this order."""

Calls = dict[str, list[list[torch.Tensor]]]
"""Tensors that each module returned, call by call."""
Parts = list[tuple[int, torch.Tensor]]
"""Tensors of some samples, each with the number of its sample."""


# ---------------------------------------------------------------------- which module does what


def roles_of(probed: ProbedModel) -> dict[str, str | None]:
    """Name the mechanism of every module that is compared; None: it has nothing to do with other tokens."""
    family, core = probed.family, probed.core
    parts, names = ModelParts(family=family, core=core), {module: name for name, module in core.named_modules()}
    text, audio = family.text_path, None if family.audio is None else family.audio.path
    whole: dict[str, str | None] = {names[block]: "router" for block in expert_blocks(parts)}
    whole |= {names[layer]: DELTA for layer in parts.layer_parts("gated_delta")}
    whole |= {names[layer]: "conv taps" for layer in parts.layer_parts("short_conv")}
    if family.has("per_sample"):
        ways = family.mechanisms["per_sample"]
        whole |= {names[layer]: "mask" for layer in parts.layer_parts("per_sample", "attention")}
        others = [names[each] for way in ways if way != "attention" for each in parts.layer_parts("per_sample", way)]
        whole |= dict.fromkeys(others)
    roles: dict[str, str | None] = {}
    for module, name in names.items():
        if not name or f"{text}.".startswith(f"{name}.") or module is family.backbone(core):
            continue
        if any(name.startswith(f"{outer}.") for outer in whole) or ".experts." in name:
            continue
        if audio and f"{name}.".startswith(f"{audio}."):
            continue
        if name in whole:
            roles[name] = whole[name]
        elif not name.startswith(f"{text}.") and name != family.head_path:
            roles[name] = "vision"
        elif "Rotary" in type(module).__name__:
            roles[name] = "positions"
        elif "self_attn" in (parts_of_name := name.split(".")):
            layer = core.get_submodule(".".join(parts_of_name[: parts_of_name.index("self_attn") + 1]))
            roles[name] = "query scale" if family.has("query_scale") and not layer.use_rope else "mask"
        else:
            roles[name] = None
    return roles


# ---------------------------------------------------------------------- each sample alone


@final
@dataclass(frozen=True, kw_only=True)
class AloneCalls:
    """What every module of the plain model gave of one sample."""

    calls: Calls
    """By name of the module."""
    kinds: tuple[str, ...]
    """The pixels that went through the vision part, a call each."""
    logits: torch.Tensor
    """[L, V]."""


@torch.no_grad()
def record_alone(probed: ProbedModel, sample: Sample) -> AloneCalls:
    """Run a sample through the plain model, and keep every module's outputs, on the host: they are many."""
    calls: Calls = {}

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(name, []).append([x.detach().to("cpu", copy=True) for x in tensors_in(output)])

    def keep_embeddings(embeddings: torch.Tensor) -> None:
        calls["embeddings"] = [[embeddings.detach().to("cpu", copy=True)]]

    with _hooked(probed, roles_of(probed), keep, keep_embeddings):
        logits = plain_output(probed.model, alone(sample, labels=False)).logits[0]
    kinds = tuple(name for name in PIXELS if name in sample)
    return AloneCalls(calls=calls, kinds=("",) if probed.family.videos_as_images else kinds, logits=logits.detach())


def tensors_in(output: Any) -> list[torch.Tensor]:
    """List every tensor of a nested output, in order."""
    return [x for x in tree_flatten(output)[0] if isinstance(x, torch.Tensor)]


@contextmanager
def _hooked(
    probed: ProbedModel, names: Iterable[str], hook: Callable[..., Any], on_embeddings: Callable[[torch.Tensor], Any]
) -> Iterator[None]:
    """Call `hook(name, module, args, kwargs, output)` after each call of these modules; what it returns replaces the
    output. So it is with the embeddings that the text model is given."""

    def embedded(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if (given := kwargs.get("inputs_embeds")) is None or (other := on_embeddings(given)) is None:
            return None
        return args, {**kwargs, "inputs_embeds": other}

    text = probed.family.language_model(probed.core)
    handles = [text.register_forward_pre_hook(embedded, with_kwargs=True)]
    for name in names:
        module = probed.core.get_submodule(name)
        handles.append(module.register_forward_hook(lambda *call, name=name: hook(name, *call), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------- the samples together


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleCall:
    """One call of a layer."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @torch.no_grad()
    def error_with(self, weights: dict[str, torch.Tensor], token_indices: Sequence[torch.Tensor]) -> float:
        """Run the layer again with these weights; its error against the plain layer on the same inputs of each sample,
        as a part of the largest entry."""
        kwargs = {name: None if name in CACHES else value for name, value in self.kwargs.items()}  # one would be full
        hidden_1TD = self.args[0] if self.args else self.kwargs["hidden_states"]
        out_1TD, worst = tensors_in(functional_call(self.module, weights, self.args, kwargs))[0], 0.0
        for index in token_indices:
            part = {"hidden_states": hidden_1TD.index_select(1, index.to(hidden_1TD.device))}
            plain = tensors_in(functional_call(self.module, weights, (), part))[0]
            worst = max(worst, error_of(out_1TD.index_select(1, index.to(out_1TD.device)), plain))
        return worst


@final
@dataclass(kw_only=True, eq=False)
class Difference:
    """What a pass of several samples computed otherwise than each of them alone."""

    errors: dict[str, float] = field(default_factory=dict)
    """The largest error of each module's outputs, as a part of the largest entry, in the order in which calls end."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """Keywords of the model without its head."""
    delta: dict[str, ModuleCall] = field(default_factory=dict)
    """The gated delta layers."""
    routed: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that each module of experts was sent, call by call."""
    caches: int = 0
    """Decoder layers that were given a cache."""
    result: ForwardResult | None = None
    """The result of the pass."""


def compare_modules(
    forward: ForwardPass,
    probed: ProbedModel,
    samples: Sequence[Sample],
    references: Sequence[AloneCalls],
    token_indices: Sequence[torch.Tensor],
    *,
    found: Difference,
    shares: bool = False,
) -> None:
    """Run a pass, give every module right inputs, and compare its outputs.

    Args:
        forward: the pass.
        probed: its model.
        samples: in its order.
        references: of each sample alone.
        token_indices: int64 [L] of each sample: its tokens in the pass.
        found: is filled, as far as the pass gets.
        shares: media that samples share go through the model once, so that towers compute others than alone.
    """
    roles, counts = roles_of(probed), Counter[str]()
    types = [probed.family.media_types(sample["input_ids"], probed.config) for sample in samples]

    def compare(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        at = counts[name]
        counts[name] += 1
        if roles[name] == DELTA:
            found.delta[name] = ModuleCall(module=module, args=args, kwargs=kwargs)
        flat, structure = tree_flatten(output)
        tensors = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        for parts in _candidates(name, at, references, is_vision=roles[name] == "vision"):
            aligned = [
                _align(flat[i], [(n, x[k]) for n, x in parts if k < len(x)], token_indices)
                for k, i in enumerate(tensors)
            ]
            if all(each is None for each in aligned):
                continue
            for i, each in zip(tensors, aligned, strict=True):
                if each is not None:
                    found.errors[name] = max(found.errors.get(name, 0.0), each.error(flat[i]))
                    flat[i] = each.replace(flat[i])
            return tree_unflatten(flat, structure)
        return None

    def compare_embeddings(embeddings_1TD: torch.Tensor) -> torch.Tensor | None:
        parts = [(n, each.calls["embeddings"][0][0]) for n, each in enumerate(references) if "embeddings" in each.calls]
        if (aligned := _align(embeddings_1TD, parts, token_indices)) is None:
            return None
        for name, is_kind in EMBEDDED.items():
            error = aligned.error(embeddings_1TD, [is_kind(of_sample) for of_sample in types])
            if error is not None:
                found.errors[name] = error
        return aligned.replace(embeddings_1TD)

    compared = [name for name, role in roles.items() if not (shares and role == "vision")]
    with _watched(probed, found), _hooked(probed, compared, compare, compare_embeddings):
        found.result = forward(samples)


EMBEDDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embeddings of images": lambda types: (types > 0) & (types != AUDIO),
    "embeddings of audio": lambda types: types == AUDIO,
    "embeddings of text": lambda types: types == 0,
}
"""Parts of what the text model is given, by the kinds of tokens."""


def _candidates(name: str, at: int, references: Sequence[AloneCalls], *, is_vision: bool) -> Iterator[Any]:
    """Which calls of the samples alone one call may be made of: the same one of each sample, or a single one.

    A tower is called for all images, then for all videos; or for each image by itself.
    """
    kinds = [kind for kind in ("", *PIXELS) if any(kind in each.kinds for each in references)] if is_vision else [""]
    together: list[Any] = []
    single: list[Any] = []
    for kind in kinds:
        of_kind: list[tuple[int, list[Any]]] = []
        for n, each in enumerate(references):
            calls = each.calls.get(name, [])
            if not is_vision:
                of_kind.append((n, calls))
            elif kind in each.kinds:
                share = len(calls) // len(each.kinds)
                first = each.kinds.index(kind) * share
                of_kind.append((n, calls[first : first + share]))
        for k in range(max((len(calls) for _, calls in of_kind), default=0)):
            together.append([(n, calls[k]) for n, calls in of_kind if k < len(calls)])
        single += [[(n, call)] for n, calls in of_kind for call in calls]
    for sequence in (together, single) if is_vision else (together,):
        if at < len(sequence):
            yield sequence[at]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Aligned:
    """Tensors of samples alone, and where they are in that of all."""

    dim: int
    parts: list[torch.Tensor]
    index: list[torch.Tensor]

    def error(self, whole: torch.Tensor, among: Sequence[torch.Tensor] | None = None) -> Any:
        """Largest error as a part of the largest entry; of some rows of each sample alone: None if there are none."""
        pairs = [(whole.index_select(self.dim, i), x) for i, x in zip(self.index, self.parts, strict=True)]
        if among is not None:
            chosen = [mask.nonzero()[:, 0].to(whole.device) for mask in among]
            pairs = [
                (x.index_select(self.dim, i), y.index_select(self.dim, i))
                for (x, y), i in zip(pairs, chosen, strict=True)
            ]
            pairs = [(x, y) for x, y in pairs if x.numel()]
            if not pairs:
                return None
        largest = max(float(_real(y).abs().max()) for _, y in pairs)
        return max(error_of(x, y, scale=largest) for x, y in pairs)

    def replace(self, whole: torch.Tensor) -> torch.Tensor:
        """Put what the samples gave alone in place of what they gave together."""
        whole = whole.detach().clone()
        for index, part in zip(self.index, self.parts, strict=True):
            whole.index_copy_(self.dim, index, part.to(whole.dtype))
        return whole


def _align(whole: torch.Tensor, parts: Parts, token_indices: Sequence[torch.Tensor]) -> _Aligned | None:
    """Find the dimension along which tensors of samples lie in that of all, token by token or one after the other."""
    if not parts or not (whole.is_floating_point() or whole.is_complex()):
        return None
    width = 1 + max(int(index.max()) for index in token_indices)
    for dim in range(whole.ndim):
        rest = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        if any(x.ndim != whole.ndim or (*x.shape[:dim], *x.shape[dim + 1 :]) != rest for _, x in parts):
            continue
        sizes = [x.shape[dim] for _, x in parts]
        if whole.shape[dim] >= width and len(parts) == len(token_indices) and sizes == [*map(len, token_indices)]:
            index = [*token_indices]
        elif sum(sizes) == whole.shape[dim]:
            index = [*torch.arange(sum(sizes)).split(sizes)]
        else:
            continue
        device = whole.device
        return _Aligned(dim=dim, parts=[x.to(device) for _, x in parts], index=[i.to(device) for i in index])
    return None


def _real(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return (torch.view_as_real(x) if x.is_complex() else x).float()


def error_of(actual: torch.Tensor, expected: torch.Tensor, *, scale: float | None = None) -> float:
    """Largest difference as a part of the largest entry, or of `scale`; NaN counts as infinitely far."""
    actual, expected = _real(actual), _real(expected)
    if not expected.numel():
        return 0.0
    largest = float(expected.abs().max()) if scale is None else scale
    return float((actual - expected).abs().nan_to_num(nan=float("inf")).max()) / max(largest, 1e-30)


# ---------------------------------------------------------------------- what else the pass shows


@contextmanager
def _watched(probed: ProbedModel, found: Difference) -> Iterator[None]:
    """Note what goes into the model, which layers are given a cache, and how many tokens experts are sent."""

    def note_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.inputs.update(kwargs)

    def note_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.caches += any(kwargs.get(name) is not None for name in CACHES)

    def note_tokens(name: str, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        given = hidden.numel() // hidden.shape[-1]
        # Llama 4's experts, which are not told a token's, are sent all tokens once each
        times = 1 if len(args) + len(kwargs) > 1 else int(module.num_experts)
        found.routed.setdefault(name, []).append(given // times)

    family = probed.family
    layers = family.language_model(probed.core).get_submodule("layers").children()
    handles = [family.backbone(probed.core).register_forward_pre_hook(note_inputs, with_kwargs=True)]
    handles += [layer.register_forward_pre_hook(note_cache, with_kwargs=True) for layer in layers]
    for at, block in enumerate(expert_blocks(ModelParts(family=family, core=probed.core))):
        # one module, or one for text and one for images
        for experts in (part for name, part in block.named_modules() if name.rpartition(".")[2] == "experts"):

            def note(*call: Any, name: str = f"expert block {at}") -> None:
                note_tokens(name, *call)

            handles.append(experts.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------- gated delta layers


def _forgetting(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights with which the state forgets everything at every token."""
    return {"A_log": torch.full_like(module.get_parameter("A_log"), FORGETS_EVERYTHING)}


def _current_tap(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights with which the convolution reads one token."""
    weight = module.get_parameter("conv1d.weight")
    taps = torch.zeros_like(weight)
    taps[..., -1] = weight[..., -1]
    return {"conv1d.weight": taps}


DISABLED_FOR: dict[Cause, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "conv taps": _forgetting,
    "recurrent state": _current_tap,
}
"""For each mechanism of gated delta layers, weights that disable the other one."""
