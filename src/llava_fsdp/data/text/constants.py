"""Special values in token ids and labels; no vocabulary contains them."""

IMAGE_ID = -200
"""Value in `input_ids` that stands for a token of an image (LLaVA constants.py:9)."""
IGNORE = -100
"""Label of a token that is not supervised; the loss ignores it (LLaVA constants.py:8)."""
