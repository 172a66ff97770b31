"""README's picture is of the page as it is now. After a change of it, with Chromium on the PATH:

make demo && .venv/bin/python -m tests.test_pictures out/demo/report.html
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

REPOSITORY = Path(__file__).parent.parent
PICTURE = REPOSITORY / "docs" / "demo-report.png"
# The page's template, and who draws into it; uPlot's version is in the page.
MADE_BY = ("contract/report/page.html", "contract/report/__init__.py")
WIDTH, HEIGHT = 1000, 1150


def made_by() -> str:
    sources = b"".join((REPOSITORY / name).read_bytes() for name in MADE_BY)
    return hashlib.sha256(sources).hexdigest()


def take(page: Path) -> None:
    """Photograph the top of a report, light, and write into the picture what it was made by."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--blink-settings=preferredColorScheme=1", "--virtual-time-budget=3000"]
        command += [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        command += [f"--screenshot={shot}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        about = PngImagePlugin.PngInfo()
        about.add_text("made_by", made_by())
        picture = Image.open(shot).convert("RGB").quantize(64)
        picture.save(PICTURE, optimize=True, pnginfo=about)


def test_the_picture_shows_the_page_as_it_is_now() -> None:
    with Image.open(PICTURE) as picture:
        assert picture.info.get("made_by") == made_by(), __doc__


if __name__ == "__main__":
    take(Path(sys.argv[1]))
