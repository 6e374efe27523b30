"""Engines over tiny models, and the datums that their tests send."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cases import one_of_each, slow
from fixtures.processors import tiny_model, tiny_processor
from PIL import Image

from vlmpack.collate.assemble import join_media
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.families.registry import FAMILIES, family_named
from vlmpack.service.engine.datums import EncodedSequence, not_served
from vlmpack.service.engine.engine import Engine, EngineConfig
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.ranks import Ranks
from vlmpack.service.wire.messages import (
    AdamParams,
    Chunk,
    Datum,
    Failure,
    ForwardBackward,
    ForwardBackwardResult,
    ImageChunk,
    LoraConfig,
    TextChunk,
)

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
TEXT_FAMILIES = tuple(name for name, family in FAMILIES.items() if not family.has_vision)


def plain_model(family: str = "qwen3_vl", **sizes: Any) -> Any:
    """The model that `tiny_engine` takes over, untouched; `tiny_engine` makes its own."""
    return tiny_model(family, processor=processor_for(family), **sizes).eval()


def processor_for(family: str) -> Any:
    return tiny_processor("qwen3_vl" if family in TEXT_FAMILIES else family)


def tiny_engine(
    family: str = "qwen3_vl",
    *,
    limits: Mapping[str, int] | None = None,
    model: Any = None,
    ranks: Ranks | None = None,
    **settings: Any,
) -> Engine:
    processor = processor_for(family)
    config = EngineConfig(limits=ServiceLimits(**(limits or {})), **settings)
    of_family = processor.tokenizer if family in TEXT_FAMILIES else processor
    base = model or plain_model(family)
    return Engine(base, of_family, name="tiny", tokenizer_id="tiny", config=config, ranks=ranks)


def lora(family: str = "qwen3_vl", **settings: Any) -> LoraConfig:
    """An adapter on all that can be adapted."""
    return LoraConfig(**{"rank": 4, "seed": 1, **settings})


# ---------------------------------------------------------------------- datums


def png(width: int, height: int, *, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def text(*tokens: int) -> TextChunk:
    return TextChunk(tokens=np.array(tokens, np.int32))


def vision_ids(processor: Any) -> list[list[int]]:
    """What a chat template writes before and behind an image; for many families nothing."""
    found, tokenizer = read_processor(processor), processor.tokenizer
    return [tokenizer.encode(each, add_special_tokens=False) for each in (found.vision_start, found.vision_end)]


def chunks_with_images(rng: np.random.Generator, processor: Any, *, length: int, images: Sequence[tuple[int, int]]):
    """Text of `length` tokens beside the images, each between its two marks."""
    start, end = vision_ids(processor)
    words = rng.integers(20, 500, length).tolist()
    chunks: list[Chunk] = [text(*words[:1])]
    for at, size in enumerate(images):
        chunks += [text(*start), ImageChunk(data=png(*size, seed=at), format="png"), text(*end, words[0])]
    return (*chunks, text(*words[1:]))


def random_datum(
    rng: np.random.Generator,
    engine: Engine,
    *,
    length: int,
    images: Sequence[tuple[int, int]] = (),
    inputs: Sequence[str] = ("weights",),
) -> Datum:
    """Random tokens, arbitrary targets, and random numbers for the inputs of a loss."""
    processor = processor_for(engine.base.arch)
    chunks = chunks_with_images(rng, processor, length=length, images=images)
    total = engine.encode_chunks(chunks).length
    floats = {name: rng.normal(size=total).astype(np.float32) for name in inputs}
    if "logprobs" in floats:
        floats["logprobs"] = (floats["logprobs"] / 4 - 6).astype(np.float32)
    return Datum(chunks=chunks, inputs={"target_tokens": rng.integers(0, 500, total), **floats})


def some_data(engine: Engine, *, seed: int = 0, inputs: Sequence[str] = ("weights",)) -> list[Datum]:
    """Five datums of 2 to 40 tokens; where the family takes images, two have some."""
    rng = np.random.default_rng(seed)
    images = [(), [(64, 96)], (), [(96, 64), (64, 64)], ()] if engine.base.is_vision else [()] * 5
    lengths = (5, 9, 2, 7, 23)
    return [random_datum(rng, engine, length=n, images=i, inputs=inputs) for n, i in zip(lengths, images, strict=True)]


# ---------------------------------------------------------------------- requests


def request(data: Sequence[Datum], *, model_id: str = "a", **fields: Any) -> ForwardBackward:
    return ForwardBackward(
        **{"model_id": model_id, "seq_id": 1, "data": tuple(data), "loss_fn": "cross_entropy", **fields}
    )


def run(engine: Engine, *requests: ForwardBackward) -> list[ForwardBackwardResult | Failure]:
    """All rows of requests that run together."""
    work = engine.forward_backward([engine.encode(one) for one in requests])
    while work.rows_left:
        work.run_row()
    return work.results()


def run_one(engine: Engine, data: Sequence[Datum], **fields: Any) -> ForwardBackwardResult:
    (result,) = run(engine, request(data, **fields))
    assert isinstance(result, ForwardBackwardResult), result
    return result


def gradients(engine: Engine, model_id: str = "a") -> dict[str, torch.Tensor]:
    """The accumulated gradient by the names of parameters; empty: there is none."""
    client = engine.client(model_id)
    pairs = zip(client.named, client.gradients or [], strict=False)
    return {name: gradient.clone() for name, gradient in pairs if gradient is not None}


def weights(engine: Engine, model_id: str = "a") -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.client(model_id).named.items()}


def set_adapter(engine: Engine, model_id: str = "a", *, seed: int = 7) -> None:
    """B away from zero, so that the adapter and the gradient of A count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in engine.client(model_id).named.items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 20)


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest entry of that tensor."""
    assert a.keys() == b.keys()
    assert a
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-12)).item() for n in a)


def plain_inputs(sequence: EncodedSequence, config: Any, *, more: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """What the unmodified model takes of a sequence, and of ids after it."""
    ids, family = torch.tensor([*sequence.input_ids.tolist(), *more])[None], family_named(config.model_type)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.has_vision:
        inputs |= {family.token_types: (ids == config.image_token_id).long()} if family.token_types else {}
        inputs |= family.expert_types_of(ids, config)
        inputs |= join_media([sequence.sample], family).to_hf()
    return inputs


def plain_logprobs(model: Any, engine: Engine, datum: Datum) -> torch.Tensor:
    """float32 [N] of a datum's targets by the unmodified model, the datum alone."""
    sequence = engine.encode_chunks(datum.chunks)
    logits = model(**plain_inputs(sequence, model.config), use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]


FAMILY_NAMES = tuple(
    name
    for name, family in FAMILIES.items()
    if not_served(family) is None and family.has_vision is family.has_grids and not family.has_audio
)
"""Text models, and vision models whose images are patches with grids."""
TILED = ("internvl", "llava_next", "llava_onevision", "idefics3", "gemma3", "gemma4", "qwen2_5_omni_thinker")
"""One of each other kind of images: in tiles, of one size, processed together, attended to in both directions, beside
audio."""
DISTINCT_NAMES = [name for each in one_of_each() for name in each.values if name in FAMILY_NAMES]
"""One of each combination of mechanisms and media."""


def served(*fast: str, among: Sequence[str] = FAMILY_NAMES) -> list[Any]:
    """Families of the service as values of a parameter: these, and the others in the slow tier."""
    return [*fast, *slow(*(name for name in among if name not in fast))]
