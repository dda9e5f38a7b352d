"""The planted faults of records are found, each as what it is, in files of every kind."""

import json
import tarfile
from pathlib import Path

import pyarrow
import pytest
from planted import ALSO, write_pictures
from planted_containers import PLANTED_IN, add_member
from pyarrow import parquet
from test_bad_records import config, kinds_found
from test_build import open_again
from tiers import slow_after
from within_limits import within_limits

from llava_fsdp.data.records.record import LOCATION, MOST_DEPTH, TOO_LARGE

TEXT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ASKS = [{"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize("kind", slow_after(1, PLANTED_IN))
def test_every_fault_is_named_in_every_container(kind: str, parts: Path, tmp_path: Path) -> None:
    suffix, write = PLANTED_IN[kind]
    path = tmp_path / f"data{suffix}"
    write_pictures(tmp_path / "images")
    planted = write(path, tmp_path / "images")
    assert len(planted) > 90 and len({*planted}) > 18

    def look() -> tuple:
        records = open_again(config(parts, path), parts)
        return kinds_found(records), list(records.index.problems())

    found, rows = within_limits(look)
    assert found == [{kind, *ALSO.get(kind, ())} if kind else set() for kind in planted]
    for row in rows:
        assert row["reason"].startswith(f"{path}, ") and f"record {row['record']}" in row["reason"], row


def nested(depth: int, sign: str) -> str:
    return "[" * depth + "1" + "]" * depth if sign == "[" else '{"image": ' * depth + '"x"' + "}" * depth


def forged(suffix: str) -> dict[str, bytes]:
    """Records, by the kind of problem that they have, with what only this program may write, or nested deeply."""
    made = {"good": json.dumps({"conversations": TEXT})}
    for number, value in enumerate([7, ["a", 1], [9, 1], None]):
        made[f"good {number}"] = json.dumps({"conversations": TEXT, TOO_LARGE: value})
    for number, place in enumerate(
        [["x", 0, 512, None], [None, 1 << 50, 9, None], [None, 0, 9, [0, 9, "ZSTD", 1 << 40]]]
    ):
        held = {LOCATION: place}
        made[f"bad_form {number}"] = json.dumps({"conversations": ASKS, "image": held})
        part = [{"type": "image", "image": held}, {"type": "text", "text": "a"}]
        turns = [{"role": "user", "content": part}, {"role": "assistant", "content": "b"}]
        made[f"bad_form {number} in a part"] = json.dumps({"messages": turns})
    for depth in (MOST_DEPTH, 300, 500, 940, 5000):
        for sign in "[{":
            for key in ("image", "id", "conversations"):
                record = {"conversations": TEXT, key: 0}
                text = json.dumps(record).replace(f'"{key}": 0', f'"{key}": {nested(depth, sign)}')
                made[f"not_json {depth} {sign} {key}"] = text
    made["good nested"] = json.dumps({"conversations": TEXT})[:-1] + f', "meta": {nested(MOST_DEPTH - 1, "[")}}}'
    return {name: text.encode() for name, text in made.items()}


@pytest.mark.parametrize("suffix", [".jsonl", ".tar"])
def test_forged_and_nested_records(suffix: str, parts: Path, tmp_path: Path) -> None:
    """A place in a record would let it read any bytes as an image; a depth near Python's limit is read here, not
    there."""
    records, path = forged(suffix), tmp_path / f"a{suffix}"
    (tmp_path / "images").mkdir()
    if suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for number, raw in enumerate(records.values()):
                add_member(tar, f"{number:03d}.json", raw)
    else:
        path.write_bytes(b"\n".join(records.values()))
    found = within_limits(lambda: kinds_found(open_again(config(parts, path), parts)))
    names = [name.split()[0] for name in records]
    assert found == [set() if name == "good" else {name} for name in names]


def test_places_in_parquet(parts: Path, tmp_path: Path) -> None:
    """Neither a column nor a field of a part that is called like ours says where an image lies."""
    (tmp_path / "images").mkdir()
    place = [None, 1 << 50, 9, None]
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", LOCATION: place}, {"type": "text", "text": "a", LOCATION: None}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "b", LOCATION: None}]},
        ],
        LOCATION: place,
        TOO_LARGE: [9, 1],
    }  # fmt: skip
    images = [{"image": {"bytes": None, "path": None, LOCATION: place}, "conversations": ASKS}]
    for name, rows, kind in (("a", [row], "tag_without_image"), ("b", images, "tag_without_image")):
        path = tmp_path / f"{name}.parquet"
        schema = pyarrow.Table.from_pylist(rows).schema
        if name == "b":
            own = pyarrow.struct(
                [
                    ("bytes", pyarrow.binary()),
                    ("path", pyarrow.string()),
                    (LOCATION, schema.field("image").type.field(LOCATION).type),
                ]
            )
            schema = schema.set(0, pyarrow.field("image", own))
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
        assert within_limits(lambda path=path: kinds_found(open_again(config(parts, path), parts))) == [{kind}]


def test_an_image_in_a_part_may_be_a_member(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Also in turns of `conversations`; however many names and members there are, each is looked up once."""
    image = (dataset / "images" / "0.jpg").read_bytes()
    part = [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "\na"}]
    turns = [{"role": "user", "content": part}, {"role": "assistant", "content": "b"}]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "a.json", json.dumps({"conversations": turns}).encode())
        add_member(tar, "a.jpg", image)
        add_member(tar, "a.png", image)
        named = {"conversations": ASKS, "image": ["x.jpg"] * 20_000}
        add_member(tar, "b.json", json.dumps(named).encode())
        for number in range(5000):
            add_member(tar, f"b.{number}.jpg", b"")
    cfg = config(parts, tmp_path / "a.tar", f"data.images={dataset / 'images'}")
    assert within_limits(lambda: kinds_found(open_again(cfg, parts))) == [set(), {"image_count", "image_missing"}]
