"""Batches and rows as objects: they move to a device whole, and tell what they are without their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils.pin_memory import pin_memory

from vlmpack.layout import HostMetadata, Media, PackedRow, PaddedBatch, SlotRule, pack, share
from vlmpack.model import PackedStep
from vlmpack.testing import mixed_samples, padded, tiny_config, tiny_model

MEDIA = Media(pixel_values=torch.ones(12, 3), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]]))
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def batch(**more: Any) -> PaddedBatch:
    advantages = {"advantages": torch.ones(2, 5)}
    ids = torch.arange(10).view(2, 5)
    return PaddedBatch(**{"input_ids": ids, "attention_mask": MASK, "media": MEDIA, "extras": advantages, **more})


def row() -> PackedRow:
    return pack(batch(metadata=HostMetadata(lengths=(3, 5), sample_ids=("a", "b"))), rule=SlotRule(multiple=4))


def tensors(one: PaddedBatch | PackedRow) -> dict[str, torch.Tensor]:
    found = {**one.__dict__, **one.extras, **one.media.to_hf()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


# ---------------------------------------------------------------------- on a device


@pytest.mark.parametrize("make", [batch, row])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_all_tensors_move_and_what_the_host_knows_stays(make: Any, non_blocking: bool) -> None:
    here = make()
    there = here.to("meta", non_blocking=non_blocking)
    assert type(there) is type(here)
    assert {name: value.device.type for name, value in tensors(there).items()} == dict.fromkeys(tensors(here), "meta")
    assert {"input_ids", "advantages", "pixel_values", "image_grid_thw"} <= tensors(here).keys()
    assert there.metadata is here.metadata
    assert there.__dict__.get("segments") is here.__dict__.get("segments")


class Copies(TorchFunctionMode):
    """The `non_blocking` with which each of some tensors is copied."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = set(map(id, tensors))
        self.non_blocking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and id(args[0]) in self._tensors:
            self.non_blocking.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [padded, lambda samples: pack(padded(samples))], ids=["batch", "row"])
def test_a_copy_to_the_host_always_waits_for_its_values(form: Any) -> None:
    """On a GPU an asynchronous one may be read before it has arrived."""
    here, step = form(mixed_samples(tiny_config("qwen3"))), PackedStep(tiny_model("qwen3"))
    with Copies(tensors(here).values()) as copies:
        here.to("cpu", non_blocking=True)
        step(here)
    assert len(copies.non_blocking) >= 4
    assert not any(copies.non_blocking)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("make", [batch, row])
def test_all_tensors_move_to_a_gpu_and_back(make: Any) -> None:
    here = make()
    there = here.to("cuda", non_blocking=True)
    assert {value.device.type for value in tensors(there).values()} == {"cuda"}
    assert all(torch.equal(value, tensors(here)[name]) for name, value in tensors(there.to("cpu")).items())


# ---------------------------------------------------------------------- in pinned memory


def text_tree() -> PackedRow:
    ids = torch.tensor([[7, 8, 9, 1], [7, 8, 9, 2]])
    padded = PaddedBatch(input_ids=ids, attention_mask=torch.ones_like(ids), metadata=HostMetadata(lengths=(4, 4)))
    return share(pack(padded), min_shared=1)


@pytest.mark.parametrize("form", [lambda made: made, lambda made: made.to_hf()], ids=["object", "dictionary"])
@pytest.mark.parametrize("make", [batch, row, text_tree])
def test_a_data_loader_pins_every_tensor(make: Any, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: set[int] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pages.add((copy := tensor.clone()).data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    here = form(make())
    there = pin_memory(here)
    assert type(there) is type(here)
    before, after = (x if isinstance(x, dict) else x.__dict__ | x.extras | x.media.to_hf() for x in (here, there))
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert after[name].data_ptr() in pages, name
            assert torch.equal(after[name], value), name
        elif name not in ("media", "extras"):
            assert after[name] is value, name


# ---------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (row, "PackedRow([1, 12], 2 samples, 8 tokens, 66.67% full, 2 images)"),
        (batch, "PaddedBatch([2, 5], 8 tokens, 80.00% full, 2 images)"),
        (lambda: batch(metadata=HostMetadata(lengths=(3, 5))), "PaddedBatch([2, 5], 8 tokens, 80.00% full, 2 images)"),
        (lambda: MEDIA, "Media(pixel_values [12, 3], image_grid_thw [2, 3])"),
        (Media, "Media()"),
        (lambda: batch().to("meta"), "PaddedBatch([2, 5], 2 images)"),
        (lambda: batch(input_ids=torch.ones(0, 0), attention_mask=torch.ones(0, 0)), "PaddedBatch([0, 0], 0 tokens, "),
        (lambda: row().to("meta"), "PackedRow([1, 12], 2 samples, 8 tokens, 66.67% full, 2 images)"),
    ],
)
def test_objects_tell_their_shapes_tokens_and_media_as_far_as_they_can(made: Any, told: str) -> None:
    assert repr(made()).startswith(told)


@pytest.mark.parametrize("make", [batch, row])
def test_what_holds_tensors_equals_itself_alone_and_can_be_a_key(make: Any) -> None:
    here, there = make(), make()
    assert here == here
    assert here != there
    assert here.media != replace(here.media)
    assert len({here, there}) == 2
