"""Sizes of a run on a GPU, and tiny ones by which all of it is tested on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from benchmarks.cases.attention import Site
from benchmarks.cases.tree import Rollouts
from benchmarks.receipts import ReceiptShapes


@final
@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A random model of the sizes of a released one."""

    name: str
    """Of the released model."""
    family: str
    """`config.model_type`."""
    sizes: Mapping[str, Any]
    """Fields of `vlmpack.testing.TinySizes`."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the text model."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the vision tower."""
    tied: bool = True
    """True: the head and the embedding are one matrix."""
    slowness: float = 1.0
    """Factor on the time that its FLOPs suggest, without further packages; for guesses only."""


@final
@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Heads of one attention layer."""

    heads: int
    """N."""
    kv_heads: int
    """K."""
    dim: int
    """H."""

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}"


@final
@dataclass(frozen=True, kw_only=True)
class GpuShapes:
    """All sizes of a run."""

    models: tuple[ModelShape, ...]
    """Whose steps are measured, the more important first."""
    receipts: ReceiptShapes
    """Of a batch; `samples` is the micro-batch and is replaced."""
    width: int
    """Tokens that a batch is padded to by recipes with a fixed sequence length."""
    micro_batches: tuple[int, ...]
    """Samples of a step, the more important first."""
    recomputed: tuple[int, ...]
    """Samples of steps with gradient checkpointing."""
    largest: int
    """Largest micro-batch to try."""
    optimizer_bytes: int = 12
    """Bytes a parameter that an optimiser holds while the largest micro-batch is looked for: AdamW's two moments and
    weights in float32."""
    heads: tuple[HeadShape, ...]
    """Of the attention layers that back-ends are checked on."""
    lengths: tuple[int, ...]
    """Of the segments that back-ends are checked on, a segment of none among them."""
    sites: tuple[Site, ...]
    """Attention layers that are timed."""
    trees: tuple[Rollouts, ...]
    """Groups of samples along whose paths attention is timed, by the first of `heads`."""
    rollouts: Rollouts
    """The group of samples whose step is timed, whole and as a tree."""
    square: int
    """Side of a square matrix product."""
    tokens: int
    """Rows of the products at the model's shapes, and of the head."""
    copied: int
    """Bytes of a copy."""
    small: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the models that are compared with their samples alone: fields of `TinySizes`."""
    flops_per_second: float
    """The least speed of a step; guesses of time rest on it."""
    cell_seconds: float
    """Time for the rounds of one cell."""


def _spread(longest: int, *, samples: int = 8, ratio: float = 5.0) -> tuple[int, ...]:
    return ReceiptShapes(longest=longest, samples=samples, ratio=ratio).lengths


QWEN3_VL = ModelShape(
    name="Qwen3-VL-2B",
    family="qwen3_vl",
    sizes={
        "hidden": 2048, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "intermediate": 6144,
        "vision_hidden": 1024, "vision_depth": 24, "vision_heads": 16, "vocab_size": 151_936, "patch_size": 16,
    },
    vision={"intermediate_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
)  # fmt: skip
QWEN3_5 = ModelShape(
    name="Qwen3.5-2B",
    family="qwen3_5",
    sizes={
        "hidden": 2048, "layers": 24, "heads": 8, "kv_heads": 2, "head_dim": 256, "intermediate": 6144,
        "vision_hidden": 1024, "vision_depth": 24, "vision_heads": 16, "vocab_size": 248_320, "patch_size": 16,
    },
    text={
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    vision={"intermediate_size": 4096, "num_position_embeddings": 2304},
    slowness=2.0,
)  # fmt: skip

FULL = GpuShapes(
    models=(QWEN3_VL, QWEN3_5),
    receipts=ReceiptShapes(longest=1792, ratio=4.0, image_share=0.6, labelled_share=0.3),
    width=2048,
    micro_batches=(4, 8, 2, 16, 32),
    recomputed=(8, 16, 32),
    largest=128,
    heads=(
        HeadShape(heads=16, kv_heads=8, dim=128),
        HeadShape(heads=16, kv_heads=16, dim=64),
        HeadShape(heads=16, kv_heads=16, dim=72),
        HeadShape(heads=8, kv_heads=2, dim=256),
    ),
    lengths=(100, 0, 37, 513, 1),
    sites=(
        Site(name="language 128", lengths=_spread(1792), heads=16, kv_heads=8, head_dim=128, causal=True),
        Site(name="vision 64", lengths=_spread(4288), heads=16, kv_heads=16, head_dim=64, causal=False),
        Site(name="language 256", lengths=_spread(1792), heads=8, kv_heads=2, head_dim=256, causal=True),
        Site(name="vision 72", lengths=_spread(4288), heads=16, kv_heads=16, head_dim=72, causal=False),
    ),
    trees=(
        Rollouts(prefix=4096, branch=410, samples=8),
        Rollouts(prefix=2048, branch=512, samples=16),
        Rollouts(prefix=512, branch=512, samples=8),
    ),
    rollouts=Rollouts(prefix=1024, branch=256, samples=8, image_tokens=768),
    square=8192,
    tokens=8192,
    copied=2**32,
    small={"hidden": 256, "layers": 4, "head_dim": 64, "vision_hidden": 128, "vision_heads": 2},
    flops_per_second=2.5e14,
    cell_seconds=5.0,
)

_TINY_SIZES = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "vision_hidden": 32, "vision_depth": 1}

TINY = GpuShapes(
    models=(
        ModelShape(name="tiny Qwen3-VL", family="qwen3_vl", sizes=_TINY_SIZES, vision={"intermediate_size": 48}),
        ModelShape(name="tiny Qwen3.5", family="qwen3_5", sizes=_TINY_SIZES, text={"linear_num_value_heads": 2}),
    ),
    receipts=ReceiptShapes(longest=28, ratio=4.0, image_share=0.6, labelled_share=0.3, vocab_size=131),
    width=32,
    micro_batches=(2, 3),
    recomputed=(2,),
    largest=4,
    heads=(HeadShape(heads=4, kv_heads=2, dim=16), HeadShape(heads=2, kv_heads=2, dim=24)),
    lengths=(10, 0, 5, 17, 1),
    sites=(
        Site(name="language", lengths=(7, 3, 5), heads=6, kv_heads=2, head_dim=8, causal=True),
        Site(name="vision", lengths=(4, 9), heads=3, kv_heads=3, head_dim=8, causal=False),
    ),
    trees=(Rollouts(prefix=70, branch=5, samples=3),),
    rollouts=Rollouts(prefix=70, branch=5, samples=3, image_tokens=8),
    square=32,
    tokens=64,
    copied=2**16,
    small=_TINY_SIZES,
    flops_per_second=1e12,
    cell_seconds=0.0,
)

SHAPES = {"full": FULL, "tiny": TINY}
