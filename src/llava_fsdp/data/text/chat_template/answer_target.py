"""Find the prompt of one answer, and the text that a model must generate behind it, with a model's own chat template.

P is the template's text for the turns before an answer, with the generation prompt; F is its text for these turns and
the answer. What a model generates after P so that the template would show the answer, the target, is

1. the rest of F, if F begins with P;
2. else what follows P's cue (what the generation prompt adds) in F, if it stands there before the answer: GPT-OSS's F
   leaves out thoughts of earlier calls, which P shows;
3. else, if P opens a thought that F never shows (DeepSeek-R1), the thought, the text that ends it, and F's answer.

In all other cases Unfit is raised. The target ends with what ends the turn. The places of the thought and the text in
it come from one more rendering with marker texts in their stead. If F is not this rendering with the answer's texts in
place of the marker texts, the template changes the texts, and Unfit is raised, too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava_fsdp.data.records.record import Call
from llava_fsdp.data.text.chat_template.chat_features import OPENERS, SAID, THOUGHT, Features, Renders
from llava_fsdp.data.text.chat_template.chat_layout import SHOWN, Unfit, shared
from llava_fsdp.data.text.chat_template.message_parts import TEXT, Message
from llava_fsdp.data.text.tokens.tokenizer import Stretch

BREAK = "\ue005"
"""Character that is put into special tokens and placeholders in a record's text before it is rendered, so that those
which the template writes can be told from them. It is taken out again."""
ESCAPED_BREAK = "\\ue005"
"""BREAK in JSON of ASCII characters."""
STRIPS = (lambda text: text, str.strip, str.lstrip, str.rstrip, lambda text: text.strip("\n"),
          lambda text: text.lstrip("\n"), lambda text: text.rstrip("\n"))  # fmt: skip
"""The ways in which templates strip white space from a text."""


QUOTES = str.maketrans("", "", "\\\"'")
"""Removes backslashes and quotes from a text."""


@dataclass(frozen=True)
class Target:
    """The prompt of an answer, and what a model must generate behind it. The texts may contain BREAK."""

    prompt: str
    text: str
    thought: Stretch | None = None
    """Range of characters of the thought in `text`; None without one."""
    said: Stretch | None = None
    """Range of characters of the answer's text in `text`; None without one."""
    begin: int = 0
    """Number of characters of `text` before the answer's text or calls: the thought, with what is written around it, or
    what a template writes for an empty thought."""
    is_thought_empty: bool = False
    """Whether these characters are an empty thought that the template writes."""


@dataclass(frozen=True)
class Asked:
    """A conversation, with guarded texts, in which answers are asked."""

    template: Renders
    features: Features
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]

    def write(self, messages: Sequence[Message], ask: bool = False, **variables: Any) -> str:
        text = self.template.write_text(messages, ask, self.features.form, self.tools, **variables)
        if ESCAPED_BREAK in text:
            raise Unfit("escapes a special token in a text")
        return text

    def prompt(self, turn: int, on: dict[str, Any]) -> str:
        """Return the template's prompt for the turns before one. Raise Unfit if it lacks one of them. `on`: variables
        of the rendering."""
        before = self.messages[:turn]
        text = self.write(before, ask=True, **on)
        for number, message in enumerate(before):
            # a template that drops the text of an earlier answer drops it at inference, too
            if message.role != "gpt" and not all(is_in(own.strip(), text) for own in message.texts):
                raise Unfit(f"leaves turn {number} ({message.role}) out, or changes its text")
        return text

    def target(self, turn: int) -> Target:
        """Return the prompt and the target of the answer with index `turn`. Raise Unfit if the template cannot be
        trained with at this turn."""
        try:
            return find_target(self, turn)
        except Unfit as unfit:
            raise Unfit(f"cannot teach turn {turn}, an answer: it {unfit}") from unfit


def find_target(asked: Asked, turn: int) -> Target:
    """Do what `Asked.target` does; the messages of errors lack the turn."""
    features, own, before = asked.features, asked.messages[turn], asked.messages[:turn]
    if own.thought is not None and not features.thoughts:
        raise Unfit("shows no thoughts; data.thoughts=drop leaves them out")
    on = {} if features.switch is None else switch_of(features, own)
    prompt = asked.prompt(turn, on)
    shown = asked.write([*before, own], **on)
    text = own.texts[0]
    marked = replace(own, texts=(SAID,) if text.strip() else own.texts)
    if own.thought is not None:
        marked = replace(marked, thought=THOUGHT)
    seen = asked.write([*before, marked], **on)
    start, glue = find_start(asked, prompt, shown, seen, turn)
    if not seen.startswith(shown[:start]):
        raise Unfit("changes earlier turns because of what an answer says")
    spans = fill(own, shown[start:], seen[start:], is_glued=bool(glue))
    spans = {kind: (a + len(glue), b + len(glue)) for kind, (a, b) in spans.items()}
    if glue:
        spans[THOUGHT] = (0, len(glue) - len(OPENERS[features.opener]))
    whole = glue + shown[start:]
    check_calls(own.calls, whole)
    header = prompt[shared(prompt, asked.write(before, **on)) :]
    if header and asked.template.tokenizer.find_special(header) and whole.startswith(header):
        raise Unfit("asks without the header that it then shows before the answer")
    upto = find_end(asked, turn, whole, spans, shown, start - len(glue), on)
    if any(end > len(upto) for _, end in spans.values()):
        raise Unfit("writes the text of an answer with calls after their results")
    begin, is_empty = find_begin(asked, own, upto, spans)
    return Target(prompt, upto, spans.get(THOUGHT), spans.get(SAID), begin, is_empty)


def switch_of(features: Features, own: Message) -> dict[str, Any]:
    """Return the value of the template's switch for an answer: on if it has a thought. An answer without one leaves it
    to the template's own variables."""
    assert features.switch is not None
    return {features.switch: True} if own.thought is not None else {}


def find_start(asked: Asked, prompt: str, shown: str, seen: str, turn: int) -> tuple[int, str]:
    """Return where in F (`shown`) the rest of the target begins, and the text before it that F lacks, which is the
    thought of rule 3. `seen` is F with marker texts."""
    features, own, before = asked.features, asked.messages[turn], asked.messages[:turn]
    if shown.startswith(prompt):
        if own.thought is not None and THOUGHT not in seen[len(prompt) :]:
            raise Unfit("does not show the thought of this turn")
        return len(prompt), ""
    on = {} if features.switch is None else switch_of(features, own)
    cue = prompt[shared(prompt, asked.write(before, **on)) :]
    places = [place for mark in (SAID, THOUGHT) if (place := seen.find(mark)) >= 0]
    where = seen.rfind(cue, 0, min(places, default=len(shown))) if cue else -1
    if where >= 0 and shown.startswith(seen[: where + len(cue)]):
        if own.thought is not None and THOUGHT not in seen[where + len(cue) :]:
            raise Unfit("does not show the thought of this turn")
        return where + len(cue), ""
    opener = features.opener
    if opener and prompt.endswith(opener) and shown.startswith(prompt[: -len(opener)]):
        if own.thought is None:
            raise Unfit("opens a thought in the prompt, and this answer has none")
        return len(prompt) - len(opener), own.thought.strip("\n") + OPENERS[opener]
    rest = prompt[shared(prompt, shown) :]
    raise Unfit(f"shows the answer behind another text than its prompt, which has {rest[:SHOWN]!r}")


def fill(own: Message, tail: str, seen: str, is_glued: bool) -> dict[str, Stretch]:
    """Return the ranges of characters of the thought and the text of an answer in the end of F (`tail`), by their
    marker texts in the same end with marker texts (`seen`). With `is_glued`, the thought is not in F."""
    wanted = {SAID: own.texts[0]} if own.texts[0].strip() else {}
    if own.thought is not None and not is_glued:
        wanted[THOUGHT] = own.thought
    for mark in wanted:
        if seen.count(mark) != 1:
            raise Unfit(f"leaves the {name_of(mark)} of an answer out, or repeats it")
    spans: dict[str, Stretch] = {}
    at, filled = 0, ""
    order = sorted(wanted, key=seen.find)
    for number, mark in enumerate(order):
        where = seen.find(mark)
        filled += seen[at:where]
        at = where + len(mark)
        behind = seen[at : seen.find(order[number + 1])] if number + 1 < len(order) else seen[at:]
        ways = sorted({strip(wanted[mark]) for strip in STRIPS}, key=len, reverse=True)
        way = next((own for own in ways if fits(tail, filled + own, behind, number + 1 == len(order))), None)
        if way is None:
            raise Unfit(f"changes the {name_of(mark)} of an answer")
        spans[mark] = len(filled), len(filled) + len(way)
        filled += way
    if filled + seen[at:] != tail:
        raise Unfit("changes the text of an answer")
    return spans


def fits(tail: str, filled: str, behind: str, is_last: bool) -> bool:
    return tail == filled + behind if is_last else tail.startswith(filled + behind)


def name_of(mark: str) -> str:
    return "thought" if mark == THOUGHT else "text"


def find_end(
    asked: Asked, turn: int, whole: str, spans: dict[str, Stretch], shown: str, start: int, on: dict[str, Any]
) -> str:
    """Return an answer's text up to and including what ends it.

    Args:
        whole: the target with all that F has behind it; it begins at the character `start` of F (`shown`).
        on: variables of the rendering.
    """
    own, features = asked.messages[turn], asked.features
    find = asked.template.tokenizer.find_special
    if features.next_stop:
        return whole.rstrip("\n") + features.call_stop if own.calls else whole + features.next_stop
    if not own.calls:
        found = whole.find(features.stop, spans[SAID][1] if SAID in spans else 0)
        if found < 0:
            raise Unfit("ends an answer in another way than usual")
        return whole[: found + len(features.stop)]
    ends = [end for _, end in find(whole) if not whole[end:].strip()]
    results = [Message("tool", TEXT, ("result",), calls=(call,)) for call in own.calls]
    try:  # what follows once there are results is not the answer's end
        after = asked.write([*asked.messages[: turn + 1], *results], **on)
        kept = whole[: max(0, shared(after, shown) - start)]
        ends = [end for _, end in find(kept) if not kept[end:].strip()] or ends
    except Unfit:
        pass
    if not ends:
        raise Unfit("writes no special token after a call")
    return whole[: ends[0]]


def find_begin(asked: Asked, own: Message, text: str, spans: dict[str, Stretch]) -> tuple[int, bool]:
    """Return how many characters of a target are a thought with what is around it, and whether the thought is empty."""
    features = asked.features
    if own.thought is not None:
        if SAID in spans:
            return spans[SAID][0], False
        behind = text[spans[THOUGHT][1] :]
        return spans[THOUGHT][1] + shared(behind, features.thought_end), False
    until = spans[SAID][0] if SAID in spans else len(text)
    empty = features.thought_begin.strip() + features.thought_end.strip()
    if not features.thought_begin.strip():
        return 0, False
    # white space in an empty thought differs from that around a thought
    letters = iter("".join(empty.split()))
    wanted = next(letters)
    for at, letter in enumerate(text[:until]):
        if letter.isspace():
            continue
        if letter != wanted:
            return 0, False
        wanted = next(letters, "")
        if not wanted:
            rest = text[at + 1 : until]
            return until - len(rest.lstrip()), True
    return 0, False


def check_calls(calls: Sequence[Call], text: str) -> None:
    """Raise Unfit if a target lacks a call, or a text in its arguments."""
    for call in calls:
        if not is_in(call.name, text):
            raise Unfit(f"leaves a call of {call.name} out")
        missing = next((own for own in texts_in(call.arguments) if not is_in(own.strip(), text)), None)
        if missing is not None:
            raise Unfit(f"changes an argument of a call: {missing[:SHOWN]!r}")


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts and the keys in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for own in value:
            yield from texts_in(own)
    elif isinstance(value, dict):
        for key, own in value.items():
            yield key
            yield from texts_in(own)


def is_in(text: str, whole: str) -> bool:
    """Return whether a text is in another one, as it is, or written as JSON or Python writes it: its quotes and
    backslashes are not compared then."""
    if text in whole:
        return True
    plain = without_quotes(whole)
    for ascii_only in (False, True):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        twice = json.dumps(once, ensure_ascii=ascii_only)[1:-1]
        if any(without_quotes(own) in plain for own in (once, twice)):
            return True
    return False


def without_quotes(text: str) -> str:
    return text.translate(QUOTES)


def guard(text: str, special: Sequence[Stretch]) -> str:
    """Return a text with BREAK in each of some ranges of characters."""
    for begin, _ in reversed(special):
        text = f"{text[: begin + 1]}{BREAK}{text[begin + 1 :]}"
    return text
