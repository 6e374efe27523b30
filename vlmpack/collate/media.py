"""Read the media of a sample: tensors and texts made by the user's own processor, or only measurements.

    image ──processor──▶ Visual(pixels, grid or tensors, runs, written)    "<boi>" + 256 placeholders + "<eoi>", tiles
    header ──rule──────▶ Visual(grid) or Visual(runs, written)             no pixel is decoded: for planning rows
    video ──video.py───▶ Visual(pixels, grid, timestamps), or, measured, Visual(grid, timestamps)        Qwen
    frames ─processor──▶ Visual(pixels, grid or tensors, runs, written); measured with blank frames      others

The number of tokens of an image depends only on its size (in some families also on how many images the sample has).
Qwen's processors size images by transformers' `smart_resize`, or by the keys beside an image (`video.py`). Other
processors count an image's tokens (`_get_num_multimodal_tokens`). If that does not work, they process a blank image of
the same size without making pixels, and vlmpack takes the text that they write for it.

Each rule is tested on trial images before the first image is measured. A measured image is compared again when it is
decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from inspect import Parameter, signature
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from PIL import Image

from vlmpack.collate.audio import AudioReader
from vlmpack.collate.encoded import Encoded, Visual, check_pixels, grid_text, tokens_of
from vlmpack.collate.processor_metadata import (
    NO_ID,
    ProcessorMetadata,
    ProcessorParts,
    class_in,
    parts_of,
    pixel_bounds,
)
from vlmpack.collate.video import (
    FILE_TYPES,
    IMAGE_KEYS,
    Size,
    VideoReader,
    check_enlarged,
    check_times,
    has_keys,
    image_size,
    resize,
)
from vlmpack.data.images import ImageLimits, load_image, read_size
from vlmpack.data.messages import MediaRef
from vlmpack.errors import ConfigError, SampleError, VlmpackError
from vlmpack.families.family import Family
from vlmpack.families.registry import family_of_processor
from vlmpack.layout.media import Grid

Result = TypeVar("Result")
TRIALS: tuple[Size, ...] = ((97, 61), (371, 223), (300, 1200), (1100, 800))
"""Heights and widths of trial images for a processor's count: tall, wide, and large enough for crops."""
_SHRUNK = (371, 223)
"""Height and width of the trial image for Qwen's rule."""
_SHRUNK_TOKENS = 12
"""Largest number of tokens of that image, which forces the rule to shrink it and round."""
NEAREST = 0
"""Pillow's number of nearest-neighbor resampling, the cheapest filter."""
SIZES_KEPT = 4096
"""Number of image or video sizes whose measurements are cached."""
OPTIONS_OF_IMAGES: Mapping[str, Sequence[str]] = {"Lfm2VlProcessor": ("use_image_special_tokens",)}
"""Options that a processor passes on with the image options, by processor class."""
NOT_READ: Mapping[str, str] = {"Kimi_K25Processor": "writes tokens that are means over several frames"}
"""Why videos of a processor are not read although it takes them, by processor class."""
NUMBERING = ("MiniCPMV4_6Processor",)
"""Processor classes that may number the images of a sample in the text."""


class BatchMedia:
    """The images and videos of one batch that are already loaded, so that each is loaded and processed only once.

    The key is the source (encoded bytes, a path, or the PIL image itself) with the keys beside it. An entry lives as
    long as some sample uses it.
    """

    def __init__(self) -> None:
        self._visuals: WeakValueDictionary[Hashable, Visual] = WeakValueDictionary()

    def load_once(self, ref: MediaRef, load: Callable[[MediaRef], Visual]) -> Visual:
        """Return the visual already made from the same source with the same keys, or else make it."""
        source = _key(ref.source)
        if source is None:
            return load(ref)
        key = (ref.kind, source, repr(sorted(ref.options.items())))
        visual = self._visuals.get(key)
        if visual is None:
            visual = self._visuals[key] = load(ref)
        return visual


def _key(source: Any) -> Hashable | None:
    """Return a key that is equal only for equal pictures. None: there is no cheap one."""
    if isinstance(source, Image.Image):
        return "picture", id(source)  # the visual keeps the image alive, so its id stays unique
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


def read_named(read: Callable[[MediaRef], Result], ref: MediaRef) -> Result:
    """Read an image or video. A refusal names it by its position in the sample.

    Raises:
        SampleError: it cannot be used.
    """
    try:
        return read(ref)
    except SampleError as error:
        raise ref.named(error) from error
    except VlmpackError:  # the processor is at fault, not this image
        raise
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        fault = f"{ref.kind} {ref.index}: the image processor refused it: {error}"
        raise SampleError(fault, "image_processing") from error


@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """Reads the media of samples with the model's own processor."""

    processor: Any
    """The processor: a `ProcessorMixin` with a `replace_image_token`."""
    metadata: ProcessorMetadata
    """Its metadata."""
    limits: ImageLimits
    """Size limits for images and frames."""
    videos: VideoReader
    """Reads videos."""

    # ------------------------------------------------------------------ the media of a sample

    def load_each(
        self, refs: Sequence[MediaRef], *, batch: BatchMedia | None = None, max_tokens: int | None = None
    ) -> tuple[Visual, ...]:
        """Load a sample's images and videos, or its audios, as tensors, in order.

        A medium is only measured if its size alone shows that it ends beyond `max_tokens`: no sample of that length
        holds it. This applies to videos and to images sized by keys. Images sized by the processor are always
        processed, since the processor's `size` bounds them.

        Raises:
            SampleError: one of them cannot be used.
        """
        if _are_audios(refs):
            return self.audio.load_each(refs)
        if self._are_together(refs):
            images = [read_named(self._picture, ref) for ref in refs]
            return _sourced(read_named(lambda _: self.process(images), refs[0]), refs)
        media = batch or BatchMedia()
        visuals, remaining = [], inf if max_tokens is None else max_tokens
        for ref in refs:
            load = self._image if ref.kind == "image" else self._video
            made = partial(read_named, partial(media.load_once, load=load), ref)
            is_sized = remaining < inf and (ref.kind == "video" or has_keys(ref.options))
            visual = read_named(self._measured, ref) if is_sized else made()
            remaining -= sum(tokens_of(visual, self.metadata, kind=ref.kind))
            visuals.append(made() if is_sized and remaining >= 0 else visual)
        return tuple(visuals)

    def measure_each(self, refs: Sequence[MediaRef]) -> tuple[Visual, ...]:
        """Measure a sample's images and videos, or its audios, in order, from their headers.

        Raises:
            SampleError: a header shows that a medium cannot be used.
            ConfigError: the image processor of a Qwen processor resizes by another rule.
        """
        if _are_audios(refs):
            return self.audio.measure_each(refs)
        if self._are_together(refs):
            return _sourced(self._blank(tuple(read_named(self._size, ref) for ref in refs)), refs)
        return tuple(read_named(self._measured, ref) for ref in refs)

    def decode(self, sample: Encoded, batch: BatchMedia | None = None) -> Encoded:
        """Return a measured sample with the tensors of all its media.

        Raises:
            SampleError: one of them cannot be used, or its size is not the measured one (`image_changed`, ...).
        """
        filled: dict[str, Any] = {f"{kind}s": self._filled(media, batch) for kind, media in sample.media.items()}
        return replace(sample, **filled)

    @cached_property
    def audio(self) -> AudioReader:
        """Reads audio."""
        return AudioReader(processor=self.processor, metadata=self.metadata)

    def _filled(self, measured: tuple[Visual, ...], batch: BatchMedia | None) -> tuple[Visual, ...]:
        refs = [visual.source for visual in measured if visual.pixels is None and visual.source is not None]
        if not refs:
            return measured
        loaded, visuals = iter(self.load_each(refs, batch=batch)), []
        for before in measured:
            if before.pixels is not None or (ref := before.source) is None:
                visuals.append(before)
                continue
            visual = next(loaded)
            if _shape(visual) != _shape(before):
                seen = f"{ref.kind} {ref.index} was measured as {_shape(before)} and is now {_shape(visual)}"
                raise SampleError(f"{seen}; it or the processor changed: measure and plan again", f"{ref.kind}_changed")
            check_pixels(visual, self.metadata)
            visuals.append(visual)
        return tuple(visuals)

    def _are_together(self, refs: Sequence[MediaRef]) -> bool:
        return self.metadata.images_together and len(refs) > 1 and refs[0].kind == "image"

    # ------------------------------------------------------------------ one image or video

    def _image(self, ref: MediaRef) -> Visual:
        image, options = self._picture(ref), {}
        if has_keys(ref.options):
            image, options = resize(image, self._keyed_size(ref, (image.height, image.width))), {"do_resize": False}
        (visual,) = self.process([image], **options)
        return replace(visual, source=ref)

    def _picture(self, ref: MediaRef) -> Image.Image:
        self._check_keys(ref)
        return load_image(ref.source, limits=self.limits)

    def _size(self, ref: MediaRef) -> Size:
        self._check_keys(ref)
        return read_size(ref.source, limits=self.limits)

    def _check_keys(self, ref: MediaRef) -> None:
        if self.metadata.by_processor and has_keys(ref.options):
            keys = ", ".join(key for key in IMAGE_KEYS if ref.options.get(key) is not None)
            name = type(self.processor).__name__
            raise SampleError(f"it has {keys} beside it; the {name} sizes images alike: leave them out", "vision_key")

    def _keyed_size(self, ref: MediaRef, source: Size) -> Size:
        """Return the (height, width) in pixels that an image's keys set, after checking that it is not too large."""
        size = image_size(ref.options, source, factor=self._side)
        check_enlarged(size, source=source, factor=self._side)
        return size

    def _measured(self, ref: MediaRef) -> Visual:
        if ref.kind == "video":
            return self._video(ref, is_measured=True)
        size = self._size(ref)
        if self.metadata.by_processor:
            visual = self._counted(size) if self._counted is not None else self._blank((size,))[0]
            return replace(visual, source=ref)
        if has_keys(ref.options):
            return Visual(pixels=None, grid=self._patches(self._keyed_size(ref, size)), source=ref)
        assert self._has_qwens_rule
        return Visual(pixels=None, grid=self._grid(size), source=ref)

    def _video(self, ref: MediaRef, *, is_measured: bool = False) -> Visual:
        element = {**ref.options, "video": ref.source}
        check_times(element, is_file=isinstance(ref.source, FILE_TYPES))
        if self.metadata.by_processor:
            return replace(self._video_of_processor(element, is_measured=is_measured), source=ref)
        video = self.videos.load(element, is_measured=is_measured)
        return replace(video, seconds=video.seconds if self.metadata.seconds_per_grid else None, source=ref)

    def _video_of_processor(self, element: Mapping[str, Any], *, is_measured: bool) -> Visual:
        """Make a video by the processor's own rules; only its file is decoded here. Measuring uses blank frames."""
        name = type(self.processor).__name__
        if not self.metadata.video_token:
            reason = NOT_READ.get(name, "takes none")
            raise SampleError(f"videos are not read for a {name}, which {reason}; give frames as images", "no_video")
        if self.parts.video_processor is None:
            fault = f"this {name} has no video processor, which needs torchvision; install it and load it again"
            raise SampleError(fault, "no_video")
        clip = self.videos.clip(element)
        if is_measured:
            return self._blank_video(clip.shape, clip.metadata)
        return self.process_video(clip.decode(), clip.metadata)

    @cached_property
    def _blank_video(self) -> Callable[[tuple[int, ...], tuple[Any, ...]], Visual]:
        """Measures a video by processing blank frames [F, H, W, 3]."""

        def blank(shape: tuple[int, ...], metadata: tuple[Any, ...]) -> Visual:
            visual = self.process_video(np.broadcast_to(np.zeros((), np.uint8), shape), metadata)
            return replace(visual, pixels=None, tensors={})

        return lru_cache(maxsize=SIZES_KEPT)(blank)

    def process_video(self, frames: np.ndarray, metadata: tuple[Any, ...]) -> Visual:
        """Let the processor make the tensors and the text for a video's frames, uint8 [F, H, W, 3]."""
        from transformers.video_utils import VideoMetadata

        fields: dict[str, Any] = {name: [*x] if isinstance(x, tuple) else x for name, x in metadata}
        options = {**self.options["videos_kwargs"], "video_metadata": [VideoMetadata(**fields)]}
        options |= {"do_sample_frames": False, "return_metadata": True}
        processed, texts = self.processor._process_videos([np.ascontiguousarray(frames)], **options)
        pixels = "pixel_values_videos"
        if self.metadata.frames_as_tiles:
            processed, pixels = self._as_tiles(processed), "pixel_values"
        (visual,) = self._visuals(processed, texts, pixels=pixels, grid="video_grid_thw")
        return visual

    def _as_tiles(self, processed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return a video's tensors [1, F, ...] as those of an image with F tiles."""
        named = {name.removesuffix("_videos"): tensor for name, tensor in processed.items()}
        axes = {name: join.axis for name, join in self._family.media.items()}
        return {name: x if axes[name] else x.flatten(0, 1) for name, x in named.items() if name in axes}

    def process(self, images: Sequence[Image.Image], **options: Any) -> tuple[Visual, ...]:
        """Let the processor make the tensors of images and the texts that replace their placeholders.

        Args:
            images: images of one sample.
            options: options of the image processor that override its own.

        Raises:
            ConfigError: the processor does not return `pixel_values`, or not one text for each image.
        """
        processed, texts = self.processor._process_images([list(images)], **{**self._image_options, **options})
        if "pixel_values" not in processed or len(texts) != len(images):
            made = f"{', '.join(processed) or 'nothing'} and {len(texts)} text(s) of {len(images)} image(s)"
            raise ConfigError(f"the {type(self.processor).__name__} makes {made}, not pixel_values and a text for each")
        return self._visuals(processed, texts, pixels="pixel_values", grid="image_grid_thw")

    def _visuals(
        self, processed: Mapping[str, Any], texts: Sequence[str], *, pixels: str, grid: str
    ) -> tuple[Visual, ...]:
        """Return one record per medium, with the tensors that the family's models take."""
        visuals, names = [], [name for name in self._family.media if name in processed]
        for at, text in enumerate(texts):
            tensors = {name: _of_image(processed[name], at, len(texts)) for name in names}
            values, shape = tensors.pop(pixels), None
            if grid in tensors:
                frames, rows, columns = tensors.pop(grid).reshape(3).tolist()
                shape = frames, rows, columns
            # Qwen's processors write as many placeholders as the grid needs
            written = self._written(text, pixels != "pixel_values") if self.metadata.by_processor else {}
            visuals.append(Visual(grid=shape, pixels=values, tensors=tensors, **written))
        return tuple(visuals)

    def _written(self, text: str, of_video: bool = False) -> dict[str, Any]:
        """Return a medium's text with one placeholder per run, and the length of each run."""
        is_own = of_video and self.metadata.video_token_id != NO_ID
        placeholder = self.metadata.video_token if is_own else self.placeholder
        run = re.compile(f"(?:{re.escape(placeholder)})+")
        runs = tuple(len(match.group()) // len(placeholder) for match in run.finditer(text))
        return {"runs": runs, "written": run.sub(lambda _: placeholder, text)}

    def texts_of(self, visuals: Sequence[Visual], text: str, token: str) -> list[str]:
        """Return the texts that replace the placeholders in `text`, numbered if the processor numbers media."""
        texts = [visual.written or token for visual in visuals]
        if self._numbers_images and visuals:
            return self.processor._prepend_local_ids([text], texts, token)
        return texts

    # ------------------------------------------------------------------ measuring by size

    @property
    def _side(self) -> int:
        """Side of a token in pixels."""
        return self.metadata.patch_size * self.metadata.merge_size

    def _grid(self, size: Size, bounds: tuple[int, int] | None = None) -> Grid:
        """Return the grid of an image by Qwen's rule. `bounds`: least and most pixels; None: the processor's own."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        part, side = self.parts.image_processor, self._side
        if part.do_resize:
            low, high = bounds or pixel_bounds(part)
            size = smart_resize(*size, side, min_pixels=low, max_pixels=high)
        elif size[0] % side or size[1] % side:
            raise ValueError(f"{size[0]} x {size[1]} pixels are no multiples of {side}, and its do_resize is off")
        return self._patches(size)

    def _patches(self, size: Size) -> Grid:
        return 1, size[0] // self.metadata.patch_size, size[1] // self.metadata.patch_size

    @cached_property
    def _has_qwens_rule(self) -> bool:
        """True once the image processor has made the grid of a black image by Qwen's rule, with small bounds.

        Raises:
            ConfigError: it resizes by another rule.
        """
        part, low, high = self.parts.image_processor, self._side**2, _SHRUNK_TOKENS * self._side**2
        height, width = _SHRUNK if part.do_resize else (2 * self._side, 3 * self._side)
        options: dict[str, Any] = {"size": {"shortest_edge": low, "longest_edge": high}}
        if any(getattr(part, name, None) is not None for name in ("min_pixels", "max_pixels")):
            options |= {"min_pixels": low, "max_pixels": high}  # these would override `size`
        (visual,) = self.process([Image.new("RGB", (width, height))], **options)
        if visual.patch_grid != (expected := self._grid((height, width), (low, high))):
            seen = f"({type(part).__name__}) makes {grid_text(visual.patch_grid)} patches of {height} x {width} pixels"
            raise ConfigError(
                f"the image processor {seen}, where Qwen's rule gives {grid_text(expected)}; images cannot be measured "
                "with it: use the model's own image processor, or collate whole samples"
            )
        return True

    @cached_property
    def _blank(self) -> Callable[[tuple[Size, ...]], tuple[Visual, ...]]:
        """Measures the images of one sample by the texts that the processor writes for blank images of their sizes."""
        expected = [[(image.runs, image.written) for image in self._written_of((size,))] for size in TRIALS]
        for unmade in (("do_rescale", "do_normalize", "do_pad"), ("do_rescale", "do_normalize")):
            try:
                blank = self._shapes_alone(unmade)
                if [[(image.runs, image.written) for image in blank((size,))] for size in TRIALS] == expected:
                    return lru_cache(maxsize=SIZES_KEPT)(blank)
            except Exception:  # the processor needs what is left out, or does not use transformers' classes
                continue
        return lru_cache(maxsize=SIZES_KEPT)(self._written_of)

    def _written_of(self, sizes: tuple[Size, ...], **options: Any) -> tuple[Visual, ...]:
        visuals = self.process([Image.new("RGB", (width, height)) for height, width in sizes], **options)
        return tuple(Visual(pixels=None, runs=visual.runs, written=visual.written) for visual in visuals)

    def _shapes_alone(self, unmade: Sequence[str]) -> Callable[[tuple[Size, ...]], tuple[Visual, ...]]:
        """Return a function that measures blank images by shapes alone: the processor counts without making pixels.

        `unmade` names steps of the image processor to leave out.
        """
        processor, images = copy(self.processor), copy(self.parts.image_processor)
        images.__class__ = _without_pixels(type(images))
        processor.image_processor = images
        options = {name: False for name in unmade if hasattr(images, name)}
        return partial(replace(self, processor=processor)._written_of, **options, resample=NEAREST)

    @cached_property
    def _counted(self) -> Callable[[Size], Visual] | None:
        """Measures an image by the processor's own count; None: it has no count, or the trial images contradict it."""
        visuals = [self._blank((size,))[0] for size in TRIALS]
        if any(len(visual.runs) != 1 for visual in visuals) or len({visual.written for visual in visuals}) > 1:
            return None
        try:
            around = {self._count(size) - visual.runs[0] for size, visual in zip(TRIALS, visuals, strict=True)}
        except (AttributeError, NotImplementedError, TypeError, KeyError, ValueError):
            return None
        if len(around) > 1:
            return None
        (extra,), written = around, visuals[0].written
        return lambda size: Visual(pixels=None, runs=(self._count(size) - extra,), written=written)

    def _count(self, size: Size) -> int:
        """Count the tokens of an image with the processor. Some processors include the tokens around it."""
        (count,) = self.processor._get_num_multimodal_tokens(image_sizes=[size])["num_image_tokens"]
        return int(count)

    # ------------------------------------------------------------------ the processor

    @cached_property
    def placeholder(self) -> str:
        """The token that stands for a part of an image, as text."""
        return self.parts.tokenizer.convert_ids_to_tokens(self.metadata.image_token_id)

    @cached_property
    def parts(self) -> ProcessorParts:
        """The parts of the processor, looked up once."""
        return parts_of(self.processor)

    @cached_property
    def _family(self) -> Family:
        return family_of_processor(self.processor)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options of a processor call: for images, for texts, and the processor's own."""
        merge = self.processor._merge_kwargs
        is_old = signature(merge).parameters["ModelProcessorKwargs"].default is Parameter.empty  # transformers 5.17
        kinds = (self.processor.valid_processor_kwargs,) if is_old else ()
        tokenizer = self.parts.tokenizer
        return merge(*kinds, tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt")

    @cached_property
    def _image_options(self) -> dict[str, Any]:
        """Options for images, and options that the processor passes on with them, preferably from the text options."""
        names = OPTIONS_OF_IMAGES.get(class_in(self.processor, OPTIONS_OF_IMAGES), ())
        its = {name: self.options["text_kwargs"].get(name, self.options[name]) for name in names}
        return self.options["images_kwargs"] | its

    @cached_property
    def _numbers_images(self) -> bool:
        """True: the processor numbers the images of a sample in the text."""
        if not class_in(self.processor, NUMBERING):
            return False
        chosen = self.options["images_kwargs"].get("use_image_id", self.options["use_image_id"])
        return self.processor.default_use_image_id if chosen is None else chosen


def _without_pixels(cls: type) -> type:
    """Derive an image processor class whose back-end returns arrays of the right shapes, where it can."""
    from transformers.image_processing_backends import PilBackend, TorchvisionBackend

    backend: Any = PilBackend if issubclass(cls, PilBackend) else TorchvisionBackend

    class Shapes(backend):
        def resize(self, image: Any, size: Any, *args: Any, **options: Any) -> Any:
            """Return zeros of the new size, which take no memory. A size given by its edges goes to the back-end."""
            if not (size.height and size.width):
                return super().resize(image, size, *args, **options)
            shape = (*image.shape[:-2], size.height, size.width)
            if isinstance(image, torch.Tensor):
                return image.new_zeros(()).expand(shape)
            return np.broadcast_to(np.zeros((), image.dtype), shape)

    return type(cls.__name__, (cls, Shapes), {})


def _sourced(visuals: Sequence[Visual], refs: Sequence[MediaRef]) -> tuple[Visual, ...]:
    return tuple(replace(visual, source=ref) for visual, ref in zip(visuals, refs, strict=True))


def _are_audios(refs: Sequence[MediaRef]) -> bool:
    return bool(refs) and refs[0].kind == "audio"


def _of_image(tensor: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """Return one image's part of a tensor. A tensor for all images of a sample goes to the first image."""
    if count == 1:
        return tensor
    return tensor[at : at + 1] if len(tensor) == count else tensor[: 0 if at else None]


def trial_image(size: Size) -> Image.Image:
    """Make a picture of this height and width in which all rows and columns differ."""
    height, width = size
    values = np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3) ** 2 % 251
    return Image.fromarray(values.astype(np.uint8))


def _shape(visual: Visual) -> str:
    """Describe everything that determines the positions of a medium's tokens."""
    if visual.runs:
        return f"{sum(visual.runs)} tokens in {len(visual.runs)} run(s)"
    times = "" if visual.seconds is None else f", {visual.seconds:g} s each"
    stamps = f", at {', '.join(f'{stamp:g}' for stamp in visual.timestamps)} s" if visual.timestamps else ""
    return f"{grid_text(visual.patch_grid)} patches (frames x rows x columns{times}{stamps})"
