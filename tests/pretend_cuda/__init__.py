"""A CUDA device for machines without one: "cuda" works in a CPU build of PyTorch, and is as strict as CUDA.

Tests marked `gpu` run on it, in processes of their own (`child`). By hand:

    python tests/pretend_cuda -m pytest -m gpu tests/attention
    python tests/pretend_cuda -m vlmpack demo --device cuda --dtype bfloat16

Values are those of the CPU's kernels. As on CUDA

* tensors of two devices do not meet, and a process that was forked has no device;
* fresh memory holds NaN, and so do rows that a varlen kernel is not told to write;
* backward passes run in a thread of the device;
* `torch.cuda.set_sync_debug_mode` sees what makes the host wait; a copy to pinned memory that is not waited for has
  not arrived, and pinned memory may not be written while it is copied;
* `torch._assert_async` refuses messages of 255 bytes;
* `topk` takes the first of equal values, which a CPU does not;
* varlen attention is FlashAttention's: its layout, types, alignment to the last key, windows, and what it refuses.

It has no rounding of CUDA's kernels, no streams, no compiled kernels (Triton, Inductor), and 4 GiB of memory.
"""

from __future__ import annotations

import ctypes
import sys

from pretend_cuda.library import built, missing, torch_folder

__all__ = ["install", "missing"]


def install() -> None:
    """Give this process the device, for good. PyTorch looks for devices when it is imported, and not again."""
    assert "torch" not in sys.modules, "the pretend CUDA device has to be there before torch is imported"
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    from pretend_cuda import efficient, flash, patches

    patches.apply()
    flash.register()
    efficient.register()
