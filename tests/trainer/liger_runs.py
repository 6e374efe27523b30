"""What test_liger.py runs in a process of its own, since Liger replaces functions of transformers' modules.

    python liger_runs.py compare FAMILY before|after|class    packed against alone, both with Liger's kernels
    python liger_runs.py refuse FAMILY before|after|class     the refusals of its fused loss

The last line that is printed is JSON. Triton's interpreter runs the kernels on a CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"  # its experts are timed on a GPU otherwise; read when Liger is imported

import numpy as np
import torch
import triton.language as tl
from transformers.modeling_outputs import CausalLMOutputWithPast
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import apart, collator, gradients, loss_sums, receipts

from vlmpack.errors import ConfigError
from vlmpack.families import family_of
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import tiny_model

SIZES = {"hidden": 24, "heads": 2, "layers": 1, "vision_depth": 1, "vision_hidden": 16}
GONE = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
GONE |= {"qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5_moe": "Qwen3_5Moe", "glm4v_moe": "Glm4vMoe"}
"""Classes of outputs that Liger 0.8.5 imports, and that transformers 5.23 no longer has."""


def name_outputs() -> None:
    """Give transformers' modules back the names that Liger looks for, before it is imported."""
    for family, name in GONE.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        if not hasattr(module, f"{name}CausalLMOutputWithPast"):
            setattr(module, f"{name}CausalLMOutputWithPast", CausalLMOutputWithPast)


name_outputs()
import liger_kernel.transformers as liger  # noqa: E402
from liger_kernel.ops import fused_moe, geglu, layer_norm, rms_norm, rope, swiglu  # noqa: E402

COUNTED = {
    "norm": (rms_norm.LigerRMSNormFunction, layer_norm.LigerLayerNormFunction),
    "rotary": (rope.LigerRopeFunction,),
    "experts": (fused_moe.LigerFusedMoEFunction,),
    "gated MLP": (swiglu.LigerSiLUMulFunction, geglu.LigerGELUMulFunction),
}
calls: Counter[str] = Counter()


def complete_interpreter() -> None:
    """Supply what Triton's interpreter lacks of these kernels: methods of scalars, and functions of libdevice."""
    convert = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = layer_norm.rsqrt = lambda x: tl.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def count_kernels() -> None:
    """Count the calls of Liger's functions in `calls`."""

    def counting(apply: Any, name: str) -> Any:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return apply(*args)

        return staticmethod(counted)

    for name, functions in COUNTED.items():
        for function in functions:
            function.apply = counting(function.apply, name)


def apply_liger(family: str, model: Any = None, *, fused: bool = False) -> Any:
    """Apply Liger's kernels to a model, or to its class; return the model."""
    getattr(liger, f"apply_liger_kernel_to_{family}")(model=model, fused_linear_cross_entropy=fused)
    return model


def models(family: str, order: str, *, fused: bool = False) -> tuple[Any, Any]:
    """(a model with Liger's kernels, the same with packing)."""
    if order == "class":
        apply_liger(family, fused=fused)
    reference, model = tiny_model(family, **SIZES), tiny_model(family, **SIZES)
    if order == "class":
        return reference, enable_packing(model)
    apply_liger(family, reference, fused=fused)
    if order == "before":
        return reference, enable_packing(apply_liger(family, model, fused=fused))
    return reference, apply_liger(family, enable_packing(model), fused=fused)


def compare(family: str, order: str) -> dict[str, Any]:
    """Compare a packed row with each of its samples alone."""
    reference, model = models(family, order)
    samples = receipts(model, kinds=("text", "image", "text") if family_of(model).has_vision else ("text",) * 3)
    calls.clear()
    sums, counts = loss_sums(reference, samples)
    alone = sums.sum() / counts.sum()
    alone.backward()
    of_alone = dict(calls)
    calls.clear()
    result = PackedStep(model)(collator("packed")(samples))
    result.loss.backward()
    return {
        "loss": abs(float(result.loss - alone)),
        "gradients": apart(gradients(reference), gradients(model)),
        "padding": result.work.physical_tokens - result.work.real_tokens,
        "alone": of_alone,
        "packed": dict(calls),
    }


def refuse(family: str, order: str) -> dict[str, Any]:
    """Return the refusal of a model with Liger's fused loss; None: there was none."""
    try:
        _, model = models(family, order, fused=True)
        model(**collator("packed")(receipts(model, kinds=("text",) * 2)))
    except ConfigError as error:
        return {"refused": str(error)}
    return {"refused": None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    complete_interpreter()
    count_kernels()
    what, *arguments = sys.argv[1:]
    found = {"compare": compare, "refuse": refuse}[what](*arguments)
    sys.stdout.write(json.dumps(found) + "\n")
