"""Fine-tune a Qwen-VL on receipts in packed rows, with Hugging Face Trainer as it is.

    python examples/finetune_cord.py
    python examples/finetune_cord.py --model Qwen/Qwen3-VL-2B-Instruct --data naver-clova-ix/cord-v2 --steps 200

The first trains a tiny random model on drawn receipts, anywhere and within a minute.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

from vlmpack import VLMCollator, enable_packing
from vlmpack.data import load_cord, load_processor, save_processor, to_conversation
from vlmpack.testing import SyntheticReceipts, tiny_model, tiny_processor

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub id or folder; without it, a tiny random Qwen3-VL")
parser.add_argument("--data", default="synthetic", help='hub id, folder or parquet file of CORD, or "synthetic"')
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", default="results/finetuned", help="folder for the trained model")
args = parser.parse_args()


class Receipts(Dataset):  # of conversations; any other shape that VLMCollator accepts would do
    def __init__(self, source: str) -> None:
        self.records = SyntheticReceipts(scale=0.35) if source == "synthetic" else load_cord(source)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict:
        return to_conversation(self.records[index])


load_model = AutoModelForImageTextToText.from_pretrained
processor = load_processor(args.model) if args.model else tiny_processor()
model = load_model(args.model, dtype=torch.float32) if args.model else tiny_model(processor=processor)
settings = TrainingArguments(
    output_dir=args.output,
    max_steps=args.steps,
    per_device_train_batch_size=8,
    learning_rate=1e-5 if args.model else 1e-3,
    bf16=torch.cuda.is_available(),
    dataloader_pin_memory=torch.cuda.is_available(),
    logging_steps=1,
    save_strategy="no",
    remove_unused_columns=False,  # the collator reads the columns, not the model
    report_to="none",
)
packed = VLMCollator(processor, layout="packed")
trainer = Trainer(model=enable_packing(model), args=settings, train_dataset=Receipts(args.data), data_collator=packed)
trainer.train()
trainer.save_model(args.output)
save_processor(processor, args.output)
print("final loss", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])
