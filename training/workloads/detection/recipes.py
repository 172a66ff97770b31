"""The recipes: for a laptop, of seed document 003, and COCO in twelve epochs as published."""

from dataclasses import replace

from training.workloads.detection.config import SETTINGS, DetectionConfig


def laptop() -> DetectionConfig:
    """Generated floor plans of at most 160 pixels, on two CPU threads, in 20 minutes."""
    return DetectionConfig(
        num_threads=2,
        backbone="resnet18",
        weights="random",
        width=128,
        encoder_layers=2,
        decoder_layers=2,
        feed_forward=256,
        num_queries=60,
        denoising_queries=30,
        short_sides="128,144,160",
        max_side=160,
        crop_share=0.0,
        settings=replace(
            SETTINGS,
            global_batch=4,
            micro_batch=4,
            eval_batch=8,
            warmup_steps=50,
            clip_norm=1.0,
            precision="float32",
            loader_workers=0,
        ),
        learning_rate=5e-4,
        backbone_learning_rate=5e-4,
        drop_epoch=10,
        num_select=60,
    )


def full() -> DetectionConfig:
    """Walls and rooms of seed document 003: 300 queries, batches of 2, on one A10G of 24 GB."""
    return DetectionConfig(
        num_threads=4,
        # Its fast kernels on CUDA add in any order.
        deterministic=False,
        num_queries=300,
        settings=replace(SETTINGS, epochs=50, global_batch=2, ema_decay=0.9998),
        drop_epoch=46,
        fused_optimizer=True,
    )


def coco_12() -> DetectionConfig:
    """DINO-4scale with ResNet-50, COCO's 80 classes, 12 epochs: published AP 49.0.

    That is with 8 GPUs x 2 images in float32 (arXiv:2203.03605); bfloat16 is ours.
    """
    return replace(full(), num_classes=80, num_queries=900, settings=SETTINGS, drop_epoch=11)
