"""The recipes: for a laptop, of seed document 003, and COCO in twelve epochs as published."""

from dataclasses import replace

from training.workloads.detection.config import DetectionConfig


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
        epochs=12,
        global_batch=4,
        micro_batch=4,
        eval_batch=8,
        learning_rate=5e-4,
        backbone_learning_rate=5e-4,
        warmup_steps=50,
        drop_epoch=10,
        clip_norm=1.0,
        num_select=60,
        precision="float32",
        loader_workers=0,
    )


def full() -> DetectionConfig:
    """Walls and rooms of seed document 003: 300 queries, batches of 2, on one A10G of 24 GB."""
    return DetectionConfig(
        num_threads=4,
        # Its fast kernels on CUDA add in any order.
        deterministic=False,
        num_queries=300,
        epochs=50,
        global_batch=2,
        drop_epoch=46,
        ema_decay=0.9998,
        fused_optimizer=True,
    )


def coco_12() -> DetectionConfig:
    """DINO-4scale with ResNet-50, COCO's 80 classes, 12 epochs: published AP 49.0.

    That is with 8 GPUs x 2 images in float32 (arXiv:2203.03605); bfloat16 is ours.
    """
    return replace(
        full(),
        num_classes=80,
        num_queries=900,
        epochs=12,
        global_batch=16,
        drop_epoch=11,
        ema_decay=None,
    )
