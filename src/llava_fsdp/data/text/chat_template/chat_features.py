"""Find out what a chat template (Jinja) reads of answers beside their text: thoughts, calls of tools, switches.

Templates do not say it. So short conversations of marker texts are rendered, and a feature is there if it changes the
text. A function raises Unfit if the template cannot be used at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llava_fsdp.data.records.record import Call
from llava_fsdp.data.text.chat_template.chat_layout import MARK, NO_END, Unfit, answer_end, common_prefix_length
from llava_fsdp.data.text.chat_template.message_parts import TEXT, Message, MessageForm
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which templates read a thought."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that say whether the answer to come begins with a thought."""
KEEP = {
    "preserve_thinking": True, "keep_past_thinking": True, "clear_thinking": False, "truncate_history_thinking": False,
}  # fmt: skip
"""{variable of templates: value with which thoughts of earlier turns stay in prompts}."""
OPENERS = {"<think>\n": "\n</think>\n\n", "<think>": "</think>"}
"""{text with which a prompt opens a thought: text that ends the thought}, for templates that never show a thought
(DeepSeek-R1): they lack the second text."""
ASKED, SAID, NEXT, NEXT_SAID, THOUGHT, PLACE = (MARK.format(number) for number in range(6))
"""Marker texts: a question, its answer, the next question, its answer, a thought, an argument of a call."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
            "required": ["place"],
        },
    },
}
"""A tool for trials."""
CALL = Call("look", {"place": PLACE}, "abcdefghi")
"""A call of it. Mistral's templates take ids of nine letters."""


class Renders(Protocol):
    """A chat template, as this module needs it."""

    @property
    def code(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def parts(self) -> bool: ...
    def write_text(
        self, messages: Sequence[Message], ask: bool, form: MessageForm, tools: Sequence[Any] = (), **variables: Any
    ) -> str: ...


@dataclass(frozen=True)
class Features:
    """What a chat template reads of answers, and what it writes around them."""

    form: MessageForm
    """How messages are given to the template."""
    stop: str
    """Text that ends an answer without calls."""
    next_stop: str = ""
    """The end of `stop` that is the beginning of the next turn, if nothing else ends an answer (GLM-4.5)."""
    call_stop: str = ""
    """With `next_stop`, the text that begins the result of a call."""
    switch: str | None = None
    """Variable that says whether the answer to come begins with a thought; None without one."""
    opener: str = ""
    """Text with which a prompt opens a thought that the template never shows; empty without one."""
    thought_begin: str = ""
    """Text that a model writes before a thought; empty if the prompt has it."""
    thought_end: str = ""
    """Text that a model writes between a thought and the text of the answer; empty without thoughts."""
    tools: bool = False
    """Whether the template shows tools."""
    keeps: tuple[str, bool] | None = None
    """(Variable, value) with which thoughts of earlier turns stay in prompts; None without one."""

    @property
    def thoughts(self) -> bool:
        """Whether a model with this template writes thoughts."""
        return bool(self.form.thought or self.opener)


def said(role: str, text: str, **more: Any) -> Message:
    return Message(role, TEXT, (text,), **more)


def learn_features(template: Renders) -> Features:
    """Find out what a template reads of messages (such as thoughts and calls of tools) and what it writes around
    answers, by rendering about twenty conversations of marker texts. Raise Unfit if it does not write the text of a
    question, or writes nothing that ends an answer."""
    form = find_form(template)
    asked, answer = said("human", ASKED), said("gpt", SAID)
    stop, next_stop = find_stop(template, form)
    prompt = template.write_text([asked], True, form)
    # what the prompt has and the conversation with the answer lacks: the beginning of a thought that is never shown
    opener = rest_of(prompt, template.write_text([asked, answer], False, form)) if form.thought is None else ""
    made = Features(
        form, stop, next_stop, opener=opener if opener in OPENERS else "", tools=shows_tools(template, form)
    )
    made = replace(made, switch=find_switch(template, form), call_stop=find_call_stop(template, made))
    begin, end = find_thought(template, made)
    return replace(made, thought_begin=begin, thought_end=end, keeps=find_keeping(template, form))


def attempt(
    template: Renders, messages: Sequence[Message], ask: bool, form: MessageForm, tools: Sequence[Any] = (), **on: Any
) -> str:
    """Return a rendered text, as `template.write_text` makes it from these arguments; empty if the template fails."""
    try:
        return template.write_text(messages, ask, form, tools, **on)
    except Unfit:
        return ""


def rest_of(text: str, other: str) -> str:
    """Return what follows in a text after the beginning that it has in common with another one."""
    return text[common_prefix_length(text, other) :]


def find_form(template: Renders) -> MessageForm:
    """Find out in which form the template takes messages: the key of a thought, and whether the arguments of a call are
    an object or JSON text. If no form shows the marker text of an argument (PLACE), it stays an object. If no key shows
    the thought, there is no key. Raise Unfit if the template does not write the text of a question."""
    plain = MessageForm(template.parts)
    asked = said("human", ASKED)
    if ASKED not in template.write_text([asked], False, plain):
        raise Unfit("leaves the text of a question out")
    thinks = said("gpt", SAID, thought=THOUGHT)
    calls = said("gpt", "", calls=(CALL,))
    form = plain
    for as_text in (False, True):
        with_arguments = replace(plain, text_arguments=as_text)
        text = attempt(template, [asked, calls], False, with_arguments, [TOOL])
        # a template that takes JSON text writes an object as Python does, with single quotes: then try JSON text
        if PLACE in text and (as_text or "{'" not in text.partition(PLACE)[0][-40:]):
            form = with_arguments
            break
    for key in THOUGHT_KEYS:
        with_thought = replace(form, thought=key)
        texts = (
            attempt(template, [asked, thinks], False, with_thought),
            attempt(template, [asked, replace(calls, thought=THOUGHT)], False, with_thought, [TOOL]),
        )
        if any(THOUGHT in text for text in texts):
            return with_thought
    return form


def find_stop(template: Renders, form: MessageForm) -> tuple[str, str]:
    """Return the text that ends an answer, and the part of it that belongs to the next turn. The second is empty if the
    template writes a special token behind the last answer of a conversation, which ends it. Otherwise an answer ends
    with the special token with which the next turn begins. Raise Unfit if there is no such token."""
    turns = [said("human", ASKED), said("gpt", SAID), said("human", NEXT), said("gpt", NEXT_SAID)]
    last = template.write_text(turns[:2], False, form).partition(SAID)[2]
    whole = attempt(template, turns, False, form)
    earlier = whole.partition(SAID)[2].partition(NEXT)[0]
    end = answer_end(last, earlier, template.tokenizer)
    if end:
        return end, ""
    special = template.tokenizer.find_special(earlier)  # ranges [begin, end) of characters
    if not special or not earlier.startswith(last) or special[0][0] < len(last):
        raise Unfit(NO_END)
    return earlier[: special[0][1]], earlier[len(last) : special[0][1]]


def shows_tools(template: Renders, form: MessageForm) -> bool:
    asked = [said("human", ASKED)]
    bare = template.write_text(asked, True, form)
    return attempt(template, asked, True, form, [TOOL]) not in ("", bare)


def find_call_stop(template: Renders, features: Features) -> str:
    """Return the text that ends an answer with a call, for a template that ends an answer only by the beginning of the
    next turn (it has `next_stop`): what the template writes before the result of the call, up to its first special
    token. Return an empty text for other templates, or if there is no special token."""
    if not features.next_stop:
        return ""
    turns = [said("human", ASKED), said("gpt", "", calls=(CALL,)), said("tool", SAID, calls=(CALL,))]
    # the text without the result, and with it
    bare, whole = (attempt(template, turns[:end], False, features.form, [TOOL]) for end in (2, 3))
    behind = rest_of(whole, bare)
    special = template.tokenizer.find_special(behind)
    return behind[: special[0][1]] if special else ""


def find_switch(template: Renders, form: MessageForm) -> str | None:
    """Return the name of the template's variable that decides whether the answer that comes next begins with a thought;
    None if the prompt depends on no variable of SWITCHES."""
    asked = [said("human", ASKED)]
    for name in SWITCHES:
        if name in template.code:
            texts = {attempt(template, asked, True, form, (), **{name: on}) for on in (True, False)}
            if len(texts) == 2:
                return name
    return None


def find_keeping(template: Renders, form: MessageForm) -> tuple[str, bool] | None:
    """Return the template's variable that decides whether the thoughts of earlier turns stay in prompts, and the value
    with which they do; None if the template has no such variable."""
    turns = [said("human", ASKED), said("gpt", SAID, thought=THOUGHT), said("human", NEXT)]
    for name, value in KEEP.items():
        if name in template.code and form.thought is not None:
            texts = [attempt(template, turns, True, form, (), **{name: setting}) for setting in (value, not value)]
            if THOUGHT in texts[0] and THOUGHT not in texts[1]:
                return name, value
    return None


def find_thought(template: Renders, features: Features) -> tuple[str, str]:
    """Return the text that a model writes before the thought of an answer (empty if the prompt already has it), and the
    text between thought and answer; both are empty if the template shows no thoughts."""
    if features.opener:  # the prompt opens a thought, and the template never shows the text that ends it
        return "", OPENERS[features.opener]
    if features.form.thought is None:
        return "", ""
    # `switch`: variable of the template by which the answer to come begins with a thought
    on: dict[str, Any] = {} if features.switch is None else {features.switch: True}
    asked = said("human", ASKED)
    answer = said("gpt", SAID, thought=THOUGHT)
    prompt = attempt(template, [asked], True, features.form, **on)
    whole = attempt(template, [asked, answer], False, features.form, **on)
    before, _, behind = whole.partition(THOUGHT)
    if not behind or SAID not in behind:
        return "", ""
    return rest_of(before, prompt), behind.partition(SAID)[0]
