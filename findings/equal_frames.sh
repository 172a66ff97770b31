#!/usr/bin/env bash
# Pillow 13.0.0 merges equal neighbours when it writes a GIF, an animated PNG or an animated WebP,
# so a still scene has fewer frames in the file than it was given, and labels by frame number move;
# GIF and PNG give the longer duration, WebP's reader gives none. AVIF and TIFF keep each frame.
# Seen: of 10 frames (4, 4 and 2 equal) GIF, PNG and WebP have 3, AVIF and TIFF 10.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet pillow==13.0.0
cd "$folder"
venv/bin/python - <<'PY'
import sys

from PIL import Image

frames = [Image.new("RGB", (32, 32), (number // 4 * 60, 0, 0)) for number in range(10)]
seen = {}
for form in ("GIF", "PNG", "WEBP", "AVIF", "TIFF"):
    frames[0].save(f"still.{form}", form, save_all=True, append_images=frames[1:], duration=100)
    with Image.open(f"still.{form}") as still:
        seen[form], durations = still.n_frames, []
        for number in range(still.n_frames):
            still.seek(number)
            durations.append(still.info.get("duration"))
    print(f"{form}: {seen[form]} of 10 frames, durations {durations}")
sys.exit(seen != {"GIF": 3, "PNG": 3, "WEBP": 3, "AVIF": 10, "TIFF": 10})
PY
