"""Talking to a model: what is streamed is what is answered, a conversation reads only what is new, and every folder
that can be exported can be asked."""

import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forged import forge_notes
from PIL import Image
from small import ASSETS, command_config, conversion, make_config, write_json
from transformers import LlavaForConditionalGeneration

from llava_fsdp.chat import main as chat
from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.config import AspectRatio, ChatConfig, Pixels, SpecialTokens
from llava_fsdp.data.records.record import IMAGE_TAG, Turn
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.data.text.tokens.detokenize import AnswerText
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.export.main import export
from llava_fsdp.export.write.formats import source_of_run
from llava_fsdp.model.generation import PrefixCache, Sampling
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, DataError, ImageError, ModelError
from llava_fsdp.runtime.text.terminal_text import shown_text
from llava_fsdp.train import main as train

# A shell lets Ctrl-C do nothing to what it runs aside, tests for one, and their children keep that.
AS_TYPED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def assistant(noise: Path) -> Assistant:
    return Assistant(str(noise), "v1", AspectRatio.pad)


@pytest.fixture
def talk(assistant: Assistant) -> Conversation:
    return Conversation(assistant)


@pytest.fixture
def pictures(dataset: Path) -> list[Path]:
    return [dataset / "images" / name for name in ("0.jpg", "1.png", "2.jpg")]


def configured(*overrides: str) -> ChatConfig:
    return command_config(ChatConfig, "chat", *overrides)


def said(talk: Conversation, text: str, how: Sampling = GREEDY) -> str:
    return "".join(talk.ask(text, how))


def test_it_is_asked_as_it_was_trained(noise: Path, tmp_path: Path) -> None:
    """What special tokens in a question become, and how an image is read, is in the notes of an export."""
    shutil.copytree(noise / "export", tmp_path / "export")
    notes = json.loads((noise / "export" / "llava_fsdp.json").read_text())
    assert (notes["pixels"], notes["special_tokens"]) == ("exact", "text")
    Image.new("RGBA", (40, 40), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    found = []
    for said in ({}, {"pixels": "llava_v1_5", "special_tokens": "parse"}):
        forge_notes(tmp_path / "export", **said)
        own = Assistant(str(tmp_path / "export"), "v1", AspectRatio.square)
        end = own.tokenizer.special("</s>")
        ids = own.encode([Turn("human", "what does </s> end")], [], "here")
        found.append((end in ids, int(own.load_image(tmp_path / "clear.png", "here").tiles.max())))
    assert found == [(False, 255), (True, 0)]
    forge_notes(tmp_path / "export", pixels="other")
    with pytest.raises(ModelError, match=r"llava_fsdp\.json has pixels=other"):
        Assistant(str(tmp_path / "export"), "v1", AspectRatio.square)


@pytest.mark.parametrize(
    ("keys", "pixels"),
    [
        (["labels=llava_v1_5", "data.pixels=llava_v1_5"], Pixels.llava_v1_5),
        (["data.pixels=fast", "data.special_tokens=parse"], Pixels.exact),
    ],
)
def test_a_run_says_how_it_was_trained(
    keys: list[str], pixels: Pixels, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    cfg = make_config(parts, dataset, tmp_path, *keys)
    source = source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "run", 1)
    assert (source.pixels, source.special_tokens) == (pixels, SpecialTokens.parse)


def at_once(talk: Conversation, images: list[Path]) -> str:
    """The last answer of a conversation, asked for by a question of its own."""
    return talk.assistant.answers([Question(talk.turns[:-1], images, "here")], GREEDY.max_new_tokens)[0]


def test_several_turns_are_one_question(talk: Conversation, pictures: list[Path]) -> None:
    """Streamed over turns, with another image on the way, each answer is that of the whole conversation at once."""
    talk.add(pictures[0], "here")
    said(talk, "what colour is the circle")
    assert talk.turns[-1].text == at_once(talk, pictures[:1]) != ""
    said(talk, "is it large")
    assert talk.turns[-1].text == at_once(talk, pictures[:1])
    talk.add(pictures[1], "here")
    talk.add(pictures[2], "here")
    said(talk, "what of the square")
    assert talk.turns[-1].text == at_once(talk, pictures)
    assert [t.text.count(IMAGE_TAG) for t in talk.turns] == [1, 0, 0, 0, 2, 0]
    assert len({t.text for t in talk.turns[1::2]}) == 3, "three answers that differ, or nothing is shown by this"


def test_only_what_is_new_is_read(talk: Conversation, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn by turn the model reads the tail of the conversation, and the vision tower no image twice."""
    model, read, seen = talk.assistant.model, [], []
    forward, features = model.language_model.forward, model.image_features
    monkeypatch.setattr(
        model.language_model, "forward", lambda **k: (read.append(k["inputs_embeds"].shape[1]), forward(**k))[1]
    )
    monkeypatch.setattr(model, "image_features", lambda images: (seen.append(len(images)), features(images))[1])
    talk.assistant.prefix = PrefixCache()

    def tokens() -> int:
        """Of the conversation without its last answer."""
        return len(talk.assistant.encode(talk.turns[:-1], talk.images, ""))

    talk.add(pictures[0], "here")
    said(talk, "what is it")
    first = read.pop(0)
    assert first == tokens() and set(read) == {1}
    read.clear()
    said(talk, "and how large")
    assert read[0] <= tokens() - first and seen == [1]
    talk.undo()
    read.clear()
    said(talk, "and how small")
    assert read[0] <= tokens() - first, "what was before the question that was taken back is still there"
    said(Conversation(talk.assistant), "something else")
    read.clear()
    said(talk, "and where")
    assert read[0] > tokens() - first, "another conversation has taken the place"
    assert talk.turns[-1].text == at_once(talk, pictures[:1])


def test_undo_and_reset(talk: Conversation, pictures: list[Path]) -> None:
    assert not talk.undo()
    talk.add(pictures[0], "here")
    first = said(talk, "what is it")
    assert talk.exchanges() == [("what is it", pictures[:1], first)]
    talk.undo()
    assert not talk.turns and not talk.images and len(talk.next_images) == 1
    assert said(talk, "what is it") == first
    talk.reset()
    assert said(talk, "what is it") == at_once(talk, [])


def test_another_image_in_the_same_place_is_another_conversation(talk: Conversation, pictures: list[Path]) -> None:
    prefixes = set()
    for picture in pictures:
        talk.reset()
        talk.add(picture, "here")
        said(talk, "what is it")
        assert talk.turns[-1].text == at_once(talk, [picture])
        prefixes.add(tuple(talk.assistant.prefix.tokens))
    assert len(prefixes) == len(pictures)


def test_a_stopped_answer_stays_as_far_as_it_came(talk: Conversation, pictures: list[Path]) -> None:
    talk.add(pictures[0], "here")
    whole = said(talk, "what is it")
    talk.reset()
    talk.add(pictures[0], "here")
    pieces = talk.ask("what is it", GREEDY)
    part = "".join(next(pieces) for _ in range(3))
    pieces.close()
    assert whole.startswith(part) and 0 < len(part) < len(whole) and talk.was_cut
    assert talk.turns[-1] == Turn("gpt", part)
    said(talk, "go on")
    assert talk.turns[-1].text == at_once(talk, pictures[:1])


def test_an_interrupted_pass_leaves_no_half_memory(
    talk: Conversation, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have the new tokens and some have not: none of that is used."""
    talk.add(pictures[0], "here")
    said(talk, "what is it")
    last = talk.assistant.model.language_model.layers[-1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        said(talk, "and how large")
    assert len(talk.turns) == 2
    said(talk, "and how large")
    assert talk.turns[-1].text == at_once(talk, pictures[:1])


def test_a_batch_answers_as_each_question_alone(assistant: Assistant, pictures: list[Path]) -> None:
    texts = ["what", "what colour is the large red circle left of the small green square", "is it"]
    questions = [Question([Turn("human", f"{IMAGE_TAG}\n{t}")], [p], "") for t, p in zip(texts, pictures, strict=True)]
    questions.append(Question([Turn("human", "no picture")], [], ""))
    together = assistant.answers(questions, 8)
    assert together == [assistant.answers([q], 8)[0] for q in questions] and len(set(together)) > 2
    assert assistant.answers(questions, 8, blank=True)[:3] != together[:3]


def test_answers_are_those_of_transformers_model(assistant: Assistant, noise: Path, pictures: list[Path]) -> None:
    """Generated by transformers' own LLaVA, from the same ids and pixels."""
    turns = [Turn("human", f"{IMAGE_TAG}\nwhat colour is it")]
    shown = assistant.load_image(pictures[0], "")
    theirs = LlavaForConditionalGeneration.from_pretrained(noise / "export", dtype=torch.float32)
    ids = torch.from_numpy(assistant.encode(turns, [shown], ""))[None]
    ids[ids == IMAGE_ID] = theirs.config.image_token_id
    table = torch.from_numpy(assistant.reader.preprocessor.pixel_table())
    pixels = torch.stack([table[c][torch.from_numpy(shown.tiles[:, c]).long()] for c in range(3)], 1)
    made = theirs.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=12, do_sample=False, eos_token_id=None)
    text = AnswerText(assistant.tokenizer, assistant.template.stop, assistant.stops)
    expected = "".join([*(text.push(int(t)) for t in made[0, ids.shape[1] :]), text.close()])
    assert assistant.answers([Question(turns, pictures[:1], "")], 12) == [expected] != [""]


class Letters:
    """A tokenizer of bytes with two special tokens: every character of more than a byte comes in halves."""

    bos, legacy, size, fingerprint = None, False, 258, ""

    def encode(self, text: str) -> list:
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def special(self, text: str) -> int | None:
        return None

    def name(self, token: int) -> str | None:
        return None


def pieces(text: AnswerText, ids: list[int]) -> list[str]:
    return [*(text.push(i) for i in ids), text.close()]


@pytest.mark.parametrize("stop", ["</s>", "\n###", "\n", " </s>"])
@pytest.mark.parametrize(
    "written",
    ["plain", "  a b\n\n c  ", "größe 中文 🙂 é", "# a\n#b\n## c <", "", "   ", "<</s", "x </s> y", "a\n### Human: b"],
)
def test_streamed_text_is_the_text(written: str, stop: str) -> None:
    """However it is cut: pieces never hold half a character or part of the stop text, and make up the answer."""
    expected = written.partition(stop)[0].strip()
    text = AnswerText(Letters(), stop, frozenset([257]))
    found = pieces(text, list(written.encode()))
    assert "".join(found) == expected
    assert all(stop not in "".join(found[:n]) and "\ufffd" not in "".join(found[:n]) for n in range(len(found)))
    assert text.push(65) == "" and "".join(pieces(AnswerText(Letters(), stop, frozenset([257])), [65, 257, 66])) == "A"


@pytest.mark.parametrize("begin", ["<t>", ""])
def test_a_thought_is_no_part_of_an_answer_and_a_cut_one_is_told(begin: str) -> None:
    """The prompt begins it, or the model; a stop token within it ends an answer that is shown."""
    cases = {
        "hm</t>red": ("red", "hm", False), "hm</t>": ("", "hm", False), "hm": ("", None, True),
        "hm</": ("", None, True),
    }  # fmt: skip
    for written, expected in cases.items():
        text = AnswerText(Letters(), "</s>", frozenset([257]), "", (begin, "</t>"))
        assert "".join(pieces(text, list(f"{begin}{written}".encode()))) == text.text == expected[0]
        assert (text.thought, text.is_thought_cut) == expected[1:], written
    plain = AnswerText(Letters(), "</s>", frozenset([257]), "", ("<t>", "</t>"))
    assert "".join(pieces(plain, list(b"<red"))) == "<red" and not plain.is_thought_cut


def test_bytes_that_are_no_characters_come_at_last() -> None:
    assert "".join(pieces(AnswerText(Letters(), "</s>", frozenset()), [65, 0xFF, 66, 0xE4, 0xB8])) == "A\ufffdB\ufffd"


def test_streamed_text_of_a_real_tokenizer() -> None:
    """The words of a tokenizer that strips the space in front of a text, and spells what it does not know in bytes."""
    tokenizer = open_tokenizer(ASSETS / "tiny-llama")
    for written in ("what colour is the circle", "größe 中文 🙂 x", "  two  spaces   and    more ", "a\nb\n"):
        ids = [token.id for token in tokenizer.encode(written)]
        found = pieces(AnswerText(tokenizer, "</s>", frozenset()), ids)
        assert "".join(found) == tokenizer.decode(ids).strip() and sum(map(bool, found)) > 1


def test_a_conversation_that_is_too_long(talk: Conversation, pictures: list[Path]) -> None:
    """Refused with its length and the model's; the conversation goes on as it was. An answer ends where the model
    does."""
    said(talk, "what")
    with pytest.raises(DataError, match=r"the conversation takes \d+ tokens, 0 .*the model reads 512: begin a new"):
        said(talk, "red " * 600)
    assert len(talk.turns) == 2
    with pytest.raises(DataError, match=r"mixed\.json takes \d+ tokens, 4 of them for images"):
        long = Turn("human", f"{IMAGE_TAG}\n" + "red " * 600)
        talk.assistant.answers([Question([long], pictures[:1], "mixed.json")], 4)
    prompt = len(talk.assistant.encode([*talk.turns, Turn("human", "red " * 150)], [], ""))
    said(talk, "red " * 150, Sampling(max_new_tokens=10_000))
    written = len(talk.assistant.prefix.tokens) - prompt
    assert written < 512 - prompt and (not talk.was_cut or written == 511 - prompt)


def test_images_and_their_tags(talk: Conversation, pictures: list[Path], tmp_path: Path) -> None:
    talk.add(pictures[0], "here")
    talk.add(pictures[1], "here")
    with pytest.raises(DataError, match=r"has <image> 1 times, and 2 new images"):
        said(talk, "what is <image>?")
    said(talk, "is <image> left of <image>?")
    assert talk.turns[0].text == "is <image> left of <image>?" and talk.turns[1].text == at_once(talk, pictures[:2])
    with pytest.raises(DataError, match="not UTF-8 at character 2"):
        said(talk, "a \udcff")
    (tmp_path / "text.jpg").write_text("no picture")
    for name, problem in (("text.jpg", "it is none of JPEG"), (".", "is not a file")):
        with pytest.raises(DataError, match=problem):
            talk.add(tmp_path / name, "/image")
    assert len(talk.turns) == 2 and not talk.next_images
    few = Conversation(talk.assistant, max_images=1)
    few.add(pictures[0], "here")
    with pytest.raises(DataError, match="takes at most 1 images"):
        few.add(pictures[1], "here")


@pytest.mark.slow
def test_every_folder_can_be_asked(noise: Path, assistant: Assistant, pictures: list[Path], tmp_path: Path) -> None:
    """A run, its export, a checkpoint, a run whose export is gone, and the original's format: the same answers."""
    original = export(conversion(noise, tmp_path / "original", "format=llava", "verify=false"))
    unfinished = tmp_path / "unfinished"
    shutil.copytree(noise, unfinished)
    shutil.rmtree(unfinished / "export")
    question = Question([Turn("human", f"{IMAGE_TAG}\nwhat colour is it")], pictures[:1], "")
    expected = assistant.answers([question], 12)
    for folder in (noise / "export", noise / "checkpoints" / "step-000001", unfinished, original):
        found = Assistant(str(folder), "plain", AspectRatio.square)
        assert found.answers([question], 12) == expected, folder
        assert found.reader.tokens.aspect is AspectRatio.pad and found.template_name == "v1"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"model\.checkpoint=.*empty"):
        Assistant(str(tmp_path / "empty"), "v1", AspectRatio.pad)


def test_a_folder_that_says_little(noise: Path, pictures: list[Path], tmp_path: Path) -> None:
    """Of transformers' own folders neither template nor padding is known: those that were asked for."""
    shutil.copytree(noise / "export", tmp_path / "theirs")
    (tmp_path / "theirs" / "llava_fsdp.json").unlink()
    processor = json.loads((tmp_path / "theirs" / "preprocessor_config.json").read_text())
    write_json(tmp_path / "theirs" / "preprocessor_config.json", {**processor, "do_pad": False})
    found = Assistant(str(tmp_path / "theirs"), "chatml", AspectRatio.square)
    assert (found.template_name, found.reader.tokens.aspect) == ("chatml", AspectRatio.square)
    assert Assistant(str(tmp_path / "theirs"), "v1", AspectRatio.pad).reader.tokens.aspect is AspectRatio.pad


def test_a_model_of_tiles(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """It is asked with as many tokens as it trained on."""
    cfg = make_config(
        parts, dataset, tmp_path / "run", "max_steps=1", "data.image_aspect_ratio=anyres",
        "model.patch_merge=spatial_unpad", "data.max_length=400",
    )  # fmt: skip
    train.train(cfg)
    found = Assistant(str(tmp_path / "run"), "v1", AspectRatio.pad)
    talk = Conversation(found)
    files = [dataset / "images" / name for name in ("0.jpg", "1.png")]
    for path in files:
        talk.add(path, "here")
    assert all(len(shown.tiles) > 1 for shown in talk.next_images)
    said(talk, "what is it")
    assert talk.turns[-1].text == at_once(talk, files) != ""
    said(talk, "and where")
    assert talk.turns[-1].text == at_once(talk, files)
    original = export(conversion(tmp_path / "run", tmp_path / "made", "format=llava", "verify=false"))
    again = Conversation(Assistant(str(original), "v1", AspectRatio.pad))
    for path in files:
        again.add(path, "here")
    assert said(again, "what is it") == talk.turns[1].text


def typed(talk: Conversation, lines: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a terminal says to these lines, message by message."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    heard: list[str] = []

    def say(message: str, *values: object) -> None:
        heard.append(message % values if values else message)

    monkeypatch.setattr(chat, "log", lambda: SimpleNamespace(info=say, error=say))
    chat.Terminal(talk, configured("max_new_tokens=6")).run()
    return heard


def test_a_terminal(
    talk: Conversation, pictures: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands, mistakes, and a conversation that goes on after each of them."""
    lines = [
        "/help", "/image", "/image gone.jpg", f"/image {pictures[0]}", "/nonsense", "", "what is it", "/undo", "/undo",
        "what is it", f"/image '{pictures[1]}'", "and this", "/quit", "never asked",
    ]  # fmt: skip
    heard = typed(talk, "\n".join(lines), monkeypatch)
    words = [
        "/image FILE", "needs the name of a file", "gone.jpg is not a file", "shown with the next question",
        "not a command", "taken back", "there is no question yet", "shown with the next question",
    ]  # fmt: skip
    said_back = [message for message in heard if not message.startswith("(cut at")]
    assert len(said_back) == len(words) and all(w in m for w, m in zip(words, said_back, strict=True))
    written = capsys.readouterr().out
    assert len(talk.turns) == 4 and len(talk.images) == 2
    answers = talk.turns[1].text, talk.turns[1].text, talk.turns[3].text
    assert written == "".join(f"{shown_text(answer)}\n" for answer in answers)


def test_what_is_drawn_repeats_with_a_seed(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for heat, seed in ((1, 1), (1, 1), (1, 2), (0, 1)):
        own = Conversation(talk.assistant, seed=seed)
        chat.Terminal(own, configured("max_new_tokens=12", f"temperature={heat}")).answer("what is it")
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and len(set(answers)) == 3


def test_an_answer_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it comes in pieces, each of them written at once."""
    pieces = iter(["a", "\x1b", "[2J", "\r", "\tb\n", "\x9b1mé🙂"])
    talk = SimpleNamespace(assistant=SimpleNamespace(device="cpu"), ask=lambda *_: pieces, was_cut=False, thought=None)
    chat.Terminal(talk, configured()).answer("what is it")
    assert capsys.readouterr().out == "a\\u001b[2J\\u000d\tb\n\\u009b1mé🙂\n"


@pytest.mark.parametrize(
    ("answer", "told"),
    [(["", " "], "(the answer has no text)"), (["yes"], "(cut at max_new_tokens=512, or at the most that the model")],
)
def test_an_empty_answer_is_told(answer: list[str], told: str, caplog: pytest.LogCaptureFixture) -> None:
    talk = SimpleNamespace(
        assistant=SimpleNamespace(device="cpu"), ask=lambda *_: iter(answer), was_cut=True, thought=None
    )
    with caplog.at_level("INFO", "llava_fsdp"):
        chat.Terminal(talk, configured()).answer("what is it")  # pyright: ignore[reportArgumentType]
    [line] = caplog.messages
    assert line.startswith(told)


@pytest.mark.parametrize(
    "keys",
    ["temperature=-1", "top_p=0", "port=0", "seed=-1", "max_new_tokens=0", "max_images=0", "serve=true question=x",
     "question=' '"],
)  # fmt: skip
def test_keys_that_are_wrong(keys: str) -> None:
    with pytest.raises(ConfigError, match=keys.partition("=")[0]):
        configured(*shlex.split(keys))


def test_images_of_the_command_line(tmp_path: Path, pictures: list[Path]) -> None:
    first, second, _ = pictures
    odd = tmp_path / "a, b [1].jpg"
    odd.write_bytes(first.read_bytes())
    assert chat.image_files(f"[{first},{second}]") == [first, second]
    assert chat.image_files(f'[{first}, "{odd}"]') == [first, odd] and chat.image_files(str(odd)) == [odd]
    assert chat.image_files(None) == chat.image_files("[]") == []
    with pytest.raises(ConfigError, match="image=gone is not a file"):
        chat.image_files(f"[{first},gone]")


@pytest.mark.slow
@pytest.mark.e2e
def test_ctrl_c_stops_an_answer_and_then_the_program(noise: Path, tmp_path: Path) -> None:
    """The first one ends the answer and keeps it: the next question goes on from there. The second ends the program."""
    words = [f"model.checkpoint={noise}", "max_new_tokens=480"]
    running = subprocess.Popen(
        [sys.executable, "-c", AS_TYPED, "-u", "-m", "llava_fsdp.chat", *words],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0,
    )  # fmt: skip
    assert running.stdin and running.stdout and running.stderr
    running.stdin.write("what\n")
    running.stdin.flush()
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    while "(stopped)" not in (line := running.stderr.readline()):
        assert line, "it has ended"
    running.stdin.write("/undo\n")
    running.stdin.flush()
    assert "taken back" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert "Traceback" not in running.stderr.read()


def test_one_question(noise: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several pictures: the answer alone on standard output. What is wrong with a picture ends it."""
    pictures = f"image='[{dataset / 'images' / '0.jpg'},{dataset / 'images' / '1.png'}]'"
    words = [f"model.checkpoint={noise}", "question=what", "max_new_tokens=4"]
    chat.chat(configured(*words, pictures))
    turn = Turn("human", f"{IMAGE_TAG}\n{IMAGE_TAG}\nwhat")
    files = [dataset / "images" / "0.jpg", dataset / "images" / "1.png"]
    expected = Assistant(str(noise), "v1", AspectRatio.pad).answers([Question([turn], files, "")], 4)
    assert capsys.readouterr().out == f"{expected[0]}\n"
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ImageError, match=r"image: image .*text\.png cannot be read: it is none of JPEG"):
        chat.chat(configured(*words, f"image={tmp_path / 'text.png'}"))
