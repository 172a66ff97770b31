#!/usr/bin/env bash
# imageio 2.38.1 with its FFMPEG plugin (imageio-ffmpeg 0.8.1) reads a video of variable frame rate
# at a constant one: it repeats frames over pauses and may drop one, so frame numbers, and labels by
# them, mean other pictures. Its pyav plugin, PyAV and decord 0.6.0 read each frame once.
# Seen: of 12 frames FFMPEG reads 93 (mp4; 11 different pictures) and 116 (mkv); the others 12.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  imageio==2.38.1 imageio-ffmpeg==0.8.1 av==18.1.0 decord==0.6.0 numpy==2.4.6 pillow==13.0.0
cd "$folder"
venv/bin/python - <<'PY'
import sys
from fractions import Fraction

import av
import decord
import imageio.v3 as iio
import numpy as np

# As a phone or a screen recorder writes: a rate that follows what happens.
TIMES_MS = [0, 33, 66, 100, 500, 1000, 1033, 1066, 1100, 2000, 2033, 3000]


def write(path):
    with av.open(path, "w") as video:
        stream = video.add_stream("libx264", rate=30)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate(TIMES_MS):
            frame = av.VideoFrame.from_ndarray(
                np.full((64, 64, 3), 20 * number, np.uint8), format="rgb24"
            )
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            video.mux(stream.encode(frame))
        video.mux(stream.encode())


def pyav(path):
    with av.open(path) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


READERS = {
    "imageio FFMPEG": lambda path: iio.imread(path, plugin="FFMPEG"),
    "imageio pyav": lambda path: iio.imread(path, plugin="pyav"),
    "PyAV": pyav,
    "decord": lambda path: decord.VideoReader(path)[:].asnumpy(),
}
ok = True
for path in ("video.mp4", "video.mkv"):
    write(path)
    for name, read in READERS.items():
        frames = read(path)
        numbers = [round(float(np.mean(frame)) / 20) for frame in frames]
        print(f"{path}: {name} reads {len(numbers)} frames, {len(set(numbers))} of 12 pictures")
        ok &= (numbers == list(range(12))) == (name != "imageio FFMPEG")
sys.exit(not ok)
PY
