"""fastai with SaveModelCallback(every_epoch, with_opt) and fit(start_epoch)."""

# /// script
# dependencies = ["fastai"]
# ///

import told
import torch
from fastai.basics import DataLoaders, Learner
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.torch_core import set_seed


class _Told(Callback):
    def after_batch(self):
        if self.training:
            told.step(self.epoch * self.n_iter + self.iter + 1, self.xb[0][:, 0])


set_seed(0)
inputs, labels = told.samples()
data = torch.utils.data.TensorDataset(inputs, labels)
dls = DataLoaders.from_dsets(data, data, bs=told.BATCH, num_workers=0, device="cpu")
learner = Learner(
    dls,
    told.network(),
    torch.nn.CrossEntropyLoss(),
    path=told.CHECKPOINTS,
    cbs=[SaveModelCallback(every_epoch=True, with_opt=True), _Told()],
)
found = sorted((told.CHECKPOINTS / "models").glob("model_*.pth"))
start = len(found)
if found:
    learner.load(found[-1].stem, with_opt=True)
learner.fit(told.EPOCHS, start_epoch=start)
told.final(learner.model.state_dict())
