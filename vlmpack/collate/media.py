"""Images and videos: cut into patches by the user's own image processor, or only measured by their headers.

    MediaRef ──measure──▶ Visual(grid)                  no pixel is decoded: for planning rows
        └──────cut──────▶ Visual(grid, pixels)          for training on them

Both give the same grid: the rules by which the processor resizes are those of `families/resize.py` and
`vision_keys.py`. That this processor keeps to them is seen once, on small images, before the first one is measured,
and checked again on every image that is measured first and cut later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, final

from PIL import Image

from vlmpack.collate.checks import check_pixels
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.holes import Kind, MediaRef
from vlmpack.collate.processor import ProcessorFacts
from vlmpack.collate.refusal import Refusal
from vlmpack.collate.video import VideoPatches, VideoSettings, load_video, outline_video
from vlmpack.collate.vision_keys import has_image_keys, image_size, resize_image
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_size
from vlmpack.errors import ConfigError
from vlmpack.families.resize import grid_from_size
from vlmpack.layout import Grid

Result = TypeVar("Result")

_TRIALS = ((1, 1), (45, 71), (100, 30), (31, 400))
"""Heights and widths on which the processor's rule is tried: blown up, rounded, thin."""


@final
@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """Reads what the media of a sample refer to."""

    image_processor: Any
    """Of the user's processor."""
    facts: ProcessorFacts
    """What was read from the processor."""
    limits: ImageLimits
    """Caps for images and frames."""

    # ------------------------------------------------------------------ one image or video

    def cut(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """Load an image or video and cut it into patches; `at` is its place among those of its sample.

        Raises:
            Refusal: it cannot be used.
        """
        load = self._cut_image if kind == "image" else partial(self._video, read=load_video)
        return _named(partial(load, ref), kind, at)

    def measure(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """The same without pixels, from headers.

        Raises:
            Refusal: its header shows that it cannot be used.
            ConfigError: the image processor resizes by a rule of its own.
        """
        load = self._measure_image if kind == "image" else partial(self._video, read=outline_video)
        return _named(partial(load, ref), kind, at)

    def fill(self, sample: Encoded) -> Encoded:
        """A sample that was only measured, with the patches of all its media.

        Raises:
            Refusal: an image or video cannot be used, or is not of the size that was measured.
        """
        return replace(sample, images=self._filled(sample.images, "image"), videos=self._filled(sample.videos, "video"))

    # ------------------------------------------------------------------ how

    def _filled(self, visuals: tuple[Visual, ...], kind: Kind) -> tuple[Visual, ...]:
        return tuple(self._fill(visual, kind, at) for at, visual in enumerate(visuals))

    def _fill(self, measured: Visual, kind: Kind, at: int) -> Visual:
        if measured.pixels is not None or measured.source is None:
            return measured
        visual = self.cut(measured.source, kind=kind, at=at)
        seen, expected = ((v.grid, v.seconds, v.timestamps) for v in (visual, measured))
        if seen != expected:
            raise Refusal(
                f"{kind}_changed",
                f"{kind} {at} was measured as {_shown(measured.grid)} patches (frames x rows x columns) and is now "
                f"{_shown(visual.grid)}; it, or the processor, was changed since: measure and plan again",
            )
        check_pixels(visual, self.facts)
        return visual

    def _cut_image(self, ref: MediaRef) -> Visual:
        """Resized by its own keys, or else as the processor does it."""
        image = load_image(ref.source, limits=self.limits)
        options: dict[str, Any] = {}
        if has_image_keys(ref.options):
            image, options = resize_image(image, ref.options, **self._sizes), {"do_resize": False}
        out = self.image_processor(images=[image], return_tensors="pt", **options)
        return Visual(pixels=out["pixel_values"], grid=_grid(out["image_grid_thw"][0].tolist()), source=ref)

    def _measure_image(self, ref: MediaRef) -> Visual:
        assert self._keeps_to_the_rule
        height, width = read_size(ref.source, limits=self.limits)
        if has_image_keys(ref.options):
            height, width = image_size(ref.options, height=height, width=width, **self._sizes)
            return Visual(pixels=None, grid=self._grid_of(height, width), source=ref)
        return Visual(pixels=None, grid=self._resized(height, width), source=ref)

    def _video(self, ref: MediaRef, read: Callable[..., VideoPatches]) -> Visual:
        settings = VideoSettings.from_image_processor(self.image_processor)
        video = read({**ref.options, "video": ref.source}, settings=settings, limits=self.limits)
        return Visual(
            pixels=video.pixel_values,
            grid=video.grid,
            seconds=video.second_per_grid if self.facts.seconds_per_grid else None,
            timestamps=video.timestamps,
            source=ref,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return {"patch_size": self.facts.patch_size, "merge_size": self.facts.merge_size}

    def _resized(self, height: int, width: int) -> Grid:
        """The grid of an image of this size, as the processor will resize it."""
        if not self.image_processor.do_resize:
            return self._grid_of(height, width)
        bounds = self.image_processor.size
        return grid_from_size(
            height,
            width,
            patch_size=self.facts.patch_size,
            merge=self.facts.merge_size,
            min_pixels=bounds["shortest_edge"],
            max_pixels=bounds["longest_edge"],
        )

    def _grid_of(self, height: int, width: int) -> Grid:
        return 1, height // self.facts.patch_size, width // self.facts.patch_size

    @cached_property
    def _keeps_to_the_rule(self) -> bool:
        """True; that the processor's grids are those of the rule is seen on a few small images.

        Raises:
            ConfigError: they are not.
        """
        unit = self.facts.patch_size * self.facts.merge_size
        trials = _TRIALS if self.image_processor.do_resize else ((unit, unit), (2 * unit, 3 * unit))
        for height, width in trials:
            seen = self._cut_image(MediaRef(source=Image.new("RGB", (width, height)))).grid
            if seen != (expected := self._resized(height, width)):
                raise ConfigError(
                    f"the image processor ({type(self.image_processor).__name__}) cuts {height} x {width} pixels into "
                    f"{_shown(seen)} patches, where Qwen's rule gives {_shown(expected)}; images cannot be measured by "
                    "their headers with it: use the model's own image processor, or collate whole samples"
                )
        return True


def _named(read: Callable[[], Result], kind: Kind, at: int) -> Result:
    """Run `read`, and name the image or video in its refusal."""
    try:
        return read()
    except ImageError as error:
        raise Refusal(error.reason, f"{kind} {at}: {error.detail}") from error
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        raise Refusal("image_processing", f"{kind} {at}: the image processor refused it: {error}") from error


def _grid(values: list[int]) -> Grid:
    frames, rows, columns = values
    return frames, rows, columns


def _shown(grid: Grid) -> str:
    return " x ".join(map(str, grid))
