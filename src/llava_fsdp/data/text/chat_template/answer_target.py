"""Find the prompt of one answer, and the text that a model must generate behind it, with a model's own chat template.

P is the template's text for the turns before an answer, with the generation prompt; F is its text for these turns and
the answer. What a model generates after P so that the template would show the answer, the target, is

1. the rest of F, if F begins with P;
2. else what follows the generation prompt, P's end, in F, if it stands there before the answer: GPT-OSS's F leaves out
   thoughts of earlier calls, which P shows;
3. else, if P opens a thought that F never shows (DeepSeek-R1), the thought, the text that ends it, and F's answer.

In all other cases Unfit is raised. The target ends with what ends the turn. The places of the thought and the text in
it come from one more rendering with marker texts in their stead. If F is not this rendering with the answer's texts in
place of the marker texts, the template changes the texts, and Unfit is raised, too.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava_fsdp.data.text.chat_template.chat_features import OPENERS, SAID, THOUGHT, Features, Renders
from llava_fsdp.data.text.chat_template.chat_layout import RULE_1, SHOWN, Unfit, common_prefix_length
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
    begin: int = 0
    """Number of characters of `text` before the answer's text or calls: the thought, with what is written around it, or
    what the template writes for an empty thought."""
    said: Stretch = (0, 0)
    """Range of characters of the answer's text in `text`; empty, at `begin`, if the answer has none."""
    has_thought: bool = False
    """Whether the first `begin` characters are the answer's thought."""
    has_empty_thought: bool = False
    """Whether the first `begin` characters are an empty thought."""


@dataclass(frozen=True)
class AnswerTexts:
    """What a template writes for one answer and the turns before it."""

    prompt: str
    """P: the turns before the answer, with the generation prompt."""
    generation_prompt: str
    """The end of P, which asks for an answer: what P has in addition to the turns."""
    with_answer: str
    """F: the turns before the answer, and the answer."""
    with_markers: str
    """F with marker texts in place of the thought and the text of the answer."""


@dataclass(frozen=True)
class Asked:
    """A conversation, with guarded texts, in which answers are asked. Its methods raise Unfit if the template cannot be
    trained with."""

    template: Renders
    features: Features
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]

    def write(self, messages: Sequence[Message], ask: bool = False, **variables: Any) -> str:
        """Render messages with the conversation's tools. With `ask`, the text ends with the generation prompt. Raise
        Unfit if the template writes the character BREAK, which interrupts special tokens in texts, as a JSON escape: it
        could not be taken out again."""
        text = self.template.write_text(messages, ask, self.features.form, self.tools, **variables)
        if ESCAPED_BREAK in text:
            raise Unfit("escapes a special token in a text")
        return text

    def prompt(self, turn: int, variables: dict[str, Any]) -> str:
        """Return the template's prompt for the turns before the one with index `turn`, rendered with some variables.
        Raise Unfit if it leaves out a tool, or the text of a question or of a result."""
        before = self.messages[:turn]
        text = self.write(before, ask=True, **variables)
        for tool in self.tools:
            if not is_in(tool["function"]["name"], text):
                raise Unfit(f"leaves the tool {tool['function']['name']} out")
        for number, message in enumerate(before):
            # a template that drops the text of an earlier answer drops it at inference, too
            if message.role != "gpt" and not all(is_in(message_text.strip(), text) for message_text in message.texts):
                raise Unfit(f"leaves turn {number} ({message.role}) out, or changes its text")
        return text

    def variables(self, turn: int) -> dict[str, Any]:
        """Return the variables of the template with which the answer with index `turn` is rendered. If the answer has a
        thought, and the template has a variable that switches thoughts on, this is true. Otherwise there are none, and
        the template's own value of that variable counts."""
        switch = self.features.switch
        return {} if switch is None or self.messages[turn].thought is None else {switch: True}

    def texts(self, turn: int) -> AnswerTexts:
        """Render the texts from which the target of the answer with index `turn` is found: its prompt, the generation
        prompt (the end of the prompt, which asks for an answer), and the conversation up to the answer. The last is
        rendered twice: as it is, and with marker texts in place of the answer's text and thought."""
        answer_message, before, variables = self.messages[turn], self.messages[:turn], self.variables(turn)
        prompt = self.prompt(turn, variables)
        generation_prompt = prompt[common_prefix_length(prompt, self.write(before, **variables)) :]
        # white space beside a thought or calls stays, because some templates write such an answer in another way
        is_alone = answer_message.texts[0] and answer_message.thought is None and not answer_message.calls
        marked = (
            replace(answer_message, texts=(SAID,)) if answer_message.texts[0].strip() or is_alone else answer_message
        )
        marked = marked if answer_message.thought is None else replace(marked, thought=THOUGHT)
        with_answer, with_markers = (self.write([*before, answer], **variables) for answer in (answer_message, marked))
        return AnswerTexts(prompt, generation_prompt, with_answer, with_markers)

    def target(self, turn: int) -> Target:
        """Return the prompt of the answer with index `turn`, and its target: the text that a model must generate after
        the prompt, up to and including what ends the answer. Raise Unfit if a model with this template would not write
        the answer so."""
        answer_message, features = self.messages[turn], self.features
        if answer_message.thought is not None and not features.thoughts:
            raise Unfit("shows no thoughts; data.thoughts=drop leaves them out")
        texts = self.texts(turn)
        # the target is `unshown` and the text `with_answer` from `start` on; `unshown` is a thought that the template
        # never shows, with what ends it, and empty for most templates
        start, unshown = start_and_unshown_thought(answer_message, texts, features.opener)
        if not texts.with_markers.startswith(texts.with_answer[:start]):
            raise Unfit("changes earlier turns because of what an answer says")
        spans = find_spans(answer_message, texts.with_answer[start:], texts.with_markers[start:], not unshown)
        self.check_calls(turn, texts.with_answer[start:])  # no call and no argument is left out
        if self.template.tokenizer.find_special(texts.generation_prompt) and texts.with_answer.startswith(
            texts.generation_prompt, start
        ):
            raise Unfit("asks without the header that it then shows before the answer")
        ended = self.text_until_stop(turn, texts, start, spans[SAID][1] if SAID in spans else 0)
        if any(end > len(ended) for _, end in spans.values()):
            raise Unfit("writes the text of an answer with calls after their results")
        text = unshown + ended
        spans = {mark: (begin + len(unshown), end + len(unshown)) for mark, (begin, end) in spans.items()}
        if unshown:  # the range of the thought, without the text that ends it
            spans[THOUGHT] = 0, len(unshown) - len(OPENERS[features.opener])
        # where the thought ends in the target, and whether it is the empty one that the template itself writes
        begin, is_empty = thought_end(features, text, spans)
        said = spans.get(SAID, (begin, begin))
        return Target(texts.prompt, text, begin, said, answer_message.thought is not None, is_empty)

    def text_until_stop(self, turn: int, texts: AnswerTexts, start: int, said_end: int) -> str:
        """Return the template's text of the conversation (`texts.with_answer`) from the character `start` on, up to and
        including what ends the answer. The answer's own text ends `said_end` characters behind `start`. An answer
        without calls ends with `features.stop`, and one with calls with the first special token after which only white
        space follows."""
        answer_message, features, rest = self.messages[turn], self.features, texts.with_answer[start:]
        if features.next_stop:  # this template ends an answer only by the beginning of the next turn, which is added
            return rest.rstrip("\n") + features.call_stop if answer_message.calls else rest + features.next_stop
        if not answer_message.calls:
            found = rest.find(features.stop, said_end)
            if found < 0:
                raise Unfit("ends an answer in another way than usual")
            return rest[: found + len(features.stop)]
        kept = rest
        results = [Message("tool", TEXT, ("result",), calls=(call,)) for call in answer_message.calls]
        try:  # what the template no longer writes once results follow does not end the answer
            after = self.write([*self.messages[: turn + 1], *results], **self.variables(turn))
            kept = rest[: max(0, common_prefix_length(after, texts.with_answer) - start)]
        except Unfit:
            pass  # the template takes no such result: the end is looked for in all of `rest`
        find = self.template.tokenizer.find_special
        for text in (kept, rest):
            ends = [end for _, end in find(text) if not text[end:].strip()]
            if ends:
                return rest[: ends[0]]
        raise Unfit("writes no special token after a call")

    def check_calls(self, turn: int, text: str) -> None:
        """Raise Unfit if `text`, target of the answer with index `turn`, lacks a call of it or a call's argument."""
        answer_message, before = self.messages[turn], self.messages[:turn]
        if len(answer_message.calls) > 1:  # they may be equal, so each must add to the text
            fewer = [
                replace(answer_message, calls=answer_message.calls[: end + 1])
                for end in range(len(answer_message.calls))
            ]
            if len({self.write([*before, answer], **self.variables(turn)) for answer in fewer}) < len(fewer):
                raise Unfit(f"leaves a call of {answer_message.calls[-1].name} out")
        for call in answer_message.calls:
            if not is_in(call.name, text):
                raise Unfit(f"leaves a call of {call.name} out")
            for ways in values_in(call.arguments):  # the texts in which a template may write one value
                if not any(is_in(way, text) for way in ways):
                    raise Unfit(f"changes an argument of a call: {ways[0][:SHOWN]!r}")


def start_and_unshown_thought(answer_message: Message, texts: AnswerTexts, opener: str) -> tuple[int, str]:
    """Find where the target (what a model must generate after `texts.prompt` to give this answer) begins in
    `texts.with_answer`, the template's text of the conversation with the answer. Return that index, and what the target
    has before it that the template never shows: a thought which it opens in the prompt. `opener`: the text that opens
    such a thought; empty if the template shows thoughts, or has none. Raise Unfit if the text before the answer is
    neither the prompt nor what the functions below accept."""
    prompt, with_answer = texts.prompt, texts.with_answer
    start = len(prompt) if with_answer.startswith(prompt) else index_after_generation_prompt(texts)
    start = index_after_prompt_but_for_spaces(texts) if start is None else start
    if start is not None:
        if answer_message.thought is not None and THOUGHT not in texts.with_markers[start:]:
            raise Unfit("does not show the thought of this turn")
        return start, ""
    if opener and prompt.endswith(opener) and with_answer.startswith(prompt[: -len(opener)]):
        if answer_message.thought is None:
            raise Unfit("opens a thought in the prompt, and this answer has none")
        return len(prompt) - len(opener), answer_message.thought.strip("\n") + OPENERS[opener]
    same = common_prefix_length(prompt, with_answer)
    raise Unfit(f"shows the answer behind another text than its prompt, which has {prompt[same:][:SHOWN]!r} ({RULE_1})")


def index_after_generation_prompt(texts: AnswerTexts) -> int | None:
    """Return where the answer begins behind the generation prompt, the text with which a prompt asks for an answer: an
    index in `texts.with_answer`, the conversation with the answer. The generation prompt is sought in
    `texts.with_markers`, where marker texts stand for what the answer says, as the last one before them. Return None if
    there is none, or if the text up to its end depends on what the answer says."""
    place = (
        texts.with_markers.rfind(texts.generation_prompt, 0, first_mark(texts.with_markers))
        if texts.generation_prompt
        else -1
    )
    end = place + len(texts.generation_prompt)
    return end if place >= 0 and texts.with_answer.startswith(texts.with_markers[:end]) else None


def index_after_prompt_but_for_spaces(texts: AnswerTexts) -> int | None:
    """Return the index in `texts.with_answer` (the conversation as the template writes it with the answer) at which the
    answer begins, if the text before it differs from the prompt only in white space; else None. That text is taken from
    `texts.with_markers`, the same conversation with marker texts in place of the answer's text and thought."""
    before = texts.with_markers[: first_mark(texts.with_markers)]
    return len(before) if before.split() == texts.prompt.split() and texts.with_answer.startswith(before) else None


def first_mark(marked: str) -> int:
    """Return the index of the first marker text of an answer in `marked`; the length of `marked` if it has none."""
    return min((place for mark in (SAID, THOUGHT) if (place := marked.find(mark)) >= 0), default=len(marked))


def find_spans(answer_message: Message, rest: str, marked: str, shows_thought: bool) -> dict[str, Stretch]:
    """Return the ranges of characters of an answer's text and thought in its target, as {marker text: range}. The
    marker text is SAID for the text and THOUGHT for the thought. Raise Unfit if `rest` is not `marked` with the
    answer's texts in place of the marker texts; a template may strip white space at their ends.

    Args:
        rest: what the template writes from the beginning of the target on.
        marked: the same with marker texts in place of the answer's thought and text.
        shows_thought: whether `rest` and `marked` have the thought.
    """
    wanted = {SAID: answer_message.texts[0]} if answer_message.texts[0].strip() or SAID in marked else {}
    if answer_message.thought is not None and shows_thought:
        wanted[THOUGHT] = answer_message.thought
    names = {SAID: "text", THOUGHT: "thought"}
    for mark in wanted:
        if marked.count(mark) != 1:
            raise Unfit(f"leaves the {names[mark]} of an answer out, or repeats it")
    order = sorted(wanted, key=marked.find)
    spans: dict[str, Stretch] = {}
    at, filled = 0, ""
    for number, mark in enumerate(order):
        begin = marked.find(mark)
        filled += marked[at:begin]
        at = begin + len(mark)
        is_last = number + 1 == len(order)
        behind = marked[at:] if is_last else marked[at : marked.find(order[number + 1])]
        # the text as one of the ways of stripping leaves it, the longest first
        for text in sorted({strip(wanted[mark]) for strip in STRIPS}, key=len, reverse=True):
            whole = filled + text + behind
            if rest == whole if is_last else rest.startswith(whole):
                break
        else:
            raise Unfit(f"changes the {names[mark]} of an answer")
        spans[mark] = len(filled), len(filled) + len(text)
        filled += text
    if filled + marked[at:] != rest:
        raise Unfit("changes the text of an answer")
    return spans


def thought_end(features: Features, text: str, spans: dict[str, Stretch]) -> tuple[int, bool]:
    """Return the number of characters at the beginning of a target that are a thought with the text before and after
    it, and whether the thought is empty; 0 and False without a thought. An empty one is what the template itself writes
    for an answer without a thought. `spans`: ranges of the answer's thought and text in the target, by marker text."""
    until = spans[SAID][0] if SAID in spans else len(text)
    if THOUGHT in spans:
        end = spans[THOUGHT][1]
        # the target may end within the text after a thought
        return until if SAID in spans else end + common_prefix_length(text[end:], features.thought_end), False
    if not features.thought_begin.strip():
        return 0, False
    # white space in an empty thought differs from that around a thought
    letters = "".join(f"{features.thought_begin}{features.thought_end}".split())
    found = re.compile(r"\s*".join(["", *map(re.escape, letters), ""])).match(text, 0, until)
    return (0, False) if found is None else (found.end(), True)


def values_in(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the texts, keys, numbers and constants in a JSON value, each as a tuple of the ways in which a template may
    write it: texts and keys without white space at their ends, others in JSON's and Python's form."""
    if isinstance(value, list):
        for item in value:
            yield from values_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (key.strip(),)
            yield from values_in(item)
    else:
        yield (value.strip(),) if isinstance(value, str) else (json.dumps(value), str(value))


def is_in(text: str, whole: str) -> bool:
    """Return whether a text is a part of `whole`, as it is, or as JSON or Python writes it in quotes, once or twice
    (JSON in a JSON text). In the second case, quotes and backslashes are left out of both before they are compared."""
    if text in whole:
        return True
    plain = without_quotes(whole)
    for ascii_only in (False, True):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        twice = json.dumps(once, ensure_ascii=ascii_only)[1:-1]
        if any(without_quotes(written) in plain for written in (once, twice)):
            return True
    return False


def without_quotes(text: str) -> str:
    return text.translate(QUOTES)


def guard(text: str, special: Sequence[Stretch]) -> str:
    """Return a text with the character BREAK behind the first character of each range in `special`. In a text of a
    record, the ranges are those that would be taken for special tokens or placeholders of the template."""
    for begin, _ in reversed(special):
        text = f"{text[: begin + 1]}{BREAK}{text[begin + 1 :]}"
    return text
