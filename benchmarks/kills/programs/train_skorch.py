"""skorch with Checkpoint and LoadInitState, resumed as in its documentation."""

# /// script
# dependencies = ["skorch"]
# ///

import told
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, LoadInitState


class _Told(Callback):
    def on_batch_end(self, net, batch=None, training=False, **more):
        if training:
            done = 25 * (len(net.history) - 1) + len(net.history[-1]["batches"])
            told.step(done, batch[0][:, 0])


saves = Checkpoint(dirname=str(told.CHECKPOINTS), monitor=None)
torch.manual_seed(0)
settings = {"lr": 1e-3, "max_epochs": told.EPOCHS, "batch_size": told.BATCH, "verbose": 0}
net = NeuralNetClassifier(
    told.network(),
    criterion=torch.nn.CrossEntropyLoss,
    optimizer=torch.optim.AdamW,
    iterator_train__shuffle=True,
    train_split=None,
    callbacks=[_Told(), saves, LoadInitState(saves)],
    **settings,
)
net.fit(*told.samples())
told.final(net.module_.state_dict())
