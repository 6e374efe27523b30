"""Compare every module's output in a packed pass with its outputs for the samples alone, to find the cause of an error.

Each sample goes through the plain model alone, and every module's outputs are recorded. Then the samples go through the
model together. Each module's output is compared with the recorded ones, in the order of calls, and then replaced with
them. So the next module gets correct inputs, and an error in its output is its own. The module's role gives the cause
(`roles_of`):

    rotary embeddings                                 positions
    attention                                         mask; in layers that scale queries by position alone, positions
    gated delta layers, short convolutions            recurrent state
    blocks with experts                               router
    vision tower and projectors                       vision
    the text model's inputs at placeholders           vision or audio
    any other module                                  unknown, with its name

Layers that separate samples internally (experts, recurrent layers, layers that run sample by sample) are compared only
at their output. Audio is compared where it enters the text model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from vlmpack.layout.media import AUDIO
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import expert_blocks
from vlmpack.model.plain import CACHES
from vlmpack.probing.forward_passes import ForwardResult, ProbedModel
from vlmpack.probing.report import Cause, Check
from vlmpack.testing.comparison import plain_output
from vlmpack.testing.samples import Sample, alone

LEAK = 1e-5
"""The most that a value may move when other samples change, as a fraction of the largest entry. A real leak is 1e-2."""
LIMITS = {False: 1e-4, True: 5e-2}
"""The largest allowed error of a module's output, as a fraction of the largest entry; True: in low precision. In a
prefix tree, the chunks of gated delta layers begin at other tokens than in a sample alone, so they round differently.
"""
PIXELS = ("pixel_values", "pixel_values_videos")
"""Images and videos go through a tower in separate calls, in this order."""

Role = Cause | Literal["query scale"]
Calls = dict[str, list[list[torch.Tensor]]]
"""Maps the name of a module to the tensors that each of its calls returned."""
Parts = list[tuple[int, torch.Tensor]]
"""(index of the sample, tensor) for some samples."""

CAUSES: tuple[Cause, ...] = ("positions", "mask", "recurrent state", "router", "vision", "audio", "unknown")
"""The causes that a module's error can show."""
EMBEDDED: dict[str, tuple[Role, Callable[[torch.Tensor], torch.Tensor]]] = {
    "embeddings of images": ("vision", lambda types: (types > 0) & (types != AUDIO)),
    "embeddings of audio": ("audio", lambda types: types == AUDIO),
    "embeddings of text": ("unknown", lambda types: types == 0),
}
"""Parts of the text model's input embeddings: name → (role, mask from token types)."""


def roles_of(probed: ProbedModel) -> dict[str, Role]:
    """Map the name of each module that is compared to the cause of an error in it."""
    family, core = probed.family, probed.core
    parts, names = ModelParts(family=family, core=core), {module: name for name, module in core.named_modules()}
    text, audio = family.text_path, None if family.audio is None else family.audio.path
    whole: dict[str, Role] = {names[block]: "router" for block in expert_blocks(parts)}
    for kind in ("gated_delta", "short_conv"):
        whole |= {names[layer]: "recurrent state" for layer in parts.layer_parts(kind)}
    for way in family.mechanisms.get("per_sample", ()):
        role: Role = "mask" if way == "attention" else "unknown"
        whole |= {names[layer]: role for layer in parts.layer_parts("per_sample", way)}
    has = {"vision": family.has_vision, "audio": family.has_audio}
    roles: dict[str, Role] = {name: role for name, (role, _) in EMBEDDED.items() if has.get(role, True)}
    for module, name in names.items():
        is_around = not name or f"{text}.".startswith(f"{name}.") or module is family.backbone(core)
        is_inside = any(name.startswith(f"{outer}.") for outer in whole) or ".experts." in name
        if is_around or is_inside or (audio and f"{name}.".startswith(f"{audio}.")):
            continue
        layer, _, attention = name.partition(".self_attn")
        if name in whole:
            roles[name] = whole[name]
        elif not name.startswith(f"{text}.") and name != family.head_path:
            roles[name] = "vision"
        elif "Rotary" in type(module).__name__:
            roles[name] = "positions"
        elif layer != name and attention[:1] in ("", "."):
            is_scaled = family.has("query_scale") and not core.get_submodule(f"{layer}.self_attn").use_rope
            roles[name] = "query scale" if is_scaled else "mask"
        else:
            roles[name] = "unknown"
    return roles


# ---------------------------------------------------------------------- each sample alone


@final
@dataclass(frozen=True, kw_only=True)
class AloneCalls:
    """The outputs of every module of the plain model for one sample."""

    calls: Calls
    """Outputs by name of the module."""
    kinds: tuple[str, ...]
    """The kinds of pixels that went through the vision tower, one call for each kind."""
    logits: torch.Tensor
    """Logits of the sample: [L, V]."""


@torch.no_grad()
def record_alone(probed: ProbedModel, sample: Sample) -> AloneCalls:
    """Run a sample through the plain model, and keep every module's outputs on the host to save GPU memory."""
    calls: Calls = {}

    def keep(name: str, output: Any) -> None:
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, torch.Tensor)]
        calls.setdefault(name, []).append([x.detach().to("cpu", copy=True) for x in tensors])

    with _hooked(probed, roles_of(probed), keep):
        logits = plain_output(probed.model, alone(sample, labels=False)).logits[0]
    kinds = tuple(name for name in PIXELS if name in sample)
    return AloneCalls(calls=calls, kinds=("",) if probed.family.videos_as_images else kinds, logits=logits.detach())


@contextmanager
def _hooked(probed: ProbedModel, names: Iterable[str], hook: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call `hook(name, output)` after each call of these modules, and `hook("embeddings", inputs_embeds)` before the
    text model. A value that the hook returns replaces the output or the embeddings."""

    def embedded(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if (given := kwargs.get("inputs_embeds")) is None or (other := hook("embeddings", given)) is None:
            return None
        return args, {**kwargs, "inputs_embeds": other}

    text = probed.family.language_model(probed.core)
    with ExitStack() as stack:
        stack.callback(text.register_forward_pre_hook(embedded, with_kwargs=True).remove)
        for name in {*names} - {*EMBEDDED}:
            after = lambda _, args, output, name=name: hook(name, output)  # noqa: E731
            stack.callback(probed.core.get_submodule(name).register_forward_hook(after).remove)
        yield


# ---------------------------------------------------------------------- the samples together


@final
@dataclass(kw_only=True, eq=False)
class Difference:
    """Differences between a pass of several samples and each of them alone."""

    errors: dict[str, float] = field(default_factory=dict)
    """The largest error of each module's outputs, as a fraction of the largest entry, in the order in which calls end.
    """
    inputs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model without its head."""
    caches: int = 0
    """Number of decoder layers that got a cache."""
    result: ForwardResult | None = None
    """The result of the pass."""


def compare_modules(
    forward: Callable[[Sequence[Sample]], ForwardResult],
    probed: ProbedModel,
    samples: Sequence[Sample],
    references: Sequence[AloneCalls],
    token_indices: Sequence[torch.Tensor],
    *,
    found: Difference,
    shares: bool = False,
) -> None:
    """Run a pass, compare each module's outputs with those of the samples alone, and replace them with those.

    Args:
        forward: the pass.
        probed: the model.
        samples: the samples, in the order of the pass.
        references: outputs of the modules for each sample alone.
        token_indices: for each sample, the indices of its tokens in the pass, int64 [L]; -1: another rank has the
            token.
        found: gets the results; if the pass raises, the results up to there.
        shares: shared media go through the model once, or ranks compute media together. Vision modules are then not
            compared, because their calls do not match those for the samples alone.
    """
    roles, counts, held = roles_of(probed), Counter[str](), [index >= 0 for index in token_indices]
    types = [probed.family.media_types(sample["input_ids"], probed.config) for sample in samples]

    def compare(name: str, output: Any) -> Any:
        at = counts[name]
        counts[name] += 1
        flat, structure = tree_flatten(output)
        tensors = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        for parts in _candidates(name, at, references, is_vision=roles.get(name) == "vision"):
            aligned = [
                _align(flat[i], [(n, x[k]) for n, x in parts if k < len(x)], token_indices)
                for k, i in enumerate(tensors)
            ]
            for i, each in zip(tensors, aligned, strict=True):
                if each is None:
                    continue
                among = {name: None}
                if name == "embeddings":
                    among = {
                        kind: [is_kind(x)[own] for x, own in zip(types, held, strict=True)]
                        for kind, (_, is_kind) in EMBEDDED.items()
                    }
                for part, of_part in among.items():
                    if (error := each.error(flat[i], of_part)) is not None:
                        found.errors[part] = max(found.errors.get(part, 0.0), error)
                flat[i] = each.replace(flat[i])
            if any(aligned):
                return tree_unflatten(flat, structure)
        return None

    compared = [name for name, role in roles.items() if not (shares and role == "vision")]
    with _watched(probed, found), _hooked(probed, compared, compare):
        found.result = forward(samples)
    found.errors = probed.worst_of_ranks(found.errors)


def _candidates(
    name: str, at: int, references: Sequence[AloneCalls], *, is_vision: bool
) -> Iterator[list[tuple[int, list[torch.Tensor]]]]:
    """Yield the sets of calls, for samples alone, that call number `at` may correspond to.

    This is either the same call of every sample, or a single call of one sample: a tower is called once for all images
    and once for all videos, or once for each image.
    """
    kinds = [kind for kind in ("", *PIXELS) if any(kind in each.kinds for each in references)] if is_vision else [""]
    together: list[Any] = []
    single: list[Any] = []
    for kind in kinds:
        of_kind: list[tuple[int, list[Any]]] = []
        for n, each in enumerate(references):
            calls = each.calls.get(name, [])
            if is_vision:
                share = len(calls) // max(len(each.kinds), 1)
                first = each.kinds.index(kind) * share if kind in each.kinds else len(calls)
                calls = calls[first : first + share]
            of_kind.append((n, calls))
        for k in range(max((len(calls) for _, calls in of_kind), default=0)):
            together.append([(n, calls[k]) for n, calls in of_kind if k < len(calls)])
        single += [[(n, call)] for n, calls in of_kind for call in calls]
    return (sequence[at] for sequence in (together, single)[: 1 + is_vision] if at < len(sequence))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Aligned:
    """Tensors of samples alone, and their indices along dimension `dim` of the tensor of all samples."""

    dim: int
    parts: list[torch.Tensor]
    index: list[torch.Tensor]

    def error(self, whole: torch.Tensor, among: Sequence[torch.Tensor] | None = None) -> float | None:
        """Return the largest error as a fraction of the largest entry.

        `among`: a mask for each sample of the tokens to compare. None: no token is compared.
        """
        pairs = [(whole.index_select(self.dim, i), x) for i, x in zip(self.index, self.parts, strict=True)]
        if among is not None:
            chosen = [mask.nonzero()[:, 0].to(whole.device) for mask in among]
            pairs = [
                (x.index_select(self.dim, i), y.index_select(self.dim, i))
                for (x, y), i in zip(pairs, chosen, strict=True)
            ]
        pairs = [(_real(x), _real(y)) for x, y in pairs if y.numel()]
        if not pairs:
            return None if among is not None else 0.0
        largest = max(float(y.abs().max()) for _, y in pairs)
        errors = [float((x - y).abs().nan_to_num(nan=float("inf")).max()) for x, y in pairs]
        return max(errors) / max(largest, 1e-30)

    def replace(self, whole: torch.Tensor) -> torch.Tensor:
        """Replace the outputs of the pass with those of the samples alone."""
        whole = whole.detach().clone()
        for index, part in zip(self.index, self.parts, strict=True):
            whole.index_copy_(self.dim, index, part.to(whole.dtype))
        return whole


def _align(whole: torch.Tensor, parts: Parts, token_indices: Sequence[torch.Tensor]) -> _Aligned | None:
    """Find the dimension along which the samples' tensors are joined, by token indices or simply concatenated."""
    if not parts or not (whole.is_floating_point() or whole.is_complex()):
        return None
    width = 1 + max(int(index.max()) for index in token_indices)
    for dim in range(whole.ndim):
        rest = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        if any(x.ndim != whole.ndim or (*x.shape[:dim], *x.shape[dim + 1 :]) != rest for _, x in parts):
            continue
        sizes = [x.shape[dim] for _, x in parts]
        if whole.shape[dim] >= width and len(parts) == len(token_indices) and sizes == [*map(len, token_indices)]:
            index = [index[index >= 0] for index in token_indices]
            own = [(index >= 0).nonzero()[:, 0] for index in token_indices]
            parts = [(n, x.index_select(dim, i)) for (n, x), i in zip(parts, own, strict=True)]
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


@contextmanager
def _watched(probed: ProbedModel, found: Difference) -> Iterator[None]:
    """Record the model's inputs, and count the layers that get a cache."""

    def note_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.inputs.update(kwargs)

    def note_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.caches += any(kwargs.get(name) is not None for name in CACHES)

    layers = probed.family.language_model(probed.core).get_submodule("layers").children()
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(note_cache, with_kwargs=True).remove)
        backbone = probed.family.backbone(probed.core)
        stack.callback(backbone.register_forward_pre_hook(note_inputs, with_kwargs=True).remove)
        yield


# ---------------------------------------------------------------------- checks


def module_checks(found: Difference, probed: ProbedModel, *, low: bool, leaks: bool) -> list[Check]:
    """Make one check for each cause from the errors of its modules.

    Args:
        found: the errors.
        probed: the model.
        low: whether the pass is in low precision.
        leaks: whether a sample's logits move when only other samples change.
    """
    roles, checks = roles_of(probed), [check_cache(found)]
    limits = {name: LEAK if role == "positions" else LIMITS[low] for name, role in roles.items()}
    wrong: dict[str, Role] = {name: roles[name] for name, error in found.errors.items() if not error <= limits[name]}
    # if other attention layers are wrong too, the mask is at fault, not the scale of queries
    scaled = "mask" if "mask" in wrong.values() else "positions"
    wrong |= {name: scaled for name, role in wrong.items() if role == "query scale"}
    for cause in CAUSES:
        first = next((name for name in wrong if wrong[name] == cause), None)
        of_cause = [error for name, error in found.errors.items() if roles[name] == cause]
        error = max(of_cause, default=0.0) if first is None else found.errors[first]
        limit = LEAK if cause == "positions" else LIMITS[low]
        if first is not None:
            detail = f"{first} gives other numbers of a sample than alone, given the same inputs: off by {error:.1e}"
            check = Check.wrong(cause, detail, value=error, allowed=limit)
            check = replace(check, finding="leaks" if leaks else "differs")
            checks.append(replace(check, name="other modules", cause=None) if cause == "unknown" else check)
        elif of_cause and cause != "unknown":
            checks.append(Check.of_mechanism(cause, error, limit, ""))
        elif cause != "unknown":
            finding = "absent" if cause not in roles.values() else "not counted"
            checks.append(Check(part="mechanism", name=cause, finding=finding))
    return checks


def check_cache(found: Difference) -> Check:
    """Check that no layer got a cache: training does not need it, and with a cache transformers ignores packed
    positions."""
    detail = f"{found.caches} layers get a cache: it is filled and thrown away"
    return Check.of_mechanism("cache", found.caches, 0, detail)
