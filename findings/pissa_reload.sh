#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0, torch 2.14.1: a LoRA adapter trained with
# init_lora_weights="pissa_niter_16" (PiSSA with the fast SVD) is another model when it is loaded.
# PiSSA subtracts its start from the base's weights; from_pretrained() computes that start again from
# the original base, and the fast SVD draws random numbers. The saved adapter then sits on a base that
# it was not trained on, without a warning. "pissa" (the full SVD) is exact. The same torch seed
# before the base is made helps, or saving with path_initial_model_for_weight_conversion.
# Seen, with a small Llama: trained to a loss of 0.04, it has 1.2 to 1.8 after loading, each time another.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.14.1 numpy==2.4.6
cd "$folder"
export HOME=$folder
venv/bin/python -W ignore - <<'PY'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)
torch.manual_seed(0)
FIRST, SECOND = torch.randint(0, 64, (2, 16, 32))


def train(model, tokens, steps, rate):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss(model):
    return round(model.eval()(input_ids=SECOND, labels=SECOND).loss.item(), 4)


pretrained = LlamaForCausalLM(CONFIG)
train(pretrained, FIRST, steps=60, rate=0.003)


def base(seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(pretrained.state_dict())
    return model


seen = {}
for way in ("pissa", "pissa_niter_16"):
    lora = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights=way)
    model = get_peft_model(base(1), lora)
    model.peft_config["default"].init_lora_weights = True  # as the conversion asks for
    model.save_pretrained("start")
    model.peft_config["default"].init_lora_weights = way
    train(model, SECOND, steps=150, rate=0.002)
    trained = loss(model)
    model.save_pretrained("adapter")
    loaded = [loss(PeftModel.from_pretrained(base(seed), "adapter")) for seed in (1, 2, 3, 4)]
    model.save_pretrained("converted", path_initial_model_for_weight_conversion="start")
    converted = loss(PeftModel.from_pretrained(base(5), "converted"))
    print(f"{way}: trained {trained}, loaded with the same seed {loaded[0]}, with others {loaded[1:]}")
    print(f"  converted when it was saved: {converted}")
    seen[way] = trained, loaded, converted
trained, loaded, converted = seen["pissa"]
assert loaded == [trained] * 4 and abs(converted - trained) < 0.002, seen
trained, loaded, converted = seen["pissa_niter_16"]
assert loaded[0] == trained and min(loaded[1:]) > 10 * trained and len(set(loaded)) == 4, seen
assert abs(converted - trained) < 0.002, seen
PY
