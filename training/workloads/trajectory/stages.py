"""The stages of a recipe, in order: derived data, baselines, and the models compared with them."""

from collections.abc import Sequence

from training.workload import Prepare, Settings, Train
from training.workloads.trajectory.classifier import TrainHead, TrainTimeAverage
from training.workloads.trajectory.config import RecipeConfig
from training.workloads.trajectory.features import Features, MeanImages
from training.workloads.trajectory.magvit.recipes import MagvitConfig
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer, TrainTransformer
from training.workloads.trajectory.recipes import TrajectoryConfig
from training.workloads.trajectory.samples import View


def frozen_stages(c: TrajectoryConfig) -> Sequence[Prepare | Train]:
    """Frozen ResNet-18 per frame, a Transformer over time, and three baselines."""

    def head(name: str, view: View, epochs: int) -> TrainHead:
        return TrainHead(
            config=c,
            name=name,
            view=view,
            settings=settings(c, epochs),
            learning_rate=c.learning_rate,
            weight_decay=c.weight_decay,
            position_weight=c.position_weight,
            fused_optimizer=c.fused_optimizer,
            classes=c.class_names,
        )

    return (
        MeanImages(num_shards=c.num_shards),
        Features(config=c),
        time_average(c),
        head("single_frame", "single_frame", c.single_frame_epochs),
        head("shuffled", "shuffled", c.shuffled_epochs),
        head("head", "clip", c.epochs),
    )


def magvit_stages(c: MagvitConfig) -> Sequence[Prepare | Train]:
    """A tokenizer, its tokens, a masked Transformer over them, and the time-average baseline."""
    return (
        MeanImages(num_shards=c.num_shards),
        time_average(c),
        TrainTokenizer(config=c),
        Tokens(config=c),
        TrainTransformer(
            config=c,
            name="transformer",
            view="tokens",
            settings=settings(c, c.epochs),
            learning_rate=c.learning_rate,
            weight_decay=c.weight_decay,
            position_weight=c.position_weight,
            fused_optimizer=c.fused_optimizer,
            classes=c.class_names,
        ),
    )


def time_average(c: RecipeConfig) -> TrainTimeAverage:
    """The baseline that sees everything except the order of the frames."""
    return TrainTimeAverage(
        name="time_average",
        view="time_average",
        settings=settings(c, c.time_average_epochs),
        learning_rate=c.learning_rate,
        weight_decay=c.weight_decay,
        position_weight=c.position_weight,
        fused_optimizer=c.fused_optimizer,
        classes=c.class_names,
        width=c.baseline_width,
    )


def settings(c: RecipeConfig, epochs: int) -> Settings:
    """The settings of every stage that classifies clips."""
    return Settings(
        epochs=epochs,
        global_batch=c.global_batch,
        micro_batch=c.micro_batch,
        eval_batch=c.eval_batch,
        schedule="cosine",
        warmup_steps=c.warmup_steps,
        clip_norm=c.clip_norm,
        evaluate_every_epochs=c.evaluate_every_epochs,
        precision=c.precision,
        loader_workers=c.loader_workers,
    )
