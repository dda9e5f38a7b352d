"""What the families of tiny models that take videos do not do."""

from families import FAMILIES
from whole_models import WHOLE

REFUSED_VIDEOS = {
    "internvl": "its processor joins no videos of unlike lengths",
    "perception_lm": "its processor joins no videos of unlike lengths",
    "minimax_m3_vl": "its processor enlarges no frame to whole patches",
    "kimi_k25": "transformers' class expects one feature for each frame, and makes one of four frames",
}
"""Families whose videos are refused: {name: why}."""
EQUAL = ("smolvlm",)
"""Families whose processors write the same number of frames for all videos of a sample."""
APART = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
"""Families whose class takes no images and videos together in a row."""
ALONE = (*EQUAL, *APART)
"""Families that take no images and videos together in a sample."""
VIDEO_FAMILIES = tuple(n for n in WHOLE if FAMILIES[n].video and n not in REFUSED_VIDEOS)
