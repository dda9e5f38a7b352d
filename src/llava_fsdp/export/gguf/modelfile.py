"""Write a Modelfile, with which Ollama imports GGUF files.

Ollama does not read the Jinja template in a GGUF file: the Modelfile has the conversation template in the language of
Go's text/template (https://github.com/ollama/ollama/blob/main/docs/template.mdx).
"""

from dataclasses import dataclass
from typing import Any

from llava_fsdp.data.text.chat_template.bounded_jinja import TemplateRefused
from llava_fsdp.export.write.chat_template import as_text, render_messages

SYSTEM, QUESTIONS, ANSWERS = (
    "Sys7em text.",
    ("Firs7 question?", "Secon8 question?", "Thir9 question?"),
    ("On3.", "Tw0."),
)
"""Texts that stand in no chat template, to find what it writes around them."""


@dataclass(frozen=True)
class Texts:
    """What a chat template writes around the texts of a conversation.

    Attributes:
        begin: before the first question, if there is no system message.
        before_system, after_system: around a system message, before the first question.
        after_last_question: up to the answer to come.
        after_earlier_question: up to its answer, which may have a space more.
        after_answer: up to the next question.
    """

    begin: str
    before_system: str | None
    after_system: str
    after_last_question: str
    after_earlier_question: str
    after_answer: str

    def render(self, system: str | None, texts: list[str]) -> str:
        """Return a conversation (question, answer, ..., question) up to the beginning of its next answer."""
        begin = self.begin if system is None else f"{self.before_system}{system}{self.after_system}"
        between = [(self.after_earlier_question, self.after_answer)[n % 2] for n in range(len(texts) - 1)]
        return begin + "".join(
            text + after for text, after in zip(texts, [*between, self.after_last_question], strict=True)
        )


def find_texts(tokenizer: Any) -> Texts | None:
    """Return what the chat template of a transformers tokenizer writes around the texts of a conversation; None if a
    conversation is not made of such texts, as where a question is written otherwise once it is answered."""

    def rendered(texts: tuple[str, ...], system: str | None = None) -> str:
        return render_messages(tokenizer, as_text(texts, system), add_generation_prompt=True)

    turns = (QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1], QUESTIONS[2])
    before_system, after_system = None, ""
    try:
        begin, was_found, after_last_question = rendered(turns[:1]).partition(QUESTIONS[0])
        after_earlier_question, was_answered, rest = (
            rendered(turns[:3]).partition(QUESTIONS[0])[2].partition(ANSWERS[0])
        )
        after_answer, was_asked, _ = rest.partition(QUESTIONS[1])
        conversation = rendered(turns)
    except TemplateRefused:
        return None
    if not (was_found and was_answered and was_asked):
        return None
    try:
        with_system = rendered(turns, SYSTEM)
        before_system, is_there, rest = with_system.partition(SYSTEM)
        after_system = rest.partition(QUESTIONS[0])[0]
        before_system = before_system if is_there else None
    except TemplateRefused:
        with_system = None
    texts = Texts(
        begin=begin,
        before_system=before_system,
        after_system=after_system,
        after_last_question=after_last_question,
        after_earlier_question=after_earlier_question,
        after_answer=after_answer,
    )
    if texts.render(None, [*turns]) != conversation:
        return None
    if before_system is not None and texts.render(SYSTEM, [*turns]) != with_system:
        return None
    return texts


def go_text(text: str) -> str:
    """Return a text as it stands in a template of Go."""
    return text.replace("{{", '{{ "{{" }}')


def go_template(texts: Texts) -> str:
    """Return a chat template in the language of Go's templates. `texts`: what it writes around system message,
    questions and answers. `.Messages` has also the system message, which `.System` holds."""
    begin = go_text(texts.begin)
    if texts.before_system is not None:
        system = f"{go_text(texts.before_system)}{{{{ .System }}}}{go_text(texts.after_system)}"
        begin = f"{{{{ if .System }}}}{system}{{{{ else }}}}{begin}{{{{ end }}}}"
    return (
        f"{begin}{{{{ range $i, $_ := .Messages }}}}"
        "{{ $last := eq (len (slice $.Messages $i)) 1 }}"
        f'{{{{ if eq .Role "user" }}}}{{{{ .Content }}}}'
        f"{{{{ if $last }}}}{go_text(texts.after_last_question)}"
        f"{{{{ else }}}}{go_text(texts.after_earlier_question)}{{{{ end }}}}"
        f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}'
        f"{{{{ if not $last }}}}{go_text(texts.after_answer)}{{{{ end }}}}"
        "{{ end }}{{ end }}"
    )


def modelfile(texts: Texts | None, stops: list[str]) -> str:
    """Return the content of Ollama's Modelfile. `texts`: what the chat template writes around the texts of a
    conversation; None: the file has no template, and says so. `stops`: texts that end an answer."""
    lines = ["FROM ./model.gguf", "FROM ./mmproj.gguf"]
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop and "\n" not in stop]
    if texts is None or '"""' in go_template(texts):
        lines.append("# This model's chat template has no form in Ollama's language: send whole prompts with raw=true.")
    else:
        lines.append(f'TEMPLATE """{go_template(texts)}"""')
    return "\n".join(lines) + "\n"
