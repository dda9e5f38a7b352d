"""A dataset with one fault of every sort in it, each in a record of its own, among records without any."""

import json
import struct
import zlib
from pathlib import Path

from PIL import Image

ANSWER = {"from": "gpt", "value": "a red circle"}


def turns(question: str = "<image>\nwhat is it", *more: dict) -> list[dict]:
    return [{"from": "human", "value": question}, ANSWER, *more]


def with_picture(name: object, question: str = "<image>\nwhat is it") -> dict:
    return {"image": name, "conversations": turns(question)}


def text(*said: tuple[str, str]) -> dict:
    return {"conversations": [{"from": role, "value": value} for role, value in said]}


def png(width: int, height: int) -> bytes:
    """A file whose head says a size, and whose pixels are nothing."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def write_pictures(folder: Path) -> None:
    folder.mkdir(parents=True)
    noise = Image.effect_noise((90, 70), 90).convert("RGB")
    for name in ("good.jpg", "good.png", "good.webp", "good.gif", "good.bmp"):
        noise.save(folder / name)
        whole = (folder / name).read_bytes()
        (folder / f"cut-{name.partition('.')[2]}").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "zero.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("<html>404</html>")
    broken = bytearray((folder / "good.png").read_bytes())
    broken[len(broken) // 2] ^= 255
    (folder / "broken.png").write_bytes(broken)
    (folder / "bomb.png").write_bytes(png(60_000, 60_000))
    (folder / "large.png").write_bytes(png(8_000, 8_000))
    Image.new("RGB", (20_000, 1)).save(folder / "narrow.png")
    (folder / "a folder").mkdir()
    outside = folder.parent / "outside"
    outside.mkdir()
    noise.save(outside / "secret.png")
    (folder / "link.png").symlink_to(outside / "secret.png")
    (folder / "inside.png").symlink_to(folder / "good.png")


LONG = "the red circle " * 150
FAULTS: list[tuple[str, dict | list | str | bytes]] = [
    ("bad_form", ["no object"]),
    ("bad_form", {"conversations": "none"}),
    ("bad_form", {"conversations": [{"from": "human"}]}),
    ("bad_form", {"image": 3, "conversations": turns()}),
    ("bad_form", with_picture("")),
    ("bad_form", with_picture(False)),
    ("bad_form", with_picture(["good.png", ""])),
    ("bad_form", text(("human", "cut \ud83d"), ("gpt", "a"))),
    ("bad_form", {"id": "half \ud83d", **with_picture("a\0b.png")}),
    ("bad_form", b'{"id": ' + b"1" * 5000 + b', "conversations": []}'),
    ("bad_form", b'{"id": "a", "id": "b", "conversations": []}'),
    ("not_utf8", b'{"id": "latin", "conversations": [{"from": "human", "value": "gr\xfc\xdfe"}]}'),
    ("wrong_roles", text(("human", "a"), ("human", "b"))),
    ("wrong_roles", text(("User", "a"), ("assistant", "b"))),
    ("wrong_roles", {"messages": [{"role": "tool", "content": "a"}]}),
    ("bad_form", {"messages": [{"role": "user", "content": [{"type": "ink"}]}]}),
    ("bad_form", {"texts": [{"user": "a", "assistant": "b"}], **text(("human", "a"), ("gpt", "b"))}),
    ("media_not_read", {"messages": [{"role": "user", "content": [{"type": "video"}]}, {"from": "gpt", "value": "b"}]}),
    ("odd_turns", text(("human", "a"), ("gpt", "b"), ("human", "c"))),
    ("odd_turns", {"conversations": []}),
    ("empty_answer", text(("human", "a"), ("gpt", " \n"))),
    ("image_count", with_picture("good.png", "<image>\n<image>\nwhat is it")),
    ("image_count", with_picture(["good.png", "good.jpg"])),
    ("image_count", with_picture("good.png", "what is it")),
    ("image_count", {"image": "good.png", **text(("human", "<image>"), ("gpt", "a <image>"))}),
    ("tag_without_image", {"conversations": turns()}),
    ("media_not_read", {"pictures": "good.png", "conversations": turns()}),
    ("media_not_read", {"Video": ["a.mp4"], **text(("human", "what happens"), ("gpt", "a"))}),
    ("media_not_read", {"image_url": {"url": "a"}, **with_picture("good.png")}),
    ("media_not_read", text(("human", "<video>\nwhat happens"), ("gpt", "a"))),
    ("media_not_read", {"conversations": [{"from": "human", "value": "a", "image": "good.png"}, ANSWER]}),
    ("record_too_large", text(("human", "a"), ("gpt", "b" * (4 << 20)))),
    ("special_token", text(("human", "what does </s> end"), ("gpt", "a"))),
    ("tag_without_image", with_picture([])),
    ("image_missing", with_picture("gone.jpg")),
    ("image_empty", with_picture("zero.jpg")),
    ("image_truncated", with_picture("cut-jpg")),
    ("image_truncated", with_picture("cut-png")),
    ("image_truncated", with_picture("cut-webp")),
    ("image_truncated", with_picture("cut-gif")),
    ("image_truncated", with_picture("cut-bmp")),
    ("image_unreadable", with_picture("text.jpg")),
    ("image_unreadable", with_picture("broken.png")),
    ("image_unreadable", with_picture("a folder")),
    ("image_bomb", with_picture("bomb.png")),
    ("image_bomb", with_picture("large.png")),
    ("image_shape", with_picture("narrow.png")),
    ("path_outside", with_picture("../outside/secret.png")),
    ("path_outside", with_picture("/etc/hostname")),
    ("path_outside", with_picture("link.png")),
    ("url", with_picture("https://example.org/cat.jpg")),
    ("url", with_picture("file:///cat.jpg")),
    ("bad_form", with_picture("data:image/png,AAAA")),
    ("duplicate_id", {"id": "good-0", **with_picture("good.jpg")}),
    ("too_long", text(("human", "a"), ("gpt", LONG))),
    ("no_labels", text(("human", LONG), ("gpt", "a"))),
    ("key_not_obeyed", {"conversations": [*turns("a")[:1], {**ANSWER, "reasoning_content": "it is round"}]}),
]  # fmt: skip
ALSO = {"no_labels": {"too_long"}}
"""What a fault cannot be without."""
LINES_ONLY: list[tuple[str, dict | list | str | bytes]] = [
    ("not_json", b'{"id": "cut", "conversations": [{"from": "human", "val'),
    ("not_json", b"not json at all"),
]
GOOD = [
    with_picture("good.jpg"),
    with_picture("inside.png"),
    with_picture(["good.png", "good.webp"], "<image> and <image>\nwhat are they"),
    text(("human", "a"), ("gpt", "b")),
    text(("gpt", "hello"), ("human", "a"), ("gpt", "b")),
    {"image": None, **text(("human", 'größe 中 \\ " ]},{['), ("gpt", "b"))},
]


def planted(lines: bool) -> list[tuple[str | None, bytes]]:
    """(the fault, the record's JSON), faults and good records by turns."""
    found: list[tuple[str | None, bytes]] = []
    for number, (kind, raw) in enumerate([*FAULTS, *(LINES_ONLY if lines else [])]):
        good = {"id": f"good-{number}", **GOOD[number % len(GOOD)]}
        found.append((None, json.dumps(good, ensure_ascii=number % 2 == 0).encode()))
        named = {"id": f"{kind}-{number}", **raw} if isinstance(raw, dict) else raw
        found.append((kind, named if isinstance(named, bytes) else json.dumps(named).encode()))
    return found


def write_planted(folder: Path, lines: bool) -> tuple[Path, list[str | None]]:
    """The file of records, and the fault of each; pictures are in `images` beside it."""
    write_pictures(folder / "images")
    records = planted(lines)
    path = folder / ("data.jsonl" if lines else "data.json")
    texts = [raw for _, raw in records]
    path.write_bytes(b"\n".join(texts) + b"\n" if lines else b"[\n " + b",\n ".join(texts) + b"]")
    return path, [kind for kind, _ in records]
