"""Images and videos: cut into patches by the user's own image processor, or only measured by their headers.

    MediaRef ──measure──▶ Visual(grid)                  no pixel is decoded: for planning rows
        ├──────cut──────▶ Visual(grid, pixels)          for training on them
        └────estimate───▶ Visual(about that grid)       by the plain rule, whatever the processor's own rule is

The first two give the same grid: the rules by which the processor resizes are those of transformers and
`vision_keys.py`. That this processor keeps to them is tried on one small image before the first one is measured,
and checked again on every image that is measured first and cut later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, final
from weakref import WeakValueDictionary

from PIL import Image

from vlmpack.collate.columns import Kind, MediaRef
from vlmpack.collate.encoded import Encoded, Visual, check_pixels, tokens_of
from vlmpack.collate.processor_metadata import ProcessorMetadata, pixel_bounds
from vlmpack.collate.video import VideoSettings, load_video, measure_video
from vlmpack.collate.video_file import DEFAULT_RULES, FILE_TYPES, FileRules, load_video_file, measure_video_file
from vlmpack.collate.vision_keys import Size, check_enlarged, check_times, has_image_keys, image_size, resize
from vlmpack.data.images import ImageError, ImageLimits, load_image, read_size
from vlmpack.errors import ConfigError, Refusal, VlmpackError
from vlmpack.layout.batch import Grid

Result = TypeVar("Result")
_TRIAL = (371, 223)
"""Height and width of the image on which the processor's rule is tried."""
_TRIAL_TOKENS = 12
"""Most tokens of that image: it has to be made smaller, and rounded."""


@final
class BatchMedia:
    """The images and videos of one batch that were cut already, so that each is loaded and cut once.

    Keyed by what holds them: encoded bytes, a path, or the picture itself, with the keys beside them. They are kept as
    long as a sample has them.
    """

    def __init__(self) -> None:
        self._visuals: WeakValueDictionary[Hashable, Visual] = WeakValueDictionary()

    def cut_once(self, ref: MediaRef, kind: Kind, cut: Callable[[MediaRef], Visual]) -> Visual:
        """Return the visual that was cut from the same source by the same keys, or else cut it."""
        source = _key(ref.source)
        if source is None:
            return cut(ref)
        key = (kind, source, repr(sorted(ref.options.items())))
        visual = self._visuals.get(key)
        if visual is None:
            visual = self._visuals[key] = cut(ref)
        return visual


def _key(source: Any) -> Hashable | None:
    """A key that is equal only for equal pictures; None: there is no cheap one."""
    if isinstance(source, Image.Image):
        return "picture", id(source)  # whoever cut it keeps it, and so its id
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | Path):
        return "path", str(source)
    if isinstance(source, Mapping):
        return _key(source["bytes"] if source.get("bytes") is not None else source.get("path"))
    if isinstance(source, list | tuple):
        frames = [_key(frame) for frame in source]
        return None if None in frames else ("frames", *frames)
    return None


def read_named(read: Callable[[MediaRef], Result], ref: MediaRef, kind: Kind, at: int) -> Result:
    """Read an image or video; `at`, its place among those of its sample, names it in a refusal.

    Raises:
        Refusal: it cannot be used.
    """
    try:
        return read(ref)
    except ImageError as error:
        raise Refusal(error.reason, f"{kind} {at}: {error.detail}") from error
    except VlmpackError:  # the processor's fault, not this image's
        raise
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        raise Refusal("image_processing", f"{kind} {at}: the image processor refused it: {error}") from error


@final
@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """Reads what the media of a sample refer to."""

    image_processor: Any
    """Of the user's processor."""
    video_processor: Any = None
    """The same, by whose settings frames become patches; None: there is none, and they do as images."""
    metadata: ProcessorMetadata
    """Metadata of the processor."""
    limits: ImageLimits
    """Caps for images and frames."""
    file_rules: FileRules = DEFAULT_RULES
    """Rules for sampling and sizing files of videos."""

    # ------------------------------------------------------------------ one image or video

    def cut(self, ref: MediaRef, *, kind: Kind, at: int, batch: BatchMedia | None = None) -> Visual:
        """Load an image or video and cut it into patches; `at` is its place among those of its sample.

        Raises:
            Refusal: it cannot be used.
        """
        cut_video = partial(self._video, read=load_video, read_file=load_video_file)
        cut = self._cut_image if kind == "image" else cut_video
        return read_named(partial((batch or BatchMedia()).cut_once, kind=kind, cut=cut), ref, kind, at)

    def cut_each(
        self, refs: Sequence[MediaRef], *, kind: Kind, batch: BatchMedia | None = None, max_tokens: int | None = None
    ) -> tuple[Visual, ...]:
        """Cut the media of one kind of a sample, in their order.

        One that ends beyond `max_tokens` by its size alone is measured and not made: no sample of at most so many
        tokens holds it. Images that the processor sizes are made: its own `size` bounds them.

        Raises:
            Refusal: one of them cannot be used.
        """
        visuals: list[Visual] = []
        remaining = inf if max_tokens is None else max_tokens
        for at, ref in enumerate(refs):
            is_sized = remaining < inf and (kind == "video" or has_image_keys(ref.options))
            cut = partial(self.cut, ref, kind=kind, at=at, batch=batch)
            visual = self.measure(ref, kind=kind, at=at) if is_sized else cut()
            remaining -= sum(tokens_of(visual, self.metadata, kind=kind))
            visuals.append(cut() if is_sized and remaining >= 0 else visual)
        return tuple(visuals)

    def measure(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """The same without pixels, from headers.

        Raises:
            Refusal: its header shows that it cannot be used.
            ConfigError: the image processor resizes by a rule of its own.
        """
        return read_named(self._measurer(kind, self._by_processor), ref, kind, at)

    def measure_each(self, refs: Sequence[MediaRef], *, kind: Kind, estimate: bool = False) -> tuple[Visual, ...]:
        """Measure, or estimate, the media of one kind of a sample, in their order.

        Raises:
            Refusal, ConfigError: as `measure`.
        """
        read = self.estimate if estimate else self.measure
        return tuple(read(ref, kind=kind, at=at) for at, ref in enumerate(refs))

    def estimate(self, ref: MediaRef, *, kind: Kind, at: int) -> Visual:
        """About the same as `measure`: an image has one token for each square of its own pixels, begun ones included.

        Images that say how large they are to be, and videos, are measured: their size is not the processor's choice.

        Raises:
            Refusal: its header shows that it cannot be used.
        """
        return read_named(self._measurer(kind, self._by_squares), ref, kind, at)

    def decode(self, sample: Encoded, batch: BatchMedia | None = None) -> Encoded:
        """A sample that was only measured, with the patches of all its media.

        Raises:
            Refusal: an image or video cannot be used, or is not of the size that was measured.
        """
        images, videos = self._filled(sample.images, "image", batch), self._filled(sample.videos, "video", batch)
        return replace(sample, images=images, videos=videos)

    # ------------------------------------------------------------------ images and videos

    def _measurer(self, kind: Kind, rule: Callable[[int, int], Grid]) -> Callable[[MediaRef], Visual]:
        by_header = partial(self._measure_image, rule=rule)
        return by_header if kind == "image" else partial(self._video, read=measure_video, read_file=measure_video_file)

    def _filled(self, visuals: tuple[Visual, ...], kind: Kind, batch: BatchMedia | None) -> tuple[Visual, ...]:
        return tuple(self._fill(visual, kind, at, batch) for at, visual in enumerate(visuals))

    def _fill(self, measured: Visual, kind: Kind, at: int, batch: BatchMedia | None) -> Visual:
        if measured.pixels is not None or measured.source is None:
            return measured
        visual = self.cut(measured.source, kind=kind, at=at, batch=batch)
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
        if not has_image_keys(ref.options):
            return replace(self._patches(image), source=ref)
        image = resize(image, self._keyed_size(ref, (image.height, image.width)))
        return replace(self._patches(image, do_resize=False), source=ref)

    def _patches(self, image: Image.Image, **options: Any) -> Visual:
        out = self.image_processor(images=[image], return_tensors="pt", **options)
        frames, rows, columns = out["image_grid_thw"][0].tolist()
        return Visual(pixels=out["pixel_values"], grid=(frames, rows, columns))

    def _measure_image(self, ref: MediaRef, *, rule: Callable[[int, int], Grid]) -> Visual:
        """Sized by its own keys, or else by a rule."""
        size = read_size(ref.source, limits=self.limits)
        grid = self._grid_of(*self._keyed_size(ref, size)) if has_image_keys(ref.options) else rule(*size)
        return Visual(pixels=None, grid=grid, source=ref)

    def _by_processor(self, height: int, width: int) -> Grid:
        return self._resize_rule(height, width)

    def _by_squares(self, height: int, width: int) -> Grid:
        merge, unit = self.metadata.merge_size, self._unit
        return 1, merge * -(-height // unit), merge * -(-width // unit)

    def _keyed_size(self, ref: MediaRef, source: Size) -> Size:
        """(height, width) in pixels by an image's keys, which is not too large to be made."""
        size = image_size(ref.options, source, factor=self._unit)
        check_enlarged(size, source=source, factor=self._unit)
        return size

    def _video(self, ref: MediaRef, read: Callable[..., Visual], read_file: Callable[..., Visual]) -> Visual:
        settings = VideoSettings.from_processor(self.video_processor or self.image_processor)
        element = {**ref.options, "video": ref.source}
        is_file = isinstance(ref.source, FILE_TYPES)
        check_times(element, is_file=is_file)
        if is_file:
            video = read_file(element, settings=settings, rules=self.file_rules)
        else:
            video = read(element, settings=settings, limits=self.limits)
        return replace(video, seconds=video.seconds if self.metadata.seconds_per_grid else None, source=ref)

    @property
    def _unit(self) -> int:
        """Pixels along one side of a token."""
        return self.metadata.patch_size * self.metadata.merge_size

    @cached_property
    def _resize_rule(self) -> Callable[[int, int], Grid]:
        """The rule from an image's height and width to its grid, after one trial with this processor.

        Raises:
            ConfigError: the processor resizes by another rule.
        """
        if not self.image_processor.do_resize:
            self._try_rule((2 * self._unit, 3 * self._unit), self._unresized)
            return self._unresized
        low, high = self._unit**2, _TRIAL_TOKENS * self._unit**2
        options: dict[str, Any] = {"size": {"shortest_edge": low, "longest_edge": high}}
        if any(getattr(self.image_processor, name, None) is not None for name in ("min_pixels", "max_pixels")):
            options |= {"min_pixels": low, "max_pixels": high}  # which would go before `size`
        self._try_rule(_TRIAL, partial(self._resized, bounds=(low, high)), **options)
        return self._resized

    def _resized(self, height: int, width: int, bounds: tuple[int, int] | None = None) -> Grid:
        """The grid by transformers' own rule; `bounds` of the area, None: the processor's."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        low, high = bounds or pixel_bounds(self.image_processor, self.image_processor.size)
        return self._grid_of(*smart_resize(height, width, self._unit, min_pixels=low, max_pixels=high))

    def _unresized(self, height: int, width: int) -> Grid:
        """The grid of an image that is cut as it is."""
        if height % self._unit or width % self._unit:
            raise ValueError(f"{height} x {width} pixels are no multiples of {self._unit}, and its do_resize is off")
        return self._grid_of(height, width)

    def _grid_of(self, height: int, width: int) -> Grid:
        return 1, height // self.metadata.patch_size, width // self.metadata.patch_size

    def _try_rule(self, shape: Size, rule: Callable[[int, int], Grid], **options: Any) -> None:
        """Raise a ConfigError unless the processor cuts a black image of this height and width by `rule`."""
        height, width = shape
        grid = self._patches(Image.new("RGB", (width, height)), **options).patch_grid
        if grid != (expected := rule(height, width)):
            raise ConfigError(
                f"the image processor ({type(self.image_processor).__name__}) cuts {height} x {width} pixels into "
                f"{_shown(grid)} patches, where Qwen's rule gives {_shown(expected)}; images cannot be measured by "
                "their headers with it: use the model's own image processor, or collate whole samples"
            )


def _shown(grid: Grid) -> str:
    return " x ".join(map(str, grid))


def _shape(visual: Visual) -> str:
    """All that decides where a medium's tokens lie, in words."""
    times = "" if visual.seconds is None else f", {visual.seconds:g} s each"
    stamps = f", at {', '.join(f'{stamp:g}' for stamp in visual.timestamps)} s" if visual.timestamps else ""
    return f"{_shown(visual.patch_grid)} patches (frames x rows x columns{times}{stamps})"
