"""Random models of released sizes, and the ways in which a batch goes through one of them.

All ways share one set of weights and one set of gradients: bodies are copied, parameters are not. So each way's peak
holds them once, and there is room for what is measured.

The patch embedding of Qwen's vision towers is computed as the matrix product that it is: windows of its convolution do
not overlap, and each patch is one window. Versions of cuDNN take seconds for that convolution in bfloat16, or have no
kernel for it. Every way of a step would pay for it alike, and nothing could be compared.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.flops import StepFlops, step_flops
from benchmarks.gpu.device import Device
from benchmarks.gpu.shapes import GpuShapes, ModelShape
from benchmarks.receipts import hf_inputs, receipt_batch
from vlmpack.errors import VlmpackError
from vlmpack.families import Family, family_named
from vlmpack.layout import IGNORE, PaddedBatch, SlotRule
from vlmpack.model import PackedStep, StepConfig
from vlmpack.testing import tiny_config

Model = TypeVar("Model", bound=nn.Module)


@final
class PatchProduct(nn.Conv3d):
    """A convolution, with its weights, of patches that are as large as its window."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[P, C, T, H, W] to [P, D, 1, 1, 1]."""
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def with_patch_products(model: Model) -> Model:
    """The model, its patch embedding computed as a product; parameters and FLOPs stay as they are."""
    for module in model.modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProduct
    return model


LONGEST, FIXED, PACKED, SLOTS = "padded to longest", "padded to width", "packed", "packed, slots of 8"
FLASH = "padded to longest, flash"
PADDED_WAYS, PACKED_WAYS = (LONGEST, FIXED, FLASH), (PACKED, SLOTS)
FLASH_ATTENTION = "flash_attention_2"
"""Its name in transformers: it removes padding from the batch for attention, and restores it."""
SAME_LOSS = 2e-2
"""Relative difference of two losses above which two ways did not compute the same, in low precision."""


def config_of(shape: ModelShape) -> Any:
    """The configuration of a model of this shape."""
    family, config = family_named(shape.family), tiny_config(shape.family, **shape.sizes)
    for part, settings in ((family.text_config(config), shape.text), (config.vision_config, shape.vision)):
        for name, value in settings.items():
            vars(part)[name] = value
    config.tie_word_embeddings = shape.tied
    return config


def random_model(shape: ModelShape, device: Device, *, seed: int) -> Any:
    """A model of this shape, made where it will live, on sdpa attention, in train mode, its patches by a product."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto: Any = AutoModelForImageTextToText  # its own type has a type checker read every model there is
    with torch.device(device.name):
        model = auto.from_config(config_of(shape), dtype=device.dtype, attn_implementation="sdpa")
    return with_patch_products(model).train()


def twin(model: Any) -> Any:
    """Copy a model's modules on the same weights: packing that is enabled on one leaves the other plain."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def why_no_flash() -> str | None:
    """The reason why unmodified models cannot run on FlashAttention on this machine; None: they can."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    return None if is_flash_attn_2_available() else "transformers finds no flash_attn of 2.3.3 or later that has a GPU"


@final
@dataclass(frozen=True, kw_only=True)
class Bodies:
    """One random model, unmodified and packed in two ways."""

    shape: ModelShape
    """Its sizes."""
    family: Family
    """Its family."""
    model: Any
    """Unmodified, on sdpa."""
    flash: Any | None
    """Unmodified, on FlashAttention; None: it is not there."""
    steps: Mapping[str, PackedStep]
    """By the names in `PACKED_WAYS`, on twins of the model."""

    @classmethod
    def of(cls, shape: ModelShape, device: Device, *, seed: int) -> Bodies:
        """A new random model."""
        model = random_model(shape, device, seed=seed)
        configs = {PACKED: StepConfig(), SLOTS: StepConfig(slots=SlotRule(multiple=8))}
        steps = {name: PackedStep(twin(model), config) for name, config in configs.items()}
        flash = None if why_no_flash() else twin(model)
        if flash is not None:
            flash.set_attn_implementation(FLASH_ATTENTION)
        return cls(shape=shape, family=family_named(shape.family), model=model, flash=flash, steps=steps)

    @property
    def weights(self) -> int:
        """Parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @contextmanager
    def recomputing(self, wanted: bool) -> Iterator[None]:
        """With gradient checkpointing in all ways, or without; afterwards without, and without gradients."""
        packed: list[Any] = [step.model for step in self.steps.values()]
        bodies: list[Any] = [body for body in (self.model, self.flash, *packed) if wanted and body is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers will call it something else
            for body in bodies:
                body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                for body in bodies:
                    body.gradient_checkpointing_disable()
            self.model.zero_grad(set_to_none=True)


@final
@dataclass(frozen=True, kw_only=True)
class Ways:
    """Forward and backward of one batch in every way; each call returns its loss."""

    bodies: Bodies
    batch: PaddedBatch
    """Padded to its longest sample."""
    wide: PaddedBatch
    """Padded to a fixed width; the same pixels."""

    @classmethod
    def of(cls, bodies: Bodies, shapes: GpuShapes, samples: int, device: Device, *, seed: int) -> Ways:
        """The ways of a receipt-like batch of so many samples."""
        receipts = replace(shapes.receipts, samples=samples, vocab_size=_vocabulary(bodies))
        batch = receipt_batch(bodies.family, bodies.model.config, receipts, seed=seed, device=device.name)
        batch = replace(batch, media=_cast(batch, device.dtype))
        return cls(bodies=bodies, batch=batch, wide=widened(batch, shapes.width))

    @property
    def steps(self) -> dict[str, Callable[[], torch.Tensor]]:
        """All ways that there are here, by name."""
        model, flash = self.bodies.model, self.bodies.flash
        steps: dict[str, Callable[[], torch.Tensor]] = {
            LONGEST: lambda: self._padded(model, self.batch),
            FIXED: lambda: self._padded(model, self.wide),
            PACKED: lambda: self._packed(PACKED),
            SLOTS: lambda: self._packed(SLOTS),
        }
        return steps if flash is None else {**steps, FLASH: lambda: self._padded(flash, self.batch)}

    @property
    def held(self) -> list[torch.Tensor]:
        """Tensors that are alive before a step: weights and the batch."""
        return [*self.bodies.model.parameters(), *hf_inputs(self.batch).values()]

    def clear(self) -> None:
        """Drop all gradients."""
        self.bodies.model.zero_grad(set_to_none=True)

    def needed(self) -> StepFlops:
        """The least that has to be computed: real tokens, causal pairs, logits of labelled tokens."""
        assert self.batch.metadata is not None
        return self._flops(self.batch.metadata.lengths, causal=True, head_tokens=self.batch.metadata.num_targets)

    def alone(self) -> StepFlops:
        """FLOPs of the unmodified model on the samples without padding."""
        assert self.batch.metadata is not None
        return self._flops(self.batch.metadata.lengths)

    def padded(self, way: str) -> StepFlops:
        """FLOPs of the unmodified model in one of `PADDED_WAYS`."""
        rows, width = (self.wide if way == FIXED else self.batch).input_ids.shape
        return self._flops([width] * rows)

    def _flops(self, lengths: Any, **more: Any) -> StepFlops:
        assert self.batch.metadata is not None
        return step_flops(
            self.bodies.family, self.bodies.model.config, lengths, self.batch.metadata.image_grids, **more
        )

    def _padded(self, model: Any, batch: PaddedBatch) -> torch.Tensor:
        self.clear()
        loss = model(**hf_inputs(batch), use_cache=False).loss
        loss.backward()
        return loss.detach()

    def _packed(self, name: str) -> torch.Tensor:
        self.clear()
        loss = self.bodies.steps[name](self.batch).loss
        loss.backward()
        return loss.detach()


def check_losses(losses: Mapping[str, torch.Tensor]) -> None:
    """Times of ways that compute different things mean nothing.

    Raises:
        VlmpackError: a loss differs from the others by more than low precision explains, or is no number.
    """
    values = {name: float(loss) for name, loss in losses.items()}
    first = next(iter(values.values()))
    if not all(abs(loss - first) <= SAME_LOSS * abs(first) for loss in values.values()):
        raise VlmpackError(f"the ways do not compute the same loss: {values}")


def widened(batch: PaddedBatch, width: int) -> PaddedBatch:
    """The same samples padded to `width` tokens."""
    more = width - batch.input_ids.shape[1]

    def wide(tensor: torch.Tensor | None, fill: int = 0) -> torch.Tensor | None:
        return None if tensor is None else F.pad(tensor, (0, more), value=fill)

    ids, mask = wide(batch.input_ids), wide(batch.attention_mask)
    assert ids is not None and mask is not None
    return replace(
        batch,
        input_ids=ids,
        attention_mask=mask,
        labels=wide(batch.labels, IGNORE),
        mm_token_type_ids=wide(batch.mm_token_type_ids),
    )


def _cast(batch: PaddedBatch, dtype: torch.dtype) -> Any:
    pixels = batch.media.pixel_values
    return batch.media if pixels is None else replace(batch.media, pixel_values=pixels.to(dtype))


def _vocabulary(bodies: Bodies) -> int:
    return bodies.family.text_config(bodies.model.config).vocab_size


@final
class Models:
    """The model on the device: one at a time, kept until another is needed."""

    def __init__(self, device: Device, *, seed: int) -> None:
        self._device, self._seed = device, seed
        self._bodies: Bodies | None = None

    def get(self, shape: ModelShape) -> Bodies:
        """The model of this shape, made if it is not there."""
        if self._bodies is None or self._bodies.shape.name != shape.name:
            self.drop()
            self._bodies = Bodies.of(shape, self._device, seed=self._seed)
        return self._bodies

    def drop(self) -> None:
        """Free the device of it."""
        self._bodies = None
        self._device.release()
