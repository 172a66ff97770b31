"""Keras on torch with BackupAndRestore, its callback for fault tolerance."""

# /// script
# dependencies = ["keras"]
# [tool.kills]
# users_must = """
# leave `save_freq` of `BackupAndRestore` at `epoch`: a resume inside an epoch trains on its first
# samples again. Not tested here with that."""
# ///

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import reports


class _Reports(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        reports.step(int(self.model.optimizer.iterations), self.model.seen)


class _Model(keras.Model):
    def train_step(self, data):
        self.seen = data[0][:, 0]
        return super().train_step(data)


keras.utils.set_random_seed(0)
inputs = keras.Input((8,))
hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(256, "relu")(inputs[:, 1:]))
model = _Model(inputs, keras.layers.Dense(2)(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss)
backup = keras.callbacks.BackupAndRestore(str(reports.CHECKPOINTS), save_freq=reports.SAVE_EVERY)
x, y = (tensor.numpy() for tensor in reports.samples())

model.fit(
    x, y, batch_size=reports.BATCH, epochs=reports.EPOCHS, verbose=0, callbacks=[_Reports(), backup]
)
reports.final({str(n): weight.tobytes() for n, weight in enumerate(model.get_weights())})
