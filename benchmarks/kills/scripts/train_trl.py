"""TRL's SFTTrainer on a model made from its config, resumed from the last checkpoint."""

import datasets
import told
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer


class _Told(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        told.step(state.global_step)


def main():
    words = {"[PAD]": 0, "[EOS]": 1, **{str(number): number for number in range(2, 32)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[PAD]")),
        pad_token="[PAD]",
        eos_token="[EOS]",
    )
    texts = torch.randint(2, 32, (told.SAMPLES, 16), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    trainer = SFTTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=SFTConfig(
            output_dir=str(told.CHECKPOINTS),
            max_steps=told.STEPS,
            save_steps=told.SAVE_EVERY,
            save_total_limit=2,
            per_device_train_batch_size=told.BATCH,
            report_to="none",
            bf16=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"input_ids": texts.tolist()}),
        processing_class=tokenizer,
        callbacks=[_Told()],
    )
    told.CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(told.CHECKPOINTS)))
    told.final(trainer.model.state_dict())


if __name__ == "__main__":
    main()
