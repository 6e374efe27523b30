"""sampling: concurrent requests through the step service's own sampler, against transformers' continuous batching.

exact      the default: tokens that do not depend on what shares the batch
fast       without the checks that this takes
upstream   `generate_batch`, with pages and batches of the size that was fastest on a CPU, and a cache with room for all

All draw from the full distribution at temperature 1, and no sequence ends early. Before anything is timed, their greedy
tokens have to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.measuring import BenchSettings, Figure, Target, alternate
from benchmarks.receipts import ReceiptShapes, receipt_model
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.service import Engine, open_sampler
from vlmpack.service.engine.datums import EncodedSequence
from vlmpack.service.wire.messages import Sample, SampleResult, SamplingParams
from vlmpack.testing import tiny_processor

CASE = "sampling"
SAMPLERS = ("exact", "fast")
PAGE, BATCH = 16, 512


@final
@dataclass(frozen=True, kw_only=True)
class SamplingShapes:
    """Sizes of the model and of the requests."""

    receipts: ReceiptShapes = field(default_factory=ReceiptShapes)
    """Sizes of the model, a Qwen3."""
    requests: int = 32
    """Number of concurrent requests."""
    shortest: int = 32
    """Tokens of the shortest prompt."""
    longest: int = 128
    """Tokens of the longest prompt."""
    sampled: int = 32
    """Tokens to sample for each prompt."""


@final
class Samplers:
    """The same model and prompts in the step service and in transformers."""

    def __init__(self, settings: BenchSettings, shapes: SamplingShapes) -> None:
        def model() -> Any:
            family = family_named("qwen3")
            return receipt_model(family, shapes.receipts, seed=settings.seed, device=settings.device).eval()

        rng = np.random.default_rng(settings.seed)
        lengths = rng.integers(shapes.shortest, shapes.longest, shapes.requests, endpoint=True)
        self.prompts = [rng.integers(20, shapes.receipts.vocab_size, length) for length in lengths]
        self.sampled = shapes.sampled
        self.upstream_model = model()
        self.engine = Engine(model(), tiny_processor().tokenizer, name=CASE, tokenizer_id=CASE)
        self.blocks = sum(-(-(int(length) + shapes.sampled) // PAGE) for length in lengths)

    def ours(self, sampler: str, temperature: float = 1.0) -> list[list[int]]:
        """Return the tokens that the service samples for each prompt."""
        sampling = open_sampler(self.engine, sampler)
        params = SamplingParams(max_tokens=self.sampled, stop=(), seed=1, temperature=temperature)
        request = Sample(sampling_session_id=CASE, seq_id=0, prompt=(), num_samples=1, params=params)
        for number, ids in enumerate(self.prompts):
            sampling.add(str(number), None, EncodedSequence(input_ids=ids, images=()), request)
        tokens: dict[str, list[int]] = {}
        while not sampling.is_idle:
            for key, result in sampling.step():
                assert isinstance(result, SampleResult), result
                tokens[key] = result.sequences[0].tokens.tolist()
        return [tokens[str(number)] for number in range(len(self.prompts))]

    def upstream(self, temperature: float = 1.0) -> list[list[int]]:
        """Return the tokens that transformers samples for each prompt."""
        heat: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        outputs = self.upstream_model.generate_batch(
            [ids.tolist() for ids in self.prompts],
            generation_config=GenerationConfig(max_new_tokens=self.sampled, eos_token_id=-1, **heat),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=self.blocks, max_batch_tokens=BATCH
            ),
        )
        return [output.generated_tokens for output in outputs.values()]


def measure_sampling(settings: BenchSettings, shapes: SamplingShapes) -> Iterator[Figure]:
    """Measure sampled tokens per second.

    Raises:
        VlmpackError: the samplers do not choose the same greedy tokens.
    """
    samplers = Samplers(settings, shapes)
    expected = samplers.upstream(temperature=0.0)
    for sampler in SAMPLERS:
        if samplers.ours(sampler, temperature=0.0) != expected:
            raise VlmpackError(f"the sampler {sampler} and transformers do not choose the same greedy tokens")
    ways = {
        "exact": lambda: samplers.ours("exact"), "fast": lambda: samplers.ours("fast"), "upstream": samplers.upstream,
    }  # fmt: skip
    timings = alternate(ways, seconds=settings.seconds, device=settings.device)
    count = shapes.requests * shapes.sampled
    for name in ways:
        yield Figure.rate(CASE, name, timings, name, count, "tokens/s", settings.clock)
    for name in SAMPLERS:
        target = Target(limit=1.0, better="higher")
        yield Figure.compared(CASE, f"{name}: speed-up", timings, ("upstream", name), settings, target=target)
