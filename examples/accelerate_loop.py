"""Fine-tune a Qwen-VL in a loop of accelerate, on planned rows, under DDP, FSDP2 or DeepSpeed ZeRO.

    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/accelerate_loop.py
    ACCELERATE_USE_CPU=true accelerate launch --config_file examples/accelerate/ddp.yaml --mixed_precision no \\
        examples/accelerate_loop.py

Run it again with more --epochs to continue from the checkpoint. Without --model it trains a tiny random model on
synthetic receipts.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from vlmpack import PackedBatchSampler, PackedStep, VLMCollator, enable_packing, plan_bins
from vlmpack.context_parallel import Parallel
from vlmpack.data import load_processor, open_dataset
from vlmpack.lengths import measure_lengths
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub id or folder; without it, a tiny random Qwen3-VL")
parser.add_argument("--data", default="synthetic", help='JSON or Parquet file, hub id, or "synthetic"')
parser.add_argument("--capacity", type=int, default=600, help="tokens per row")
parser.add_argument("--accumulation", type=int, default=2, help="rows per rank and optimizer step")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--output", type=Path, default=Path("results/accelerate_loop"))
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
ranks, device = accelerator.num_processes, accelerator.device
accelerator.print(f"{accelerator.distributed_type.value} on {ranks} {device.type} ranks")
# For DeepSpeed, accelerate reads the batch size from a prepared loader, but here it gets none. A batch is one row.
if accelerator.state.deepspeed_plugin is not None:
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1

load_model = AutoModelForImageTextToText.from_pretrained
processor = load_processor(args.model) if args.model else tiny_processor()
model = load_model(args.model, dtype=torch.float32) if args.model else tiny_model(processor=processor)
enable_packing(model, parallel=Parallel() if ranks > 1 else None)  # a row may have no image
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
# Enable packing before `prepare`. Do not prepare the loader, because the sampler already deals rows to ranks.
model, optimizer = accelerator.prepare(model, optimizer)

samples = receipt_conversations(num=24, scale=0.35) if args.data == "synthetic" else open_dataset(args.data)
collator = VLMCollator(processor, layout="packed")
plan = plan_bins(measure_lengths(samples, collator), args.capacity, overlength="drop")
sampler = PackedBatchSampler(plan, ranks=ranks, rank=accelerator.process_index, accumulation=args.accumulation)
accelerator.register_for_checkpointing(sampler)
checkpoint = args.output / "checkpoint"
if checkpoint.exists():
    accelerator.load_state(str(checkpoint))

step = PackedStep(model)


def over_ranks(number: torch.Tensor) -> float:
    """Return the sum of all ranks' numbers."""
    total = accelerator.reduce(number, "sum")
    assert isinstance(total, torch.Tensor)
    return total.item()


while sampler.epoch < args.epochs:
    rows = iter(DataLoader(samples, batch_sampler=sampler, collate_fn=collator.collate))
    while micro_batches := list(islice(rows, args.accumulation)):
        counted = torch.tensor(sum(row.metadata.num_targets for row in micro_batches), device=device)
        targets = int(over_ranks(counted))
        loss = torch.zeros((), device=device)
        for row in micro_batches:
            with accelerator.accumulate(model), accelerator.autocast():
                result = step(row, num_items_in_batch=targets)
                # gradients are averaged over ranks, and `backward` divides the loss by the accumulation steps
                accelerator.backward(result.loss * ranks * args.accumulation)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss += result.loss.detach()
        accelerator.print(f"{targets} targets, loss {over_ranks(loss):.6f}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(checkpoint))

weights = accelerator.get_state_dict(model)  # gathered from all ranks
is_main = accelerator.is_main_process
accelerator.unwrap_model(model).save_pretrained(args.output, state_dict=weights, is_main_process=is_main)
accelerator.end_training()
