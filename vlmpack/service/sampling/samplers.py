"""Open the sampler of an engine, and prove that a batch-invariant engine samples and trains with the same bits."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
from PIL import Image

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.service.engine.datums import EncodedDatum, EncodedRequest, EncodedSequence, image_token_of, placeholders_of
from vlmpack.service.engine.engine import Engine
from vlmpack.service.engine.losses import TARGETS, LossInputs, bind_loss
from vlmpack.service.sampling.batched import BatchedSampling, new_sampling
from vlmpack.service.sampling.vllm import VllmSampling, open_vllm
from vlmpack.service.wire.messages import Failure, ImageChunk, LoraConfig, Sample, SamplingParams, TextChunk

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
    if kind != "vllm":
        if engine.config.batch_invariant:
            check_batch_invariance(engine)
        return new_sampling(engine, rounding=None if kind == "exact" else 0.0)
    if engine.config.batch_invariant:
        raise ConfigError("--batch-invariant: vLLM has other kernels than training; leave out --sampler vllm")
    config, limits = engine.model.config, engine.config.limits
    return VllmSampling(
        open_vllm(source, max_context=engine.base.max_context, limits=limits),
        engine.base,
        image_token_id=image_token_of(engine.family, config),
        image_limits=limits.image_limits,
        forbidden=tuple(placeholders_of(engine.family, config)),
    )


# ---------------------------------------------------------------------- batch invariance


def check_batch_invariance(engine: Engine) -> None:
    """Sample from an engine, train on the samples, and compare the log-probabilities.

    Raises:
        FamilyError: a layer of the model has no batch-invariant form.
        ConfigError: this machine's kernels give other bits in another place.
    """
    family = engine.family
    sampler, results = new_sampling(engine), {}
    prompts = {str(length): _prompt(engine, length) for length in (5, 40)}
    params = SamplingParams(max_tokens=8, seed=0, stop=())
    for key, prompt in prompts.items():
        sampler.add(
            key, None, prompt, Sample(sampling_session_id="", seq_id=0, prompt=(), num_samples=3, params=params)
        )
    while not sampler.is_idle:
        results |= dict(sampler.step())
    data, sampled = [], []
    for key, result in results.items():
        if isinstance(result, Failure):
            raise FamilyError(f"{family.model_type}: {result.message}")
        for sequence in result.sequences:
            ids = np.concatenate((prompts[key].input_ids, sequence.tokens.astype(np.int64)))
            arrays = {TARGETS: ids[1:], "weights": np.ones(len(ids) - 1, np.float32)}
            inputs = LossInputs(arrays=arrays, shape=(len(ids) - 1,))
            data.append(EncodedDatum(sequence=replace(prompts[key], input_ids=ids[:-1]), inputs=inputs))
            sampled.append(sequence.logprobs)
    name = "batch-invariant"
    engine.create(name, LoraConfig(rank=1))
    loss = bind_loss("cross_entropy", {})
    work = engine.forward_backward([EncodedRequest(model_id=name, data=tuple(data), loss=loss)])
    while work.rows_left:
        work.run_row()
    engine.free(name)
    engine.counts.subtract(engine.counts)  # no client has sent this work
    (trained,) = work.results()
    if isinstance(trained, Failure) or not all(
        np.array_equal(of_datum[-len(logprobs) :], logprobs)
        for of_datum, logprobs in zip(trained.logprobs, sampled, strict=True)
    ):
        raise FamilyError(
            f"{family.model_type}: sampling and training differ in a bit, so a layer computes a token differently "
            "beside others; serve without --batch-invariant"
        )


def _prompt(engine: Engine, length: int) -> EncodedSequence:
    """Return a prompt of text, with an image if the model takes images."""
    first, rest = (TextChunk(tokens=np.arange(*ids, dtype=np.int32)) for ids in ((20, 23), (23, 20 + length)))
    if not engine.base.is_vision:
        return engine.encode_chunks([first, rest])
    file = BytesIO()
    Image.effect_noise((64, 64), 64).save(file, "PNG")
    return engine.encode_chunks([first, ImageChunk(data=file.getvalue(), format="png"), rest])
