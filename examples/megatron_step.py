"""A forward step for Megatron's schedules, on packed rows of receipts: `forward_step(data_iterator, model)`.

    python examples/megatron_step.py

Megatron-LM and Megatron-Bridge call such a function once per micro-batch. It returns the model's output, and a function
that turns this output into (sum of losses, number of targets, values to log). With `calculate_per_token_loss=True`, the
schedule divides by the targets of all micro-batches and ranks. `ThdStep` packs the micro-batch and passes its
boundaries under the model's names. The loop below replaces the schedule, so that the script runs without Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from thd_model import ThdQwen3VLMoe
from torch import nn

from vlmpack import SlotRule, ThdStep, VLMCollator
from vlmpack.model import ThdInputs
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""(loss summed over a micro-batch's targets, number of targets, [sum, number] to log)."""


class ForwardStep:
    """`forward_step(data_iterator, model)` of Megatron's schedules.

    Args:
        **settings: settings of `ThdStep`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.step: ThdStep | None = None

    def __call__(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[[Any], Loss]]:
        """Run one micro-batch; return the model's output and the function that computes its loss."""
        if self.step is None or self.step.model is not model:
            self.step = ThdStep(model, **self.settings)
        inputs = self.step.inputs(next(data_iterator))
        return model(**inputs.arguments), partial(loss_of, self.step, inputs)


def loss_of(step: ThdStep, inputs: ThdInputs, output: Any) -> Loss:
    """Compute the loss of one micro-batch: the mean loss plus the routers' loss, times the number of targets."""
    result = step.result(output, inputs)
    targets = torch.tensor(result.num_targets, dtype=torch.int32, device=result.loss.device)
    return result.loss * targets, targets, {"lm loss": torch.stack([result.loss_sum.detach(), targets.float()])}


def train_step(forward_step: ForwardStep, batches: Iterator[Any], model: nn.Module, micro_batches: int) -> float:
    """Compute gradients for one optimizer step like a schedule without pipeline stages; return the mean loss."""
    logged, total = torch.zeros(2), 0
    for _ in range(micro_batches):
        output, loss_func = forward_step(batches, model)
        loss, targets, log = loss_func(output)
        loss.backward()
        logged, total = logged + log["lm loss"], total + int(targets)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= total
    return float(logged[0] / logged[1])


def main() -> None:
    """Train a tiny Qwen3-VL-MoE for four steps of two micro-batches."""
    processor = tiny_processor("qwen3_vl", max_pixels=64 * 32 * 32)
    reference = tiny_model("qwen3_vl_moe", processor=processor)
    model = ThdQwen3VLMoe(reference)
    slots = SlotRule.for_parallel(tensor=2, context=1, sequence_parallel=True, precision="fp8", layout="mirrored")
    forward_step = ForwardStep(slots=slots, config=reference.config)
    collate = VLMCollator(processor).collate
    receipts = list(receipt_conversations(num=16))
    batches = iter([collate(receipts[at : at + 2]) for at in range(0, 16, 2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        loss = train_step(forward_step, batches, model, micro_batches=2)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss:.4f}")


if __name__ == "__main__":
    main()
