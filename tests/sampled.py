"""Samplers over tiny models, the requests of their tests, and what the unmodified model says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_service import plain_inputs

from vlmpack.collate.encoded import Visual
from vlmpack.families import family_named
from vlmpack.service.engine.datums import EncodedSequence, image_token_of
from vlmpack.service.engine.engine import Engine
from vlmpack.service.sampling.batched import BatchedSampling, Finished, SamplingSettings
from vlmpack.service.wire.messages import Failure, Sample, SampledSequence, SampleResult, SamplingParams

NOTHING: Mapping[str, Any] = {}
SIZES = ((), ((4, 6),), (), ((6, 4), (4, 4)), ())
"""Images of prompts, in patches."""


def sampler_of(engine: Engine, *, context: int = 512, **settings: Any) -> BatchedSampling:
    engine = copy(engine)
    engine.base = replace(engine.base, max_context=context)
    return BatchedSampling(engine, SamplingSettings(**settings))


def prompts_of(engine: Engine, *, count: int = 16, seed: int = 0) -> list[EncodedSequence]:
    """Prompts of 2 to 40 tokens of text; where the family takes images, two of five have some."""
    rng = np.random.default_rng(seed)
    return [prompt_of(engine, rng, length=int(rng.integers(2, 40)), images=SIZES[i % 5]) for i in range(count)]


def prompt_of(
    engine: Engine, rng: np.random.Generator, *, length: int, images: Sequence[tuple[int, int]] = ()
) -> EncodedSequence:
    model, family = model_of(engine), family_named(engine.base.arch)
    ids, pictures = [rng.integers(20, 500, length)], []
    for rows, columns in images if family.has_vision else ():
        config = model.config
        run = [config.image_token_id] * (rows * columns // family.merge(config) ** 2)
        ids += [np.array([config.vision_start_token_id, *run, config.vision_end_token_id]), rng.integers(20, 500, 3)]
        pixels = rng.normal(size=(rows * columns, *family.patch_shape(config))).astype(np.float32)
        pictures.append(Visual(pixels=torch.from_numpy(pixels), grid=(1, rows, columns)))
    patches = tuple(rows * columns for rows, columns in images[: len(pictures)])
    return EncodedSequence(
        input_ids=np.concatenate(ids).astype(np.int64),
        images=tuple(pictures),
        patches_of_images=patches,
        image_token=image_token_of(family, model.config),
    )


def model_of(engine: Engine) -> Any:
    """The base model."""
    with engine.open_weights(None).applied() as model:
        return model


def sample(
    *,
    num_samples: int = 1,
    prompt_logprobs: bool = False,
    top: int = 0,
    wants: Mapping[str, Any] = NOTHING,
    **params: Any,
) -> Sample:
    """A request; its prompt is given to the sampler encoded."""
    settings = SamplingParams(**{"max_tokens": 12, "seed": 1, "stop": (), **params})
    return Sample(
        sampling_session_id="session",
        seq_id=0,
        prompt=(),
        num_samples=num_samples,
        params=settings,
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=top,
        **wants,
    )


def finish(sampler: BatchedSampling, *, begins_again: bool = False) -> dict[str, SampleResult | Failure]:
    """What has become of every request; `begins_again`: some fail together and are right alone."""
    found: list[Finished] = []
    while not sampler.is_idle:
        found += sampler.step()
    assert len(dict(found)) == len(found)
    assert (sampler.begun_again > 0) == begins_again
    return dict(found)


def run(
    sampler: BatchedSampling,
    requests: Mapping[str, tuple[EncodedSequence, Sample]],
    folder: Path | None = None,
    *,
    begins_again: bool = False,
) -> dict[str, SampleResult | Failure]:
    """Sample from a snapshot, or from the base model."""
    for key, (prompt, request) in requests.items():
        sampler.add(key, folder, prompt, request)
    return finish(sampler, begins_again=begins_again)


def run_one(
    sampler: BatchedSampling, prompt: EncodedSequence, request: Sample, folder: Path | None = None
) -> SampleResult:
    result = run(sampler, {"only": (prompt, request)}, folder)["only"]
    assert isinstance(result, SampleResult), result
    return result


def tokens_of(result: SampleResult | Failure) -> list[list[int]]:
    assert isinstance(result, SampleResult), result
    return [sequence.tokens.tolist() for sequence in result.sequences]


# ---------------------------------------------------------------------- the unmodified model


@torch.no_grad()
def plain_greedy(model: Any, prompt: EncodedSequence, *, count: int, suppressed: Sequence[int]) -> list[int]:
    """Tokens of `generate`, alone."""
    ids = model.generate(
        **plain_inputs(prompt, model.config),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=list(suppressed) or None,
    )
    return ids[0, prompt.length :].tolist()


@torch.no_grad()
def plain_logprobs(model: Any, prompt: EncodedSequence, sequence: SampledSequence | None = None) -> np.ndarray:
    """Log-probability of each token after the first of a prompt and what was sampled, in one full forward pass."""
    more = [] if sequence is None else sequence.tokens.tolist()
    inputs = plain_inputs(prompt, model.config, more=more)
    logprobs = plain_distribution(model, prompt, more)
    return logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0].numpy()


@torch.no_grad()
def plain_distribution(model: Any, prompt: EncodedSequence, more: Sequence[int] = ()) -> torch.Tensor:
    """Log-probabilities of every id in the place of each token after the first, in one full forward pass."""
    inputs = plain_inputs(prompt, model.config, more=more)
    return model(**inputs, use_cache=False).logits[0, :-1].float().log_softmax(-1)
