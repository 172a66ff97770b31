"""What is foretold of where the ball goes."""

import torch

from training.workloads.trajectory.forecast import FutureForecast, PathFlow


def lines(count: int, generator: torch.Generator) -> torch.Tensor:
    """Paths (count, 12, 2) at a constant velocity, in half frames."""
    start, velocity = torch.rand((2, count, 1, 2), generator=generator) - 0.5
    return start + 0.1 * velocity * torch.arange(12)[:, None]


def circles(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths (count, 12, 2) around random centres, clockwise or not, and which of these (count)."""
    labels = torch.randint(2, (count,), generator=generator)
    center, phase = torch.rand((2, count, 1), generator=generator)
    angle = 6.3 * phase + (2.0 * labels[:, None] - 1.0) * 0.4 * torch.arange(12)
    around = torch.stack([angle.cos(), angle.sin()], dim=2)
    return 0.4 * around + (center - 0.5)[..., None], labels


def away(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm(dim=-1).mean().detach())


def test_a_future_is_foretold_from_the_places_up_to_its_frame_and_changes_none() -> None:
    torch.manual_seed(0)
    forecast = FutureForecast(num_frames=12, width=16)
    for parameter in forecast.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    places = torch.randn(3, 12, 2, requires_grad=True)
    futures = forecast(places)
    assert futures.shape == (3, 12, 2)
    later = places.detach().clone()
    later[:, 7:] += 1.0
    same = (forecast(later) == futures).all(dim=2).all(dim=0)
    assert same.tolist() == [True] * 7 + [False] * 5
    futures.sum().backward()
    assert places.grad is None


def test_a_new_forecast_is_that_the_ball_stays() -> None:
    places = torch.randn(2, 5, 2)
    assert torch.equal(FutureForecast(num_frames=5)(places), places)


def test_a_forecast_learns_how_the_ball_goes_on() -> None:
    torch.manual_seed(0)
    forecast, generator = FutureForecast(num_frames=12, width=64), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(forecast.parameters(), lr=3e-3)
    for _ in range(150):
        paths = lines(16, generator)
        loss = (forecast(paths)[:, 2:8] - paths[:, 6:]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unseen = lines(100, generator)
    foretold = forecast(unseen)[:, 2:8]
    assert away(foretold, unseen[:, 6:]) < 0.3 * away(unseen[:, 2:8], unseen[:, 6:])


def trained_flow(num_steps: int) -> tuple[PathFlow, torch.Generator]:
    torch.manual_seed(0)
    flow = PathFlow(num_frames=12, num_classes=2, width=64)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(flow.parameters(), lr=3e-3)
    for _ in range(num_steps):
        paths, labels = circles(16, generator)
        optimizer.zero_grad()
        (flow.loss(paths, paths, labels) / 16).backward()
        optimizer.step()
    return flow, generator


def test_a_flow_foretells_the_rest_of_a_path_and_draws_one_of_a_class() -> None:
    flow, generator = trained_flow(400)
    paths, labels = circles(200, generator)
    is_seen = (torch.arange(12) < 8).expand(200, 12)
    untold = torch.full_like(labels, 2)
    foretold = flow.draw(paths, is_seen, untold, 0.0)
    assert torch.equal(foretold[:, :8], paths[:, :8])
    assert away(foretold[:, 8:], paths[:, 8:]) < 0.3 * away(paths[:, 7:8], paths[:, 8:])
    assert torch.equal(foretold, flow.draw(paths, is_seen, untold, 0.0))
    # Of nothing but the class, which way around it goes: the cross product of two steps.
    drawn = flow.draw(paths, torch.zeros_like(is_seen), labels, 1.0)
    assert not torch.equal(drawn, flow.draw(paths, torch.zeros_like(is_seen), labels, 1.0))
    step = drawn[:, 4::4] - drawn[:, :-4:4]
    turn = step[:, 0, 0] * step[:, 1, 1] - step[:, 0, 1] * step[:, 1, 0]
    assert ((turn > 0) == (labels == 1)).float().mean() > 0.9
    assert drawn.std(dim=0).mean() > 0.1


def test_what_is_hidden_or_unknown_does_not_count() -> None:
    flow, generator = trained_flow(1)
    paths, labels = circles(3, generator)
    is_seen = (torch.arange(12) < 5).expand(3, 12)
    other = torch.where(is_seen[..., None], paths, 9.0)
    assert torch.equal(
        flow.draw(paths, is_seen, labels, 0.0)[:, 5:], flow.draw(other, is_seen, labels, 0.0)[:, 5:]
    )
    unknown = torch.full_like(paths, torch.nan)
    flow.zero_grad()
    loss = flow.loss(paths, unknown, labels)
    loss.backward()
    assert loss == 0.0
    assert all(p.grad is None or not p.grad.any() for p in flow.parameters())
