"""A training script as SageMaker's PyTorch examples are: argparse with SM_ defaults, two channels,
checkpoints in /opt/ml/checkpoints, a model for model_fn. Nothing here knows of this project.
"""

import argparse
import json
import logging
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data

logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)
logger.addHandler(logging.StreamHandler(sys.stdout))


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(2, hidden)
        self.fc2 = nn.Linear(hidden, 2)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def _get_data_loader(batch_size, directory):
    with open(os.path.join(directory, "points.json")) as f:
        points = json.load(f)
    dataset = torch.utils.data.TensorDataset(
        torch.tensor(points["x"]), torch.tensor(points["label"])
    )
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True)


def train(args):
    is_distributed = len(args.hosts) > 1 and args.backend is not None
    logger.debug("Distributed training - %s", is_distributed)
    logger.debug("Number of gpus available - %d", args.num_gpus)
    device = torch.device("cuda" if args.num_gpus > 0 else "cpu")
    torch.manual_seed(args.seed)

    train_loader = _get_data_loader(args.batch_size, args.train)
    test_loader = _get_data_loader(args.batch_size, args.test)
    model = Net(args.hidden).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    first_epoch = 1
    checkpoint_path = os.path.join(args.checkpoint_path, "checkpoint.pth")
    if os.path.isfile(checkpoint_path):
        checkpoint = torch.load(checkpoint_path, map_location=device)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        first_epoch = checkpoint["epoch"] + 1
        logger.info("Loaded checkpoint of epoch %d", checkpoint["epoch"])

    for epoch in range(first_epoch, args.epochs + 1):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
        logger.info("Train Epoch: %d Loss: %.6f", epoch, loss.item())
        test(model, test_loader, device)
        os.makedirs(args.checkpoint_path, exist_ok=True)
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
            },
            checkpoint_path,
        )
    save_model(model, args.model_dir)


def test(model, test_loader, device):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model(data.to(device)).argmax(1) == target.to(device)).sum().item()
            total += len(target)
    logger.info("Test set: Accuracy: %.4f", correct / total)


def model_fn(model_dir):
    model = Net(16)
    with open(os.path.join(model_dir, "model.pth"), "rb") as f:
        model.load_state_dict(torch.load(f))
    return model


def save_model(model, model_dir):
    logger.info("Saving the model.")
    torch.save(model.cpu().state_dict(), os.path.join(model_dir, "model.pth"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()

    # Data and model checkpoints directories
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", type=str, default=None)
    parser.add_argument("--checkpoint-path", type=str, default="/opt/ml/checkpoints")

    # Container environment
    parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
    parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--train", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--test", type=str, default=os.environ["SM_CHANNEL_TEST"])
    parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])

    train(parser.parse_args())
