"""Train a small network to continue sequences of numbers: plain PyTorch, as SageMaker runs it."""

import argparse
import csv
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class NextNumber(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 32)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(numbers))
        return self.head(self.dropout(hidden))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--checkpoint-dir", default="/opt/ml/checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open(os.path.join(args.train, "sequences.csv")) as file:
        sequences = torch.tensor([[int(number) for number in row] for row in csv.reader(file)])
    loader = DataLoader(TensorDataset(sequences), batch_size=args.batch_size, shuffle=True)
    model = NextNumber(args.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    checkpoint, start = os.path.join(args.checkpoint_dir, "checkpoint.pt"), 0
    os.makedirs(args.checkpoint_dir, exist_ok=True)
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"]
        print(f"resuming after epoch {start}", flush=True)

    for epoch in range(start, args.epochs):
        for number, (batch,) in enumerate(loader, start=1):
            batch = batch.to(device)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 8 == 0:
                step = epoch * len(loader) + number
                print(f"epoch {epoch + 1} step {step} loss: {loss.item():.4f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1}, checkpoint)

    os.makedirs(args.model_dir, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(args.model_dir, "model.pth"))
    print("done")


if __name__ == "__main__":
    main()
