"""Forecasts of where the ball goes, from the places where it was found.

Places are in half frames from the centre. B clips, T frames, F features, E width, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# These scale offsets from the last place, and steps from frame to frame, to about 1.
_OFFSET_SCALE, _STEP_SCALE = 2.0, 8.0
# The numbers of features of a frame (offset, step, whether it is seen) and of a clip besides (the
# last place).
_NUM_OF_FRAME, _NUM_OF_CLIP = 5, 2
# A flow's starts per clip in a training step, the share of them that are forecasts, and the steps
# in which a path is drawn.
_NUM_STARTS, _FORECAST_SHARE, _NUM_DRAWING = 16, 0.7, 12


def place_error(found_BT2: Tensor, true_BT2: Tensor) -> Tensor:
    """Return the error of places (B, T, 2), averaged over frames and summed over clips.

    Unknown places are NaN, as all are in a clip without a track, and count as found exactly.
    """
    true_BT2 = torch.where(true_BT2.isnan(), found_BT2.detach(), true_BT2)
    away_BT2 = F.smooth_l1_loss(found_BT2, true_BT2, reduction="none", beta=0.1)
    error: Tensor = away_BT2.sum(dim=2).mean(dim=1).sum()
    return error


class _ResidualNet(nn.Module):
    """Three residual blocks, each a norm and two layers. Its initial output is zero."""

    def __init__(self, num_inputs: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(num_inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(3)
        )
        self.tell = nn.Linear(width, num_outputs)
        nn.init.zeros_(self.tell.weight)
        nn.init.zeros_(self.tell.bias)

    def forward(self, x_BF: Tensor, about_BE: Tensor | None = None) -> Tensor:
        x_BE = self.embed(x_BF)
        if about_BE is not None:
            x_BE = x_BE + about_BE
        for block in self.blocks:
            x_BE = x_BE + block(x_BE)
        out: Tensor = self.tell(x_BE)
        return out.float()


class FutureForecast(nn.Module):
    """Forecasts where the ball is a few frames after each frame, from the places up to it.

    Every frame of a clip is thus an example, not only its last. No gradient flows back, so the
    forecast does not change the places.
    """

    def __init__(self, *, num_frames: int, width: int = 128) -> None:
        super().__init__()
        num_inputs = num_frames * _NUM_OF_FRAME + _NUM_OF_CLIP
        self.net = _ResidualNet(num_inputs, 2, width)

    def forward(self, place_BT2: Tensor) -> Tensor:
        """Return future places (B, T, 2)."""
        num_frames = place_BT2.shape[1]
        # The places up to each frame are shifted to end at the same input, so how the ball
        # continues is learned once, not for each frame.
        frames_T = torch.arange(num_frames, device=place_BT2.device)
        up_to_TT = frames_T - frames_T.flip(0)[:, None]
        place_NT2 = place_BT2.detach()[:, up_to_TT.clamp(min=0)].flatten(0, 1)
        is_seen_NT = (up_to_TT >= 0).repeat(len(place_BT2), 1)
        seen_NF, last_N2 = _seen(place_NT2, is_seen_NT, is_seen_NT)
        future_N2 = last_N2 + self.net(seen_NF) / _OFFSET_SCALE
        future_BT2: Tensor = future_N2.view(place_BT2.shape)
        return future_BT2


class PathFlow(nn.Module):
    """Draws paths (B, T, 2) through the places that are seen, for clips of one class or any.

    Flow matching (Lipman et al. 2023, arXiv:2210.02747): the network learns the velocity that
    carries noise in a straight line to a path. From zero, its first step is the mean of all paths,
    which is a forecast; from noise, several steps draw a path.
    """

    def __init__(self, *, num_frames: int, num_classes: int, width: int = 256) -> None:
        super().__init__()
        self.num_frames, self.num_classes = num_frames, num_classes
        # In addition to what is seen: the path so far, and the time of the flow.
        num_inputs = num_frames * (_NUM_OF_FRAME + 2) + _NUM_OF_CLIP + 1
        self.net = _ResidualNet(num_inputs, 2 * num_frames, width)
        # The last embedding means that the class is not given.
        self.embed_class = nn.Embedding(num_classes + 1, width)

    def loss(self, found_BT2: Tensor, true_BT2: Tensor, labels_B: Tensor) -> Tensor:
        """Return the error of velocities, with random parts of each clip seen, summed over clips.

        A true place that is NaN counts as forecast exactly.
        """
        found_NT2, true_NT2, labels_N = (
            each.detach().repeat_interleave(_NUM_STARTS, dim=0)
            for each in (found_BT2, true_BT2, labels_B)
        )
        is_seen_NT = self._random_parts(len(labels_N), found_NT2.device)
        # Half of the classes are given, and nearly all if nothing else is.
        told_share_N = torch.where(is_seen_NT.any(dim=1), 0.5, 0.9)
        is_told_N = torch.rand_like(told_share_N) < told_share_N
        classes_N = torch.where(is_told_N, labels_N, self.num_classes)
        seen_NF, last_N2 = self._seen(found_NT2, is_seen_NT)
        path_NT2 = _OFFSET_SCALE * (true_NT2 - last_N2[:, None])
        path_NT2 = torch.where(true_NT2.isnan(), 0.0, path_NT2)
        is_drawn_N11 = torch.rand_like(path_NT2[:, :1, :1]) >= _FORECAST_SHARE
        noise_NT2 = torch.randn_like(path_NT2) * is_drawn_N11
        time_N11 = torch.rand_like(path_NT2[:, :1, :1]) * is_drawn_N11
        between_NT2 = noise_NT2 + time_N11 * (path_NT2 - noise_NT2)
        velocity_NT2 = self._velocity(between_NT2, time_N11, seen_NF, classes_N)
        wanted_NT2 = torch.where(true_NT2.isnan(), velocity_NT2.detach(), path_NT2 - noise_NT2)
        away_NT2 = F.smooth_l1_loss(velocity_NT2, wanted_NT2, reduction="none", beta=0.2)
        return away_NT2.sum(dim=2).mean(dim=1).sum() / _NUM_STARTS

    @torch.no_grad()
    def draw(
        self, found_BT2: Tensor, is_seen_BT: Tensor, classes_B: Tensor, temperature: float
    ) -> Tensor:
        """Draw paths (B, T, 2), which keep the places seen; temperature 0 gives the mean path."""
        seen_BF, last_B2 = self._seen(found_BT2, is_seen_BT)
        path_BT2 = temperature * torch.randn_like(found_BT2)
        num_steps = _NUM_DRAWING if temperature else 1
        for step in range(num_steps):
            time_B11 = torch.full_like(path_BT2[:, :1, :1], step / num_steps)
            path_BT2 = path_BT2 + self._velocity(path_BT2, time_B11, seen_BF, classes_B) / num_steps
        path_BT2 = last_B2[:, None] + path_BT2 / _OFFSET_SCALE
        return torch.where(is_seen_BT[..., None], found_BT2, path_BT2)

    def _random_parts(self, count: int, device: torch.device) -> Tensor:
        """Draw what is seen of each clip, (N, T): its start; for some also the end, or nothing."""
        frames_T = torch.arange(self.num_frames, device=device)
        given_N1 = torch.randint(1, self.num_frames, (count, 1), device=device)
        task_N1 = torch.rand(count, 1, device=device)
        is_start_NT = (frames_T < given_N1) & (task_N1 > 0.15)
        return is_start_NT | (frames_T >= self.num_frames - 2) & (task_N1 > 0.85)

    def _seen(self, found_BT2: Tensor, is_seen_BT: Tensor) -> tuple[Tensor, Tensor]:
        # Paths begin at the last place before a gap, not at the end that interpolation sees.
        is_start_BT = is_seen_BT.cumprod(dim=1).bool()
        return _seen(found_BT2, is_seen_BT, is_start_BT)

    def _velocity(
        self, path_BT2: Tensor, time_B11: Tensor, seen_BF: Tensor, classes_B: Tensor
    ) -> Tensor:
        """Return the velocity of paths, which are noise at time 0 and a clip's at time 1."""
        x_BF = torch.cat([path_BT2.flatten(1), time_B11[:, :, 0], seen_BF], dim=1)
        out: Tensor = self.net(x_BF, self.embed_class(classes_B))
        return out.view(path_BT2.shape)


def _seen(place_BT2: Tensor, is_seen_BT: Tensor, is_start_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (B, F) of the places seen, and the start's last place, (B, 2), or 0."""
    frames_T = torch.arange(place_BT2.shape[1], device=place_BT2.device)
    last_B11 = (frames_T * is_start_BT).amax(dim=1)[:, None, None]
    last_B12 = place_BT2.gather(1, last_B11.expand(-1, 1, 2))
    last_B12 = last_B12 * is_start_BT.any(dim=1)[:, None, None]
    step_BT2 = F.pad(place_BT2[:, 1:] - place_BT2[:, :-1], (0, 0, 1, 0))
    is_step_BT = is_seen_BT & F.pad(is_seen_BT[:, :-1], (1, 0))
    of_frames = (
        _OFFSET_SCALE * (place_BT2 - last_B12) * is_seen_BT[..., None],
        _STEP_SCALE * step_BT2 * is_step_BT[..., None],
        is_seen_BT[..., None].to(place_BT2),
    )
    last_B2 = last_B12[:, 0]
    return torch.cat([torch.cat(of_frames, dim=2).flatten(1), last_B2], dim=1), last_B2
