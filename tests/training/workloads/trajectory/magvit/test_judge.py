"""What judges a tokenizer's reconstructions: a frozen network's features, and a critic."""

from dataclasses import replace
from typing import Any

import torch

from tests.training.workloads.trajectory.magvit.scene import SMALL
from tests.training.workloads.trajectory.scene import FakeDataset, inputs_of
from training.workload import Prior
from training.workloads.trajectory.magvit.stages import (
    JudgedTokenizer,
    Tokenizer,
    Tokens,
    TrainTokenizer,
)

JUDGED = replace(
    SMALL,
    perceptual_weight=0.1,
    adversarial_weight=0.1,
    weights="random",
    tokenizer_learning_rate=3e-4,
)


def judged_of(dataset: FakeDataset) -> tuple[TrainTokenizer, JudgedTokenizer, Any]:
    """A tokenizer with judges, started, and two clips."""
    stage = TrainTokenizer(config=JUDGED)
    inputs = inputs_of(dataset, JUDGED)
    torch.manual_seed(0)
    model = stage.model(inputs)
    assert isinstance(model, JudgedTokenizer)
    stage.start(model, inputs)
    samples = stage.samples(inputs, "train")
    items = [samples.get(k, 0, torch.Generator()) for k in range(2)]
    return stage, model.train(), samples.collate(items)


def test_a_tokenizer_is_judged_while_it_trains_and_its_critic_learns(dataset: FakeDataset) -> None:
    stage, model, batch = judged_of(dataset)
    clips = batch["frames"]
    assert [len(each) for each in model(clips)[2:]] == [2, 2, 2] and len(model.eval()(clips)) == 2
    apart, *_ = model.train().judge(clips.float() / 255.0, clips)
    assert apart.abs().max() < 1e-6
    away = (clips.float() / 255.0 + 0.1 * torch.randn(clips.shape)).clamp(0.0, 1.0)
    assert (model.judge(away, clips)[0] > 0.01).all()
    optimizer, losses = stage.optimizer(model), []
    frozen = [each.clone() for each in model.seen.state_dict().values()]
    for step in range(6):
        loss = stage.loss(model, batch, step, 6)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.metrics["critic"][0]))
    assert losses[-1] < 0.9 * losses[0]
    assert all(map(torch.equal, frozen, model.seen.state_dict().values()))


def test_only_its_own_loss_changes_the_critic(dataset: FakeDataset) -> None:
    _, model, batch = judged_of(dataset)
    pixels = (batch["frames"].float() / 255.0).requires_grad_()
    _, displeased, mistaken = model.judge(pixels, batch["frames"])
    displeased.sum().backward(retain_graph=True)
    assert pixels.grad is not None and pixels.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.critic.parameters())
    pixels.grad = None
    mistaken.sum().backward()
    assert pixels.grad is None
    assert all(p.grad is not None for p in model.critic.parameters())


def test_tokens_need_no_judge(dataset: FakeDataset) -> None:
    _, model, _ = judged_of(dataset)
    prior = Prior(stage="tokenizer", step=1, model=model.state_dict(), metrics={}, optimizer=dict)
    plain = Tokenizer(stem=SMALL.stem, width=SMALL.tokenizer_width, levels=SMALL.num_levels)
    plain.load_state_dict({name: prior.model[name] for name in plain.state_dict()})
    of_plain = replace(prior, model=plain.state_dict())
    made = [
        Tokens(config=JUDGED).make(inputs_of(dataset, JUDGED, prior=each), 0)["tokens"]
        for each in (prior, of_plain)
    ]
    assert torch.equal(*made)
