"""Ultralytics' YOLO from its own yaml, resumed from last.pt as its documentation says."""

# /// script
# dependencies = ["ultralytics"]
# ///

import numpy as np
import reports
from PIL import Image
from ultralytics import YOLO

IMAGES, SIZE, EPOCHS = 64, 32, 6


def make_images(folder):
    """Write images of squares on noise, with their boxes; return the yaml that names them."""
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(IMAGES):
        pixels = rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
        pixels[8:24, 8:24] = 255
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        (folder / "labels" / f"{number}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    path = folder / "data.yaml"
    path.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [square]\n")
    return path


data = make_images(reports.Path(__file__).with_name("data"))
last = reports.CHECKPOINTS / "run" / "weights" / "last.pt"
model = YOLO(last if last.exists() else "yolo11n.yaml")
count = [0]


def stepped(trainer):
    # Ultralytics counts only the batches of this process.
    done = trainer.epoch * len(trainer.train_loader)
    count[0] = max(count[0], done) + 1
    reports.step(count[0])


model.add_callback("on_train_batch_end", stepped)
settings = {"data": data, "epochs": EPOCHS, "imgsz": SIZE, "batch": 4, "workers": 0}
settings |= {"device": "cpu", "amp": False, "plots": False, "val": False}
settings |= {"project": reports.CHECKPOINTS, "name": "run", "exist_ok": True}
model.train(**settings, resume=last.exists())
reports.final(model.model.state_dict())
