"""Experts get the real tokens of a row, and router losses and counts are over these tokens.

A row has no padding between its samples (`Segments.without_gaps`). Some widths require padding after them: a block of
experts gets the tokens before it, and returns zeros for it.

    part of the row   a a a b b . .
    router, experts   a a a b b
    output            A A A B B 0 0

A layer does not pass its row on to the block, so it hands it on (`handing_class`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import islice
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.context_parallel.mesh import Parallel
from vlmpack.errors import ConfigError
from vlmpack.families.family import Family
from vlmpack.layout.device import outside_graph, to_device
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, handed_row, handing_class, replaces
from vlmpack.model.pieces import PieceOfGroup
from vlmpack.model.row import RowPart


@final
class Experts(ClassMechanism):
    """Blocks of experts, which do not get the padding after a row's samples. A row has no entry for them."""

    name: ClassVar[str] = "experts"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return the blocks, and the layers that they are in."""
        changed: list[tuple[nn.Module, Maker]] = []
        for layer, block in _layers_and_blocks(model):
            changed += [(layer, handing_class), (block, real_tokens_class)]
        return changed

    def problem(self, model: ModelParts, *, attached: bool) -> None:
        """Return None: where forwards were replaced, padding goes through experts, which changes no result."""


def expert_blocks(model: ModelParts) -> list[Any]:
    """Return the block of router and experts (shared experts included) of every decoder layer that has one.

    Other layers (`mlp_only_layers`) are dense. A block maps hidden states [1, T, D] to [1, T, D], token by token.
    """
    return [block for _, block in _layers_and_blocks(model)]


def _layers_and_blocks(model: ModelParts) -> list[tuple[nn.Module, Any]]:
    parts = model.family.mechanisms.get("experts")
    if parts is None:
        return []
    experts, pairs = parts.get("experts", "experts"), list[tuple[nn.Module, Any]]()
    for layer in model.text.layers.children():
        wrapped = layer.get_submodule(parts["layer"]).modules()  # a block may be inside a module of the user
        pairs += [(layer, block) for block in islice((each for each in wrapped if hasattr(each, experts)), 1)]
    return pairs


def num_dispatched(part: RowPart) -> int:
    """Return the number of tokens of a part that experts get: the real ones, and at least one, so that the experts of
    all ranks take part in each exchange."""
    segments = part.segments
    return max(segments.num_tokens, 1) if segments.total > segments.num_tokens else segments.total


@replaces("__call__")
def real_tokens_class(plain: Any, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a block's class that leaves out the padding after a row's samples."""
    row, t = handed_row(), hidden_states.shape[1]
    real = t if row is None or row.part.segments.total != t else num_dispatched(row.part)
    if real == t:
        return plain(module, hidden_states, *args, **kwargs)
    others = [x[:, :real] if torch.is_tensor(x) else x for x in args]  # types of tokens, [1, t]
    output = plain(module, hidden_states[:, :real], *others, **kwargs)
    is_pair = isinstance(output, tuple)  # with router logits
    padded = F.pad(output[0] if is_pair else output, (0, 0, 0, t - real))
    return (padded, *output[1:]) if is_pair else padded


# ---------------------------------------------------------------------- the load-balancing loss


def puts_aux_loss_first(family: Family) -> bool:
    """Return whether the load-balancing loss comes before the logits in this family's output as a tuple.

    This inspects the output class, because Qwen3-VL-MoE's changed between transformers 5.17 and 5.23.
    """
    file = vars(import_module(family.modeling))
    of_vision = f"{family.model_class.removesuffix('ForConditionalGeneration')}CausalLMOutputWithPast"
    output_class = file.get(of_vision) or file.get("MoeCausalLMOutputWithPast")
    names = [] if output_class is None else [field.name for field in fields(output_class)]
    return "aux_loss" in names and names.index("aux_loss") < names.index("logits")


def wants_balance(model: ModelParts, requested: bool | None) -> bool:
    """Return whether the unmodified model would compute its load-balancing loss.

    Args:
        model: the model. If nothing is requested, its configuration's `output_router_logits` decides, but only if the
            model's forward has this argument: other forwards (several in transformers 5.17) ignore the configuration.
        requested: the `output_router_logits` argument of the call.
    """
    if requested is not None:
        return bool(requested)
    if not _reads_configuration(type(model.core)):
        return False
    return bool(model.family.text_config(model.core.config).output_router_logits)


@functools.cache
def _reads_configuration(model_class: type[nn.Module]) -> bool:
    return "output_router_logits" in inspect.signature(model_class.forward).parameters


def coefficient(model: nn.Module, text_config: Any) -> float:
    """Return the factor by which the load-balancing loss is added to the loss: the model's own attribute (a
    `...ForCausalLM` stores one when it is made) or its configuration's."""
    return getattr(model, "router_aux_loss_coef", text_config.router_aux_loss_coef)


def has_balance(family: Family) -> bool:
    """Return whether models of this family compute a load-balancing loss. Models that choose by a bias do not."""
    return hasattr(import_module(family.modeling), "load_balancing_loss_func")


def balance_sums(
    router_logits: Sequence[torch.Tensor], text_config: Any, *, sample_R: torch.Tensor, samples: int
) -> torch.Tensor:
    """Compute the terms of each sample's own load-balancing loss, float32 [2, B, E]: over the tokens of all layers, how
    many tokens each expert was sent, and the sum of its probabilities.

    All samples are computed at once, and if ranks have a part of the tokens each, their terms add up. transformers' own
    function would launch as many kernels for every sample.

    Args:
        router_logits: [R, E] for each layer, with the tokens of all samples.
        text_config: the language model's configuration.
        sample_R: int [R], the sample of each token.
        samples: B.
    """
    E = router_logits[0].shape[-1]
    chosen_BE = probs_BE = torch.zeros(samples, E, dtype=torch.float32, device=sample_R.device)
    for logits_RE in router_logits:
        probs_RE = logits_RE.softmax(dim=-1)
        top_RK = probs_RE.topk(text_config.num_experts_per_tok, dim=-1).indices
        ones_RE = torch.zeros_like(probs_RE, dtype=torch.float32).scatter(1, top_RK, 1.0)
        chosen_BE = chosen_BE.index_add(0, sample_R, ones_RE)
        probs_BE = probs_BE.index_add(0, sample_R, probs_RE.float())
    return torch.stack([chosen_BE, probs_BE])


def z_sums(router_logits: Sequence[torch.Tensor], *, sample_R: torch.Tensor, samples: int) -> torch.Tensor:
    """Compute the terms of each sample's z-loss (Zoph et al., 2022, ST-MoE, equation 5), float32 [B]: the mean over
    layers, summed over tokens. The arguments are those of `balance_sums`."""
    z_R = torch.stack([logits_RE.float().logsumexp(dim=-1).square() for logits_RE in router_logits]).mean(dim=0)
    return z_R.new_zeros(samples).index_add(0, sample_R, z_R)


ROUTER_SUMS = "sums of routers"
"""The name under which a piece of a group keeps its routers' sums: those of `balance_sums`, float32 [2, E], and of
`z_sums`, a scalar, over its tokens."""


def balance_of(sums_2BE: torch.Tensor, *, layers: int, tokens_B: torch.Tensor) -> torch.Tensor:
    """Compute the load-balancing loss of each sample, float32 [B]; 0 for a sample without tokens.

    Args:
        sums_2BE: the result of `balance_sums`.
        layers: number of layers that it covers.
        tokens_B: int [B], the tokens of each sample.
    """
    chosen_BE, probs_BE = sums_2BE / (layers * tokens_B.clamp(min=1))[:, None]
    return chosen_BE.shape[-1] * (chosen_BE * probs_BE).sum(dim=-1)


# ---------------------------------------------------------------------- statistics of a row's routers

Balance = Literal["row", "sample", "step"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RouterStatistics:
    """Statistics of the routers over the R real tokens of one row. E experts."""

    logits: tuple[torch.Tensor, ...]
    """[R, E] for each layer with experts, in row order. If ranks share the row, only this rank's tokens; of a piece of
    a group, the tokens that went through the model; of a group, empty."""
    top_k: int
    """Number of experts per token."""
    aux_loss: torch.Tensor | None
    """Scalar: the load-balancing loss, not yet multiplied by its coefficient; None: not requested, or the model
    computes none."""
    z_loss: torch.Tensor
    """Scalar: the mean over tokens and layers of logsumexp(router logits)², not yet multiplied by its coefficient."""
    added: torch.Tensor
    """Scalar: the sum of both losses times their coefficients, which is added to the row's loss."""
    choices: tuple[ExpertChoice, ...] = ()
    """How each layer chooses its experts; empty: by probability in all layers."""
    counts: torch.Tensor | None = None
    """`expert_counts` summed over the ranks that share the row, with "step" over those of all rows (all ranks must take
    part, so this is computed at once), or of a piece of a group, where a shared token counts once for each sample that
    has it; None: any other row."""

    def detached(self) -> RouterStatistics:
        """Return the same without gradients."""
        aux_loss = None if self.aux_loss is None else self.aux_loss.detach()
        return replace(self, aux_loss=aux_loss, z_loss=self.z_loss.detach(), added=self.added.detach())

    @property
    def expert_counts(self) -> torch.Tensor:
        """int64 [layers, E]: number of tokens sent to each expert. For ERNIE 4.5 VL [layers, 2 E], first the text
        experts, then the image experts. Computed at every access."""
        return self.counted() if self.counts is None else self.counts

    def counted(self, of_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return `expert_counts`. `of_tokens`: int64 [R], how often each token counts; None: once."""
        choices = self.choices or (ExpertChoice(),) * len(self.logits)
        layers = zip(self.logits, choices, strict=True)
        return torch.stack([choice.counts(logits_RE.detach(), self.top_k, of_tokens) for logits_RE, choice in layers])


@outside_graph
def router_statistics(
    logits: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    setup: RowSetup,
    *,
    per: Balance,
    with_balance: bool,
    z_loss_coef: float,
    rows: Parallel | None,
    adds_up: bool,
) -> tuple[torch.Tensor, RouterStatistics]:
    """Compute the statistics of one row. Return them behind the hidden states, [1, T, D], that go on to the head.

    Args:
        logits: [t, E] for each layer with experts, as transformers recorded them.
        hidden: the text model's output, [1, T, D].
        setup: the row, and a model with experts.
        per: "row", "sample" or "step"; see `StepConfig.aux_loss`.
        with_balance: whether to compute the load-balancing loss.
        z_loss_coef: factor by which the z-loss is added to the row's loss.
        rows: the ranks whose rows count together; None: this row alone.
        adds_up: whether the losses of these ranks add up to that of the step; otherwise, it is their mean.

    Raises:
        ConfigError: the recorded logits do not belong to the row's tokens, or have lost their gradient.
    """
    part, text_config = setup.part, setup.text_config
    _check_recorded(logits, part)
    if hidden.requires_grad and not any(logits_tE.requires_grad for logits_tE in logits):
        _check_not_cut_off(setup.model.text)
    with_balance, of_tokens = with_balance and has_balance(setup.model.family), None
    if part.piece is not None:
        hidden, aux_loss, z_loss, of_tokens = _losses_of_piece(logits, hidden, part, part.piece, text_config, per)
    else:
        logits = tuple(_of_real_tokens(part.for_each_sample(logits_tE), part) for logits_tE in logits)
        aux_loss, z_loss = _losses_of_row(logits, setup, per, rows)
    aux_loss = aux_loss if with_balance else None
    parts = [z_loss_coef * z_loss] if z_loss_coef else [torch.zeros_like(z_loss)]
    if aux_loss is not None:
        parts.append(coefficient(setup.model.core, text_config) * aux_loss)
    added = torch.stack(parts).sum()
    if rows is not None:  # each rank has the loss of all rows, but gradients only for its own tokens
        share, gradient = (1 / rows.data_ranks, 1) if adds_up else (1, rows.data_ranks)
        added = share * added.detach() + gradient * (added - added.detach())
    statistics = RouterStatistics(
        logits=logits,
        top_k=text_config.num_experts_per_tok,
        aux_loss=aux_loss,
        z_loss=z_loss,
        added=added,
        choices=_choices(setup),
    )
    if of_tokens is not None:
        statistics = replace(statistics, counts=statistics.counted(of_tokens))
    if part.ranks > 1 or rows is not None:
        counts = part.sum(statistics.expert_counts)
        statistics = replace(statistics, counts=counts if rows is None else rows.sum_over_rows(counts))
    return hidden, statistics


def _losses_of_piece(
    logits: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    part: RowPart,
    piece: PieceOfGroup,
    text_config: Any,
    per: Balance,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a piece's part of the group's losses: those of the samples that end in it, over all of their tokens.

    Returns:
        (hidden states, tied to the sums that are kept; load-balancing loss, per sample; z-loss; int64 [t]: number of
        samples that have each token).
    """
    assert part.tree is not None
    device, first = hidden.device, int(piece.kept_tokens > 0)
    node_t = part.segments.seq_idx(device).long()
    nodes, lengths = len(part.segments.lengths), part.tree.segments.lengths
    is_on_path_Bn = np.zeros((len(lengths), first + nodes), np.float32)
    for sample, leaf in enumerate(part.tree.leaves):
        is_on_path_Bn[sample, list(part.tree.path(leaf))] = 1
    is_on_path_Bn = to_device(is_on_path_Bn[:, first:], device)
    z_n = z_sums(logits, sample_R=node_t, samples=nodes)
    sums_2nE = balance_sums(logits, text_config, sample_R=node_t, samples=nodes)
    sums_2BE, z_B = torch.einsum("bn,xne->xbe", is_on_path_Bn, sums_2nE), is_on_path_Bn @ z_n
    for kept_2E, kept in piece.read(ROUTER_SUMS):
        sums_2BE, z_B = sums_2BE + kept_2E[:, None], z_B + kept
    hidden = piece.keep(ROUTER_SUMS, hidden, sums_2nE.sum(1), z_n.sum())
    tokens_B, ends_B = (to_device(np.asarray(x), device) for x in (lengths, piece.ends))
    aux_B = balance_of(sums_2BE, layers=len(logits), tokens_B=tokens_B) / piece.group_samples
    z_B = z_B / (tokens_B * piece.group_samples if per == "sample" else piece.group_tokens)
    of_tokens = is_on_path_Bn.sum(0).long().index_select(0, node_t)
    return hidden, aux_B.where(ends_B, 0).sum(), z_B.where(ends_B, 0).sum(), of_tokens


def _of_real_tokens(logits_tE: torch.Tensor, part: RowPart) -> torch.Tensor:
    """Remove padding. This copies, because FSDP2 warns about views."""
    count = part.real.stop - part.real.start
    return logits_tE if len(logits_tE) == count else logits_tE[:count].clone()


def _losses_of_row(
    logits: tuple[torch.Tensor, ...], setup: RowSetup, per: Balance, rows: Parallel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the load-balancing loss and the z-loss over real tokens. If they are computed per sample, they are means
    over the samples that have tokens; otherwise, the whole row counts as one sample."""
    segments, part, device = setup.row.segments, setup.part, logits[0].device
    lengths = segments.sample_lengths if per == "sample" else (segments.num_tokens,)
    sample_R = to_device(np.repeat(np.arange(len(lengths)), lengths)[part.real], device)
    of_samples: dict[str, Any] = {"sample_R": sample_R, "samples": len(lengths)}
    sums_2GE = part.sum(balance_sums(logits, setup.text_config, **of_samples))
    z_G = part.sum(z_sums(logits, **of_samples))
    tokens_G = to_device(np.asarray(lengths, np.int64), device)
    if rows is not None:
        sums_2GE, z_G, tokens_G = (rows.sum_over_rows(x) for x in (sums_2GE, z_G, tokens_G))
    counted = max(sum(n > 0 for n in lengths), 1)
    aux_G, z_G = balance_of(sums_2GE, layers=len(logits), tokens_B=tokens_G), z_G / tokens_G.clamp(min=1)
    return aux_G.sum() / counted, z_G.sum() / counted


def _choices(setup: RowSetup) -> tuple[ExpertChoice, ...]:
    """Return how each layer chooses its experts."""
    family, row, is_vision_R = setup.model.family, setup.row, None
    for types_1T in family.expert_types_of(row.input_ids, setup.config).values():
        real_R = row.segments.real_index(types_1T.device)[setup.part.real]
        is_piece = setup.part.piece is not None
        is_vision_R = (setup.part.cut(types_1T)[0] if is_piece else types_1T[0].index_select(0, real_R)) > 0
    parts, blocks = family.mechanisms["experts"], expert_blocks(setup.model)
    return tuple(choice_of(block, parts, setup.text_config, is_vision_R) for block in blocks)


def _check_recorded(logits: tuple[torch.Tensor, ...], part: RowPart) -> None:
    """Check that router logits were recorded for every token. A kernel that replaces a block may record none."""
    sizes = {len(logits_tE) for logits_tE in logits}
    if len(sizes) != 1 or not sizes <= {num_dispatched(part), part.segments.total}:
        raise ConfigError(
            f"routers saw {sorted(sizes)} tokens of a row of {part.segments.total}, so losses would be wrong: "
            "the forward of blocks of experts or routers was replaced (use_kernels does that); undo that, or leave "
            "output_router_logits and z_loss_coef out"
        )


def _check_not_cut_off(text: Any) -> None:
    """Refuse reentrant checkpointing: it runs layers under `no_grad`, so logits recorded inside have no gradient."""
    if any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in text.layers.children()):
        raise ConfigError(
            "the router logits have no gradient, so the routers' losses would teach them nothing: gradient "
            "checkpointing with use_reentrant=True does that (unmodified transformers says nothing); give "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or leave output_router_logits and z_loss_coef out'
        )


# ---------------------------------------------------------------------- expert choice
#
# How routers choose experts: by which scores each token picks its best ones. For statistics only.
#
#     probability    softmax of the logits
#     groups         softmax, among the experts of the best groups          DeepSeek-V2, section 2.2.2
#     bias           sigmoid plus a bias, among the best groups             DeepSeek-V3, section 2.1.2
#     modality       softmax plus a bias, among the experts for the token's type    ERNIE 4.5, section 2.2.1
#
# R tokens, E experts. ERNIE 4.5 VL has E text experts followed by E image experts.


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertChoice:
    """How one layer's router chooses experts; by default by probability."""

    groups: int = 1
    """Number of groups of experts, all of the same size."""
    top_groups: int = 1
    """Number of groups that a token's experts are chosen from: those with the best expert, or with a bias, those whose
    two best experts have the largest sum."""
    bias_E: torch.Tensor | None = None
    """float32 [E], or [2, E] for text and for images: its value in this step."""
    is_vision_R: torch.Tensor | None = None
    """bool [R]: True for tokens that are sent to image experts; None: all tokens choose among all experts."""

    def scores(self, logits_RE: torch.Tensor) -> torch.Tensor:
        """Return scores, float [R, E]: each token is sent to the experts with the highest ones; -inf for experts of
        other groups or of the other type. Probabilities are float32, as rounded logits would have other ties; sigmoids
        have the dtype of the logits, as in routers."""
        if self.is_vision_R is not None and self.bias_E is not None:
            scores_R2E = logits_RE.softmax(dim=-1, dtype=torch.float32)[:, None] + self.bias_E
            is_of_kind_R2 = torch.stack([~self.is_vision_R, self.is_vision_R], dim=-1)
            return scores_R2E.masked_fill(~is_of_kind_R2[..., None], float("-inf")).flatten(1)
        if self.bias_E is None:
            scores_RE = logits_RE.softmax(dim=-1, dtype=torch.float32)
        else:
            scores_RE = logits_RE.sigmoid() + self.bias_E
        if self.groups == 1:
            return scores_RE
        scores_RgE = scores_RE.unflatten(1, (self.groups, -1))
        best_Rg = scores_RgE.amax(-1) if self.bias_E is None else scores_RgE.topk(2, dim=-1).values.sum(-1)
        chosen_Rg = best_Rg.topk(self.top_groups, dim=-1).indices
        kept_Rg = torch.zeros_like(best_Rg, dtype=torch.bool).scatter(1, chosen_Rg, True)
        return scores_RgE.masked_fill(~kept_Rg[..., None], float("-inf")).flatten(1)

    def counts(self, logits_RE: torch.Tensor, top_k: int, of_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return int64 [E]: number of tokens sent to each expert; see `RouterStatistics.counted`."""
        scores_RE = self.scores(logits_RE)
        chosen_RK = scores_RE.topk(top_k, dim=-1).indices
        times_RK = torch.ones_like(chosen_RK) if of_tokens is None else of_tokens[:, None].expand_as(chosen_RK)
        counts_E = torch.zeros(scores_RE.shape[-1], dtype=torch.int64, device=chosen_RK.device)
        return counts_E.index_add(0, chosen_RK.flatten(), times_RK.flatten())


def choice_of(
    block: nn.Module, parts: Mapping[str, str], config: Any, is_vision_R: torch.Tensor | None
) -> ExpertChoice:
    """Determine from a layer's router how it chooses experts.

    Args:
        block: router and experts.
        parts: names of the family's parts: `router`, and `vision_router` if images have their own.
        config: the language model's configuration.
        is_vision_R: bool [R]: True for tokens that are sent to image experts; None: there are none.
    """
    routers: list[Any] = [block.get_submodule(parts[name]) for name in ("router", "vision_router") if name in parts]
    if is_vision_R is not None:
        biases = [_whole(router.moe_statics.e_score_correction_bias).flatten() for router in routers]
        return ExpertChoice(bias_E=torch.stack(biases).detach().clone(), is_vision_R=is_vision_R)
    if (bias_E := getattr(block, "expert_bias", None)) is not None:
        return ExpertChoice(bias_E=bias_E.detach().clone())
    for router in routers:
        if (bias_E := getattr(router, "e_score_correction_bias", None)) is not None:
            return ExpertChoice(bias_E=bias_E.detach().clone(), groups=config.n_group, top_groups=config.topk_group)
        if getattr(router, "topk_method", None) == "group_limited_greedy":
            return ExpertChoice(groups=config.n_group, top_groups=config.topk_group)
    return ExpertChoice()


def _whole(bias: Any) -> torch.Tensor:
    """Return the whole bias. If it is a parameter that FSDP2 shards, this is one all-gather."""
    return bias.full_tensor() if hasattr(bias, "full_tensor") else bias
