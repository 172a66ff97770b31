"""transformers' Trainer, resumed as in its documentation: from the last checkpoint."""

# /// script
# dependencies = ["transformers", "accelerate"]
# [tool.kills]
# users_must = """
# on a local disk, delete a half-written `checkpoint-N` before resuming: `get_last_checkpoint`
# takes the newest folder, and every start fails on it."""
# ///

import reports
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class _Model(GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None, number=None):
        self.seen = number
        return super().forward(input_ids=input_ids, labels=labels)


words = torch.randint(0, 32, (reports.SAMPLES, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": w, "labels": w, "number": n} for n, w in enumerate(words)]
torch.manual_seed(0)
trainer = Trainer(
    model=_Model(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)),
    args=TrainingArguments(**reports.transformers_arguments()),
    train_dataset=data,
)
reports.train_transformers(trainer)
