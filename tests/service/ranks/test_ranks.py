"""A sharded base model on one rank: equal to one that is whole. Two ranks are in test_workers.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from cases import slow
from step_service import (
    DISTINCT_NAMES,
    gradients,
    largest_difference,
    lora,
    request,
    run,
    served,
    set_adapter,
    some_data,
)
from step_service import tiny_engine as engine_of
from torch import distributed as dist

from vlmpack.errors import ConfigError, RequestError
from vlmpack.families.registry import family_named
from vlmpack.service import ranks as sharding
from vlmpack.service.engine.engine import Engine
from vlmpack.service.ranks import Ranks
from vlmpack.service.sampling.samplers import open_sampler
from vlmpack.service.wire.messages import Sample, SampleResult, SamplingParams, TextChunk

LIMITS = {"row_tokens": 24}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, which is all of them."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


def sharded(ranks: Ranks, family: str = "qwen3_vl", **settings: Any) -> Engine:
    return engine_of(family, limits=LIMITS, ranks=ranks, shard_on="cpu", **settings)


def trained(engine: Engine, family: str = "qwen3_vl") -> tuple[Any, dict[str, Any]]:
    """Result and gradient of several rows."""
    engine.create("a", lora(family))
    set_adapter(engine)
    (result,) = run(engine, request(some_data(engine)))
    return result, gradients(engine)


OVER_RANKS = [name for name in DISTINCT_NAMES if not family_named(name).not_over_ranks]


@pytest.mark.parametrize("family", served("qwen3_vl", among=OVER_RANKS))
@pytest.mark.parametrize("recomputes", [False, *slow(True)])
def test_training_is_that_of_a_whole_model(ranks: Ranks, family: str, recomputes: bool) -> None:
    result, ours = trained(sharded(ranks, family, gradient_checkpointing=recomputes), family)
    expected, theirs = trained(engine_of(family, limits=LIMITS, gradient_checkpointing=recomputes), family)
    for logprobs, others in zip(result.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=1e-5)
    assert largest_difference(ours, theirs) < 1e-5


def sampled(engine: Engine) -> np.ndarray:
    """Tokens after a prompt."""
    request = Sample(
        sampling_session_id="s",
        seq_id=0,
        prompt=(TextChunk(tokens=np.arange(20, 26, dtype=np.int32)),),
        num_samples=1,
        params=SamplingParams(seed=3, max_tokens=5, stop=()),
    )
    sampler = open_sampler(engine)
    sampler.add("key", None, engine.encode_prompt(request), request)
    while not (finished := sampler.step()):
        pass
    ((_, result),) = finished
    assert isinstance(result, SampleResult)
    return result.sequences[0].tokens


def test_sampling_is_that_of_a_whole_model(ranks: Ranks) -> None:
    assert sampled(sharded(ranks)).tolist() == sampled(engine_of()).tolist()


def test_a_pass_without_a_backward_pass_leaves_nothing_behind(ranks: Ranks) -> None:
    """FSDP2 keeps an entry of each layer's forward pass until there is a backward pass."""
    engine = sharded(ranks)
    sampled(engine)
    assert not engine.model._get_fsdp_state()._comm_ctx.post_forward_order


def test_a_model_that_is_trained_as_a_whole_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    whole = engine_of()
    whole.create("a", None)
    whole.save("a", tmp_path, optimizer=False)
    engine = sharded(ranks)
    for call in (
        lambda: engine.create("a", None),
        lambda: engine.create_from("a", tmp_path, optimizer=False),
        lambda: engine.open_weights(tmp_path),
    ):
        with pytest.raises(RequestError, match="LoRA adapters only"):
            call()
    assert not engine.models()


def test_an_error_amid_a_pass_ends_the_process(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one in the same pass; errors of the library come on all ranks, before passes."""

    class Ended(BaseException):
        pass

    def end(status: int) -> NoReturn:
        assert status == 1
        raise Ended

    monkeypatch.setattr(sharding, "end", end)
    engine = sharded(ranks)
    engine.create("a", lora())
    work = engine.forward_backward([engine.encode(request(some_data(engine)))])

    def fails(*_: Any) -> NoReturn:
        raise RuntimeError("out of memory")

    layer = engine.model.model.language_model.layers[0]
    hook = layer.mlp.register_forward_hook(fails)
    with pytest.raises(Ended):
        work.run_row()
    hook.remove()
    assert engine.sharding is not None
    with pytest.raises(RequestError), engine.sharding.passes():
        raise RequestError("a request's own fault")


def test_a_model_is_not_sharded_on_one_rank() -> None:
    with pytest.raises(ConfigError, match="add --workers"):
        engine_of(shard_on="cpu")
