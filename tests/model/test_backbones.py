"""Models without a head (embedding models) on packed batches: hidden states, loss and every gradient as alone."""

import copy
from typing import Any

import pytest
import torch
from cases import slow
from equality import limits_of, without_zeros
from torch import nn
from transformers import AutoModel

from vlmpack import PackedStep, VLMCollator, disable_packing, enable_packing, pack, probe
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families import family_of
from vlmpack.model.backbone import pack_backbone
from vlmpack.testing import mixed_samples, padded, receipt_conversations, tiny_config, tiny_processor
from vlmpack.testing.comparison import distance
from vlmpack.testing.samples import alone

FAMILIES = [
    *("qwen3", "qwen3_vl", "qwen3_5", "gemma3"),
    *slow("qwen2_5_vl", "qwen3_vl_moe", "qwen3_moe", "qwen4_exp", "lfm2", "gemma4", "gpt_oss", "internvl"),
    *slow("llava", "glm4v", "qwen2_5_omni_thinker", "llama4_text", "paligemma"),
]


def without_head(family: str) -> Any:
    """A tiny model without a head, in eval mode."""
    torch.manual_seed(0)
    return AutoModel.from_config(tiny_config(family)).float().eval()


def inputs_of(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What an embedding trainer passes: no labels, and the token types that transformers itself needs."""
    family = family_of(model)
    kept = {name: value for name, value in batch.items() if name not in ("labels", "mm_token_type_ids", "vlmpack")}
    if family.token_types is not None:
        kept[family.token_types] = family.media_types(batch["input_ids"], model.config)
    return kept


def mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean pooling, [B, D]."""
    return (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]


def last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Last-token pooling, [B, D]."""
    places = torch.arange(mask.shape[1]).expand_as(mask).masked_fill(mask == 0, -1)
    return hidden[torch.arange(len(hidden)), places.argmax(1)]


def contrastive(embeddings: torch.Tensor) -> torch.Tensor:
    """Each sample's positive is the next one; the others of the batch are negatives."""
    normal = nn.functional.normalize(embeddings, dim=-1)
    likeness = (normal @ normal.T).masked_fill(torch.eye(len(normal), dtype=torch.bool), -1e4)
    return nn.functional.cross_entropy(4 * likeness, torch.arange(1, len(normal) + 1) % len(normal))


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens_of(model: Any, computed: list[int]) -> Any:
    return model.get_input_embeddings().register_forward_hook(lambda _, args, __: computed.append(args[0].numel()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sample_is_embedded_and_learned_from_as_alone(family: str) -> None:
    model, limits = without_head(family), limits_of(family)
    samples = mixed_samples(model.config, seed=1)
    singly = []
    for sample in samples:
        mask = torch.ones(1, len(sample["input_ids"]), dtype=torch.int64)
        singly.append(model(**inputs_of(model, {**alone(sample), "attention_mask": mask})).last_hidden_state)
    pooled = {pool: torch.cat([pool(one, torch.ones(one.shape[:2])) for one in singly]) for pool in (mean, last)}
    largest = [max(1.0, float(one.detach().abs().max())) for one in singly]
    expected_loss = contrastive(pooled[mean]) + contrastive(pooled[last])
    expected = gradients(model, expected_loss)

    computed: list[int] = []
    tokens_of(enable_packing(model), computed)
    for side in ("right", "left"):
        batch = padded(samples, side).to_hf()
        hidden, mask = model(**inputs_of(model, batch)).last_hidden_state, batch["attention_mask"]
        for row, real, one, scale in zip(hidden, mask != 0, singly, largest, strict=True):
            torch.testing.assert_close(row[real], one[0], rtol=0, atol=limits.logits * scale)
            assert not row[~real].any()
        loss = contrastive(mean(hidden, mask)) + contrastive(last(hidden, mask))
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        found = gradients(model, loss)
        assert found.keys() == expected.keys()
        least = max(float(gradient.abs().max()) for gradient in expected.values()) * 1e-3
        for name, gradient in without_zeros(expected).items():
            assert distance(found[name], gradient, least=least) < limits.gradient, name
    assert computed == [sum(len(sample["input_ids"]) for sample in samples)] * 2  # no padding was computed


def test_a_row_returns_the_hidden_states_of_its_tokens() -> None:
    model = enable_packing(without_head("qwen3_vl"))
    samples = mixed_samples(model.config, seed=1)
    row, *singly = (model(**pack(padded(part, "right")).to_hf()).last_hidden_state for part in (samples, *zip(samples)))
    torch.testing.assert_close(row, torch.cat(singly, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrapped", ["peft", "module"])
def test_a_model_inside_a_wrapper_is_found(wrapped: str) -> None:
    core = without_head("qwen3")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    if wrapped == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], task_type="FEATURE_EXTRACTION", init_lora_weights=False
        )
        model = peft.get_peft_model(core, config)
    else:  # as SentenceTransformer holds it
        model = nn.ModuleDict({"transformer": core})
    call = model if wrapped == "peft" else core
    expected = call(input_ids=ids, attention_mask=mask).last_hidden_state
    assert enable_packing(model) is model
    computed: list[int] = []
    tokens_of(core, computed)
    found = call(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[mask != 0], expected[mask != 0], rtol=1e-5, atol=1e-5)
    assert computed == [10]


def test_a_shared_prompt_is_computed_once() -> None:
    model = without_head("qwen3")
    ids = torch.arange(1, 13).repeat(2, 1)
    ids[1, 9:] = 20
    expected = model(input_ids=ids).last_hidden_state
    computed: list[int] = []
    pack_backbone(enable_packing(model), min_shared=4, report=lambda work, _: computed.append(work.physical_tokens))
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert computed == [9 + 3 + 3]


def test_copies_pack_and_disabling_leaves_the_model_as_it_was() -> None:
    model = without_head("qwen3")
    before = type(model)
    copied = copy.deepcopy(enable_packing(enable_packing(model)))
    assert disable_packing(model) is model
    assert type(model) is before
    ids, mask = torch.arange(1, 9).view(2, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    computed: list[int] = []
    tokens_of(copied, computed)
    packed = copied(input_ids=ids, attention_mask=mask).last_hidden_state
    plain = model(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(packed[mask != 0], plain[mask != 0], rtol=1e-5, atol=1e-5)
    assert computed == [6]


def test_what_a_model_without_a_head_cannot_give_is_refused() -> None:
    processor = tiny_processor()
    model = enable_packing(without_head("qwen3_vl"))
    row = VLMCollator(processor, layout="packed").collate(list(receipt_conversations(num=2, scale=0.35)))
    with pytest.raises(ConfigError, match="has no language-model loss for PackedStep"):
        PackedStep(model)(row)
    with pytest.raises(FamilyError, match="the probe compares losses of language models"):
        probe(model, processor)
