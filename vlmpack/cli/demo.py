"""`vlmpack demo`: train on receipts, padded and packed in turn, and compare the two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vlmpack.cli.need import need
from vlmpack.cli.options import DEVICES, DTYPES, one_of
from vlmpack.cli.processors import refuse_file
from vlmpack.errors import ConfigError

Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps of each training.")]
BatchSize = Annotated[int, typer.Option(min=2, help="Samples in a step.")]
Model = Annotated[
    str | None,
    typer.Option(help="Hub id or folder of a Qwen-VL model; without it, a small random Qwen3-VL is made."),
]


def demo(
    model: Model = None,
    data: Annotated[
        str,
        typer.Option(help='"synthetic" draws receipts; or a hub id (naver-clova-ix/cord-v2), folder or parquet file.'),
    ] = "synthetic",
    device: Annotated[str, typer.Option(callback=one_of(*DEVICES), help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=one_of(*DTYPES), help="float32 or bfloat16; by default bfloat16 for a given model on cuda."
        ),
    ] = None,
    steps: Steps = 20,
    batch_size: BatchSize = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, receipts and their order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for pictures and numbers.")] = Path("demo-output"),
) -> None:
    """Train on receipts with Hugging Face Trainer, padded and packed in turn, and compare the two.

    By default: a small Qwen3-VL, drawn receipts, no GPU, no network, about a minute on two cores.
    """
    need("demo", "accelerate", "matplotlib", extra="demo")
    _check_receipts(data)
    if model is not None:
        refuse_file("--model", model)
    # Read when torch is first imported. On a machine that others use too, threads that spin while they wait for each
    # other make every step several times slower; where nobody else is, this costs little.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    dtype = dtype or ("bfloat16" if model is not None and device == "cuda" else "float32")

    from vlmpack.cli.demo_run import DemoSettings, run_demo

    run_demo(
        DemoSettings(
            model=model,
            data=data,
            device=device,
            dtype=dtype,
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            out=out,
        )
    )


def _check_receipts(data: str) -> None:
    """Refuse a file that can hold no receipts.

    Raises:
        ConfigError: it is neither parquet nor without a suffix.
    """
    path = Path(data).expanduser()
    if path.is_file() and path.suffix not in ("", ".parquet"):
        raise ConfigError(
            f"--data {data}: the demo trains on receipts alone, with the columns image and ground_truth of CORD: give "
            "synthetic, a hub id, a folder or a parquet file; `vlmpack analyze` and `vlmpack pack` read other data"
        )
