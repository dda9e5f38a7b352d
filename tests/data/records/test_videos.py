"""Records with videos: which file stands for which tag, and what is not read."""

import base64
from pathlib import Path
from typing import Any

import pytest

from llava_fsdp.data.problems import Kind
from llava_fsdp.data.records.forms.parse_record import RecordKeys, parse_record
from llava_fsdp.data.records.json_stream import MOST_BYTES
from llava_fsdp.data.records.record import UNREAD_VALUE, Record, count_images, is_video
from llava_fsdp.data.records.record_file import RecordFile, read_records
from llava_fsdp.data.text.conversation import check_turns
from llava_fsdp.runtime.errors import DataError


def parse(question: str, reads: bool = True, **keys: Any) -> Record:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "a <video> of it"}]
    return parse_record(Path("a.json"), 0, {"id": "1", "conversations": turns, **keys}, videos=reads)


READ: list[tuple[dict[str, Any], str, list[str], str]] = [
    ({"video": "a.mp4"}, "<image>\nwhat", ["a.mp4"], "<image>\nwhat"),
    ({"video": "a.mp4"}, "<video>\nwhat", ["a.mp4"], "<image>\nwhat"),
    ({"video": ["a.mp4", "b.MKV"]}, "<image> <Video>", ["a.mp4", "b.MKV"], "<image> <image>"),
    ({"image": "i.png", "video": "a.mp4"}, "<video> <image>", ["a.mp4", "i.png"], "<image> <image>"),
    ({"image": "i.png", "video": "a.mp4"}, "<image> <video>", ["i.png", "a.mp4"], "<image> <image>"),
    ({"image": ["i.png", "j.png"], "video": ["a.avi", "b.mov"]}, "<video><image><image><video>",
     ["a.avi", "i.png", "j.png", "b.mov"], "<image><image><image><image>"),
    ({"videos": ["a.mp4", "b.mov"]}, "<video> <image>", ["a.mp4", "b.mov"], "<image> <image>"),
    ({"videos": "a.mp4", "video": None, "image": "i.png"}, "<image> <video>", ["i.png", "a.mp4"], "<image> <image>"),
    ({"videos": ["a.mp4"], "video": "a.mp4"}, "<video>", ["a.mp4"], "<image>"),
    ({"image": "a.webm"}, "<image>", ["a.webm"], "<image>"),
    ({"image": "a.webm"}, "<video>", ["a.webm"], "<image>"),
    ({"image": ["i.png", "a.m4v"]}, "<image> <image>", ["i.png", "a.m4v"], "<image> <image>"),
    ({"image": ["i.png", "a.m4v"]}, "<video> <image>", ["a.m4v", "i.png"], "<image> <image>"),
    ({"image": "i.png", "video": None}, "<image>", ["i.png"], "<image>"),
    ({"video": "a.mp4"}, "no tag", ["a.mp4"], "no tag"),
    ({"video": "a.mp4"}, "<image> <video> </video>", ["a.mp4"], "<image> <video> </video>"),
    ({"video": "a.mp4"}, "<image> <image>", ["a.mp4"], "<image> <image>"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "question", "images", "text"), READ)
def test_videos_come_in_the_order_of_their_tags(
    keys: dict[str, Any], question: str, images: list[str], text: str
) -> None:
    record = parse(question, **keys)
    assert list(record.images) == images and record.unread is None and record.has_image_key
    assert [turn.text for turn in record.turns] == [text, "a <video> of it"]
    assert count_images(record.images) == sum(name.endswith("png") for name in images)


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({}, "<video>\nwhat"), ({"image": "i.png"}, "<video> <image>"), ({"video": "a.mp4"}, "<video> <video>"),
    ({"video": "a.flv"}, "<video>"), ({"video": "frames"}, "<video>"),
    ({"video": "a.mp4", "audio": "a.wav"}, "<video>"),
]  # fmt: skip


def test_an_empty_list_of_videos_is_none() -> None:
    record = parse("what", videos=[], video=None)
    assert record.images == () and record.unread is None
    assert not parse("what", videos=[]).has_image_key


def test_two_keys_of_videos_that_differ_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        parse("<video>", video="a.mp4", videos=["b.mp4"])
    assert caught.value.kind == Kind.bad_form and "video and videos" in str(caught.value)


@pytest.mark.parametrize(("keys", "question"), UNREAD)
def test_what_is_no_video_is_not_read(keys: dict[str, Any], question: str) -> None:
    assert parse(question, **keys).unread is not None


KEYS_OF_VIDEOS: list[dict[str, Any]] = [
    {"video": "a.mp4"}, {"videos": ["a.mp4"]}, {"image": "a.mp4"}, {"image": "i.png", "video": ["a.mp4"]},
]  # fmt: skip


@pytest.mark.parametrize("keys", KEYS_OF_VIDEOS)
def test_a_model_without_videos_reads_none(keys: dict[str, Any]) -> None:
    record = parse("<image>\nwhat", reads=False, **keys)
    assert record.unread is not None and record.images == (() if "image" not in keys else (keys["image"],))
    assert record.has_image_key is ("image" in keys)


def test_videos_in_other_forms() -> None:
    """Parts in the order of their images and videos; a list of files without tags goes in front. What has no place in a
    question, or gives no file, is not read in silence."""

    def ask(*content: Any, videos: bool = True, **keys: Any) -> Record:
        said = [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]
        turns = [*said, {"role": "assistant", "content": "a <video> of it"}]
        return parse_record(Path("a.json"), 0, {"messages": turns, **keys}, videos=videos)

    video, image, text = ({"type": "video", "video": "a.mp4"}, {"type": "image", "path": "i.png"},
                          {"type": "text", "text": "what"})  # fmt: skip
    for own in (video, {"type": "video", "path": "a.mp4"}):
        record = ask(own, image, text, own)
        assert record.images == ("a.mp4", "i.png", "a.mp4") and record.unread is None
        assert record.turns[0].text == "<image><image>what<image>" and record.turns[1].text == "a <video> of it"
    record = ask("what", images=["i.png"], video="a.mp4")
    assert (record.images, record.turns[0].text) == (("i.png", "a.mp4"), "<image>\n<image>\nwhat")
    record = ask("what <video>", video="a.mp4")
    assert (record.images, record.turns[0].text) == (("a.mp4",), "what <image>")
    pairs = {"texts": [{"user": "<video> what", "assistant": "b"}], "video": ["a.mp4"]}
    assert parse_record(Path("a.json"), 0, pairs, videos=True).turns[0].text == "<image> what"
    asked = RecordKeys("q", "a", "file")
    record = parse_record(Path("a.json"), 0, {"q": "what", "a": "b", "file": "a.mp4"}, keys=asked, videos=True)
    assert (record.images, record.turns[0].text, record.unread) == (("a.mp4",), "<image>\nwhat", None)
    asked = RecordKeys(image="video")
    record = parse_record(Path("a.json"), 0, {**pairs, "texts": [{"user": "a", "assistant": "b"}]}, None, asked, True)
    assert record.images == ("a.mp4",), "one list, although two keys of the configuration name it"
    for wrong in ({"type": "video"}, {**video, "path": "b.mp4"}, {**video, "audio": "a.wav"},
                  {"type": "video", "video": "a.flv"}):  # fmt: skip
        assert ask(text, wrong).unread is not None
    assert ask(video, text, videos=False).unread is not None and ask(image, text, videos=False).unread is None
    assert ask({"type": "image", "path": "a.mp4"}, text, videos=False).unread is not None
    data = f"data:image/png;base64,{base64.b64encode(b'a').decode()}"
    record = ask({"type": "image", "url": data}, video)
    assert [is_video(name) for name in record.images] == [False, True] and list(record.inline) == [record.images[0]]
    said = [{"role": "user", "content": "what"}, {"role": "assistant", "content": [video, text]}]
    with pytest.raises(DataError) as raised:
        check_turns(parse_record(Path("a.json"), 0, {"messages": said}, videos=True))
    assert raised.value.kind == Kind.image_count


WRONG = {
    "/a.mp4": Kind.path_outside, "../a.mp4": Kind.path_outside, "http://a/a.mp4": Kind.url, "a.mp4/": Kind.bad_form,
    "": Kind.bad_form,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), WRONG.items())
def test_paths_of_videos_are_checked(name: str, kind: Kind) -> None:
    with pytest.raises(DataError, match="video is") as raised:
        parse("<video>", video=name)
    assert raised.value.kind == kind


def test_columns_of_parquet(tmp_path: Path) -> None:
    """Paths are read; videos themselves are not."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    turns = [[{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "b"}]] * 2
    table = pa.table({"id": ["1", "2"], "video": [["a.mp4", "b.mp4"], None], "conversations": turns})
    write_table(table, tmp_path / "a.parquet")
    records = RecordFile(tmp_path / "a.parquet")
    assert [records[n].images for n in range(2)] == [("a.mp4", "b.mp4"), ()]
    assert records[0].unread is None and records[1].unread is not None
    held = pa.table({"video": [{"bytes": b"x", "path": "a.mp4"}] * 2, "conversations": turns})
    write_table(held, tmp_path / "b.parquet")
    assert all(UNREAD_VALUE.encode() in line for line, _ in read_records(str(tmp_path / "b.parquet"), MOST_BYTES))
    assert RecordFile(tmp_path / "b.parquet")[0].unread is not None
