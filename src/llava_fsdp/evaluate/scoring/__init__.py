"""Scores of answers: pure functions of texts, without torch or transformers."""

from llava_fsdp.evaluate.scoring.multiple_choice import ChoiceScores, chosen, score_choices
from llava_fsdp.evaluate.scoring.vqa import (
    exact_match,
    is_out_of_reach,
    normalize_vqa,
    official_accuracy,
    prepare_submission,
    textvqa_accuracy,
    vqa_accuracy,
)
from llava_fsdp.evaluate.scoring.yes_no import YesNoScores, says_yes, score_yes_no

__all__ = [
    "ChoiceScores",
    "YesNoScores",
    "chosen",
    "exact_match",
    "is_out_of_reach",
    "normalize_vqa",
    "official_accuracy",
    "prepare_submission",
    "says_yes",
    "score_choices",
    "score_yes_no",
    "textvqa_accuracy",
    "vqa_accuracy",
]
