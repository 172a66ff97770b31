"""transformers' Trainer, resumed as its documentation has it: from the last checkpoint."""

import told
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


class _Model(GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None, number=None):
        self.seen = number
        return super().forward(input_ids=input_ids, labels=labels)


class _Told(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        told.step(state.global_step, getattr(model, "seen", ()))


words = torch.randint(0, 32, (told.SAMPLES, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": w, "labels": w, "number": n} for n, w in enumerate(words)]
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(told.CHECKPOINTS),
    max_steps=told.STEPS,
    save_steps=told.SAVE_EVERY,
    save_total_limit=2,
    per_device_train_batch_size=told.BATCH,
    report_to="none",
)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
trainer = Trainer(model=_Model(config), args=arguments, train_dataset=data, callbacks=[_Told()])
told.CHECKPOINTS.mkdir(parents=True, exist_ok=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(told.CHECKPOINTS)))
told.final(trainer.model.state_dict())
