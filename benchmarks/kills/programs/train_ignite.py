"""pytorch-ignite with Checkpoint and DiskSaver, and the engine itself in the checkpoint."""

# /// script
# dependencies = ["pytorch-ignite", "numpy"]
# ///

import reports
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = reports.network()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(*reports.samples()), batch_size=reports.BATCH, shuffle=True)


def update(engine, batch):
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    return batch[0][:, 0]


trainer = Engine(update)
held = {"trainer": trainer, "model": model, "optimizer": optimizer}
saver = DiskSaver(str(reports.CHECKPOINTS), require_empty=False)
saves = Checkpoint(held, saver, n_saved=2, global_step_transform=lambda e, _: e.state.iteration)
trainer.add_event_handler(
    Events.ITERATION_COMPLETED,
    lambda engine: reports.step(engine.state.iteration, engine.state.output),
)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=reports.SAVE_EVERY), saves)
found = sorted(
    reports.CHECKPOINTS.glob("checkpoint_*.pt"), key=lambda p: int(p.stem.rpartition("_")[2])
)
if found:
    Checkpoint.load_objects(held, torch.load(found[-1], weights_only=False))
trainer.run(loader, max_epochs=reports.EPOCHS)
reports.final(model.state_dict())
