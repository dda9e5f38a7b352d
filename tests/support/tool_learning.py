"""Records in which an image decides which tool is called and how, a small model that learns them with exact labels or
with labels that are found by a search for role markers, and how well it calls."""

import json
import random
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

from small import ASSETS, write_json
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

import llava_fsdp
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.chat.messages_file import read_messages_file
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.data import loader
from llava_fsdp.data.records.record import IMAGE_TAG, Record
from llava_fsdp.data.text.answer_segments import PICTURE
from llava_fsdp.data.text.chat_template.message_parts import media_of
from llava_fsdp.data.text.conversation import Segment
from llava_fsdp.data.text.encode import ExactEncoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.toy_shapes import COLOURS, NUMBERS, SIZES, Scene, draw_picture
from llava_fsdp.model.generation import Sampling

ASSISTANT, END = "<|im_start|>assistant\n", "<|im_end|>"
TEMPLATE = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- "<|im_start|>system\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{% endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for m in messages %}
    {{- "<|im_start|>" + m.role + "\\n" }}
    {%- if m.role == "assistant" and m.reasoning_content and loop.index0 > ns.last %}
        {{- "<think>\\n" + m.reasoning_content + "\\n</think>\\n\\n" }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- "<tool_call>\\n" + (call.function | tojson) + "\\n</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}
"""
"""A chat template of Qwen3's kind: thoughts of earlier questions are left out, results have a role of their own."""
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
QUESTION = "Look it up."
TOOLS = {"ring": "price", "bar": "weight"}
"""{shape: the tool that is to be called for it}; the argument is the colour."""
VERBS = {"ring": "costs", "bar": "weighs"}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"colour": {"type": "string"}}}}}
    for name in TOOLS.values()
]  # fmt: skip
CHANCE = 1 / (len(TOOLS) * len(COLOURS))
"""Share of right calls of a model that sees no image."""
RECORDS, STEPS, HELD_OUT = 2400, 320, 100
"""Numbers of records and steps of the training that `train_with` makes by default, and of examples to measure with."""
MOST_TOKENS = 64
"""Greatest number of tokens of an answer; a right one has fewer than 40."""


class Labels(Enum):
    """How the labels of a training are found."""

    exact = "exact"
    """By the project."""
    between = "between the markers"
    """The text of the whole conversation is searched: what stands between the assistant's marker and the next end
    marker is learnt. So nothing that ends an answer is."""
    behind = "behind the first marker"
    """What follows the assistant's first marker is learnt, but the end markers are not, because padding has the same
    token. So results are learnt, and no end is."""


@dataclass(frozen=True)
class Example:
    """A picture with the right call, and what the tool answers to it."""

    record: dict[str, Any]
    scene: Scene
    result: str

    @property
    def call(self) -> dict[str, Any]:
        return {"name": TOOLS[self.scene.shape], "arguments": {"colour": self.scene.colour}}

    @property
    def answer(self) -> str:
        return f"The {self.scene.colour} {self.scene.shape} {VERBS[self.scene.shape]} {self.result}."

    def tool(self, call: object) -> str:
        """What the tool answers to a call: the result to the right one alone."""
        return self.result if call == self.call else NUMBERS[NUMBERS.index(self.result) - 1]


def make_example(name: str, dice: random.Random, images: Path) -> Example:
    places = tuple(sorted(dice.sample(range(4), dice.randint(1, 4))))
    scene = Scene(dice.choice([*TOOLS]), dice.choice([*COLOURS]), dice.choice([*SIZES]), places)
    draw_picture(scene, dice).save(images / f"{name}.png")
    example = Example({"id": name, "image": f"{name}.png", "tools": SCHEMAS}, scene, dice.choice(NUMBERS))
    call = {"id": "call_0", "type": "function", "function": example.call}
    example.record["messages"] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "", "reasoning_content": f"A {scene.colour} {scene.shape}.",
         "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": example.result},
        {"role": "assistant", "content": example.answer},
    ]  # fmt: skip
    return example


class SearchedEncoder(ExactEncoder):
    """Finds labels by a search in the text of the whole conversation, as it is written once all of it is known."""

    @property
    def fingerprint(self) -> str:
        return f"{type(self).__name__} {super().fingerprint}"

    def samples(self, record: Record, longest: int, turns: tuple[int, int] | None = None) -> list[Sample]:
        writer = self.writer
        asked = writer.asked(record.turns, record.tools, media_of(record.images))
        first, *rest = asked.write(asked.messages).split(ASSISTANT, 1)
        before, behind = first.split(PICTURE)
        segments = [
            Segment(before, supervised=False),
            Segment(IMAGE_TAG, supervised=False, image=0),
            Segment(behind + ASSISTANT, supervised=False),
        ]
        for text, is_learnt in self.divide(rest[0]):
            segments += [Segment("", supervised=True, begins_answer=True)] * is_learnt + [
                Segment(text, supervised=is_learnt)
            ]
        return [self.encode(segments, record, len(record.images))]

    @staticmethod
    @abstractmethod
    def divide(text: str) -> Iterator[tuple[str, bool]]:
        """Divide the text behind the assistant's first marker into pieces, each with whether it is learnt."""


class Between(SearchedEncoder):
    """See `Labels.between`."""

    @staticmethod
    def divide(text: str) -> Iterator[tuple[str, bool]]:
        for place, piece in enumerate(text.split(ASSISTANT)):
            answer, end, rest = piece.partition(END)
            yield from ((ASSISTANT * (place > 0), False), (answer, True), (end + rest, False))


class Behind(SearchedEncoder):
    """See `Labels.behind`."""

    @staticmethod
    def divide(text: str) -> Iterator[tuple[str, bool]]:
        for piece in text.split(END):
            yield from ((piece, True), (END, False))


ENCODERS = {Labels.exact: ExactEncoder, Labels.between: Between, Labels.behind: Behind}


def write_language(folder: Path, texts: Sequence[str]) -> None:
    """A small Llama with TEMPLATE, and a tokenizer that has the words of the texts."""
    made = FastTokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\n]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<|im_start|>", END]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(texts, trainer)
    write_json(folder / "tokenizer.json", json.loads(made.to_str()))
    names = {"eos_token": END, "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    own = {"vocab_size": made.get_vocab_size(), "eos_token_id": 2, "bos_token_id": None}
    write_json(folder / "config.json", json.loads((ASSETS / "tiny-llama" / "config.json").read_text()) | own)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_examples(folder: Path, count: int, held_out: int, seed: int = 0) -> list[Example]:
    """Write records of training with their images, and a language model for them; return the held-out examples."""
    dice, images = random.Random(seed), folder / "images"
    images.mkdir(parents=True)
    made = [make_example(f"{number:05}", dice, images) for number in range(count + held_out)]
    write_json(folder / "train.json", [own.record for own in made[:count]])
    write_language(folder / "language", [text for own in made[:200] for text in (TEMPLATE, json.dumps(own.record))])
    return made[count:]


def train_with(labels: Labels, data: Path, output: Path, *words: str) -> None:
    """Train the small model on the records of `write_examples`, from random weights."""
    cfg = llava_fsdp.compose("finetune", [
        f"model.language={data / 'language'}", "model.vision=package:tiny-clip", "model.projector=random",
        "model.random_weights=true", "activation_checkpointing=none", "micro_batch_size=16", "data=llava_json",
        f"data.path={data / 'train.json'}", f"data.images={data / 'images'}", f"data.index={output}-index",
        "data.examine=lazy", "data.workers=0", "data.template=chat_template", "data.thoughts=train",
        f"output_dir={output}", "precision=fp32", "compile=false", "checkpoint.every=null", "export.dtype=fp32",
        "export.verify=false", "epochs=9", "global_batch_size=16", "optim.lr=3e-3", "optim.projector_lr=4e-3",
        "log_every=50", f"max_steps={STEPS}", *words,
    ])  # fmt: skip
    with mock.patch.object(loader, "ExactEncoder", ENCODERS[labels]):
        llava_fsdp.train(cfg)


@dataclass(frozen=True)
class Reply:
    """What the model says to the last turn of a conversation."""

    thought: str | None
    text: str
    has_ended: bool


def reply(conversation: Conversation, record: dict[str, Any], messages: Sequence[Any], images: Path) -> Reply:
    write_json(images / "talk.json", record | {"messages": [*messages]})
    pieces = conversation.go_on(read_messages_file(images / "talk.json"), Sampling(MOST_TOKENS))
    text = "".join(pieces)
    return Reply(conversation.thought, text, not conversation.was_cut)


def called(text: str) -> Any:
    """The first call in an answer; None without one that is JSON."""
    found = CALL.search(text)
    try:
        return None if found is None else json.loads(found[1])
    except ValueError:
        return None


def measure(run: Path, examples: Sequence[Example], images: Path) -> dict[str, float]:
    """Let a model answer held-out examples and return shares of them:

    thought: the answer begins with the right thought.
    call: its first call has the right name and arguments.
    stop: nothing follows this call.
    invented: a number follows it, as only the tool's result and the final answer have.
    answer: the call is right, and so is the answer to the tool's result, with the model's own thought before the call.
    all: call, stop and answer are right, as a program needs it that runs the tool when the answer ends.
    """
    conversation = Conversation(open_assistant(str(run)))
    found: Counter[str] = Counter()
    for own in examples:
        messages = own.record["messages"]
        first = reply(conversation, own.record, messages[:1], images)
        call, behind = called(first.text), first.text.partition("</tool_call>")[2]
        is_right, stops = call == own.call, first.has_ended and not behind.strip()
        found["thought"] += first.thought == messages[1]["reasoning_content"]
        found["call"] += is_right
        found["stop"] += stops
        found["invented"] += any(number in behind for number in NUMBERS)
        if call is None:
            continue
        asked = {
            "role": "assistant",
            "content": "",
            "reasoning_content": first.thought,
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        }
        result = {**messages[2], "content": own.tool(call)}
        last = reply(conversation, own.record, [messages[0], asked, result], images)
        found["answer"] += (is_answered := is_right and last.has_ended and last.text == own.answer)
        found["all"] += is_answered and stops
    return {name: found[name] / len(examples) for name in ("thought", "call", "stop", "invented", "answer", "all")}
