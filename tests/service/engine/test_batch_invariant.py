"""Log-probabilities of sampled tokens equal those of training, to the bit, whatever else is computed beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sampled import prompt_of, prompts_of, run, sample, sampler_of
from step_service import gradients, largest_difference, lora, plain_model, served, set_adapter, tiny_engine

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.service.engine import batch_invariant
from vlmpack.service.engine.datums import EncodedDatum, EncodedRequest, EncodedSequence
from vlmpack.service.engine.engine import Engine
from vlmpack.service.engine.losses import TARGETS, LossInputs, bind_loss
from vlmpack.service.sampling.generation import Reader
from vlmpack.service.sampling.samplers import check_batch_invariance, open_sampler
from vlmpack.service.wire.messages import SampleResult

WINDOWED = "gemma3_text"
"""A family with windows, here as long as the longest sequence."""
SERVED = served("qwen3_vl", among=["qwen3_moe", "glm4v", "granite", "deepseek_v3", "ernie4_5_vl_moe"])
"""Families that differ in what they compute besides windows and recurrent layers."""


def engine_of(family: str = "qwen3_vl", *, dtype: torch.dtype = torch.float32, **settings: Any) -> Engine:
    """An engine whose rows are short and share prefixes, with a trained adapter "a"."""
    model = plain_model(family)
    if family == WINDOWED:
        model.config.sliding_window, weights = model.config.max_position_embeddings, model.state_dict()
        model = type(model)(model.config).eval()
        model.load_state_dict(weights)
    model = model.to(dtype)
    limits = {"row_tokens": 300}
    engine = tiny_engine(family, model=model, limits=limits, **{"min_shared": 4, "batch_invariant": True, **settings})
    if engine.config.batch_invariant:
        check_batch_invariance(engine)
    engine.create("a", lora())
    set_adapter(engine)
    return engine


def sampled(engine: Engine, folder: Path, *, seed: int = 0, count: int = 3) -> list[tuple[EncodedDatum, np.ndarray]]:
    """Samples of the adapter, as datums with the log-probabilities of their tokens. Some prompts share a prefix with an
    image, one is long, and batches change with the seed."""
    engine.save("a", folder, optimizer=False)
    rng = np.random.default_rng(seed)
    head = prompt_of(engine, rng, length=30, images=((4, 6),))
    tails = [np.concatenate((head.input_ids, rng.integers(20, 500, n))) for n in (1, 17)]
    prompts = [*prompts_of(engine, count=count, seed=seed), *(replace(head, input_ids=ids) for ids in tails)]
    prompts.append(prompt_of(engine, rng, length=int(rng.integers(100, 600))))
    kinds = {str(i): sample(seed=i, num_samples=1 + i % 3, max_tokens=4 + 5 * i % 14) for i in range(len(prompts))}
    batches = {"decode_steps": int(rng.integers(1, 9)), "prefill_tokens": int(rng.integers(50, 600))}
    sampler = sampler_of(engine, context=1024, max_sequences=int(rng.integers(2, 20)), rounding=0.0, **batches)
    results = run(sampler, {key: (prompts[int(key)], kind) for key, kind in kinds.items()}, folder)
    pairs = []
    for key, result in results.items():
        assert isinstance(result, SampleResult)
        for sequence in result.sequences:
            ids = np.concatenate((prompts[int(key)].input_ids, sequence.tokens.astype(np.int64)))
            pairs.append((datum_of(replace(prompts[int(key)], input_ids=ids)), sequence.logprobs))
    return [pairs[at] for at in rng.permutation(len(pairs))]


def datum_of(sequence: EncodedSequence) -> EncodedDatum:
    """A datum in which every token is a target."""
    targets = sequence.input_ids[1:]
    inputs = LossInputs(arrays={TARGETS: targets, "weights": np.ones(len(targets), np.float32)}, shape=(len(targets),))
    return EncodedDatum(sequence=replace(sequence, input_ids=sequence.input_ids[:-1]), inputs=inputs)


def trained(engine: Engine, data: Sequence[EncodedDatum]) -> tuple[np.ndarray, ...]:
    """Log-probabilities of the datums in a training step."""
    request = EncodedRequest(model_id="a", data=tuple(data), loss=bind_loss("cross_entropy", {}))
    work = engine.forward_backward([request])
    while work.rows_left:
        work.run_row()
    (result,) = work.results()
    return result.logprobs  # pyright: ignore[reportAttributeAccessIssue]


def tokens_off(engine: Engine, pairs: Sequence[tuple[EncodedDatum, np.ndarray]]) -> int:
    """Number of sampled tokens whose log-probability is another number in training."""
    logprobs = trained(engine, [datum for datum, _ in pairs])
    return sum(int((ours[-len(at) :] != at).sum()) for ours, (_, at) in zip(logprobs, pairs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*SERVED, WINDOWED])
def test_training_gives_the_bits_of_sampling(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    engine = engine_of(family, dtype=dtype)
    pairs = sampled(engine, tmp_path)
    assert sum(len(logprobs) for _, logprobs in pairs) > 80
    assert tokens_off(engine, pairs) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "threads", "tokens"),
    [(torch.float32, 1, 400), (torch.bfloat16, 1, 400), (torch.bfloat16, 2, 100)],
    ids=str,
)
def test_many_tokens_have_the_same_bits(dtype: torch.dtype, threads: int, tokens: int, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine, count, seed = engine_of(dtype=dtype, gradient_checkpointing=True), 0, 0
        while count < tokens:
            (folder := tmp_path / str(seed)).mkdir()
            pairs = sampled(engine, folder, seed=seed, count=8)
            assert tokens_off(engine, pairs) == 0
            count, seed = count + sum(len(logprobs) for _, logprobs in pairs), seed + 1
    finally:
        torch.set_num_threads(before)


def test_without_the_setting_most_tokens_differ(tmp_path: Path) -> None:
    engine = engine_of(dtype=torch.bfloat16, batch_invariant=False)
    pairs = sampled(engine, tmp_path)
    assert tokens_off(engine, pairs) > 40


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_gradients_are_those_of_the_default_also_of_layers_computed_again(family: str) -> None:
    settings: tuple[dict[str, Any], ...] = ({}, {"gradient_checkpointing": True}, {"batch_invariant": False})
    engines = [engine_of(family, **each) for each in settings]
    prompts = prompts_of(engines[0], count=5)
    longer = replace(prompts[1], input_ids=np.concatenate((prompts[1].input_ids, [30, 31])))
    data = [datum_of(prompt) for prompt in (*prompts, longer)]
    *ours, plain = [trained(engine, data) for engine in engines]
    for logprobs in ours:
        for got, expected in zip(logprobs, plain, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
    for engine in engines[:2]:
        assert largest_difference(gradients(engine), gradients(engines[2])) < 1e-5


def test_all_weights_are_trained_and_sampled_alike(tmp_path: Path) -> None:
    engine = engine_of("qwen3", dtype=torch.bfloat16)
    engine.free("a")
    engine.create("a", None)
    assert tokens_off(engine, sampled(engine, tmp_path)) == 0


def test_shapes_that_do_not_agree_on_a_machine_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used: set[int] = set()

    def recorded(x: torch.Tensor, *weights: Any) -> torch.Tensor:
        used.add(len(x))
        return F.linear(x, *weights)

    monkeypatch.setattr(batch_invariant, "_linear_agrees", lambda w, bias, rows: rows in (16, 64))
    monkeypatch.setattr(batch_invariant, "_attention_agrees", lambda queries, keys, *of: keys % 512 == 0)
    engine = engine_of("qwen3")
    monkeypatch.setattr(batch_invariant, "F", SimpleNamespace(linear=recorded, pad=F.pad))
    assert tokens_off(engine, sampled(engine, tmp_path)) == 0
    assert used == {16, 64}


@pytest.mark.parametrize("kernel", ["_linear_agrees", "_attention_agrees"])
def test_a_machine_whose_kernels_look_at_the_place_is_refused(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant, kernel, lambda *of: False)
    with pytest.raises((ConfigError, FamilyError), match="on this machine"):
        engine_of("qwen3")


def test_a_model_that_differs_in_a_bit_is_refused_when_the_service_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Reader.decode
    monkeypatch.setattr(Reader, "decode", lambda self, *args: decode(self, *args) * (1 + 2**-22))
    with pytest.raises(FamilyError, match="qwen3: sampling and training differ in a bit"):
        engine_of("qwen3")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        *((name, "recurrent layers or convolutions") for name in ("qwen3_5", "lfm2")),
        *((name, "within its window of 5 .* set --max-length") for name in ("mistral", "gpt_oss")),
        ("eager", "calls matmul"),
    ],
)
def test_what_has_no_batch_invariant_form_is_refused_by_name(family: str, message: str) -> None:
    model = plain_model("qwen3" if family == "eager" else family)
    if family == "eager":
        model.set_attn_implementation("eager")
    with pytest.raises(FamilyError, match=f"{model.config.model_type}: .*{message}"):
        check_batch_invariance(tiny_engine(model.config.model_type, model=model, batch_invariant=True))


def test_vllm_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave out --sampler vllm"):
        open_sampler(engine_of("qwen3"), "vllm", source="")
