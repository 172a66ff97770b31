"""The loop of nanoGPT's train.py: ckpt.pt overwritten in place, resumed by iter_num."""

# /// script
# dependencies = ["numpy"]
# [tool.kills]
# users_must = """
# save and restore torch's random state too: it draws the batches, so otherwise a resume trains on
# different ones."""
# ///

import numpy as np
import reports
import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 16

torch.manual_seed(1337)
data = np.random.default_rng(0).integers(0, 32, 4000)
model = nn.Sequential(nn.Embedding(32, 256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
iter_num, path = 0, reports.CHECKPOINTS / "ckpt.pt"
if path.exists():
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
while iter_num < reports.STEPS:
    starts = torch.randint(len(data) - BLOCK - 1, (reports.BATCH,))
    words = torch.stack([torch.from_numpy(data[i : i + BLOCK + 1]) for i in starts])
    loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    iter_num += 1
    reports.step(iter_num, starts)
    if iter_num % reports.SAVE_EVERY == 0:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**checkpoint, "iter_num": iter_num}, path)
reports.final(model.state_dict())
