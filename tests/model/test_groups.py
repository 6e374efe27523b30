"""Groups larger than a row go through the model in pieces: every sample is what it is alone in plain transformers, and
each token goes through the model once."""

from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from cases import one_of_each, slow, slow_cases
from equality import alone_through, check_gradients, gradients, limits_of, logprobs_of
from model.test_prefix_tree import CIRCUMSTANCES, counted, drawn, fresh
from model.test_short_conv import fresh as with_convolutions
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trees import DEEP, STRANGER, VIDEOS, Piece, rollouts, samples_of, shared

from benchmarks.flops import count_flops
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import unshare
from vlmpack.layout.batch import IGNORE
from vlmpack.machine import peak_bytes
from vlmpack.model import PackedStep, StepConfig
from vlmpack.model.engine import PackingState
from vlmpack.model.plain import find_model
from vlmpack.testing import alone
from vlmpack.testing.comparison import plain_output, target_losses

GROUPS = {
    "deep": (DEEP, STRANGER),
    "rollouts": (rollouts(5, 1, 9, 1, 5, 12, 3, 8),),
    "videos": (VIDEOS, rollouts(3, 6)),
    "images of branches": (Piece(text=12, children=(Piece(text=4, images=1), Piece(text=5), Piece(text=2, images=1))),),
}
WAYS = {"group": None, "row": 1, "row, graphs kept": 99}  # one step: how many pieces keep their graphs
SAMPLE = StepConfig(aux_loss="sample")
CAPACITIES = 20, 40, 80, 160, 640


def in_pieces(step, row, **settings):
    """The group in pieces as small as its images allow."""
    for capacity in CAPACITIES:
        with suppress(LayoutError):
            return step.group(row, capacity=capacity, **settings)
    raise AssertionError("no capacity is enough")


def whole_row(model, row, group, kept_pieces=1):
    """The row as one step, in the same pieces."""
    capacity = max(sum(group.cut.tree.lengths[node] for node in piece.nodes) for piece in group.cut.pieces)
    result = PackedStep(model, StepConfig(capacity=capacity, kept_pieces=kept_pieces))(row)
    result.loss.backward()
    return result


@contextmanager
def tokens_through(model):
    """Counts the tokens of each call of the embeddings."""
    seen = []
    embeddings = find_model(model).get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    yield seen
    hook.remove()


def check_group(family, name, prepare=lambda model: model, given=lambda row: row, way="group"):
    samples = drawn(family, GROUPS[name])
    truth, model = alone_through(prepare(fresh(family)), samples), prepare(fresh(family))
    row = given(shared(samples))
    group = in_pieces(PackedStep(model), row)
    with counted(find_model(model)) as seen, tokens_through(model) as embedded:
        result = group.backward() if way == "group" else whole_row(model, row, group, WAYS[way])
    total, pieces = group.cut.tree.num_tokens, group.cut.pieces
    assert len(pieces) > 1
    again = pieces[1:] if pieces[-1].parent else pieces[1:-1]
    again = sum(group.cut.tree.lengths[node] for piece in again for node in piece.nodes)
    assert sum(embedded) == total + again * (way == "row"), "the first piece and those that keep graphs go once"
    assert torch.allclose(result.loss, truth.loss, rtol=1e-6, atol=0)
    assert torch.allclose(result.target_logprobs, logprobs_of(truth.outcome), rtol=0, atol=5e-6)
    check_gradients(truth, gradients(model), limits_of(family))
    tree, work = row.segments if row.tree is None else row.tree, result.work
    assert (work.physical_tokens, work.real_tokens) == (tree.num_tokens, row.segments.num_tokens)
    if FAMILIES[family].has_grids:
        whole = PackedStep(fresh(family))(row).work
        assert work.attended_pairs == whole.attended_pairs
        assert work.vision_patches == whole.vision_patches, "each image goes through the tower once"
        assert way != "group" or seen["patches"] == work.vision_patches


@pytest.mark.parametrize("family", one_of_each(always=["qwen3", "qwen3_5", "qwen4_exp"]))
def test_every_sample_is_what_it_is_alone_and_no_token_is_computed_twice(family):
    check_group(family, "deep")


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "deep"])
def test_so_it_is_with_other_groups(name):
    check_group("qwen3_vl", name)


@pytest.mark.parametrize("way", WAYS)
def test_samples_that_share_nothing_go_through_in_pieces_too(way):
    check_group("qwen3_vl", "rollouts", given=unshare, way=way)


@pytest.mark.parametrize("name", ["checkpointing", "reentrant checkpointing", "LoRA", *slow("LoRA, checkpointing")])
@pytest.mark.parametrize(
    ("family", "way"), [("qwen3_vl", "group"), *slow_cases(("gemma3", "group"), ("qwen3_vl", "row"))]
)
def test_in_every_circumstance_of_training(family, way, name):
    check_group(family, "rollouts", CIRCUMSTANCES[name], way=way)


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen3_vl", "row"), ("qwen3_5_moe", "row, graphs kept"), *slow_cases(("gemma3", "row"), ("lfm2_vl", "row"))],
)
def test_a_row_larger_than_the_capacity_is_one_step_in_pieces(family, way):
    check_group(family, "deep", way=way)


def test_a_tower_is_trained_alone_behind_a_prefix_of_text():
    def only_the_tower(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("visual" in name)
        return model

    check_group("qwen3_vl", "images of branches", only_the_tower, way="row")


def test_a_second_backward_pass_adds_the_same_gradients():
    model = fresh("qwen3")
    row = shared(samples_of(model.config, *GROUPS["rollouts"]))
    loss = PackedStep(model, StepConfig(capacity=20, kept_pieces=2))(row).loss
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    for name, twice in gradients(model).items():
        assert (twice - 2 * once[name]).abs().max() <= 1e-5 * twice.abs().max(), name


def test_what_is_computed_again_drops_out_the_same_numbers():
    def dropping():
        torch.manual_seed(3)
        config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.5)
        model = get_peft_model(fresh("qwen3"), config)
        torch.manual_seed(7)
        return model

    row = shared(samples_of(fresh("qwen3").config, *GROUPS["rollouts"]))
    pieces = dropping()
    expected = (group := in_pieces(PackedStep(pieces), row)).backward().loss
    whole = dropping()
    assert torch.isclose(whole_row(whole, row, group).loss, expected, rtol=1e-6)
    assert not torch.isclose(whole_row(dropping().eval(), row, group).loss, expected, rtol=1e-3)
    for (name, ours), theirs in zip(whole.named_parameters(), pieces.parameters(), strict=True):
        assert theirs.grad is None or (ours.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max(), name


def test_a_model_that_cannot_compute_pieces_takes_the_row_whole_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(PackingState, "problem_of_pieces", lambda state, model: "its layers start from nothing")
    model = with_convolutions()
    row = shared(samples_of(model.config, rollouts(4, 6)))
    step, whole = PackedStep(model, StepConfig(capacity=20)), PackedStep(with_convolutions())(row)
    assert all(torch.equal(step(row).logprobs, whole.logprobs) for _ in range(2))
    (record,) = (each for each in caplog.records if each.name.startswith("vlmpack"))
    assert "goes through the model whole: " in record.message


def test_each_piece_may_have_a_loss_of_its_own():
    """Advantages of opposite sign: a sample keeps its index and its positions in every piece."""
    samples = samples_of(fresh("qwen3").config, rollouts(4, 6, 3, images=0))
    weights, whole, model = torch.tensor([1.0, -2.0, 0.25]), fresh("qwen3"), fresh("qwen3")
    (PackedStep(whole)(shared(samples)).logprobs * weights[:, None]).sum().backward()
    group = PackedStep(model).group(shared(samples), capacity=12)
    result = group.backward(lambda piece: (piece.result.logprobs * weights[piece.samples, None]).sum())
    for (name, ours), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad - expected.grad).abs().max() <= 1e-5 * expected.grad.abs().max(), name
    assert torch.allclose(result.logprobs, PackedStep(whole)(shared(samples)).logprobs, atol=5e-6)
    assert torch.allclose(group.forward().logprobs, result.logprobs, atol=0)


PREFIX, BRANCH, CAPACITY = 256, 32, 256


@pytest.mark.slow
def test_a_group_costs_what_its_tree_costs_and_takes_the_memory_of_one_path():
    """64 samples of 256 + 32 tokens in rows of 256: against the whole tree, and against the tree of one piece."""
    model = fresh("qwen3", hidden=96)
    step = PackedStep(model, StepConfig(head_chunk=CAPACITY))
    whole, one_piece = (
        shared(samples_of(model.config, rollouts(*[BRANCH] * samples, prefix=PREFIX, images=0), masked=(PREFIX,)))
        for samples in (64, CAPACITY // BRANCH)
    )

    def one_loss():
        PackedStep(model, StepConfig(capacity=CAPACITY, head_chunk=CAPACITY))(whole).loss.backward()

    runs = {
        "row": one_loss,
        "group": lambda: step.group(whole, capacity=CAPACITY).backward(),
        "tree": lambda: step(whole).loss.backward(),
        "path": lambda: step(one_piece).loss.backward(),
    }
    assert count_flops(runs["group"]) <= 1.01 * count_flops(runs["tree"])
    held = [x for p in model.parameters() for x in (p, p.grad)] + [whole.input_ids, whole.shift_labels]
    peaks = {name: peak_bytes(runs[name], held=held) - sum(x.nbytes for x in held) for name in ("group", "path", "row")}
    config = model.config
    kept = config.num_hidden_layers * PREFIX * 2 * config.num_key_value_heads * config.head_dim * 4
    assert peaks["group"] <= 1.1 * peaks["path"] + kept
    last_hidden = 4 * whole.tree.num_tokens * config.hidden_size
    assert peaks["row"] <= 1.1 * peaks["path"] + kept + 2 * last_hidden, "what one loss needs, and its gradient"


@pytest.mark.parametrize("family", ["qwen3_vl_moe", *slow("qwen3_moe", "qwen3_5_moe", "gpt_oss")])
def test_routers_lose_what_they_lose_on_each_sample_alone(family):
    """transformers' own load-balancing loss of each sample; and of the z-loss and the counts, those of the tree."""
    plain, model = fresh(family), fresh(family)
    samples = drawn(family, GROUPS["rollouts"])
    targets, expected = sum((sample["labels"][1:] != IGNORE).sum() for sample in samples), 0.0
    for sample in samples:
        out = plain_output(plain, alone(sample, labels=False), output_router_logits=True)
        loss = target_losses(out.logits[0], sample["labels"]).sum() / targets
        loss = loss + plain.config.get_text_config().router_aux_loss_coef * out.aux_loss / len(samples)
        loss.backward()
        expected += loss.item()
    result = in_pieces(PackedStep(model, SAMPLE), shared(samples), output_router_logits=True).backward()
    assert torch.isclose(result.loss, torch.tensor(expected), rtol=1e-6)
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= limits_of(family).gradient * gradient.abs().max(), name


@pytest.mark.parametrize("per", ["row", "sample"])
@pytest.mark.parametrize("family", ["qwen3_moe", *slow("ernie4_5_vl_moe", "lfm2_moe", "deepseek_v3")])
def test_z_losses_and_counts_are_those_of_the_tree(family, per):
    config, results, grads = StepConfig(aux_loss=per, z_loss_coef=0.1), [], []
    for run in (lambda step, row: step(row), lambda step, row: in_pieces(step, row).backward()):
        model = fresh(family)
        results.append(run(PackedStep(model, config), shared(samples_of(model.config, *GROUPS["rollouts"]))))
        if results[-1].loss.requires_grad:
            results[-1].loss.backward()
        grads.append(gradients(model))
    whole, ours = results
    assert torch.isclose(ours.z_loss, whole.z_loss, rtol=1e-5)
    assert torch.isclose(ours.loss, whole.loss, rtol=1e-5)
    assert torch.equal(ours.expert_counts, whole.expert_counts)
    for name, gradient in grads[0].items():
        assert (grads[1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


REFUSALS = {
    "routers of a row": (lambda: fresh("qwen3_moe"), {"output_router_logits": True}, r'aux_loss="sample"\)'),
    "no capacity": (lambda: fresh("qwen3"), {"capacity": 0}, "capacity"),
    "an image": (lambda: fresh("gemma3"), {"capacity": 20}, "sample 0 .* give a capacity of 31"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_exact_is_refused_before_the_first_forward(name):
    make, settings, words = REFUSALS[name]
    model = make()
    row = shared(samples_of(model.config, rollouts(4, 6)))
    with pytest.raises((ConfigError, LayoutError), match=words):
        PackedStep(model).group(row, **{"capacity": 40, **settings})
    with pytest.raises(ConfigError, match=r"row has to be a PackedRow, such as .*, got a dict"):
        PackedStep(model).group(row.to_hf(), capacity=40)
    with pytest.raises(LayoutError, match="no shift_labels"):
        PackedStep(model).group(replace(row, shift_labels=None), capacity=40)


def test_the_capacity_that_is_asked_for_serves_the_whole_group():
    model = fresh("gemma3")
    row = shared(samples_of(model.config, Piece(text=3, images=1), Piece(text=2, images=3)))
    with pytest.raises(LayoutError) as refused:
        PackedStep(model).group(row, capacity=7)
    PackedStep(model).group(row, capacity=int(str(refused.value).split()[-1]))


def test_a_piece_without_its_backward_pass_is_not_passed_over():
    model = fresh("qwen3")
    group = PackedStep(model).group(shared(samples_of(model.config, rollouts(4, 6))), capacity=12)
    with pytest.raises(ConfigError, match="piece 0 of the group had no backward pass"):
        list(group)
    with pytest.raises(ConfigError, match="1 of 2 pieces"):
        _ = group.result


@pytest.mark.parametrize("accumulates", [False, True])
def test_data_parallelism_exchanges_gradients_behind_the_last_piece(mesh, accumulates):
    plain, model, exchanged = fresh("qwen3"), DistributedDataParallel(fresh("qwen3")), []
    model.register_comm_hook(None, lambda _, bucket: exchanged.append(1) or allreduce_hook(None, bucket))
    row = shared(samples_of(plain.config, rollouts(4, 6)))
    PackedStep(plain).group(row, capacity=12).backward()
    with model.no_sync() if accumulates else nullcontext():
        for piece in (group := PackedStep(model).group(row, capacity=12)):
            piece.backward()
            assert not exchanged
    assert (len(group), bool(exchanged)) == (2, not accumulates)
    for ours, expected in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)
    with pytest.raises(ConfigError, match="leave static_graph out"):
        PackedStep(DistributedDataParallel(fresh("qwen3"), static_graph=True)).group(row, capacity=12)


def test_sharded_parameters_are_whole_until_the_group_ends_and_never_stale(mesh):
    """Also if a piece fails: the next step gathers what the optimizer has changed."""
    model, plain = fresh("qwen3"), fresh("qwen3")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    row = shared(samples_of(plain.config, rollouts(4, 6)))
    group = PackedStep(model).group(row, capacity=12)
    with pytest.raises(ConfigError, match="had no backward pass"):
        list(group)
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(1.5)
    expected = PackedStep(plain).group(row, capacity=12).backward()
    assert torch.equal(group.forward().loss, expected.loss)
    assert torch.equal(group.backward().loss, expected.loss)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)
