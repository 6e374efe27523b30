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


def best_device() -> str:
    """cuda where there is one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the advice, warnings, progress bars and repeated requests to the hub of the libraries below.

    Their errors still come through.
    """
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, bars, requests = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(requests)
        if bars:
            logging.enable_progress_bar()
