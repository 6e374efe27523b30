"""Run a script with accelerate's FSDP2 on CPU ranks: accelerate launch ... accelerate_on_cpus.py SCRIPT ARGUMENTS.

accelerate puts DDP in the place of FSDP2 on ranks without an accelerator. So these tell it that they have one; what
shards, gathers and clips is its own code.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"  # `accelerate launch` says false, whatever it was

from accelerate.state import PartialState
from accelerate.utils import DistributedType

_plain_init = PartialState.__init__


def _with_accelerators(self: PartialState, *args: Any, **kwargs: Any) -> None:
    _plain_init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = _with_accelerators
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
