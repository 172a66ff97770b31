"""Train a small network with Lightning, which saves on its own schedule and at SIGTERM."""

import argparse
import csv
import os

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class NextNumber(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, width)
        self.recurrent = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, 32)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(batch[:, :-1]))
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        if (self.global_step + 1) % 10 == 0:
            print(f"step {self.global_step + 1} loss: {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--checkpoint-dir", default="/opt/ml/checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    lightning.seed_everything(0)
    with open(os.path.join(args.train, "sequences.csv")) as file:
        rows = torch.tensor([[int(number) for number in row] for row in csv.reader(file)])
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(
                dirpath=args.checkpoint_dir,
                save_last=True,
                save_on_exception=True,
                # Else a machine whose folder has another path writes last-v1.ckpt.
                enable_version_counter=False,
            )
        ],
    )
    last = os.path.join(args.checkpoint_dir, "last.ckpt")
    trainer.fit(
        NextNumber(args.width),
        DataLoader(rows, batch_size=64, shuffle=True),
        ckpt_path=last if os.path.exists(last) else None,
    )
    trainer.save_checkpoint(os.path.join(args.model_dir, "model.ckpt"), weights_only=True)


if __name__ == "__main__":
    main()
