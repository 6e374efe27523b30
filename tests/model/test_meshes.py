"""Transformers' own meshes, and ranks that share rows: a packed step is that of all samples alone."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import VISION, limits_of, without_zeros
from model.mesh_ranks import ADAPTERS, CASES, DISTILLATION, WHERE, WIDTH, Z_LOSS, Case
from model.two_ranks import samples_of
from peft import get_peft_model
from ranks import on_ranks
from shared_rows import relative
from teachers import K, loss_of

from vlmpack.errors import ConfigError
from vlmpack.families.registry import FAMILIES
from vlmpack.model import enable_packing
from vlmpack.testing import Sample, alone, padded, tiny_model

pytestmark = pytest.mark.dist
LOSS = 1e-6
GRADIENT = 1e-5
"""Of the largest entry."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the first rank saw of a case. All cases of so many ranks are run at the first question for one."""
    folder, started = tmp_path_factory.mktemp("meshes"), set()
    for family in {case.family for case in CASES}:
        model_of(family).save_pretrained(folder / family)

    def of(case: Case, what: str = "") -> dict[str, Any]:
        if case.ranks not in started:
            started.add(case.ranks)
            on_ranks(Path(__file__).with_name("mesh_ranks.py"), folder, ranks=case.ranks)
        return torch.load(folder / f"{what or case}.pt")

    return of


def model_of(family: str) -> Any:
    return tiny_model(family, seed=3, **({"vision_depth": 1} if family in VISION else {}))


def cases(which: list[Case]) -> Any:
    marked = [pytest.param(case, marks=[pytest.mark.slow] if case.ranks > 2 else [], id=str(case)) for case in which]
    return pytest.mark.parametrize("case", marked)


@cases(CASES)
def test_a_step_is_that_of_all_samples_alone(case: Case, seen: Any) -> None:
    """Each data rank adds the routers' loss of its own samples, as the unmodified model does, or its share of all."""
    model, found = model_of(case.family), seen(case)
    samples = samples_of(model)
    items = padded(samples).metadata.num_targets
    truth = [Alone(model, share, items) for share in case.shares(samples)]
    assert relative(found["loss"] / items, sum(share.loss.detach() for share in truth)) <= LOSS
    own, routers, added = truth[0], truth[0], sum(share.added for share in truth)  # own: of the first data rank
    if case.aux_loss == "step":
        routers = Alone(model, samples, items)
        added = routers.added + Z_LOSS * routers.z_loss
        assert relative(found["added"], added.detach() / case.data_ranks) <= LOSS
    (sum(share.loss for share in truth) + added).backward()
    for name, value in {
        "logprobs": torch.cat(own.logprobs),
        "entropies": torch.cat(own.entropies),
        "sample losses": torch.stack([x / len(n) for x, n in zip(own.losses, own.logprobs, strict=True)]),
        "aux loss": routers.balance,
    }.items():
        assert value is None or relative(found[name], value.detach()) <= 5e-6, name
    if case.has_experts:
        assert torch.equal(found["expert counts"], routers.counts)
    expected = without_zeros({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    gradients = without_zeros(found["gradients"])
    assert gradients.keys() == expected.keys()
    far = {name: relative(gradients[name], truth) for name, truth in expected.items()}
    limit = max(GRADIENT, limits_of(case.family).gradient)
    assert max(far.values()) <= limit, sorted(far.items(), key=lambda item: -item[1])[:5]


def test_routers_of_all_ranks_are_added_to_a_mean_of_losses_once(seen: Any) -> None:
    model = model_of("qwen3_moe")
    samples = samples_of(model)
    shares = samples[::2], samples[1::2]
    losses = [Alone(model, share, padded(share).metadata.num_targets, taught=False).loss for share in shares]
    truth = sum(losses) / 2 + Alone(model, samples, 1).added
    truth.backward()
    found = seen(CASES[0], "mean")
    assert relative(found.pop("loss"), truth.detach()) <= LOSS
    for name, parameter in model.named_parameters():
        assert relative(found.pop(name), parameter.grad) <= GRADIENT, name
    assert not found


@pytest.mark.parametrize("case", [case for case in CASES if case.family == "qwen3"][:1], ids=str)
def test_tensor_ranks_exchange_no_logits(case: Case, seen: Any) -> None:
    """Of each target few numbers in place of a logit for each id; of each token what transformers exchanges."""
    model = model_of(case.family)
    batch, text = padded(samples_of(model)), model.config
    tokens, targets = int(batch.attention_mask.sum()), batch.metadata.num_targets
    layers, width = text.num_hidden_layers, text.hidden_size
    forward, backward = 1 + 2 * layers, 5 * layers  # of embeddings, attention and MLP; of q, k, v, gate and up
    assert Counter(seen(case)["exchanged"]) == {
        ("all_reduce", (1, tokens, width)): forward + backward,
        ("allreduce", (targets,)): 1,  # largest logits
        ("allreduce", (targets, 4 + K)): 1,  # sums of all and other exponentials, logits, and for the entropy
        ("all_reduce", (targets, width)): 1,  # gradient of hidden states
        ("allreduce", (text.head_dim,)): 2 * layers,  # gradients of the heads' norms
        ("allgather", (1, 4)): 1,  # digest of the row
    }


@cases([case for case in CASES if "ep_size" in case.sizes and case.ranks == 2])
def test_expert_ranks_exchange_the_tokens_that_routers_chose(case: Case, seen: Any) -> None:
    """Each token once for each of its experts, there and back; or, on the same row, the sums of what experts give. The
    padding of the row is not among them."""
    model = model_of(case.family)
    tokens = int(padded(case.shares(samples_of(model))[0]).attention_mask.sum())
    assert tokens % WIDTH > 0
    layers, width, top_k = model.config.num_hidden_layers, model.config.hidden_size, model.config.num_experts_per_tok
    exchanged = Counter(seen(case)["exchanged"])
    rows = [shape for name, shape in exchanged.elements() if name == "all_to_all_single"]
    if case.sizes.get("ep_implementation") == "all_reduce":
        assert not rows
        assert exchanged["allreduce", (tokens, width)] == 2 * layers  # outputs, and gradients of the inputs
        assert exchanged["allreduce", (tokens, top_k)] == layers  # gradients of the experts' weights
    else:
        own = -(-tokens // case.sizes.get("tp_size", 1))  # tensor ranks send a part of their row each
        assert len(rows) == 4 * layers
        assert rows.count((own * top_k, width)) >= 2 * layers
    assert not any(model.config.vocab_size in shape for _, shape in exchanged)


@cases([case for case in CASES if case.context > 1 and "tp_size" in case.sizes and case.family == "qwen3_vl"])
def test_context_ranks_exchange_the_heads_that_tensor_ranks_have(case: Case, seen: Any) -> None:
    model = model_of(case.family)
    text, ranks = model.config.text_config, case.context
    heads, kv_heads = (n // case.sizes["tp_size"] for n in (text.num_attention_heads, text.num_key_value_heads))
    tokens = -(-int(padded(samples_of(model)).attention_mask.sum()) // ranks)
    numbers = (2 * heads + 2 * max(kv_heads, ranks)) * text.head_dim
    assert seen(case)["sent"]["attention"] == text.num_hidden_layers * 2 * (ranks - 1) * tokens * numbers * 4 // ranks


def test_ranks_of_a_tensor_group_that_were_given_different_rows_say_so(seen: Any) -> None:
    assert "ranks [0, 1] of one tensor group were given different rows" in seen(CASES[3])["refused"]


@pytest.mark.parametrize("number", range(len(WHERE)))
def test_scores_of_a_divided_head_are_those_of_the_whole(number: int, seen: Any) -> None:
    """13 ids, which two ranks do not divide, at another temperature."""
    divided, whole = seen(CASES[0], "parts")[str(number)]
    torch.testing.assert_close(divided, whole, rtol=1e-5, atol=1e-5)


def test_a_mesh_with_other_tensor_ranks_than_the_model_has_is_refused(seen: Any) -> None:
    message = seen(CASES[0], "parts")["mesh"]
    assert "Parallel has the tensor ranks [0], but this Qwen3ForCausalLM was loaded on [0, 1]" in message


def test_adapters_of_layers_that_tensor_ranks_divide_have_the_gradients_of_samples_alone(seen: Any) -> None:
    found = seen(CASES[0], "parts")["adapters"]
    model = get_peft_model(model_of("qwen3"), ADAPTERS)
    missing = model.load_state_dict({name: weight for name, (weight, _) in found.items()}, strict=False)
    assert not missing.unexpected_keys
    samples = samples_of(model.get_base_model())
    Alone(model, samples, padded(samples).metadata.num_targets, taught=False).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert relative(found.pop(name)[1], parameter.grad) <= GRADIENT, name
    assert not found


def test_adapters_that_do_not_fit_the_parts_of_ranks_are_refused(seen: Any) -> None:
    delta, *of_experts = seen(CASES[0], "parts")["misfits"]
    assert "do not fit their layers on this mesh (model.language_model.layers.0.linear_attn.in_proj_qkv;" in delta
    assert len(of_experts) == 2
    assert all("do not fit their layers on this mesh (model.layers.0.mlp.experts; 2 in all)" in x for x in of_experts)


def test_data_ranks_that_would_run_other_towers_say_so(seen: Any) -> None:
    images, audio = seen(CASES[0], "parts")["towers"]
    assert "some rows of ranks [0, 1] have images and some have none: llama4 cannot compute blank ones" in images
    assert "balance_vision" not in images  # it is refused for such a family
    assert audio.endswith("or set Parallel(balance_vision=True)")


@pytest.mark.parametrize(
    ("family", "model_sizes", "mesh_size", "message"),
    [
        ("qwen3", {"heads": 6, "kv_heads": 3, "head_dim": 16}, "_tp_size", "not divide the 3 key-value heads.* 1, 3"),
        ("kimi_k25", {}, "_fsdp_size", "kimi_k25 was loaded with fsdp_size=2, and transformers mixes up"),
    ],
)
def test_a_mesh_on_which_a_model_would_be_wrong_is_refused(family, model_sizes, mesh_size, message) -> None:
    model = tiny_model(family, **model_sizes)
    setattr(model, mesh_size, 2)
    with pytest.raises(ConfigError, match=message):
        enable_packing(model)


class Alone:
    """Samples of one data rank, each alone through the unmodified model."""

    def __init__(self, model: Any, samples: list[Sample], items: int, *, taught: bool = True) -> None:
        family = FAMILIES[model.config.model_type]
        asked = {"output_router_logits": True} if family.has("experts") else {}
        outputs = [model(**alone(sample, labels=False), use_cache=False, **asked) for sample in samples]
        targets = [sample["labels"][1:] for sample in samples]
        logits = [o.logits[0, :-1][t != -100].float() for o, t in zip(outputs, targets, strict=True)]
        targets = [each[each != -100] for each in targets]
        log_softmax = [each.log_softmax(-1) for each in logits]
        self.logprobs = [each.gather(1, ids[:, None])[:, 0] for each, ids in zip(log_softmax, targets, strict=True)]
        self.entropies = [-(each.exp() * each).sum(1) for each in log_softmax]
        settings = {"weight": DISTILLATION.weight if taught else 0, "tail": True}
        self.losses = [loss_of(o.logits[0], sample, **settings) for o, sample in zip(outputs, samples, strict=True)]
        self.loss = sum(self.losses) / items
        self.balance = self.counts = None
        self.added = torch.zeros(())
        if asked:
            experts, top = model.config.num_experts, model.config.num_experts_per_tok
            layers = [torch.cat(of_layer) for of_layer in zip(*(o.router_logits for o in outputs), strict=True)]
            balance_of = import_module(family.modeling).load_balancing_loss_func
            self.balance = balance_of(tuple(layers), experts, top)
            self.added = model.router_aux_loss_coef * self.balance
            self.z_loss = torch.stack([layer.logsumexp(-1).square().mean() for layer in layers]).mean()
            chosen = [layer.topk(top).indices.flatten().bincount(minlength=experts) for layer in layers]
            self.counts = torch.stack(chosen)
