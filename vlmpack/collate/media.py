"""Images and videos: cut into patches by the user's own image processor, or only measured by their headers.

    MediaRef ──measure──▶ Visual(grid)                  no pixel is decoded: for planning rows
        ├──────cut──────▶ Visual(grid, pixels)          for training on them
        └────estimate───▶ Visual(about that grid)       by the plain rule, whatever the processor's own rule is

The first two give the same grid: the rules by which the processor resizes are those of `families/resize.py` and
`vision_keys.py`. That this processor keeps to them is seen once, on small images, before the first one is measured,
and checked again on every image that is measured first and cut later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

from PIL import Image

from vlmpack.collate.columns import Kind, MediaRef
from vlmpack.collate.encoded import Encoded, Visual, check_pixels, tokens_of
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.collate.video import VideoPatches, VideoSettings, load_video, outline_video
from vlmpack.collate.vision_keys import Size, check_enlarged, has_image_keys, image_size, resize_image
from vlmpack.data import (
    ImageError,
    ImageLimits,
    load_image,
    read_size,
)
from vlmpack.errors import ConfigError, Refusal, VlmpackError
from vlmpack.families import grid_from_size
from vlmpack.layout import Grid

_TRIALS = ((1, 1), (45, 71), (100, 30), (31, 400))
"""Heights and widths on which the processor's rule is tried: blown up, rounded, thin."""
_SHRUNK = (371, 223)
"""Height and width of a trial that has to be made smaller: few pixels are allowed, so that it need not be large."""


@final
@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """Reads what the media of a sample refer to."""

    image_processor: Any
    """Of the user's processor."""
    metadata: ProcessorMetadata
    """What was read from the processor."""
    limits: ImageLimits
    """Caps for images and frames."""

    # ------------------------------------------------------------------ one image or video

    def cut(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """Load an image or video and cut it into patches; `at` is its place among those of its sample.

        Raises:
            Refusal: it cannot be used.
        """
        return self._read(ref, kind, at, self._cut_image, load_video)

    def cut_each(self, refs: Sequence[MediaRef], *, kind: Kind, most: int | None = None) -> tuple[Visual, ...]:
        """Cut the media of one kind of a sample, in their order.

        One that ends beyond `most` tokens by its size alone is measured and not made: no sample of at most so many
        tokens holds it. Images that the processor sizes are made: its own `size` bounds them.

        Raises:
            Refusal: one of them cannot be used.
        """
        if most is None:
            return tuple(self.cut(ref, kind=kind, at=at) for at, ref in enumerate(refs))
        visuals: list[Visual] = []
        left = most
        for at, ref in enumerate(refs):
            is_sized = kind == "video" or has_image_keys(ref.options)
            visual = self.measure(ref, kind=kind, at=at) if is_sized else self.cut(ref, kind=kind, at=at)
            left -= sum(tokens_of(visual, self.metadata, kind=kind))
            visuals.append(self.cut(ref, kind=kind, at=at) if is_sized and left >= 0 else visual)
        return tuple(visuals)

    def measure(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """The same without pixels, from headers.

        Raises:
            Refusal: its header shows that it cannot be used.
            ConfigError: the image processor resizes by a rule of its own.
        """
        return self._read(ref, kind, at, self._measure_image, outline_video)

    def estimate(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """About the same as `measure`: an image has one token for each square of its own pixels, begun ones included.

        Images that say how large they are to be, and videos, are measured: their size is not the processor's choice.

        Raises:
            Refusal: its header shows that it cannot be used.
        """
        return self._read(ref, kind, at, self._estimate_image, outline_video)

    def fill(self, sample: Encoded) -> Encoded:
        """A sample that was only measured, with the patches of all its media.

        Raises:
            Refusal: an image or video cannot be used, or is not of the size that was measured.
        """
        return replace(sample, images=self._filled(sample.images, "image"), videos=self._filled(sample.videos, "video"))

    # ------------------------------------------------------------------ how

    def _read(
        self,
        ref: MediaRef,
        kind: Kind,
        at: int,
        image: Callable[[MediaRef], Visual],
        video: Callable[..., VideoPatches],
    ) -> Visual:
        """By `image` or `video`, whichever it is; a refusal says which image or video of the sample it is."""
        try:
            return image(ref) if kind == "image" else self._video(ref, video)
        except ImageError as error:
            raise Refusal(error.reason, f"{kind} {at}: {error.detail}") from error
        except VlmpackError:  # the processor's fault, not this image's
            raise
        except (ValueError, TypeError, ArithmeticError, OSError) as error:
            raise Refusal("image_processing", f"{kind} {at}: the image processor refused it: {error}") from error

    def _filled(self, visuals: tuple[Visual, ...], kind: Kind) -> tuple[Visual, ...]:
        return tuple(self._fill(visual, kind, at) for at, visual in enumerate(visuals))

    def _fill(self, measured: Visual, kind: Kind, at: int) -> Visual:
        if measured.pixels is not None or measured.source is None:
            return measured
        visual = self.cut(measured.source, kind=kind, at=at)
        if _shape(visual) != _shape(measured):
            raise Refusal(
                f"{kind}_changed",
                f"{kind} {at} was measured as {_shape(measured)} and is now {_shape(visual)}; it, or the processor, "
                "was changed since: measure and plan again",
            )
        check_pixels(visual, self.metadata)
        return visual

    def _cut_image(self, ref: MediaRef) -> Visual:
        """Resized by its own keys, or else as the processor does it."""
        image = load_image(ref.source, limits=self.limits)
        options: dict[str, Any] = {}
        if has_image_keys(ref.options):
            self._keyed_size(ref, image.height, image.width)
            image, options = resize_image(image, ref.options, **self._sizes), {"do_resize": False}
        out = self.image_processor(images=[image], return_tensors="pt", **options)
        return Visual(pixels=out["pixel_values"], grid=_grid(out["image_grid_thw"][0].tolist()), source=ref)

    def _measure_image(self, ref: MediaRef) -> Visual:
        if has_image_keys(ref.options):
            return self._sized_image(ref)
        resized = self._resize_rule
        return Visual(pixels=None, grid=resized(*read_size(ref.source, limits=self.limits)), source=ref)

    def _estimate_image(self, ref: MediaRef) -> Visual:
        if has_image_keys(ref.options):
            return self._sized_image(ref)
        merge, unit = self.metadata.merge_size, self.metadata.patch_size * self.metadata.merge_size
        height, width = read_size(ref.source, limits=self.limits)
        return Visual(pixels=None, grid=(1, merge * -(-height // unit), merge * -(-width // unit)), source=ref)

    def _sized_image(self, ref: MediaRef) -> Visual:
        """An image whose own keys say how large it is to be."""
        height, width = self._keyed_size(ref, *read_size(ref.source, limits=self.limits))
        return Visual(pixels=None, grid=self._grid_of(height, width), source=ref)

    def _keyed_size(self, ref: MediaRef, height: int, width: int) -> Size:
        """(height, width) in pixels that an image's own keys ask for, which is not too large to be made."""
        size = image_size(ref.options, height=height, width=width, **self._sizes)
        check_enlarged(size, given=(height, width), factor=self.metadata.patch_size * self.metadata.merge_size)
        return size

    def _video(self, ref: MediaRef, read: Callable[..., VideoPatches]) -> Visual:
        settings = VideoSettings.from_image_processor(self.image_processor)
        video = read({**ref.options, "video": ref.source}, settings=settings, limits=self.limits)
        return Visual(
            pixels=video.pixel_values,
            grid=video.grid,
            seconds=video.second_per_grid if self.metadata.seconds_per_grid else None,
            timestamps=video.timestamps,
            source=ref,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return {"patch_size": self.metadata.patch_size, "merge_size": self.metadata.merge_size}

    @cached_property
    def _resize_rule(self) -> Callable[[int, int], Grid]:
        """From an image's height and width to its grid, as the processor resizes; seen to hold on a few small images.

        Raises:
            ConfigError: the processor resizes by another rule.
        """
        unit = self.metadata.patch_size * self.metadata.merge_size
        if not self.image_processor.do_resize:
            self._try_rule((unit, unit), self._unresized)
            self._try_rule((2 * unit, 3 * unit), self._unresized)
            return self._unresized
        for shape in _TRIALS:
            self._try_rule(shape, self._resized)
        bounds = {"shortest_edge": unit**2, "longest_edge": 12 * unit**2}
        self._try_rule(_SHRUNK, partial(self._resized, bounds=bounds), size=bounds)
        return self._resized

    def _resized(self, height: int, width: int, bounds: Mapping[str, int] | None = None) -> Grid:
        """The grid of an image of this size after resizing; `bounds` of its area, None: the processor's own."""
        area: Mapping[str, int] = bounds or self.image_processor.size
        return grid_from_size(
            height,
            width,
            patch_size=self.metadata.patch_size,
            merge=self.metadata.merge_size,
            min_pixels=area["shortest_edge"],
            max_pixels=area["longest_edge"],
        )

    def _unresized(self, height: int, width: int) -> Grid:
        """The grid of an image that is cut as it is."""
        unit = self.metadata.patch_size * self.metadata.merge_size
        if height % unit or width % unit:
            raise ValueError(f"{height} x {width} pixels are no multiples of {unit}, and its do_resize is off")
        return self._grid_of(height, width)

    def _grid_of(self, height: int, width: int) -> Grid:
        return 1, height // self.metadata.patch_size, width // self.metadata.patch_size

    def _try_rule(self, shape: tuple[int, int], rule: Callable[[int, int], Grid], **options: Any) -> None:
        """Raise a ConfigError unless the processor cuts a black image of this height and width as `rule` says."""
        height, width = shape
        out = self.image_processor(images=[Image.new("RGB", (width, height))], return_tensors="pt", **options)
        if (seen := _grid(out["image_grid_thw"][0].tolist())) != (expected := rule(height, width)):
            raise ConfigError(
                f"the image processor ({type(self.image_processor).__name__}) cuts {height} x {width} pixels into "
                f"{_shown(seen)} patches, where Qwen's rule gives {_shown(expected)}; images cannot be measured by "
                "their headers with it: use the model's own image processor, or collate whole samples"
            )


def _grid(values: list[int]) -> Grid:
    frames, rows, columns = values
    return frames, rows, columns


def _shown(grid: Grid) -> str:
    return " x ".join(map(str, grid))


def _shape(visual: Visual) -> str:
    """All that decides where a medium's tokens lie, in words."""
    times = "" if visual.seconds is None else f", {visual.seconds:g} s each"
    stamps = f", at {', '.join(f'{stamp:g}' for stamp in visual.timestamps)} s" if visual.timestamps else ""
    return f"{_shown(visual.grid)} patches (frames x rows x columns{times}{stamps})"
