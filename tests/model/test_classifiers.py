"""Classifiers and reward models on packed rows: scores, loss and every gradient of each sample alone."""

from typing import Any

import pytest
import torch
from equality import limits_of, without_zeros
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from vlmpack import PackedStep, VLMCollator, disable_packing, enable_packing, probe
from vlmpack.errors import ConfigError, FamilyError, UnpackedWarning
from vlmpack.families import family_of
from vlmpack.model.backbone import pack_backbone
from vlmpack.testing import mixed_samples, padded, receipt_conversations, tiny_config, tiny_model, tiny_processor
from vlmpack.testing.comparison import distance
from vlmpack.testing.samples import alone

CLASSES = 3
SHORT = ("llama", "qwen3_moe", "gpt_oss", "qwen3_vl", "gemma3")
FAMILIES = [
    *SHORT,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma2", "qwen3_next", "qwen3_5", "glm4v", "internvl", "llava", "deepseek_v3", "smollm3")
    ),
]
HEADS = {
    "sequence": (AutoModelForSequenceClassification, GenericForSequenceClassification),
    "token": (AutoModelForTokenClassification, GenericForTokenClassification),
}


def classifier(family: str, head: str) -> Any:
    """A tiny classifier, in eval mode; a class of its own where transformers has none for the family."""
    config = tiny_config(family)
    config.num_labels, config.get_text_config().pad_token_id = CLASSES, 0
    auto, generic = HEADS[head]
    torch.manual_seed(0)
    if type(config) in auto._model_mapping:
        return auto.from_config(config).float().eval()
    base = next(cls for cls in type(tiny_model(family)).__mro__ if cls.__name__.endswith("PreTrainedModel"))
    return type(generic.__name__, (generic, base), {})(config).float().eval()


def with_labels(inputs: dict[str, Any], model: Any, head: str, numbers: list[int]) -> dict[str, Any]:
    """Inputs with a class for each sample, or for each token, and with the token types that transformers needs."""
    ids, family = inputs["input_ids"], family_of(model)
    classes = torch.tensor(numbers) % CLASSES if head == "sequence" else ids % CLASSES
    if head == "token" and "attention_mask" in inputs:
        classes = classes.masked_fill(inputs["attention_mask"] == 0, -100)
    types = {} if family.token_types is None else {family.token_types: family.media_types(ids, model.config)}
    kept = {name: value for name, value in inputs.items() if name not in ("labels", "mm_token_type_ids", "vlmpack")}
    return {**kept, **types, "labels": classes}


def outcome(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(scores, loss, gradients) of a call."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), output.loss.detach(), found


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest error of a gradient, as a part of its largest entry; one 1,000 times smaller than others is rounding."""
    least = max(float(gradient.abs().max()) for gradient in expected.values()) * 1e-3
    return max(distance(found[name], whole, least=least) for name, whole in without_zeros(expected).items())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_sample_is_scored_and_learned_from_as_alone(family: str, head: str) -> None:
    model = classifier(family, head)
    samples, limits = mixed_samples(model.config, seed=1), limits_of(family)
    weights = [1 if head == "sequence" else len(sample["input_ids"]) for sample in samples]
    scores, loss, expected = [], torch.zeros(()), {}
    for number, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        inputs = with_labels(
            {**alone(sample), "attention_mask": torch.ones(1, len(sample["input_ids"]))}, model, head, [number]
        )
        score, own, found = outcome(model, inputs)
        scores.append(score[0])
        share = weight / sum(weights)
        loss = loss + own * share
        for name, gradient in found.items():
            expected[name] = expected.get(name, 0) + gradient * share
    enable_packing(model)
    widths: list[int] = []
    handle = model.model.get_input_embeddings().register_forward_hook(
        lambda _, args, __: widths.append(args[0].numel())
    )
    for side in ("right", "left"):
        batch = padded(samples, side).to_hf()
        packed, own, found = outcome(model, with_labels(batch, model, head, list(range(len(samples)))))
        rows = [
            packed[i] if head == "sequence" else packed[i][batch["attention_mask"][i] != 0] for i in range(len(samples))
        ]
        for row, score in zip(rows, scores, strict=True):
            torch.testing.assert_close(row, score, rtol=0, atol=limits.logits * max(1.0, float(score.abs().max())))
        torch.testing.assert_close(own, loss, rtol=1e-5, atol=1e-6)
        assert found.keys() == expected.keys()
        assert furthest(found, expected) < limits.gradient
    handle.remove()
    assert widths == [sum(len(sample["input_ids"]) for sample in samples)] * 2  # no padding was computed


def test_a_pair_computes_its_prompt_once_and_is_scored_the_same() -> None:
    model = classifier("qwen3", "sequence")
    ids = torch.arange(1, 13).repeat(2, 1)
    ids[1, 9:] = 20
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    expected = outcome(model, inputs)
    computed: list[int] = []
    pack_backbone(enable_packing(model), min_shared=4, report=lambda work, _: computed.append(work.physical_tokens))
    found = outcome(model, inputs)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert furthest(found[2], expected[2]) < 1e-5
    assert computed == [9 + 3 + 3]


def test_disabling_leaves_the_classifier_as_it_was() -> None:
    model = classifier("qwen3", "sequence")
    before, hooks = type(model), dict(model.model._forward_hooks)
    assert disable_packing(enable_packing(enable_packing(model))) is model
    assert type(model) is before
    assert dict(model.model._forward_hooks) == hooks


def test_what_a_classifier_cannot_give_is_refused() -> None:
    processor = tiny_processor()
    model = enable_packing(classifier("qwen3_vl", "sequence"))
    row = VLMCollator(processor, layout="packed").collate(list(receipt_conversations(num=2, scale=0.35)))
    for call in (lambda: model(**row.to_hf()), lambda: PackedStep(model)(row)):
        with pytest.raises(
            ConfigError, match="has no language-model loss for PackedStep, PackedTrainer or a packed row"
        ):
            call()
    with pytest.raises(FamilyError, match="the probe compares losses of language models"):
        probe(model, processor)


def test_hidden_states_of_every_layer_come_from_the_plain_backbone_with_a_warning() -> None:
    model = enable_packing(classifier("qwen3", "sequence"))
    ids = torch.arange(1, 7).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with pytest.warns(UnpackedWarning, match="the hidden states of every layer"):
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
