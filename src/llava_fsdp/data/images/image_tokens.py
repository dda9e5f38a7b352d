"""The tokens of an image: how many it has, and which features of the vision tower they are made of.

An image is one tile (a square input of the vision tower), or several with anyres; a video is one tile a frame. The
vision tower and the projector turn each tile into a square of features. Most tokens are one of these features. Where
LLaVA-OneVision shrinks a grid of features, a token is the weighted sum of four (bilinear interpolation). (LLaVA
llava_arch.py:146-201; transformers modeling_llava_next.py and modeling_llava_onevision.py, `pack_image_features`.)

Tokens are an array with one element per token: the int64 index of a feature among those of all tiles of the image or,
with `anyres_max`, an element of dtype BLENDED. The index NEWLINE_ROW stands for the learned vector that ends a line of
features. Sizes are (width, height) in pixels.
"""

import itertools
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from llava_fsdp.config import AspectRatio, Config, PatchMerge
from llava_fsdp.data.images.anyres import Size, best_size, grid_sizes

NEWLINE_ROW = -1
"""Index that stands for the learned "newline" vector, which ends a line of features."""
SHRUNK = 1.1
"""A grid of features is shrunk if it has more than 1.1 ** 2 times as many features as allowed (transformers
modeling_llava_onevision.py, `pack_image_features`)."""
MAX_TILES = 9
"""Value of `data.max_tiles` for LLaVA-OneVision."""
BLENDED = np.dtype([("row", np.int64, 4), ("weight", np.float32, 4)])
"""dtype of a token that is a weighted sum of four features: their indices (`row`) and weights."""


PHOTO = (640, 480)
"""Width and height in pixels that a plan assumes for an image whose size is unknown."""


class ImageRule(Protocol):
    """What says how many tiles and tokens an image has: `ImageTokens`, or `BlankImages` of a whole model."""

    @property
    def sizes(self) -> tuple[Size, ...]: ...
    def needs_size(self, images: int) -> bool: ...
    def count_tiles(self, size: Size | None, images: int) -> int: ...
    def of(self, size: Size | None, images: int) -> Sized: ...


@dataclass(frozen=True)
class ImageTokens:
    """Computes the tokens of an image, for one model and one setting of `data.image_aspect_ratio`."""

    aspect: AspectRatio
    tile: int
    features: int
    """Number of features of a tile."""
    sizes: tuple[Size, ...] = ()
    """With anyres and anyres_max, the sizes that an image may be fitted into."""
    merge: PatchMerge = PatchMerge.flat
    max_tiles: int = MAX_TILES
    """With anyres_max, a grid with more features than this number of tiles has is shrunk to about that number of
    features."""

    @classmethod
    def of_config(cls, cfg: Config, tile: int, features: int) -> "ImageTokens":
        """Return the rule that a configuration describes, for a tile's width and its number of features."""
        data, aspect = cfg.data, cfg.data.trained_aspect
        sizes = tuple(grid_sizes(data.grid_pinpoints, tile, aspect))
        return cls(aspect, tile, features, sizes, cfg.model.patch_merge, data.max_tiles)

    @property
    def blends(self) -> bool:
        """Whether tokens have dtype BLENDED."""
        return self.aspect is AspectRatio.anyres_max

    @property
    def cause(self) -> str:
        return f"data.image_aspect_ratio={self.aspect.value}"

    @property
    def side(self) -> int:
        return math.isqrt(self.features)

    def needs_size(self, images: int) -> bool:
        """Return whether the number of tokens of an image depends on its size. With anyres_max, an image is only cut
        into tiles if its sample has no other `images`."""
        return self.aspect is AspectRatio.anyres or (self.aspect is AspectRatio.anyres_max and images == 1)

    def of(self, size: Size | None, images: int) -> np.ndarray:
        """Return the tokens of one image, one array element for each: the index of the vision feature that it is,
        int64, or with anyres_max an element of dtype BLENDED (four indices and weights). NEWLINE_ROW stands for the
        learned vector that ends a line of features; with anyres_max, an image that is not cut into tiles ends with it.

        Args:
            size: (width, height) in pixels, used only if `needs_size`.
            images: number of images in the sample.
        """
        if self.needs_size(images):
            assert size is not None, "the tokens of an image of several tiles depend on its size"
            return self.tokens_of_tiles(size)
        whole = np.arange(self.features)
        return as_blended(np.append(whole, NEWLINE_ROW)) if self.blends else whole

    def of_video(self, frames: int) -> np.ndarray:
        """Return the tokens of a video, dtype BLENDED (indices and weights of four vision features): for each of
        `frames` frames its grid of features, shrunk to half its width and height (rounded up), and at the end one for
        the vector that ends a line (transformers modeling_llava_onevision.py, `get_video_features`)."""
        half = math.ceil(self.side / 2)
        grid = np.arange(self.side**2).reshape(self.side, self.side)
        grids = np.broadcast_to(shrink(grid, half, half), (frames, half, half)).copy()
        grids["row"] += (np.arange(frames) * self.features)[:, None, None, None]
        return np.append(grids.reshape(-1), as_blended(np.array([NEWLINE_ROW])))

    def tokens_of_tiles(self, size: Size) -> np.ndarray:
        """Return the tokens of an image that is cut into tiles, first those of the whole image (tile 0), then those of
        the grid: each the index of a feature or, with anyres_max, a BLENDED element (indices and weights of four).

        With `model.patch_merge=flat`, the tokens of the grid are in the order of its tiles; otherwise in the order of
        its lines, across all tiles. With `spatial_unpad`, features of the grid that show only padding are left out, and
        each line of the grid ends with NEWLINE_ROW, the index of the learned vector that ends a line.
        """
        side, (across, down) = self.side, self.grid(size)
        whole = np.arange(side * side)
        grid = side * side + np.arange(across * down * side * side)
        if self.merge is PatchMerge.flat:
            return np.concatenate([whole, grid])
        lines = grid.reshape(down, across, side, side).transpose(0, 2, 1, 3).reshape(down * side, across * side)
        if self.merge is PatchMerge.spatial_unpad:
            lines = unpad(lines, size)
        if self.blends:
            whole, lines = as_blended(whole), self.shrink_to_limit(lines)
        if self.merge is PatchMerge.spatial_unpad:
            end = np.full((len(lines), 1), NEWLINE_ROW)
            lines = np.concatenate([lines, end if lines.dtype != BLENDED else as_blended(end)], axis=1)
        return np.concatenate([whole, lines.reshape(-1)])

    def grid(self, size: Size) -> Size:
        """Return (columns, rows) of the grid of tiles into which an image of this size is cut."""
        width, height = best_size(size, list(self.sizes))
        return width // self.tile, height // self.tile

    def shrink_to_limit(self, lines: np.ndarray) -> np.ndarray:
        """Return a grid of features as weighted sums of features (dtype BLENDED). It is shrunk if it has clearly more
        features, by the factor SHRUNK for each side, than `data.max_tiles` tiles have. `lines`: the grid as indices of
        features, int64 [rows, columns]."""
        high, wide = lines.shape
        ratio = math.sqrt(high * wide / (self.max_tiles * self.side**2))
        if ratio <= SHRUNK:
            return as_blended(lines)
        return shrink(lines, max(1, int(high // ratio)), max(1, int(wide // ratio)))

    def count_tiles(self, size: Size | None, images: int) -> int:
        """Return into how many tiles an image is cut: those of its grid and the whole image, scaled down; 1 without a
        grid. `size`: (width, height). `images`: number of images of the record, as a grid may be for single images
        only."""
        if not self.needs_size(images):
            return 1
        assert size is not None, "the tiles of an image depend on its size"
        return 1 + math.prod(self.grid(size))

    @cached_property
    def most_tokens(self) -> int:
        """Greatest number of tokens of an image: that of one that fills its grid of tiles without padding."""
        sizes: Sequence[Size | None] = self.sizes if self.needs_size(1) else (None,)
        return max(len(self.of(size, 1)) for size in sizes)


def unpad(lines: np.ndarray, image_size: Size) -> np.ndarray:
    """Return the grid of an image's features, as indices [rows, columns], without the rows or columns that show the
    black bars beside the image (LLaVA llava_arch.py:104-130). `image_size`: (width, height) of the image in pixels."""
    high, wide = lines.shape
    # rounded to 7 places before int() cuts, as in transformers (modeling_llava_next.py:137): 23.9999999999 is 24
    if image_size[0] / image_size[1] > wide / high:
        kept = int(round(image_size[1] * (wide / image_size[0]), 7))
        bar = (high - kept) // 2
        return lines[bar : high - bar]
    kept = int(round(image_size[0] * (high / image_size[1]), 7))
    bar = (wide - kept) // 2
    return lines[:, bar : wide - bar]


def as_blended(indices: np.ndarray) -> np.ndarray:
    """Return features, given by their indices, as weighted sums of four (dtype BLENDED) in the shape of `indices`: the
    first has weight 1, the others 0."""
    blended = np.zeros(indices.shape, dtype=BLENDED)
    blended["row"] = indices[..., None]
    blended["weight"][..., 0] = 1
    return blended


def shrink(lines: np.ndarray, high: int, wide: int) -> np.ndarray:
    """Shrink a grid of features, given by their indices, int64 [rows, columns], to `high` rows and `wide` columns by
    bilinear interpolation. Each new feature is a weighted sum of four: its indices and weights are returned, dtype
    BLENDED [high, wide].

    The weights are those of torch's `interpolate(mode="bilinear", align_corners=False)`, computed in float32 as there.
    """
    (top, bottom, down), (left, right, across) = (
        neighbours(old, new) for old, new in zip(lines.shape, (high, wide), strict=True)
    )
    one = np.float32(1)
    shrunk = np.zeros((high, wide), dtype=BLENDED)
    corners = ((top, left), (top, right), (bottom, left), (bottom, right))
    weights = ((one - down, one - across), (one - down, across), (down, one - across), (down, across))
    for corner, ((row, column), (vertical, horizontal)) in enumerate(zip(corners, weights, strict=True)):
        shrunk["row"][..., corner] = lines[np.ix_(row, column)]
        shrunk["weight"][..., corner] = np.outer(vertical, horizontal)
    return shrunk


def neighbours(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute how `new` evenly spaced points are linearly interpolated from `old` ones. Return for each new point the
    indices of the two old points beside it, and the weight of the second one, three arrays [new]."""
    scale = float(np.float32(old) / np.float32(new))
    # rounded once, as torch's kernels multiply and subtract in one instruction
    place = np.maximum((np.arange(new) + 0.5) * scale - 0.5, 0).astype(np.float32)
    first = np.minimum(place.astype(np.int64), old - 1)
    return first, np.minimum(first + 1, old - 1), (place - first.astype(np.float32)).clip(0, 1)


def join_tokens(
    images: Sequence[tuple[np.ndarray, int]], firsts: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the tokens of several images, with indices into the concatenated features of all their tiles.

    Args:
        images: for each image its tokens, and the number of features of all its tiles; 0 for one that shows the
            features of an earlier image.
        firsts: index of the first feature of each image; None: the features are in the order of the images.

    Returns:
        The indices of features, int64 [tokens], and an empty array; or if tokens are weighted sums of four features,
        indices int64 [tokens, 4] and weights float32 [tokens, 4]. The index one past the last feature stands for the
        learned vector that ends a line of features.
    """
    end_row = sum(features for _, features in images)
    firsts = firsts if firsts is not None else [*itertools.accumulate((count for _, count in images), initial=0)][:-1]
    joined: list[np.ndarray] = []
    weights = [np.zeros((0, 4), dtype=np.float32)]
    for (tokens, _), before in zip(images, firsts, strict=True):
        rows = tokens["row"] if tokens.dtype == BLENDED else tokens
        joined.append(np.where(rows == NEWLINE_ROW, end_row, rows + before))
        weights += [tokens["weight"]] if tokens.dtype == BLENDED else []
    return np.concatenate(joined or [np.zeros(0, dtype=np.int64)]), np.concatenate(weights)


def needed_tiles(tokens: np.ndarray, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the tiles of an image that some of its tokens are made of.

    Args:
        tokens: for each token the index of its feature in all tiles of the image, NEWLINE_ROW for the vector that ends
            a line; with dtype BLENDED, of the four features (`row`) of which it is a weighted sum.
        features: number of features of a tile.

    Returns:
        (the numbers of these tiles in ascending order; the tokens, whose indices now count only the features of these
        tiles)
    """
    rows = tokens["row"] if tokens.dtype == BLENDED else tokens
    is_newline = rows == NEWLINE_ROW
    needed = np.unique(rows[~is_newline] // features)
    rows_of_needed = np.where(
        is_newline, NEWLINE_ROW, np.searchsorted(needed, rows // features) * features + rows % features
    )
    if tokens.dtype != BLENDED:
        return needed, rows_of_needed
    tokens = tokens.copy()
    tokens["row"] = rows_of_needed
    return needed, tokens
