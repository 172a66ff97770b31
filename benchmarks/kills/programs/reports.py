"""The trainers' common part: reports to the kill table, and the data on which they train."""

import hashlib
import json
import os
import time
from pathlib import Path

CHECKPOINTS = Path(os.environ["SM_CHECKPOINT_DIR"])
STEPS, SAVE_EVERY, BATCH, SAMPLES = 100, 20, 8, 200
EPOCHS = STEPS * BATCH // SAMPLES
# Long enough for a tiny model to be killed while it trains.
STEP_SECONDS = 0.1


def report(**what):
    # A progress bar may not have ended its line.
    print("\n" + json.dumps({"at": time.time(), **what}), flush=True)


def step(number, ids=()):
    time.sleep(STEP_SECONDS)
    report(step=number, ids=[int(one) for one in ids])


def final(tensors):
    """Report the checksum of a model's tensors by name, or of bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().cpu().numpy().tobytes() if hasattr(tensor, "detach") else tensor
        digest.update(name.encode() + data)
    report(final=digest.hexdigest())


def samples():
    """Return inputs whose first column is the sample's id, and classes; always the same."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    inputs[:, 0] = torch.arange(SAMPLES)
    return inputs, (inputs[:, 1:4].sum(1) > 0).long()


def network():
    """Return a network that drops the id, and has dropout, so that random states matter."""
    import torch
    from torch import nn

    class _Network(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(7, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 2)]
            self.layers = nn.Sequential(*layers)

        def forward(self, inputs):
            return self.layers(inputs[:, 1:])

    torch.manual_seed(0)
    return _Network()


def transformers_arguments():
    """Return arguments for transformers' Trainer and its subclasses."""
    saves = {"output_dir": str(CHECKPOINTS), "save_steps": SAVE_EVERY, "save_total_limit": 2}
    return saves | {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "report_to": "none"}


def train_transformers(trainer):
    """Resume as in the documentation: from the last checkpoint in the output folder."""
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    class _Reports(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **more):
            step(state.global_step, getattr(model, "seen", ()))

    trainer.add_callback(_Reports())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(CHECKPOINTS)))
    final(trainer.model.state_dict())
