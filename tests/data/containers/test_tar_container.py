"""The members of a WebDataset tar lie where tarfile finds them; tars that cannot be read in place are refused."""

import gzip
import io
import random
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from llava_fsdp.data.containers.file_reader import LocalFile
from llava_fsdp.data.containers.tar_container import TarSample, tar_samples
from llava_fsdp.runtime.errors import DataError

LONG = "/".join(["folder" * 12] * 4)
NAMES = (
    "000.jpg", "000.json", "000.cls", "a/b/001.seg.PNG", "a/b/001.jpg", "é/ü.jpg", "é/ü.json", "a/001.jpg", "./002.jpg",
    "a.b/003.jpg",
)  # fmt: skip
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class Memory:
    """A reader of bytes in memory, which must only be asked for what exists."""

    def __init__(self, data: bytes, name: str = "a.tar"):
        self.data, self.size, self.name = data, len(data), name

    def read(self, offset: int, size: int, /) -> bytes:
        assert 0 <= offset and 0 <= size and offset + size <= self.size, (offset, size)
        return self.data[offset : offset + size]


def content(name: str) -> bytes:
    return name.encode() * (len(name) * 7 % 61)


def info(name: str, size: int = 0, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = size
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def tar(*names: str, form: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name in names:
            archive.addfile(info(name, len(content(name))), io.BytesIO(content(name)))
    return file.getvalue()


def of_infos(*infos: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for one in infos:
            archive.addfile(one)
    return file.getvalue()


def walk(data: bytes, name: str = "a.tar") -> list[TarSample]:
    return list(tar_samples(Memory(data, name), Counter()))


def contents(data: bytes) -> dict[tuple[str, str], bytes]:
    return {
        (sample.key, extension): data[offset : offset + size]
        for sample in walk(data)
        for extension, (offset, size) in sample.members.items()
    }


def refused(data: bytes, name: str = "a.tar") -> DataError:
    with pytest.raises(DataError) as error:
        walk(data, name)
    assert name in str(error.value)
    return error.value


def with_checksum(header: bytes) -> bytes:
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def header(name: bytes, kind: bytes = b"0", size: bytes = b"00000000000\0", magic: bytes = b"ustar\x0000") -> bytes:
    made = name.ljust(100, b"\0") + b"0000644\0" * 3 + size + b"0" * 11 + b"\0" + b" " * 8 + kind + bytes(100) + magic
    return with_checksum(made.ljust(512, b"\0"))


@pytest.mark.parametrize("form", FORMATS)
def test_members_lie_where_tarfile_finds_them(form: str, tmp_path: Path) -> None:
    long = [f"{LONG}/{'n' * 90}.jpg", f"{LONG}/{'é' * 70}.jpg"] if form != "ustar" else [f"{'f' * 150}/{'n' * 90}.jpg"]
    data = tar(*NAMES, *long, form=FORMATS[form])
    (tmp_path / "a.tar").write_bytes(data)
    with LocalFile(tmp_path / "a.tar") as file:
        skipped: Counter[str] = Counter()
        found = list(tar_samples(file, skipped))
    with tarfile.open(tmp_path / "a.tar") as archive:
        offsets = [(own.offset_data, own.size) for own in archive]
    assert [place for sample in found for place in sample.members.values()] == offsets
    assert [sample.key for sample in found][:6] == ["000", "a/b/001", "é/ü", "a/001", "./002", "a.b/003"]
    assert list(found[0].members) == ["jpg", "json", "cls"]
    assert list(found[1].members) == ["seg.png", "jpg"]
    assert list(contents(data).values()) == [content(name) for name in (*NAMES, *long)]
    assert found[-1].key == long[-1].removesuffix(".jpg")
    assert not skipped


def test_what_belongs_to_no_sample_is_counted() -> None:
    data = of_infos(
        info("d", type=tarfile.DIRTYPE), info("d/._0.jpg"), info("d/0.jpg"), info("d/.DS_Store"), info("d/0.txt"),
        info("README"), info("e", type=tarfile.DIRTYPE, size=4096),
    )  # fmt: skip
    skipped: Counter[str] = Counter()
    (sample,) = tar_samples(Memory(data), skipped)
    assert (sample.key, list(sample.members)) == ("d/0", ["jpg", "txt"])
    assert skipped == {"folder": 2, "hidden file": 2, "no extension": 1}


def test_an_empty_tar_has_no_samples() -> None:
    assert walk(tar()) == []
    assert walk(bytes(1024)) == walk(bytes(512)) == []


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_anywhere(form: str) -> None:
    """Also at the end of a member or of a header, where tarfile says nothing."""
    data = tar("a/0.jpg", "a/é.jpg", f"{'f' * 150}/{'n' * 90}.json", form=FORMATS[form])
    end = len(data.rstrip(b"\0")) + 511 & -512
    for size in {*range(0, end + 1, 512), *range(1, end, 97), end - 1, end + 511}:
        error = refused(data[:size])
        assert error.culprit["file"] == "a.tar"
    assert len(walk(data[: end + 512])) == 3


def test_a_truncated_member_is_named() -> None:
    data = tar("a/0.jpg", "a/1.jpg")
    offset, size = walk(data)[1].members["jpg"]
    assert refused(data[: offset + size - 1]).culprit["member"] == "a/1.jpg"


def test_every_changed_byte_of_a_header_is_found() -> None:
    data = bytearray(tar("0.jpg", "1.jpg"))
    right = contents(bytes(data))
    draw = random.Random(0)
    for at in range(512):
        old = data[at]
        data[at] ^= 1 << draw.randrange(8)
        try:
            assert contents(bytes(data)) == right, at
            assert 148 <= at < 156, "the checksum may be written in several ways"
        except DataError:
            pass
        data[at] = old


def test_data_after_the_end_mark() -> None:
    first, second = tar("0.jpg"), tar("1.jpg")
    assert "tar --concatenate" in str(refused(first + second))
    assert "tar --concatenate" in str(refused(first[:-1] + b"x"))
    assert len(walk(first + bytes(10 << 10))) == 1
    refused(first + bytes(65 << 20))


@pytest.mark.parametrize("name", ["a.tar.gz", "A.TGZ", "a.tar.zst", "a.tar"])
def test_compressed_tars(name: str) -> None:
    plain = tar("0.jpg")
    zst = name.endswith("zst")
    assert ("zstd -d" if zst else "gunzip") in str(
        refused(b"\x28\xb5\x2f\xfd" + plain if zst else gzip.compress(plain), name)
    )
    if name != "a.tar":
        assert ("zstd -d" if zst else "gunzip") in str(refused(plain, name)), "by its name alone"


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices(kind: bytes) -> None:
    error = refused(of_infos(info("0.jpg"), info("d/1.jpg", type=kind, linkname="0.jpg")))
    assert error.culprit["member"] == "d/1.jpg"
    assert "--dereference" in str(error)


def test_sparse_members() -> None:
    old = header(b"0.jpg", kind=b"S", magic=b"ustar  \0")
    assert refused(old + bytes(1024)).culprit["member"] == "0.jpg"
    sparse = info("0.jpg", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.name": "0.jpg"})
    assert "--sparse" in str(refused(of_infos(sparse)))


@pytest.mark.parametrize("name", ["/etc/0.jpg", "../0.jpg", "a/../0.jpg", "a/..", "a/" + "b" * 120 + "/../0.jpg"])
@pytest.mark.parametrize("form", FORMATS)
def test_names_that_leave_their_folder(name: str, form: str) -> None:
    assert refused(of_infos(info(name), form=FORMATS[form])).culprit["member"] == name


def test_keys_and_extensions_come_once() -> None:
    assert "a/0" in str(refused(tar("a/0.jpg", "a/1.jpg", "a/0.json")))
    assert "a/0" in str(refused(tar("a/0.jpg", "a/0.json", "a/0.JPG")))
    assert len(walk(tar("a/0.jpg", "b/0.jpg", "0.jpg"))) == 3, "the folder is part of the key"


class Hole(Memory):
    """A tar of one large member, whose content must not be asked for."""

    def __init__(self, head: bytes, large: int):
        super().__init__(head)
        self.end, self.size = len(head) + large, len(head) + large + 1024

    def read(self, offset: int, size: int, /) -> bytes:
        assert offset + size <= len(self.data) or self.end <= offset, offset
        return self.data[offset : offset + size] if offset < self.end else bytes(size)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sizes_over_8_gib(form: int) -> None:
    head = info("0.jpg", 9 << 30).tobuf(form)
    (sample,) = tar_samples(Hole(head, 9 << 30), Counter())
    assert sample.members == {"jpg": (len(head), 9 << 30)}


HOSTILE = {
    "binary size": header(b"0.jpg", size=b"\x80" + b"\xff" * 11),
    "negative size": header(b"0.jpg", size=b"\xff" * 12),
    "size with an underscore": header(b"0.jpg", size=b"0000000_001\0"),
    "size in words": header(b"0.jpg", size=b"-0000000001\0"),
    "not UTF-8": header(b"\xff\xfe.jpg"),
    "unknown kind": header(b"0.jpg", kind=b"V"),
    "solaris": header(b"0.jpg", kind=b"X"),
    "large pax header": header(b"x", kind=b"x", size=b"77777777777\0") + bytes(1 << 16),
    "pax header of no member": header(b"x", kind=b"x"),
    "long name of no member": header(b"x", kind=b"L"),
}
PAX_RECORDS = (
    b"0 path=a\n", b"8 path=a\n", b"99 path=a.jpg\n", b"-3 path=a\n", b"x path=a\n", b"path", b"10 path=a", b"5 a\n\n",
    b"11 size=-1\n", b"13 size=1_0\n\n", b"11 path=\xff\xff\n", b"99999999999999999999999 path=a\n", b"9 size=x\n",
    b"23 size=99999999999999\n",
)  # fmt: skip


def with_pax(record: bytes) -> bytes:
    return header(b"x", kind=b"x", size=b"%011o\0" % len(record)) + record.ljust(512, b"\0") + header(b"0.jpg")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str) -> None:
    refused(HOSTILE[name] + bytes(1024))


@pytest.mark.parametrize("record", PAX_RECORDS)
def test_hostile_pax_records(record: bytes) -> None:
    refused(with_pax(record) + bytes(1024))
    for right in (b"14 path=1.jpg\n", b"14 path=1.jpg\n" + bytes(9)):
        assert walk(with_pax(right) + bytes(1024))[0].key == "1"


def test_old_headers() -> None:
    """Signed checksums, and folders of version 7, whose names end with a slash."""
    own = header("é.jpg".encode(), magic=bytes(8))
    signed = sum(own) - 2 * 256 - sum(own[148:156]) + 8 * 32
    own = own[:148] + b"%06o\0 " % signed + own[156:]
    data = header(b"d/", kind=b"\0", magic=bytes(8)) + own + bytes(1024)
    assert [sample.key for sample in walk(data)] == ["é"]


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_fuzz(form: str) -> None:
    """A changed byte or a cut gives the members that were written, or a DataError.

    No checksum covers what is in members and in extra headers: a change there is a change of a name or of a content.
    """
    data = tar("a/0.jpg", "a/0.json", "é" * 60 + "/1.jpg", "b/2.jpg", form=FORMATS[form])
    right = sorted(place for sample in walk(data) for place in sample.members.values())
    draw, errors = random.Random(0), 0
    tracemalloc.start()
    for _ in range(300):
        changed = bytearray(data[: 10 * 1024])
        if draw.random() < 0.7:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        else:
            del changed[draw.randrange(len(changed)) :]
        try:
            assert sorted(place for sample in walk(bytes(changed)) for place in sample.members.values()) == right
        except DataError:
            errors += 1
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
    assert 100 < errors < 290
