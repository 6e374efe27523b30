"""What each of two gloo ranks runs, started by test_meshes.py: probes of models under transformers' meshes.

Each rank writes its reports to FOLDER/RANK.pt.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from breakages import positions_run_on

import vlmpack
from vlmpack.errors import ConfigError
from vlmpack.model.mechanisms.tensor_parallel import SummedNorm
from vlmpack.probing.weights import placed
from vlmpack.testing import tiny_model


def one_rank_counts_twice(family: str, patch: pytest.MonkeyPatch) -> None:
    """The gradients of norms of heads are twice as large on rank 1, and right on rank 0."""
    summed = SummedNorm._sum
    patch.setattr(SummedNorm, "_sum", lambda self, grad: summed(self, grad) * (1 + dist.get_rank()))


EXACT = {"qwen3_vl": {"tp": 2}, "qwen3": {"fsdp": 2}, "qwen3_moe": {"tp": 2, "ep": 2}}
BROKEN = {"qwen3_vl": positions_run_on, "qwen3": one_rank_counts_twice}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    probe = partial(vlmpack.probe, plain=False, share_prefixes=False)
    seen: dict[str, Any] = {family: probe(on_mesh(family, sizes)) for family, sizes in EXACT.items()}
    for family, break_it in BROKEN.items():
        model = on_mesh(family, {"tp": 2})
        with pytest.MonkeyPatch.context() as patch:
            break_it(family, patch)
            seen[break_it.__name__] = probe(model)
    try:
        probe(on_mesh("qwen3", {"fsdp": 2}, torch.bfloat16))
    except ConfigError as error:
        seen["refused"] = str(error)
    torch.save(seen, folder / f"{dist.get_rank()}.pt")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def on_mesh(family: str, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> Any:
    return placed(tiny_model(family, dtype=dtype), torch.device("cpu"), sizes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
