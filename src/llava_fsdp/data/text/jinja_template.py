"""Render conversations with a language model's own chat template (Jinja), and find which characters come from the turns
(messages) of a dataset record.

The text is exactly what transformers' `apply_chat_template` renders. The template's own text around the turns depends
only on the roles of the turns. So it is determined once for each sequence of roles, by rendering a conversation whose
turns are marker texts. Each record's conversation is then rendered. If the result is not exactly the text determined
before with the record's turns in it, the template has changed what a turn says, and the record is refused.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llava_fsdp.data.records.problems import Kind
from llava_fsdp.data.records.record import Turn
from llava_fsdp.data.text.bounded_jinja import BREAKS, TemplateRefused, render
from llava_fsdp.data.text.templates import IMAGE_TAG, Template, template
from llava_fsdp.data.text.tokenizer import Tokenizer, open_tokenizer, read_optional
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.safe_load import read_text

OWN = "chat_template"
"""Name of a language model's own template in `data.template`; a run records it as chat_template-DIGEST."""
FILE = "chat_template.jinja"
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
BEGIN, END = "{# the model's own chat template begins #}\n", "{%+ endset %}{# the model's own chat template ends #}"
"""Texts before and after the model's template in an exported file. The code outside of them converts messages to the
turns that training saw."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of a template for which transformers gives it special tokens."""
DATE = (
    "{%- macro strftime_now(format) -%}{{- format | replace('%d', '26') | replace('%-d', '26') | replace('%m', '07')"
    " | replace('%b', 'Jul') | replace('%B', 'July') | replace('%A', 'Friday') | replace('%y', '24')"
    " | replace('%Y', '2024') -}}{%- endmacro %}\n"
)
"""Jinja code that is put before a template which writes today's date. It makes the date always 26 July 2024, which
Llama 3 writes if it knows none. Otherwise the tokens of a record would change from day to day."""
BOS = "{%- if true %}{{- bos_token }}{%- endif %}\n"
"""Jinja code that is put before the template of a LLaVA-NeXT model. It writes the BOS token, which the processor adds
and the template lacks."""
MARK = "\ue000turn {}\ue001"
"""Text that is used as turn number {} to determine the text around turns. It has private-use characters, which no
template treats specially."""
MARKS = re.compile("\ue000turn (\\d+)\ue001")
ANSWER = "\ue000answer\ue001"
"""Text that is used as the last turn of a prompt, whose answer is still to be generated."""
LEFT, RIGHT = "\n\t\n", "\n \n"
"""White space that is put before and after MARK, to determine how the template strips the text of a turn."""
STRIPPED = ("", "\n", None)
"""Possible arguments of `str.strip` with which a template strips the text of a turn: it strips nothing, line breaks, or
white space."""
SECONDS = 0.2
"""Greatest number of seconds of processor time that a template may take to render a short conversation, of which it is
shown about thirty; a slower one is refused. `bounded_jinja` has the limits of all conversations."""


class Unfit(Exception):
    """Raised if a chat template cannot be used for a conversation; the message says why."""


@dataclass(frozen=True)
class Slot:
    """Position in the text of a rendered conversation at which the text of a turn (message) is inserted."""

    turn: int
    """Index of the turn."""
    left: str | None
    """Argument of `str.lstrip` with which the template strips the turn's text."""
    right: str | None
    """Argument of `str.rstrip` with which the template strips the turn's text."""

    def fill(self, text: str) -> str:
        """Return the text of a turn (message) as the chat template writes it: without the white space that it
        strips."""
        return text.lstrip(self.left).rstrip(self.right)


@dataclass(frozen=True)
class Frame:
    """Text that a chat template writes between two turns (messages), before the first one or after the last one."""

    text: str
    end: int = 0
    """Number of characters at the beginning of `text` that end an answer; they have labels, like the answer."""
    before: int = 0
    """Number of white-space characters at the end of `text` that are between the prompt for generation and an answer;
    they have labels, like the answer."""


@dataclass(frozen=True)
class Layout:
    """The text that a chat template writes around the turns (messages) of every conversation with the same sequence of
    roles."""

    frames: tuple[Frame, ...]
    """The template's own texts: one before each turn, and one after the last turn."""
    slots: tuple[Slot, ...]
    """For each position between two frames, the turn that is inserted there."""

    def fill(self, texts: Sequence[str]) -> list[str]:
        """Return the texts of a conversation's turns (messages) as the chat template writes them, and in its order.

        Args:
            texts: the texts of the turns.
        """
        return [slot.fill(texts[slot.turn]) for slot in self.slots]

    def join(self, filled: Sequence[str]) -> str:
        """Return the text of a whole conversation: what the chat template writes around the turns (messages), with
        their texts in it.

        Args:
            filled: the texts of the turns, as `fill` returns them.
        """
        return "".join(frame.text + text for frame, text in zip(self.frames, [*filled, ""], strict=True))


@dataclass(frozen=True)
class Piece:
    """A part of the text of a conversation: text of the chat template, or of a turn (message)."""

    text: str
    supervised: bool
    """Whether the tokens of the text have labels."""
    turn: int | None = None
    """Index of the turn; None: the text is the template's."""


@dataclass(frozen=True, repr=False)
class ChatTemplate:
    """A language model's own chat template (Jinja), which renders conversations as text."""

    code: str
    """Jinja code."""
    path: Path
    """The file that contains the template."""
    variables: dict[str, str]
    """{variable of the template: special token}."""
    tokenizer: Tokenizer
    parts: bool = False
    """Whether the content of a message is a list with one text part; otherwise it is text."""
    layouts: dict[str, Layout | str] = field(default_factory=dict, compare=False)
    """{roles of a conversation, as first letters: its Layout, or the reason why the template cannot be used for it}."""

    image = IMAGE_TAG
    image_only = False
    adds_bos = False

    def __repr__(self) -> str:
        return f"chat template {digest(self.code)} {sorted(self.variables.items())} {self.parts}"

    @cached_property
    def stop(self) -> str:
        """The text with which a chat template ends an answer: all its text after the last answer up to and including
        the first special token. Special tokens directly after this one are included if they also follow an earlier
        answer. Raises Unfit if there is no special token."""
        _, frames = self.order_and_frames("hg")
        _, longer = self.order_and_frames("hghg")
        last, earlier = frames[-1], longer[2]
        ends: list[int] = []
        for begin, end in self.tokenizer.find_special(last):
            if not ends or (begin == ends[-1] and earlier.startswith(last[:end])):
                ends.append(end)
        if not ends:
            raise Unfit("writes no special token after the last answer, so that a model would not learn to end one")
        return last[: ends[-1]]

    def write(self, turns: Sequence[Turn], where: str) -> list[Piece]:
        """Render the messages (turns) of a conversation with the chat template. Return its text as pieces, which know
        whether their tokens have labels. If the last message is a question, the text ends where a model's answer
        begins.

        Args:
            where: name of the conversation in error messages.

        Raises:
            DataError: the template refuses the conversation, or changes the text of a turn.
        """
        asks = turns[-1].role == "human"
        turns = [*turns, Turn("gpt", ANSWER)] if asks else turns
        texts = [turn.text for turn in turns]
        try:
            layout = self.layout("".join(turn.role[0] for turn in turns))
            filled = layout.fill(texts)
            if self.render([turn.role for turn in turns], texts) != layout.join(filled):
                raise Unfit("changes the text of a turn, or leaves a turn out, because of what it says")
        except Unfit as unfit:
            raise DataError(
                f"{where}: the chat template {self.path} {unfit}; take the record out, or set data.template=chatml "
                "or another of LLaVA's",
                Kind.chat_template,
            ) from unfit
        pieces: list[Piece] = []
        for frame, slot, text in zip(layout.frames, layout.slots, filled, strict=False):
            before = len(frame.text) - frame.before
            pieces.append(Piece(frame.text[: frame.end], True))
            pieces.append(Piece(frame.text[frame.end : before], False))
            if asks and slot.turn == len(turns) - 1:
                return pieces
            pieces.append(Piece(frame.text[before:], True))
            pieces.append(Piece(text, turns[slot.turn].role == "gpt", slot.turn))
        last = layout.frames[-1]
        return [*pieces, Piece(last.text[: last.end], True), Piece(last.text[last.end :], False)]

    def layout(self, roles: str) -> Layout:
        """Return what a chat template writes around the turns (messages) of conversations with the same roles. The
        result is cached. Raise Unfit if the template cannot be used for them.

        Args:
            roles: first letters of the turns' roles, such as `hg` for a question (human) and an answer (gpt).
        """
        if roles not in self.layouts:
            try:
                self.layouts[roles] = self.learn(roles)
            except Unfit as unfit:
                self.layouts[roles] = str(unfit)
        found = self.layouts[roles]
        if isinstance(found, str):
            raise Unfit(found)
        return found

    def learn(self, roles: str) -> Layout:
        """Find out what a chat template writes around the turns (messages) of conversations with the same roles, by
        rendering marker texts as turns. Raise Unfit if the template cannot be used for them.

        Args:
            roles: first letters of the turns' roles, such as `hg` for a question (human) and an answer (gpt). The last
                one must be `g`.
        """
        order, frames = self.order_and_frames(roles)
        _, lefts = self.order_and_frames(roles, before=LEFT)
        _, rights = self.order_and_frames(roles, after=RIGHT)
        slots = [
            Slot(turn, stripped(before, own, LEFT, str.lstrip), stripped(behind[::-1], after[::-1], RIGHT, str.rstrip))
            for turn, before, own, behind, after in zip(order, lefts, frames, rights[1:], frames[1:], strict=False)
        ]
        marks = [MARK.format(n) for n in order]
        head = "".join(frame + mark for frame, mark in zip(frames, [*marks[:-1], ""], strict=False))
        prompt = self.render(
            full(roles)[:-1], [MARK.format(n) for n in range(len(roles) - 1)], add_generation_prompt=True, most=SECONDS
        )
        rest = head[len(prompt) :] if head.startswith(prompt) else ""
        layout = Layout(self.divide(frames, [roles[turn] for turn in order], rest if rest.isspace() else ""), (*slots,))
        if len(roles) > 2 and roles[-3] == "g":
            self.check_history(roles, layout)
        return layout

    def order_and_frames(self, roles: str, before: str = "", after: str = "") -> tuple[list[int], list[str]]:
        """Render a conversation whose turns (messages) are marker texts. Return the order in which the chat template
        writes the turns (their indices), and its own text before, between and after them. Raise Unfit if a turn is not
        written exactly once.

        Args:
            roles: first letters of the turns' roles, such as `hg` for a question (human) and an answer (gpt).
            before: text that is put before each marker text.
            after: text that is put after each marker text.
        """
        texts = [before + MARK.format(n) + after for n in range(len(roles))]
        text = self.render(full(roles), texts, most=SECONDS)
        order = [int(n) for n in MARKS.findall(text)]
        if sorted(order) != list(range(len(roles))):
            raise Unfit(f"leaves turns out, or repeats them, in a conversation of {spell(full(roles))}")
        return order, MARKS.split(text)[::2]

    def divide(self, frames: Sequence[str], roles: Sequence[str], before: str) -> tuple[Frame, ...]:
        """Convert the texts that a chat template writes around turns (messages) to Frames, which know what characters
        of a text have labels.

        Args:
            frames: the texts before, between and after the turns.
            roles: first letters of the turns' roles (`s`, `h` or `g`), in the order of the text.
            before: white space between the prompt for generation and an answer.
        """
        return tuple(
            Frame(
                frame,
                len(self.stop) if last == "g" and frame.startswith(self.stop) else 0,
                len(before) if following == "g" and frame.endswith(before) else 0,
            )
            for frame, last, following in zip(frames, ["", *roles], [*roles, ""], strict=True)
        )

    def check_history(self, roles: str, layout: Layout) -> None:
        """Raise Unfit if a chat template writes earlier turns (messages) of a conversation differently once later turns
        follow, so that training would see other prompts than the model does when it answers. The text between the last
        question but one and its answer may differ.

        Args:
            roles: first letters of the turns' roles, such as `hghg`.
            layout: what the template writes around the turns of conversations with these roles.
        """
        asked = self.layout(roles[:-2])
        same = len(asked.slots) - 1
        texts = [[frame.text for frame in own.frames[:same]] for own in (layout, asked)]
        if layout.slots[:same] != asked.slots[:same] or texts[0] != texts[1]:
            raise Unfit(f"writes earlier turns in another way once others follow, in a conversation of {len(roles)}")

    def render(
        self, roles: Sequence[str], texts: Sequence[str], add_generation_prompt: bool = False, most: float = math.inf
    ) -> str:
        """Render a conversation with the chat template and return the text; raise Unfit if the template fails, or takes
        too much time or memory.

        Args:
            roles: role of each turn (message): `system`, `human` or `gpt`.
            texts: text of each turn.
            add_generation_prompt: whether the text ends with the beginning of an answer, as for generation.
            most: seconds of processor time that this may take.
        """
        messages = [
            {"role": ROLES[role], "content": [{"type": "text", "text": text}] if self.parts else text}
            for role, text in zip(roles, texts, strict=True)
        ]
        keys: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **self.variables}
        try:
            text, seconds = render(self.code, messages, keys)
        except TemplateRefused as error:
            raise Unfit(f"{error}, for a conversation of {spell(roles)}") from error
        if seconds > most:
            raise Unfit(f"{BREAKS} takes over {most:g} seconds of processor time to render {len(roles)} turns")
        return text


def stripped(padded: str, frame: str, pad: str, strip: Any) -> str | None:
    """Return the argument of `strip` with which a chat template strips the text of a message: "" (nothing is stripped),
    a line break, or None (white space).

    Args:
        padded: text of the template before a message (or the reversed text after it), rendered with the white space
            `pad` between it and the message.
        frame: the same text, rendered without `pad`.
        strip: `str.lstrip` or `str.rstrip`.

    Raises:
        Unfit: the template strips other characters.
    """
    for chars in STRIPPED:
        rest = strip(pad, chars)
        if padded == frame + (rest if strip is str.lstrip else rest[::-1]):
            return chars
    raise Unfit("changes white space at the beginning or end of a turn in a way of its own")


def full(roles: str) -> list[str]:
    """Return the names of roles of messages (`system`, `human`, `gpt`), given their first letters, such as `hg`."""
    return [next(name for name in ROLES if name[0] == letter) for letter in roles]


def spell(roles: Sequence[str]) -> str:
    return ", ".join(ROLES[role] for role in roles)


def digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def is_own(name: str) -> bool:
    """Return whether a value of the setting `data.template` means the language model's own chat template instead of one
    of LLaVA's."""
    return name == OWN or name.startswith(f"{OWN}-")


def own_name(folder: Path) -> str | None:
    """Return the name under which a run records the chat template in a model's folder (`chat_template-DIGEST`); None if
    the folder has none."""
    found = find_code(folder)
    return None if found is None else f"{OWN}-{digest(found[1])}"


def usable_name(folder: Path) -> str | None:
    """Return the name under which a run records the chat template in a model's folder (`chat_template-DIGEST`); None if
    the folder has none, or one that cannot be used (this is logged)."""
    name = own_name(folder)
    try:
        return name and (open_template(name, folder, open_tokenizer(folder)) and name)
    except ConfigError as error:
        log().info("not used: %s", error)
        return None


def find_code(folder: Path) -> tuple[Path, str] | None:
    """Find the chat template in a model's folder. Return its file and the Jinja code; None if the folder has none.

    The files are those of transformers: `chat_template.jinja`, `chat_template.json`, `tokenizer_config.json`.
    """
    for path in (folder / FILE, folder / "chat_template.json", folder / "tokenizer_config.json"):
        code: Any = None
        if path.is_file():
            code = read_text(path) if path.suffix == ".jinja" else read_optional(path).get("chat_template")
        if isinstance(code, list):
            code = next((own["template"] for own in code if own.get("name") == "default"), None)
        if isinstance(code, str) and code:
            return path, complete(code, folder)
    return None


def complete(code: str, folder: Path) -> str:
    """Return the Jinja code of a chat template, preceded by code that adds what it lacks: the BOS token for a
    LLaVA-NeXT model, and a fixed date for a template that writes the current one.

    Args:
        code: text of the template's file; of a file that this program exported, only the model's own template is taken.
        folder: folder of the model.
    """
    if BEGIN in code:
        return code.partition(BEGIN)[2].rpartition(END)[0]
    bos = special_tokens(folder).get("bos_token")
    is_processor = read_optional(folder / "config.json").get("model_type") == "llava_next"
    add = BOS if is_processor and bos and bos not in code and "bos_token" not in code else ""
    return add + (DATE if "strftime_now" in code else "") + code.removesuffix("\n")


def special_tokens(folder: Path) -> dict[str, str]:
    """Return {variable of chat templates, such as `bos_token`: special token} from the tokenizer's files in a model's
    folder."""
    found = read_optional(folder / "special_tokens_map.json") | read_optional(folder / "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file():
        found = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **found}
    values = {name: found.get(name) for name in NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def open_template(name: str, folder: Path, tokenizer: Tokenizer) -> Template | ChatTemplate:
    """Return the conversation template that the setting `data.template` names: one of LLaVA's, or the language model's
    own chat template.

    Args:
        name: the setting's value.
        folder: folder of the language model.
        tokenizer: its tokenizer.

    Raises:
        ConfigError: there is no such template; or the folder's chat template is missing, is not the one that `name`
            records, or cannot be trained with.
    """
    if not is_own(name):
        return template(name)
    found = find_code(folder)
    if found is None:
        raise ConfigError(f"data.template={name}, and {folder} has no chat template; set data.template=chatml or v1")
    path, code = found
    if name not in (OWN, own_name(folder)):
        raise ConfigError(
            f"data.template={name}, and {path} has another chat template now ({own_name(folder)}): put the old one "
            f"back, or train anew with data.template={OWN}"
        )
    known = {token: text for token, text in special_tokens(folder).items() if token in code}
    own = ChatTemplate(code, path, known, tokenizer)
    reason = unfit(own)
    if reason is not None and BREAKS not in reason and unfit(replace(own, parts=True, layouts={})) is None:
        own, reason = replace(own, parts=True, layouts={}), None
    if reason is not None:
        raise ConfigError(
            f"data.template={name}: the chat template {path} {reason}; set data.template=chatml or another of LLaVA's"
        )
    return own


def unfit(chat_template: ChatTemplate) -> str | None:
    """Return the reason, for an error message, why a model's chat template cannot be used for training; None if it
    can."""
    try:
        for exchanges in (1, 2, 3):
            chat_template.layout("hg" * exchanges)
    except Unfit as reason:
        return str(reason)
    return None
