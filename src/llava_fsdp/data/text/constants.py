"""Ids that are in no vocabulary."""

IMAGE_ID = -200
"""Stands in `input_ids` for one position of an image (LLaVA constants.py:9)."""
IGNORE = -100
"""A label that is not supervised (LLaVA constants.py:8)."""
