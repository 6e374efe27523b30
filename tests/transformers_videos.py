"""The real video processors of transformers in a process of their own; where torchvision is missing, with a stand-in.

    python transformers_videos.py cases.pickle answers.pickle

They need three of its functions. On a CPU `resize` of `transforms.v2` is torch's `interpolate` on uint8, `normalize`
subtracts and divides, and `grayscale_to_rgb` leaves RGB as it is.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import interpolate


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(image: torch.Tensor, size: Any, interpolation: InterpolationMode, antialias: bool) -> torch.Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    mode = {2: "bilinear", 3: "bicubic"}.get(interpolation.value, interpolation.value)  # Pillow's numbers
    smooth = antialias and mode in ("bilinear", "bicubic")
    resized = interpolate(flat, size=tuple(size), mode=mode, antialias=smooth)
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    shape = (-1, 1, 1)
    return (image - torch.as_tensor(mean).view(shape)) / torch.as_tensor(std).view(shape)


def stand_in() -> None:
    """Put modules in the place of those of torchvision, before transformers looks for them."""
    names = ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional")
    for name in (*names, "torchvision.transforms.v2", "torchvision.transforms.v2.functional"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(InterpolationMode=InterpolationMode, resize=resize, normalize=normalize)
        module.__dict__.update(grayscale_to_rgb=lambda video: video)
        module.__dict__.update(pil_to_tensor=None, to_pil_image=None, __version__="0.26.0")
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def is_installed() -> bool:
    """Return whether torchvision can be imported: it may be there, of another torch."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        return False
    return True


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Decode by PyAV as transformers does it, sample, resize and cut, with the settings of a case."""
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import load_video

    of_class = Qwen3VLVideoProcessor if case["is_per_clip"] else Qwen2VLVideoProcessor
    processor = of_class(**case["settings"])
    call = {"fps": processor.fps, "num_frames": processor.num_frames, **case["call"]}
    frames, metadata = load_video(
        case["path"], backend="pyav", sample_indices_fn=lambda metadata, **_: processor.sample_frames(metadata, **call)
    )
    out = processor(
        videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_metadata=True, return_tensors="pt"
    )
    depth = processor.temporal_patch_size
    return {
        "indices": [int(index) for index in metadata.frames_indices],
        "pixels": out["pixel_values_videos"],
        "grid": tuple(out["video_grid_thw"][0].tolist()),
        "seconds": depth / metadata.sampled_fps,
        "timestamps": Qwen3VLProcessor._calculate_timestamps(
            None, [int(index) for index in metadata.frames_indices], metadata.fps, depth
        ),
        "settings": processor.to_dict(),
    }


if __name__ == "__main__":
    if not is_installed():
        stand_in()
    cases = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps([answer(case) for case in cases]))
