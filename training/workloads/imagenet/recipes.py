"""The recipes: one for a laptop, four for a GPU.

docs/imagenet.md has the accuracy that others published of the latter.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from training.workloads.imagenet.config import BASE_BATCH, SETTINGS, ImagenetConfig

# ffcv-imagenet's learning rate, and the batch that it belongs to: 512 on each of 8 GPUs.
_FFCV_RATE, _FFCV_BATCH = 1.7, 4096


def laptop() -> ImagenetConfig:
    """A small ResNet on the pictures that `data make` draws, in half a minute on one CPU thread."""
    return ImagenetConfig(
        architecture="resnet8",
        num_classes=8,
        train_size=64,
        low_size=32,
        low_until_epoch=3,
        train_size_from_epoch=3,
        eval_size=64,
        evaluate_flips=True,
        shuffle_window=4,
        settings=replace(
            SETTINGS, epochs=6, global_batch=16, micro_batch=16, eval_batch=80, ema_decay=0.98
        ),
        learning_rate=1.6,
        weight_decay=5e-4,
        warmup_epochs=1,
    )


def full() -> ImagenetConfig:
    """The plain 90 epochs at 224 pixels, along a cosine, in bfloat16."""
    return ImagenetConfig(
        num_threads=4,
        deterministic=False,
        settings=replace(SETTINGS, precision="bfloat16", loader_workers="auto"),
    )


def _progressive(epochs: int, low_until: int, train_size_from: int) -> ImagenetConfig:
    """As ffcv-imagenet's rn50 configs, at a quarter of their batch and of their learning rate.

    It differs where it trains on one GPU: bfloat16 instead of float16, and blocks that start at 0.
    """
    return ImagenetConfig(
        num_threads=4,
        deterministic=False,
        blur_pool=True,
        train_size=192,
        low_size=160,
        low_until_epoch=low_until,
        train_size_from_epoch=train_size_from,
        evaluate_flips=True,
        settings=replace(
            SETTINGS,
            epochs=epochs,
            schedule="linear",
            precision="bfloat16",
            loader_workers="auto",
        ),
        learning_rate=_FFCV_RATE * BASE_BATCH / _FFCV_BATCH,
        label_smoothing=0.1,
        warmup_epochs=2,
    )


def epochs_16() -> ImagenetConfig:
    """16 epochs in the style of ffcv-imagenet."""
    return _progressive(16, 11, 13)


def epochs_40() -> ImagenetConfig:
    """40 epochs in the style of ffcv-imagenet."""
    return _progressive(40, 29, 34)


def epochs_88() -> ImagenetConfig:
    """88 epochs in the style of ffcv-imagenet."""
    return _progressive(88, 65, 76)


RECIPES: Mapping[str, Callable[[], ImagenetConfig]] = MappingProxyType(
    {
        "laptop": laptop,
        "full": full,
        "epochs_16": epochs_16,
        "epochs_40": epochs_40,
        "epochs_88": epochs_88,
    }
)
