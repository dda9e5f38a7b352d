"""Pictures become the very numbers that CLIP's own processor makes of them."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from llava_fsdp.config import AspectRatio, Pixels
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.images.check import open_checked, read_size, to_rgb
from llava_fsdp.data.images.fast_resize import decode
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import (
    ImageReader,
    Preprocessor,
    load_image,
    open_image,
    pad_to_square,
    parse_preprocessor,
    read_preprocessor,
    resize_padded,
)
from llava_fsdp.data.images.thumbnails import LARGEST, SIDE, thumbnail, tile_thumbnail
from llava_fsdp.data.records.record import Record
from llava_fsdp.runtime.errors import DataError, ImageError, ModelError

SHAPES = [(64, 48), (48, 64), (200, 31), (28, 28), (29, 300), (333, 500)]


@pytest.fixture
def folder(parts: Path) -> Path:
    return parts / "vision"


@pytest.mark.parametrize("aspect", [AspectRatio.square, AspectRatio.pad])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_the_bit(shape: tuple[int, int], aspect: AspectRatio, folder: Path, tmp_path: Path) -> None:
    picture = Image.effect_noise(shape, 90).convert("RGB")
    picture.putpixel((0, 0), (255, 0, 7))
    picture.save(tmp_path / "a.png")
    preprocessor = read_preprocessor(folder)
    ours = torch.from_numpy(load_image(tmp_path / "a.png", preprocessor, aspect, "x"))[None]
    values = normalize(ours, torch.from_numpy(preprocessor.pixel_table()))[0]
    shown = pad_to_square(picture, (122, 116, 104)) if aspect is AspectRatio.pad else picture
    theirs = CLIPImageProcessorPil.from_pretrained(folder)(shown, return_tensors="np")["pixel_values"][0]
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), np.asarray(theirs))


@pytest.mark.parametrize("filter", [n for n in Image.Resampling if n is not Image.Resampling.NEAREST])
def test_bars_that_are_added_after_the_first_pass(filter: Image.Resampling) -> None:
    """Bit for bit what resizing the padded square gives, enlarged and reduced."""
    dice = np.random.default_rng(0)
    for shape in [*SHAPES, (336, 100), (337, 336), (2000, 3), (2, 1), (700, 699)]:
        picture = Image.fromarray(dice.integers(0, 256, (*shape[::-1], 3), dtype=np.uint8))
        own = Preprocessor(336, True, filter, (0.48, 0.99, 0.001), (1, 1, 1))
        plain = pad_to_square(picture, own.mean_colour).resize((336, 336), filter)
        assert np.array_equal(resize_padded(picture, own), np.asarray(plain).transpose(2, 0, 1)), shape


def test_padding_is_the_mean_colour(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), (255, 255, 255)).save(tmp_path / "a.png")
    pixels = load_image(tmp_path / "a.png", read_preprocessor(folder), AspectRatio.pad, "x")
    assert pixels[:, 0, 0].tolist() == [122, 116, 104] and pixels[:, 14, 14].tolist() == [255, 255, 255]


BROKEN = {
    "missing.png": (None, r"record 5: image .*missing\.png does not exist; is data\.images right"),
    "text.jpg": (b"<html>not found</html>", r"record 5: image .*text\.jpg cannot be read"),
    "empty.png": (b"", r"image .*empty\.png is empty \(0 bytes\)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(name: str, folder: Path, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_image(tmp_path / name, read_preprocessor(folder), AspectRatio.pad, "record 5")


def test_picture_that_is_cut_short(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.effect_noise((100, 100), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(DataError, match="truncated"):
        load_image(path, read_preprocessor(folder), AspectRatio.pad, "record 5")


def test_huge_picture_is_refused_before_it_is_decoded(folder: Path, tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    with pytest.raises(DataError, match="9000 x 9000 pixels, over the limit"):
        load_image(tmp_path / "bomb.png", read_preprocessor(folder), AspectRatio.pad, "record 5")


@pytest.mark.parametrize(
    ("size", "crop", "edge", "keep_ratio"),
    [
        (224, 224, 224, True),
        ({"shortest_edge": 336}, {"height": 336, "width": 336}, 336, True),
        ({"height": 384, "width": 384}, None, 384, False),
    ],
)
def test_forms_of_preprocessor_config(size: object, crop: object, edge: int, keep_ratio: bool, tmp_path: Path) -> None:
    config = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    if crop is not None:
        config |= {"crop_size": crop, "do_center_crop": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    found = read_preprocessor(tmp_path)
    assert (found.size, found.keep_ratio) == (edge, keep_ratio)


def test_folder_without_preprocessor(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        read_preprocessor(tmp_path)


def test_a_crop_that_is_not_made_has_no_size(folder: Path) -> None:
    """Nor has one that a preprocessor names which squeezes images."""
    values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "crop_size": 28}
    for crops in ({}, {"do_center_crop": False}):
        found = parse_preprocessor({**values, **crops, "size": {"shortest_edge": 56}}, folder)
        assert (found.size, found.keep_ratio) == (56, True)
    squeezed = {**values, "do_center_crop": True, "size": {"height": 42, "width": 42}}
    found = parse_preprocessor(squeezed, folder)
    assert (found.size, found.keep_ratio) == (42, False)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_preprocessor_with_code_of_its_own_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    fields = json.loads((folder / "preprocessor_config.json").read_text())
    code = {"auto_map": {"AutoImageProcessor": "own.Processor"}}
    (tmp_path / name).write_text(json.dumps({**fields, "image_processor": fields, **code}))
    with pytest.raises(ModelError):
        read_preprocessor(tmp_path)


CLIP = Preprocessor(28, True, Image.Resampling.BILINEAR, (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("aspect", AspectRatio)
def test_an_image_of_one_tile_is_prepared_as_its_model_does(aspect: AspectRatio) -> None:
    """LLaVA-OneVision pads it, and has a filter of its own."""
    reader = ImageReader(None, CLIP, ImageTokens(aspect, 28, 4, ((28, 56),)), Pixels.exact)
    if aspect is AspectRatio.anyres_max:
        squeezed = replace(CLIP, keep_ratio=False, resample=Image.Resampling.BICUBIC)
        assert (reader.one_tile, reader.one_tile_preprocessor) == (AspectRatio.pad, squeezed)
    else:
        assert (reader.one_tile, reader.one_tile_preprocessor) == (aspect, CLIP)


def test_sizes_and_folders_are_those_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the index does not have the size of an image, the file tells it. Several images of a record may have one size,
    and one image may come twice."""
    for number, name in enumerate(("own", "all")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (30 + number, 40)).save(tmp_path / name / "a.png")
    reader = ImageReader(tmp_path / "all", CLIP, ImageTokens(AspectRatio.anyres, 28, 4, ((28, 56),)), Pixels.exact)
    record = Record("a.json", 0, "x", ("a.png", "b.png", "a.png"), (), True, sizes=((1, 2), (0, 0), (5, 6)))
    own = replace(record, folder=tmp_path / "own", sizes=((0, 0), (3, 4), (5, 6)))
    assert [reader.size(own, number) for number in range(3)] == [(30, 40), (3, 4), (5, 6)]
    assert reader.size(replace(record, sizes=None), 0) == (31, 40)
    strict = replace(reader, allow_links=False)
    for made, name in ((record, "all"), (own, "own")):
        assert strict.checked_path(made, "a.png") == tmp_path / name / "a.png"
    given: list[tuple[int, set[tuple[int, int]]]] = []
    monkeypatch.setattr(
        ImageReader, "load", lambda self, path, where, images, sizes: given.append((images, sizes)) or np.zeros(1)
    )
    reader.tiles(record, "a.png")
    assert given == [(3, {(1, 2), (5, 6)})]


@pytest.mark.parametrize("pixels", [Pixels.exact, Pixels.fast])
@pytest.mark.parametrize("aspect", [AspectRatio.square, AspectRatio.pad])
def test_narrow_picture_that_would_fill_the_memory(
    aspect: AspectRatio, pixels: Pixels, folder: Path, tmp_path: Path
) -> None:
    Image.new("L", (1, 65000)).save(tmp_path / "thin.png")
    assert (tmp_path / "thin.png").stat().st_size < 1000
    with pytest.raises(
        ImageError, match=r"thin\.png is 1 x 65000; with data\.image_aspect_ratio=(square|pad) it would need"
    ):
        load_image(tmp_path / "thin.png", read_preprocessor(folder), aspect, "record 5", pixels)


def test_sixteen_bit_grey_is_not_clipped_to_white(folder: Path, tmp_path: Path) -> None:
    """Pillow's own conversion makes nearly all of such a picture pure white."""
    ramp = np.linspace(0, 65535, 56 * 56, dtype=np.uint16).reshape(56, 56)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    pixels = load_image(tmp_path / "a.png", read_preprocessor(folder), AspectRatio.pad, "x")
    assert abs(int(pixels.mean()) - 127) <= 1 and (pixels == 255).mean() < 0.05


RAMP = np.arange(56 * 56).reshape(56, 56) / (56 * 56 - 1)


@pytest.mark.parametrize("white", [1.0, 255.0, 65535.0])
def test_floating_point_is_scaled_to_its_white(white: float, folder: Path, tmp_path: Path) -> None:
    Image.fromarray((RAMP * white).astype(np.float32)).save(tmp_path / "a.tiff")
    Image.fromarray((RAMP * 255).astype(np.uint8)).save(tmp_path / "eight.png")
    read = [
        load_image(tmp_path / f, read_preprocessor(folder), AspectRatio.pad, "x").astype(int)
        for f in ("a.tiff", "eight.png")
    ]
    assert np.abs(read[0] - read[1]).max() <= 1


def test_values_without_a_known_white_are_refused(folder: Path, tmp_path: Path) -> None:
    Image.fromarray((RAMP - 1).astype(np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ImageError, match=r"a\.tiff has values from -1 to 0, whose black and white are"):
        load_image(tmp_path / "a.tiff", read_preprocessor(folder), AspectRatio.pad, "x")


def test_original_clips_what_is_not_eight_bits(folder: Path, tmp_path: Path) -> None:
    own = read_preprocessor(folder)
    Image.fromarray((RAMP * 65535).astype(np.uint16)).save(tmp_path / "a.png")
    clipped = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).transpose(2, 0, 1)
    Image.fromarray(clipped.transpose(1, 2, 0)).save(tmp_path / "clipped.png")
    made = load_image(tmp_path / "a.png", own, AspectRatio.square, "x", Pixels.llava_v1_5)
    assert np.array_equal(made, load_image(tmp_path / "clipped.png", own, AspectRatio.square, "x"))
    assert not np.array_equal(made, load_image(tmp_path / "a.png", own, AspectRatio.square, "x"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int, folder: Path, tmp_path: Path) -> None:
    """A picture is read as a viewer shows it; the original's pixels leave it as it was stored."""
    own = read_preprocessor(folder)
    picture = Image.effect_noise((60, 40), 90).convert("RGB")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture.save(tmp_path / "turned.png", exif=exif)
    picture.save(tmp_path / "stored.png")
    ImageOps.exif_transpose(Image.open(tmp_path / "turned.png")).save(tmp_path / "shown.png", exif=Image.Exif())

    def pixels(name: str, mode: Pixels) -> np.ndarray:
        return load_image(tmp_path / name, own, AspectRatio.pad, "x", mode)

    assert np.array_equal(pixels("turned.png", Pixels.exact), pixels("shown.png", Pixels.exact))
    assert np.array_equal(pixels("turned.png", Pixels.llava_v1_5), pixels("stored.png", Pixels.exact))
    for ending in ("png", "jpg", "tiff", "webp"):
        picture.save(tmp_path / f"again.{ending}", exif=exif)
        seen = open_image(tmp_path / f"again.{ending}", "x", Pixels.exact).size
        assert read_size(tmp_path / f"again.{ending}", "x") == seen == Image.open(tmp_path / "shown.png").size


def test_heights_that_the_original_misreads(folder: Path, tmp_path: Path) -> None:
    own = read_preprocessor(folder)
    noise = np.random.default_rng(0).integers(0, 255, (3, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "three.png")
    Image.fromarray(noise[:1]).save(tmp_path / "one.png")
    right = load_image(tmp_path / "three.png", own, AspectRatio.square, "x")
    wrong = load_image(tmp_path / "three.png", own, AspectRatio.square, "x", Pixels.llava_v1_5)
    assert not np.array_equal(right, wrong)
    load_image(tmp_path / "one.png", own, AspectRatio.square, "x")
    with pytest.raises(ImageError, match=r"one\.png has height 1"):
        load_image(tmp_path / "one.png", own, AspectRatio.square, "x", Pixels.llava_v1_5)


GREY, RED, CLEAR = (
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (43, 61), dtype=np.uint8)) for seed in range(3)
)
CLEAR.paste(0, (5, 5, 25, 30))
COLOUR = Image.merge("RGB", [RED, GREY, GREY.rotate(180)])
ALPHA = Image.merge("RGBA", [RED, GREY, GREY.rotate(180), CLEAR])
PALETTE = COLOUR.quantize(16)
TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 6
SEE_THROUGH = {
    "RGBA": (ALPHA, "png", {}),
    "RGBA turned": (ALPHA, "png", {"exif": TURNED}),
    "LA": (ALPHA.convert("LA"), "png", {}),
    "LA in TIFF": (ALPHA.convert("LA"), "tiff", {}),
    "RGBA in TIFF": (ALPHA, "tiff", {}),
    "a colour of a palette": (PALETTE, "png", {"transparency": 3}),
    "a palette with alpha": (PALETTE, "png", {"transparency": bytes(range(0, 256, 17))}),
    "a grey": (GREY, "png", {"transparency": 128}),
    "a colour": (COLOUR, "png", {"transparency": COLOUR.getpixel((7, 5))}),
    "black of two": (GREY.convert("1"), "png", {"transparency": 0}),
    "GIF": (ALPHA, "gif", {}),
    "GIF of frames": (ALPHA, "gif", {"save_all": True, "append_images": [ALPHA.rotate(180)]}),
    "WebP": (ALPHA, "webp", {}),
    "WebP without loss": (ALPHA, "webp", {"lossless": True}),
    "WebP of frames": (ALPHA, "webp", {"save_all": True, "append_images": [ALPHA.rotate(180)]}),
}
OPAQUE = {
    "RGB": (COLOUR, "png", {}),
    "L": (GREY, "png", {}),
    "1": (GREY.convert("1"), "png", {}),
    "P": (PALETTE, "png", {}),
    "CMYK": (COLOUR.convert("CMYK"), "tiff", {}),
    "CMYK in JPEG": (COLOUR.convert("CMYK"), "jpg", {}),
    "LAB": (COLOUR.convert("HSV").convert("RGB"), "tiff", {}),
    "YCbCr": (COLOUR, "jpg", {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*SEE_THROUGH, *OPAQUE])
def test_transparency_is_white_as_transformers_has_it(name: str, folder: Path, tmp_path: Path) -> None:
    """To the bit, the processor's whole work included; the original's pixels ignore it."""
    picture, ending, options = (SEE_THROUGH | OPAQUE)[name]
    path = tmp_path / f"a.{ending}"
    picture.save(path, **options)
    shown = ImageOps.exif_transpose(Image.open(path))
    expected = convert_to_rgb(shown, return_numpy=True)
    assert np.array_equal(np.asarray(open_image(path, "x", Pixels.exact)), expected)
    ignored = np.asarray(Image.open(path).convert("RGB"))
    assert np.array_equal(np.asarray(open_image(path, "x", Pixels.llava_v1_5)), ignored)
    assert ("turned" in name or not np.array_equal(ignored, expected)) == (name in SEE_THROUGH)
    preprocessor = read_preprocessor(folder)
    ours = torch.from_numpy(load_image(path, preprocessor, AspectRatio.square, "x"))[None]
    theirs = CLIPImageProcessorPil.from_pretrained(folder)(shown, return_tensors="np")["pixel_values"][0]
    values = normalize(ours, torch.from_numpy(preprocessor.pixel_table()))[0]
    np.testing.assert_array_equal(values.numpy(), np.asarray(theirs))
    with open_checked(path, "x") as file:  # what is not made smaller has the exact pixels
        assert np.array_equal(np.asarray(decode(file, shown.size, "x").image), expected)


def test_a_palette_with_alpha_of_its_own() -> None:
    """No file is opened as one."""
    picture = ALPHA.convert("PA")
    assert np.array_equal(np.asarray(to_rgb(picture, "x")), convert_to_rgb(picture, return_numpy=True))


@pytest.mark.parametrize("grey", [0, 25700, 65535])
def test_a_transparent_grey_of_sixteen_bits_is_white(grey: int, tmp_path: Path) -> None:
    values = np.full((20, 20), 40 * 257, dtype=np.uint16)
    values[:10] = grey
    Image.fromarray(values).save(tmp_path / "a.png", transparency=grey)
    found = np.asarray(open_image(tmp_path / "a.png", "x", Pixels.exact))
    assert (found[:10] == 255).all() and (found[10:] == 40).all()


def test_a_small_picture_of_a_page_is_what_the_model_sees(tmp_path: Path) -> None:
    """Turned, and on white."""
    Image.new("RGBA", (40, 20), (0, 0, 0, 0)).save(tmp_path / "a.png", exif=TURNED)
    address = thumbnail(tmp_path / "a.png")
    assert address is not None
    small = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert small.size == (20, 40) and small.getextrema() == ((255, 255),) * 3


def test_small_pictures_of_a_page_are_small(tmp_path: Path) -> None:
    """In pixels, and in bytes whatever they show; what cannot be read has none."""
    noise = np.random.default_rng(0).integers(0, 255, (500, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((SIDE, SIDE)).save(tmp_path / "noise.png")
    Image.fromarray(noise).save(tmp_path / "large.png")
    Image.new("RGB", (30, 20)).save(tmp_path / "small.png")
    for name, size in (
        ("noise.png", (SIDE, SIDE)),
        ("large.png", (SIDE, round(SIDE * 5 / 7))),
        ("small.png", (30, 20)),
    ):
        address = thumbnail(str(tmp_path / name))
        assert address is not None and address.startswith("data:image/jpeg;base64,")
        data = base64.b64decode(address.partition(",")[2])
        assert Image.open(io.BytesIO(data)).size == size and len(data) <= LARGEST, name
    (tmp_path / "broken.png").write_bytes(b"hello")
    assert thumbnail(str(tmp_path / "broken.png")) is None and thumbnail(str(tmp_path / "missing.png")) is None
    tile = np.zeros((3, 40, 40), dtype=np.uint8)
    tile[0, :, :20] = 255
    shown = Image.open(io.BytesIO(base64.b64decode(tile_thumbnail(tile, 24).partition(",")[2])))
    left, right = np.asarray(shown)[12, [3, 20]]
    assert shown.size == (24, 24) and left[0] > 200 > 50 > left[1] and max(right) < 50


def test_a_combined_file_of_a_processor(folder: Path, tmp_path: Path) -> None:
    """Its section of images is read, unless the file of images alone is there."""
    fields = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": fields, "size": 3}))
    assert read_preprocessor(tmp_path) == read_preprocessor(folder)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields | {"image_std": [0.25] * 3}))
    assert read_preprocessor(tmp_path).std == (0.25,) * 3
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ModelError):
        read_preprocessor(tmp_path)
