"""The files of a checkpoint, and where the rows of every tensor lie in them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from safetensors import safe_open
from saves import LAYOUTS, loaded, loaded_alone, save_steps, whole_tensors
from tiers import slow_after
from xxhash import xxh3_128

from llava_fsdp.checkpoint import reader, safetensors_stream
from llava_fsdp.checkpoint.manifest import Manifest, RowRange, TensorEntry, parse, parse_size, render
from llava_fsdp.checkpoint.reader import SavedTensor, fill, load
from llava_fsdp.checkpoint.safetensors_stream import (
    CHUNK,
    CODES,
    Digest,
    build_header,
    read_header,
    read_rows,
    write_tensors,
)
from llava_fsdp.checkpoint.verify import verify
from llava_fsdp.runtime.errors import CheckpointError, NumericError


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Digest:
    with ThreadPoolExecutor(1) as hasher:
        return write_tensors(
            path, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, tensors.__getitem__, hasher
        )


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    """Every dtype, in an order that would leave wide items unaligned; several chunks; strides; a single number."""
    given = {f"{code} {n}": torch.arange(1, 4 + n).to(dtype) for n, (dtype, code) in enumerate(CODES.items())}
    given["large"] = torch.arange(CHUNK // 4 * 2 + 1, dtype=torch.int64).view(torch.float64).nan_to_num(0, 0, 0)
    given |= {"turned": torch.randn(5, 3).t(), "one": torch.tensor(7.0), "none": torch.empty(0, 4)}
    digest = write(tmp_path / "file.safetensors", given)
    content = (tmp_path / "file.safetensors").read_bytes()
    assert digest == Digest(len(content), xxh3_128(content).hexdigest())
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert set(file.keys()) == set(given)
        for name, tensor in given.items():
            got = file.get_tensor(name)
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert got.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist(), name
    assert write(tmp_path / "empty.safetensors", {}).bytes == (tmp_path / "empty.safetensors").stat().st_size
    with safe_open(tmp_path / "empty.safetensors", "pt") as file:
        assert not list(file.keys())


@pytest.mark.parametrize("length", range(1, 9))
def test_every_tensor_begins_where_its_dtype_is_aligned(length: int) -> None:
    """Whatever the length of the names, which changes that of the header."""
    dtypes = (torch.uint8, torch.bfloat16, torch.float64, torch.float32)
    head, order = build_header({f"{n}" * length: (dtype, (3,)) for n, dtype in enumerate(dtypes)})
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
    places = json.loads(head[8:])
    begins = [places[name]["data_offsets"][0] for name in order]
    assert all(begin % dtypes[int(name[0])].itemsize == 0 for begin, name in zip(begins, order, strict=True))
    assert begins == sorted(begins) and begins[0] == 0


@pytest.mark.parametrize(
    ("first", "second", "size", "fits"),
    [
        ([0, 8], [8, 12], 12, True), ([0, 8], [12, 16], 16, False), ([0, 8], [4, 8], 8, False),
        ([4, 12], [12, 16], 16, False), ([0, 8], [8, 16], 16, False), ([0, 8], [8, 12], 13, False),
        ([0, 8], [8, 12], 11, False), ([4, 12], [0, 4], 12, True),
    ],
)  # fmt: skip
def test_tensors_fill_their_file_without_a_hole(
    first: list[int], second: list[int], size: int, fits: bool, tmp_path: Path
) -> None:
    """A header that leaves bytes out, or counts some twice, is refused."""
    places = {"a": {"dtype": "F32", "shape": [2], "data_offsets": first}}
    places["b"] = {"dtype": "F32", "shape": [1], "data_offsets": second}
    text = json.dumps(places).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with (tmp_path / "file").open("rb") as file:
        if fits:
            assert {name: place.shape for name, place in read_header(file.fileno(), "file").items()} == {
                "a": (2,), "b": (1,),
            }  # fmt: skip
        else:
            with pytest.raises(CheckpointError):
                read_header(file.fileno(), "file")


@pytest.mark.parametrize(
    "content", [b"", b"\x02", b"\x02" + bytes(7) + b"{", bytes(8) + b"{}", b"\x01" + bytes(7) + b"{"]
)
def test_a_file_without_a_whole_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file, pytest.raises(CheckpointError):
        read_header(file.fileno(), "file")


@pytest.mark.parametrize("chunk", [8, 24])
def test_a_file_is_the_same_whatever_the_pieces_are(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that fill their pieces, and others; the kernel is told of every byte once, but for the last few."""
    given = {f"model.{n}": torch.arange(1.0, n + 1).to(dtype) for n in (1, 6, 7, 12) for dtype in (torch.float32,)}
    given |= {"model.half": torch.arange(25.0).bfloat16(), "model.turned": torch.arange(15.0).view(3, 5).t()}
    whole = write(tmp_path / "whole", given)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(safetensors_stream, "CHUNK", chunk)
    monkeypatch.setattr(safetensors_stream, "WRITEBACK", 40)
    monkeypatch.setattr(safetensors_stream, "begin_writing", lambda _, begin, length: told.append((begin, length)))
    assert write(tmp_path / "pieces", given) == whole
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    ends = [begin + length for begin, length in told]
    assert [begin for begin, _ in told] == [0, *ends[:-1]] and whole.bytes - 40 < ends[-1] <= whole.bytes
    given["model.7"][-1] = float("inf")
    with pytest.raises(NumericError):
        write(tmp_path / "infinite", given)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_nothing_that_is_not_finite_is_written(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.ones(3, 1000, dtype=torch.float32)
    tensor[2, 567] = value
    with pytest.raises(NumericError, match=r"model\.a holds numbers that are not finite"):
        write(tmp_path / "file", {"model.a": tensor.to(dtype)})


@pytest.mark.ranks
@pytest.mark.parametrize("size", slow_after(1, [2, 4, 1]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_ranks_read_what_any_ranks_wrote(
    size: int, layout: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """To the bit, from every mesh to every mesh."""
    if size == 1:
        save_steps(single_world(), tmp_path, [3])
    else:
        pools[size].run(save_steps, tmp_path, [3], layout)
    assert loaded_alone(tmp_path) == 3
    for readers in (2, 4):
        for other in LAYOUTS:
            assert pools[readers].run(loaded, tmp_path, other) == [3] * readers


def test_a_checkpoint_has_exactly_the_tensors_of_the_run(tmp_path: Path) -> None:
    tensors = whole_tensors(1)
    save_steps(single_world(), tmp_path, [1])
    checkpoint = verify(tmp_path / "step-000001")
    load(checkpoint, tensors)
    for name in tensors:
        fewer = {other: tensor for other, tensor in tensors.items() if other != name}
        for others in (fewer, fewer | {f"{name}.other": tensors[name]}, tensors | {f"{name}.other": tensors[name]}):
            with pytest.raises(CheckpointError, match=re.escape(name)):
                load(checkpoint, others)
    for name, tensor in tensors.items():
        for other in (tensor.double(), tensor[None], tensor.new_zeros(0, *tensor.shape)):
            with pytest.raises(CheckpointError, match=re.escape(name)):
                load(checkpoint, tensors | {name: other})


@pytest.mark.ranks
def test_rows_that_several_ranks_hold_are_written_once(pools: dict[int, RankPool], tmp_path: Path) -> None:
    for layout in LAYOUTS:
        pools[4].run(save_steps, tmp_path / layout, [1], layout)
        found = verify(tmp_path / layout / "step-000001").manifest
        sizes = [digest.bytes for name, digest in found.files.items() if name.startswith("rank")]
        held = {name: 0 for name in found.files}
        for entry in found.tensors.values():
            for rows in entry.ranges:
                held[rows.file] += (rows.end - rows.begin) * entry.row_bytes
        whole = whole_tensors(1)
        assert sum(held.values()) == sum(t.nbytes for t in whole.values())
        largest_row = max(t[:1].nbytes if t.ndim else t.nbytes for t in whole.values())
        shares = [count for name, count in held.items() if name.startswith("rank")]
        assert len(sizes) == 4 and max(shares) - min(shares) <= len(whole) * 2 * largest_row
        name = "model.a.weight"
        saved = SavedTensor(tmp_path / layout / "step-000001", name, found.tensors[name])
        assert saved.rows(5, 29).equal(whole[name][5:29])


GOOD = Manifest(
    3,
    {"state.json": Digest(5, "0" * 32), "rank-00000.safetensors": Digest(7, "1" * 32)},
    {"a": TensorEntry(torch.float32, (4, 2), (RowRange("rank-00000.safetensors", 0, 4),))},
)


def test_every_flip_of_a_bit_of_a_manifest_is_seen() -> None:
    content = render(GOOD)
    assert parse(content) == GOOD
    for position in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match="is not what was written"):
            parse(bytes(flipped))


@pytest.mark.parametrize(
    "pieces", [[(0, 3)], [(1, 4)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 4), (4, 4)], [(0, 5)], []]
)
def test_rows_that_are_nowhere_or_twice_are_never_committed(pieces: list[tuple[int, int]]) -> None:
    own = tuple(RowRange("rank-00000.safetensors", *piece) for piece in pieces)
    with pytest.raises(CheckpointError, match="a: rows"):
        render(Manifest(3, GOOD.files, {"a": TensorEntry(torch.float32, (4, 2), own)}))


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 4, 0, 2)], [(0, 4, 0, 2), (0, 4, 3, 5)], [(0, 4, 0, 3), (0, 4, 2, 5)], [(0, 4, 0, 2), (0, 3, 2, 5)],
        [(0, 4, 0, 2), (0, 4, 2, 6)], [(0, 4, 0, 2), (0, 4)], [(0, 4, 2, 5), (0, 4, 0, 2)],
    ],
)  # fmt: skip
def test_columns_that_are_nowhere_or_twice_are_never_committed(pieces: list[tuple[int, ...]]) -> None:
    own = tuple(RowRange("rank-00000.safetensors", b, e, (c[0], c[1]) if c else None) for b, e, *c in pieces)
    with pytest.raises(CheckpointError, match=r"a: (rows|columns)"):
        render(Manifest(3, GOOD.files, {"a": TensorEntry(torch.float32, (4, 5), own)}))


@pytest.mark.parametrize("file", ["rank-00001.safetensors", "state.json"])
def test_rows_lie_in_a_listed_file_of_a_rank(file: str) -> None:
    own = TensorEntry(torch.float32, (4, 2), (RowRange(file, 0, 4),))
    with pytest.raises(CheckpointError):
        parse(render(Manifest(3, GOOD.files, {"a": own})))


@pytest.mark.parametrize("value", [True, False, 1.0, -1, 1 << 62, "1", None])
def test_what_is_no_size(value: object) -> None:
    assert [parse_size(size) for size in (0, 1, (1 << 62) - 1)] == [0, 1, (1 << 62) - 1]
    with pytest.raises(ValueError):
        parse_size(value)


COLUMNS = (("rank-00000.safetensors", 0, 4, (0, 2)), ("rank-00001.safetensors", 0, 1, (2, 5)),
           ("rank-00002.safetensors", 1, 4, (2, 5)))  # fmt: skip


def bytes_read(rows: RowRange, own: tuple[int, int], columns: tuple[int, int], large: int) -> int:
    """Of a file with a box of that tensor, whose columns have 8 bytes a row."""
    assert rows.columns is not None
    width = rows.columns[1] - rows.columns[0]
    count = min(own[1], rows.end) - max(own[0], rows.begin)
    wanted = min(columns[1], rows.columns[1]) - max(columns[0], rows.columns[0])
    return 8 * max(0, count) * (wanted if 8 * width >= large else width) if wanted > 0 else 0


@pytest.mark.parametrize("large", [1, 24, 1 << 16])
def test_columns_are_read_from_any_other_ranges(large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows, and every box of a tensor of which three files have boxes. Of rows of at least `large` bytes, only
    the wanted columns are read."""
    read: list[int] = []
    monkeypatch.setattr(reader, "LARGE_ROW", large)
    monkeypatch.setattr(reader, "read_rows", lambda *args: read.append(args[-1].nbytes) or read_rows(*args))
    whole = torch.arange(40.0).view(4, 5, 2)
    ranges = tuple(RowRange(*each) for each in COLUMNS)
    for file, begin, end, (left, right) in COLUMNS:
        write(tmp_path / file, {"a": whole[begin:end, left:right].contiguous()})
    entry = TensorEntry(torch.float32, (4, 5, 2), ranges)
    manifest = Manifest(3, GOOD.files | {rows.file: Digest(7, "1" * 32) for rows in ranges}, {"a": entry})
    assert parse(render(manifest)) == manifest
    for begin, end in ((0, 4), (1, 3), (0, 1)):
        assert torch.equal(SavedTensor(tmp_path, "a", entry).rows(begin, end), whole[begin:end])
        for left in range(5):
            for right in range(left + 1, 6):
                box = torch.zeros(end - begin, right - left, 2)
                read.clear()
                fill(tmp_path, {"a": entry}, {"a": (begin, box, (left, right))})
                assert torch.equal(box, whole[begin:end, left:right])
                assert sum(read) == sum(bytes_read(rows, (begin, end), (left, right), large) for rows in ranges)


@pytest.mark.parametrize("contiguous", [True, False])
def test_more_is_read_than_one_call_reads(contiguous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of 16 bytes and one of 4, from a place inside of the file."""
    monkeypatch.setattr(safetensors_stream, "CHUNK", 2)
    values = torch.arange(13, dtype=torch.int32)
    (tmp_path / "file").write_bytes(b"head" + values.numpy().tobytes())
    into = torch.zeros(13, dtype=torch.int32) if contiguous else torch.zeros(13, 2, dtype=torch.int32)[:, 0]
    with (tmp_path / "file").open("rb") as file:
        safetensors_stream.read_rows(file.fileno(), "file", 4, into)
        assert torch.equal(into, values)
        with pytest.raises(CheckpointError):
            safetensors_stream.read_rows(file.fileno(), "file", 8, into)
