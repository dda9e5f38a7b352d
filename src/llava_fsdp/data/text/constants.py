"""Special values in token ids (for image tokens) and in labels (for tokens without a label), which are in no
vocabulary."""

IMAGE_ID = -200
"""Value in `input_ids` that stands for a token of an image (LLaVA constants.py:9)."""
IGNORE = -100
"""Label of a token that is not supervised; the loss ignores it (LLaVA constants.py:8)."""
