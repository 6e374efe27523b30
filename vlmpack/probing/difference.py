"""Find the cause of an error in a packed pass: compare every module's output, then the results, with those of the
samples alone. The losses of routers are compared with those of a padded batch with its 2D mask.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from vlmpack.layout.media import AUDIO
from vlmpack.layout.row import IGNORE
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import expert_blocks
from vlmpack.model.plain import CACHES
from vlmpack.probing.forward_passes import ForwardResult, PackedPass, PlainPaddedPass, ProbedModel, total_targets
from vlmpack.probing.report import Cause, Check
from vlmpack.testing.comparison import (
    Gradients,
    backward,
    distance,
    gradient_errors,
    mean_losses,
    plain_output,
    relative,
    take_gradients,
    target_losses,
)
from vlmpack.testing.samples import Sample, alone

LEAK = 1e-5
"""The most that a value may move when other samples change, as a fraction of the largest entry. A real leak is 1e-2."""
LIMITS = {False: 1e-4, True: 5e-2}
"""The largest allowed error of a module's output, as a fraction of the largest entry; True: in low precision. In a
prefix tree, the chunks of gated delta layers begin at other tokens than in a sample alone, so they round differently.
"""
LOSS_LIMITS = {False: 1e-5, True: 2e-3}
"""The largest relative difference of two losses that are computed from the same numbers; True: in low precision."""
BALANCE_LIMIT = 2e-2
"""Limit for load-balancing losses in low precision, where rounding sends tokens to other experts."""
ADDED_LIMIT = 1e-2
"""Limit of the relative difference of the routers' part of the loss, and of its gradient. The loss itself is a thousand
times as large as this part."""
TARGET_LIMITS = {False: 1e-5, True: 2e-2}
"""The same for single targets. In low precision, matrices with more rows may use other kernels."""

Role = Cause | Literal["query scale"]
Calls = dict[str, list[list[torch.Tensor]]]
"""Maps the name of a module to the tensors that each of its calls returned."""

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
    return AloneCalls(calls=calls, logits=logits.detach())


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
        samples: the samples, in the order of the pass. None has both images and videos.
        references: outputs of the modules for each sample alone.
        token_indices: for each sample, the indices of its tokens in the pass, int64 [L]; -1: another rank has the
            token.
        found: gets the results; if the pass raises, the results up to there.
        shares: shared media go through the model once, or ranks compute media together. Vision modules are then not
            compared, because their calls do not match those for the samples alone.
    """
    family, roles, counts = probed.family, roles_of(probed), Counter[str]()
    index, lengths = torch.cat([*token_indices]), [*map(len, token_indices)]
    types = torch.cat([family.media_types(sample["input_ids"], probed.config) for sample in samples])[index >= 0]
    embedded = {part: is_kind(types) for part, (_, is_kind) in EMBEDDED.items()}
    is_video = ["pixel_values_videos" in sample and not family.videos_as_images for sample in samples]
    by_kind = [[x for x, video in zip(references, is_video, strict=True) if video is kind] for kind in (False, True)]

    def compare(name: str, output: Any) -> Any:
        flat, structure = tree_flatten(output)
        tensors = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        is_vision = roles.get(name) == "vision"
        groups = [[x.calls.get(name, []) for x in group] for group in (by_kind if is_vision else [references])]
        counts[name] += 1
        for calls in _matching(groups, counts[name] - 1, is_vision=is_vision):
            parts = [[call[k] for call in calls if k < len(call)] for k in range(len(tensors))]
            aligned = [_align(flat[i], x, lengths, index) for i, x in zip(tensors, parts, strict=True)]
            for i, each in zip(tensors, aligned, strict=True):
                if each is None:
                    continue
                for part, mask in (embedded if name == "embeddings" else {name: None}).items():
                    if mask is None or mask.any():
                        found.errors[part] = max(found.errors.get(part, 0.0), each.error(flat[i], mask))
                flat[i] = flat[i].detach().index_copy(each.dim, each.index, each.expected.to(flat[i].dtype))
            if any(aligned):
                return tree_unflatten(flat, structure)
        return None

    def note_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.inputs.update(kwargs)

    compared = [name for name, role in roles.items() if not (shares and role == "vision")]
    noting = family.backbone(probed.core).register_forward_pre_hook(note_inputs, with_kwargs=True)
    try:
        with _hooked(probed, compared, compare):
            found.result = forward(samples)
    finally:
        noting.remove()
    found.errors = probed.worst_of_ranks(found.errors)


def _matching(groups: Sequence[Sequence[Any]], at: int, *, is_vision: bool) -> list[list[Any]]:
    """List the sets of calls, for samples alone, that call number `at` of a module may correspond to.

    This is either the same call of every sample, or a single call of one sample: a tower is called once for all images
    and once for all videos, or once for each image.

    Args:
        groups: the module's calls for each sample; those with images before those with videos.
        at: number of the call in the pass.
        is_vision: whether the module belongs to the vision tower.
    """
    together: list[list[Any]] = []
    for calls in groups:
        most = max(map(len, calls), default=0)
        together += [[of_sample[k] for of_sample in calls if k < len(of_sample)] for k in range(most)]
    single = [[call] for calls in groups for of_sample in calls for call in of_sample] if is_vision else []
    return [ways[at] for ways in (together, single) if at < len(ways)]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Aligned:
    """What a tensor of all samples has to be, and where: at the indices `index` along dimension `dim`."""

    dim: int
    index: torch.Tensor
    expected: torch.Tensor

    def error(self, whole: torch.Tensor, mask: torch.Tensor | None) -> float:
        """Return the largest error as a fraction of the largest entry; `mask`: of the tokens to compare."""
        actual, expected = whole.index_select(self.dim, self.index), self.expected
        if mask is not None:
            actual, expected = (x[:, mask.to(x.device)] for x in (actual, expected))
        return distance(_real(actual), _real(expected)) if expected.numel() else 0.0


def _align(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], lengths: Sequence[int], token_index: torch.Tensor
) -> _Aligned | None:
    """Find the dimension along which the samples' tensors are joined, by token indices or simply concatenated."""
    if not parts or not (whole.is_floating_point() or whole.is_complex()):
        return None
    for dim in range(whole.ndim):
        if any(x.shape[:dim] != whole.shape[:dim] or x.shape[dim + 1 :] != whole.shape[dim + 1 :] for x in parts):
            continue
        sizes = [x.shape[dim] for x in parts]
        if sizes == lengths and whole.shape[dim] > int(token_index.max()):
            index = token_index
        elif sum(sizes) == whole.shape[dim]:
            index = torch.arange(sum(sizes))
        else:
            continue
        is_here, expected = index >= 0, torch.cat([*parts], dim)
        expected = expected.index_select(dim, is_here.nonzero()[:, 0]).to(whole.device)
        return _Aligned(dim=dim, index=index[is_here].to(whole.device), expected=expected)
    return None


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


# ---------------------------------------------------------------------- checks of modules


def module_checks(
    found: Difference, probed: ProbedModel, *, low: bool, leaks: bool, shares: bool = False
) -> list[Check]:
    """Make one check for each cause from the errors of its modules.

    Args:
        found: the errors.
        probed: the model.
        low: whether the pass is in low precision.
        leaks: whether a sample's logits move when only other samples change.
        shares: whether tokens are shared. Then only the first error counts: samples that share a token may give it
            different values behind a module that leaks, so that the inputs of the next modules are not right for all.
    """
    roles, errors, checks = roles_of(probed), found.errors, [check_cache(found)]
    limits = {name: LEAK if roles[name] == "positions" else LIMITS[low] for name in errors}
    wrong = [name for name, error in errors.items() if not error <= limits[name]]
    if shares and wrong:
        wrong, names = wrong[:1], [*errors]
        errors = {name: errors[name] for name in names[: names.index(wrong[0]) + 1]}
    # if other attention layers are wrong too, the mask is at fault, not the scale of queries
    scaled = "mask" if any(roles[name] == "mask" for name in wrong) else "positions"
    causes = {name: scaled if name in wrong and role == "query scale" else role for name, role in roles.items()}
    for cause in CAUSES:
        of_cause = [name for name in errors if causes[name] == cause]
        first = next((name for name in of_cause if name in wrong), None)
        if first is not None:
            detail = f"{first} gives other numbers of a sample than alone, given the same inputs: off by "
            check = Check.wrong(cause, f"{detail}{errors[first]:.1e}", value=errors[first], allowed=limits[first])
            check = replace(check, finding="leaks" if leaks else "differs")
            checks.append(replace(check, name="other modules", cause=None) if cause == "unknown" else check)
        elif of_cause and cause != "unknown":
            largest = max(of_cause, key=errors.__getitem__)
            checks.append(Check.of_mechanism(cause, errors[largest], limits[largest], ""))
        elif cause != "unknown":
            finding = "not counted" if cause in roles.values() else "absent"
            checks.append(Check(part="mechanism", name=cause, finding=finding))
    return checks


def check_backward(
    forward: Callable[[Sequence[Sample]], ForwardResult],
    probed: ProbedModel,
    samples: Sequence[Sample],
    wrong: Sequence[str],
) -> Check:
    """Name the module at fault if only gradients are wrong: the last one that is called with such a parameter.

    The backward pass begins at the end of the model, and goes wrong there.

    Args:
        forward: the pass.
        probed: the model.
        samples: the samples, in the order of the pass.
        wrong: names of the parameters with wrong gradients, at least one.
    """
    roles, called = roles_of(probed), list[str]()
    with torch.no_grad(), _hooked(probed, roles, lambda name, _: called.append(name)):
        forward(samples)
    names = {p: name for name, p in probed.core.named_parameters()}
    wrong = [names[p] for name, p in probed.model.named_parameters() if name in wrong and p in names]
    owners = [max((x for x in called if name.startswith(f"{x}.")), key=len, default="") for name in wrong]
    last = max(owners, key=lambda owner: called.index(owner) if owner else -1)
    role = roles.get(last, "unknown")
    detail = (
        f"outputs are right, and going backward, gradients are wrong from {last or 'the end'} on: by its backward "
        "pass, or by that of what reads its output"
    )
    return replace(Check.wrong("mask" if role == "query scale" else role, detail), name="backward pass")


def check_cache(found: Difference) -> Check:
    """Check that the model fills no cache: training does not need it, and with a cache transformers ignores packed
    positions."""
    has_cache = found.inputs.get("use_cache") is not False or any(found.inputs.get(x) is not None for x in CACHES)
    return Check.of_mechanism("cache", int(has_cache), 0, "the model fills a cache, which is thrown away")


# ---------------------------------------------------------------------- checks of inputs and results


def check_tokens(
    ids_1T: torch.Tensor,
    media: Mapping[str, Any],
    expected_media: Mapping[str, Any],
    samples: Sequence[Sample],
    token_indices: Sequence[torch.Tensor],
    width: int,
) -> Check:
    """Check that a row, or the model's input, has each sample's tokens in the right place and its media in order."""
    row_T = ids_1T[0].cpu()
    if len(row_T) != width:
        detail = f"the row is {len(row_T)} tokens wide, and its samples take {width}"
        return Check.wrong("packing", detail, value=len(row_T), allowed=width)
    for i, (index, sample) in enumerate(zip(token_indices, samples, strict=True)):
        if not torch.equal(row_T[index[index >= 0]], sample["input_ids"][index >= 0]):
            return Check.wrong("packing", f"sample {i} has other tokens in the row")
    for name, expected in expected_media.items():
        packed = media.get(name)
        if packed is None or not torch.equal(packed.cpu().to(expected.dtype), expected):
            return Check.wrong("packing", f"{name} are not those of the samples in order")
    return Check.of_mechanism("packing", 0, 0, "")


def result_checks(
    result: ForwardResult, samples: Sequence[Sample], alone_logits: Sequence[torch.Tensor], *, low: bool
) -> list[Check]:
    """Compare the results of a pass in which every module's output was correct. Only the first error is reported.

    Args:
        result: the result of the pass.
        samples: the samples, in the order of the pass.
        alone_logits: logits of each sample alone, [L, V].
        low: whether the pass is in low precision.
    """
    checks: list[Check] = []
    for check in _results(result, samples, alone_logits, low):
        if check.is_bad:
            return [check]
        checks.append(check)
    return checks


def _results(
    result: ForwardResult, samples: Sequence[Sample], alone_logits: Sequence[torch.Tensor], low: bool
) -> Iterator[Check]:
    """Check logits, the head, the loss and each sample's results, in this order."""
    errors = [
        distance(ours, theirs) if ours.shape == theirs.shape else float("inf")
        for ours, theirs in zip(result.logits, alone_logits, strict=True)
    ]
    worst = max(range(len(errors)), key=errors.__getitem__)
    detail = f"sample {worst} gets logits that the head computed from other tokens: off by {errors[worst]:.1e}"
    yield Check.of_mechanism("sample results", errors[worst], LIMITS[low], detail)

    losses = [target_losses(x, sample["labels"]) for x, sample in zip(alone_logits, samples, strict=True)]
    is_target = [sample["labels"][1:] != IGNORE for sample in samples]
    counts, step = [*map(len, losses)], result.step
    if step is not None:
        starts = [start for start, _ in step.segments.spans]
        index = torch.cat([start + x.nonzero()[:, 0] for start, x in zip(starts, is_target, strict=False)])
        if not torch.equal(step.target_index.cpu(), index):
            detail = f"{step.num_targets} targets were counted; the samples have {len(index)}, or have them elsewhere"
            yield Check.wrong("loss count", detail, value=step.num_targets, allowed=len(index))
        error = distance(step.target_logprobs, -torch.cat(losses))
        detail = f"log-probabilities of targets are off by {error:.1e} from those of the samples' logits"
        yield Check.of_mechanism("head", error, TARGET_LIMITS[low], detail)

    loss, expected = float(result.loss.detach()), float(torch.cat(losses).sum()) / sum(counts)
    detail = f"the loss is {loss:.6g}, but the samples' {sum(counts)} targets make {expected:.6g}"
    yield Check.of_mechanism("loss count", relative(loss, expected), LOSS_LIMITS[low], detail)
    if step is None:
        return

    if (returned := step.sample_targets.tolist()) != counts:
        yield Check.wrong("sample results", f"the samples have {counts} targets, and {returned} were returned")
    error = distance(step.sample_losses, mean_losses(losses))
    detail = f"a sample gets the loss of another one, or of none: off by {error:.1e}"
    yield Check.of_mechanism("sample results", error, LOSS_LIMITS[low], detail)
    rows = zip(step.logprobs, step.offsets or [0] * len(samples), is_target, strict=True)
    in_place = [row[start : start + len(x)][x.to(row.device)] for row, start, x in rows]
    if not torch.equal(torch.cat(in_place), step.target_logprobs):
        yield Check.wrong("sample results", "log-probabilities are at other places than their samples' targets")


# ---------------------------------------------------------------------- checks of routers


@final
@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """The routers' part of a loss."""

    balance: float
    """The load-balancing loss over the real tokens."""
    added: float
    """The load-balancing loss as it is added to the loss, with its coefficient."""
    gradients: Gradients
    """Gradients of `added` by the routers' parameters."""


def reference_router_losses(probed: ProbedModel, samples: Sequence[Sample]) -> RouterLosses | None:
    """Compute the router losses of the padded batch with its 2D mask.

    None: the model has no routers, or this version of transformers computes no load-balancing loss.
    """
    if not probed.family.has("experts"):
        return None
    result = PlainPaddedPass(probed=probed)(samples, router_losses=True)
    if (balance := result.aux_loss) is None:
        return None
    losses = [target_losses(x, sample["labels"]) for x, sample in zip(result.logits, samples, strict=True)]
    added, size = float((result.loss - torch.cat(losses).mean()).detach()), float(balance.detach())
    of_balance = _router_gradients(balance + 0 * result.loss, probed, backward)  # FSDP2 waits for gradients of outputs
    gradients = {name: x * (added / size) for name, x in of_balance.items()}
    return RouterLosses(balance=size, added=added, gradients=gradients)


def check_router_losses(
    packed: PackedPass, samples: Sequence[Sample], expected: RouterLosses, result: ForwardResult, *, right: bool
) -> list[Check]:
    """Compare the load-balancing loss with that of the padded batch, also as it is added to the loss, and its gradient.

    The gradient is compared only in float32 and in train mode.

    Args:
        packed: the packed pass.
        samples: the samples.
        expected: the reference.
        result: the result of the pass with router losses, from `PackedStep`.
        right: whether logits and losses of targets are right. Only then are the routers named as the cause, because
            wrong hidden states change router losses, too.
    """
    step, circumstance = result.step, packed.circumstance
    assert step is not None
    assert step.aux_loss is not None
    added = step.loss - step.loss_sum / (circumstance.divisor(samples) or total_targets(samples))
    low = result.logits[0].dtype != torch.float32
    limit = BALANCE_LIMIT if low else LOSS_LIMITS[False]
    added_limit = ADDED_LIMIT + (BALANCE_LIMIT if low else 0.0) + 1e-6 / max(abs(expected.added), 1e-30)
    errors = [
        ("load-balancing loss", relative(float(step.aux_loss.detach()), expected.balance), limit),
        ("routers' part of the loss", relative(float(added.detach()), expected.added), added_limit),
    ]
    if expected.gradients and circumstance.train and not low:
        found = gradient_errors(_router_gradients(added, packed.probed, packed.backward), expected.gradients)
        errors.append(("routers' gradient", max(each.error for each in found.values()), ADDED_LIMIT))
    detail = "the {} is off by {:.1e} from that of the padded batch with its 2D mask"
    settings: Any = {"cause": "router" if right else None}
    return [
        Check.measured("equality", f"{circumstance.name}: {name}", error, limit, detail.format(name, error), **settings)
        for name, error, limit in errors
    ]


def _router_gradients(loss: torch.Tensor, probed: ProbedModel, backward: Callable[[torch.Tensor], None]) -> Gradients:
    """Return the gradients of `loss` by the parameters of all expert blocks, without those of the experts."""
    take_gradients(probed.model)
    backward(loss)  # not `autograd.grad`: FSDP2 gives its parameters gradients in a backward pass only
    gradients = take_gradients(probed.core)
    names = {module: name for name, module in probed.core.named_modules()}
    blocks = [names[block] for block in expert_blocks(ModelParts(family=probed.family, core=probed.core))]
    return {
        name: gradient
        for name, gradient in gradients.items()
        for block in blocks
        if name.startswith(f"{block}.") and "experts" not in name.removeprefix(block).split(".")
    }
