"""The GRPO step of examples/grpo_own_loop.py on one tree row, against plain transformers on a padded batch."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import picture
from equality import gradients
from test_example import EXAMPLES, run
from torch.nn.utils.rnn import pad_sequence

from vlmpack import PackedStep, VLMCollator, enable_packing, unpack
from vlmpack.collate import SharePrefixes
from vlmpack.testing import tiny_model, tiny_processor

ANSWERS = ([5, 9, 2], [5, 9], [7], [5, 9, 2, 4, 8], [11, 3])
ADVANTAGES = torch.tensor([1.0, -0.6, 0.3, -1.4, 0.5])
TEMPERATURE = 0.8


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("grpo_own_loop")


@pytest.fixture(scope="module")
def processor() -> Any:
    return tiny_processor(max_pixels=16 * 32 * 32)


def policy(processor: Any, *, seed: int = 0) -> Any:
    return tiny_model(processor=processor, hidden=32, heads=2, layers=2, vision_depth=1, seed=seed)


def padded_logprobs(model: Any, samples: list[dict[str, Any]]) -> torch.Tensor:
    """[B, S - 1]: log-probabilities of the next tokens out of plain transformers, prompts and padding included."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    mask = pad_sequence([torch.ones_like(sample["input_ids"]) for sample in samples], batch_first=True)
    media = {name: torch.cat([s[name] for s in samples]) for name in ("pixel_values", "image_grid_thw")}
    types = (ids == model.config.image_token_id).long()
    logits = model(input_ids=ids, attention_mask=mask, mm_token_type_ids=types, use_cache=False, **media).logits
    return (logits[:, :-1].float() / TEMPERATURE).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def padded_loss(new: Any, old: Any, reference: Any, samples: list[dict[str, Any]]) -> torch.Tensor:
    """The objective of each sample, written down token by token."""
    losses = []
    for i, sample in enumerate(samples):
        terms = []
        for at in (sample["labels"][1:] != -100).nonzero()[:, 0].tolist():
            ratio, away = (new[i, at] - old[i, at]).exp(), reference[i, at] - new[i, at]
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.minimum(ratio * ADVANTAGES[i], clipped * ADVANTAGES[i])
            terms.append(0.02 * (away.exp() - away - 1) - gain)
        losses.append(torch.stack(terms).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_is_that_of_plain_transformers(shared: bool, example: Any, processor: Any) -> None:
    questions = [example.ask(processor, picture(96, 64, seed=seed)) for seed in (0, 1)]
    samples = [example.sample(questions[i % 2], torch.tensor(answer)) for i, answer in enumerate(ANSWERS)]
    plain, old, reference = (policy(processor, seed=seed) for seed in (0, 1, 2))
    with torch.no_grad():  # other weights, so that ratios are clipped and the penalty is not zero
        before, start = (padded_logprobs(model, samples) for model in (old, reference))
        near = torch.lerp(padded_logprobs(plain, samples), before, 0.1)
    truth = padded_loss(padded_logprobs(plain, samples), near, start, samples)
    truth.backward()

    model = enable_packing(policy(processor))
    sharing = SharePrefixes(min_shared=4) if shared else False
    row: Any = VLMCollator(processor, layout="packed", share_prefixes=sharing).collate(samples)
    is_target = unpack(row.shift_labels != example.IGNORE, row.segments)
    result = PackedStep(model)(row, temperature=TEMPERATURE)
    columns = [torch.nn.functional.pad(values, (0, 1)) * is_target for values in (near, start)]
    loss = example.grpo_loss(result.logprobs, *columns, ADVANTAGES, is_target)
    loss.backward()

    assert loss.item() == pytest.approx(truth.item(), abs=1e-6)
    assert abs(truth.item()) > 0.05
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name
    assert (result.work.physical_tokens < result.work.real_tokens / 2) == shared
    assert (result.work.vision_patches, len(samples)) == ((2 if shared else 5) * 4 * 6, 5)


@pytest.mark.slow
def test_the_reward_rises(tmp_path: Path) -> None:
    lines = run("grpo_own_loop.py", "--rounds", "6", folder=tmp_path)
    rewards = [float(re.search(r"mean reward ([\d.]+), (\d+) of (\d+) tokens computed", line)[1]) for line in lines]  # pyright: ignore
    assert len(rewards) == 6
    assert max(rewards[-2:]) > rewards[0] > 0.1
