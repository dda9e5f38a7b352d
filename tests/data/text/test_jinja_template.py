"""A language model's own chat template: ids as transformers makes them, labels on the answers and their ends."""

import json
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import NO_LAYOUT, ONLY_THOUGHTS, SEVERAL, changed, published, specials, write_tokenizer
from small import write_json
from tiers import slow_after
from transformers import PreTrainedTokenizerFast

from llava_fsdp.config import EmptyThoughts, SpecialTokens, TooLong
from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.text.chat_template import jinja_template
from llava_fsdp.data.text.chat_template.jinja_template import OWN, ROLES, ChatTemplate, Unfit, open_template, own_name
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.teaching import DEFAULT
from llava_fsdp.data.text.templates import Template, template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.text.tokens.detokenize import AnswerText
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError

PUBLISHED, CHANGED = published(), changed()
NO_SYSTEM = {"gemma"}
ATOMS = " |  |\n|\n\n|\t|a|the|Red|12|größe|中文|🙂|▁|x.|, a|USER:|###|'s|user|{{x}}|{% if %}|\u2028|\r\n".split("|")
THINK = "<think>\n\n</think>\n\n"
ONLY_TRL: dict[str, set[str]] = {
    "gptoss": {"<|start|>assistant"},
    "muse_glimmer": {"<|start|>assistant"},
    "phi3": {"\n", "\n<eos>"},
    "phi3_5": {"\n", "\n<eos>"},
    **{name: set() for name in ("cohere", "cohere2", "llama3", "llava_next")},
    "qwen3_5_nothink": {THINK, "\n"},
}
"""What TRL's templates for training supervise besides an answer and its end; for other templates, a line break after
the end."""


def own(code: str, folder: Path, pieces: bool = False) -> ChatTemplate:
    write_tokenizer(code, folder, pieces)
    found = open_template(OWN, folder, open_tokenizer(folder))
    assert isinstance(found, ChatTemplate)
    return found


def encoder(
    form: Template | ChatTemplate, tokenizer: Tokenizer, special: SpecialTokens, images: int = 1
) -> ExactEncoder:
    return ExactEncoder(tokenizer, form, lambda *_: np.arange(images), UNLIMITED, TooLong.fail, False, special)


def record(*turns: tuple[str, str], images: tuple[str, ...] = ()) -> Record:
    return Record("data.json", 3, "abc", images, tuple(Turn(*turn) for turn in turns), bool(images))


def dialogue(dice: random.Random, special: list[str], most: int = 5) -> Record:
    """One to `most` exchanges of odd texts, some of them empty; some with a system turn or special tokens."""
    tokens = special if dice.random() < 0.3 else ATOMS

    def text() -> str:
        atoms = [*dice.choices(ATOMS, k=dice.randrange(6)), dice.choice(tokens) if dice.random() < 0.5 else ""]
        return "".join(dice.sample(atoms, len(atoms)))

    turns = [("system", text())] if dice.random() < 0.3 else []
    for _ in range(dice.randrange(1, most + 1)):
        turns += [("human", text()), ("gpt", text())]
    return record(*turns)


def messages_of(made: Record, form: ChatTemplate) -> list[dict[str, Any]]:
    return [
        {"role": ROLES[t.role], "content": [{"type": "text", "text": t.text}] if form.parts else t.text}
        for t in made.turns
    ]


def may_be_refused(made: Record, name: str, special: list[str]) -> bool:
    """Whether a text in the record may be one that the template changes: one of its own tokens, an empty text."""
    texts = [turn.text for turn in made.turns]
    has_system = made.turns[0].role == "system"
    no_system = has_system and (name in NO_SYSTEM or not texts[0].strip())
    return no_system or any(token in text for token in special for text in texts)


def runs(tokens: np.ndarray, where: np.ndarray) -> Iterator[list[int]]:
    for marked, group in groupby(zip(where.tolist(), tokens.tolist(), strict=True), lambda pair: pair[0]):
        if marked:
            yield [token for _, token in group]


def rows_of(*images: Any) -> np.ndarray:
    return np.arange(1)


@pytest.mark.parametrize(("pieces", "count"), [
    (False, 4), pytest.param(False, 1000, marks=pytest.mark.slow), pytest.param(True, 300, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("name", slow_after(14, sorted(PUBLISHED.keys() - NO_LAYOUT)))
def test_ids_are_transformers_and_labels_are_the_answers(name: str, pieces: bool, count: int, tmp_path: Path) -> None:
    """Random dialogues; the labels are also compared with TRL's marks where TRL's template writes the same text."""
    code, dice = PUBLISHED[name], random.Random(f"{name} {pieces}")
    form, special = own(code, tmp_path / "lm", pieces), specials(code)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path / "lm")
    training = CHANGED.get(name) or (code if "endgeneration" in code else None)
    parse = encoder(form, form.tokenizer, SpecialTokens.parse)
    refused, only_trl, compared = 0, set(), 0
    call: dict[str, Any] = {"chat_template": form.code if "strftime_now" in code else None}
    for _ in range(count):
        made = dialogue(dice, special, 1 if name in SEVERAL else 5)
        messages = messages_of(made, form)
        try:
            sample = parse.whole(made, UNLIMITED)
        except DataError as error:
            assert error.kind is Kind.chat_template and may_be_refused(made, name, special), made.turns
            refused += 1
            continue
        assert sample is not None
        ids, labelled = sample.input_ids, sample.labels != IGNORE
        check_answers(form, theirs, messages, sample, call)
        whole = theirs.apply_chat_template(messages, tokenize=False, **call)
        written = theirs.apply_chat_template(messages, return_dict=False, **call)
        assert theirs.decode(ids) == theirs.decode(written), made.turns
        if (
            training is None
            or sample.unlearnt
            or written != ids.tolist()
            or theirs.apply_chat_template(messages, tokenize=False, chat_template=training) != whole
        ):
            continue
        compared += 1
        found = theirs.apply_chat_template(
            messages, chat_template=training, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = np.array(found["assistant_masks"], dtype=bool)
        if name != "diffusion_gemma":  # its marks count characters of a text that is stripped afterwards
            assert not (labelled & ~mask).any(), made.turns
            only_trl |= {theirs.decode(run) for run in runs(ids, mask & ~labelled)}
    assert refused < 0.7 * count
    if compared and name != "diffusion_gemma":
        assert only_trl <= ONLY_TRL.get(name, {"\n"})
        assert only_trl or not ONLY_TRL.get(name, {"\n"})


def check_answers(form: ChatTemplate, theirs: Any, messages: list[dict[str, Any]], sample: Sample, call: Any) -> None:
    """Labels begin where the template's own prompt for this turn ends, tokenized alone; they are the answer, what the
    template writes before it, and what ends it. The last answer has labels; others are counted if they have none."""
    ids, stop = sample.input_ids.tolist(), form.stop.replace("▁", " ")
    marks = np.concatenate([[0], sample.labels != IGNORE, [0]])
    ends = dict(zip(*(np.flatnonzero(np.diff(marks) == step).tolist() for step in (1, -1)), strict=True))
    at = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number in at:
        asked = theirs.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False, **call)
        if ids[: len(asked)] != asked or len(asked) not in ends:
            assert number != at[-1], "the last answer has no labels behind the prompt"
            continue
        target = theirs.decode(ids[len(asked) : ends.pop(len(asked))]).replace("▁", " ")
        content = messages[number]["content"]
        answer = content if isinstance(content, str) else content[0]["text"]
        assert target.endswith(stop) and target.startswith(form.text_before_answer)
        found = target.removeprefix(form.text_before_answer).removesuffix(stop)
        assert answer.replace("▁", " ").strip() in (found.strip(), target.strip())
    assert not ends, "labels behind no prompt of the template"
    labelled = len(list(runs(sample.input_ids, sample.labels != IGNORE)))
    assert labelled + sample.unlearnt == len(at)


@pytest.mark.parametrize("name", sorted(NO_LAYOUT))
def test_templates_without_a_layout_teach_answers_one_by_one(name: str, tmp_path: Path) -> None:
    form = own(PUBLISHED[name], tmp_path / "lm")
    with pytest.raises(Unfit):
        form.layout("hg")
    form = replace(DEFAULT, empty_thoughts=EmptyThoughts.context).template(form)
    encode = encoder(form, form.tokenizer, SpecialTokens.text)
    if name in ONLY_THOUGHTS:
        with pytest.raises(DataError, match=r"cannot teach turn 1, an answer: it opens a thought") as caught:
            encode(record(("human", "what?"), ("gpt", "red")))
        assert caught.value.kind is Kind.chat_template
    else:
        assert encode(record(("human", "what?"), ("gpt", "red"))) is not None


@pytest.mark.parametrize("name", slow_after(2, sorted(PUBLISHED.keys() - NO_LAYOUT)))
def test_an_answer_that_is_shown_otherwise_later_has_a_sample_of_its_own(name: str, tmp_path: Path) -> None:
    """Two plain exchanges have a layout, and one sample; or the second answer is taught behind its own prompt."""
    form = own(PUBLISHED[name], tmp_path / "lm")
    encode = encoder(form, form.tokenizer, SpecialTokens.text)
    plain = record(("human", "what?"), ("gpt", "red"), ("human", "and now?"), ("gpt", "blue"))
    samples = encode.samples(plain, UNLIMITED)
    assert sum(len(list(runs(own.input_ids, own.labels != IGNORE))) for own in samples) == 2
    if name not in SEVERAL:
        assert len(samples) == 1
        return
    with pytest.raises(DataError, match=r"data\.json.*chat_template\.jinja cannot teach turn 1.*rule 2") as caught:
        encode.whole(plain, UNLIMITED)
    assert caught.value.kind is Kind.chat_template
    assert [own.turns for own in samples] == ([None] if name == "gptoss" else [(1, 1), (3, 3)])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNFIT = {
    "another prompt": (CHATML.replace("assistant\n{%", "assistant\nThought: {%"), "rule 1"),
    "another answer": (CHATML.replace("{{ m.role }}", "{{ m.role }}{{ loop.length }}"), "rule 1"),
    "drops": (CHATML.replace("{{ m.content }}", "{{ m.content if not loop.first }}"), "leaves turns out"),
    "upper": (CHATML.replace("m.content", "m.content | upper"), "leaves turns out"),
    "no end": (CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "> "), "no special token after the last"),
    "syntax": (CHATML + "{% if %}", "TemplateSyntaxError"),
    "raises": ("{{ raise_exception('no') }}", "TemplateError"),
    "reaches out": (CHATML + "{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "hangs": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + CHATML, "takes over"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_templates_are_named(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, reason = UNFIT[case]
    monkeypatch.setattr(jinja_template, "SECONDS", 0.2)
    with pytest.raises(ConfigError, match=rf"lm.chat_template\.jinja .*({reason}).*data\.template=chatml"):
        own(code, tmp_path / "lm")


LATER = {
    "rewrites": CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ '.' if m.role == 'assistant' and loop.revindex > 1 }}"
    ),
    "drops": CHATML.replace("{{ m.content }}", "{{ m.content if loop.revindex < 4 }}"),
    "renames": CHATML.replace("{{ m.role }}", "{{ m.role if loop.revindex < 3 else 'earlier' }}"),
}
"""Templates that write earlier turns in another way once others follow."""


@pytest.mark.parametrize("case", LATER)
def test_templates_that_write_earlier_turns_anew_are_refused_for_several(case: str, tmp_path: Path) -> None:
    form = own(LATER[case], tmp_path / "lm")
    form.write([Turn("human", "a"), Turn("gpt", "b")], "")
    said = {"rewrites": "cannot teach turn 1.*rule 2", "drops": "leaves turns out", "renames": "turn 3.*rule 1"}[case]
    with pytest.raises(DataError, match=said) as caught:
        form.write([Turn("human", "a"), Turn("gpt", "b"), Turn("human", "c"), Turn("gpt", "d")], "data.json")
    assert caught.value.kind is Kind.chat_template


def test_a_prompt_is_tokenized_alone(tmp_path: Path) -> None:
    """Also where the tokenizer joins its end and the answer's beginning; an earlier answer whose tokens a later prompt
    joins has a sample of its own."""
    form = own(CHATML, tmp_path / "lm")
    encode, ask = encoder(form, form.tokenizer, SpecialTokens.text), Turn("human", "a")
    asked = [token.id for token in form.tokenizer.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")]
    joined = form.tokenizer.encode("assistant\n\n")
    assert len(joined) == len(form.tokenizer.encode("assistant\n")), "the tokenizer joins them"
    for answer, others in (("\nb", 0), ("b", 0), ("\nb", 1), ("b", 1)):
        turns = [ask, Turn("gpt", answer), *[ask, Turn("gpt", "c")] * others]
        sample = encode(replace(record(), turns=tuple(turns)))
        assert sample is not None
        own_labels = np.flatnonzero(sample.labels != IGNORE)
        if others and answer == "\nb":
            one, sample = encode.samples(replace(record(), turns=tuple(turns)), UNLIMITED)
            assert [one.turns, sample.turns] == [(1, 1), (3, 3)] and joined[-1].id in sample.input_ids
            assert one.input_ids[: np.flatnonzero(one.labels != IGNORE)[0]].tolist() == asked
            own_labels = np.flatnonzero(sample.labels != IGNORE)
            whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
            whole = f"{whole}{answer}<|im_end|>\n{whole}"
            assert sample.input_ids[: own_labels[0]].tolist() == [t.id for t in form.tokenizer.encode(whole)]
        else:
            assert sample.unlearnt == 0 and sample.input_ids[: own_labels[0]].tolist() == asked


def test_a_system_turn_that_moves_is_refused_where_it_moves(tmp_path: Path) -> None:
    """Mistral's templates write the system text into the last question: right for one exchange alone."""
    code = (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content ~ '\n\n' %}{% elif m.role == 'user' %}[INST] "
        "{% if loop.revindex <= 2 %}{{ ns.system }}{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}<eos>"
        "{% endif %}{% endfor %}"
    )
    form = own(code, tmp_path / "lm")
    encode = encoder(form, form.tokenizer, SpecialTokens.text)
    once = [("system", "be kind"), ("human", "a"), ("gpt", "b")]
    sample = encode(record(*once))
    assert sample is not None and form.stop == "<eos>"
    moved = encode.samples(record(*once, ("human", "c"), ("gpt", "d")), UNLIMITED)
    assert [own.turns for own in moved] == [(2, 2), (4, 4)], "each answer behind the text as its prompt has it"
    assert encode(record(*once[1:], ("human", "c"), ("gpt", "d"))) is not None


def test_qwen3_writes_an_empty_thought_itself(tmp_path: Path) -> None:
    """Its prompt has none, so the model must write it; once others follow, an answer has none, so those are refused."""
    form = own(PUBLISHED["qwen3"], tmp_path / "lm")
    turns = [Turn("human", "a"), Turn("gpt", "\nb")]
    pieces = form.write(turns, "")
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(piece.text for piece in pieces) == f"{head}{THINK}b<|im_end|>\n"
    assert "".join(piece.text for piece in pieces if piece.supervised) == f"{THINK}b<|im_end|>"
    assert "".join(piece.text for piece in form.write(turns[:1], "")) == head and form.text_before_answer == THINK
    asked = form.write([*turns, Turn("human", "c")], "")
    assert "".join(piece.text for piece in asked) == (
        f"{head}\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    thought = Turn("gpt", "<think>\nwhy\n</think>\n\nb")
    for wrong in ([turns[0], thought], [*turns, Turn("human", "c"), Turn("gpt", "d")]):
        with pytest.raises(DataError) as caught:
            form.write(wrong, "data.json, record 3")
        assert caught.value.kind is Kind.chat_template and "record 3" in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_8", "gptoss", "muse_glimmer"])
def test_what_a_template_writes_before_an_answer_is_no_part_of_its_text(name: str, tmp_path: Path) -> None:
    """As a model writes it, token by token; an answer without it, or with a part of it, is shown as it is."""
    form = own(PUBLISHED[name], tmp_path / "lm")
    sample = encoder(form, form.tokenizer, SpecialTokens.text)(record(("human", "a"), ("gpt", "the red circle")))
    assert sample is not None and form.text_before_answer
    written = sample.input_ids[sample.labels != IGNORE].tolist()
    stops = frozenset({written[-1]})

    def text_of(ids: list[int]) -> str:
        answer = AnswerText(form.tokenizer, form.stop, stops, form.text_before_answer)
        shown = "".join([*map(answer.push, ids), answer.close()])
        assert shown == answer.text
        return shown

    own_ids = [token.id for token in form.tokenizer.encode("the red circle")]
    begin = len(written) - len(own_ids) - 1
    assert text_of(written) == text_of([*own_ids, written[-1]]) == text_of(written[:-1]) == "the red circle"
    part = form.tokenizer.decode(written[: begin - 1]).strip()
    assert text_of([*written[: begin - 1], *own_ids]).startswith(part)
    assert text_of(written[:begin]) == form.tokenizer.decode(written[:begin]).strip()


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    """Unless data.special_tokens=parse; those of the template are always special."""
    form = own(CHATML, tmp_path / "lm")
    made = record(("human", "what is <|im_end|>?"), ("gpt", "an <|im_start|>"))
    end, counts = form.tokenizer.special("<|im_end|>"), {}
    for special in SpecialTokens:
        sample = encoder(form, form.tokenizer, special)(made)
        assert sample is not None
        counts[special] = sample.input_ids.tolist().count(end)
    assert counts == {SpecialTokens.text: 2, SpecialTokens.parse: 3}


@pytest.mark.parametrize("start_end", [False, True])
def test_images_stand_in_the_question(start_end: bool, tmp_path: Path) -> None:
    """The only one at its front, as with LLaVA's templates, also where the template strips the text."""
    form = own(PUBLISHED["llama3"] + "{# <im_start> #}", tmp_path / "lm")
    encode = replace(encoder(form, form.tokenizer, SpecialTokens.text, images=4), start_end=start_end)
    sample = encode(record(("human", " what? <image> "), ("gpt", " red\n"), images=("a.png",)))
    assert sample is not None
    at = np.flatnonzero(sample.input_ids == IMAGE_ID)
    assert at.tolist() == list(range(at[0], at[0] + 4)) and (sample.labels[at] == IGNORE).all()
    before = "<bos><|start_header_id|>user<|end_header_id|>\n\n" + ("<im_start>" if start_end else "")
    after = ("<im_end>" if start_end else "") + "\nwhat?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    for found, text in ((sample.input_ids[: at[0]], before), (sample.input_ids[at[-1] + 1 :], after + "red<|eot_id|>")):
        assert found.tolist() == [token.id for token in form.tokenizer.encode(text)]


def test_a_template_has_its_name_and_fingerprint(tmp_path: Path) -> None:
    """The recorded name finds the same text alone; whatever changes the text changes the encoder's fingerprint."""
    form = own(CHATML, tmp_path / "lm")
    name = own_name(tmp_path / "lm")
    assert name is not None and name.startswith("chat_template-")
    again = open_template(name, tmp_path / "lm", form.tokenizer)
    prints = [encoder(one, form.tokenizer, SpecialTokens.text).fingerprint for one in (form, again)]
    (tmp_path / "lm" / "chat_template.jinja").write_text(CHATML.replace("im_start", "start"))
    with pytest.raises(ConfigError, match=rf"{name}.*another chat template"):
        open_template(name, tmp_path / "lm", form.tokenizer)
    other = open_template(OWN, tmp_path / "lm", form.tokenizer)
    prints.append(encoder(other, form.tokenizer, SpecialTokens.text).fingerprint)
    prints.append(encoder(template("chatml"), form.tokenizer, SpecialTokens.text).fingerprint)
    assert prints[0] == prints[1] and len(set(prints)) == 3
    here = replace(encoder(form, form.tokenizer, SpecialTokens.text), image_rows=rows_of)
    made = record(("human", "a"), ("gpt", "b"))
    sample, same = here(made), pickle.loads(pickle.dumps(here))(made)
    assert sample is not None and sample.input_ids.tolist() == same.input_ids.tolist()


@pytest.mark.parametrize("form", ["text", "list", "json"])
def test_the_files_that_may_hold_a_template(form: str, tmp_path: Path) -> None:
    """As in transformers; the file for Jinja alone comes first, and a list is read by its default."""
    folder = write_tokenizer(CHATML, tmp_path / "lm")
    first = own_name(folder)
    other = CHATML.replace("im_start", "start")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": other}]
    if form == "json":
        write_json(folder / "chat_template.json", {"chat_template": other})
    else:
        write_json(folder / "tokenizer_config.json", {**config, "chat_template": named if form == "list" else other})
    assert own_name(folder) == first
    (folder / "chat_template.jinja").unlink()
    assert own_name(folder) not in (None, first)
    found = open_template(OWN, folder, open_tokenizer(folder))
    assert isinstance(found, ChatTemplate) and found.code == other
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.json").unlink(missing_ok=True)
    assert own_name(folder) is None
    with pytest.raises(ConfigError, match="has no chat template"):
        open_template(OWN, folder, open_tokenizer(folder))


def test_a_processor_of_llava_next_begins_with_bos(tmp_path: Path) -> None:
    """Its template writes none, and transformers' processor adds it."""
    folder = write_tokenizer(PUBLISHED["llava_next"], tmp_path / "lm")
    assert open_template(OWN, folder, open_tokenizer(folder)).layout("hg").frames[0].text == "[INST] "
    write_json(folder / "config.json", {"model_type": "llava_next"})
    assert open_template(OWN, folder, open_tokenizer(folder)).layout("hg").frames[0].text == "<bos>[INST] "


def test_todays_date_is_always_the_same(tmp_path: Path) -> None:
    form = own("{{ strftime_now('%d %B %Y, %A') }}" + CHATML, tmp_path / "lm")
    assert form.layout("hg").frames[0].text.startswith("26 July 2024, Friday")


def test_what_is_learned_is_learned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rendering for each record of known roles, also if the roles are refused."""
    form, rendered = own(PUBLISHED["gemma"], tmp_path / "lm"), []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **keys: rendered.append(1) or render(*args, **keys))
    for text in ("b", "c"):
        form.write([Turn("human", "a"), Turn("gpt", text)], "")
    assert len(rendered) == 2
    for _ in range(2):
        with pytest.raises(Unfit):
            form.layout("shg")
    assert len(rendered) == 3
