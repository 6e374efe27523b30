"""Train a vision-language model on packed rows under one of transformers' meshes, in your own loop.

    torchrun --nproc_per_node 2 examples/parallel/train.py --mesh tp=2
    torchrun --nproc_per_node 2 examples/parallel/train.py --mesh fsdp=2
    torchrun --nproc_per_node 4 examples/parallel/train.py --mesh fsdp=2,tp=2
    torchrun --nproc_per_node 4 examples/parallel/train.py --mesh fsdp=4 --context 2

Tensor ranks divide every layer, data ranks (fsdp) its storage, context ranks a row. All of them print the same losses.
Without --model it trains a tiny random Qwen3-VL on synthetic receipts, on CPUs or GPUs.
"""

import argparse
import os
import tempfile
from typing import Any

import torch
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig  # pyright: ignore[reportPrivateImportUsage]

from vlmpack import PackedStep, SlotRule, VLMCollator, enable_packing
from vlmpack.context_parallel import Parallel, plan_for
from vlmpack.data import load_processor, open_dataset
from vlmpack.layout import METADATA_KEY
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mesh", default="tp=2", help="sizes of DistributedConfig: tp=2, fsdp=2, ep=2, joined by commas")
parser.add_argument("--context", type=int, default=1, help="data ranks that share a row")
parser.add_argument("--model", help="hub id or folder; without it, a tiny random Qwen3-VL")
parser.add_argument("--data", default="synthetic", help='file, folder or hub id of conversations, or "synthetic"')
parser.add_argument("--samples", type=int, default=8, help="samples per step, over all ranks")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
processor = load_processor(args.model) if args.model else tiny_processor()
folder = args.model or os.path.join(tempfile.gettempdir(), f"tiny-{os.environ['MASTER_PORT']}")  # noqa: PTH118
if not args.model and dist.get_rank() == 0:
    tiny_model(processor=processor).save_pretrained(folder)
dist.barrier()

sizes: dict[str, Any] = {f"{name}_size": int(size) for name, size in (part.split("=") for part in args.mesh.split(","))}
plan = plan_for(AutoConfig.from_pretrained(folder), tp_size=sizes["tp_size"]) if "tp_size" in sizes else None
mesh = DistributedConfig(**sizes, tp_plan=plan)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, distributed_config=mesh)
parallel = Parallel(context=args.context)
model = enable_packing(model, parallel=parallel)

samples = receipt_conversations(scale=0.35) if args.data == "synthetic" else open_dataset(args.data)
collate = VLMCollator(processor, layout="packed", slots=SlotRule(row_multiple=args.context))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3, foreach=False)
step = PackedStep(model)
for number in range(args.steps):
    numbers = range(number * args.samples, (number + 1) * args.samples)[parallel.data_rank :: parallel.data_ranks]
    row = collate([samples[i % len(samples)] for i in numbers])
    # ranks that share a row count its targets and losses once
    targets = torch.tensor(row[METADATA_KEY].num_targets, device=model.device)
    dist.all_reduce(targets)
    targets //= dist.get_world_size() // parallel.data_ranks
    result = step(row, num_items_in_batch=int(targets))
    (result.loss * mesh.dp_size).backward()  # FSDP2 averages gradients over its ranks, but they must be summed
    optimizer.step()
    optimizer.zero_grad()
    loss = result.loss_sum.detach() * parallel.data_ranks / dist.get_world_size() / targets
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {number + 1}  loss {loss.item():.4f}", flush=True)
dist.barrier()  # no rank may leave while another one still communicates
dist.destroy_process_group()
