"""SentenceTransformerTrainer on a tiny BERT, resumed from the last checkpoint."""

# /// script
# dependencies = ["sentence-transformers", "datasets", "accelerate"]
# ///

import datasets
import reports
import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments


def make_bert(folder):
    """Write a model and its tokenizer to a folder, as from a hub; return its path."""
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


word = models.Transformer(make_bert(reports.Path(__file__).with_name("bert")))
model = SentenceTransformer(modules=[word, models.Pooling(32)], device="cpu")
numbers = range(reports.SAMPLES)
pairs = {
    "anchor": [f"{n % 50} {n // 4}" for n in numbers],
    "positive": [f"{n // 4} {n % 50}" for n in numbers],
}
trainer = SentenceTransformerTrainer(
    model=model,
    args=Arguments(**reports.transformers_arguments()),
    train_dataset=datasets.Dataset.from_dict(pairs),
    loss=losses.MultipleNegativesRankingLoss(model),
)
reports.train_transformers(trainer)
