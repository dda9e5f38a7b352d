"""The fast path shows the same picture in the same place; where nothing is resized, the same bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from llava_fsdp.config import AspectRatio, PatchMerge, Pixels
from llava_fsdp.data.images.check import examine, open_checked
from llava_fsdp.data.images.fast_resize import decode, lines_within
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, Preprocessor, load_image
from llava_fsdp.runtime.errors import ImageError

CLIP = Preprocessor(56, True, Image.Resampling.BICUBIC, (0.48145466, 0.4578275, 0.40821073), (1, 1, 1))
SIGLIP = replace(CLIP, keep_ratio=False)
WAYS = {
    "padded": (CLIP, AspectRatio.pad),
    "cut": (CLIP, AspectRatio.square),
    "squeezed": (SIGLIP, AspectRatio.square),
}
SHAPES = [(64, 48), (48, 64), (200, 131), (333, 500), (500, 333), (900, 500), (56, 90), (30, 20), (112, 112), (57, 56)]


def photo(width: int, height: int) -> Image.Image:
    """Smooth areas, edges and a little grain."""
    dice = np.random.default_rng(width)
    small = Image.fromarray(dice.integers(40, 215, (6, 8, 3), dtype=np.uint8)).resize((width, height))
    pixels = np.asarray(small).astype(int)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (200, 30, 60)
    return Image.fromarray((pixels + dice.integers(-4, 5, pixels.shape)).clip(0, 255).astype(np.uint8))


def both(path: Path, preprocessor: Preprocessor, aspect: AspectRatio) -> tuple[np.ndarray, np.ndarray]:
    made = [load_image(path, preprocessor, aspect, "x", pixels) for pixels in (Pixels.exact, Pixels.fast)]
    return made[0].astype(int), made[1].astype(int)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_nearly_the_same_picture(ending: str, way: str, shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    photo(*shape).save(path)
    exact, fast = both(path, *WAYS[way])
    assert exact.shape == fast.shape == (3, 56, 56)
    if way == "padded":
        where = [lines_within(n, max(shape), 56)[:2] for n in shape[::-1]]
        bars = np.ones((56, 56), dtype=bool)
        bars[slice(*where[0]), slice(*where[1])] = False
        assert (fast[:, bars] == np.array(CLIP.mean_colour)[:, None]).all()
        # the exact path blends the two at the edge, as far as its filter reaches
        exact, fast = (
            p[:, where[0][0] + 2 : where[0][1] - 2, where[1][0] + 2 : where[1][1] - 2] for p in (exact, fast)
        )
    assert np.abs(exact - fast).mean() < (1 if ending == "png" else 2)


def test_lines_that_a_picture_fills() -> None:
    assert lines_within(480, 640, 336) == (42, 294, 0.0, 480.0)
    assert lines_within(640, 640, 336) == (0, 336, 0.0, 640.0)
    # of 500 lines on 56 the 333 in the middle, from the 83rd on: those from 9.296 to 46.592
    first, end, begin, stop = lines_within(333, 500, 56)
    assert (first, end) == (10, 46) and (begin, stop) == pytest.approx((10 * 500 / 56 - 83, 46 * 500 / 56 - 83))
    assert lines_within(1, 1000, 56) == (27, 28, 0.0, 1.0)
    for length in range(1, 400):
        first, end, begin, stop = lines_within(length, 400, 56)
        assert 0 <= first < end <= 56 and 0 <= begin < stop <= length


@pytest.mark.parametrize(
    ("way", "shape"),
    [("padded", (56, 56)), ("padded", (56, 42)), ("padded", (41, 56)), ("cut", (56, 80)), ("cut", (81, 56)),
     ("squeezed", (56, 56)), ("squeezed", (40, 50)), ("cut", (30, 30)), ("padded", (50, 50))],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_equal_where_nothing_is_reduced(ending: str, way: str, shape: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    photo(*shape).save(path)
    exact, fast = both(path, *WAYS[way])
    assert np.array_equal(exact, fast)


@pytest.mark.parametrize("shape", [(448, 500), (449, 500), (447, 500), (223, 900), (60, 56), (1000, 1000), (112, 112)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_never_decoded_below_what_is_needed(orientation: int, shape: tuple[int, int], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photo(*shape).save(tmp_path / "a.jpg", exif=exif)
    shown = shape if orientation == 1 else shape[::-1]
    for needed in ((56, 56), (56, 40), (40, 56), (shown[0] // 2, shown[1] // 2), (shown[0] // 2 + 1, 1)):
        with open_checked(tmp_path / "a.jpg", "x") as file:
            size = decode(file, needed, "x").image.size
        assert size[0] >= min(needed[0], shown[0]) and size[1] >= min(needed[1], shown[1])
        scale = next(s for s in (8, 4, 2, 1) if shown[0] // s >= needed[0] and shown[1] // s >= needed[1])
        assert size == (-(-shown[0] // scale), -(-shown[1] // scale))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("way", WAYS)
def test_turned_as_shown(way: str, orientation: int, tmp_path: Path) -> None:
    """Also where the decoder's last pixels lie beyond the edge and are turned to the front."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photo(449, 457).save(tmp_path / "a.jpg", exif=exif, quality=95)
    exact, fast = both(tmp_path / "a.jpg", *WAYS[way])
    assert np.abs(exact - fast)[:, 2:-2, 2:-2].mean() < 1.5


def test_tiles_are_those_of_the_full_size(tmp_path: Path) -> None:
    """Half of an odd size has other proportions; the grid and its positions are those of the file's own size."""
    sizes = ((112, 56), (56, 112), (112, 112))
    readers = [
        ImageReader(tmp_path, CLIP, ImageTokens(AspectRatio.anyres, CLIP.size, 16, sizes, PatchMerge.spatial), pixels)
        for pixels in (Pixels.exact, Pixels.fast)
    ]
    for shape in [(601, 301), (301, 602), (999, 998), (40, 30), (112, 56)]:
        photo(*shape).save(tmp_path / "a.jpg")
        assert " lean " in readers[1].fingerprint, "checkpoints of before the renaming resume"
        exact, fast = (reader.load(tmp_path / "a.jpg", "x").astype(int) for reader in readers)
        assert exact.shape == fast.shape, shape
        assert np.abs(exact - fast).mean() < 4, shape
    assert readers[0].fingerprint != readers[1].fingerprint


@pytest.mark.parametrize("way", WAYS)
def test_refuses_what_the_exact_path_refuses(way: str, tmp_path: Path) -> None:
    Image.new("L", (1, 65000)).save(tmp_path / "thin.png")
    photo(300, 200).save(tmp_path / "cut.jpg")
    data = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    Image.fromarray(np.full((60, 60), -1, dtype=np.float32)).save(tmp_path / "negative.tiff")
    kinds = {"thin.png": "image_shape", "cut.jpg": "image_truncated", "negative.tiff": "image_unreadable"}
    for name, kind in kinds.items():
        for pixels in (Pixels.exact, Pixels.fast):
            with pytest.raises(ImageError) as caught:
                load_image(tmp_path / name, *WAYS[way], "x", pixels)
            assert caught.value.kind == kind, (name, pixels)
    assert examine(tmp_path / "thin.png", "x", full=True).size == (1, 65000)
