"""Keys of records beside the conversation and its images: those that say what is learnt, those that are known to change
nothing, and all others, which are reported because nothing reads them.

Sources of the keys: OpenAI's `weight` (fine-tuning of chat models), axolotl's `train`, `train_detail` and `weight`,
ms-swift's `loss`, `loss_scale` and `rejected_response`, LLaMA-Factory's `kto_tag`, trl's `chosen`, `rejected` and
`label`, and the `reasoning_content` of answers of DeepSeek and vLLM.
"""

import re
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from llava_fsdp.config import FULL_WEIGHT
from llava_fsdp.data.records.record import UNREAD_VALUE, AnswerWeights
from llava_fsdp.runtime.text.terminal_text import shown_name

HARMLESS = frozenset(
    "id ids idx index uid uuid guid key qid question_id image_id image_ids video_id sample_id record_id item_id "
    "row_id conversation_id session_id thread_id message_id msg_id turn_id parent_id document_id doc_id user_id "
    "annotator_id source sources source_id data_source source_dataset dataset dataset_name dataset_id "
    "image_source origin provenance split subset config category categories subcategory domain field subject "
    "topic topics task tasks task_type task_name type subtype kind class label tags keywords skill skills "
    "language lang locale license licence copyright author authors creator annotator annotators worker name score "
    "scores rating ratings quality quality_score similarity clip_score difficulty level confidence perplexity ppl "
    "toxicity aesthetic_score relevance relevance_ratings relevance_min visual_dependency_ratings "
    "visual_dependency_min image_correspondence_ratings image_correspondence_min formatting_ratings "
    "formatting_min votes likes rank metadata meta meta_data info extra extra_info additional_info annotations "
    "notes note comment comments remark created created_at updated_at date time timestamp year version revision "
    "hash md5 sha sha1 sha256 checksum model model_name model_id generator engine provider temperature "
    "finish_reason usage width height size image_size image_sizes image_width image_height image_count num_images "
    "video_length duration fps length lengths num_tokens token_count num_turns n_turns turn_count word_count".split()
)
"""Keys that are known to change nothing of what is learnt: ids, sources, scores, metadata."""
ONLY_OF_RECORDS = frozenset(["name"])
"""Those of HARMLESS that change nothing in a record, but may in a turn: templates show the name of a speaker."""
LEARNT = frozenset(
    "weight weights sample_weight loss loss_scale loss_weight loss_mask train is_train to_train training trainable "
    "train_on supervised is_supervised compute_loss calculate_loss has_loss".split()
)
"""Keys of an answer or a record whose value 0 or false takes the answer, or all answers, out of the loss."""
FRACTIONS = frozenset("weight weights sample_weight loss_scale loss_weight".split())
"""Those of LEARNT whose value may be between 0 and 1. Under the others, such as `loss`, it may mean something else."""
HIDDEN = frozenset("masked is_masked mask mask_loss no_loss skip_loss ignore_loss ignore".split())
"""Keys of an answer or a record whose value true takes the answer, or all answers, out of the loss."""
VERDICTS = frozenset(["label", "kto_tag", "chosen", "desirable"])
"""Keys whose value false says that an answer is an example of what must not be said."""
THOUGHTS = frozenset(
    "reasoning_content reasoning reasoning_text reasoning_details thinking thinking_content thought thoughts "
    "chain_of_thought cot".split()
)
"""Keys of an answer, or of a record, for the thoughts before an answer."""
READ_THOUGHTS = frozenset("reasoning_content reasoning thinking thought".split())
"""Those of THOUGHTS that are read, if they are text."""
OF_ANSWERS = "write each thought into its own answer, under the key reasoning_content"
PREFERENCES = frozenset(
    "chosen chosen_response chosen_answer chosen_messages chosen_conversations preferred_output rejected "
    "rejected_response rejected_answer rejected_output rejected_messages rejected_conversations rejected_image "
    "rejected_images non_preferred_output dispreferred_output".split()
)
"""Keys of pairs of a better and a worse answer."""
SPANS = frozenset("train_detail train_details training_detail loss_spans loss_ranges".split())
"""Keys for the parts of an answer that are learnt."""
READ_SPANS, SPAN_KEYS = "train_detail", frozenset(["begin_offset", "end_offset", "train"])
"""The one of SPANS that is read, and the keys of an item of its list."""
WEIGHTS_OF_QUESTION = "questions are never learnt: take the key out"
IGNORED = "or set data.weights=ignore to learn all answers"
WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Numbers and truth values that are written as text."""
ASKING = frozenset(["user", "human"])
"""Names of the asking speaker. The value of `mask` may be one (NeMo): questions are not learnt, as is the case
anyway."""
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
MOST_KEYS = 32
"""Greatest number of unread keys that are noted for one record."""
MOST_NAMES = 256
"""Greatest number of different unread keys that are counted for one chunk of records, or for one source."""
MOST_LETTERS = 100
"""Greatest number of characters that are noted of the name of an unread key."""
MOST_VALUE_LETTERS = 20
"""Greatest length of a text that `value_for_index` keeps."""
OTHERS = "(others)"
"""Stands for the keys beyond MOST_NAMES where keys are counted."""


class KeyMeaning(Enum):
    harmless = "nothing that is learnt depends on it"
    learnt = "the weight of an answer: 0 or false says that it is not learnt"
    hidden = "whether an answer is learnt: true says that it is not"
    verdict = "whether an answer is a good one: false says that it is not"
    preference = "a better and a worse answer"
    thought = "the thoughts before an answer"
    spans = "which parts of an answer are learnt"
    unknown = "not known"


REASONS = {
    KeyMeaning.preference: "pairs of a better and a worse answer are read by stage=prefer alone, and every answer "
    "would be learnt as a good one: choose that stage, or keep the better answer alone, without this key",
    KeyMeaning.verdict: "the answer would be learnt as a good one: take the record out",
    KeyMeaning.thought: "this form of a thought is not read, and the answer would be learnt without it: write it as "
    "text under the key reasoning_content of the answer, or take the key out",
    KeyMeaning.spans: "the weights of characters are a list under the key train_detail of an answer, whose items have "
    "begin_offset, end_offset (the last character) and train (true, false or a weight), in the text of the answer and "
    f"one behind the other: write them so, {IGNORED}",
    KeyMeaning.learnt: "the weight of an answer is from 0 (false: not learnt) to 1 (true); fractions are read under "
    f"{', '.join(sorted(FRACTIONS))}: write one of these, {IGNORED}",
    KeyMeaning.hidden: "an answer is learnt (false) or not (true): write one of these",
}
"""For each meaning of a key that cannot be obeyed: why, and what to do."""
WEIGHTS = (KeyMeaning.learnt, KeyMeaning.hidden, KeyMeaning.spans)
"""Meanings of the keys that `data.weights=ignore` ignores."""


def plain_name(key: str) -> str:
    """Return a key in one style: `loss_scale` for `lossScale`, `loss-scale` and `Loss Scale`."""
    return CAMEL.sub("_", key).lower().replace("-", "_").replace(" ", "_")


def is_thought(key: str, value: Any) -> bool:
    """Return whether a key has a thought that is read: a text, under one of the names READ_THOUGHTS, in whatever style
    the name is written. Thoughts under other names (`KeyMeaning.thought`) are reported as not read."""
    # the cheap test first: `meaning_of` is cached, so it gets keys of a bounded length
    return (
        isinstance(value, str)
        and meaning_of(key[:MOST_LETTERS]) is KeyMeaning.thought
        and (plain_name(key) in READ_THOUGHTS)
    )


@lru_cache(4096)  # records repeat a few keys millions of times
def meaning_of(key: str) -> KeyMeaning:
    """Return what a record's key says about what is learnt, whatever the style of its name (lossScale, loss-scale)."""
    name = plain_name(key)
    if name in VERDICTS:
        return KeyMeaning.verdict
    for names, meaning in (
        (LEARNT, KeyMeaning.learnt), (HIDDEN, KeyMeaning.hidden), (THOUGHTS, KeyMeaning.thought),
        (PREFERENCES, KeyMeaning.preference), (SPANS, KeyMeaning.spans), (HARMLESS, KeyMeaning.harmless),
    ):  # fmt: skip
        if name in names:
            return meaning
    return KeyMeaning.unknown


def says_nothing(value: Any) -> bool:
    """Return whether a JSON value is null, NaN (a missing number, as pandas writes it), a blank text, or a list or
    object of only such values. There is no recursion, because values may be nested deeply."""
    inside = [value]
    while inside:
        item = inside.pop()
        if isinstance(item, dict | list):
            inside += item.values() if isinstance(item, dict) else item
        elif isinstance(item, str):
            if item and not item.isspace():
                return False
        elif item is not None and item == item:
            return False
    return True


def value_for_index(value: Any) -> Any:
    """Return the value of a record's key as it is written into the index, for a key that is not read or that says
    whether an answer is in the loss: a number, truth value or short text as it is; None for an empty value; and a
    placeholder for any other value (in a Parquet file also bytes, a date etc.)."""
    if says_nothing(value):
        return None
    is_short = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MOST_VALUE_LETTERS)
    return value if is_short else UNREAD_VALUE


def value_of_key_for_index(key: str, value: Any) -> Any:
    """Return the value of a key as it is written into the index. Numbers, truth values and short texts are kept as they
    are, a value that says nothing becomes None, and any other becomes UNREAD_VALUE, with two exceptions: weights of
    characters are kept whole, and the placeholder of a thought that is no text is put into a list, so that it is not
    taken for a thought."""
    kept = value_for_index(value)
    if kept is UNREAD_VALUE and plain_name(key) == READ_SPANS and is_span_list(value):
        return value
    return [kept] if kept is UNREAD_VALUE and meaning_of(key[:MOST_LETTERS]) is KeyMeaning.thought else kept


def is_span_list(value: Any) -> bool:
    """Return whether a value is a list of objects with the keys SPAN_KEYS, and numbers or truth values, which say for
    ranges of an answer's characters whether they are in the loss."""
    return isinstance(value, list) and all(
        isinstance(span, dict)
        and span.keys() == SPAN_KEYS
        and all(isinstance(v, bool | int | float) for v in span.values())
        for span in value
    )


def read_weights(key: str, value: Any) -> AnswerWeights:
    """Return the weights that a key's value, which is not empty, gives the labels of an answer. `key` says whether, or
    how much, an answer is learnt. Raise ValueError, with the reason and a cure, if it cannot be obeyed."""
    meaning, name = meaning_of(key), plain_name(key)
    said = WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
    is_number = isinstance(said, int | float) and said in (0, 1)
    none, full = AnswerWeights(0), AnswerWeights()
    match meaning:
        case KeyMeaning.learnt if is_number:
            return full if said else none
        case KeyMeaning.learnt if name in FRACTIONS and (units := weight_of(said)) is not None:
            return AnswerWeights(units)
        # a `mask` of 0 or 1 is ambiguous
        case KeyMeaning.hidden if isinstance(said, bool) or (is_number and key.lower() != "mask"):
            return none if said else full
        case KeyMeaning.hidden if isinstance(said, str) and said.lower() in ASKING:
            return full
        case KeyMeaning.spans if name == READ_SPANS and (spans := spans_of(value)) is not None:
            return AnswerWeights(spans=spans)
        # a `label` may also be the name of a class
        case KeyMeaning.verdict if said is True or (key.lower() == "label" and said is not False):
            return full
        case KeyMeaning.verdict if key.lower() == "chosen" and said is not False:
            meaning = KeyMeaning.preference
        case KeyMeaning.preference if said is False:  # an answer that is not rejected
            return full
    raise ValueError(REASONS[meaning])


def weight_of(value: Any) -> int | None:
    """Return a weight from 0 to 1 in units of 1 / FULL_WEIGHT; None for others, and for positive ones that become 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    units = round(number * FULL_WEIGHT) if 0 <= number <= 1 else 0
    return units if units or number == 0 else None


def spans_of(value: Any) -> tuple[tuple[int, int, int], ...] | None:
    """Return the ranges of characters of an axolotl `train_detail`, each as (begin, end, weight in units of 1 /
    FULL_WEIGHT), ascending; None for another value, and for ranges that overlap."""
    if not is_span_list(value):
        return None
    rows: list[tuple[int, int, int]] = []
    for span in sorted(value, key=lambda span: span["begin_offset"]):
        begin, last, weight = span["begin_offset"], span["end_offset"], weight_of(span["train"])
        if type(begin) is not int or type(last) is not int or weight is None:
            return None
        if not (rows[-1][1] if rows else 0) <= begin <= last:
            return None
        rows.append((begin, last + 1, weight))
    return tuple(rows)


def count_keys(counts: Counter[str], keys: Mapping[str, int]) -> None:
    """Add counts of keys to `counts`, which keeps at most MOST_NAMES different keys; further ones are counted together
    as OTHERS."""
    for key, number in keys.items():
        counts[key if key in counts or len(counts) < MOST_NAMES else OTHERS] += number


def describe_unread(sources: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each source with keys that are not read, from {source: {key: number of records}}."""
    return [
        f"source {shown_name(name)} has keys that are not read: "
        + ", ".join(f"{shown_name(key)} ({count:,} records)" for key, count in Counter(keys).most_common())
        for name, keys in sources.items()
        if keys
    ]
