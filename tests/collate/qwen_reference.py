"""The real qwen_vl_utils in a process of its own, with a stand-in for torchvision, which it imports.

    python qwen_reference.py sizes  < cases.json > answers.json      sizes of images and of frames, or the error's name
    python qwen_reference.py pixels cases.pickle answers.pickle      `fetch_video` in full

The stand-in is that of `transformers_videos`, with a `resize` that for tensors is torch's `interpolate` (in float32,
clamped and rounded: so says torchvision's `_functional_tensor.resize`). Where torchvision is installed, frames are
resized by it. For sizes the pictures are blanks that hold a size and no pixels.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from transformers_videos import stand_in


class Blank(Image.Image):
    """A picture of a given size whose pixels are never made."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self._mode, self._size = "RGB", size

    def convert(self, *_, **__) -> Blank:
        return self

    def resize(self, size: tuple[int, int], *_, **__) -> Blank:
        if min(size) < 1:
            raise ValueError("height and width must be > 0")  # as Pillow says
        return Blank(size)

    def __array__(self, *_, **__) -> np.ndarray:
        return np.broadcast_to(np.zeros(1, dtype=np.uint8), (self.height, self.width, 3))


class _BlankNumpy(types.SimpleNamespace):
    """The two numpy calls of `fetch_video`, without the copy that would fill the memory."""

    array = staticmethod(lambda image: image.__array__())


def resize_shape_only(video, size, **_):
    if min(size) < 1:
        raise ValueError("height and width must be > 0")
    return torch.zeros(()).expand(*video.shape[:2], *size)


def resize_pixels(video, size, **_):
    resized = torch.nn.functional.interpolate(video.float(), size=size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round().to(video.dtype)


def real_resize():
    """torchvision's `resize` where it can be imported, by which the stand-in is proven; else the stand-in."""
    try:
        from torchvision.transforms.functional import InterpolationMode, resize
    except (ImportError, RuntimeError):  # it may be there, of another torch
        return resize_pixels
    return lambda video, size, **_: resize(video, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)


def real_vision_process(resize) -> types.ModuleType:
    stand_in()
    sys.modules["torchvision.transforms.functional"].resize = resize
    from qwen_vl_utils import vision_process

    logging.getLogger(vision_process.__name__).setLevel(logging.ERROR)
    return vision_process


def size_of(vision, case: dict) -> list[int] | str:
    """[height, width] of what qwen_vl_utils makes of a case, or the name of the error it raises."""
    blank = Blank((case["width"], case["height"]))
    try:
        if "num_frames" in case:
            element = {"type": "video", "video": [blank] * case["num_frames"], **case["element"]}
            return list(vision.fetch_video(element, image_patch_size=case["patch_size"]).shape[-2:])
        element = {"type": "image", "image": blank, **case["element"]}
        image = vision.fetch_image(element, image_patch_size=case["patch_size"])
        return [image.height, image.width]
    except (AssertionError, ValueError) as error:
        return type(error).__name__


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "sizes":
        vision = real_vision_process(resize_shape_only)
        vision.np = _BlankNumpy()
        vision.torch = types.SimpleNamespace(
            from_numpy=lambda array: torch.zeros((), dtype=torch.uint8).expand(array.shape),
            stack=lambda frames: frames[0].expand(len(frames), *frames[0].shape),
        )
        json.dump([size_of(vision, case) for case in json.load(sys.stdin)], sys.stdout)
        return
    vision = real_vision_process(real_resize())
    answers = []
    for case in pickle.loads(Path(sys.argv[2]).read_bytes()):
        options = {"image_patch_size": case["patch_size"], "return_video_sample_fps": True}
        (video, metadata), sample_fps = vision.fetch_video(case["element"], return_video_metadata=True, **options)
        answers.append({"video": video.numpy(), "metadata": metadata, "sample_fps": sample_fps})
    Path(sys.argv[3]).write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    main()
