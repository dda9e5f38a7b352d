"""Read images and videos as square uint8 tiles, the inputs of the vision tower. The values are normalised later, on the
device.

The resizing arithmetic is that of transformers' CLIPImageProcessor with Pillow, as LLaVA uses it (LLaVA
train.py:692-718).

`where` and `what` name a record and an image in error messages; an ImageError has a `kind` (check.py). A number is the
index of an image or video in its record.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.data.images import fast_resize
from llava_fsdp.data.images.anyres import Size, cut_tiles
from llava_fsdp.data.images.check import (
    MAX_PIXELS,
    ImageFile,
    open_checked,
    shown_size,
    to_rgb,
)
from llava_fsdp.data.images.image_source import ImageSource, ReadingStatus
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.video import VideoSampling, examine_video, read_frames
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import VIDEOS_NEED, Record, is_video
from llava_fsdp.runtime.errors import ImageError, ModelError
from llava_fsdp.runtime.files.safe_load import library_errors, read_json, refuse_model_code

LARGEST_SQUARE = 1 << 13
"""Largest width and height in pixels that is accepted for a vision tower's input."""
MISREAD = 3
"""Greatest height in pixels of the images that LLaVA's image processor misreads: it takes the height for the
channels."""


@dataclass(frozen=True)
class Preprocessor:
    """Size and normalisation of a vision tower's input, read from its `preprocessor_config.json`."""

    size: int
    """Height and width of the input in pixels."""
    keep_ratio: bool
    """True: resize the short side and crop the centre (CLIP); False: resize both sides to the square (SigLIP)."""
    resample: Image.Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def mean_colour(self) -> tuple[int, ...]:
        """The mean that normalisation subtracts, in RGB from 0 to 255: the padding's colour (LLaVA train.py:711)."""
        return tuple(int(m * 255) for m in self.mean)

    def pixel_table(self) -> np.ndarray:
        """Return the normalised value of each byte value in each colour channel, float32 [3, 256]."""
        scaled = (np.arange(256, dtype=np.uint8) * (1 / 255)).astype(np.float32)
        mean, std = np.array(self.mean, dtype=np.float32), np.array(self.std, dtype=np.float32)
        return (scaled[None, :] - mean[:, None]) / std[:, None]


def preprocessor_fields(folder: Path) -> dict[str, Any]:
    """Return the content of `preprocessor_config.json` in a model folder. Without this file, return the section
    `image_processor` of the `processor_config.json` that transformers 5 writes; empty without either file. Raise
    ModelError if the file names Python code of the model."""
    path, combined = folder / "preprocessor_config.json", folder / "processor_config.json"
    existing = next((file for file in (path, combined) if file.is_file()), None)
    if existing is None:
        return {}
    fields = read_json(existing)
    refuse_model_code(fields, existing)
    if existing == combined:
        fields = fields.get("image_processor", {})
    return fields if isinstance(fields, dict) else {}


def read_preprocessor(folder: Path) -> Preprocessor:
    """Read `preprocessor_config.json` in a model folder. Raise ModelError if it is missing or does not describe a
    square image. A size in it may be a number (older files) or an object."""
    path = folder / "preprocessor_config.json"
    config = preprocessor_fields(folder)
    if not config:
        raise ModelError(f"{folder} has no preprocessor_config.json; copy it from the vision tower's release")
    with library_errors(f"{path} describes no preparation of images"):
        return parse_preprocessor(config, path)


def parse_preprocessor(config: dict[str, Any], path: Path) -> Preprocessor:
    """Convert the content of a `preprocessor_config.json`; raise ModelError if it describes no square image."""
    size, crop = config.get("size"), config.get("crop_size")
    edge = size if isinstance(size, int) else (size or {}).get("shortest_edge")
    keep_ratio = edge is not None
    # only an image that is resized by its shortest edge, and keeps its ratio, is cropped
    square = crop if config.get("do_center_crop", False) and keep_ratio else size
    height = square if isinstance(square, int) else (square or {}).get("height", edge)
    width = square if isinstance(square, int) else (square or {}).get("width", edge)
    if height is None or height != width:
        raise ModelError(f"{path}: size={size} and crop_size={crop} describe no square image")
    if type(height) is not int or not 1 <= height <= LARGEST_SQUARE:
        raise ModelError(f"{path}: size={size} is no number of pixels, 1 to {LARGEST_SQUARE:,}")
    mean, std = (tuple(float(value) for value in config[key]) for key in ("image_mean", "image_std"))
    if len(mean) != 3 or len(std) != 3 or not all(map(math.isfinite, mean + std)):
        raise ModelError(f"{path}: image_mean and image_std are not three numbers each")
    if min(std) <= 0:
        raise ModelError(f"{path}: image_std={config['image_std']} must be above 0")
    return Preprocessor(
        size=height,
        keep_ratio=keep_ratio,
        resample=Image.Resampling(config.get("resample", Image.Resampling.BICUBIC)),
        mean=mean,
        std=std,
    )


@dataclass(frozen=True)
class ImageReader(ImageSource):
    """Reads the images of one dataset as tiles for one vision tower."""

    folder: Path | None
    preprocessor: Preprocessor
    tokens: ImageTokens
    pixels: Pixels
    sampling: VideoSampling | None = None
    allow_links: bool = True
    status: ReadingStatus | None = field(default=None, compare=False)

    @property
    def fingerprint(self) -> str:
        """Text that changes with every setting that affects pixel values or the order of vision features."""
        # data.pixels=fast was once called lean: checkpoints of that time must still resume
        pixels = "lean" if self.pixels is Pixels.fast else self.pixels.value
        rule = self.tokens
        form = f"{rule.aspect.value} {pixels} {rule.merge.value}"
        # only anyres_max shrinks grids of features, and only with it are videos read
        limit = f" {rule.max_tiles} {self.sampling}" if rule.aspect is AspectRatio.anyres_max else ""
        return f"{self.preprocessor} {rule.features} {rule.sizes} {form}{limit}"

    @property
    def one_tile(self) -> AspectRatio:
        """How an image that is not cut into several tiles is made square. LLaVA-OneVision pads the images of a sample
        with several (transformers image_processing_pil_llava_onevision.py)."""
        return AspectRatio.pad if self.tokens.aspect is AspectRatio.anyres_max else self.tokens.aspect

    @property
    def one_tile_preprocessor(self) -> Preprocessor:
        """The Preprocessor of an image that is not cut into several tiles. With anyres_max, the image is resized to the
        square without a crop and with the bicubic filter, as LLaVA-OneVision also resizes images that are cut into
        tiles, whatever the vision tower's own preprocessing is."""
        if self.tokens.aspect is not AspectRatio.anyres_max:
            return self.preprocessor
        return replace(self.preprocessor, keep_ratio=False, resample=Image.Resampling.BICUBIC)

    def no_tiles(self) -> np.ndarray:
        return np.zeros((0, 3, self.preprocessor.size, self.preprocessor.size), dtype=np.uint8)

    @property
    def form(self) -> str:
        return self.tokens.aspect.value

    @property
    def cause(self) -> str:
        return self.tokens.cause

    def needs_size(self, images: int) -> bool:
        return self.tokens.needs_size(images)

    def image_rows(self, record: Record, number: int) -> np.ndarray:
        """Return the tokens of an image or video, one array element for each: the index of the vision feature that the
        token is, or with anyres_max the indices and weights of four (`ImageTokens`). Raise ImageError if the image's
        size is needed and cannot be read. `number`: index of the image in its record."""
        if is_video(record.images[number]):
            return self.tokens.of_video(self.count_frames(record, number))
        images = record.num_images
        return self.tokens.of(self.size(record, number) if self.tokens.needs_size(images) else None, images)

    def count_tiles(self, record: Record, number: int, tokens: int = 0) -> int:
        """Return the number of tiles of an image, or of sampled frames of a video. `tokens` is used only by the classes
        of models that count the work for an image in tokens."""
        if is_video(record.images[number]):
            return self.count_frames(record, number)
        images = record.num_images
        return self.tokens.count_tiles(self.size(record, number) if self.tokens.needs_size(images) else None, images)

    def count_frames(self, record: Record, number: int) -> int:
        """Return how many frames of a record's video are sampled: by its length in the index, or else in its file."""
        if record.frames is None:
            path = self.path(record, record.images[number])
            assert isinstance(path, Path), "a video is never in the record itself"
            return self.frames_of(path, record.where)
        frames, rate = record.frames[number]
        return len(self.video_sampling(record.where).numbers(frames, rate))

    def frames_of(self, path: Path, where: str) -> int:
        """Return how many frames of a video file are sampled; raise ImageError if it cannot be read."""
        sampling = self.video_sampling(where)
        facts = examine_video(path, where, sampling, full=False)
        return len(sampling.numbers(facts.frames, facts.rate))

    def video_sampling(self, where: str) -> VideoSampling:
        """Return `sampling`; raise ImageError if videos are not read."""
        if self.sampling is None:
            raise ImageError(f"{where} has a video, and {VIDEOS_NEED}", Kind.media_not_read)
        return self.sampling

    def has_image_facts(self, record: Record) -> bool:
        """Return whether the index has what the numbers of tokens of a record's images and videos depend on: the length
        of each video and, if images are cut into tiles, each image's size. They are 0 if a file could not be read."""
        assert record.sizes is not None and record.frames is not None
        needs_size = self.tokens.needs_size(record.num_images)
        for name, size, (frame_count, _rate) in zip(record.images, record.sizes, record.frames, strict=True):
            if is_video(name):
                if frame_count <= 0:
                    return False
            elif needs_size and min(size) <= 0:
                return False
        return True

    def check_shape(self, size: Size, stored_height: int, num_images: int, what: str) -> None:
        """Raise ImageError if an image would take too much memory when it is made one square tile, or if LLaVA cannot
        read it. An image that is cut into several tiles (`needs_size`) is not made a square.

        Args:
            size: (width, height) in pixels after turning by the EXIF orientation.
            stored_height: height before turning; LLaVA does not turn images.
            num_images: number of images of its record.
            what: names the image in errors.
        """
        if not self.tokens.needs_size(num_images):
            check_enlarged(size, self.preprocessor, self.one_tile, what)
        if self.pixels is Pixels.llava_v1_5:
            check_height(stored_height, what)

    def tiles(self, record: Record, name: str) -> np.ndarray:
        """Read an image or video of a record as tiles, uint8 [tiles, 3, size, size]. Raise ImageError if it cannot be
        read or has changed since the dataset was examined."""
        path, sizes = self.begin_reading(record, name)
        tiles = self.load(path, record.where, record.num_images, sizes)
        if is_video(name) and len(tiles) != (expected := self.count_frames(record, record.images.index(name))):
            raise ImageError(
                f"{record.where}: video {path} gives {len(tiles)} frames, and gave {expected} when the dataset was "
                "examined; take it from its source again, or examine the dataset again",
                Kind.image_unreadable,
            )
        return tiles

    def load(self, path: ImageFile, where: str, num_images: int = 1, sizes: Collection[Size] = ()) -> np.ndarray:
        """Read an image file or a video as tiles, uint8 [tiles, 3, size, size]. Each frame of a video is squeezed to
        one tile, bicubic for every vision tower, as transformers' LlavaOnevisionVideoProcessor does.

        Args:
            where: names the record in errors.
            num_images: number of images of the record, which may decide whether an image is cut into several tiles.
            sizes: sizes for which the tokens of an image of several tiles were counted; another raises ImageError.
        """
        if isinstance(path, Path) and is_video(path):
            square = replace(self.preprocessor, keep_ratio=False, resample=Image.Resampling.BICUBIC)
            frames = read_frames(path, where, self.video_sampling(where).numbers)
            return np.stack([resize(frame, square) for frame in frames])
        if not self.tokens.needs_size(num_images):
            return load_image(path, self.one_tile_preprocessor, self.one_tile, where, self.pixels)[None]
        what, size, grids = f"{where}: image {path}", self.preprocessor.size, list(self.tokens.sizes)
        if self.pixels is Pixels.fast:
            with open_checked(path, where) as file:
                check_size(shown_size(file), sizes, what)
                tiles = fast_resize.resize_tiles(file, size, grids, f"{where}: {path}")
        else:
            image = open_image(path, where, self.pixels)
            check_size(image.size, sizes, what)
            tiles = cut_tiles(image, size, grids)
        return np.stack([to_bytes(t) for t in tiles])


def load_image(
    path: ImageFile, preprocessor: Preprocessor, aspect: AspectRatio, where: str, pixels: Pixels = Pixels.exact
) -> np.ndarray:
    """Read an image as one tile, uint8 [3, size, size]. With `aspect` pad, it is padded to a square before it is
    resized. `where` names the record in errors. Raise ImageError if the image cannot be read."""
    if pixels is Pixels.fast:
        return load_fast(path, preprocessor, aspect, where)
    image = open_image(path, where, pixels)
    check_enlarged(image.size, preprocessor, aspect, f"{where}: {path}")
    # the same pixels as padding and resizing below, but faster; not for tiny images, whose square `misread` may change:
    # like LLaVA, it takes the height of an image 3 pixels high for the colour channels
    if aspect is AspectRatio.pad and max(image.size) > MISREAD:
        return resize_padded(image, preprocessor)
    if aspect is AspectRatio.pad:
        image = pad_to_square(image, preprocessor.mean_colour)
    if pixels is Pixels.llava_v1_5:
        image = misread(image, f"{where}: {path}")
    return resize(image, preprocessor)


def load_fast(path: ImageFile, preprocessor: Preprocessor, aspect: AspectRatio, where: str) -> np.ndarray:
    """Read an image as one tile, uint8 [3, size, size], with `data.pixels=fast`: faster, and with pixels that are close
    to those of `exact`. With `aspect` pad, it is padded to a square. `where` names the record in errors. Raise
    ImageError if the image cannot be read."""
    what, size, resample = f"{where}: {path}", preprocessor.size, preprocessor.resample
    with open_checked(path, where) as file:
        check_enlarged(shown_size(file), preprocessor, aspect, what)
        if aspect is AspectRatio.pad:
            return to_bytes(fast_resize.pad_and_resize(file, size, resample, preprocessor.mean_colour, what))
        if preprocessor.keep_ratio:
            return to_bytes(fast_resize.resize_centre(file, size, resample, what))
        return to_bytes(fast_resize.squeeze(file, size, resample, what))


def open_image(path: ImageFile, where: str, pixels: Pixels) -> Image.Image:
    """Open an image as RGB, turned by its EXIF orientation, with a white background where it is transparent. With
    `llava_v1_5`, it is not turned and its transparency is ignored, as in the original LLaVA."""
    with open_checked(path, where) as image:
        if pixels is Pixels.llava_v1_5:
            return image.convert("RGB")
        return to_rgb(ImageOps.exif_transpose(image), f"{where}: {path}")


def check_size(size: Size, counted_sizes: Collection[Size], what: str) -> None:
    """Raise ImageError if the tokens of an image were counted for another size than its own."""
    other = next((other for other in counted_sizes if other != size), None)
    if other is not None:
        raise ImageError(
            f"{what} is {size[0]} x {size[1]} pixels, and its tokens were counted for {other[0]} x {other[1]}; correct "
            "width and height in its record if it has these keys, or take the image from its source again",
            Kind.image_unreadable,
        )


def check_enlarged(shape: Size, preprocessor: Preprocessor, aspect: AspectRatio, what: str) -> None:
    """Raise ImageError if an image is so narrow or flat that making it square would take too much memory."""
    short, long = sorted(shape)
    # padding makes a square of the long side; otherwise the short side is resized to the tower's input, with the ratio
    enlarged = long * long if aspect is AspectRatio.pad else preprocessor.size * preprocessor.size * long // short
    if enlarged > MAX_PIXELS:
        raise ImageError(
            f"{what} is {shape[0]} x {shape[1]}; with data.image_aspect_ratio={aspect.value} it would need {enlarged} "
            f"pixels, over the limit of {MAX_PIXELS}: crop it",
            Kind.image_shape,
        )


def resize(image: Image.Image, preprocessor: Preprocessor) -> np.ndarray:
    """Resize an RGB image to one tile, uint8 [3, size, size]."""
    size = preprocessor.size
    if not preprocessor.keep_ratio:
        return to_bytes(image.resize((size, size), preprocessor.resample))
    short, long = sorted(image.size)
    new_long = int(size * long / short)
    shape = (size, new_long) if image.width <= image.height else (new_long, size)
    resized = image.resize(shape, preprocessor.resample)
    top, left = (resized.height - size) // 2, (resized.width - size) // 2
    return to_bytes(resized.crop((left, top, left + size, top + size)))


def resize_padded(image: Image.Image, preprocessor: Preprocessor) -> np.ndarray:
    """Pad an RGB image to a square and resize it to one tile, uint8 [3, size, size].

    Pillow resizes first horizontally, which leaves lines of one colour as they are. So the padding above and below a
    wide image is added only after this pass, with the same result, and a third less work for 4:3 images.
    """
    size, side = preprocessor.size, max(image.size)
    if image.width <= image.height:
        return resize(pad_to_square(image, preprocessor.mean_colour), preprocessor)
    lines = Image.new("RGB", (size, side), preprocessor.mean_colour)
    lines.paste(image.resize((size, image.height), preprocessor.resample), (0, (side - image.height) // 2))
    return to_bytes(lines.resize((size, size), preprocessor.resample))


def misread(image: Image.Image, what: str) -> Image.Image:
    """Return an image as transformers 4.37 misreads it: of an image 3 pixels high, the height is taken for the colour
    channels; other images are returned unchanged. Raise ImageError for a height of 1 pixel, at which LLaVA fails."""
    check_height(image.height, what)
    if image.height == 3:
        return Image.fromarray(np.ascontiguousarray(np.asarray(image).transpose(1, 2, 0)))
    return image


def check_height(stored_height: int, what: str) -> None:
    """Raise ImageError if `stored_height`, before turning by the EXIF orientation, is 1 pixel: there LLaVA fails."""
    if stored_height == 1:
        raise ImageError(f"{what} has height 1, which LLaVA cannot read; set data.pixels=exact", Kind.image_shape)


def to_bytes(image: Image.Image) -> np.ndarray:
    """Return RGB pixels, uint8 [3, height, width]."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def pad_to_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """Return an image in the middle of a square of the given RGB colour (LLaVA mm_utils.py:152-163)."""
    side = max(image.size)
    if image.width == image.height:
        return image
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
