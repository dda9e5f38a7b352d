"""An export's chat template gives the ids of training, whatever the record, the template and the tokenizer."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import NO_LAYOUT, published
from chat_templates import write_tokenizer as write_model
from jinja2.exceptions import TemplateError
from PIL import Image
from small import ASSETS, make_config, write_json
from tiers import slow_after
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, CLIPImageProcessorPil, LlamaConfig, LlavaProcessor

from llava_fsdp.config import TooLong
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate, open_template, own_name
from llava_fsdp.data.text.conversation import IM_END, IM_START
from llava_fsdp.data.text.encode import UNLIMITED, ExactEncoder
from llava_fsdp.data.text.templates import TEMPLATES, Template
from llava_fsdp.data.text.tokens.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.export.write.chat_template import (
    as_parts,
    as_text,
    chat_template,
    find_gap,
    first_conversation_with_other_ids,
    ids_of_training,
)
from llava_fsdp.export.write.processor import check_template, write_tokenizer
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.train import main as train

OPEN = Path(__file__).parents[1] / "golden" / "open" / "tokenizer"
CORPUS = (
    "the circle is red, how many? USER: ASSISTANT: <|im_start|>user\n### Human: größe 中文 12 34\n\n  [INST] <<SYS>>"
)
ATOMS = " |  |\n|\n\n|\t|a|the|Red|12|größe|中文|🙂|▁|x.|, a|USER:|###|'s".split("|")
KINDS = [
    "hf4_legacy_default", "hf4_legacy_false", "v5_legacy_default", "v5_legacy_false", "v5_legacy_false_noprefix",
    "tiny", "qwen", "llama 3", "gpt2 with a space", "unigram first", "unigram always",
]  # fmt: skip


def write_source(kind: str, folder: Path, names: tuple[str, ...] = (IM_START, IM_END)) -> Path:
    """A model's tokenizer as its makers publish it, with the special tokens that are named."""
    folder.mkdir(parents=True)
    if kind in ("qwen", "llama 3", "gpt2 with a space") or kind.startswith("unigram"):
        write_made(kind, folder, names)
        return folder
    for file in (ASSETS / "tiny-llama" if kind == "tiny" else OPEN / kind).iterdir():
        shutil.copyfile(file, folder / file.name)
    size = open_tokenizer(folder).size
    added = {name: size + n for n, name in enumerate(names)}
    if (folder / "tokenizer.model").is_file():
        write_json(folder / "added_tokens.json", added)
        return folder
    frozen = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    frozen["added_tokens"] += [{"id": i, "content": t, "special": True, **flags} for t, i in added.items()]
    write_json(folder / "tokenizer.json", frozen)
    return folder


def write_made(kind: str, folder: Path, names: tuple[str, ...]) -> None:
    """Byte-level BPE without BOS and with ChatML's tokens, with BOS, with a space before each text; two Unigrams."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    special = ["</s>", *names]
    if kind.startswith("unigram"):
        made = FastTokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.split()[1])
        made.decoder = decoders.Metaspace()
        special.insert(0, "<unk>")
        trainer: Any = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
        config["unk_token"] = "<unk>"
    else:
        made = FastTokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "gpt2 with a space")
        made.decoder = decoders.ByteLevel()
        special += {"qwen": ["<|im_start|>", "<|im_end|>"], "llama 3": ["<|begin|>"]}.get(kind, [])
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=letters)
    made.train_from_iterator([CORPUS] * 3, trainer)
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
    if kind == "llama 3":
        config["bos_token"] = "<|begin|>"
        begin = ("<|begin|>", made.token_to_id("<|begin|>"))
        made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    made.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)


def random_texts(dice: random.Random) -> list[str]:
    """Questions and answers in turn; the questions of half of the records have image tags somewhere."""
    texts = []
    has_images = dice.random() < 0.6
    for turn in range(2 * dice.randrange(1, 4)):
        atoms = dice.choices(ATOMS, k=dice.randrange(0, 6))
        if has_images and turn % 2 == 0:
            for _ in range(dice.choice([0, 1, 1, 2, 3])):
                atoms.insert(dice.randrange(len(atoms) + 1), IMAGE_TAG)
        texts.append("".join(atoms))
    return texts


def exported(source: Path, folder: Path, form: str = "v1", start_end: bool = False, video: bool = False) -> Tokenizer:
    """The tokenizer of training; what `export` makes of it lies in `folder`, with the configuration of a LLaVA."""
    ours = open_tokenizer(source)
    folder.mkdir(parents=True)
    write_tokenizer(source, folder, LlamaConfig(vocab_size=ours.size), form, start_end, video)
    write_json(folder / "config.json", {"model_type": "llava"})
    return ours


@pytest.mark.parametrize("spare", [0, 1, 2, 70])
@pytest.mark.parametrize("pad", [None, "</s>"])
def test_every_new_id_has_a_row(pad: str | None, spare: int, tmp_path: Path) -> None:
    """The ids follow the old ones; a vocabulary with room for them keeps its size, others grow to a multiple of 64."""
    source = write_source("qwen", tmp_path / "source")
    config = json.loads((source / "tokenizer_config.json").read_text())
    write_json(source / "tokenizer_config.json", config | ({"pad_token": pad} if pad else {}))
    size = open_tokenizer(source).size
    staged = tmp_path / "staged"
    staged.mkdir()
    (image_id, pad_id, _), rows = write_tokenizer(source, staged, LlamaConfig(vocab_size=size + spare), "v1", False)
    new = [image_id] if pad else [image_id, pad_id]
    assert new == [size + n for n in range(len(new))]
    assert rows == (size + spare if spare >= len(new) else -(-(size + len(new)) // 64) * 64)


def encoder_of(ours: Tokenizer, form: Template | ChatTemplate, start_end: bool, tokens: int = 1) -> ExactEncoder:
    return ExactEncoder(ours, form, lambda *_: np.arange(tokens), UNLIMITED, TooLong.fail, start_end)


@pytest.mark.parametrize("records", [24, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", slow_after(5, KINDS))
def test_ids_are_those_of_training(kind: str, records: int, tmp_path: Path) -> None:
    """Random records in every template, as text with tags and as parts, whole and as prompts."""
    dice = random.Random(kind)
    ours = exported(write_source(kind, tmp_path / "source"), tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    image_id, gap, begins = theirs.convert_tokens_to_ids(IMAGE_TAG), find_gap(theirs, ours), ours.bos is not None
    assert theirs.chat_template == chat_template(TEMPLATES["v1"], False, begins, gap)
    forms = [(name, start_end) for name in TEMPLATES for start_end in (False, True)]
    for number in range(records):
        name, start_end = forms[number % len(forms)]
        template = chat_template(TEMPLATES[name], start_end, begins, gap)
        texts = random_texts(dice)
        system = dice.choice([None, "".join(dice.choices(ATOMS, k=dice.randrange(0, 6)))])
        whole, prompt = ids_of_training(encoder_of(ours, TEMPLATES[name], start_end), texts, image_id, system)
        for messages in (as_text(texts, system), as_parts(texts, system)):
            said = (name, start_end, messages)
            call: dict[str, Any] = {"return_dict": False, "chat_template": template}
            assert theirs.apply_chat_template(messages, **call) == whole, said
            assert theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, **call) == prompt, said
            rendered = theirs.apply_chat_template(messages, tokenize=False, chat_template=template)
            assert theirs(rendered, add_special_tokens=False)["input_ids"] == whole, said
            if not begins:
                assert theirs(rendered)["input_ids"] == whole, said


WRONG = [
    [*as_text(["a", "b"]), {"role": "system", "content": "be kind"}, *as_text(["a"])],
    as_text(["a"], "be <image> kind"),
    [*as_text(["a"], "be kind")[:1], {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "tool", "content": "a"}, *as_text(["a"])],
    [*as_text(["a"]), *as_text(["a"])],
    [*as_text(["a", "b"]), {"role": "assistant", "content": "c"}],
    as_text(["a", "b <image>"]),
    [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "a"}]}],
]
"""Conversations that training refuses."""
OWN_TEMPLATES = sorted(published().keys() - NO_LAYOUT)
FAST = ("qwen3", "gemma3", "llava_next", "llama3_2", "gptoss")


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(("name", "records"), slow_after(5, [
    *((name, 6) for name in FAST), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in OWN_TEMPLATES),
]))  # fmt: skip
def test_ids_are_those_of_training_with_a_model_s_own_template(
    name: str, records: int, pieces: bool, tmp_path: Path
) -> None:
    """Also where its prompt for generation is not how its answers begin (Qwen3's empty thought, GPT-OSS's channel);
    what training refuses as changed is left out here."""
    dice, code = random.Random(name), published()[name]
    source = write_model(code + "{# <im_start><im_end> #}", tmp_path / "source", pieces)
    ours, own = open_tokenizer(source), own_name(source)
    assert own is not None
    for start_end in (False, True):
        exported(source, tmp_path / f"export{start_end}", own, start_end)
        form = open_template(own, source, ours)
        theirs = AutoTokenizer.from_pretrained(tmp_path / f"export{start_end}")
        image_id, refused = theirs.convert_tokens_to_ids(IMAGE_TAG), 0
        assert first_conversation_with_other_ids(tmp_path / f"export{start_end}", ours, form, start_end) is None
        assert own_name(tmp_path / f"export{start_end}") == own
        for _ in range(records):
            texts = random_texts(dice)
            system = dice.choice([None, "".join(dice.choices(ATOMS, k=dice.randrange(0, 6)))])
            try:
                whole, prompt = ids_of_training(encoder_of(ours, form, start_end), texts, image_id, system)
            except DataError:
                refused += 1
                continue
            for messages in (as_text(texts, system), as_parts(texts, system)):
                assert theirs.apply_chat_template(messages, return_dict=False) == whole, messages
                call: dict[str, Any] = {"return_dict": False, "add_generation_prompt": True}
                assert theirs.apply_chat_template(messages[:-1], **call) == prompt, messages
        assert refused < records


@pytest.mark.parametrize(("name", "pieces"), slow_after(1, [("qwen3", False), ("gemma3", True), ("v1", False)]))
def test_videos_with_a_model_s_own_template(name: str, pieces: bool, tmp_path: Path) -> None:
    """As with one of LLaVA's: parts and tags, each where training has its tokens; others are refused."""
    code = published().get(name, "")
    source = write_model(code + "{# <im_start><im_end> #}", tmp_path / "source", pieces) if code else None
    source = source or write_source("qwen", tmp_path / "source")
    ours, form = open_tokenizer(source), own_name(source) if code else name
    assert form is not None
    for start_end in (False, True):
        folder = tmp_path / f"export{start_end}"
        exported(source, folder, form, start_end, video=True)
        assert first_conversation_with_other_ids(folder, ours, open_template(form, source, ours), start_end) is None
        assert own_name(folder) == form or not code
        theirs = AutoTokenizer.from_pretrained(folder)
        texts = ["<video> or <image>", "a", "and <video>", "b"]
        for messages in (as_text(texts), as_parts(texts)):
            text = theirs.apply_chat_template(messages, tokenize=False)
            assert re.findall("<video>|<image>", text) == ["<video>", "<image>", "<video>"]
        with pytest.raises(TemplateError, match="images belong to"):
            theirs.apply_chat_template(as_text(["a", "<video>"]), tokenize=False)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("chat.tags + ['<video>']", "chat.tags + ['<image>']"))
    assert first_conversation_with_other_ids(folder, ours, open_template(form, source, ours), True) is not None


@pytest.mark.parametrize("kind", ["tiny", "hf4_legacy_default", "qwen"])
def test_a_model_s_own_template_with_every_tokenizer(kind: str, tmp_path: Path) -> None:
    """Also with tokenizers of Llama, which need spaces after images in transformers; and what it refuses."""
    source = write_source(kind, tmp_path / "source")
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    own = own_name(source)
    assert own is not None
    ours = exported(source, tmp_path / "export", own)
    assert first_conversation_with_other_ids(tmp_path / "export", ours, open_template(own, source, ours), False) is None
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    rendered = theirs.apply_chat_template(as_text(["<image>a", "b"]), tokenize=False)
    assert theirs(rendered)["input_ids"] == theirs(rendered, add_special_tokens=False)["input_ids"]
    for messages in WRONG:
        with pytest.raises(TemplateError):
            theirs.apply_chat_template(messages)
    begun = [{"role": "assistant", "content": "hello"}, *as_text(["a", "b"])]
    assert theirs.apply_chat_template(begun) == theirs.apply_chat_template(begun[1:])


@pytest.mark.parametrize("kind", ["tiny", "hf4_legacy_default", "qwen"])
def test_processor_gives_every_image_its_tokens(kind: str, tmp_path: Path) -> None:
    """Through transformers' processor: any number of images anywhere, one BOS, the images in their order."""
    dice = random.Random(kind)
    ours = exported(write_source(kind, tmp_path / "source"), tmp_path / "export", "llava_llama_2")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    side = {"height": 28, "width": 28}
    reader = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)
    processor = LlavaProcessor(reader, theirs, 14, "default", theirs.chat_template, num_additional_image_tokens=1)
    encoder = encoder_of(ours, TEMPLATES["llava_llama_2"], False, tokens=4)
    counts = set()
    for _ in range(12):
        texts = random_texts(dice)
        whole, prompt = ids_of_training(encoder, texts, processor.image_token_id)
        num = whole.count(processor.image_token_id) // 4
        prompt = [i for i in prompt for _ in range(4 if i == processor.image_token_id else 1)]
        counts.add(num)
        pictures = [Image.new("RGB", (30, 40), (8 * n, 0, 0)) for n in range(num)]
        pixels = [reader(p, return_tensors="pt")["pixel_values"][0] for p in pictures]
        for messages in (as_parts(texts), as_text(texts)):
            left = iter(pictures)
            parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"]]
            for part in parts:
                if part["type"] == "image":
                    part["image"] = next(left)
            call: dict[str, Any] = {"tokenize": True, "return_dict": True}
            beside = {} if parts else {"images": pictures}
            made: Any = processor.apply_chat_template(messages, **call, processor_kwargs={**beside})
            assert made["input_ids"] == [whole], messages
            call["add_generation_prompt"] = True
            asked: Any = processor.apply_chat_template(messages[:-1], **call, processor_kwargs={**beside})
            assert asked["input_ids"] == [prompt], messages
            shown = made.get("pixel_values", [])
            assert len(shown) == num
            assert all((own == np.asarray(other)).all() for own, other in zip(shown, pixels, strict=True))
    assert 0 in counts and len(counts) > 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_ends_where_the_answer_begins(name: str, tmp_path: Path) -> None:
    """With `add_generation_prompt` it ends with who answers; without it with the question."""
    ours = exported(write_source("qwen", tmp_path / "source"), tmp_path / "export", name)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    messages, form = as_text(["what?", "red", "how many?", "two"]), TEMPLATES[name]
    whole = theirs.apply_chat_template(messages, tokenize=False)
    asked = theirs.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    closed = theirs.apply_chat_template(messages[:3], tokenize=False)
    assert whole == asked + form.pattern.before_answer + "two" + form.pattern.after_answer + form.pattern.end
    assert asked == closed + form.pattern.answer_header
    assert ours.bos is None and "bos_token" not in theirs.chat_template
    if name == "v1":
        assert asked.endswith("USER: how many? ASSISTANT:") and closed.endswith("USER: how many? ")


@pytest.mark.parametrize("kind", ["tiny", "hf4_legacy_false"])
def test_no_bos_where_training_had_none(kind: str, tmp_path: Path) -> None:
    """`add_bos_token=false`: none from the template, and none from a tokenizer that is asked for special tokens."""
    source = write_source(kind, tmp_path / "source")
    config = json.loads((source / "tokenizer_config.json").read_text())
    write_json(source / "tokenizer_config.json", {**config, "add_bos_token": False})
    ours = exported(source, tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    texts = ["a <image> b", "c"]
    whole, _ = ids_of_training(encoder_of(ours, TEMPLATES["v1"], False), texts, theirs.convert_tokens_to_ids(IMAGE_TAG))
    rendered = theirs.apply_chat_template(as_text(texts), tokenize=False)
    assert theirs(rendered)["input_ids"] == theirs(rendered, add_special_tokens=False)["input_ids"] == whole
    assert theirs.bos_token_id not in whole


def test_an_answer_before_the_first_question_is_left_out(tmp_path: Path) -> None:
    """As in training."""
    exported(write_source("tiny", tmp_path / "source"), tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    messages = as_text(["<image>what?", "red"])
    begun = [{"role": "assistant", "content": "hello"}, *messages]
    assert theirs.apply_chat_template(begun) == theirs.apply_chat_template(messages)
    system = as_text([], "be kind")
    assert theirs.apply_chat_template([*system, *begun]) == theirs.apply_chat_template([*system, *messages])


@pytest.mark.parametrize("messages", WRONG)
def test_what_training_refuses_the_template_refuses(messages: list[dict[str, Any]], tmp_path: Path) -> None:
    exported(write_source("tiny", tmp_path / "source"), tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    with pytest.raises(TemplateError):
        theirs.apply_chat_template(messages)


@pytest.mark.parametrize("name", slow_after(1, ["glm4moe", *sorted(NO_LAYOUT - {"glm4moe"})]))
def test_prompts_of_a_template_whose_answers_are_taught_one_by_one(name: str, tmp_path: Path) -> None:
    source = write_model(published()[name], tmp_path / "source")
    form = own_name(source)
    assert form is not None
    template = open_template(form, source, exported(source, tmp_path / "export", form))
    assert isinstance(template, ChatTemplate)
    theirs, own = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("export", "source"))
    spoken = [("user", "what?"), ("assistant", "red"), ("user", "and now?")]
    messages = [{"role": role, "content": text} for role, text in spoken]
    for count in (1, 3):
        call: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        wanted = own.apply_chat_template(messages[:count], chat_template=template.code, **call)
        assert theirs.apply_chat_template(messages[:count], **call) == wanted


def agent_messages(has_parts: bool, arguments: object) -> list[dict[str, Any]]:
    """A conversation with thoughts, calls and their results. `arguments`: those of a call."""
    calls = [{"id": own, "type": "function", "function": {"name": "look", "arguments": arguments}} for own in IDS]

    def said(role: str, text: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if has_parts and text else text, **more}

    return [
        said("system", "be kind"), said("user", "what?"),
        said("assistant", "", reasoning_content="hm", tool_calls=calls[:1]),
        said("tool", "done", name="look", tool_call_id=IDS[0]), said("assistant", "", tool_calls=calls[1:]),
        said("tool", "<b> é <image>", name="look", tool_call_id=IDS[1]),
        said("assistant", "red", reasoning_content="zq"),
        said("user", "and now?"), said("assistant", "blue"),
    ]  # fmt: skip


IDS = ("abcdefghi", "jklmnopqr")
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "description": "What."}}, "required": ["a"]}}}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(2, ["qwen3", "smolvlm", *sorted({*OWN_TEMPLATES} - {"qwen3", "smolvlm"})]))
def test_thoughts_and_calls_are_those_of_a_model_s_own_template(name: str, tmp_path: Path) -> None:
    """The export writes each prompt of a conversation with tools as the own template does; one that shows no tools
    refuses their results."""
    source = write_model(published()[name], tmp_path / "source")
    form = own_name(source)
    assert form is not None
    template = open_template(form, source, exported(source, tmp_path / "export", form))
    assert isinstance(template, ChatTemplate)
    theirs, own = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("export", "source"))
    code = template.code  # with a fixed date
    arguments: Any = {"a": "é", "b": 1}
    messages = agent_messages(
        template.parts, json.dumps(arguments) if template.features.form.text_arguments else arguments
    )
    compared = 0
    for count in range(2, len(messages) + 1):
        call: dict[str, Any] = {"tools": [LOOK], "tokenize": False, "add_generation_prompt": count in (2, 4, 6, 8)}
        if not template.features.tools:
            if count > 3:
                with pytest.raises(TemplateError):
                    theirs.apply_chat_template(messages[:count], **call)
            continue
        if count in (3, 5):  # calls without their results
            continue
        try:
            wanted = own.apply_chat_template(messages[:count], chat_template=code, **call)
        except TemplateError:
            continue
        assert theirs.apply_chat_template(messages[:count], **call) == wanted, count
        compared += 1
    assert compared or not template.features.tools
    without_result, without_call = [*messages[:3], messages[7]], [*messages[:2], messages[3]]
    for wrong in (without_result, without_call) if template.features.tools else (without_call, messages[:3]):
        with pytest.raises(TemplateError):
            theirs.apply_chat_template(wrong, tokenize=False)


def test_rehearsal_names_what_differs(tmp_path: Path) -> None:
    """It passes as written, and finds a lost BOS, a lost gap and a moved image."""
    ours = exported(write_source("tiny", tmp_path / "source"), tmp_path / "export")
    form, path = TEMPLATES["v1"], tmp_path / "export" / "chat_template.jinja"
    written = path.read_text()
    assert first_conversation_with_other_ids(tmp_path / "export", ours, form, False) is None
    assert first_conversation_with_other_ids(tmp_path / "export", ours, form, True) is not None
    for old, new in (
        ("{{- bos_token -}}", ""),
        ("{{- ' ' -}}", ""),
        ('pieces|join("<image>")', '"<image>" ~ pieces|join'),
    ):
        assert old in written
        path.write_text(written.replace(old, new))
        differs = first_conversation_with_other_ids(tmp_path / "export", ours, form, False)
        assert differs is not None and "'role': 'user'" in differs


def write_unserved(folder: Path) -> Path:
    """A tokenizer that begins every stretch with a space in transformers, and the text alone in training."""
    source = write_source("v5_legacy_false", folder)
    frozen = json.loads((source / "tokenizer.json").read_text())
    frozen["pre_tokenizer"]["prepend_scheme"] = "always"
    write_json(source / "tokenizer.json", frozen)
    return source


def test_a_tokenizer_that_no_rule_serves_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_unserved(tmp_path / "source")
    language = LlamaConfig(vocab_size=open_tokenizer(source).size)
    exported(source, tmp_path / "export")
    check_template(source, tmp_path / "export", language, "v1", False)
    assert [(r.levelname, str(source) in r.getMessage()) for r in caplog.records] == [("WARNING", True)]


@pytest.mark.parametrize(("more", "warnings"), [(("export.enabled=true",), 1), ((), 0)])
def test_a_run_says_it_before_its_first_step(
    more: tuple[str, ...], warnings: int, parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it will write an export, and not where it will not."""
    shutil.copytree(parts, tmp_path / "parts")
    language = tmp_path / "parts" / "language"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(write_unserved(tmp_path / file) / file, language / file)
    config = json.loads((language / "config.json").read_text())
    write_json(language / "config.json", {**config, "vocab_size": open_tokenizer(language).size})

    with pytest.MonkeyPatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(train, "fit", lambda *_: 1 / 0)
        train.train(make_config(tmp_path / "parts", dataset, tmp_path / "out", *more))
    said = [r for r in caplog.records if r.levelname == "WARNING" and "chat template" in r.getMessage()]
    assert len(said) == warnings
