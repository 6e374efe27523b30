"""Open the sampler of an engine, and prove that a batch-invariant engine samples and trains with the same bits."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.service.engine.engine import Engine
from vlmpack.service.engine.losses import TARGETS
from vlmpack.service.sampling.batched import BatchedSampling, SamplingSettings
from vlmpack.service.sampling.vllm import VllmSampling, open_vllm
from vlmpack.service.wire import messages

SAMPLERS = ("exact", "fast", "vllm")
"""The samplers: "exact" and "fast" use the built-in engine, and "vllm" uses vLLM. "exact" samples the same tokens
whatever else runs; "fast" does not guarantee this."""


def open_sampler(engine: Engine, kind: str = "exact", *, source: str = "") -> BatchedSampling | VllmSampling:
    """Open one of the `SAMPLERS` on the models of an engine.

    Args:
        engine: engine of the service, newly created.
        kind: "exact": the same tokens whatever else runs. "fast": without this guarantee, and several times faster in
            16 bits. "vllm": with vLLM, which loads the model a second time.
        source: folder or hub name of the model, for vLLM.

    Raises:
        ConfigError: vLLM is not installed, the limits allow a rank that it does not have, or the engine is
            batch-invariant.
        FamilyError: the engine is to be batch-invariant, but samples and trains with different bits.
    """
    invariant, limits = engine.config.batch_invariant, engine.config.limits
    if kind == "vllm":
        if invariant:
            raise ConfigError("--batch-invariant: vLLM has other kernels than training; leave out --sampler vllm")
        return VllmSampling(engine, open_vllm(source, max_context=engine.base.max_context, limits=limits))
    if invariant:
        check_batch_invariance(engine)
    rounding = 0.0 if kind == "fast" or invariant else None  # batch-invariant logits have no error to check
    return BatchedSampling(engine, SamplingSettings(rounding=rounding, max_snapshots=limits.samplers_open))


# ---------------------------------------------------------------------- batch invariance


def check_batch_invariance(engine: Engine) -> None:
    """Sample from an engine, train on the samples, and compare the log-probabilities.

    Raises:
        FamilyError: a layer of the model has no batch-invariant form.
        ConfigError: this machine's kernels give other bits in another place.
    """
    family, name = engine.family, "batch-invariant"
    sampler, results, data = BatchedSampling(engine, SamplingSettings(rounding=0.0)), {}, []
    prompts = {str(length): _prompt(engine, length) for length in (5, 40)}
    params = messages.SamplingParams(max_tokens=8, seed=0, stop=())
    for key, prompt in prompts.items():
        request = messages.Sample(sampling_session_id="", seq_id=0, prompt=prompt, num_samples=3, params=params)
        sampler.add(key, None, engine.encode_prompt(request), request)
    while not sampler.is_idle:
        results |= dict(sampler.step())
    if failed := next((result for result in results.values() if isinstance(result, messages.Failure)), None):
        raise FamilyError(f"{family.model_type}: {failed.message}")
    sampled = [(prompts[key], sequence) for key, result in results.items() for sequence in result.sequences]
    for prompt, sequence in sampled:
        chunks = (*prompt, messages.TextChunk(tokens=sequence.tokens[:-1]))
        before = engine.measure(prompt).tokens - 1
        targets = np.concatenate((np.zeros(before, np.int64), sequence.tokens))
        data.append(messages.Datum(chunks=chunks, inputs={TARGETS: targets}))
    engine.create(name, messages.LoraConfig(rank=1))
    request = messages.ForwardBackward(model_id=name, seq_id=1, data=tuple(data), loss_fn="cross_entropy")
    work = engine.forward_backward([engine.encode(request)])
    while work.rows_left:
        work.run_row()
    engine.free(name)
    engine.counts.subtract(engine.counts)  # no client has sent this work
    (trained,) = work.results()
    if isinstance(trained, messages.Failure) or not all(
        np.array_equal(logprobs[-len(sequence.tokens) :], sequence.logprobs)
        for logprobs, (_, sequence) in zip(trained.logprobs, sampled, strict=True)
    ):
        remedy = "serve without --batch-invariant"
        raise FamilyError(f"{family.model_type}: sampling and training differ in a bit beside other tokens; {remedy}")


def _prompt(engine: Engine, length: int) -> tuple[messages.Chunk, ...]:
    """Return a prompt of text, with an image if the model takes images."""
    first, rest = (messages.TextChunk(tokens=np.arange(*ids, dtype=np.int32)) for ids in ((20, 23), (23, 20 + length)))
    if not engine.base.is_vision:
        return first, rest
    file = BytesIO()
    Image.effect_noise((64, 64), 64).save(file, "PNG")
    return first, messages.ImageChunk(data=file.getvalue(), format="png"), rest
