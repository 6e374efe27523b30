"""Fine-tune a vision-language or text model on your own conversations, in packed rows.

    python examples/finetune.py --model Qwen/Qwen3-VL-2B-Instruct --data chats.jsonl
    torchrun --nproc_per_node 8 examples/finetune.py --model Qwen/Qwen3-VL-2B-Instruct --data chats.jsonl
    python examples/finetune.py --model tiny --data synthetic  # random model, synthetic receipts, a minute on a CPU

A line of chats.jsonl (image paths are relative to the file):

    {"messages": [{"role": "user", "content": "<image>\\nWhat is the total?"},
                  {"role": "assistant", "content": "Rp 12.000"}], "images": ["images/1.jpg"]}

The adapter is saved in OUTPUT, and the merged model, which needs neither PEFT nor vlmpack, in OUTPUT/merged. With
--full the model is saved in OUTPUT.
"""

import argparse
import inspect
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, TrainingArguments

from vlmpack import PackedTrainer, VLMCollator, enable_packing, plan_bins
from vlmpack.context_parallel import Parallel
from vlmpack.data import hold_out, load_processor, open_dataset
from vlmpack.lengths import measure_lengths
from vlmpack.testing import receipt_conversations, tiny_model, tiny_processor
from vlmpack.trainer import generate_answer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help='hub id or folder; "tiny" for a tiny random Qwen3-VL')
parser.add_argument("--data", required=True, help='JSONL, Parquet, tar, folder, hub id, or "synthetic" for receipts')
parser.add_argument("--output", default="results/finetuned", help="folder for checkpoints and the trained model")
parser.add_argument("--full", action="store_true", help="train all weights instead of a LoRA adapter")
parser.add_argument("--rank", type=int, default=16, help="LoRA rank")
parser.add_argument("--learning-rate", type=float, help="default: 1e-4, or 1e-5 with --full")
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument(
    "--capacity", type=int, default=8192, help="tokens per row; a row is a batch, so memory grows with it"
)
parser.add_argument("--accumulation", type=int, default=1, help="rows per rank and optimizer step")
parser.add_argument(
    "--held-out", type=float, default=0.05, help="share of the samples to evaluate on instead of training on them"
)
options = parser.parse_args()
on_gpu, is_tiny = torch.cuda.is_available(), options.model == "tiny"
has_new_name = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters  # transformers 5.23
checkpointing: Any = {"activation_checkpointing" if has_new_name else "gradient_checkpointing": on_gpu}

args = TrainingArguments(  # must come first, because it initializes torch.distributed under torchrun
    options.output,
    num_train_epochs=options.epochs,
    learning_rate=options.learning_rate or (1e-5 if options.full else 1e-4),
    gradient_accumulation_steps=options.accumulation,
    lr_scheduler_type="cosine",
    use_cpu=not on_gpu,
    bf16=on_gpu,
    **checkpointing,
    dataloader_pin_memory=on_gpu,
    dataloader_num_workers=4 if on_gpu else 0,
    logging_steps=1,
    save_strategy="epoch",
    save_total_limit=1,
    remove_unused_columns=False,
    report_to="none",
)

# The data. Lengths are computed from texts and image headers; samples that cannot be used are reported and skipped.
has_images = is_tiny or hasattr(AutoConfig.from_pretrained(options.model), "vision_config")
load: Any = load_processor if has_images else AutoTokenizer.from_pretrained
processor = tiny_processor() if is_tiny else load(options.model)
data: Any = receipt_conversations(num=48, scale=0.35) if options.data == "synthetic" else open_dataset(options.data)
train, test = hold_out(data, options.held_out)
collator = VLMCollator(processor, layout="packed", max_length=options.capacity, on_bad="skip")
with args.main_process_first():
    lengths = measure_lengths(train, collator, workers=args.dataloader_num_workers, cache=f"{options.output}/lengths")
plan = plan_bins(lengths, options.capacity)

# The unmodified model, with adapters on the linear layers of its language model.
auto: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
dtype = torch.bfloat16 if on_gpu and not options.full else torch.float32
model: Any = tiny_model(processor=processor) if is_tiny else auto.from_pretrained(options.model, dtype=dtype)
if not options.full:
    layers = r"(?!.*(visual|vision|audio|projector)).*_proj(_\w+)?"  # q_proj, up_proj, in_proj_qkv, ..., but no routers
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=layers)
    model = get_peft_model(model, lora)
model = enable_packing(model, parallel=Parallel())
trainer = PackedTrainer(model, args, collator, train, test, processing_class=processor, plan=plan)


def evaluate() -> str:
    """Return the exact loss of the held-out samples, and a generated last answer of the first one."""
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.evaluation is not None
    sample = test[int(trainer.evaluation.sample_ids[0])]
    answer = generate_answer(model, collator, sample, max_new_tokens=128)
    return f"loss of the held-out samples {loss:.4f}, an answer: {answer!r}"


before = evaluate()
trainer.train()
after = evaluate()
trainer.save_model()
if args.should_save:
    if not options.full:
        model.merge_and_unload().save_pretrained(f"{options.output}/merged")
        processor.save_pretrained(f"{options.output}/merged")
    print(plan, f"before: {before}", f"after: {after}", sep="\n")
