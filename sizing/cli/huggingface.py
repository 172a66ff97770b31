"""Price a transformer by its config.json, as Hugging Face's libraries write it.

Known are llama, mistral, mixtral, qwen2, gemma, phi3, gpt2, gpt_neox, bert, roberta, distilbert and
vit; for others, `python -m sizing model`. No weights and no network are needed.

python -m sizing huggingface config.json --tokens 1024 --batch 8 --steps 1000
python -m sizing huggingface config.json --size g6e.xlarge --samples 100000 --epochs 3
"""

import argparse
from pathlib import Path

from sizing.cli.model import add_model_arguments, price

HELP = "a transformer by its config.json: counted, then priced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("config", type=Path, metavar="CONFIG.json")
    parser.add_argument("--tokens", type=int, help="of a sample (default: 512 or all positions)")
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Count, then print the plan or the ranking."""
    if arguments.config.suffix != ".json":
        raise ValueError(f"{arguments.config} is no config.json; give the file of that name")
    more = [] if arguments.tokens is None else ["--tokens", str(arguments.tokens)]
    return price(arguments, str(arguments.config), more)
