"""Any architecture of the transformers library, to be counted: shapes and costs, never weights.

The library builds it from a config.json, or from a name on the Hugging Face Hub, of which only the
config is read. Experts get the average number of tokens each, in one grouped product.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from training.errors import UserError

# Of an architecture that the config does not name: the first task that its family has.
_TASKS = ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
_DEFAULT_TOKENS = 512


class HuggingFace:
    """A config's model with a batch of any size: `tokens` each, or images as the config has them.

    `attention`: eager, or fused as sdpa; by default fused where the library has it. `recomputes`:
    each block again in backward.
    """

    def __init__(
        self,
        target: str,
        *,
        tokens: int | None,
        attention: str | None = None,
        recomputes: bool = False,
    ) -> None:
        self._config = _read(target)
        self._class = _class_of(self._config)
        self._recomputes = recomputes
        if attention:
            self._config._attn_implementation = attention
        self._config.use_cache = False
        if self._config.is_encoder_decoder and not hasattr(self._config, "decoder_start_token_id"):
            self._config.decoder_start_token_id = 0
        self._inputs = self._class.main_input_name
        if self._inputs not in ("input_ids", "pixel_values"):
            raise UserError(
                f"{self._class.__name__} takes {self._inputs}, whose shape no config tells; give "
                "package.module:function, which returns the model and a batch"
            )
        if tokens and self._inputs == "pixel_values":
            raise UserError("--tokens is for text: an image's number of patches is in its config")
        most = getattr(self._config, "max_position_embeddings", None) or tokens or _DEFAULT_TOKENS
        if tokens and tokens > most:
            raise UserError(f"--tokens is {tokens}; this model has {most} positions")
        self._tokens = tokens or min(_DEFAULT_TOKENS, most)

    def __call__(self, samples: int) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """Return the model, which has its own loss, and a batch."""
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights():
                model = self._class._from_config(self._config)
        except ValueError as error:
            raise UserError(f"{self._class.__name__}: {error}") from None
        model.tie_weights()
        if self._recomputes:
            # Its name until transformers 5.20 was gradient_checkpointing_enable.
            now, before = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            getattr(model, now if hasattr(model, now) else before)()
            model.enable_input_require_grads()
        return model, self._batch(samples)

    def _batch(self, samples: int) -> Mapping[str, Tensor]:
        if self._inputs == "pixel_values":
            side, channels = self._config.image_size, self._config.num_channels
            images = torch.zeros(samples, channels, side, side)
            return {"pixel_values": images, "labels": torch.zeros(samples, dtype=torch.long)}
        tokens = torch.zeros(samples, self._tokens, dtype=torch.long)
        classifies = self._class.__name__.endswith("SequenceClassification")
        return {"input_ids": tokens, "labels": tokens[:, 0] if classifies else tokens}


def _read(target: str) -> Any:
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError(
            f"{target}: {error}; a config is counted by the transformers library: "
            "pip install transformers"
        ) from None
    if target.endswith(".json") and not Path(target).is_file():
        raise UserError(f"{target} does not exist; give a transformer's config.json")
    try:
        return AutoConfig.from_pretrained(target)
    except (ValueError, TypeError, OSError, ArithmeticError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"transformers cannot read {target}: {said}") from None


def _class_of(config: Any) -> Any:
    """The class that the config names, else that of the first task of its family."""
    import transformers
    from transformers.models.auto import modeling_auto

    of_family = (
        getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type)
        for task in _TASKS
    )
    for name in (*(config.architectures or ()), *of_family):
        found = name and getattr(transformers, name, None)
        if found:
            return found
    raise UserError(
        f"transformers has no model to train of model_type {config.model_type!r}; give "
        "package.module:function, which returns the model and a batch"
    )


@contextmanager
def balanced_experts() -> Iterator[None]:
    """Let experts compute in one product that works in every precision, on fake tensors, too."""
    from transformers.integrations import moe

    # transformers 5.17 has no backward product of its own, 5.23 has.
    for name, passes in (("grouped_mm_fallback", 1), ("grouped_mm_fallback_backward", 2)):
        operation = getattr(torch.ops.transformers, name, None)
        if operation is not None:
            register_flop_formula(operation)(_grouped_flops(passes))
    with patch.object(moe, "_can_use_grouped_mm", lambda *of: False):
        yield


def _grouped_flops(passes: int) -> Any:
    def flops(inputs: Any, weight: Any, *rest: Any, **more: Any) -> int:
        """Every row is multiplied with the matrix of one expert."""
        return int(2 * passes * inputs[0] * weight[1] * weight[2])

    return flops
