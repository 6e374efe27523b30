"""Faults of the maths that must never break, each as a patch of one named function.

A patch is a function of the original and its arguments. What it returns takes the place of the original's result:

    @breaks("vlmpack.layout.segments.round_up", tests="layout")
    def slots_are_not_rounded_up(original, number, multiple):
        return number

`python tests/mutants` applies one at a time, and the tests that are named have to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch


@final
@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault."""

    name: str
    target: str
    """The function, method or property: module, class and name with dots between them."""
    patch: Callable[..., Any]
    """Of the original and its arguments."""
    tests: str
    """Files and folders below tests/, and perhaps `-k` with an expression: arguments of pytest."""


MUTANTS: list[Mutant] = []

EQUAL = "oracle/test_packed_equals_alone.py"
ROWS = "oracle/test_rows.py"
TREE = "model/test_prefix_tree.py"
GROUPS = "model/test_groups.py -k 'alone and (qwen3 or gemma3)'"
TOWER = "families/test_vision_segments.py"
"""Where boundaries on the host are not those that the tower asks for, the tower's are read from the device."""


def breaks(target: str, *, tests: str = EQUAL) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a patch under the name of its function."""

    def register(patch: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{patch.__name__.replace('_', ' ')} ({target.rpartition('.')[2]})"
        MUTANTS.append(Mutant(name=name, target=target, patch=patch, tests=tests))
        return patch

    return register


# ---------------------------------------------------------------------- boundaries of a row


@breaks("vlmpack.layout.segments.round_up", tests="layout")
def slots_are_not_rounded_up(original, number, multiple):
    return number


@breaks("vlmpack.layout.row._kept", tests="layout")
def padding_stays_and_tokens_are_left_out(original, row, segments):
    return original(row, segments)[::-1].copy()


@breaks("vlmpack.layout.segments.Segments._position", tests=EQUAL)
def positions_run_on_over_samples(original, segments):
    return np.arange(segments.total)


@breaks("vlmpack.layout.segments.Segments._real_index", tests="layout")
def real_tokens_lie_one_after_the_other_whatever_the_slots(original, segments):
    return np.arange(segments.num_tokens)


@breaks("vlmpack.layout.segments.Segments._padding", tests="layout")
def padding_is_real(original, segments):
    return np.zeros(segments.total, bool)


@breaks("vlmpack.layout.batch.lengths_from_mask", tests="oracle/test_calls.py layout")
def left_padding_is_taken_for_the_sample(original, mask):
    return replace(original(mask), offsets=(0,) * len(mask))


# ---------------------------------------------------------------------- targets and losses


@breaks("vlmpack.layout.row._without_successor", tests="layout oracle/test_calls.py")
def the_last_token_of_a_sample_predicts_the_next_sample(original, segments, depth):
    return original(segments, depth)[-1:]


@breaks("vlmpack.layout.row._Take._joined", tests="layout oracle/test_calls.py")
def labels_of_a_packed_batch_are_not_shifted(original, take, tensor, fill, *, ahead=0):
    return original(take, tensor, fill, ahead=0)


@breaks("vlmpack.model.engine.divisor", tests="oracle/test_calls.py oracle/test_trainers.py")
def rows_of_a_step_are_averaged_each_by_itself(original, items, targets):
    return targets


@breaks("vlmpack.model.head.scores_by_chunk", tests="model/test_head.py")
def targets_after_the_first_chunk_are_not_trained_on(original, hidden, targets, head, *, chunk, scoring):
    scores = original(hidden, targets, head, chunk=chunk, scoring=scoring)
    return torch.cat([scores[:chunk], scores[chunk:].detach()])


@breaks("vlmpack.model.result.sums_by_sample")
def losses_of_samples_are_counted_one_sample_late(original, losses, index, segments):
    sums, counts = original(losses, index, segments)
    return sums.roll(1), counts


@breaks("vlmpack.model.result.weighted", tests="trainer/test_loss.py")
def a_target_has_the_weight_of_the_token_that_predicts_it(original, losses, row, index):
    weights = None if row.shift_weights is None else row.shift_weights.roll(1, -1)
    return original(losses, replace(row, shift_weights=weights), index)


@breaks("vlmpack.trainer.loss._factors", tests="trainer/test_loss.py")
def samples_count_by_their_targets_in_every_loss(original, counts, loss):
    return original(counts, "token")


# ---------------------------------------------------------------------- attention masks


@breaks("vlmpack.attention.backends.SdpaSegments.attend")
def a_sample_attends_to_those_before_it(original, backend, q, k, v, segments, keys, softmax):
    whole = type(segments).from_lengths([segments.total])
    return original(backend, q, k, v, whole, type(segments).from_lengths([keys.total]), softmax)


@breaks("vlmpack.attention.backends._by_length", tests="attention")
def segments_of_a_length_are_computed_in_another_order(original, *row, **settings):
    calls = original(*row, **settings)
    return replace(calls, results=calls.results[::-1].copy())


@breaks("vlmpack.attention.patterns.visible_keys", tests="attention")
def the_dense_mask_knows_no_samples(original, segments, keys, device, **settings):
    return torch.ones(segments.total, keys.total, dtype=torch.bool, device=device).tril(keys.total - segments.total)


@breaks("vlmpack.attention.patterns.last_queries", tests=f"attention {EQUAL}")
def a_token_attends_to_later_ones(original, queries, keys, device, **limits):
    return original(queries, keys, device, **{**limits, "causal": False})


@breaks("vlmpack.attention.patterns.last_queries", tests=f"{EQUAL} attention")
def a_window_is_one_token_too_wide(original, queries, keys, device, *, window=None, **limits):
    return original(queries, keys, device, window=None if window is None else window + 1, **limits)


@breaks("vlmpack.attention.patterns.with_sinks", tests="attention")
def every_query_ignores_its_sink(original, q, k, v, mask, *, sinks, scale):
    return original(q, k, v, mask, sinks=torch.full_like(sinks, -1e4), scale=scale)


@breaks("vlmpack.attention.spans.Spans.cut", tests=EQUAL)
def tokens_of_an_image_do_not_attend_to_later_ones(original, spans, segments, keys, window):
    return ()


@breaks("vlmpack.families.spans.ImageSpans.of_row", tests="families model -k span")
def an_image_is_one_token_longer_than_its_span(original, spans, row, table):
    return tuple((start, stop - 1) for start, stop in original(spans, row, table))


@breaks("vlmpack.model.mechanisms.attention.with_chunk", tests="model -k chunk")
def chunked_layers_attend_to_the_whole_sample(original, masks, pattern, layer):
    return pattern


# ---------------------------------------------------------------------- positions


@breaks("vlmpack.families.family.row_positions")
def image_positions_run_on_over_samples(original, places, offsets, restarts):
    return original(places, offsets, restarts) + restarts.seq_idx().numpy()


@breaks("vlmpack.families.family.row_positions")
def height_and_width_are_exchanged(original, places, offsets, restarts):
    return original(places, offsets, restarts)[[0, 1, 3, 2]]


@breaks("vlmpack.families.videos.timed_run", tests="families model -k 'position or second or video'")
def frames_of_a_video_are_at_one_time(original, grid, seconds, vision, **settings):
    return replace(original(grid, seconds, vision, **settings), interval=0.0)


@breaks("vlmpack.model.mechanisms.llama4.QueryScale.prepare", tests="model -k 'scale or llama4'")
def queries_are_scaled_by_their_place_in_the_row(original, mechanism, setup):
    return torch.zeros_like(original(mechanism, setup))


@breaks("vlmpack.model.engine.rope_segments", tests="model -k rope")
def restarts_of_positions_that_a_caller_asks_for_are_ignored(original, boundaries, segments):
    return None


# ---------------------------------------------------------------------- recurrent states and convolutions


@breaks("vlmpack.model.mechanisms.gated_delta.packed_gated_delta")
def a_recurrent_state_goes_on_into_the_next_sample(original, plain_forward, layer, hidden, row, kwargs):
    return plain_forward(layer, hidden, **kwargs)


@breaks("vlmpack.model.mechanisms.short_conv.packed_short_conv", tests="model/test_short_conv.py")
def a_convolution_reads_the_sample_before(original, layer, hidden, row, module):
    return layer(hidden)


@breaks("vlmpack.model.mechanisms.per_sample.run_per_sample", tests="model/test_qwen4_exp.py")
def layers_that_know_no_boundaries_get_the_whole_row(original, layer, row, module, cache, hidden, *beside):
    return layer(None, hidden, *beside)


@breaks("vlmpack.model.mechanisms.recurrent_rows.LayerState.get_recurrent_state", tests=TREE)
def a_branch_starts_from_no_state(original, state, layer, **settings):
    return None


@breaks("vlmpack.model.mechanisms.recurrent_rows.LayerState.update_conv_state", tests=TREE)
def a_branch_reads_zeros_before_its_first_token(original, state, tokens, layer, **settings):
    state.tail = None
    return original(state, tokens, layer, **settings)


# ---------------------------------------------------------------------- vision and audio


@breaks("vlmpack.families.family.frame_segments", tests=TOWER)
@breaks("vlmpack.families.omni.inference_windows", tests="model families -k audio")
def images_or_audios_attend_to_each_other(original, *media):
    whole = original(*media)
    return type(whole).from_lengths([whole.total])


@breaks("vlmpack.families.family.window_segments", tests=TOWER)
def windows_of_an_image_are_one(original, grids, **rule):
    return type(original(grids, **rule)).from_lengths([t * h * w for t, h, w in grids])


@breaks("vlmpack.model.mechanisms.vision.VisionRow.find")
def the_tower_is_given_the_boundaries_of_one_image(original, row, cu_seqlens, num_patches):
    found = original(row, cu_seqlens, num_patches)
    return type(found).from_lengths([num_patches])


@breaks("vlmpack.layout.media._placed", tests="model families -k 'placeholder or runs or another'")
def placeholders_that_fit_no_image_pass(original, *found, by_number):
    return original(*found, by_number=True)


# ---------------------------------------------------------------------- routers


@breaks("vlmpack.model.mechanisms.experts.coefficient", tests="oracle/test_calls.py")
def the_load_balancing_loss_has_no_coefficient(original, model, text_config):
    return 1.0


@breaks("vlmpack.model.mechanisms.experts.balance_sums", tests="model/test_balance.py")
def a_sample_counts_its_neighbors_tokens(original, logits, config, *, sample_R, samples):
    return original(logits, config, sample_R=(sample_R + 1) % samples, samples=samples)


@breaks("vlmpack.model.row.RowPart.for_each_sample", tests="model/test_prefix_tree.py -k routers")
def a_shared_token_is_routed_once_for_all_its_samples(original, part, tokens):
    return tokens


# ---------------------------------------------------------------------- prefix trees


@breaks("vlmpack.layout.prefix_tree.PrefixTree._predecessor", tests=EQUAL)
def a_branch_is_predicted_by_the_token_before_it_in_the_row(original, tree):
    return np.arange(tree.num_tokens) - 1


@breaks("vlmpack.layout.prefix_tree.PrefixTree._source", tests="layout")
def shared_tokens_are_taken_from_the_last_sample(original, tree):
    source = np.empty(tree.num_tokens, np.int64)
    source[tree._place] = np.arange(tree.segments.total)
    return source


@breaks("vlmpack.model.row.RowPart.gather_targets", tests=EQUAL)
def a_shared_target_counts_once(original, part, scores, targets):
    counted = original(part, scores, targets)
    if targets.entries is None:
        return counted
    first = torch.zeros_like(counted).index_fill(0, torch.unique(targets.entries), 1)
    return counted * first


@breaks("vlmpack.model.pieces.KeptPrefix.keep", tests=GROUPS)
def gradients_of_a_kept_prefix_are_lost(original, prefix, name, out, *tensors):
    original(prefix, name, out, *tensors)
    return out


@breaks("vlmpack.model.row.RowPart.with_predecessor", tests=GROUPS)
def a_branch_behind_a_kept_prefix_is_predicted_by_itself(original, part, hidden):
    return torch.cat([hidden[:, :1], hidden], 1) if part.kept else original(part, hidden)


@breaks("vlmpack.layout.prefix_tree.compressed_trie", tests=f"layout {ROWS} {EQUAL}")
def short_beginnings_are_not_shared(original, samples, groups, min_shared):
    return original(samples, groups, 10**6)


@breaks("vlmpack.layout.media.content_numbers", tests=f"layout {EQUAL} collate -k 'prefix or shared or share'")
def different_images_are_taken_for_one(original, blocks):
    return [0] * len(blocks)


@breaks("vlmpack.model.row._added_up", tests="model/test_path_attention.py")
def gradients_of_shared_keys_are_those_of_one_branch(original, gradients, index, rows):
    return gradients.new_zeros(rows, *gradients.shape[1:]).index_copy(0, index, gradients)


# ---------------------------------------------------------------------- packing, unpacking, labels


@breaks("vlmpack.layout.row._batch_index", tests="oracle/test_calls.py layout")
def unpacked_tokens_lie_in_the_first_columns(original, segments, offsets, *, width, device):
    return original(segments, (), width=width, device=device)


@breaks("vlmpack.collate.encoded.assistant_spans", tests="oracle/test_collate.py")
def the_header_of_an_answer_is_trained_on(original, ids, metadata):
    return [(max(start - 1, 0), stop) for start, stop in original(ids, metadata)]


@breaks("vlmpack.collate.encoded.assistant_spans", tests="oracle/test_collate.py")
def the_end_of_an_answer_is_not_trained_on(original, ids, metadata):
    return [(start, stop - 1) for start, stop in original(ids, metadata)]


@breaks("vlmpack.collate.encoded.mask_media", tests="oracle/test_collate.py")
def image_tokens_are_trained_on(original, labels, ids, metadata):
    return labels


# ---------------------------------------------------------------------- planning


@breaks("vlmpack.plan.exact_fill.best_subset", tests=f"plan {ROWS}")
def a_row_is_fuller_than_its_capacity(original, lengths, room):
    lengths = list(lengths)
    return original(lengths, room) or list(range(len(lengths)))[:1]


@breaks("vlmpack.plan.prefix_groups.PrefixGroups.added", tests=f"plan {ROWS}")
def a_prefix_counts_for_every_sample(original, groups, values):
    return np.zeros_like(original(groups, values))


@breaks("vlmpack.plan.balance.karmarkar_karp", tests="plan")
def one_rank_gets_the_longest_rows(original, rows, costs, ranks):
    return sorted(rows, key=lambda row: -costs[row])


@breaks("vlmpack.loading.sampler.PackedBatchSampler._order", tests=f"loading {ROWS}")
def every_rank_gets_the_rows_of_the_first(original, sampler, schedule):
    rank, sampler.rank = sampler.rank, 0
    try:
        return original(sampler, schedule)
    finally:
        sampler.rank = rank


# ---------------------------------------------------------------------- rows over several ranks, evaluation


@breaks("vlmpack.context_parallel.attention.kv_heads", tests="context_parallel")
def heads_use_the_keys_of_the_first_head(original, num_heads, num_kv_heads, ranks):
    return [0] * len(original(num_heads, num_kv_heads, ranks))


@breaks("vlmpack.context_parallel.vision.StepMedia.send_features", tests="context_parallel/test_vision.py")
def features_go_to_the_next_rank(original, step, call=0):
    transfers = original(step, call)
    return replace(transfers, target=(transfers.target + 1) % transfers.ranks)


@breaks("vlmpack.trainer.evaluation.losses_of_set", tests="oracle/test_trainers.py trainer/test_metrics.py")
def the_loss_of_an_evaluation_set_is_a_mean_over_samples(original, losses, targets):
    return original(losses, np.minimum(targets, 1))
