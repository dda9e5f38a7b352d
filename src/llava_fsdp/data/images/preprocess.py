"""From a picture file to the square of bytes that the vision tower's normalisation takes.

The arithmetic is CLIPImageProcessor's on Pillow, as LLaVA train.py:692-718 uses it. Pictures stay bytes until they
are on the device: a quarter of the memory and of the copying, and the same numbers (`pixel_table`).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from llava_fsdp.config import AspectRatio, PatchMerge, Pixels
from llava_fsdp.data.images import fast_resize
from llava_fsdp.data.images.anyres import Size, cut_tiles, feature_rows
from llava_fsdp.data.images.check import MAX_PIXELS, opened, picture_size, shown_size, to_rgb
from llava_fsdp.data.records.problems import Kind
from llava_fsdp.data.records.record import Record
from llava_fsdp.runtime.errors import ModelError, PictureError
from llava_fsdp.runtime.safe_load import foreign, read_json, refuse_model_code

if TYPE_CHECKING:  # it imports torch, which the processes that make an index must not
    from llava_fsdp.data.batching.workers import Watch

LARGEST_SQUARE = 1 << 13
"""Most pixels on a side of what a tower may ask for."""
MISREAD = 3
"""Heights up to this the original's processor takes for something else (`misread`)."""


@dataclass(frozen=True)
class Preprocessor:
    """A tower's `preprocessor_config.json`, as far as it concerns the size and the values of pixels."""

    size: int
    """Height and width that the tower takes."""
    keep_ratio: bool
    """Resize the short side and cut the centre (CLIP), or resize both sides to the square (SigLIP)."""
    resample: Image.Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def mean_colour(self) -> tuple[int, ...]:
        """What a square is padded with (LLaVA train.py:711)."""
        return tuple(int(m * 255) for m in self.mean)

    def pixel_table(self) -> np.ndarray:
        """float32 [3, 256]: the normalised value of every byte, by channel, as the processor computes it."""
        scaled = (np.arange(256, dtype=np.uint8) * (1 / 255)).astype(np.float32)
        mean, std = np.array(self.mean, dtype=np.float32), np.array(self.std, dtype=np.float32)
        return (scaled[None, :] - mean[:, None]) / std[:, None]


def preprocessor_fields(folder: Path) -> dict[str, Any]:
    """The folder's `preprocessor_config.json`, or what transformers 5 writes into `processor_config.json` instead."""
    path, within = folder / "preprocessor_config.json", folder / "processor_config.json"
    found = next((file for file in (path, within) if file.is_file()), None)
    if found is None:
        return {}
    fields = read_json(found)
    refuse_model_code(fields, found)
    own = fields if found == path else fields.get("image_processor", {})
    return own if isinstance(own, dict) else {}


def read_preprocessor(folder: Path) -> Preprocessor:
    """Read how a folder prepares pictures; sizes may be numbers (older files) or objects.

    Raises:
        ModelError: the folder does not say, or describes no square picture.
    """
    path = folder / "preprocessor_config.json"
    config = preprocessor_fields(folder)
    if not config:
        raise ModelError(f"{folder} has no preprocessor_config.json; copy it from the vision tower's release")
    with foreign(f"{path} describes no preparation of pictures"):
        return parse_preprocessor(config, path)


def parse_preprocessor(config: dict[str, Any], path: Path) -> Preprocessor:
    size, crop = config.get("size"), config.get("crop_size")
    edge = size if isinstance(size, int) else (size or {}).get("shortest_edge")
    keep_ratio = edge is not None
    square = crop if config.get("do_center_crop", False) and keep_ratio else size
    height = square if isinstance(square, int) else (square or {}).get("height", edge)
    width = square if isinstance(square, int) else (square or {}).get("width", edge)
    if height is None or height != width:
        raise ModelError(f"{path}: size={size} and crop_size={crop} describe no square picture")
    if type(height) is not int or not 1 <= height <= LARGEST_SQUARE:
        raise ModelError(f"{path}: size={size} is no number of pixels, 1 to {LARGEST_SQUARE:,}")
    colours = [tuple(float(value) for value in config[key]) for key in ("image_mean", "image_std")]
    if [len(own) for own in colours] != [3, 3] or not all(math.isfinite(v) for own in colours for v in own):
        raise ModelError(f"{path}: image_mean and image_std are not three numbers each")
    if min(colours[1]) <= 0:
        raise ModelError(f"{path}: image_std={config['image_std']} must be above 0")
    return Preprocessor(
        size=height,
        keep_ratio=keep_ratio,
        resample=Image.Resampling(config.get("resample", Image.Resampling.BICUBIC)),
        mean=colours[0],
        std=colours[1],
    )


@dataclass(frozen=True)
class PictureReader:
    """Pictures of one dataset as tiles for one tower."""

    folder: Path | None
    """What the records' paths are relative to."""
    preprocessor: Preprocessor
    aspect: AspectRatio
    """`DataConfig.trained_aspect`"""
    pixels: Pixels
    image_tokens: int
    """Features of a tile."""
    sizes: tuple[Size, ...] = ()
    """anyres: what a picture may be fitted into"""
    merge: PatchMerge = PatchMerge.flat
    watch: "Watch | None" = field(default=None, compare=False)

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the values and the places of features, the pictures themselves apart."""
        # data.pixels=fast was called lean: checkpoints of that time must still resume
        pixels = "lean" if self.pixels is Pixels.fast else self.pixels.value
        form = f"{self.aspect.value} {pixels} {self.merge.value}"
        return f"{self.preprocessor} {self.image_tokens} {self.sizes} {form}"

    @property
    def in_tiles(self) -> bool:
        return self.aspect is AspectRatio.anyres

    def no_tiles(self) -> np.ndarray:
        return np.zeros((0, 3, self.preprocessor.size, self.preprocessor.size), dtype=np.uint8)

    def path(self, record: Record, name: str) -> Path:
        folder = record.folder or self.folder
        assert folder is not None, "checked when the records were opened"
        return folder / name

    def places(self, record: Record, number: int) -> np.ndarray:
        """Rows of the features of one of the record's pictures, in the order of its positions; int64 [positions].

        Raises:
            PictureError: anyres, whose number of positions depends on the picture's size, and it cannot be read.
        """
        if not self.in_tiles:
            return np.arange(self.image_tokens)
        path = self.path(record, record.images[number])
        return self.rows_of(picture_size(path, record.where) if record.sizes is None else record.sizes[number])

    def rows_of(self, size: Size) -> np.ndarray:
        """The same of a picture of this size, in tiles."""
        return feature_rows(size, list(self.sizes), self.preprocessor.size, math.isqrt(self.image_tokens), self.merge)

    @property
    def most_positions(self) -> int:
        """Of any picture: one that fills a grid has nothing taken off."""
        if not self.in_tiles:
            return self.image_tokens
        side, tile = math.isqrt(self.image_tokens), self.preprocessor.size
        return max(len(feature_rows(size, [size], tile, side, self.merge)) for size in self.sizes)

    def count_tiles(self, rows: np.ndarray) -> int:
        """Tiles that `places` of a picture show."""
        return int(rows.max(initial=0)) // self.image_tokens + 1

    def tiles(self, record: Record, name: str) -> np.ndarray:
        """uint8 [tiles, 3, size, size].

        Raises:
            PictureError: as `load_image`.
        """
        path = self.path(record, name)
        if self.watch is not None:
            self.watch.at(record.where, path)
        return self.load(path, record.where)

    def load(self, path: Path, where: str) -> np.ndarray:
        """uint8 [tiles, 3, size, size] of a picture file."""
        if not self.in_tiles:
            return load_image(path, self.preprocessor, self.aspect, where, self.pixels)[None]
        size, sizes = self.preprocessor.size, list(self.sizes)
        if self.pixels is Pixels.fast:
            with opened(path, where) as file:
                tiles = fast_resize.tiles(file, size, sizes, f"{where}: {path}")
        else:
            tiles = cut_tiles(open_picture(path, where, self.pixels), size, sizes)
        return np.stack([to_bytes(t) for t in tiles])


def load_image(
    path: Path, preprocessor: Preprocessor, aspect: AspectRatio, where: str, pixels: Pixels = Pixels.exact
) -> np.ndarray:
    """The picture as one tile, uint8 [3, size, size].

    Raises:
        PictureError: with what is wrong as its `kind` (check.py); `where` names the record.
    """
    if pixels is Pixels.fast:
        return load_lean(path, preprocessor, aspect, where)
    picture = open_picture(path, where, pixels)
    check_enlarged(picture.size, preprocessor, aspect, f"{where}: {path}")
    if aspect is AspectRatio.pad and max(picture.size) > MISREAD:
        return resize_padded(picture, preprocessor)
    if aspect is AspectRatio.pad:
        picture = pad_to_square(picture, preprocessor.mean_colour)
    if pixels is Pixels.llava_v1_5:
        picture = misread(picture, f"{where}: {path}")
    return resize(picture, preprocessor)


def load_lean(path: Path, preprocessor: Preprocessor, aspect: AspectRatio, where: str) -> np.ndarray:
    what, size, resample = f"{where}: {path}", preprocessor.size, preprocessor.resample
    with opened(path, where) as file:
        check_enlarged(shown_size(file), preprocessor, aspect, what)
        if aspect is AspectRatio.pad:
            return to_bytes(fast_resize.padded(file, size, resample, preprocessor.mean_colour, what))
        if preprocessor.keep_ratio:
            return to_bytes(fast_resize.cut_square(file, size, resample, what))
        return to_bytes(fast_resize.squeezed(file, size, resample, what))


def open_picture(path: Path, where: str, pixels: Pixels) -> Image.Image:
    """The image in RGB, the way round that its EXIF orientation says and transparency on white, unless the original's
    pixels are wanted: as stored, transparency ignored."""
    with opened(path, where) as picture:
        if pixels is Pixels.llava_v1_5:
            return picture.convert("RGB")
        return to_rgb(ImageOps.exif_transpose(picture), f"{where}: {path}")


def check_enlarged(shape: Size, preprocessor: Preprocessor, aspect: AspectRatio, what: str) -> None:
    """A few bytes can hold a picture so narrow that a square around it, or its enlargement, would fill the memory."""
    short, long = sorted(shape)
    enlarged = long * long if aspect is AspectRatio.pad else preprocessor.size * preprocessor.size * long // short
    if enlarged > MAX_PIXELS:
        raise PictureError(
            f"{what} is {shape[0]} x {shape[1]}; with data.image_aspect_ratio={aspect.value} it would need {enlarged} "
            f"pixels, over the limit of {MAX_PIXELS}: crop it",
            Kind.image_shape,
        )


def resize(picture: Image.Image, preprocessor: Preprocessor) -> np.ndarray:
    """An RGB picture as uint8 [3, size, size]."""
    size = preprocessor.size
    if not preprocessor.keep_ratio:
        return to_bytes(picture.resize((size, size), preprocessor.resample))
    short, long = sorted(picture.size)
    new_long = int(size * long / short)
    shape = (size, new_long) if picture.width <= picture.height else (new_long, size)
    resized = picture.resize(shape, preprocessor.resample)
    top, left = (resized.height - size) // 2, (resized.width - size) // 2
    return to_bytes(resized.crop((left, top, left + size, top + size)))


def resize_padded(picture: Image.Image, preprocessor: Preprocessor) -> np.ndarray:
    """`resize` of `pad_to_square`, the same to the bit.

    Pillow resizes the lines first, each by itself, and rounds to bytes; lines of one colour keep it. So those above and
    below a wide picture can be added after that, a third of the whole work less for 4:3.
    """
    size, side = preprocessor.size, max(picture.size)
    if picture.width <= picture.height:
        return resize(pad_to_square(picture, preprocessor.mean_colour), preprocessor)
    lines = Image.new("RGB", (size, side), preprocessor.mean_colour)
    lines.paste(picture.resize((size, picture.height), preprocessor.resample), (0, (side - picture.height) // 2))
    return to_bytes(lines.resize((size, size), preprocessor.resample))


def misread(picture: Image.Image, what: str) -> Image.Image:
    """transformers 4.37 takes a height of 3 for the channels; a height of 1 it refuses."""
    check_height(picture.height, what)
    if picture.height == 3:
        return Image.fromarray(np.ascontiguousarray(np.asarray(picture).transpose(1, 2, 0)))
    return picture


def check_height(stored: int, what: str) -> None:
    if stored == 1:
        raise PictureError(
            f"{what} has height 1, at which the original stops; data.pixels=exact reads it", Kind.image_shape
        )


def to_bytes(picture: Image.Image) -> np.ndarray:
    """uint8 [3, height, width]"""
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def pad_to_square(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square of the mean colour (LLaVA mm_utils.py:152-163)."""
    side = max(picture.size)
    if picture.width == picture.height:
        return picture
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square
