"""Pixels are the original's to the bit: of every kind of file, cut to a square, padded, and as tiles."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden_folder import golden_folder, read_json
from safetensors.numpy import load_file

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.data.images.anyres import best_size, cut_tiles, grid_sizes
from llava_fsdp.data.images.preprocess import Preprocessor, load_image, open_image, parse_preprocessor, to_bytes
from llava_fsdp.runtime.errors import ImageError


def preprocessors() -> dict[str, Preprocessor]:
    folder = golden_folder() / "images" / "processors"
    return {p.stem: parse_preprocessor(json.loads(p.read_text()), p) for p in sorted(folder.glob("*.json"))}


def normalised(tiles: np.ndarray, preprocessor: Preprocessor) -> np.ndarray:
    """float32 [..., 3, size, size], through the table that training uses."""
    table = preprocessor.pixel_table()
    return np.stack([table[c][tiles[..., c, :, :]] for c in range(3)], axis=-3)


def pixels(path: Path, mode: str, own: Preprocessor, sizes: list[tuple[int, int]]) -> np.ndarray:
    if mode == "anyres":
        picture = open_image(path, "here", Pixels.llava_v1_5)
        return normalised(np.stack([to_bytes(t) for t in cut_tiles(picture, own.size, sizes)]), own)
    return normalised(load_image(path, own, AspectRatio(mode), "here", Pixels.llava_v1_5), own)


@pytest.mark.parametrize("processor", preprocessors())
def test_pixels(processor: str, count: Callable) -> None:
    golden = read_json("images/pixel_values.json")
    own = preprocessors()[processor]
    sizes = grid_sizes(golden["grid_pinpoints"][processor], own.size)
    for picture in golden["images"]:
        path = golden_folder() / "images" / "files" / picture["file"]
        if "rgb_sha256" in picture:
            rgb = open_image(path, "here", Pixels.llava_v1_5).tobytes()
            assert hashlib.sha256(rgb).hexdigest() == picture["rgb_sha256"], path.name
        for name, expected in picture["values"].items():
            mode, _, of = name.partition("/")
            if of != processor:
                continue
            if "exception" in expected:
                with pytest.raises(ImageError):
                    pixels(path, mode, own, sizes)
                count(f"pixels {mode}", "refused as the original stops")
                continue
            made = pixels(path, mode, own, sizes)
            assert list(made.shape) == expected["shape"], (path.name, name)
            assert hashlib.sha256(made.tobytes()).hexdigest() == expected["sha256"], (path.name, name)
            if mode == "anyres":
                size = open_image(path, "here", Pixels.llava_v1_5).size
                assert list(best_size(size, sizes)) == expected["best_resolution"]
            count(f"pixels {mode}", "equal")


def test_whole_arrays(count: Callable) -> None:
    """The arrays themselves, where the folder has them."""
    file = golden_folder() / "images" / "pixel_values_full.safetensors"
    toy = next(name for name in preprocessors() if name.startswith("toy"))
    own = preprocessors()[toy]
    sizes = grid_sizes(read_json("images/pixel_values.json")["grid_pinpoints"][toy], own.size)
    for name, expected in (load_file(file) if file.is_file() else {}).items():
        mode, _, picture = name.partition("/")
        if expected.shape[-1] == own.size:
            made = pixels(golden_folder() / "images" / "files" / picture, mode, own, sizes)
            assert np.array_equal(made, expected), name
            count("pixel arrays", "equal")
