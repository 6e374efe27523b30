"""Fine-tune a Qwen-VL in your own training loop, on planned rows: on one GPU, several GPUs, or a CPU.

    python examples/own_loop.py
    torchrun --nproc_per_node 8 examples/own_loop.py --model Qwen/Qwen3-VL-2B-Instruct --data chats.jsonl

Run it again with the same number of processes and more --epochs to continue from the checkpoint; use another --output
to start from scratch. Without --model it trains a tiny random model on synthetic receipts.
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForImageTextToText

from vlmpack import (
    PackedBatchSampler,
    PackedStep,
    VLMCollator,
    enable_packing,
    plan_bins,
)
from vlmpack.context_parallel import Parallel, sum_counts
from vlmpack.data import load_processor, open_dataset
from vlmpack.lengths import measure_lengths
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor
from vlmpack.trainer import evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub id or folder; without it, a tiny random Qwen3-VL")
parser.add_argument("--data", default="synthetic", help='JSON or Parquet file, hub id, or "synthetic"')
parser.add_argument("--capacity", type=int, default=1200, help="tokens per row")
parser.add_argument("--accumulation", type=int, default=2, help="rows per rank and optimizer step")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--output", type=Path, default=Path("results/own_loop"))
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
if world > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (world,)) if world > 1 else None

load_model = AutoModelForImageTextToText.from_pretrained
processor = load_processor(args.model) if args.model else tiny_processor()
model = load_model(args.model, dtype=torch.float32) if args.model else tiny_model(processor=processor)
model.to(device)  # pyright: ignore[reportArgumentType]: transformers wraps it in a decorator without types
model = enable_packing(model, parallel=Parallel() if world > 1 else None)  # a row may have no image
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
wrapped = DistributedDataParallel(model) if world > 1 else model

samples = receipt_conversations(num=40, scale=0.35) if args.data == "synthetic" else open_dataset(args.data)
held_out = max(1, len(samples) // 10)
training, evaluation = (Subset(samples, range(*ends)) for ends in ((held_out, len(samples)), (0, held_out)))
collator = VLMCollator(processor, layout="packed")
table = measure_lengths(training, collator, workers=2)
plan = plan_bins(table, args.capacity, overlength="drop")
if rank == 0 and len(plan.dropped):
    refused = "".join(f"\n  {each.index}: {each.detail}" for each in table.refused)
    print(f"left out {len(plan.dropped)} of {len(training)} samples: those below, and any longer than a row{refused}")
sampler = PackedBatchSampler(plan, ranks=world, rank=rank, accumulation=args.accumulation)
checkpoint = args.output / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    sampler.load_state_dict(saved["sampler"])

step = PackedStep(wrapped)
while sampler.epoch < args.epochs:
    rows = iter(DataLoader(training, batch_sampler=sampler, collate_fn=collator.collate, num_workers=2))
    while micro_batches := list(islice(rows, args.accumulation)):
        targets = sum(row.metadata.num_targets for row in micro_batches)
        targets = sum_counts(targets, mesh) if mesh else targets
        loss = torch.zeros((), device=device)
        for row in micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                result = step(row, num_items_in_batch=targets)
            (result.loss * world).backward()  # DDP averages gradients over ranks
            loss += result.loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank}: {targets} targets on all ranks, its share of the loss {loss.item():.4f}", flush=True)
    if rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sampler": sampler.state_dict()}
        torch.save(state, checkpoint)

seen = evaluate(model, evaluation, collator, capacity=args.capacity)
if rank == 0:
    print(f"held out: loss {seen.token_loss:.4f} of {len(seen.sample_ids)} samples in {seen.rows} rows")
    model.save_pretrained(args.output)
if world > 1:
    dist.destroy_process_group()
