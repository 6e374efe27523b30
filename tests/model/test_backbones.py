"""Backbones on packed batches: of classifiers, embedding models, and trainers that bring a head of their own.

Scores, hidden states, losses and every gradient are those of each sample alone.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from cases import slow
from chats import picture, processor_of
from equality import limits_of, without_zeros
from fixtures.processors import tiny_model, tiny_processor
from peft import LoraConfig, get_peft_model
from torch import nn
from training import collator, receipts
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from trees import rollouts, samples_of

from vlmpack import PackedStep, StepConfig, VLMCollator, disable_packing, enable_packing, pack, probe
from vlmpack.errors import ConfigError, FamilyError, UnpackedWarning
from vlmpack.families import family_of
from vlmpack.model.forward import pack_backbone
from vlmpack.model.result import Work
from vlmpack.testing import Sample, mixed_samples, padded, receipt_conversations, tiny_config
from vlmpack.testing.comparison import Limits, distance
from vlmpack.testing.samples import alone

CLASSES = 3
CLASSIFIERS = [
    *("llama", "qwen3_moe", "gpt_oss", "qwen3_vl", "gemma3"),
    *slow("gemma2", "qwen3_next", "qwen3_5", "glm4v", "internvl", "llava", "deepseek_v3", "smollm3"),
]
EMBEDDERS = [
    *("qwen3", "qwen3_vl", "qwen3_5", "gemma3"),
    *slow("qwen2_5_vl", "qwen3_vl_moe", "qwen3_moe", "qwen4_exp", "lfm2", "gemma4", "gpt_oss", "internvl"),
    *slow("llava", "glm4v", "qwen2_5_omni_thinker", "llama4_text", "paligemma"),
]
HEADS = {
    "sequence": (AutoModelForSequenceClassification, GenericForSequenceClassification),
    "token": (AutoModelForTokenClassification, GenericForTokenClassification),
}


def classifier(family: str, head: str = "sequence", labels: int = CLASSES) -> Any:
    """A tiny classifier, in eval mode; a class of its own where transformers has none for the family."""
    config = tiny_config(family)
    config.num_labels, config.get_text_config().pad_token_id = labels, 0
    auto, generic = HEADS[head]
    torch.manual_seed(0)
    if type(config) in auto._model_mapping:
        return auto.from_config(config).float().eval()
    base = next(cls for cls in type(tiny_model(family)).__mro__ if cls.__name__.endswith("PreTrainedModel"))
    return type(generic.__name__, (generic, base), {})(config).float().eval()


def without_head(family: str) -> Any:
    """A tiny model without a head, in eval mode."""
    torch.manual_seed(0)
    return AutoModel.from_config(tiny_config(family)).float().eval()


both = pytest.mark.parametrize("make", [classifier, without_head])
"""A model with a head that is no language model's, and one without."""


def single(sample: Sample) -> dict[str, Any]:
    """A batch of one sample, without padding."""
    return {**alone(sample), "attention_mask": torch.ones(1, len(sample["input_ids"]), dtype=torch.int64)}


def inputs_of(model: Any, batch: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a trainer passes: no labels of tokens, and the token types that transformers itself needs."""
    family = family_of(model)
    kept = {name: value for name, value in batch.items() if name not in ("labels", "mm_token_type_ids", "vlmpack")}
    if family.token_types is not None:
        kept[family.token_types] = family.media_types(batch["input_ids"], model.config)
    return {**kept, **more}


def classes_of(batch: dict[str, Any], head: str, first: int = 0) -> torch.Tensor:
    """A class for each sample, counted from `first`, or for each token."""
    if head == "sequence":
        return torch.arange(first, first + len(batch["input_ids"])) % CLASSES
    return (batch["input_ids"] % CLASSES).masked_fill(batch["attention_mask"] == 0, -100)


def mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean pooling, [B, D]."""
    return (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]


def last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Last-token pooling, [B, D]."""
    places = torch.arange(mask.shape[1]).expand_as(mask).masked_fill(mask == 0, -1)
    return hidden[torch.arange(len(hidden)), places.argmax(1)]


def attended(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention pooling, by a query of ones, [B, D]."""
    weights = hidden.mean(-1).masked_fill(mask == 0, -torch.inf).softmax(-1)
    return (weights[..., None] * hidden).sum(1)


def contrastive(embeddings: torch.Tensor) -> torch.Tensor:
    """Each sample's positive is the next one; the others of the batch are negatives."""
    normal = nn.functional.normalize(embeddings, dim=-1)
    likeness = (normal @ normal.T).masked_fill(torch.eye(len(normal), dtype=torch.bool), -1e4)
    return nn.functional.cross_entropy(4 * likeness, torch.arange(1, len(normal) + 1) % len(normal))


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float) -> None:
    """Errors are parts of the largest entry; a gradient 1,000 times smaller than others is rounding."""
    assert found.keys() == expected.keys()
    least = max(float(gradient.abs().max()) for gradient in expected.values()) * 1e-3
    for name, gradient in without_zeros(expected).items():
        assert distance(found[name], gradient, least=least) < limit, name


def tokens_of(model: Any) -> list[int]:
    """A list that grows by the number of tokens of each call."""
    computed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: computed.append(args[0].numel()))
    return computed


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_each_sample_is_scored_and_learned_from_as_alone(family: str, head: str) -> None:
    model, limits = classifier(family, head), limits_of(family)
    samples = mixed_samples(model.config, seed=1)
    weights = [1 if head == "sequence" else len(sample["input_ids"]) for sample in samples]
    batches = [single(sample) for sample in samples]
    singly = [model(**inputs_of(model, x, labels=classes_of(x, head, i))) for i, x in enumerate(batches)]
    loss = sum(one.loss * weight for one, weight in zip(singly, weights, strict=True)) / sum(weights)
    expected = gradients(model, loss)
    computed = tokens_of(enable_packing(model))
    for side in ("right", "left"):
        batch = padded(samples, side).to_hf()
        packed = model(**inputs_of(model, batch, labels=classes_of(batch, head)))
        for scores, mask, one in zip(packed.logits, batch["attention_mask"], singly, strict=True):
            own, found = one.logits[0].detach(), scores if head == "sequence" else scores[mask != 0]
            torch.testing.assert_close(found, own, rtol=0, atol=limits.logits * max(1.0, float(own.abs().max())))
        torch.testing.assert_close(packed.loss, loss, rtol=1e-6, atol=0)
        check_gradients(gradients(model, packed.loss), expected, limits.gradient)
    assert computed == [sum(len(sample["input_ids"]) for sample in samples)] * 2  # no padding was computed


@pytest.mark.parametrize("family", EMBEDDERS)
def test_each_sample_is_embedded_and_learned_from_as_alone(family: str) -> None:
    model, limits = without_head(family), limits_of(family)
    samples = mixed_samples(model.config, seed=1)
    check_embeddings(model, samples, limits, sum(len(sample["input_ids"]) for sample in samples))


@pytest.mark.parametrize("family", ["qwen3_vl", *slow("qwen3", "gemma3", "qwen3_5", "lfm2")])
def test_what_is_embedded_computes_a_shared_beginning_once(family: str) -> None:
    model = without_head(family)
    samples = samples_of(model.config, rollouts(3, 5, 4, prefix=9), rollouts(2, 6, prefix=7))
    lengths = [len(sample["input_ids"]) for sample in samples]
    shared = 2 * (lengths[0] - 3) + (lengths[3] - 2)
    check_embeddings(model, samples, limits_of(family), sum(lengths) - shared, min_shared=4)


def check_embeddings(model: Any, samples: list[Sample], limits: Limits, tokens: int, min_shared: Any = None) -> None:
    singly = [model(**inputs_of(model, single(sample))).last_hidden_state for sample in samples]
    pools = (mean, last, attended)
    pooled = [torch.cat([pool(one, torch.ones(one.shape[:2])) for one in singly]) for pool in pools]
    largest = [max(1.0, float(one.detach().abs().max())) for one in singly]
    expected_loss = sum(map(contrastive, pooled))
    expected = gradients(model, expected_loss)
    computed = tokens_of(enable_packing(model))
    if min_shared:
        pack_backbone(model, min_shared=min_shared)
    for side in ("right", "left"):
        batch = padded(samples, side).to_hf()
        hidden, mask = model(**inputs_of(model, batch)).last_hidden_state, batch["attention_mask"]
        for row, real, one, scale in zip(hidden, mask != 0, singly, largest, strict=True):
            torch.testing.assert_close(row[real], one[0], rtol=0, atol=limits.logits * scale)
            assert not row[~real].any()
        loss = sum(contrastive(pool(hidden, mask)) for pool in pools)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
        check_gradients(gradients(model, loss), expected, limits.gradient)
    assert computed == [tokens] * 2  # no padding was computed


def test_a_row_returns_the_hidden_states_of_its_tokens() -> None:
    model = enable_packing(without_head("qwen3_vl"))
    samples = mixed_samples(model.config, seed=1)
    row, *singly = (model(**pack(padded(part, "right")).to_hf()).last_hidden_state for part in (samples, *zip(samples)))
    torch.testing.assert_close(row, torch.cat(singly, 1), rtol=1e-4, atol=1e-5)


def ranked(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """[B]: a classifier's score, or Qwen3-VL-Reranker's: the logit of "yes" less that of "no" at the last token."""
    if not hasattr(model, "lm_head"):
        return model(**inputs_of(model, batch)).logits[:, 0]
    logits = model.lm_head(model.model(**inputs_of(model, batch)).last_hidden_state)
    return last(logits[..., 7] - logits[..., 11], batch["attention_mask"])


@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("make", [classifier, tiny_model])
def test_a_pair_computes_its_prompt_and_image_once_and_is_scored_the_same(make: Any, images: int) -> None:
    model = make("qwen3_vl" if images else "qwen3", **({"labels": 1} if make is classifier else {})).eval()
    samples = samples_of(model.config, rollouts(3, 5, prefix=9, images=images))
    plain = torch.cat([ranked(model, single(sample)) for sample in samples])
    expected = gradients(model, expected_loss := -nn.functional.logsigmoid(plain[0] - plain[1]))
    works: list[Work] = []
    pack_backbone(enable_packing(model), min_shared=4, report=lambda work, _: works.append(work))
    found = ranked(model, padded(samples, "right").to_hf())
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    loss = -nn.functional.logsigmoid(found[0] - found[1])
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    check_gradients(gradients(model, loss), expected, 1e-5)
    (work,), whole = works, [len(sample["input_ids"]) for sample in samples]
    assert work.physical_tokens == sum(whole) - (whole[0] - 3)
    assert work.vision_patches == (len(samples[0]["pixel_values"]) if images else 0)


class ValueHead(nn.Module):
    """A linear head on the last hidden states of a language model, as TRL and OpenRLHF had it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(model.config.get_text_config().hidden_size, 1)

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.head(self.model(**inputs, output_hidden_states=True).hidden_states[-1])[..., 0]


class TokenValues(nn.Module):
    """A `...ForTokenClassification` of one label, the value model of PPO."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.model(**inputs).logits[..., 0]


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("make", [ValueHead, TokenValues])
@pytest.mark.parametrize("family", ["qwen3", *slow("qwen3_vl", "gemma3")])
def test_values_of_tokens_are_those_of_each_sample_alone(family: str, make: Any, in_pieces: bool) -> None:
    """Answers to one prompt, whose values are learned from squares; the prompt goes through a value model once."""
    torch.manual_seed(0)
    core = classifier(family, "token", labels=1) if make is TokenValues else tiny_model(family).eval()
    model = make(core)
    samples = samples_of(core.config, rollouts(4, 6, 3, 5, prefix=20, images=0))
    singly = [model(**inputs_of(core, single(sample)))[0] for sample in samples]
    expected_loss = sum(((one - torch.arange(len(one)) / 10) ** 2).sum() for one in singly)
    expected = gradients(model, expected_loss)
    computed = tokens_of(enable_packing(core, StepConfig(capacity=24) if in_pieces else None))
    if make is TokenValues:
        pack_backbone(core, min_shared=4)
    batch = padded(samples, "right").to_hf()
    values, mask = model(**inputs_of(core, batch)), batch["attention_mask"] != 0
    for found, real, one in zip(values, mask, singly, strict=True):
        torch.testing.assert_close(found[real], one, rtol=0, atol=1e-5)
    loss = (((values - torch.arange(values.shape[1]) / 10) ** 2) * mask).sum()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    check_gradients(gradients(model, loss), expected, limits_of(family).gradient)
    shared, whole = 20 + 4 + 6 + 3 + 5, sum(len(sample["input_ids"]) for sample in samples)
    assert sum(computed) == (shared if make is TokenValues else whole)


@pytest.mark.parametrize("wrapped", ["peft", "module"])
def test_a_model_inside_a_wrapper_is_found(wrapped: str) -> None:
    core = without_head("qwen3")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    if wrapped == "peft":
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="FEATURE_EXTRACTION", init_lora_weights=False)
        model = get_peft_model(core, config)
    else:  # as SentenceTransformer holds it
        model = nn.ModuleDict({"transformer": core})
    call = model if wrapped == "peft" else core
    expected = call(input_ids=ids, attention_mask=mask).last_hidden_state
    assert enable_packing(model) is model
    computed = tokens_of(core)
    found = call(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask != 0], expected[mask != 0], rtol=1e-5, atol=1e-5)
    assert computed == [10]


@both
def test_copies_pack_and_disabling_leaves_the_model_as_it_was(make: Any) -> None:
    model = make("qwen3")
    before = {name: (type(module), len(module._forward_hooks)) for name, module in model.named_modules()}
    copied = copy.deepcopy(enable_packing(enable_packing(model)))
    assert disable_packing(model) is model
    assert {name: (type(module), len(module._forward_hooks)) for name, module in model.named_modules()} == before
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    ids = torch.arange(1, 9).view(2, 4) * mask
    computed = tokens_of(copied)
    packed, plain = (each(input_ids=ids, attention_mask=mask)[0] for each in (copied, model))
    torch.testing.assert_close(packed[:, :2], plain[:, :2], rtol=1e-5, atol=1e-5)  # of scores, or of tokens of both
    assert computed == [6]


@both
def test_what_a_model_without_a_language_models_head_cannot_give_is_refused(make: Any) -> None:
    processor = tiny_processor()
    model = enable_packing(make("qwen3_vl"))
    row = VLMCollator(processor, layout="packed").collate(list(receipt_conversations(num=2, scale=0.35)))
    calls = [lambda: PackedStep(model)(row), *([lambda: model(**row.to_hf())] if make is classifier else [])]
    for call in calls:
        with pytest.raises(ConfigError, match="has no language-model loss for PackedStep, PackedTrainer or a packed"):
            call()
    with pytest.raises(FamilyError, match="the probe compares losses of language models"):
        probe(model, processor)


def test_hidden_states_of_every_layer_come_from_the_plain_backbone_with_a_warning() -> None:
    model = enable_packing(classifier("qwen3"))
    ids = torch.arange(1, 7).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with pytest.warns(UnpackedWarning, match="the hidden states of every layer"):
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1


# ---------------------------------------------------------------------- of a language model, called past its forward

SIZES = {"hidden": 32, "heads": 2, "layers": 2, "vision_depth": 1}


def hidden_states(model, batch):
    """[B, S, D] of the backbone, without labels, as a trainer with a head of its own calls it."""
    columns = {name: value for name, value in batch.items() if name not in ("labels", "vlmpack")}
    return model.model(**columns, use_cache=False).last_hidden_state


def packing(family="qwen3_vl", **settings):
    """A model whose backbone packs, and the (work, tokens) of each call."""
    calls = []
    model = enable_packing(tiny_model(family, **SIZES))
    pack_backbone(model, report=lambda *call: calls.append(call), **settings)
    return model, calls


def test_logits_of_routers_come_back_as_the_batch():
    model, _ = packing("qwen3_vl_moe")
    batch = padded(receipts(model)).to_hf()
    columns = {name: value for name, value in batch.items() if name not in ("labels", "vlmpack")}
    settings = {"use_cache": False, "output_router_logits": True}
    logits, truth = (m.model(**columns, **settings).router_logits for m in (model, tiny_model("qwen3_vl_moe", **SIZES)))
    real = batch["attention_mask"].bool().flatten()
    assert len(logits) == len(truth) == 2
    for ours, theirs in zip(logits, truth, strict=True):
        assert torch.allclose(ours[real], theirs.view(real.numel(), -1)[real], atol=1e-5)
        assert not ours[~real].any()


def test_tiles_of_a_padded_batch_are_shared():
    """[B, N, ...]: samples with fewer tiles than others have padding for tiles, which is no image."""
    processor, calls = processor_of("idefics3"), []
    model, plain = (tiny_model("idefics3", processor=processor, **SIZES) for _ in range(2))
    pack_backbone(enable_packing(model), min_shared=4, report=lambda *call: calls.append(call))
    first, second = picture(64, 64), picture(64, 64, seed=1)
    image, beginning = processor.image_token, f"{processor.image_token}What is the total of it? "
    texts, images = (
        [beginning + "75", f"{beginning}{image}More", beginning + "nothing"],
        [[first], [first, second], [first]],
    )
    batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
    assert batch["pixel_values"].shape[0] == 3
    states, expected = hidden_states(model, batch), hidden_states(plain, batch)
    real = batch["attention_mask"].bool()
    assert torch.allclose(states[real], expected[real], atol=1e-5)
    ((work, tokens),) = calls
    assert work.physical_tokens < 0.7 * work.real_tokens < tokens == real.numel()


def test_the_forward_and_generation_pass_untouched():
    model, calls = packing()
    batch = collator("padded")(receipts(model))
    expected = enable_packing(tiny_model(**SIZES))(**batch).loss.item()
    assert model(**batch).loss.item() == expected
    ids = torch.tensor([[5, 6, 7]])
    drawn = [m.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for m in (model, tiny_model(**SIZES))]
    assert drawn[0].tolist() == drawn[1].tolist()
    assert not calls


def test_a_later_call_replaces_an_earlier_one_and_travels_with_the_model():
    model, calls = packing()
    later = []
    pack_backbone(model, report=lambda *call: later.append(call))
    batch = padded(receipts(model)).to_hf()
    states = hidden_states(model, batch)
    assert (len(calls), len(later)) == (0, 1)
    assert torch.equal(hidden_states(pickle.loads(pickle.dumps(model)), batch), states)


def test_what_is_refused():
    with pytest.raises(ConfigError, match="packing is not enabled"):
        pack_backbone(tiny_model(**SIZES))
    model, _ = packing()
    with pytest.raises(ConfigError, match="min_shared"):
        pack_backbone(model, min_shared=0)
    with pytest.raises(ConfigError, match="takes no input 'pixel_mask'"):
        hidden_states(model, {**padded(receipts(model)).to_hf(), "pixel_mask": torch.ones(1)})
