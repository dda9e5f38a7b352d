"""Token ids and labels are the original's."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_folder import golden_folder, read_lines

from llava_fsdp.config import SpecialTokens, TooLong
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.records.record import IMAGE_TAG, Record
from llava_fsdp.data.text.conversation import asked_turns
from llava_fsdp.data.text.encode import ExactEncoder, OriginalEncoder
from llava_fsdp.data.text.llava_v1_5 import Original, Tokens, check_like_original, encode_like_original, encode_turns
from llava_fsdp.data.text.templates import Style, template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError

FOLDERS = {
    "hf4_legacy_false": "legacy_false",
    "hf4_legacy_default": "legacy_default",
    "v5_legacy_default": "legacy_default",
    "v5_legacy_false": "legacy_false",
    "v5_legacy_false_noprefix": "legacy_false",
}
MARKERS = ("<im_start>", "<im_end>")


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    assert tokenizer.bos is not None
    return [tokenizer.bos, *(t.id for t in tokenizer.encode(text))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_ids_of_texts(folder: str, count: Callable) -> None:
    tokenizer = open_tokenizer(golden_folder() / "tokenizer" / folder)
    for case in read_lines("tokenizer/ids_test.jsonl"):
        assert ids_of(tokenizer, case["text"]) == case[FOLDERS[folder]], case["text"]
        count("ids", "equal")


@pytest.mark.parametrize("folder", FOLDERS)
def test_ids_with_two_more_special_tokens(folder: str, count: Callable) -> None:
    tokenizer = open_tokenizer(golden_folder() / "tokenizer" / folder, extra=MARKERS)
    for case in read_lines("tokenizer/ids_test_im_start_end.jsonl"):
        assert ids_of(tokenizer, case["text"]) == case[FOLDERS[folder]], case["text"]
        count("ids with im_start and im_end", "equal")


@pytest.mark.parametrize("folder", FOLDERS)
def test_tokens_tile_the_text(folder: str) -> None:
    tokenizer = open_tokenizer(golden_folder() / "tokenizer" / folder)
    for case in read_lines("tokenizer/ids_test.jsonl"):
        at = 0
        for token in tokenizer.encode(case["text"]):
            assert at <= max(token.begin, at) <= token.end <= len(case["text"])
            at = token.end
        assert at == len(case["text"])


def conversations() -> dict[str, Record]:
    raw = read_lines("masks/mask_conversations.jsonl")
    return {r["id"]: parse_record(Path("golden.json"), n, r) for n, r in enumerate(raw)}


class Originals:
    """How the original was set for a case, made once for each setting."""

    def __init__(self) -> None:
        self.tokenizers: dict[tuple, Tokenizer] = {}

    def __call__(self, version: str, legacy: bool, start_end: bool, max_length: int) -> Original:
        folder = "hf4_legacy_default" if legacy else "hf4_legacy_false"
        extra = (("[PAD]",) if version == "v0" else ()) + (MARKERS if start_end else ())
        if (folder, extra) not in self.tokenizers:
            self.tokenizers[folder, extra] = open_tokenizer(golden_folder() / "tokenizer" / folder, extra=extra)
        tokenizer = self.tokenizers[folder, extra]
        pad = tokenizer.special("[PAD]") or 0
        return Original(tokenizer, template("v1" if version == "v0" else version), max_length, pad, start_end)


def labels_of(case: dict) -> list[int]:
    labels = [IGNORE] * len(case["input_ids"])
    for begin, end in case["supervised_spans"]:
        labels[begin:end] = case["input_ids"][begin:end]
    return labels


def refused(wrong: bool) -> contextlib.AbstractContextManager:
    """Whether the record is to be refused: the original's model stops at it, or gives it another record's picture."""
    return pytest.raises(DataError, match="images in the text") if wrong else contextlib.nullcontext()


def encode(record: Record, own: Original, path: str) -> Tokens:
    if path == "direct":  # as if the model had no tower: tags stay where they are
        return encode_turns(list(record.turns), record.has_image_key, own, record.where)
    return encode_like_original(record, own)


def test_masks(count: Callable) -> None:
    """`labels=llava_v1_5` gives every id and every label of every template, and stops where the original stops."""
    records, originals = conversations(), Originals()
    for case in read_lines("masks/masks.jsonl"):
        where = (case["conv"], case["version"], case["path"], case["legacy"], case["model_max_length"])
        if case["version"] == "no_such_version":
            with pytest.raises(ConfigError, match="does not exist; choose one of"):
                template(case["version"])
            count("masks", "unknown template refused (the original takes v1)")
            continue
        own = originals(case["version"], case["legacy"], case["mm_use_im_start_end"], case["model_max_length"])
        record = records[case["conv"]]
        if case.get("exception") == "AttributeError":
            count("masks", "without a vision tower: the original crashes, this trainer always has one")
            continue
        if "exception" in case:
            with pytest.raises(DataError):
                encode(record, own, case["path"])
            if case["path"] == "dataset":
                with pytest.raises(DataError, match=record.id):
                    check_like_original(record, own)
            count("masks", "refused as the original stops")
            continue
        made = encode(record, own, case["path"])
        assert made.ids.tolist() == case["input_ids"], where
        assert made.labels.tolist() == labels_of(case), where
        printed = None if made.mismatch is None else f"{made.mismatch[0]} vs. {made.mismatch[1]}."
        assert (printed is None) == (case["mismatch"] is None) and (printed or "") in (case["mismatch"] or ""), where
        if case["path"] == "dataset":
            with refused(case["input_ids"][: own.max_length].count(IMAGE_ID) > len(record.images)):
                check_like_original(record, own)
        count("masks", "equal")


def is_ordinary(record: Record, case: dict) -> bool:
    """Nothing in it that `labels=exact` treats differently on purpose, nor cut by the original's tokenizer."""
    tags = sum(t.text.count("<image>") for t in record.turns)
    return (
        case["path"] == "dataset"
        and "exception" not in case
        and case["version"] not in ("v0", "no_such_version")
        and len(case["input_ids"]) < case["model_max_length"]
        and all(t.text for t in record.turns)
        and tags <= 1
        and (tags == 0 or bool(record.images))
    )


@pytest.mark.slow
def test_exact_labels_where_the_original_is_right(count: Callable) -> None:
    """`labels=exact` has the original's ids, and its labels wherever that one neither masks a sample nor errs."""
    records, originals = conversations(), Originals()
    for case in read_lines("masks/masks.jsonl"):
        record = records[case["conv"]]
        if not is_ordinary(record, case):
            continue
        start_end = case["mm_use_im_start_end"]
        own = originals(case["version"], case["legacy"], start_end, case["model_max_length"])
        exact = ExactEncoder(
            own.tokenizer, own.form, lambda *_: np.zeros(1), 9999, TooLong.fail, start_end, SpecialTokens.parse
        )
        as_text = replace(exact, special_tokens=SpecialTokens.text)
        try:
            sample = exact(record)
        except DataError as error:
            assert record.where in str(error)
            count("exact labels", "reported as bad")
            continue
        assert sample is not None
        where = (case["conv"], case["version"])
        used = [t.text for t in asked_turns(record) if t.role == "gpt" or not own.form.image_only]
        has_special = any(own.tokenizer.find_special(text.replace(IMAGE_TAG, "")) for text in used)
        plain = as_text(record)
        assert plain is not None and (plain.input_ids.tolist() != sample.input_ids.tolist()) == has_special, where
        if record.turns[0].role == "system":  # ### writes it as a turn of "unknown", and labels it
            count("exact labels", "a system turn, which replaces the template's system text")
            continue
        drops_answer = own.form.style is Style.MARKERS and record.turns[0].role == "gpt"  # ### keeps it
        if not drops_answer:
            assert sample.input_ids.tolist() == case["input_ids"], where
        if own.form.style is Style.MARKERS or case["mismatch"]:
            assert sample.num_labels > 0
            count("exact labels", "ids equal, labels made that the original gets wrong or masks")
            continue
        assert sample.labels.tolist() == labels_of(case), where
        count("exact labels", "equal")


def test_collator(count: Callable) -> None:
    """What a row keeps of the original's batch once its padding and its pictures' tags are taken out."""
    records, originals = conversations(), Originals()
    for batch in read_lines("masks/collator.jsonl"):
        own = originals(batch["version"], batch["legacy"], False, batch["model_max_length"])
        encoder = OriginalEncoder(own, lambda *_: np.zeros(1, dtype=np.int64))
        for row, name in enumerate(batch["convs"]):
            mask = np.array(batch["attention_mask"][row], dtype=bool)
            ids, labels = np.array(batch["input_ids"][row])[mask], np.array(batch["labels"][row])[mask]
            if (ids == IMAGE_ID).sum() > 1:
                with pytest.raises(DataError):
                    encoder(records[name])
                count("collator rows", "refused: more tags than pictures")
                continue
            sample = encoder(records[name])
            assert sample.input_ids.tolist() == ids.tolist(), (name, batch["version"])
            assert sample.labels.tolist() == np.where(ids == IMAGE_ID, IGNORE, labels).tolist(), name
            count("collator rows", "equal")
