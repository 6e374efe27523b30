"""Batches and rows with something wrong in them are refused by name, or are what they say: never wrong, never a crash.

Each case takes a good padded batch or row, of a small model, and changes one to three things: columns dropped,
exchanged, permuted, of another type or shape, lists in place of tensors, boundaries moved, media exchanged. If the
enabled model takes the result, every sample that it says, read by the loops below, goes alone through the plain model,
and the losses (or logits) have to be equal.
"""

import functools
import random
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import slow
from equality import VISION
from mutations import check, outcomes

from vlmpack.layout import SlotRule, pack
from vlmpack.model import enable_packing
from vlmpack.testing import mixed_samples, padded, tiny_model

Inputs = dict[str, Any]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3")
KINDS = (("image", "text", "images"), ("image", "image"), ("video", "images_and_video"), ("text", "text", "text"))
TOKENS = ("input_ids", "labels", "shift_labels", "mm_token_type_ids", "attention_mask", "moe_padding_mask")
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_q_padded")
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16, torch.float64, torch.complex64)


class UnreadableError(Exception):
    """What the batch says cannot be read: an enabled model has to refuse it."""


# ---------------------------------------------------------------------- models and good batches


@functools.cache
def models(family: str) -> tuple[Any, Any]:
    """The plain model, and the same enabled."""
    width = 48 if family == "qwen3_5" else 24
    sizes = {"hidden": width, "layers": 1, "vision_depth": 1, "vision_hidden": 8, "patch_size": 2, "vocab_size": 37}
    return tiny_model(family, **sizes).eval(), enable_packing(tiny_model(family, **sizes).eval())


@functools.cache
def good_batch(family: str, kinds: tuple[str, ...], side: str) -> Any:
    if family not in VISION:
        kinds = ("text",) * len(kinds)
    return padded(mixed_samples(models(family)[0].config, seed=4, kinds=kinds, side=(1, 2)), side)


def good_inputs(family: str, rng: random.Random) -> Inputs:
    batch = good_batch(family, rng.choice(KINDS), rng.choice(["left", "right"]))
    row = rng.choice([None, pack(batch), pack(batch, rule=SlotRule(multiple=4))])
    inputs = batch.to_hf() if row is None else rng.choice([row.to_hf, row.step_inputs])()
    inputs.pop("use_cache", None)
    if rng.random() < 0.6:
        inputs.pop("vlmpack")
    if row is not None and rng.random() < 0.3:
        inputs.pop("moe_padding_mask")
    if rng.random() < 0.15:
        inputs = {name: x for name, x in inputs.items() if name not in ("labels", "shift_labels")}
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


# ---------------------------------------------------------------------- what is changed


def there(inputs: Inputs, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if isinstance(inputs.get(name), torch.Tensor)]


def drop(inputs: Inputs, rng: random.Random) -> None:
    inputs.pop(rng.choice([*inputs]))


def exchange(inputs: Inputs, rng: random.Random) -> None:
    names = there(inputs, rng.choice([TOKENS, MEDIA, BOUNDARIES]))
    if len(names) > 1:
        a, b = rng.sample(names, 2)
        inputs[a], inputs[b] = inputs[b], inputs[a]


def shuffled(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    dim = rng.randrange(x.ndim)
    order = list(range(x.shape[dim]))
    rng.shuffle(order)
    return x.index_select(dim, torch.tensor(order, dtype=torch.int64))


SHAPES = (
    *(lambda x: x[None], torch.flatten, lambda x: x[..., None], lambda x: x[..., :-1], lambda x: x[1:]),
    *(lambda x: torch.cat([x, x]), lambda x: x[:0], lambda x: x.mT, lambda x: x[0], lambda x: x[..., 1:]),
)
FORMS = (torch.Tensor.tolist, torch.Tensor.numpy, lambda x: tuple(x.tolist()), str, len, lambda x: [*x])
WAYS = (
    shuffled,
    lambda x, rng: x.to(rng.choice(DTYPES)),
    lambda x, rng: rng.choice(SHAPES)(x) if x.ndim > 1 and len(x) else x,
    lambda x, rng: rng.choice(FORMS)(x),
    lambda x, rng: x.roll(rng.choice([1, -1, 2]), rng.randrange(x.ndim)),
)
"""Ways to change one column: its order, type, shape, or what holds its numbers."""


def change_a_column(inputs: Inputs, rng: random.Random) -> None:
    if (names := there(inputs, (*TOKENS, *MEDIA, *BOUNDARIES))) and inputs[name := rng.choice(names)].ndim:
        inputs[name] = rng.choice(WAYS)(inputs[name], rng)


def edit(inputs: Inputs, rng: random.Random) -> None:
    names = there(inputs, (*TOKENS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts", *BOUNDARIES))
    name = rng.choice(names or [""])
    if name and inputs[name].numel():
        flat = inputs[name].reshape(-1).clone()
        at = rng.randrange(len(flat))
        near = [flat[at] + 1, flat[at] - 1] if flat.dtype != torch.bool else [~flat[at]]
        flat[at] = rng.choice([*near, *near, 0, 1, 2, 3, 4, 5, 9, -1, -100, 1000])
        inputs[name] = flat.view(inputs[name].shape)


def swap_tokens(inputs: Inputs, rng: random.Random) -> None:
    """Two tokens, in all columns or in one."""
    names = there(inputs, TOKENS)
    width = inputs[names[0]].shape[-1] if names else 0
    if width:
        a, b = rng.randrange(width), rng.randrange(width)
        order = torch.arange(width)
        order[[a, b]] = order[[b, a]]
        for name in rng.choice([names, names[:1]]):
            if inputs[name].ndim == 2 and inputs[name].shape[-1] == width:
                inputs[name] = inputs[name][:, order]


def move_boundary(inputs: Inputs, rng: random.Random) -> None:
    names = there(inputs, BOUNDARIES)
    both = rng.random() < 0.5
    step, place, kind = rng.choice([-2, -1, 1, 2, 4]), rng.random(), rng.choice(["move", "drop", "add", "again"])
    for name in names if both else rng.sample(names, min(1, len(names))):
        edges = inputs[name].flatten().tolist()
        if not edges or not isinstance(edges[0], int):
            continue
        at = int(place * len(edges))
        if kind == "move":
            edges[at] += step
        elif kind == "drop":
            edges.pop(at)
        else:
            edges.insert(at, edges[at] + (step if kind == "add" else 0))
        inputs[name] = torch.tensor(edges, dtype=torch.int32)


def exchange_media(inputs: Inputs, rng: random.Random) -> None:
    """Images (or videos) in another order: their grids, their pixels, or both."""
    pixels, grids = rng.choice([("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")])
    try:
        media = [*cut_media(inputs, pixels, grids)]
    except UnreadableError:
        return
    which = rng.choice([(pixels, grids), (pixels, grids), (pixels,), (grids,)])
    rng.shuffle(media)
    for name in which if media else ():
        inputs[name] = torch.cat([one[name] for one in media])


CHANGES = (
    *(drop, drop, exchange, *(change_a_column,) * 5, edit, edit, edit, swap_tokens),
    *(move_boundary, move_boundary, exchange_media, exchange_media),
)


# ---------------------------------------------------------------------- what a batch says


def whole(value: Any, name: str) -> torch.Tensor:
    """As int64; a batch that says something else says nothing."""
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.ndim != 2:
        raise UnreadableError(name)
    found = value.long()
    if not torch.equal(found.double(), value.double()):
        raise UnreadableError(name)
    return found


def numbers(value: Any) -> list[int]:
    return [int(x) for x in (value.flatten().tolist() if hasattr(value, "flatten") else value)]


def places(inputs: Inputs) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each sample's tokens in `input_ids`."""
    ids = inputs["input_ids"]
    if inputs.get("cu_seqlens_q") is not None or is_row_of_metadata(inputs):
        segments = getattr(inputs.get("vlmpack"), "segments", None)
        real = numbers(inputs.get("cu_seqlens_q", segments and segments.real))
        starts = numbers(inputs.get("cu_seqlens_q_padded", segments.stride if segments else real))
        return [(0, start, start + b - a) for (a, b), start in zip(pairwise(real), starts, strict=False) if b > a]
    mask = whole(inputs["attention_mask"], "attention_mask")
    if mask.shape != ids.shape or not ((mask == 0) | (mask == 1)).all():
        raise UnreadableError("attention_mask")
    found = []
    for row, line in enumerate(mask.tolist()):
        runs = [(value, len([*group])) for value, group in groupby(line)]
        if [value for value, _ in runs].count(1) != 1:
            raise UnreadableError("attention_mask")
        start = line.index(1)
        found.append((row, start, start + sum(line)))
    return found


def is_row_of_metadata(inputs: Inputs) -> bool:
    metadata = inputs.get("vlmpack")
    return metadata is not None and getattr(metadata, "segments", None) is not None


def read(inputs: Inputs, config: Any) -> Iterator[Inputs]:
    """The samples that the inputs say."""
    ids = whole(inputs["input_ids"], "input_ids")
    image, video = (getattr(config, f"{kind}_token_id", -1) for kind in ("image", "video"))
    frames_apart = config.model_type.startswith("qwen3")
    media = {"image": [*cut_media(inputs, "pixel_values", "image_grid_thw")]}
    media["video"] = [*cut_media(inputs, "pixel_values_videos", "video_grid_thw")]
    for row, start, stop in places(inputs):
        sample: Inputs = {"input_ids": ids[row, start:stop]}
        kinds = [{image: "image", video: "video"}.get(token) for token in sample["input_ids"].tolist()]
        runs = Counter(kind for kind, _ in groupby(kinds) if kind)
        for kind in ("image", "video") if hasattr(config, "vision_config") else ():
            taken = []
            while runs[kind] > 0:
                if not media[kind]:
                    raise UnreadableError(f"{kind}s")
                taken.append(media[kind].pop(0))
                apart = frames_apart and kind == "video"
                runs[kind] -= int(taken[-1]["video_grid_thw"][0, 0]) if apart else 1
            if runs[kind] < 0:
                raise UnreadableError(f"frames of {kind}s")
            for name in taken[0] if taken else ():
                sample[name] = torch.cat([one[name] for one in taken])
        if inputs.get("mm_token_type_ids") is not None and hasattr(config, "vision_config"):
            sample["mm_token_type_ids"] = whole(inputs["mm_token_type_ids"], "types")[row, start:stop]
        else:
            sample["mm_token_type_ids"] = torch.tensor([{"image": 1, "video": 2}.get(kind or "", 0) for kind in kinds])
        sample["targets"] = targets_of(inputs, row, start, stop)
        sample["place"] = (row, start, stop)
        yield sample
    if media["image"] or media["video"]:
        raise UnreadableError("media of no sample")


def cut_media(inputs: Inputs, pixels: str, grids: str) -> Iterator[Inputs]:
    if inputs.get(pixels) is None and inputs.get(grids) is None:
        return
    table, patches = whole(inputs.get(grids), grids), inputs.get(pixels)
    sizes = table.prod(1).tolist()
    if not isinstance(patches, torch.Tensor) or patches.ndim != 2 or sum(sizes) != len(patches) or min(sizes) < 1:
        raise UnreadableError(pixels)
    seconds = inputs.get("second_per_grid_ts") if pixels == "pixel_values_videos" else None
    if seconds is not None and (not isinstance(seconds, torch.Tensor) or seconds.shape != (len(table),)):
        raise UnreadableError("second_per_grid_ts")
    for at, (part, grid) in enumerate(zip(patches.split(sizes), table, strict=True)):
        of_video = {} if seconds is None else {"second_per_grid_ts": seconds[at : at + 1]}
        yield {pixels: part, grids: grid[None], **of_video}


def targets_of(inputs: Inputs, row: int, start: int, stop: int) -> torch.Tensor | None:
    """[L]: the target of each token."""
    if inputs.get("shift_labels") is not None:
        return whole(inputs["shift_labels"], "shift_labels")[row, start:stop]
    if inputs.get("labels") is None:
        return None
    return F.pad(whole(inputs["labels"], "labels")[row, start + 1 : stop], (0, 1), value=-100)


# ---------------------------------------------------------------------- the oracle

_alone: dict[Any, torch.Tensor] = {}


def logits_alone(family: str, sample: Inputs) -> torch.Tensor:
    """[L, V] of one sample through the plain model."""
    columns = {name: x for name, x in sample.items() if name not in ("targets", "place")}
    if family not in VISION:
        columns.pop("mm_token_type_ids")
    key = (family, *((name, x.dtype, tuple(x.flatten().tolist()), x.shape) for name, x in columns.items()))
    if key not in _alone:
        batched = {name: x[None] if name in TOKENS else x for name, x in columns.items()}
        try:
            _alone[key] = models(family)[0](**batched).logits[0].float()
        except Exception as error:
            raise UnreadableError(f"the plain model raises {error!r:.200}") from error
    return _alone[key]


def equals_alone(family: str, inputs: Inputs, output: Any) -> bool:
    """Whether logits, or the loss of all targets, are those of the samples alone."""
    samples = [*read(inputs, models(family)[0].config)]
    alone = [logits_alone(family, sample) for sample in samples]
    if samples and samples[0]["targets"] is None:
        for sample, own in zip(samples, alone, strict=True):
            row, start, stop = sample["place"]
            if not torch.allclose(output.logits[row, start:stop].float(), own, atol=1e-3, equal_nan=True):
                return False
        return True
    targets = torch.cat([sample["targets"] for sample in samples])
    is_target = targets != -100
    expected = torch.tensor(0.0)
    if is_target.any():
        expected = F.cross_entropy(torch.cat(alone)[is_target], targets[is_target])
    return torch.allclose(output.loss.float(), expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def is_packed(inputs: Inputs) -> bool:
    """Inputs with neither a mask nor boundaries go to the model's own forward, see `test_passed_on.py`."""
    has = [inputs.get(name) is not None for name in ("input_ids", "attention_mask", "cu_seqlens_q")]
    return has[0] and (has[1] or has[2] or is_row_of_metadata(inputs))


@torch.no_grad()
def case(rng: random.Random) -> bool:
    family = rng.choice(FAMILIES)
    inputs = good_inputs(family, rng)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3])):
        rng.choice(CHANGES)(inputs, rng)
    return not is_packed(inputs) or equals_alone(family, inputs, models(family)[1](**inputs))


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("cases", [100, *slow(400)])
def test_changed_batches_are_right_or_refused(cases: int) -> None:
    check(outcomes(cases, 0, case), cases=cases)
