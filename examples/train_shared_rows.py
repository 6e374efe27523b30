"""Train a Qwen-VL with context parallelism and FSDP2 in your own loop: ranks share rows too long for one GPU.

    torchrun --nproc_per_node 4 examples/train_shared_rows.py --context 2
    accelerate launch --num_processes 4 examples/train_shared_rows.py --context 2

Here each pair of ranks shares a row, and the two pairs train on different rows. Without --model it trains a tiny random
model on synthetic receipts, on CPUs or GPUs.
"""

import argparse
import os

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from vlmpack import PackedStep, SlotRule, VLMCollator, enable_packing
from vlmpack.context_parallel import Parallel, sum_counts
from vlmpack.data import load_processor, open_dataset
from vlmpack.layout import METADATA_KEY
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub id or folder; without it, a tiny random Qwen3-VL")
parser.add_argument("--data", default="synthetic", help='file, folder or hub id of conversations, or "synthetic"')
parser.add_argument("--context", type=int, default=2, help="ranks that share a row")
parser.add_argument("--samples", type=int, default=4, help="samples per row")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
world = dist.get_world_size()
mesh = init_device_mesh(device, (world // args.context, args.context), mesh_dim_names=("data", "context"))
parallel = Parallel(mesh)

load_model = AutoModelForImageTextToText.from_pretrained
processor = load_processor(args.model) if args.model else tiny_processor()
model = load_model(args.model, dtype=torch.float32) if args.model else tiny_model(processor=processor)
model = enable_packing(model, parallel=parallel)
everyone = mesh["data", "context"]._flatten("everyone")
for part in (*model.model.visual.blocks, *model.model.language_model.layers, model):
    fully_shard(part, mesh=everyone)

samples = receipt_conversations(scale=0.35) if args.data == "synthetic" else open_dataset(args.data)
collate = VLMCollator(processor, layout="packed", slots=SlotRule(row_multiple=args.context))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
step = PackedStep(model)
for number in range(args.steps):
    place = number * parallel.data_ranks + parallel.data_rank  # all ranks of a group take the same samples
    numbers = range(place * args.samples, (place + 1) * args.samples)
    row = collate([samples[i % len(samples)] for i in numbers])
    targets = sum_counts(row[METADATA_KEY].num_targets, mesh["data"])
    result = step(row, num_items_in_batch=targets)
    (result.loss * world).backward()  # FSDP2 and DDP average gradients over ranks, but they must be summed
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {number + 1}  loss {result.loss_sum.item() / result.num_targets:.4f}", flush=True)
dist.barrier()  # no rank may leave while another one still communicates
dist.destroy_process_group()
