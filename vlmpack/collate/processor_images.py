"""Images by a family's own processor: text and tensors as it makes them, one image at a time, or only measured.

    image ──processor──▶ Visual(pixels, tensors, written)     written: "<boi>" + "<image>" * 256 + "<eoi>", rows, crops
    header ──counted───▶ Visual(written)                      by the processor's own count, where trials confirm it
           ──a blank───▶ Visual(written)                      else from a blank image of that size, once a size

The text that stands for an image depends on its size alone (in some families also on how many images the sample has),
so a blank image of that size has it too. The count of a processor (`_get_num_multimodal_tokens`) is compared with what
it writes for images of several shapes before it is relied on; and each image that was measured is compared again when
it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.columns import Kind, MediaRef
from vlmpack.collate.encoded import Encoded, Visual, check_pixels
from vlmpack.collate.media import BatchMedia, read_named
from vlmpack.collate.processor_metadata import ProcessorMetadata, class_in, parts_of
from vlmpack.collate.vision_keys import IMAGE_KEYS, Size, has_image_keys
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_size
from vlmpack.errors import ConfigError, Refusal
from vlmpack.families.registry import family_of_processor

TRIALS: tuple[Size, ...] = ((97, 61), (371, 223), (300, 1200), (1100, 800))
"""Heights and widths of images on which a processor's count is tried: upright, wide, and large enough for crops."""
SIZES_KEPT = 4096
"""Sizes of images whose text is kept."""
OPTIONS_OF_IMAGES: Mapping[str, Sequence[str]] = {"Lfm2VlProcessor": ("use_image_special_tokens",)}
"""Options of a processor that it hands on with those of images, by its class."""
NUMBERING = ("MiniCPMV4_6Processor",)
"""Classes of processors that may write before each image which one of its sample it is."""


@final
@dataclass(frozen=True, kw_only=True)
class ProcessorImages:
    """Reads the images of samples with the processor that the model was made with."""

    processor: Any
    """The processor: a `ProcessorMixin` with a `replace_image_token` of its own."""
    metadata: ProcessorMetadata
    """The metadata of it."""
    limits: ImageLimits
    """Caps for images."""

    # ------------------------------------------------------------------ the images of a sample

    def cut_each(
        self, refs: Sequence[MediaRef], *, kind: Kind, batch: BatchMedia | None = None, max_tokens: int | None = None
    ) -> tuple[Visual, ...]:
        """Load the images of a sample and turn them into tensors, in their order.

        Raises:
            Refusal: one of them cannot be used, or they are videos (`no_video`).
        """
        self._check_kind(refs, kind)
        if self.metadata.images_together and len(refs) > 1:
            images = [read_named(self._load, ref, kind, at) for at, ref in enumerate(refs)]
            visuals = read_named(lambda _: self.process(images), refs[0], kind, 0)
            return tuple(replace(visual, source=ref) for visual, ref in zip(visuals, refs, strict=True))
        media = batch or BatchMedia()
        return tuple(
            read_named(lambda ref: media.cut_once(ref, kind, self._cut), ref, kind, at) for at, ref in enumerate(refs)
        )

    def measure_each(self, refs: Sequence[MediaRef], *, kind: Kind, estimate: bool = False) -> tuple[Visual, ...]:
        """Read the sizes of a sample's images, and the text that stands for each.

        Raises:
            Refusal: a header shows that an image cannot be used, or they are videos (`no_video`).
            ConfigError: an estimate by squares of pixels, which is the rule of Qwen's processors.
        """
        self._check_kind(refs, kind)
        if estimate and refs:
            raise ConfigError(
                f"estimate=True counts squares of pixels as Qwen's processors do, but this is a "
                f"{type(self.processor).__name__}: leave it out, its images are measured by their headers too"
            )
        sizes = tuple(read_named(self._size, ref, kind, at) for at, ref in enumerate(refs))
        texts = self._texts(sizes) if sizes else ()
        return tuple(
            Visual(pixels=None, runs=self.runs_of(text), written=text, source=ref)
            for text, ref in zip(texts, refs, strict=True)
        )

    def decode(self, sample: Encoded, batch: BatchMedia | None = None) -> Encoded:
        """A sample that was only measured, with the tensors of all its images.

        Raises:
            Refusal: an image cannot be used, or stands for other tokens than when it was measured (`image_changed`).
        """
        refs = [image.source for image in sample.images]
        if not refs or None in refs or all(image.pixels is not None for image in sample.images):
            return sample
        visuals = self.cut_each([ref for ref in refs if ref is not None], kind="image", batch=batch)
        for at, (visual, measured) in enumerate(zip(visuals, sample.images, strict=True)):
            if visual.runs != measured.runs:
                raise Refusal(
                    "image_changed",
                    f"image {at} was measured as {sum(measured.runs)} tokens in {len(measured.runs)} run(s) and is now "
                    f"{sum(visual.runs)} in {len(visual.runs)}; it, or the processor, was changed since: measure and "
                    "plan again",
                )
            check_pixels(visual, self.metadata)
        return replace(sample, images=tuple(replace(visual, written="") for visual in visuals))

    def process(self, images: Sequence[Image.Image]) -> tuple[Visual, ...]:
        """Let the processor make the tensors of images, and the texts in place of their placeholders.

        Raises:
            ConfigError: the processor makes no `pixel_values` of them.
        """
        processed, texts = self.processor._process_images([list(images)], **self._image_options)
        tensors = {name: processed[name] for name in self._names if name in processed}
        if "pixel_values" not in tensors or len(texts) != len(images):
            raise ConfigError(
                f"the {type(self.processor).__name__} makes {', '.join(processed) or 'nothing'} and {len(texts)} "
                f"text(s) of {len(images)} image(s); vlmpack needs pixel_values and a text for each"
            )
        parts = [
            {name: _of_image(tensor, at, len(images)) for name, tensor in tensors.items()} for at in range(len(images))
        ]
        return tuple(self._visual(part, text) for part, text in zip(parts, texts, strict=True))

    def texts_of(self, images: Sequence[Visual], text: str) -> list[str]:
        """The texts in place of the placeholders in `text`, numbered where the processor numbers a sample's images."""
        texts = [image.written for image in images]
        if self._numbers_images and images:
            return self.processor._prepend_local_ids([text], texts, self.metadata.image_token)
        return texts

    def runs_of(self, written: str) -> tuple[int, ...]:
        """Count the placeholders of each unbroken run in the text of an image."""
        return tuple(len(run.group()) // len(self.placeholder) for run in self.run.finditer(written))

    # ------------------------------------------------------------------ one image

    def _check_kind(self, refs: Sequence[MediaRef], kind: Kind) -> None:
        if kind == "video" and refs:
            family = family_of_processor(self.processor)
            takes_tokens = family.has_grids and family.has_videos
            tokenise = "tokenise it with the processor itself (input_ids, labels, pixel_values_videos, video_grid_thw)"
            raise Refusal(
                "no_video",
                f"it has {len(refs)} video(s), but of a {type(self.processor).__name__} only images are read; "
                f"{tokenise + ', ' if takes_tokens else ''}give frames as images, or leave it out",
            )

    def _cut(self, ref: MediaRef) -> Visual:
        (visual,) = self.process([self._load(ref)])
        return replace(visual, source=ref)

    def _load(self, ref: MediaRef) -> Image.Image:
        self._check_keys(ref)
        return load_image(ref.source, limits=self.limits)

    def _size(self, ref: MediaRef) -> Size:
        self._check_keys(ref)
        return read_size(ref.source, limits=self.limits)

    def _check_keys(self, ref: MediaRef) -> None:
        if has_image_keys(ref.options):
            keys = ", ".join(key for key in IMAGE_KEYS if ref.options.get(key) is not None)
            raise ImageError(
                f"it has {keys} beside it, which size one image by the rule of Qwen's processors; a "
                f"{type(self.processor).__name__} sizes all images alike: leave them out, or change "
                "processor.image_processor.size",
                "vision_key",
            )

    def _visual(self, tensors: Mapping[str, torch.Tensor], text: str) -> Visual:
        rest = {name: tensor for name, tensor in tensors.items() if name not in ("pixel_values", "image_grid_thw")}
        grid = None
        if "image_grid_thw" in tensors:
            frames, rows, columns = tensors["image_grid_thw"].reshape(3).tolist()
            grid = frames, rows, columns
        return Visual(grid=grid, pixels=tensors["pixel_values"], tensors=rest, runs=self.runs_of(text), written=text)

    # ------------------------------------------------------------------ by sizes alone

    def _texts(self, sizes: tuple[Size, ...]) -> tuple[str, ...]:
        if self.metadata.images_together and len(sizes) > 1:
            return self._blank(sizes)
        return tuple(self._counted(size) if self._counted is not None else self._blank((size,))[0] for size in sizes)

    @cached_property
    def _blank(self) -> Callable[[tuple[Size, ...]], tuple[str, ...]]:
        """Texts that the processor writes for the images of one sample, from blank ones of these sizes."""

        def texts(sizes: tuple[Size, ...]) -> tuple[str, ...]:
            return tuple(
                v.written for v in self.process([Image.new("RGB", (width, height)) for height, width in sizes])
            )

        return lru_cache(maxsize=SIZES_KEPT)(texts)

    @cached_property
    def _counted(self) -> Callable[[Size], str] | None:
        """The text of an image from the processor's own count; None: it has none, or trials contradict it."""
        texts = [self._blank((size,))[0] for size in TRIALS]
        if any(len(self.runs_of(text)) != 1 for text in texts):
            return None
        before, after = zip(*(self.run.split(text) for text in texts), strict=True)
        try:
            counts = [self._count(size) for size in TRIALS]
        except (AttributeError, NotImplementedError, TypeError, KeyError, ValueError):
            return None
        around = {count - self.runs_of(text)[0] for count, text in zip(counts, texts, strict=True)}
        if len({*before}) > 1 or len({*after}) > 1 or len(around) > 1:
            return None
        (extra,) = around
        return lambda size: f"{before[0]}{self.placeholder * (self._count(size) - extra)}{after[0]}"

    def _count(self, size: Size) -> int:
        """Tokens of an image as the processor counts them; some count those around it too."""
        (count,) = self.processor._get_num_multimodal_tokens(image_sizes=[size])["num_image_tokens"]
        return int(count)

    # ------------------------------------------------------------------ the processor

    @cached_property
    def placeholder(self) -> str:
        """The token that stands for a part of an image, as text."""
        return parts_of(self.processor).tokenizer.convert_ids_to_tokens(self.metadata.image_token_id)

    @cached_property
    def run(self) -> re.Pattern[str]:
        """An unbroken run of it."""
        return re.compile(f"(?:{re.escape(self.placeholder)})+")

    @cached_property
    def _options(self) -> dict[str, Any]:
        """Options of a call of the processor: those of images, of texts, and its own."""
        tokenizer = parts_of(self.processor).tokenizer
        return self.processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt")

    @cached_property
    def _image_options(self) -> dict[str, Any]:
        """Options of its images, and those of its own that it hands on with them; texts' come first, as it has it."""
        names = OPTIONS_OF_IMAGES.get(class_in(self.processor, OPTIONS_OF_IMAGES), ())
        its = {name: self._options["text_kwargs"].get(name, self._options[name]) for name in names}
        return self._options["images_kwargs"] | its

    @cached_property
    def _numbers_images(self) -> bool:
        """True if the processor writes before each image which one of its sample it is."""
        if not class_in(self.processor, NUMBERING):
            return False
        chosen = self._options["images_kwargs"].get("use_image_id", self._options["use_image_id"])
        return self.processor.default_use_image_id if chosen is None else chosen

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(family_of_processor(self.processor).media)


def _of_image(tensor: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """The part of one image; what is one for all images of a sample goes with its first."""
    if count == 1:
        return tensor
    return tensor[at : at + 1] if len(tensor) == count else tensor[: 0 if at else None]


def trial_image(size: Size) -> Image.Image:
    """A picture of a height and width in which no two rows or columns are alike."""
    height, width = size
    values = np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3) ** 2 % 251
    return Image.fromarray(values.astype(np.uint8))
