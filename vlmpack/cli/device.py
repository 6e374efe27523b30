"""The device a verb runs on, and a transformers that keeps to itself while it does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vlmpack.errors import ConfigError


def checked_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: not cpu or cuda, or a CUDA that is not there.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: choose cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    return torch.device(name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the advice, warnings and progress bars of the libraries below; their errors still come through."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
