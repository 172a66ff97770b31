"""Train a small GPT-2, made from its config, with the Hugging Face Trainer."""

import argparse
import csv
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Sequences(torch.utils.data.Dataset):
    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "sequences.csv")) as file:
            self.rows = torch.tensor([[int(number) for number in row] for row in csv.reader(file)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--save-steps", type=int, default=250)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--checkpoint-dir", default="/opt/ml/checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=args.width,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.checkpoint_dir,
            max_steps=args.max_steps,
            save_steps=args.save_steps,
            save_total_limit=2,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
            # Saves at SIGTERM, which a program receives at a notice.
            enable_jit_checkpoint=True,
        ),
        train_dataset=Sequences(args.train),
    )
    os.makedirs(args.checkpoint_dir, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.checkpoint_dir))
    trainer.save_model(args.model_dir)


if __name__ == "__main__":
    main()
