"""SentenceTransformerTrainer on a tiny BERT, resumed from the last checkpoint."""

from pathlib import Path

import datasets
import told
import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from transformers.trainer_utils import get_last_checkpoint


class _Told(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        told.step(state.global_step)


def make_bert(folder):
    """A model and its tokenizer, as a hub would have them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(50))]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


def main():
    word = models.Transformer(make_bert(Path.cwd() / "bert"))
    model = SentenceTransformer(modules=[word, models.Pooling(32)], device="cpu")
    numbers = range(told.SAMPLES)
    pairs = {
        "anchor": [f"{n % 50} {n // 4}" for n in numbers],
        "positive": [f"{n // 4} {n % 50}" for n in numbers],
    }
    trainer = SentenceTransformerTrainer(
        model=model,
        args=Arguments(
            output_dir=str(told.CHECKPOINTS),
            max_steps=told.STEPS,
            save_steps=told.SAVE_EVERY,
            save_total_limit=2,
            per_device_train_batch_size=told.BATCH,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_dict(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[_Told()],
    )
    told.CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(told.CHECKPOINTS)))
    told.final(model.state_dict())


if __name__ == "__main__":
    main()
