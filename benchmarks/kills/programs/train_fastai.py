"""fastai with SaveModelCallback(every_epoch, with_opt) and fit(start_epoch)."""

# /// script
# dependencies = ["fastai"]
# ///

import reports
import torch
from fastai.basics import DataLoaders, Learner
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.torch_core import set_seed


class _Reports(Callback):
    def after_batch(self):
        if self.training:
            reports.step(self.epoch * self.n_iter + self.iter + 1, self.xb[0][:, 0])


set_seed(0)
inputs, labels = reports.samples()
data = torch.utils.data.TensorDataset(inputs, labels)
dls = DataLoaders.from_dsets(data, data, bs=reports.BATCH, num_workers=0, device="cpu")
learner = Learner(
    dls,
    reports.network(),
    torch.nn.CrossEntropyLoss(),
    path=reports.CHECKPOINTS,
    cbs=[SaveModelCallback(every_epoch=True, with_opt=True), _Reports()],
)
found = sorted((reports.CHECKPOINTS / "models").glob("model_*.pth"))
start = len(found)
if found:
    learner.load(found[-1].stem, with_opt=True)
learner.fit(reports.EPOCHS, start_epoch=start)
reports.final(learner.model.state_dict())
