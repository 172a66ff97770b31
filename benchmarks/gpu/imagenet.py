"""ResNet-50 on a GPU: our train step, torchvision's and timm's, and what its memory allows.

A step of a network like this moves memory more than it computes, so it is held against the rate at
which the device copies. timm is not in the project's environment: `make peers`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.resnet import images_per_second
from benchmarks.gpu.session import REPOSITORY, Session
from training.preflight.standalone import standalone_inputs
from training.settings import changed
from training.workloads.imagenet.config import ImagenetConfig
from training.workloads.imagenet.recipes import epochs_88, full
from training.workloads.imagenet.stages import TrainClassifier

# Bytes that a step moves for each image of 224 pixels: 1.30, 1.33 and 1.21 images a second for each
# GB/s were published for an RTX 3090 (timm), a V100 and an A100 (NVIDIA's examples).
_GB_PER_IMAGE = 0.77
_COPY_BYTES = 2 << 30
_PEERS_PYTHON = Path(".venv-peers/bin/python")
_DRY = {"micro_batch": 8, "global_batch": 8, "eval_batch": 8, "train_size": 64, "low_size": 64}


def imagenet(session: Session) -> None:
    """Images a second of a train step, ours and others', and the share of the copy bandwidth."""
    copied = _copy_gb_per_second(session)
    session.row("copy on the device, read and written, GB/s", f"{copied:.0f}")
    config = _sized(session, full())
    ours = _our_rate(session, config)
    side, batch = config.train_size, config.settings.micro_batch
    share = f"{ours * _GB_PER_IMAGE / copied:.2f} of what copying allows"
    session.row(
        f"full, {batch} x {side} px: images/s", f"{ours:.1f}", "" if session.is_dry else share
    )
    _beside_peers(session, config, ours, compiled=False)
    if session.is_dry:
        return
    compiled = _our_rate(session, changed(config, compile_mode="default"))
    session.row("full, compiled: images/s", f"{compiled:.1f}", f"{compiled / ours:.2f} x eager")
    _beside_peers(session, config, compiled, compiled=True)
    blurred = epochs_88()
    rate = _our_rate(session, changed(blurred, global_batch=blurred.settings.micro_batch))
    what = f"epochs_88, {blurred.settings.micro_batch} x {blurred.train_size} px: images/s"
    session.row(what, f"{rate:.1f}", f"{rate / ours:.2f} x full's")


def _sized(session: Session, config: ImagenetConfig) -> ImagenetConfig:
    """The recipe with steps of one micro-batch; tiny in a dry run."""
    if session.is_dry:
        return changed(config, num_threads=1, **_DRY)
    return changed(config, global_batch=config.settings.micro_batch)


def _our_rate(session: Session, config: ImagenetConfig) -> float:
    """Steps as the engine does them, on a batch of bytes that is on the device."""
    stage = TrainClassifier(config=config)
    torch.manual_seed(0)
    torch.set_num_threads(config.num_threads)
    model = stage.model(standalone_inputs(stage.name, config)).to(session.device).train()
    if config.settings.compile_mode is not None:
        model.compile(mode=config.settings.compile_mode)
    optimizer = stage.optimizer(model)
    batch = {
        name: tensor.to(session.device)
        for name, tensor in stage.example(config.settings.micro_batch).items()
    }
    batch["images"].random_(256)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(session.device.type, torch.bfloat16):
            loss: Tensor = stage.loss(model, batch, 0, 1).total / stage.weight(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return images_per_second(
        step, config.settings.micro_batch, session.device.type, _steps(session)
    )


def _beside_peers(session: Session, config: ImagenetConfig, ours: float, *, compiled: bool) -> None:
    for name in ("torchvision", "timm"):
        python = Path(sys.executable) if find_spec(name) else REPOSITORY / _PEERS_PYTHON
        how = ", compiled" if compiled else ""
        what = f"{name}'s resnet50{how}: images/s"
        if not python.exists():
            session.row(what, "not measured", f"{name} is not here: make peers")
            continue
        found = _peer(session, str(python), name, config, compiled=compiled)
        about = f"{name} {found['version']}, torch {found['torch']}"
        session.row(what, f"{found['rate']:.1f}", f"ours {ours / found['rate']:.2f} x; {about}")


def _peer(
    session: Session, python: str, name: str, config: ImagenetConfig, *, compiled: bool
) -> dict[str, float]:
    """What benchmarks/gpu/resnet.py says in a process of its own."""
    sizes = [f"--batch={config.settings.micro_batch}", f"--side={config.train_size}"]
    more = [f"--steps={_steps(session)}", f"--device={session.device.type}"]
    script = str(Path(__file__).with_name("resnet.py"))
    command = [python, "-P", script, name, *sizes, *more, *["--compiled"] * compiled]
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.num_threads)}
    found: dict[str, float] = session.ask(name, command, env=environment)
    return found


def _steps(session: Session) -> int:
    return 1 if session.is_dry else 20


def _copy_gb_per_second(session: Session) -> float:
    size = _COPY_BYTES // (64 if session.is_dry else 1)
    source, target = (
        torch.empty(size, dtype=torch.uint8, device=session.device).fill_(1) for _ in range(2)
    )
    return 2 * size / min(session.timed(lambda: target.copy_(source)) for _ in range(5)) / 1e9
