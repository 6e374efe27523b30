"""The reference: each sample alone through the unmodified model, with its choices of experts, which other passes are
held to.

A model that is not deterministic proves nothing about packing. So each sample runs twice.

A router sends a token to the k experts with the highest scores. If the k-th and the next score differ only by rounding,
the last bit of a hidden state chooses the expert. That bit depends on the processor and on the number of rows in a
matrix product. The choice is not continuous: the token's hidden state, and the gradients of the router and the experts,
jump by a tenth of their size. Such a jump is not a leak, and the limits for rounding do not cover it.

So the experts of each sample alone are recorded in float32, and every pass that is compared with them is held to these
choices: the plain pass in low precision, which sets the limits, the padded batch, and the packed row. The remaining
difference between two passes is continuous in their rounding. So limits in low precision need not be wider. They even
become narrower, because the plain pass that sets them contains no jumps either.

A choice is held only if the scores of the pass itself leave it open: the scores of the held experts may lie below those
of the experts that the pass would choose by at most a fraction of the spread of the token's scores (`OPEN`). Otherwise
the pass keeps its own choice, and its logits differ. Scores, weights and hidden states are always those of the pass, so
a leak into a router's input still shows.

When samples are exchanged to find leaks, every choice is held. Experts multiply the tokens of all samples at once, and
the rounding of a product depends on its number of rows. With the same choices, each expert gets the same number of
tokens, so the results of the other samples are the same bit for bit unless something leaks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from vlmpack.model.engine import StepConfig
from vlmpack.probing.difference import AloneCalls, RouterLosses, record_alone, reference_router_losses
from vlmpack.probing.forward_passes import CIRCUMSTANCES, TREE, Circumstance, ForwardPass, PlainPaddedPass, ProbedModel
from vlmpack.probing.report import UnsteadyError
from vlmpack.testing.comparison import LOW_PRECISION_FACTOR, Limits, Outcome, compare, distance, local, run_alone
from vlmpack.testing.samples import Branches, Sample, branches_of

Choices = dict[str, list[torch.Tensor]]
"""Maps the name of a block with experts to one tensor for each top-k call: the experts of the N tokens that it routes,
in order, int64 [N, k]."""

OPEN = {False: 1e-3, True: 0.125}
"""The most that scores of held experts may lie below the chosen ones, as a fraction of the spread of a token's scores;
True: in low precision.

Between passes, hidden states differ by about 1e-6 in float32. In bfloat16 they differ by 1 % to 3 % after some layers,
and by more in single tokens.
"""
HOLD_ALL = torch.inf
"""Value of `share` that holds every choice, whatever the scores."""


@final
@dataclass(frozen=True, kw_only=True)
class HeldChoices:
    """The choices of experts of samples alone, and the indices of their tokens in a pass."""

    samples: Sequence[Choices]
    """The choices of each sample."""
    token_indices: Sequence[torch.Tensor]
    """For each sample, the indices of its tokens in the flattened tokens of the pass: int64 [L]; -1: not in it."""
    share: float
    """The most that scores of held experts may lie below the chosen ones, as a fraction of the spread of a token's
    scores."""

    def for_rows(self, block: str, call: int, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (indices of tokens, their held experts) for a top-k with `rows` rows; None: it routes other tokens.

        A block routes either only the tokens of the samples, one sample after the other, or every token of the pass.
        """
        by_sample = [choices.get(block, [])[call : call + 1] for choices in self.samples]
        experts = [chosen[0] for chosen in by_sample if chosen]
        if not experts or any(chosen.shape[-1] != k for chosen in experts):
            return None
        if sum(map(len, experts)) == rows:
            return torch.arange(rows), torch.cat(experts)
        is_whole = [len(chosen) for chosen in experts] == [*map(len, self.token_indices)]
        if is_whole and max(int(index.max()) for index in self.token_indices) < rows:
            index = torch.cat([*self.token_indices])
            return index[index >= 0], torch.cat(experts)[index >= 0]
        return None


def held_to(
    choices: Sequence[Choices], forward: ForwardPass, samples: Sequence[Sample], *, share: float = HOLD_ALL
) -> AbstractContextManager[Routing]:
    """Hold a pass to the choices of experts of its samples alone; `share`: see `HeldChoices`."""
    held = HeldChoices(samples=choices, token_indices=forward.token_indices(samples), share=share)
    return routing(forward.probed, held)


@contextmanager
def routing(probed: ProbedModel, held: HeldChoices | None = None) -> Iterator[Routing]:
    """Record the experts of each token, and hold them to other choices if `held` is given.

    The model itself does not change. Without experts, this does nothing.
    """
    mode, text = Routing(held), probed.family.language_model(probed.core)
    blocks = {name: module for name, module in text.named_modules() if "experts" in dict(module.named_children())}
    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(partial(mode.enter, name)).remove)
            stack.callback(block.register_forward_hook(mode.leave, always_call=True).remove)
        if blocks:
            stack.enter_context(mode)
        yield mode


@final
class Routing(TorchFunctionMode):
    """The routing of one pass: records, and possibly changes, the results of top-k inside a block with experts."""

    def __init__(self, held: HeldChoices | None) -> None:
        super().__init__()
        self.choices: Choices = {}
        """The experts that the pass used."""
        self.held = 0
        """Number of choices that were changed to the held ones, over all layers."""
        self._holding, self._block = held, ""

    def enter(self, name: str, *_: Any) -> None:
        self._block = name
        self.choices[name] = []

    def leave(self, *_: Any) -> None:
        self._block = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._block or func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if result[1].shape[:-1] != scores.shape[:-1] or not scores.is_floating_point():
            return result  # not a top-k over the experts, which are the last dimension
        calls = self.choices[self._block]
        if self._holding is not None:
            result = self._hold(self._holding, scores, result, len(calls))
        calls.append(result[1].detach().flatten(0, -2))
        return result

    def _hold(self, held: HeldChoices, scores: torch.Tensor, result: Any, call: int) -> Any:
        """Replace experts with the held ones, at scores of this pass, where a token's scores leave the choice open."""
        own = result[1].flatten(0, -2)
        wanted = held.for_rows(self._block, call, *own.shape)
        if wanted is None:
            return result
        token_indices, experts = (x.to(own.device) for x in wanted)
        indices = own.index_copy(0, token_indices, experts)
        flat = scores.detach().float().flatten(0, -2)
        finite = flat.isfinite()
        highest = flat.masked_fill(~finite, -torch.inf).amax(-1)
        spread = highest - flat.masked_fill(~finite, torch.inf).amin(-1)
        behind = flat.gather(-1, own).amin(-1) - flat.gather(-1, indices).amin(-1)
        changes = (own.sort(-1).values != indices.sort(-1).values).any(-1)
        if held.share != HOLD_ALL:
            changes &= behind <= held.share * spread
        self.held += int(changes.sum())
        chosen = torch.where(changes[:, None], indices, own).view_as(result[1])
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


# ---------------------------------------------------------------------- each sample alone


STEADY = {False: 1e-3, True: 5e-2}
"""The most that logits may differ between two runs in float32, and in low precision, as a fraction of the largest.
Kernels that sum in a different order each time cause small differences; dropout causes larger ones."""
UNSTEADY = "set its dropout probabilities to 0, or use deterministic kernels, and probe again"


@final
@dataclass(frozen=True, kw_only=True)
class ProbeSetup:
    """A model, its samples, and the settings for packing them."""

    probed: ProbedModel
    """The model."""
    samples: Sequence[Sample]
    """The samples, in row order."""
    settings: StepConfig
    """The user's settings, or the defaults."""
    autocast: torch.dtype
    """Dtype of mixed precision; not used if the weights are already in low precision."""
    branches: Branches | None = None
    """The pieces of samples that share prefixes; None: the samples share none."""

    def is_low(self, circumstance: Circumstance) -> bool:
        """Whether the model computes in low precision."""
        return self.probed.is_low or circumstance.autocast

    def branching(self) -> ProbeSetup:
        """Return the same setup with samples that share prefixes."""
        branches = branches_of(self.samples, self.probed.config)
        return replace(self, samples=branches.samples, branches=branches)

    @property
    def circumstances(self) -> tuple[Circumstance, ...]:
        """The circumstances in which the samples are packed."""
        if self.branches is not None:
            return (TREE,)
        return tuple(each for each in CIRCUMSTANCES if not (each.autocast and self.probed.is_low))

    @contextmanager
    def computing(self, circumstance: Circumstance) -> Iterator[None]:
        """Set train or eval mode, gradients and precision of a circumstance; the model returns to eval mode afterwards.

        Dropout stays off, because a row would draw different random numbers than a sample alone.
        """
        model, device = self.probed.model, self.probed.device.type
        model.train(circumstance.train)
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        try:
            mixed: Any = {"enabled": circumstance.autocast, "cache_enabled": False}  # FSDP2 frees weights of each pass
            with torch.set_grad_enabled(circumstance.train), torch.autocast(device, dtype=self.autocast, **mixed):
                yield
        finally:
            model.eval()


@final
@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference of one circumstance."""

    outcome: Outcome
    """The outcome of the samples alone, in float32."""
    limits: Limits
    """Limits of the packed samples' errors."""
    choices: Sequence[Choices]
    """The choices of experts of each sample alone, in float32."""
    logits: Sequence[torch.Tensor]
    """Logits of each sample alone, in the precision of the circumstance."""


@final
class References:
    """The references of all circumstances, computed when they are needed. In low precision, this temporarily makes a
    float32 copy of the model. An error of the model alone is raised in the checks of each circumstance that needs it.
    """

    def __init__(self, setup: ProbeSetup) -> None:
        self._setup = setup
        self._known: dict[str, Reference] = {}

    def of(self, circumstance: Circumstance) -> Reference:
        """Return the reference of a circumstance. In train mode, it is in most models the same as in eval mode.

        Raises:
            UnsteadyError: two runs of the same samples alone differ in it.
            ArithmeticError: the model returns NaN or infinity without any packing.
        """
        mode = "autocast" if circumstance.autocast else "train" if circumstance.train else "eval"
        if mode not in self._known:
            self._known[mode] = self._computed(circumstance)
        return self._known[mode]

    def _computed(self, circumstance: Circumstance) -> Reference:
        setup = self._setup
        if circumstance.shares or not circumstance.train:
            return _reference(setup, circumstance)
        if circumstance.autocast:
            return _reference(setup, circumstance, self.of(replace(circumstance, autocast=False)))
        in_eval = self.of(replace(circumstance, train=False))
        trained, _ = _run_alone(setup, circumstance, gradients=False)
        allowed = min(in_eval.limits.logits, STEADY[setup.is_low(circumstance)])
        is_same = _largest_difference(trained.logits, in_eval.logits) <= allowed
        return in_eval if is_same else _reference(setup, circumstance)

    @cached_property
    def routers(self) -> RouterLosses | None:
        """Router losses of plain transformers for the padded batch with its 2D mask; None: no routers, or no such
        loss."""
        return reference_router_losses(self._setup.probed, self._setup.samples)


DELTA_GRADIENT = 2e-3
"""Smallest limit for gradients of gated delta layers in a tree, as a fraction of the largest entry. The gradients of
`A_log` are sums of terms that cancel: rounding hidden states by 1e-7 moves them by 1e-3. Comparing modules still finds
leaks of these layers' states."""


def _run_alone(
    setup: ProbeSetup, circumstance: Circumstance, choices: Sequence[Choices] | None = None, *, gradients: bool = True
) -> tuple[Outcome, list[Choices]]:
    """Run each sample alone in the mode and precision of a circumstance, held to `choices`. Return also the choices of
    experts that it made."""
    probed = setup.probed
    chosen: list[Choices] = []

    @contextmanager
    def recording() -> Iterator[None]:
        held = None if choices is None else held_alone(setup, choices, len(chosen), share=OPEN[True])
        with setup.computing(circumstance), torch.set_grad_enabled(gradients), routing(probed, held) as routed:
            yield
        chosen.append(routed.choices)

    outcome = run_alone(probed.model, setup.samples, gradients=gradients, forward_context=recording)
    return outcome, chosen


def record_references(setup: ProbeSetup, circumstance: Circumstance, choices: Sequence[Choices]) -> list[AloneCalls]:
    """Record every module's outputs for each sample alone in the mode and precision of a circumstance, held to
    `choices`."""
    references = []
    for at, sample in enumerate(setup.samples):
        with setup.computing(circumstance), routing(setup.probed, held_alone(setup, choices, at, share=HOLD_ALL)):
            references.append(record_alone(setup.probed, sample))
    return references


def held_alone(setup: ProbeSetup, choices: Sequence[Choices], sample: int, *, share: float) -> HeldChoices:
    """Return the choices of one sample for a pass of that sample alone."""
    token_indices = [torch.arange(len(setup.samples[sample]["input_ids"]))]
    return HeldChoices(samples=[choices[sample]], token_indices=token_indices, share=share)


def _reference(setup: ProbeSetup, circumstance: Circumstance, exact: Reference | None = None) -> Reference:
    """Compute a reference in float32, and set limits from the errors of the samples alone, and from those of plain
    transformers' padded batch. If the padded batch raises an error, it does not count.

    `exact`: the samples alone in float32, if they are known; else they run in a copy of a model in low precision.
    """
    probed, samples, low = setup.probed, setup.samples, setup.is_low(circumstance)
    alone, choices = _run_alone(setup, circumstance)
    _check_finite(probed, alone)
    logits, truth = alone.logits, alone
    if exact is None:  # else another mode has shown that the model is deterministic
        again, _ = _run_alone(setup, circumstance, gradients=False)
        if _largest_difference(again.logits, logits) > STEADY[low]:
            raise UnsteadyError(f"two runs of the same samples alone differ: {UNSTEADY}")
    if exact is not None:
        truth, choices = exact.outcome, exact.choices
    elif low:
        copied = ProbedModel.of(copy.deepcopy(probed.model).float())
        in_float32 = replace(setup, probed=copied, samples=copied.with_its_pixels(samples))
        truth, choices = _run_alone(in_float32, circumstance)
        _check_finite(probed, truth)
    if low and any(choices):
        alone, _ = _run_alone(setup, circumstance, choices=choices)
    errors = compare(alone, truth, low=low)
    try:
        forward = PlainPaddedPass(probed=probed)
        held = held_to(choices, forward, samples, share=OPEN[low])
        with setup.computing(circumstance), torch.enable_grad(), held:
            batch = forward(samples)
        padded = compare(batch.outcome(probed.model, samples), truth, low=low)
    except Exception:
        padded = errors
    limits, family = Limits.beyond(errors, padded, factor=LOW_PRECISION_FACTOR if low else 2.0), probed.family
    if circumstance.shares and family.has("gated_delta"):
        layer = family.mechanisms["gated_delta"]["layer"]
        wider = {group: max(limit, DELTA_GRADIENT) for group, limit in limits.gradients.items() if layer in group}
        limits = replace(limits, gradients={**limits.gradients, **wider})
    return Reference(outcome=truth, limits=limits, choices=choices, logits=logits)


def _largest_difference(logits: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(distance(x, y) for x, y in zip(logits, others, strict=True))


def _check_finite(probed: ProbedModel, outcome: Outcome) -> None:
    """Refuse NaN and infinity: any result would be equally far from them, so every limit would hold."""
    numbers = {f"the logits of sample {i}": x for i, x in enumerate(outcome.logits)}
    numbers |= {"the loss": torch.cat(outcome.target_losses)}
    numbers |= {f"the gradient of {name}": local(gradient) for name, gradient in outcome.gradients.items()}
    for name, is_bad in probed.worst_of_ranks({name: not x.isfinite().all() for name, x in numbers.items()}).items():
        if is_bad:
            raise ArithmeticError(f"{name} has NaN or infinity without any packing: nothing can be compared with it")
