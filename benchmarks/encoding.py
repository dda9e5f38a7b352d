"""How long does it take to encode a record as token ids and labels? CPU milliseconds of one process, by what the record
has beside its three exchanges of 80 words.

    python benchmarks/encoding.py                                   # prints the table, and a line of JSON
    PYTHONPATH=OTHER/src python benchmarks/encoding.py plain        # of another checkout; take turns, as times vary
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tests_support  # noqa: F401
from chat_templates import published
from conversations import open_form
from provenance import commit, machine

from llava_fsdp.config import EmptyThoughts, Thoughts, TooLong
from llava_fsdp.data.records.forms.parse_record import parse_record
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.teaching import Teaching

KINDS = {
    "plain": "qwen3_vl",
    "weights": "qwen3_vl",
    "calls": "qwen3_vl",
    "thoughts": "muse_glimmer",
    "several samples": "qwen3",
}
"""{what records have: TRL's chat template with which they are encoded}. `several samples`: thoughts that the template
leaves out of later prompts."""
WORDS = "the circle is red how many user assistant system 12 34".split()
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "string"}}}}}  # fmt: skip


def make_record(kind: str, number: int) -> dict[str, Any]:
    """Return a record of three exchanges, in OpenAI's form."""
    dice = random.Random(number)

    def say(count: int) -> str:
        return " ".join(dice.choices(WORDS, k=count))

    turns: list[dict[str, Any]] = []
    for _ in range(3):
        turns.append({"role": "user", "content": say(20)})
        if kind == "calls":
            call = {"type": "function", "function": {"name": "look", "arguments": {"a": say(5)}}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "content": say(20)})
        answer: dict[str, Any] = {"role": "assistant", "content": say(60)}
        answer |= {"reasoning_content": say(150)} if kind in ("thoughts", "several samples") else {}
        turns.append(answer | ({"weight": 0.5} if kind == "weights" else {}))
    return {"id": str(number), "messages": turns, **({"tools": [TOOL]} if kind == "calls" else {})}


def measure(kind: str, records: int, rounds: int) -> dict[str, Any]:
    """Return the least CPU milliseconds a record of several rounds, and samples and tokens a record."""
    teaching = Teaching(Thoughts.train, EmptyThoughts.context)
    with tempfile.TemporaryDirectory() as folder:
        own = open_form(published()[KINDS[kind]], Path(folder))
        form = teaching.template(own)
        encoder = ExactEncoder(
            own.tokenizer, form, lambda record, image: np.arange(576), UNLIMITED, TooLong.fail, teaching=teaching
        )
        parsed = [parse_record("a.json", number, make_record(kind, number)) for number in range(records)]
        made = [sample for record in parsed for sample in encoder.samples(record, UNLIMITED)]
        seconds = []
        for _ in range(rounds):
            began = time.process_time()
            for record in parsed:
                encoder.samples(record, UNLIMITED)
            seconds.append(time.process_time() - began)
    return {
        "kind": kind,
        "template": KINDS[kind],
        "milliseconds": round(1000 * min(seconds) / records, 2),
        "samples": len(made) / records,
        "tokens": sum(len(sample.input_ids) for sample in made) / records,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    rows = [measure(kind, options.records, options.rounds) for kind in options.kinds]
    for row in rows:
        print(
            "{kind:16} {template:14} {milliseconds:8.2f} ms {samples:4.1f} samples {tokens:7.0f} tokens".format(**row)
        )
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    print(json.dumps({"machine": machine(), "commit": commit(), "date": date, "rows": rows}))
