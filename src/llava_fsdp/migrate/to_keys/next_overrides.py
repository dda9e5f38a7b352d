"""Decide the Hydra overrides for what LLaVA-NeXT's training program has beside LLaVA's: images of several tiles, and
which parts of the model train."""

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from llava_fsdp.migrate.source.source_run import SourceRun

LIMITED = re.compile(r"anyres_max_([1-9]\d*)")
PARTS: Mapping[str, str] = {
    "mm_mlp_adapter": "projector", "mm_language_model": "language", "mm_vision_tower": "vision",
}  # fmt: skip
"""{word in --mm_tunable_parts: part of the model in model.train}."""
WHOLE_GRID = ((1, 1), (6, 6))
"""Smallest and largest grid of tiles in LLaVA-OneVision's scripts: the default here with anyres_max."""


def images(run: SourceRun) -> dict[str, object]:
    """Return the overrides for how LLaVA-NeXT's training cuts images into tiles (--image_aspect_ratio and its flags).
    An aspect ratio that is not supported becomes `square`: images of one tile."""
    aspect = str(run.trainer_value("image_aspect_ratio"))
    limit = LIMITED.fullmatch(aspect)
    if aspect != "anyres" and limit is None:
        return {"data.image_aspect_ratio": "pad" if aspect == "pad" else "square"}
    found: dict[str, object] = {"data.image_aspect_ratio": "anyres_max" if limit else "anyres"}
    merge = str(run.trainer_value("mm_patch_merge_type"))
    found["model.patch_merge"] = merge if merge in ("flat", "spatial") else "spatial_unpad"
    if limit:
        found["data.max_tiles"] = int(limit[1])
        frames, speed = run.trainer_value("frames_upbound"), run.trainer_value("video_fps")
        found |= {"data.video_frames": frames} if frames else {}
        found |= {"data.video_fps": speed} if run.given("video_fps") else {}
    grid = grid_of(run)
    if isinstance(grid, list):
        found["data.grid_pinpoints"] = grid
    return found


def grid_of(run: SourceRun) -> list[list[int]] | str | None:
    """Return the sizes [width, height] in pixels that --image_grid_pinpoints gives; None if the flag is not given or
    its sizes are llava_fsdp's default; or, if the sizes cannot be known, a text that says why."""
    given = str(run.trainer_value("image_grid_pinpoints") or "")
    sizes = [(int(width), int(height)) for width, height in re.findall(r"\((\d+)x(\d+)\)", given)]
    if not sizes:
        try:
            return [[int(side) for side in size] for size in ast.literal_eval(given)] if given else None
        except (ValueError, SyntaxError, TypeError):
            return f"{given} is neither a list of sizes nor a range (1x1),...,(6x6)"
    # the range in LLaVA-OneVision's scripts is llava_fsdp's default
    if (sizes[0], sizes[-1]) == WHOLE_GRID and "anyres_max" in str(run.trainer_value("image_aspect_ratio")):
        return None
    name = str(run.trainer_value("vision_tower") or "")
    side = re.search(r"(?<!\d)(224|336|384|448|512)(?!\d)", PurePosixPath(name).name)
    if side is None:
        return f"the size of a tile of {name or 'this vision tower'} is not known: give data.grid_pinpoints in pixels"
    # a range counts tiles: all sizes from the first to the last one
    (left, top), (right, bottom) = sizes[0], sizes[-1]
    tile = int(side[1])
    return [[x * tile, y * tile] for x in range(left, right + 1) for y in range(top, bottom + 1)]


def trained_parts(run: SourceRun, usual: list[str]) -> list[str]:
    """Return the value of `model.train` for LLaVA-NeXT's program: the parts that --mm_tunable_parts names, with LoRA
    always the language model too. Without that flag these are `usual`, the parts by LLaVA's own flags, and the vision
    tower if --unfreeze_mm_vision_tower is given."""
    if run.tunable is None:
        return [*usual, "vision"] if run.trainer_value("unfreeze_mm_vision_tower") else usual
    parts = [part for name, part in PARTS.items() if name in run.tunable]
    return [*parts, "language"] if run.is_lora and "language" not in parts else parts
