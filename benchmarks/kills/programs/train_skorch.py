"""skorch with Checkpoint and LoadInitState, resumed as in its documentation."""

# /// script
# dependencies = ["skorch"]
# ///

import reports
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, LoadInitState


class _Reports(Callback):
    def on_batch_end(self, net, batch=None, training=False, **more):
        if training:
            done = 25 * (len(net.history) - 1) + len(net.history[-1]["batches"])
            reports.step(done, batch[0][:, 0])


saves = Checkpoint(dirname=str(reports.CHECKPOINTS), monitor=None)
torch.manual_seed(0)
settings = {"lr": 1e-3, "max_epochs": reports.EPOCHS, "batch_size": reports.BATCH, "verbose": 0}
net = NeuralNetClassifier(
    reports.network(),
    criterion=torch.nn.CrossEntropyLoss,
    optimizer=torch.optim.AdamW,
    iterator_train__shuffle=True,
    train_split=None,
    callbacks=[_Reports(), saves, LoadInitState(saves)],
    **settings,
)
net.fit(*reports.samples())
reports.final(net.module_.state_dict())
