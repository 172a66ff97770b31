"""accelerate as in its example by_feature/checkpointing.py: save_state, skip_first_batches."""

# /// script
# dependencies = ["accelerate"]
# ///

import reports
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(0)
model = reports.network()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(*reports.samples()), batch_size=reports.BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start, saved = 0, [path for path in reports.CHECKPOINTS.iterdir() if path.is_dir()]
if saved:  # as in the example: the most recent one by change time
    last = max(saved, key=lambda path: path.stat().st_ctime)
    accelerator.load_state(last)
    start = int(last.name.removeprefix("step_"))
step = start
for epoch in range(start // len(loader), reports.EPOCHS):
    model.train()
    batches = loader
    if epoch == start // len(loader) and start:
        batches = accelerator.skip_first_batches(loader, start % len(loader))
    for inputs, labels in batches:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        reports.step(step, inputs[:, 0])
        if step % reports.SAVE_EVERY == 0:
            accelerator.save_state(reports.CHECKPOINTS / f"step_{step}")
reports.final(model.state_dict())
