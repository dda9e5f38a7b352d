"""Special values in token ids and in labels, which are in no vocabulary."""

IMAGE_ID = -200
"""Value in `input_ids` that stands for a token of an image (LLaVA constants.py:9)."""
IGNORE = -100
"""Label of a token that is not supervised; the loss ignores it (LLaVA constants.py:8)."""
