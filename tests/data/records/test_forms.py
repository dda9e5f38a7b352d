"""A record in any form is the record that it becomes in LLaVA's form."""

import base64
import copy
import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from harness import CPU
from PIL import Image
from pyarrow import parquet
from small import make_config, write_json
from test_build import FITS, open_again, plan_of

from llava_fsdp.config import Task
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.containers.location import ImageLocation, Page
from llava_fsdp.data.images import check
from llava_fsdp.data.images.check import ImageBytes, inline_images, read_size
from llava_fsdp.data.index.verify import verify_index
from llava_fsdp.data.loader import build_loader
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records.forms.parse_record import FORMS, RecordKeys, parse_record
from llava_fsdp.data.records.forms.record_reader import GIVEN_AS, RecordReader
from llava_fsdp.data.records.record import INLINE, LOCATION, Call, Record, Turn
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.data.text.conversation import check_turns
from llava_fsdp.evaluate.check_images import check_images
from llava_fsdp.evaluate.main import with_paths
from llava_fsdp.evaluate.read_questions import first_question, read_file
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.text.progress import watch_silently

EMPTY = BITS[Kind.empty_answer]
PAIR = RecordKeys("q", "a", "file")
IMAGE = ["0.jpg", "1.png", "2.jpg", "3.png", "4.jpg"]


def llava(number: int, texts: tuple[str, ...], system: str | None = None) -> dict:
    """A record in LLaVA's form, with an image for each tag of its questions."""
    turns = [] if system is None else [{"from": "system", "value": system}]
    turns += [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    images = [IMAGE[(number + n) % 5] for n in range("".join(texts).count("<image>"))]
    made: dict = {"id": f"r{number}", "conversations": turns}
    return made | ({"image": images[0] if len(images) == 1 else images} if images else {})


ASKED = [
    ("what?", "a dog"),
    ("<image>\nwhat is it", "a cat"),
    ("what is it\n<image>", "größe 中 \U0001f600"),
    ("a <image> b", "c"),
    ("", "nothing asked"),
    ("<image>", "alone"),
    ("nothing said", ""),
    ("<image>\n<image>\nwhich", "the first"),
    ("<image><image> and <image>x", "three"),
    ("one", "1", "two", "2", "<image>three", "3"),
    ("<image>\nfirst", "1", "then <image>?", "2"),
    ("  spaces \n", " kept ", "\n<image>\n\n", "d"),
]
BASE = [llava(n, texts, s) for n, (texts, s) in enumerate(itertools.product(ASKED, (None, "be  kind", "")))]
FILES = {
    name: base64.b64encode(
        (lambda file: (Image.effect_noise((20 + 9 * n, 41), 80).convert("RGB").save(file, "PNG"), file)[1])(
            io.BytesIO()
        ).getvalue()
    ).decode()
    for n, name in enumerate(IMAGE)
}


def images_of(raw: dict) -> list[str]:
    own = raw.get("image", [])
    return own if isinstance(own, list) else [own]


def url(name: str) -> str:
    return f"data:image/png;base64,{FILES[name]}"


def sharegpt(raw: dict) -> dict | None:
    names = {"human": ("human", "user"), "gpt": ("gpt", "assistant", "chatgpt", "model"), "system": ("system",)}
    for n, turn in enumerate(raw["conversations"]):
        turn["from"] = names[turn["from"]][n % len(names[turn["from"]])]
    return raw


def roles_inside(raw: dict) -> dict | None:
    return raw | {"conversations": messages_of(raw)}


def messages_of(raw: dict) -> list[dict]:
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    return [{"role": names[t["from"]], "content": t["value"]} for t in raw["conversations"]]


def openai_text(raw: dict) -> dict | None:
    return {"id": raw["id"], "messages": messages_of(raw), "conversations": None, "images": images_of(raw)}


def in_parts(raw: dict, give: Callable[[int, str], dict]) -> dict:
    """`messages` whose contents are lists of parts."""
    made, names = messages_of(raw), enumerate(images_of(raw))
    for message in made:
        parts: list[dict] = []
        for number, piece in enumerate(message["content"].split("<image>")):
            parts += [give(*next(names))] if number else []
            parts += [{"type": "text", "text": piece}] if piece or not number else []
        message["content"] = parts
    return {"id": raw["id"], "messages": made}


def openai_paths(raw: dict) -> dict | None:
    forms = [lambda n: {"type": "image", "path": n}, lambda n: {"type": "image", "image": n, "text": None},
             lambda n: {"type": "image", "url": n}, lambda n: {"type": "image_url", "image_url": {"url": n}},
             lambda n: {"type": "image_url", "image_url": n}]  # fmt: skip
    return in_parts(raw, lambda place, name: forms[(place + len(raw["id"])) % len(forms)](name))


def openai_inline(raw: dict) -> dict | None:
    forms = [lambda n: {"type": "image_url", "image_url": {"url": url(n), "detail": "low"}},
             lambda n: {"type": "image", "base64": FILES[n]}, lambda n: {"type": "image", "image": url(n)},
             lambda n: {"type": "image", "image": {"bytes": FILES[n], "path": "own name"}}]  # fmt: skip
    return in_parts(raw, lambda place, name: forms[(place + len(images_of(raw))) % len(forms)](name))


def openai_holes(raw: dict) -> dict | None:
    return in_parts(raw, lambda *_: {"type": "image"}) | {"images": images_of(raw)}


def fine_vision(raw: dict) -> dict | None:
    turns = raw["conversations"]
    if turns[0]["from"] == "system":
        return None
    pairs = zip(turns[::2], turns[1::2], strict=True)
    texts = [{"user": q["value"], "assistant": a["value"], "source": "x"} for q, a in pairs]
    return {"id": raw["id"], "texts": texts, "images": images_of(raw)}


def columns(raw: dict) -> dict | None:
    turns = raw["conversations"]
    if len(turns) != 2:
        return None
    return {"id": raw["id"], "q": turns[0]["value"], "a": turns[1]["value"], "file": images_of(raw)}


WAYS = {
    "sharegpt": sharegpt, "roles_inside": roles_inside, "openai_text": openai_text, "openai_paths": openai_paths,
    "openai_inline": openai_inline, "openai_holes": openai_holes, "fine_vision": fine_vision, "columns": columns,
}  # fmt: skip


def converted(way: str) -> tuple[list[dict], list[int]]:
    """The records that the form can express, and their numbers."""
    made = [WAYS[way](copy.deepcopy(raw)) for raw in BASE]
    return [raw for raw in made if raw is not None], [n for n, raw in enumerate(made) if raw is not None]


def parse(raw: object, keys: RecordKeys = PAIR) -> Record:
    return parse_record(Path("a.json"), 0, raw, keys=keys)


@pytest.mark.parametrize("way", WAYS)
def test_every_form_gives_the_same_record(way: str) -> None:
    made, numbers = converted(way)
    assert len(made) >= 9
    for raw, number in zip(made, numbers, strict=True):
        record, own = parse(raw), parse(BASE[number])
        assert (record.id, record.turns, record.has_image_key) == (own.id, own.turns, own.has_image_key), raw
        assert record.llava_length == own.llava_length and record.unread is None
        files = [record.inline.get(name, name) for name in record.images]
        inline = way == "openai_inline"
        assert files == [base64.b64decode(FILES[name]) if inline else name for name in own.images]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images that are also inline, as files."""
    folder = tmp_path_factory.mktemp("forms") / "images"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_bytes(base64.b64decode(text))
    return folder


def write(path: Path, records: list[dict]) -> Path:
    if path.suffix == ".parquet":
        names = dict.fromkeys(name for raw in records for name in raw)
        parquet.write_table(
            pyarrow.Table.from_pylist([{name: raw.get(name) for name in names} for raw in records]), path
        )
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(raw) + "\n" for raw in records))
    else:
        write_json(path, records)
    return path


def prepared(path: Path, parts: Path, dataset: Path, *overrides: str) -> Steps:
    keys = "data.question=q", "data.answer=a", "data.image_column=file", "data.image_aspect_ratio=anyres"
    bad = "data.bad_records=skip", "data.max_bad_records=100%"
    cfg = make_config(parts, dataset, path.parent, f"data.path={path}", *keys, *bad, *overrides)
    return build_loader(cfg, parts / "language", parts / "vision", FITS, 0, 1, CPU).steps


@pytest.fixture(scope="module")
def own(parts: Path, dataset: Path, pictures: Path) -> Steps:
    """The samples of LLaVA's form."""
    return prepared(write(pictures.parent / "base.json", BASE), parts, dataset, f"data.images={pictures}")


@pytest.mark.parametrize(("way", "suffix"), [
    ("openai_text", ".parquet"), ("openai_inline", ".jsonl"), ("openai_holes", ".parquet"), ("fine_vision", ".parquet"),
    ("columns", ".parquet"), ("openai_paths", ".json"),
])  # fmt: skip
def test_every_form_gives_the_same_sample(
    way: str, suffix: str, own: Steps, parts: Path, dataset: Path, pictures: Path, tmp_path: Path
) -> None:
    made, numbers = converted(way)
    folder = "null" if way == "openai_inline" else pictures
    other = prepared(write(tmp_path / f"a{suffix}", made), parts, dataset, f"data.images={folder}")
    flags = other.records.index.flags(0, len(numbers)).tolist()
    assert flags == own.records.index.flags(0, len(BASE))[numbers].tolist() and set(flags) == {0, EMPTY}
    places = {own.records[n].id: n for n in range(len(own.records))}
    assert len(other.records) == flags.count(0) >= 8 and max(other.records.images) > 1
    for number in range(len(other.records)):
        (sample, tiles), (expected, drawn) = other.read(number), own.read(places[other.records[number].id])
        assert sample.input_ids.tolist() == expected.input_ids.tolist()
        assert sample.labels.tolist() == expected.labels.tolist()
        assert len(tiles) == len(drawn) == len(sample.image_rows)
        for one, two in zip([*sample.image_rows, *tiles], [*expected.image_rows, *drawn], strict=True):
            assert np.array_equal(one, two)


@pytest.mark.parametrize("form", ["texts", "messages", "columns"])
@pytest.mark.parametrize("images", [0, 1, 3])
def test_images_apart_from_the_text_come_first(form: str, images: int) -> None:
    """In front of the first question; LLaVA's own form must have the tags."""
    raw = {
        "texts": {"texts": [{"user": "a", "assistant": "b"}, {"user": "c", "assistant": "d"}]},
        "messages": {
            "messages": [{"role": r, "content": t} for r, t in zip(("system", "user", "assistant"), "sab", strict=True)]
        },
        "columns": {"q": "a", "a": "b"},
    }[form]
    record = parse({**raw, "images": IMAGE[:images]})
    check_turns(record)
    questions = [turn.text for turn in record.turns if turn.role == "human"]
    assert questions[0] == "<image>\n" * images + "a" and questions[1:] in ([], ["c"])
    with pytest.raises(DataError) as caught:
        check_turns(parse({"conversations": BASE[0]["conversations"], "images": IMAGE[:2]}))
    assert caught.value.kind == Kind.image_count


def test_tags_in_the_text_must_match_images_apart_from_it() -> None:
    for images, tags in itertools.product((1, 2), (1, 2)):
        record = parse({"texts": [{"user": "x<image>" * tags, "assistant": "b"}], "images": IMAGE[:images]})
        if images == tags:
            check_turns(record)
            continue
        with pytest.raises(DataError) as caught:
            check_turns(record)
        assert caught.value.kind == Kind.image_count


def user(content: object, answer: str = "b") -> dict:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def part(**fields: object) -> dict:
    return user([{"type": "text", "text": "a"}, fields])


TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
DEEP: list = []
for _ in range(700):
    DEEP = [DEEP]
DEEP_TEXT: list = ["a"]
for _ in range(700):
    DEEP_TEXT = [DEEP_TEXT]
REFUSED: dict[str, tuple[object, Kind, str]] = {
    "two forms": ({"conversations": TURNS, **user("a")}, Kind.bad_form, "conversations and messages"),
    "a form and a question": ({"conversations": TURNS, "q": "a", "a": "b"}, Kind.bad_form, "conversations and q"),
    "three forms": ({"conversations": 1, "messages": 2, "texts": 3}, Kind.bad_form, "messages and texts"),
    "no form": ({"id": 1, "message": []}, Kind.bad_form, "conversations, messages, texts, q, a"),
    "messages null": ({"messages": None}, Kind.bad_form, "messages is null"),
    "messages text": ({"messages": "a"}, Kind.bad_form, 'messages is "a"'),
    "messages object": ({"messages": {"role": "user"}}, Kind.bad_form, "messages is"),
    "a turn that is text": ({"messages": ["a"]}, Kind.bad_form, "turn 0"),
    "a turn in a list": ({"messages": [[user("a")]]}, Kind.bad_form, "turn 0"),
    "a role that is a number": ({"messages": [{"role": 1, "content": "a"}]}, Kind.bad_form, "turn 0"),
    "a role that is a list": ({"messages": [{"role": ["user"], "content": "a"}]}, Kind.bad_form, "turn 0"),
    "no content": ({"messages": [{"role": "user"}]}, Kind.bad_form, "turn 0"),
    "null content": (user(None), Kind.bad_form, "turn 0"),
    "content is a number": (user(3), Kind.bad_form, "turn 0"),
    "content is an object": (user({"type": "text", "text": "a"}), Kind.bad_form, "turn 0"),
    "parts of value": ({"conversations": [{"from": "human", "value": []}]}, Kind.bad_form, "turn 0"),
    "both pairs of keys": (
        {"messages": [{"from": "human", "value": "a", "role": "user", "content": "a"}]}, Kind.bad_form, "turn 0"
    ),
    "half a pair": ({"messages": [{"from": "human", "content": "a"}]}, Kind.bad_form, "turn 0"),
    "half a surrogate pair": (user([{"type": "text", "text": "\ud83d"}]), Kind.bad_form, "turn 0"),
    "a part that is text": (user(["a"]), Kind.bad_form, "turn 0, part 0"),
    "a part in a list": (user([[{"type": "text", "text": "a"}]]), Kind.bad_form, "turn 0, part 0"),
    "a part without a type": (user([{"text": "a"}]), Kind.bad_form, "part 0"),
    "a type that is a number": (part(type=3), Kind.bad_form, "part 1"),
    "an unknown type": (part(type="ink", text="a"), Kind.bad_form, "part 1"),
    "text that is parts": (part(type="text", text=[{"type": "text"}]), Kind.bad_form, "part 1"),
    "text that is null": (part(type="text"), Kind.bad_form, "part 1"),
    "an image with text": (part(type="image", path="a.png", text="b"), Kind.bad_form, "part 1"),
    "an image given twice": (part(type="image", path="a.png", url="b.png"), Kind.bad_form, "part 1"),
    "an image in an image": (part(type="image", image={"image": {"image": "a"}}), Kind.bad_form, "part 1"),
    "an image as a list": (part(type="image", image=["a.png"]), Kind.bad_form, "part 1"),
    "an image as a number": (part(type="image_url", image_url={"url": 7}), Kind.bad_form, "part 1"),
    "texts text": ({"texts": "a"}, Kind.bad_form, 'texts is "a"'),
    "texts of text": ({"texts": ["a"]}, Kind.bad_form, "texts, entry 0"),
    "texts without an answer": ({"texts": [{"user": "a"}]}, Kind.bad_form, "texts, entry 0"),
    "texts with a number": ({"texts": [{"user": "a", "assistant": 3}]}, Kind.bad_form, "entry 0, assistant"),
    "texts with null": ({"texts": [{"user": None, "assistant": "a"}]}, Kind.bad_form, "entry 0, user"),
    "a question alone": ({"q": "a"}, Kind.bad_form, "a is null"),
    "an answer alone": ({"a": "a"}, Kind.bad_form, "q is null"),
    "answers in a list": ({"q": "a", "a": ["b"]}, Kind.bad_form, "a is"),
    "an address": (part(type="image", url="https://example.org/a.png"), Kind.url, "https://example.org/a.png"),
    "an address in images": ({**user("a"), "images": ["http://a"]}, Kind.url, "http://a"),
    "an address in a column": ({"q": "a", "a": "b", "file": "s3://a/b"}, Kind.url, "s3://a/b"),
    "a path out": (part(type="image", path="../a.png"), Kind.path_outside, "../a.png"),
    "a path out in images": ({"texts": [], "images": ["/a.png"]}, Kind.path_outside, "/a.png"),
    "a number in images": ({"texts": [], "images": ["a.png", 3]}, Kind.bad_form, "images is 3"),
    "null in images": ({"texts": [], "images": ["a.png", None]}, Kind.bad_form, "images is null"),
    "lists in images": ({"texts": [], "images": [["a.png"]]}, Kind.bad_form, "images is"),
    "two lists of images": ({"texts": [], "images": ["a.png"], "image": "b.png"}, Kind.bad_form, "image and images"),
    "images in parts and apart": ({**part(type="image", path="a"), "images": "b"}, Kind.bad_form, "the parts"),
    "a data URL of text": (part(type="image", url="data:text/plain;base64,QUFB"), Kind.bad_form, "part 1"),
    "a data URL without base64": ({"texts": [], "images": "data:image/png,AAAA"}, Kind.bad_form, "images is"),
    "an open data URL": ({"texts": [], "images": "data:"}, Kind.bad_form, "images is"),
    "base64 with a space": ({"texts": [], "images": "data:image/png;base64,QU FB"}, Kind.image_unreadable, "images is"),
    "base64 cut": ({"texts": [], "images": "data:image/png;base64,QUF"}, Kind.image_unreadable, "images is"),
    "base64 of letters": (part(type="image", base64="ü"), Kind.image_unreadable, "part 1"),
    "base64 of a number": (part(type="image", base64=7), Kind.image_unreadable, "part 1"),
    "bytes of an object": (part(type="image", image={"bytes": {"a": 1}}), Kind.image_unreadable, "part 1"),
    "deep images": ({"texts": [], "images": DEEP_TEXT}, Kind.bad_form, "images is"),
    "deep parts": (user(DEEP_TEXT), Kind.bad_form, "part 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    raw, kind, named = REFUSED[case]
    with pytest.raises(DataError) as caught:
        parse(raw)
    assert caught.value.kind == kind and named in str(caught.value)
    assert str(caught.value).startswith("a.json, record 0 ") and len(str(caught.value)) < 500


UNREAD: dict[str, tuple[dict, str | None]] = {
    "images are read": ({**user("<image>"), "images": ["a.png"]}, None),
    "the named column is read": ({"q": "a", "a": "b", "file": "a.png"}, None),
    "video beside messages": ({**user("a"), "video": "a.mp4"}, '"video"'),
    "audio beside texts": ({"texts": [{"user": "a", "assistant": "b"}], "audio": {"path": "a"}}, '"audio"'),
    "an image of an entry": ({"texts": [{"user": "a", "assistant": "b", "image": "a.png"}]}, '"image"'),
    "an image of a message": ({"messages": [{"role": "user", "content": "a", "images": ["a"]}]}, '"images"'),
    "a part of video": (part(type="video", video="a.mp4"), '"video"'),
    "a part of a video's address": (part(type="video_url", video_url={"url": "http://a"}), '"video_url"'),
    "a part of audio": (part(type="input_audio", input_audio={"data": ""}), '"input_audio"'),
    "an image of a text part": (user([{"type": "text", "text": "a", "image": "a.png"}]), '"image"'),
    "a path of a text part": (user([{"type": "text", "text": "a", "path": "a.png"}]), '"path"'),
    "a video of an image part": (part(type="image", path="a.png", video="a.mp4"), '"video"'),
    "nulls, as Parquet fills them": (
        user([{"type": "text", "text": "a", "image": None, "image_url": {"url": None}, "video": None}]), None
    ),
    "deep and empty": ({**user("a"), "video": DEEP}, None),
    "a tag in a question": (user("<video> what"), "<video>"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_media_that_no_form_reads_are_told(case: str) -> None:
    raw, named = UNREAD[case]
    unread = parse(raw).unread
    assert (unread is None) is (named is None) and (named or "") in (unread or "")


def test_an_empty_form_beside_another_is_none() -> None:
    for empty in (None, [], "", {}):
        record = parse({"messages": empty, "conversations": TURNS, "q": None})
        assert record.turns == (Turn("human", "a"), Turn("gpt", "b"))
        assert parse({"conversations": empty, "texts": [], **user("a")}).turns == record.turns
    with pytest.raises(DataError) as caught:
        parse({"messages": [[]], "conversations": TURNS})
    assert caught.value.kind == Kind.bad_form
    assert parse({"messages": [], "conversations": []}).turns == ()
    assert parse({"texts": [], "image": None}).has_image_key and not parse({"texts": [], "images": []}).has_image_key
    assert parse({"texts": [], "image": "a.png", "images": ["a.png"]}).images == ("a.png",), "the same list twice"
    with pytest.raises(DataError, match="conversations is missing"):
        parse({"q": "a", "a": "b"}, RecordKeys())
    assert {*FORMS} == {"conversations", "messages", "texts"} and "path" in GIVEN_AS


def test_bytes_of_a_row_are_images() -> None:
    """Readers of containers give them as they are."""
    data = base64.b64decode(FILES["1.png"])
    raw = {
        "texts": [{"user": "a", "assistant": "b"}],
        "images": [{"bytes": data, "path": "x"}, {"path": "2.jpg", "bytes": None}],
    }
    record = parse(raw)
    assert record.inline == {record.images[0]: data} and record.images[1] == "2.jpg"
    assert record == parse(raw) and record.images[0] == parse({"texts": [], "image": url("1.png")}).images[0]


def test_problems_of_images_in_the_record(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """They are kinds of their own, no folder is needed, and the limit of a record is theirs."""
    whole, cut = url("1.png"), f"data:image/png;base64,{FILES['2.jpg'][:400]}"
    urls = [whole, cut, "data:image/png;base64,", "data:image/png;base64,QUFB", "data:image/png;base64,QUF", whole]
    rows = [{"id": n, **part(type="image", url=own)} for n, own in enumerate([*urls, f"{whole}{'A' * 20000}"])]
    path = write(tmp_path / "a.jsonl", [*rows, part(type="image", path="0.jpg")])
    steps = prepared(path, parts, dataset, "data.images=null", "data.max_record_bytes=20000")
    records = steps.records
    kinds = [set(), {"image_truncated"}, {"image_empty"}, {"image_unreadable"}, {"image_unreadable"}, set()]
    kinds += [{"record_too_large"}, {"images_unset"}]
    flags = records.index.flags(0, 8).tolist()
    assert [{k for k in Kind if BITS[k] & own} for own in flags] == kinds
    assert [records[n].id for n in range(len(records))] == ["0", "5"]
    assert all(np.array_equal(*pair) for pair in zip(steps.read(0)[1], steps.read(1)[1], strict=True))
    assert all(len(row["reason"]) < 500 for row in records.index.problems())
    heads = prepared(path, parts, dataset, "data.images=null", "data.examine=head", f"data.index={tmp_path / 'i'}")
    assert not heads.records.index.flags(0, 1)[0] and heads.records.index.flags(2, 3)[0] == BITS[Kind.image_empty]


def test_questions_and_answers_are_named_together(parts: Path, dataset: Path, tmp_path: Path) -> None:
    for keys in (["data.question=q"], ["data.answer=a"], ["data.question=q", "data.answer=q"]):
        with pytest.raises(ConfigError, match=r"data\.question"):
            make_config(parts, dataset, tmp_path, *keys)


WRONG = {
    "bytes in parts": [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": {"bytes": b"a", "path": None}}]}]}
    ],
    "texts of text": [{"texts": ["a"]}],
    "no answers": [{"texts": [{"user": "a"}]}],
    "numbers as answers": [{"q": "a", "a": 3}],
    "images of numbers": [{"texts": [{"user": "a", "assistant": "b"}], "images": [3]}],
}


@pytest.mark.parametrize("case", WRONG)
def test_tables_that_are_no_records(case: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: (messages|texts|a|images) is "):
        RecordFile(write(tmp_path / "a.parquet", WRONG[case]), keys=PAIR)


def test_rows_with_images_and_calls_of_tools(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """FineVision's rows have images themselves. Calls are read as in JSON, but for arguments that are a struct, whose
    missing fields are nulls."""
    data = [base64.b64decode(FILES[name]) for name in IMAGE[:3]]
    texts = [{"user": "a", "assistant": "b"}]
    rows = [{"texts": texts, "images": [{"bytes": own, "path": None} for own in data[:n]]} for n in (1, 3, 0)]
    records = prepared(write(tmp_path / "a.parquet", rows), parts, dataset, "data.images=null").records
    assert [len(records[n].images) for n in range(3)] == [1, 3, 0] and records[0].folder is None
    found = [check.read_file(inline_images(records[1])[name], "") for name in records[1].images]
    assert found == data and records[1].turns[0].text == "<image>\n<image>\n<image>\na"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    turns = [{"role": "user", "content": "a", "tool_calls": None, "tool_call_id": None},
             {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
             {"role": "tool", "content": "b", "tool_calls": None, "tool_call_id": "c"},
             {"role": "assistant", "content": "c", "tool_calls": None, "tool_call_id": None}]  # fmt: skip
    found = RecordFile(write(tmp_path / "b.parquet", [{"messages": turns}]))[0]
    assert [(turn.role, turn.text, turn.calls) for turn in found.turns] == [
        ("human", "a", ()), ("gpt", "", (Call("f", {"a": [1]}, "c"),)), ("tool", "b", (Call("f", {"a": [1]}, "c"),)),
        ("gpt", "c", ()),
    ]  # fmt: skip
    call["function"]["arguments"] = {"a": 1}
    with pytest.raises(DataError, match=r"arguments.*JSON text") as caught:
        RecordFile(write(tmp_path / "c.parquet", [{"messages": turns}]))[0]
    assert caught.value.kind == Kind.bad_form


def test_images_in_the_record_are_verified_with_it(parts: Path, dataset: Path, tmp_path: Path) -> None:
    rows = [part(type="image", url=url(name)) for name in IMAGE[:3]]
    path = write(tmp_path / "a.jsonl", rows)
    cfg = make_config(parts, dataset, tmp_path, f"data.path={path}", "data.images=null")
    open_again(cfg, parts)
    assert verify_index(plan_of(cfg, parts), watch_silently) == (3, 3)
    stat, text = path.stat(), path.read_text()
    path.write_text(text.replace(FILES["1.png"][-9:], "A" + FILES["1.png"][-8:]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=r"1 records or images are not .*\n.*record 1 "):
        verify_index(plan_of(cfg, parts), watch_silently)


def test_questions_of_every_form_are_asked(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of a benchmark too, whose images may be in the record itself."""
    path = write(
        tmp_path / "a.jsonl",
        [{"id": "r0", **part(type="image", url=url("1.png"))}, {"id": "r1", **user("c", "The answer is B.")}],
    )
    questions = list(read_file(path, Task.multiple_choice, 1 << 20))
    assert [(q.text, q.references) for q in questions] == [("<image>\na", ()), ("c", ("B",))]
    asked = [first_question(RecordFile(path)[n]) for n in range(2)]
    assert [(q.text, q.references) for q in asked] == [("a<image>", ("b",)), ("c", ("The answer is B.",))]
    for question in (questions[0], asked[0]):
        check_images([question], make_config(parts, dataset, tmp_path, "data.images=null").data)
        (file,) = with_paths(question, Path(".")).images
        assert isinstance(file, ImageBytes) and read_size(file, "here") == (29, 41)


def test_images_of_two_compressed_pages_are_two() -> None:
    """Also if they lie at the same place of their pages and have the same size."""
    reader = RecordReader("record 3", "a.parquet")
    places = [ImageLocation("a.parquet", 4, 9, Page(offset, 20, "ZSTD", 30)) for offset in (100, 300)]
    places += [ImageLocation("a.parquet", 4, 9), ImageLocation("a.parquet", 4, 8), ImageLocation("a.parquet", 5, 9)]
    names = [reader.image("image", {LOCATION: place.to_json()}) for place in places]
    assert len({*names}) == 5 and [reader.inline[name] for name in names] == places
    assert all(name.startswith(INLINE) for name in names)


def test_the_key_of_images_that_is_named_is_read_once() -> None:
    assert RecordKeys().images == RecordKeys(image="images").images == ("image", "images")
    assert RecordKeys(image="photo").images == ("image", "images", "photo")
    assert RecordKeys("q", None).pair is None and RecordKeys("q", "a").pair == ("q", "a")
