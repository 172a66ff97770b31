"""The stages of a recipe, in order: derived data, baselines, and the models compared with them."""

from collections.abc import Sequence

from training.workload import Prepare, Train
from training.workloads.trajectory.classifier import TrainHead, TrainTimeAverage
from training.workloads.trajectory.config import RecipeConfig
from training.workloads.trajectory.features import Features, MeanImages
from training.workloads.trajectory.magvit.recipes import MagvitConfig
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer, TrainTransformer
from training.workloads.trajectory.recipes import TrajectoryConfig


def frozen_stages(c: TrajectoryConfig) -> Sequence[Prepare | Train]:
    """Frozen ResNet-18 per frame, a Transformer over time, and three baselines."""
    epochs, single, mixed = c.settings.epochs, c.single_frame_epochs, c.shuffled_epochs
    return (
        MeanImages(num_shards=c.num_shards),
        Features(config=c),
        time_average(c),
        TrainHead(config=c, name="single_frame", view="single_frame", epochs=single),
        TrainHead(config=c, name="shuffled", view="shuffled", epochs=mixed),
        TrainHead(config=c, name="head", view="clip", epochs=epochs),
    )


def magvit_stages(c: MagvitConfig) -> Sequence[Prepare | Train]:
    """A tokenizer, its tokens, a masked Transformer over them, and the time-average baseline."""
    return (
        MeanImages(num_shards=c.num_shards),
        time_average(c),
        TrainTokenizer(config=c),
        Tokens(config=c),
        TrainTransformer(config=c, name="transformer", view="tokens", epochs=c.settings.epochs),
    )


def time_average(c: RecipeConfig) -> TrainTimeAverage:
    """The baseline that sees everything except the order of the frames."""
    return TrainTimeAverage(
        config=c, name="time_average", view="time_average", epochs=c.time_average_epochs
    )
