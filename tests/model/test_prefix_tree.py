"""Rows with a prefix tree: every sample is what it is alone in plain transformers, and shared tokens are computed once.

Families x trees, each compared with every sample on its own through the untouched model; work is counted as it happens.
Below it: other ways to hand rows in, what comes out in the coordinates of the row, and what each mechanism is worth.
"""

import functools
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import one_of_each, slow
from equality import adapted, alone_through, check_step, checkpointed, gradients, limits_of
from host_syncs import own_lines, recorded_syncs
from moe import block_of
from torch._dynamo.utils import counters
from trees import DEEP, STRANGER, VIDEOS, read_media_of, rollouts, samples_of, shared

from vlmpack.attention.patterns import LayerMask
from vlmpack.families.media import media_reader
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import unshare
from vlmpack.model import PackedStep, StepConfig, compile_layers, disable_packing, enable_packing
from vlmpack.model.mechanisms import attention
from vlmpack.testing import tiny_model

TREES = {
    "deep": (DEEP, STRANGER),
    "videos": (VIDEOS, STRANGER),
    "rollouts": (rollouts(5, 1, 9, 1, 5, 12, 3, 8),),
    "two prompts": (rollouts(3, 6), rollouts(1, 7, 2, images=2)),
}
MASKED = 0, 4, 9
"""Tokens at the start of each sample that are not learnt, in turn: some samples learn what others mask."""
SEEDS = {"gemma4": 1, "qwen4_exp": 2}
"""With seed 0, plain transformers' own gradients are up to 3.8e-5 off: those of float64, or of a padded batch."""
few = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_vl", "gemma3", "lfm2_vl", "gpt_oss")])


def fresh(family, **sizes):
    """A tiny model with more layers than there are deepstack features, so that all get gradients."""
    return tiny_model(family, seed=3, **{"layers": 3, "vision_depth": 1, **sizes})


def drawn(family, roots):
    return samples_of(fresh(family).config, *roots, masked=MASKED, seed=SEEDS.get(family, 0))


@functools.cache
def truth(family, name):
    return alone_through(fresh(family), drawn(family, TREES[name]))


@contextmanager
def counted(model):
    """Yields what layers are given, as it happens: attended pairs of text layers, and widths of hidden states."""
    seen = {"pairs": [], "widths": set(), "patches": 0}
    choose = attention.choose

    def chosen(call, name, **more):
        backend = choose(call, name, **more)

        def attend(q, k, v, segments, *, causal, keys=None, **settings):
            if causal:
                pattern = settings["pattern"]
                first_key = LayerMask(window=pattern.window, chunk=pattern.chunk).first_key
                spans = zip(segments.lengths, (keys or segments).lengths, strict=True)
                further = 0 if pattern.spans is None else pattern.spans.further_pairs(pattern.window)
                causal_pairs = sum(place + 1 - first_key(place) for n, m in spans for place in range(m - n, m))
                seen["pairs"].append(causal_pairs + further)
                seen["widths"].add(len(q))
            return backend(q, k, v, segments, causal=causal, keys=keys, **settings)

        return attend

    def patches(module, args, kwargs):
        pixels = args[0] if args else next(iter(kwargs.values()))
        seen["patches"] += pixels.shape[1] if pixels.ndim == 5 else len(pixels)  # of a batch of one row

    tower = FAMILIES[model.config.model_type].vision_tower(model)
    hooks = [] if tower is None else [tower.register_forward_pre_hook(patches, with_kwargs=True)]
    with mock.patch.object(attention, "choose", chosen):
        yield seen
    for hook in hooks:
        hook.remove()


def check_row(family, name, *, model=None, config=None):
    """A step on the row of a tree against its samples alone."""
    alone, model = truth(family, name), model or fresh(family)
    result = PackedStep(model, config)(row := shared(alone.samples), logits=True)
    check_step(alone, model, result, limits_of(family))
    return row, result


@pytest.mark.parametrize("family", one_of_each(always=["qwen4_exp"]))
def test_every_sample_is_what_it_is_alone_and_shared_tokens_are_computed_once(family):
    check_tree(family, "deep")


@pytest.mark.parametrize("name", [name for name in TREES if name != "deep"])
@pytest.mark.parametrize("family", slow("qwen3_vl", "qwen3_5_moe", "qwen4_exp"))
def test_so_it_is_with_other_trees(family, name):
    check_tree(family, name)


def check_tree(family, name):
    model = fresh(family)
    with counted(model) as seen:
        row, result = check_row(family, name, model=model)
    tree, work = row.tree, result.work
    assert (work.real_tokens, work.physical_tokens) == (row.segments.num_tokens, tree.num_tokens)
    assert tree.num_tokens < row.segments.num_tokens
    descriptor = FAMILIES[family]
    assert work.vision_patches == seen["patches"] or not descriptor.has_grids
    if name == "deep" and descriptor.has_vision:
        assert work.vision_patches < unshared_patches(row, descriptor, model.config)
    if name == "deep" and descriptor.has_audio:
        assert len(row.media.audio_mask) < len(row.known_metadata.media.audios)
        assert work.audio_frames == row.media.audio_mask.sum()
    if not FAMILIES[family].has("per_sample"):
        assert {*seen["pairs"]} == {work.attended_pairs, work.window_pairs or work.attended_pairs}
        all_local = {*seen["pairs"]} == {work.window_pairs}
        assert work.attended_pairs == tree.attended_pairs or descriptor.bidirectional or all_local
        assert seen["widths"] == {tree.num_tokens}
    if FAMILIES[family].has("gated_delta"):
        assert tree.num_tokens <= work.delta_tokens <= 1.25 * tree.num_tokens


def unshared_patches(row, family, config):
    media = unshare(row, read_media=media_reader(family, config)).media
    if not family.has_grids:
        return family.tile_patches(media, config)
    return sum(len(x) for x in (media.pixel_values, media.pixel_values_videos) if x is not None)


# ---------------------------------------------------------------------- circumstances


CIRCUMSTANCES = {
    "checkpointing": checkpointed,
    "reentrant checkpointing": functools.partial(checkpointed, reentrant=True),
    "LoRA": adapted,
    "LoRA, checkpointing": lambda model: checkpointed(adapted(model)),
}


@pytest.mark.parametrize("name", ["checkpointing", "LoRA", *slow("reentrant checkpointing", "LoRA, checkpointing")])
@few
def test_in_every_circumstance_of_training(family, name):
    prepare, samples = CIRCUMSTANCES[name], drawn(family, TREES["deep"])
    alone, model = alone_through(prepare(fresh(family)), samples), prepare(fresh(family))
    check_step(alone, model, PackedStep(model)(shared(samples), logits=True), limits_of(family))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
def test_compiled_layers_take_a_tree():
    check_row("qwen3_5", "rollouts", model=compile_layers(fresh("qwen3_5"), backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.parametrize("backend", ["sdpa_segments", "eager_mask"])
@few
def test_by_every_back_end_of_this_machine(family, backend):
    check_row(family, "deep", config=StepConfig(attention=backend))


# ---------------------------------------------------------------------- what comes out


def test_every_result_is_in_the_coordinates_of_the_row():
    samples, model = drawn("qwen3_vl", TREES["deep"]), fresh("qwen3_vl").eval()
    row = shared(samples)
    enable_packing(model)
    shared_in, plain = (
        model(**x.to_hf(), output_hidden_states=True, output_logits=True, num_items_in_batch=7)
        for x in (row, unshare(row))
    )
    step = PackedStep(model)
    ours, expected = (step(x, last_hidden=True, entropy=True, temperature=0.7) for x in (row, unshare(row)))
    assert f"{row.segments.num_tokens} tokens in a prefix tree of {row.tree.num_tokens}," in repr(ours)
    pairs = [
        (shared_in.logits, plain.logits),
        (shared_in.loss, plain.loss),
        (shared_in.sample_losses, plain.sample_losses),
        *zip(shared_in.hidden_states, plain.hidden_states, strict=True),
        (ours.last_hidden, expected.last_hidden),
        (ours.logprobs, expected.logprobs),
        (ours.target_logprobs, expected.target_logprobs),
        (ours.entropies, expected.entropies),
    ]
    for actual, wanted in pairs:
        assert actual.shape == wanted.shape
        assert torch.allclose(actual, wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(ours.target_index, expected.target_index)
    assert torch.equal(ours.sample_targets, expected.sample_targets)


def test_each_sample_weighs_a_shared_target_as_it_likes():
    """Advantages of opposite sign for one prompt: the gradient is that of every sample alone, times its own weight."""
    samples = samples_of(fresh("qwen3").config, rollouts(4, 6, 3, images=0))
    weights = torch.tensor([1.0, -2.0, 0.25])
    expected, model = fresh("qwen3"), fresh("qwen3")
    for weight, sample in zip(weights, samples, strict=True):
        logits = expected(sample["input_ids"][None], use_cache=False).logits[0, :-1].log_softmax(-1)
        (weight * logits.gather(1, sample["labels"][1:, None]).sum()).backward()
    result = PackedStep(model)(shared(samples))
    (result.logprobs * weights[:, None]).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max(), name


def test_the_head_sees_every_distinct_target_once():
    samples, model = drawn("qwen3_vl", TREES["deep"]), fresh("qwen3_vl")
    row, rows = shared(samples), []
    model.lm_head.register_forward_hook(lambda head, args, out: rows.append(len(out)))
    result = PackedStep(model)(row)
    assert rows == [row.metadata.num_distinct_targets]
    assert rows[0] < result.num_targets
    assert rows[0] == len({row.tree.place()[i + 1].item() for i in result.target_index})


@pytest.mark.parametrize("per", ["row", "sample"])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", *slow("qwen3_5_moe", "qwen4_exp", "llama4", "gpt_oss", "lfm2_moe")])
def test_routers_count_a_shared_token_once_for_each_sample_that_has_it(family, per):
    model, config = fresh(family), StepConfig(aux_loss=per, z_loss_coef=0.1)
    row = shared(drawn(family, TREES["deep"]))
    tokens = []
    for block in attention_free_blocks(model):
        block.register_forward_hook(lambda module, args, out: tokens.append(args[0].shape[-2]))
    results, grads = [], []
    for given in (row, unshare(row, read_media=read_media_of(drawn(family, TREES["deep"])))):
        step = PackedStep(model, config)
        results.append(step(given, output_router_logits=True))
        results[-1].loss.backward()
        grads.append(gradients(model))
        model.zero_grad()
    ours, plain = results
    assert (ours.aux_loss is None) == (plain.aux_loss is None)
    for name in ("aux_loss", "z_loss", "loss") if plain.aux_loss is not None else ("z_loss", "loss"):
        assert torch.isclose(getattr(ours, name), getattr(plain, name), rtol=1e-5), name
    assert torch.equal(ours.expert_counts, plain.expert_counts)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours.router_logits, plain.router_logits, strict=True))
    for name, gradient in grads[1].items():
        assert (grads[0][name] - gradient).abs().max() <= limits_of(family).gradient * gradient.abs().max(), name
    assert {*tokens[: len(tokens) // 2]} == {row.tree.num_tokens}, "tokens are dispatched once"


def attention_free_blocks(model):
    return [block_of(layer) for layer in FAMILIES[model.config.model_type].language_model(model).layers]


# ---------------------------------------------------------------------- host and device


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *slow("qwen3_5_moe", "qwen4_exp", "glm_ocr", "mistral3", "minicpmv4_6", "lfm2_vl")]
)
def test_nothing_waits_for_the_device(family):
    model = enable_packing(fresh(family))
    row = shared(drawn(family, TREES["videos" if FAMILIES[family].has_videos else "deep"]))
    model(**row.to_hf(), num_items_in_batch=7)  # states are tried out once a process
    with recorded_syncs(torch.device("cpu")) as waits:
        model(**row.to_hf(), num_items_in_batch=7).loss.backward()
    assert own_lines(waits) == []
    with recorded_syncs(torch.device("cpu")) as waits:
        PackedStep(model)(replace(row, metadata=replace(row.metadata, num_distinct_targets=None)))
    assert any("model/row" in line.filename for line in own_lines(waits)), "uncounted targets are read"
    disable_packing(model)
