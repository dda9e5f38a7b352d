"""Token ids and labels with a special meaning, outside every vocabulary."""

IMAGE_ID = -200
"""Id in `input_ids` of each token of an image (LLaVA constants.py:9)."""
IGNORE = -100
"""Label of a token that is not supervised, ignored by the loss (LLaVA constants.py:8)."""
