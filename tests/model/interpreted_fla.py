"""Rows and trees through flash-linear-attention's own kernels, on the CPU, by Triton's interpreter.

    python interpreted_fla.py FAMILY ...

Writes one JSON object to standard output, as `fla_rows.py` does. `CALLS` of `fla.ops.gated_delta_rule` lists the calls
made, as the stand-in's does.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import triton.language as tl  # pyright: ignore[reportMissingImports]
from fla.ops import gated_delta_rule as rules  # pyright: ignore[reportMissingImports]
from triton.runtime import autotuner, interpreter  # pyright: ignore[reportMissingImports]

CALLS: list[dict[str, Any]] = []


def main(families: list[str]) -> None:
    autotuner.Autotuner._bench = lambda *args, **kwargs: 0.0  # nothing to choose between: the first one serves
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            vars(module).setdefault("range", numbers)
    rules.CALLS = CALLS
    rules.chunk_gated_delta_rule = recorded(rules.chunk_gated_delta_rule)
    from fla_rows import of_kernels  # now that transformers will find all that

    json.dump({family: of_kernels(family) for family in families}, sys.stdout)


def numbers(*bounds: Any) -> Iterator[Any]:
    """`range` in a kernel: as tensors, which the interpreter makes of loops only where they are `tl.range`."""
    in_kernel = any(isinstance(bound, tl.tensor) for bound in bounds)
    for number in builtins.range(*map(int, bounds)):
        yield interpreter._implicit_cvt(number) if in_kernel else number


def recorded(function: Any) -> Any:
    @functools.wraps(function)
    def call(q: Any, *args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        CALLS.append({"shape": list(q.shape), "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist()})
        return function(q, *args, cu_seqlens=cu_seqlens, **kwargs)

    return call


if __name__ == "__main__":
    main(sys.argv[1:])
