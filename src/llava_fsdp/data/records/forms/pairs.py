"""Parse questions with their answers: the value of the key `texts` of a record, or the values of two keys of it."""

from typing import Any

from llava_fsdp.data.records.forms.record_reader import RecordReader
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.records.tools import TOOL_KEYS

ENTRY_KEYS = ("user", "assistant")
"""Keys of an element of `texts`: a question and its answer."""


def read_pairs(reader: RecordReader, key: str, raw: Any) -> list[Turn]:
    """Parse the value of the key `texts`, objects with a question (`user`) and its answer (`assistant`), as turns."""
    if not isinstance(raw, list):
        raise reader.bad(key, raw, "a list of objects with user and assistant")
    turns = []
    for number, entry in enumerate(raw):
        if not isinstance(entry, dict) or not set(ENTRY_KEYS) <= entry.keys():
            raise reader.bad(f"{key}, entry {number}", entry, "an object with user and assistant")
        reader.note_unread(entry)  # images and videos under keys that are not read
        reader.refuse_tools(f"entry {number}", entry)
        # calls of tools are refused above; all other keys may have a weight of the answer, or are reported as not read
        weights = reader.note_keys(f"entry {number}", entry, (*ENTRY_KEYS, *TOOL_KEYS), f"{key}[].")
        question, answer = (reader.text(f"{key}, entry {number}, {name}", entry[name]) for name in ENTRY_KEYS)
        turns.append(Turn("human", question))
        made = Turn("gpt", answer, thought=reader.thought_of(f"entry {number}", entry))
        turns.append(reader.weighted(f"entry {number}", made, weights))
    return turns


def read_pair(reader: RecordReader, raw: dict[str, Any], keys: tuple[str, str]) -> list[Turn]:
    """Parse the question and the answer of a record, given the keys of both."""
    return [Turn(role, reader.text(key, raw.get(key))) for role, key in zip(("human", "gpt"), keys, strict=True)]
