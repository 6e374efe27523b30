"""Families beyond Qwen, end to end: collated and packed, samples are computed as alone by their unmodified model."""

import pytest
import torch
from chats import CHATTING, SHOWN, chat, picture, processor_of
from equality import by_sample, limits_of
from tiers import tiers

from vlmpack.collate import VLMCollator
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import METADATA_KEY
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import tiny_model
from vlmpack.testing.recipes import RECIPES

pytestmark = pytest.mark.every_family
TRAINED = [family for family in CHATTING if family in FAMILIES and family in RECIPES]


def features():
    """Two images of other shapes, text, one image, and an image in a second question."""
    later = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And here?"}]},
        {"role": "assistant", "content": "Nothing"},
    ]
    return [
        chat("Total?", "75,000", picture(90, 61, seed=1), picture(40, 170)),
        chat("2 + 2?", "4"),
        chat("What?", "A receipt", picture(300, 61, seed=2)),
        {"messages": later, "images": [picture(61, 90, seed=3)]},
    ]


def collator_of(processor, **settings):
    """Pixels of the weights' type: Llama 4's processor makes bfloat16."""
    return VLMCollator(processor, pixel_dtype=torch.float32, **settings)


def alone(model, processor):
    """Logits and summed loss of each sample by itself, and the gradients of all losses, by the unpacked model."""
    logits, loss = [], torch.zeros(())
    for feature in features():
        batch = collator_of(processor)([feature])
        del batch[METADATA_KEY]
        out = model(**batch)
        logits.append(out.logits[0].detach())
        loss = loss + out.loss * (batch["labels"][:, 1:] != -100).sum()
    loss.backward()
    return logits, loss.detach(), taken_gradients(model)


def taken_gradients(model):
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def further_apart(ours, theirs):
    """The worst distance of two gradients, by the scale of the largest of all."""
    assert ours.keys() == theirs.keys()
    scale = max(gradient.abs().max() for gradient in theirs.values())
    return max((ours[name] - gradient).abs().max() / scale for name, gradient in theirs.items())


@pytest.mark.parametrize("family", tiers(TRAINED, SHOWN))
def test_collated_samples_are_trained_as_alone(family):
    processor = processor_of(family)
    model = tiny_model(family, seed=3, processor=processor).eval()
    limits = limits_of(family)
    logits, loss, gradients = alone(model, processor)
    row = collator_of(processor, layout="packed").collate(features())
    result = PackedStep(model)(row, logits=True)
    result.loss_sum.backward()
    assert result.num_targets == row.metadata.num_targets
    assert abs(result.loss_sum.detach() - loss) <= limits.loss * loss
    for packed, single in zip(by_sample(result), logits, strict=True):
        assert (packed - single).abs().max() <= limits.logits
    assert further_apart(taken_gradients(model), gradients) <= limits.gradient
    assert (row.mm_token_type_ids == 1).sum() > 0


@pytest.mark.parametrize("family", tiers(TRAINED, ["gemma3"]))
def test_padded_batches_are_trained_as_alone(family):
    processor = processor_of(family)
    model = tiny_model(family, seed=3, processor=processor).eval()
    limits = limits_of(family)
    _, loss, gradients = alone(model, processor)
    batch = collator_of(processor)(features())
    targets = batch[METADATA_KEY].num_targets
    enable_packing(model)
    ours = model(**batch).loss * targets
    ours.backward()
    assert abs(ours.detach() - loss) <= limits.loss * loss
    assert further_apart(taken_gradients(model), gradients) <= limits.gradient
