"""What each of two ranks runs, started by test_thd_megatron.py."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vlmpack.layout import SlotRule
from vlmpack.model import ThdStep


def main(folder: Path) -> None:
    """Save the losses of samples of a GPTModel whose weights, and of one whose experts, are cut over both ranks."""
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    from megatron.core import parallel_state
    from megatron_models import gpt_model, on_a_cpu
    from test_thd_megatron import EXPERTS, texts

    on_a_cpu(setattr)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def save_losses(model: Any, name: str) -> None:
        result = ThdStep(model, slots=SlotRule(multiple=4))(texts())
        result.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        torch.save(result.sample_losses, folder / f"{name} {rank}.pt")
        parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    save_losses(gpt_model(tensor=2), "tensor")  # both ranks cut the same random weights

    parallel_state.initialize_model_parallel()
    whole = gpt_model(experts=EXPERTS).state_dict()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = gpt_model(experts=EXPERTS, expert=2)
    model.load_state_dict({name: whole[of_whole(name, rank * EXPERTS // 2)] for name in model.state_dict()})
    save_losses(model, "expert")
    dist.destroy_process_group()


def of_whole(name: str, first: int) -> str:
    """The name that a rank's parameter has in the whole model: a rank numbers its experts from 0."""
    return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{first + int(found[1])}", name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
