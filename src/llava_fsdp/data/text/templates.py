"""The conversation templates of LLaVA (LLaVA conversation.py:211-392): the text around questions and answers."""

from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property

from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.runtime.errors import ConfigError


class Style(Enum):
    """How a conversation template separates and marks turns (SeparatorStyle in LLaVA conversation.py:9-15)."""

    PLAIN = "plain"
    TWO = "two separators"
    LLAMA_2 = "llama_2"
    MPT = "mpt"
    MARKERS = "markers"
    """Turns begin with `### Human: ` or `### Assistant: ` (LLaVA train.py:276-293)."""


@dataclass(frozen=True)
class Pattern:
    """The texts around questions and answers in one style. `{system}`, `{sep}` etc. stand for the texts of a
    template."""

    before_system: str
    first_question: str
    """Text between the system text and the first question."""
    next_question: str
    """Text before each later question."""
    after_question: str
    answer_header: str
    """Text that names the answering role; a prompt for generation ends with it."""
    before_answer: str
    """Text between the answer's header and the answer; it has labels, like the answer."""
    after_answer: str
    """Text with which the model ends an answer; it has labels."""
    end: str = ""
    """Text after the last answer."""


STYLES: dict[Style, Pattern] = {
    Style.PLAIN: Pattern("", "", "", "", "", "", "{sep}"),
    Style.TWO: Pattern("", "{sep}{user}: ", "{user}: ", "{sep}", "{assistant}:", " ", "{sep2}"),
    Style.LLAMA_2: Pattern("[INST] ", "", "{sep}[INST] ", " [/INST]", "", " ", " {sep2}"),
    Style.MPT: Pattern("", "{sep}{user}", "{user}", "{sep}", "{assistant}", "", "{sep}"),
    Style.MARKERS: Pattern("", "\n\n### {user}: ", " {user}: ", "\n", "### {assistant}:", " ", "\n###", end=" "),
}


@dataclass(frozen=True)
class Template:
    """A conversation template of LLaVA; the fields have the names that LLaVA gives them."""

    style: Style
    system: str = ""
    user: str = ""
    assistant: str = ""
    sep: str = ""
    sep2: str = ""
    image: str = IMAGE_TAG
    """Text that replaces each `<image>` tag of a record."""

    adds_bos = True
    """Whether the tokenizer's BOS token, if it has one, is put before the text."""
    text_before_answer = ""
    thought = ("", "")
    """Text that a model writes before an answer, apart from white space."""

    @cached_property
    def pattern(self) -> Pattern:
        texts = asdict(self)
        return Pattern(**{name: part.format(**texts) for name, part in asdict(STYLES[self.style]).items()})

    @property
    def around_system(self) -> tuple[str, str]:
        """The texts (before, after) around the system text of a record, which replaces the template's own."""
        match self.style:
            case Style.LLAMA_2:
                before, after = LLAMA_2_SYSTEM.split("{}")
                return before, after
            case Style.MPT:
                return MPT_SYSTEM, ""
            case _:
                return "", ""

    @property
    def image_only(self) -> bool:
        """Whether each question is replaced by its image tags (stage 1: the model captions the image)."""
        return self.style is Style.PLAIN

    @property
    def stop(self) -> str:
        return self.pattern.after_answer


CURIOUS_USER = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
CURIOUS_HUMAN = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
VISUAL_CONTENT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant is able to understand the "
    "visual content that the user provides, and assist the user with a variety of tasks using natural language."
    "The visual content will be provided with the following format: <Image>visual content</Image>."
)
LLAMA_2_SAFETY = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe.  "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information."
)
LANGUAGE_AND_VISION = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
LLAMA_2_SYSTEM = "<<SYS>>\n{}\n<</SYS>>\n\n"
MPT_SYSTEM = "<|im_start|>system\n"
WRAPPED_IMAGE = f"<Image>{IMAGE_TAG}</Image>"


def two(system: str, image: str = IMAGE_TAG) -> Template:
    return Template(Style.TWO, system, "USER", "ASSISTANT", sep=" ", sep2="</s>", image=image)


def markers(system: str, image: str = IMAGE_TAG) -> Template:
    return Template(Style.MARKERS, system, "Human", "Assistant", sep="###", image=image)


def mpt(system: str) -> Template:
    """Return a template in the style MPT with this system text."""
    return Template(
        Style.MPT,
        MPT_SYSTEM + system,
        "<|im_start|>user\n",
        "<|im_start|>assistant\n",
        sep="<|im_end|>",
    )


TEMPLATES: dict[str, Template] = {
    "plain": Template(Style.PLAIN, sep="\n"),
    "v0": markers(CURIOUS_HUMAN),
    "v0_mmtag": markers(VISUAL_CONTENT, WRAPPED_IMAGE),
    "v1": two(CURIOUS_USER),
    "llava_v1": two(CURIOUS_HUMAN),
    "v1_mmtag": two(VISUAL_CONTENT, WRAPPED_IMAGE),
    "llama_2": Template(Style.LLAMA_2, LLAMA_2_SYSTEM.format(LLAMA_2_SAFETY), sep="<s>", sep2="</s>"),
    "llava_llama_2": Template(Style.LLAMA_2, LLAMA_2_SYSTEM.format(LANGUAGE_AND_VISION), sep="<s>", sep2="</s>"),
    "mistral_instruct": Template(Style.LLAMA_2, sep="", sep2="</s>"),
    "mpt": mpt("A conversation between a user and an LLM-based AI assistant. "
               "The assistant gives helpful and honest answers."),
    "chatml": mpt("Answer the questions."),
}  # fmt: skip

ALIASES: dict[str, str] = {
    "v0_plain": "plain",
    "default": "v0",
    "llava_v0": "v0",
    "vicuna_v1": "v1",
    "v0.5": "v1",
    "chatml_direct": "chatml",
    "mistral_direct": "chatml",
}


def template(name: str) -> Template:
    """Return the template with a name or alias. Raise ConfigError if no template has it (LLaVA silently takes v1)."""
    found = TEMPLATES.get(ALIASES.get(name, name))
    if found is None:
        raise ConfigError(
            f"data.template={name} does not exist; choose one of {', '.join(sorted(TEMPLATES))} "
            f"(or an alias: {', '.join(sorted(ALIASES))})"
        )
    return found
