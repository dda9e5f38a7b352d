"""Join the answers of a record, each encoded with its prompt, to as few samples as their prompts allow."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer


def join_samples(answers: Iterable[tuple[int, Sample]], tokenizer: Tokenizer) -> list[Sample]:
    """Join answers: one whose prompt begins with the tokens of the sample before it continues this sample, and any
    other begins a new one. So the tokens before each answer are those of its own prompt.

    Args:
        answers: for each answer, in order, the index of its turn, and the sample of its prompt and itself.

    Returns:
        The samples, with the turns of their answers if there are several.
    """
    made: list[Sample] = []
    for turn, new in answers:
        joined = continued(made[-1], new, tokenizer) if made else None
        if joined is None:
            made.append(replace(new, turns=(turn, turn)))
        else:
            first = made[-1].turns
            assert first is not None
            made[-1] = replace(joined, turns=(first[0], turn))
    return made if len(made) > 1 else [replace(sample, turns=None) for sample in made]


def continued(before: Sample, new: Sample, tokenizer: Tokenizer) -> Sample | None:
    """Join an answer (`new`) to the sample before it, if its prompt begins with the tokens of that sample; otherwise
    return None. The result has the tokens of `new` and the labels of both. Later prompts may end an answer with another
    token (GPT-OSS): then the tokens have that one, and the label is the one that the model must generate."""
    length = len(before.input_ids)
    if length > new.prompt:
        return None
    is_same = before.input_ids == new.input_ids[:length]
    ends = int(before.input_ids[-1]), int(new.input_ids[length - 1])
    # only the last tokens differ, and are special tokens
    is_swapped = is_same[:-1].all() and before.labels[-1] != IGNORE and None not in map(tokenizer.name, ends)
    if not (is_same.all() or is_swapped):
        return None
    kinds = new.kinds
    if before.kinds is not None and kinds is not None:
        kinds = np.concatenate([before.kinds, kinds[length:]])
    weights = new.weights
    if before.weights is not None or weights is not None:
        earlier, later = (
            np.full(len(sample.labels), FULL_WEIGHT, np.int32) if sample.weights is None else sample.weights
            for sample in (before, new)
        )
        weights = np.concatenate([earlier, later[length:]])
    return replace(new, labels=np.concatenate([before.labels, new.labels[length:]]), kinds=kinds, weights=weights)
