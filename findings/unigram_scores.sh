#!/usr/bin/env bash
# sentencepiece 0.2.3: the scores of a unigram model depend on num_threads (16 by default), whatever
# the machine's cores; pieces and plain encoding stay equal here. With 16 threads twice: equal. BPE
# does not depend on it. Sampled segmentations (subword regularization) draw from these scores.
# Seen: 4 different score lists for 1, 2, 4 and 16 threads; one list of pieces; BPE equal in all.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet sentencepiece==0.2.3
cd "$folder"
venv/bin/python - <<'PY'
import random
import sys

import sentencepiece

draw = random.Random(0)
words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(3000)]
weights = [1 / (n + 1) for n in range(3000)]
with open("corpus.txt", "w") as corpus:
    for _ in range(20000):
        print(" ".join(draw.choices(words, weights, k=20)), file=corpus)


def train(kind, threads):
    sentencepiece.SentencePieceTrainer.train(
        input="corpus.txt", model_prefix="model", vocab_size=800, model_type=kind,
        num_threads=threads, minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file="model.model")
    size = range(model.get_piece_size())
    return tuple(map(model.id_to_piece, size)), tuple(map(model.get_score, size))


seen = {}
for kind in ("unigram", "bpe"):
    runs = [train(kind, threads) for threads in (1, 2, 4, 16)]
    again = train(kind, 16) == runs[-1]
    seen[kind] = [len({run[n] for run in runs}) for n in (0, 1)]
    print(f"{kind}: {seen[kind][0]} list(s) of pieces, {seen[kind][1]} of scores; repeatable: {again}")
    if not again:
        sys.exit(1)
sys.exit(not (seen["unigram"][1] > 1 and seen["bpe"] == [1, 1]))
PY
