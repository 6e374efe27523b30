"""One line of the package each, broken: what it protects, and the tests of the short tier that must fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed line."""

    protects: str
    """The mechanism, in a few words: the mutant's name."""
    file: str
    """Inside the package."""
    line: str
    """Its text, or a part of it that occurs once in the file."""
    change: str
    """What takes its place."""
    tests: str
    """Arguments of pytest: files below tests/, and `-k` with an expression."""


def _of(room: str, *mutants: tuple[str, str, str, str, str]) -> tuple[Mutant, ...]:
    """(protects, file, line, change, tests) of the mutants of one room."""
    return tuple(
        Mutant(protects=protects, file=f"{room}/{file}", line=line, change=change, tests=tests)
        for protects, file, line, change, tests in mutants
    )


MUTANTS: tuple[Mutant, ...] = (
    *_of(
        "layout",
        (
            "padding is a segment of its own to kernels",
            "segments.py",
            "edges += [stop, *_pad_edges(stop, start + slot)]",
            "edges += [start + slot]",
            "layout/test_segments.py",
        ),
        (
            "slots are rounded up",
            "segments.py",
            "slots = tuple(round_up(n, rule.multiple) for n in lengths)",
            "slots = lengths",
            "layout/test_segments.py",
        ),
        (
            "real tokens lie where slots start",
            "segments.py",
            "return ranges(np.asarray(self.stride[:-1], np.int64), np.asarray(self.lengths, np.int64))",
            "return ranges(np.asarray(self.real[:-1], np.int64), np.asarray(self.lengths, np.int64))",
            "layout/test_pack.py layout/test_batches.py",
        ),
        (
            "positions of padding are 0",
            "segments.py",
            "return np.where(self._padding(), 0, ranges(0, np.asarray(self.slots_and_tail, np.int64)))",
            "return ranges(0, np.asarray(self.slots_and_tail, np.int64))",
            "layout/test_segments.py",
        ),
        (
            "nothing rolls over a boundary",
            "row.py",
            "firsts = np.maximum(starts[:-1], stops - depth)",
            "firsts = np.maximum(starts[:-1], stops - 1)",
            "layout/test_roll.py",
        ),
        (
            "a sample's first label is not learnt (rows with gaps)",
            "packing.py",
            "return shift_labels(self(labels, IGNORE), self._segments)",
            "return self(labels, IGNORE).roll(-1, -1)",
            "layout/test_pack.py",
        ),
        (
            "a sample's first label is not learnt (rows without gaps)",
            "packing.py",
            "pieces += [flat[..., first + ahead : first + n], no_target[..., :n]]",
            "pieces += [np.roll(flat, -ahead, -1)[..., first : first + n]]",
            "layout/test_pack.py",
        ),
        (
            "left padding is no part of a sample",
            "packing.py",
            "self._firsts = [row * width + offset for row, offset in enumerate(offsets)]",
            "self._firsts = [row * width for row, offset in enumerate(offsets)]",
            "layout/test_pack.py",
        ),
        (
            "labels on padding are refused",
            "packing.py",
            "        _check_labels(batch.labels, batch.attention_mask, spans)",
            "        pass",
            "layout/test_pack.py",
        ),
        (
            "the host's lengths are those of the mask",
            "packing.py",
            "agree = lengths_from_mask(batch.attention_mask) == spans",
            "agree = True",
            "layout/test_pack.py layout/test_batches.py",
        ),
        (
            "samples of a bucket keep their places",
            "buckets.py",
            "firsts[list(bucket.members)] = start",
            "firsts[list(bucket.members[::-1])] = start",
            "layout/test_buckets.py",
        ),
        (
            "zeros between segments are as many as a convolution reads",
            "buckets.py",
            "starts = accumulate((length + self.reach for length in self.lengths[:-1]), initial=0)",
            "starts = accumulate((length for length in self.lengths[:-1]), initial=0)",
            "layout/test_spaced.py",
        ),
    ),
    *_of(
        "families",
        (
            "what follows an image goes on behind its longer side",
            "media.py",
            "out[3, ends - 1] = np.maximum(rows, columns)",
            "out[3, ends - 1] = columns",
            "families/test_mrope.py",
        ),
        (
            "height comes before width",
            "media.py",
            "out[1], out[2] = np.divmod(within, columns[item])",
            "out[2], out[1] = np.divmod(within, columns[item])",
            "families/test_mrope.py",
        ),
        (
            "rotary positions restart in every sample",
            "media.py",
            "spatial_3T = before - before.index_select(0, start) + offsets_3T",
            "spatial_3T = before + offsets_3T",
            "families/test_vectors.py families/test_positions.py",
        ),
        (
            "frames lie as far apart as they are in time",
            "qwen.py",
            "return replace(videos, interval=rate * (np.trunc(times) if whole_seconds else times))",
            "return videos",
            "families/test_vectors.py families/test_positions.py",
        ),
        (
            "frames of a video do not see each other",
            "family.py",
            "return Segments.from_lengths([h * w for t, h, w in grids for _ in range(t)])",
            "return Segments.from_lengths([t * h * w for t, h, w in grids])",
            "families/test_vision_segments.py",
        ),
        (
            "a window at the edge is smaller",
            "family.py",
            "return [side] * whole + [rest] * bool(rest)",
            "return [side] * (whole + bool(rest))",
            "families/test_vision_segments.py",
        ),
        (
            "runs of placeholders are as long as their grids say",
            "media.py",
            "if len(lengths) != len(sizes) or (lengths != sizes).any():",
            "if len(lengths) != len(sizes):",
            "families/test_runs.py",
        ),
    ),
    *_of(
        "attention",
        (
            "text attention is causal",
            "backends.py",
            "is_causal=causal and 1 < queries == visible,",
            "is_causal=False,",
            "attention/test_backends.py",
        ),
        (
            "each segment attends to itself alone",
            "backends.py",
            "for start, stop in (*segments.spans, (segments.total, segments.total)):",
            "for start, stop in ((0, segments.total), (segments.total, segments.total)):",
            "attention/test_backends.py",
        ),
        (
            "the mask keeps segments apart",
            "backends.py",
            "mask_TT = (query_T[:, None] == key_T[None, :]) & real_T1 & real_1T",
            "mask_TT = real_T1 & real_1T",
            "attention/test_backends.py",
        ),
    ),
    *_of(
        "model",
        (
            "text attention is given the row's boundaries",
            "mechanisms/attention.py",
            "return row.part.attend(attend, q_TNH, k_TKH, v_TKH, segments)[None]",
            "return attend(q_TNH, k_TKH, v_TKH, type(segments).from_lengths([segments.total]))[None]",
            "model/test_equality_double.py",
        ),
        (
            "attention that is not reached is noticed",
            "mechanisms/attention.py",
            "if changed is not None and entry.calls < len(callers):",
            "if changed is not None and entry.calls < 0:",
            "model/test_attention.py",
        ),
        (
            "a disabled model has its own configuration again",
            "mechanisms/attention.py",
            "                module.config = plain_config(module)",
            "                pass",
            "model/test_contract_disable.py -k what_it_was",
        ),
        (
            "gated delta layers restart in every sample",
            "mechanisms/gated_delta.py",
            'return Buckets.cheapest(segments, call_cost=CALL_COST.get(device.type, CALL_COST["cuda"]))',
            "return Buckets.cheapest(type(segments).from_lengths([segments.total]), call_cost=0.0)",
            "model/test_delta.py -k any_length",
        ),
        (
            "biases that would fill the zeros are refused",
            "mechanisms/gated_delta.py",
            "        check_zeros(layer)",
            "        pass",
            "model/test_delta_fla.py -k bias",
        ),
        (
            "fla is refused where it computes wrongly",
            "mechanisms/gated_delta.py",
            "            check_fla(device, training=torch.is_grad_enabled())",
            "            pass",
            "model/test_delta_fla.py -k cpu",
        ),
        (
            "padding goes to no expert",
            "mechanisms/experts.py",
            'self._calls.current.real = None if row is None else row.entries["experts"]',
            "self._calls.current.real = None",
            "model/test_experts.py -k 'only_real_tokens or what_stands'",
        ),
        (
            "all real tokens go to experts",
            "mechanisms/experts.py",
            "    return segments.real_index(device)",
            "    return segments.real_index(device)[:-1]",
            "model/test_experts.py -k 'only_real_tokens or what_stands'",
        ),
        (
            "experts leave zeros on padding",
            "mechanisms/experts.py",
            "return output.new_zeros(1, call.width, output.shape[-1]).index_copy_(1, real, output)",
            "return output.new_ones(1, call.width, output.shape[-1]).index_copy_(1, real, output)",
            "probing/test_breakage.py -k 'healthy and qwen3_next'",
        ),
        (
            "router losses of other tokens are refused",
            "mechanisms/experts.py",
            "if sizes != [segments.num_tokens]:",
            "if sizes is None:",
            "model/test_balance.py",
        ),
        (
            "balance is a mean over layers",
            "mechanisms/experts.py",
            "chosen_BE, probs_BE = sums_2BE / (layers * tokens_B.clamp(min=1))[:, None]",
            "chosen_BE, probs_BE = sums_2BE / (tokens_B.clamp(min=1))[:, None]",
            "model/test_balance.py",
        ),
        (
            "router losses have their coefficient",
            "mechanisms/experts.py",
            "parts.append(coefficient(setup.model.core, text_config) * aux_loss)",
            "parts.append(aux_loss)",
            "model/test_balance.py",
        ),
        (
            "n-grams stay in their sample",
            "mechanisms/per_sample.py",
            "return run_on_row(look_up, input_ids.row, hidden_states, input_ids.tensor_1T)",
            "return look_up(hidden_states, input_ids.tensor_1T)",
            "model/test_qwen4_exp.py -k packed_equals_alone",
        ),
        (
            "sparse attention stays in its sample",
            "mechanisms/per_sample.py",
            "return run_on_row(attend, row, hidden_states, *position_embeddings), None",
            "return attend(hidden_states, *position_embeddings), None",
            "model/test_qwen4_exp.py -k packed_equals_alone",
        ),
        (
            "images do not see each other",
            "mechanisms/vision.py",
            "return derived if derived is not None else",
            "return Segments.from_lengths([num_patches]) if num_patches else",
            "model/test_equality_double.py",
        ),
        (
            "images of one shape and other boundaries are told apart",
            "mechanisms/vision.py",
            "self._by_shape[shape] = None",
            "pass",
            "model/test_attention.py",
        ),
        (
            "the loss is a mean over targets",
            "engine.py",
            "loss = loss_sum / items if targets or counted else loss_sum",
            "loss = loss_sum / row.segments.total if targets or counted else loss_sum",
            "model/test_result.py model/test_forward.py",
        ),
        (
            "the targets of a whole step divide the loss",
            "engine.py",
            "items = _items(num_items_in_batch, targets)",
            "items = targets",
            "model/test_result.py model/test_forward.py",
        ),
        (
            "the host's count of targets is compared",
            "engine.py",
            "require(labelled.sum() == num_targets, _MISCOUNTED.format(num_targets), LayoutError)",
            "pass",
            "model/test_forward.py model/test_head.py",
        ),
        (
            "the last chunk of the head is learnt",
            "engine.py",
            "for hidden, targets in pieces\n",
            "for hidden, targets in pieces[:-1]\n",
            "model/test_head.py",
        ),
        (
            "results have the places of the batch",
            "result.py",
            "        return unpack(row, self.segments, width=self.width, offsets=self.offsets)",
            "        return unpack(row, self.segments, width=self.width)",
            "model/test_equality.py -k results_come_back",
        ),
        (
            "no cache is filled",
            "engine.py",
            '"use_cache": False,',
            '"use_cache": True,',
            "probing/test_breakage.py -k 'healthy and qwen3_vl'",
        ),
        (
            "positions of images reach the model",
            "engine.py",
            '"position_ids": part.cut(family.rotary_ids(positions)),',
            '"position_ids": part.cut(family.rotary_ids(positions * 0)),',
            "model/test_equality_double.py",
        ),
        (
            "pixels are as many as grids say",
            "engine.py",
            "    if expected != count:",
            "    if expected is None:",
            "model/test_forward.py model/test_media_order.py",
        ),
        (
            "positions that a caller gives are compared",
            "engine.py",
            "check_positions(row.position_ids, positions, family, row.segments, restarts=rope_segments)",
            "pass",
            "model/test_positions_given.py",
        ),
        (
            "labels of first tokens that were counted are refused",
            "forward.py",
            "        (first == IGNORE).all(),",
            "        (first == first).all(),",
            "trainer/test_loss.py model/test_forward.py",
        ),
        (
            "boundaries as positions that restart are refused",
            "plain.py",
            "goes_back = (first[..., 1:] < first[..., :-1]).any()",
            "goes_back = (first[..., 1:] != first[..., 1:]).any()",
            "model/test_forward.py model/test_positions_given.py",
        ),
    ),
    *_of(
        "context_parallel",
        (
            "a mirrored cut balances work",
            "partition.py",
            "mirrors_G2 = starts_G[:, None] + chunks_G[:, None] * [rank, 2 * self.ranks - 1 - rank]",
            "mirrors_G2 = starts_G[:, None] + chunks_G[:, None] * [rank, self.ranks + rank]",
            "context_parallel/test_partition.py",
        ),
        (
            "heads find their keys on another rank",
            "attention.py",
            "return [head for heads in (distinct if even else read) for head in heads]",
            "return [head for heads in distinct for head in heads]",
            "context_parallel/test_ulysses.py",
        ),
        (
            "things arrive in the order of ranks",
            "collectives.py",
            'return arriving[np.argsort(self.source[arriving], kind="stable")]',
            "return arriving[::-1]",
            "context_parallel/test_vision.py megatron/test_halo.py",
        ),
        (
            "gradients of gathered keys are summed",
            "collectives.py",
            "return parts.unflatten(0, (self.size, -1)).sum(0)",
            "return parts.unflatten(0, (self.size, -1))[0]",
            "context_parallel/test_context.py -k compute_what_one",
        ),
    ),
    *_of(
        "plan",
        (
            "no row is above its capacity",
            "exact_fill.py",
            "within = (2 << room) - 1",
            "within = (4 << room) - 1",
            "plan/test_exact_fill.py",
        ),
        (
            "ranks get equal work",
            "balance.py",
            "for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]",
            "for (a, mine), (b, theirs) in zip(one, other, strict=True)]",
            "plan/test_balance.py",
        ),
        (
            "worst fit looks for the emptiest bin anew after each sample",
            "algorithms.py",
            "each = 1 if found and one_a_visit else room // length",
            "each = room // length",
            "plan/test_placing.py plan/test_plan_bins.py",
        ),
    ),
    *_of(
        "loading",
        (
            "a state of other rows is refused",
            "sampler.py",
            'if state["of"] != self._identity:',
            'if state["of"] is None:',
            "loading/test_sampler.py",
        ),
        (
            "an epoch after a resumed one is whole",
            "sampler.py",
            "start, self._start = self._start, 0",
            "start = self._start",
            "loading/test_sampler.py",
        ),
        (
            "a damaged state is refused",
            "state.py",
            "if SEAL in state and state[SEAL] != seal:",
            "if seal is None:",
            "loading/test_states.py loading/test_fuzz_states.py",
        ),
    ),
    *_of(
        "collate",
        (
            "padding has no labels",
            "assemble.py",
            "labels=batch([s.labels for s in samples], IGNORE),",
            "labels=batch([s.labels for s in samples], 0),",
            "collate/test_assemble.py",
        ),
        (
            "placeholders and pixels agree",
            "encoded.py",
            "    if lengths == needed:",
            "    if len(lengths) == len(needed):",
            "collate/test_checks.py",
        ),
        (
            "ids above the vocabulary are refused",
            "encoded.py",
            "if low < 0 or high >= metadata.vocab_size:",
            "if low < 0:",
            "collate/test_checks.py",
        ),
        (
            "samples without targets are refused",
            "encoded.py",
            "    if sample.num_targets == 0:",
            "    if sample.num_targets < 0:",
            "collate/test_checks.py",
        ),
        (
            "bad samples in a row are counted from the last good one",
            "skipped.py",
            'counts["consecutive"] = 0',
            "pass",
            "collate/test_skipped.py",
        ),
    ),
    *_of(
        "store",
        (
            "a manifest that was changed is refused",
            "manifest.py",
            "if json.loads(json.dumps(manifest.to_json())) != content:",
            "if manifest is None:",
            "store/test_manifest.py",
        ),
        (
            "a file of rows that was cut is refused",
            "manifest.py",
            "if size != shard.bytes:",
            "if size is None:",
            "store/test_lost_files.py store/test_read.py",
        ),
        (
            "a file of rows that was changed is refused",
            "manifest.py",
            "if verify and sha256_of(path) != shard.sha256:",
            "if verify is None:",
            "store/test_read.py store/test_lost_files.py",
        ),
        (
            "a plan of other rows is refused",
            "manifest.py",
            "if plan.digest != manifest.plan:",
            "if plan is None:",
            "store/test_lost_files.py store/test_manifest.py store/test_read.py",
        ),
        (
            "samples that were changed since are noticed",
            "write.py",
            "check_unchanged(self.dataset, self.collator, self.folder.out, shards, self.in_order, compared)",
            "pass",
            "store/test_unchanged.py",
        ),
    ),
    *_of(
        "trainer",
        (
            "the loss of a set is a mean over targets",
            "metrics.py",
            "token_loss = (losses * targets).sum() / max(num_targets, 1.0)",
            "token_loss = losses.mean()",
            "trainer/test_metrics.py",
        ),
        (
            "samples without targets have no say in the mean over samples",
            "metrics.py",
            '"sample_loss": float(losses[learnt].mean())',
            '"sample_loss": float(losses.mean())',
            "trainer/test_metrics.py",
        ),
        (
            "a collator that hides which samples it left out is refused",
            "evaluation.py",
            "if len(result.sample_targets) != len(row):",
            "if result.sample_targets is None:",
            "trainer/test_evaluate.py",
        ),
    ),
    Mutant(
        protects="a file that is written has its name only when it is whole",
        file="files.py",
        line="            temporary.replace(path)",
        change="            path.write_bytes(temporary.read_bytes()[:-1])",
        tests="test_files.py",
    ),
)
