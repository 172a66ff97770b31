"""TRL's SFTTrainer on a model made from its config, resumed from the last checkpoint."""

# /// script
# dependencies = ["trl"]
# ///

import datasets
import reports
import torch
import transformers
from tokenizers import Tokenizer, models
from trl import SFTConfig, SFTTrainer

words = {"[PAD]": 0, "[EOS]": 1, **{str(number): number for number in range(2, 32)}}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, "[PAD]")),
    pad_token="[PAD]",
    eos_token="[EOS]",
)
texts = torch.randint(2, 32, (reports.SAMPLES, 16), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2)
trainer = SFTTrainer(
    model=transformers.GPT2LMHeadModel(config),
    args=SFTConfig(**reports.transformers_arguments(), bf16=False),
    train_dataset=datasets.Dataset.from_dict({"input_ids": texts.tolist()}),
    processing_class=tokenizer,
)
reports.train_transformers(trainer)
