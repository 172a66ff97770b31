"""Which frames of a video become its clip: each frame here carries its number in its pixels.

Numbers are told by time among the frames that a player shows, in all the ways files keep it.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.durable.sources import SourceFile
from training.workloads.trajectory.clips import NUM_FRAMES, Frames
from training.workloads.trajectory.imported import FrameChoice, _NoClipError, _read_clip

av = pytest.importorskip("av")

UNIFORM = FrameChoice(sampling="uniform", is_random=False, seed=0)
SEGMENTS = FrameChoice(sampling="segments", is_random=False, seed=0)
CORNERS = np.array([[250, 20], [120, 120]])  # a light corner and a dark one: no other turn of it
LONG = 120


def picture(number: int, width: int = 64, height: int = 64) -> Frames:
    """Eight bits as light and dark blocks in the upper half; the corners of CORNERS below."""
    bits = np.array([number >> bit & 1 for bit in range(8)]).reshape(2, 4) * 200 + 20
    blocks = np.concatenate([bits, np.repeat(CORNERS, 2, axis=1)])
    frame = np.repeat(np.repeat(blocks, height // 4, axis=0), width // 4, axis=1)
    return np.repeat(frame[:, :, None], 3, axis=2).astype(np.uint8)


def numbers(clip: Frames) -> list[int]:
    """The number in each frame of a clip."""
    found = []
    for frame in clip:
        blocks = frame[..., 0].reshape(4, 16, 4, 16)[:2, 4:12, :, 4:12].mean(axis=(1, 3))
        found.append(sum(int(bit > 120) << place for place, bit in enumerate(blocks.flat)))
    return found


def write(
    path: Path,
    times: Sequence[int],
    codec: str = "libx264",
    draw: Callable[[int], Frames] = picture,
    set_up: Callable[[Any], None] = lambda stream: None,
    **options: str,
) -> Path:
    """Encode the frame of each time, in thirtieths of a second; its number is that time."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options={"g": "240", **options})
        stream.height, stream.width = draw(0).shape[:2]
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 30)
        set_up(stream)
        for time in times:
            frame = av.VideoFrame.from_ndarray(draw(time), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 30)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def remuxed(path: Path, out: Path, cut: int = 0, audio_seconds: int = 0, **options: str) -> Path:
    """Copy the packets, `cut` thirtieths earlier, with the sound before them or none."""
    with av.open(str(path)) as source, av.open(str(out), "w", options=options) as container:
        stream = source.streams.video[0]
        copy = container.add_stream_from_template(stream)
        sound = container.add_stream("aac", rate=8000) if audio_seconds else None
        shift = int(Fraction(cut, 30) / stream.time_base)
        for packet in source.demux(stream):
            if packet.size:
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = copy
                container.mux(packet)
        for number in range(audio_seconds if sound else 0):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
            silence.sample_rate, silence.pts = 8000, number * 8000
            container.mux(sound.encode(silence))
        if sound:
            container.mux(sound.encode(None))
    return out


def read(path: Path, choice: FrameChoice = UNIFORM) -> tuple[list[int], dict[str, Any]]:
    clip, facts = _read_clip(source(path), choice)
    return numbers(clip), facts


def source(path: Path) -> SourceFile:
    return SourceFile(name=path.name, folder=path.parent, label="a", split=None)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames 0 to LONG - 1, with a keyframe only in the middle and B-frames that come early."""
    return write(tmp_path_factory.mktemp("long") / "long.mp4", range(LONG), g="60")


def facts(num: int) -> dict[str, Any]:
    return {"frames": num, "width": 64, "height": 64, "frames_per_second": 30.0}


def evenly(first: int, last: int) -> list[int]:
    return [round(place) for place in np.linspace(first, last, NUM_FRAMES)]


@pytest.mark.parametrize("suffix", ["mp4", "mov"])
def test_a_cut_without_encoding_hides_the_frames_before_it(
    long: Path, tmp_path: Path, suffix: str
) -> None:
    """For an edit list, header and packets count hidden frames: the last one froze before."""
    cut = remuxed(long, tmp_path / f"cut.{suffix}", cut=80)
    assert read(cut) == (evenly(80, LONG - 1), facts(LONG - 80))
    chosen = [80 + place for place in SEGMENTS.of(LONG - 80, cut.name)]
    assert read(cut, SEGMENTS)[0] == chosen


def test_a_cut_at_both_ends_hides_the_frames_after_it(long: Path, tmp_path: Path) -> None:
    data = bytearray(long.read_bytes())
    edit = data.index(b"elst") + 12
    milliseconds, start = np.frombuffer(data, ">u4", 2, edit)
    data[edit : edit + 8] = np.array([milliseconds - 3000, start + 512 * 65], ">u4").tobytes()
    (cut := tmp_path / "cut.mp4").write_bytes(data)
    assert read(cut) == (evenly(65, 94), facts(30))


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_begin_when_they_are_shown_however_long_the_sound(
    long: Path, tmp_path: Path, suffix: str
) -> None:
    late = remuxed(long, tmp_path / f"late.{suffix}", cut=-60, audio_seconds=9)
    assert read(late) == (evenly(0, LONG - 1), facts(LONG))


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("x.mkv", "libx264", {}),
        ("x.webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "realtime"}),
        ("x.avi", "libx264", {"bf": "3"}),  # its times are in the order of decoding
        ("x.avi", "mpeg4", {"bf": "2"}),
        ("fragments.mp4", "libx264", {}),
    ],
)
def test_a_constant_rate_gives_the_nearest_frames_whatever_keeps_it(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    path = write(tmp_path / name, range(LONG), codec, **options)
    if name == "fragments.mp4":
        whole, path = path, tmp_path / "x.mp4"
        remuxed(whole, path, movflags="frag_keyframe+empty_moov")
    assert read(path) == (evenly(0, LONG - 1), facts(LONG))


# A GIF keeps hundredths of a second, so its times here are tenths.
@pytest.mark.parametrize(("name", "unit"), [("x.mp4", 1), ("x.mkv", 1), ("x.gif", 3)])
def test_a_variable_rate_is_read_by_time(tmp_path: Path, name: str, unit: int) -> None:
    """As played: a frame is taken for as long as it is on screen, not once for each number."""
    varying = [unit * time for time in (*range(10), 14, 21, 28, 35, 42, 49, 56)]
    path = write(tmp_path / name, varying, "gif" if name == "x.gif" else "libx264")
    uniform = read(path)[0]
    times = unit * (np.linspace(0, 56, NUM_FRAMES) + 0.5)
    assert uniform == [max(t for t in varying if t <= time) for time in times]
    assert sum(number < 10 * unit for number in uniform) == 8, "they take a quarter of the time"
    middles = unit * (np.arange(NUM_FRAMES) + 0.5) * (56 + 3.5) / NUM_FRAMES
    assert read(path, SEGMENTS)[0] == [max(t for t in varying if t <= time) for time in middles]


def test_frames_that_no_decoder_returns_are_not_counted(long: Path, tmp_path: Path) -> None:
    """A recording that was joined between two keyframes: packets without what they build on."""
    out = tmp_path / "joined.mp4"
    with av.open(str(long)) as old, av.open(str(out), "w") as container:
        copy = container.add_stream_from_template(old.streams.video[0])
        for packet in [packet for packet in old.demux(video=0) if packet.size][20:]:
            packet.stream = copy
            container.mux(packet)
    found = read(out)[0]
    assert found == evenly(found[0], LONG - 1) and found[0] >= 20


@pytest.mark.parametrize(("num", "den"), [(2, 1), (1, 2), (4, 3)])
def test_wide_pixels_are_shown_wide(tmp_path: Path, num: int, den: int) -> None:
    """The picture fills the middle square of what is shown; beside it, all is white."""
    width, height = (64 * den // num, 64) if num > den else (64, 64 * num // den)

    def draw(number: int) -> Frames:
        frame = np.full((height, 2 * width, 3), 255, np.uint8)
        frame[:, width // 2 : width // 2 + width] = picture(number, width, height)
        return frame

    def set_ratio(stream: Any) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(num, den)

    path = write(tmp_path / "x.mkv", range(32), draw=draw, set_up=set_ratio)
    clip, found = _read_clip(source(path), UNIFORM)
    assert numbers(clip) == list(range(32))
    assert_corners(clip, CORNERS)
    assert (found["width"], found["height"]) == (2 * width, height), "as it is stored"


def assert_corners(clip: Frames, expected: Any) -> None:
    found = clip[:, 32:, :, 0].reshape(NUM_FRAMES, 2, 16, 2, 32)[:, :, 4:12, :, 4:28]
    assert np.abs(found.mean(axis=(0, 2, 4)) - expected).max() < 15


@pytest.mark.parametrize(
    ("degrees", "hflip", "vflip"),
    [
        *((90, False, False), (180, False, False), (270, False, False)),
        *((0, True, False), (0, False, True), (90, True, False), (90, False, True)),
    ],
)
def test_a_turned_or_mirrored_video_is_shown_upright(
    tmp_path: Path, degrees: int, hflip: bool, vflip: bool
) -> None:
    def turn(stream: Any) -> None:
        stream.set_display_rotation(degrees, hflip=hflip, vflip=vflip)

    clip, _ = _read_clip(source(write(tmp_path / "x.mp4", range(32), set_up=turn)), UNIFORM)
    shown = np.rot90(picture(0), degrees // 90)
    shown = shown[:: -1 if vflip else 1, :: -1 if hflip else 1]
    assert np.abs(clip[0].astype(float) - shown).mean() < 12


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("x.mkv", "libx264", {}),
        ("x.webm", "libvpx", {"deadline": "realtime"}),
        ("x.mp4", "libx264", {}),
        ("x.avi", "mpeg4", {}),
    ],
)
def test_fails_for_a_file_that_ends_too_early(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    whole = write(tmp_path / f"whole-{name}", range(60), codec, **options)
    path = tmp_path / name
    if name == "x.mp4":
        remuxed(whole, path, movflags="faststart")
    data = (path if path.exists() else whole).read_bytes()
    for share in (0.95, 0.5):
        path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(_NoClipError, match=r"has \d+ of \d+ (bytes|frames): it is torn"):
            read(path)


def test_a_recording_of_unknown_length_is_whole(long: Path, tmp_path: Path) -> None:
    """What a browser or a pipe records: its header was never completed."""
    path = tmp_path / "x.webm"
    remuxed(write(tmp_path / "x.mkv", range(60), "libvpx"), path, live="1")
    assert read(path) == (evenly(0, 59), facts(60))


def test_an_avi_that_counts_frames_that_were_dropped_is_whole(tmp_path: Path) -> None:
    """Cameras and capture cards count what they had no time to write."""
    path = write(tmp_path / "x.avi", range(60), "mpeg4")
    data = bytearray(path.read_bytes())
    for at in (data.index(b"avih") + 24, data.index(b"strh") + 40):
        assert int.from_bytes(data[at : at + 4], "little") == 60
        data[at : at + 4] = (75).to_bytes(4, "little")
    path.write_bytes(data)
    assert read(path) == (evenly(0, 59), facts(60))
