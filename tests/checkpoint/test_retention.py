"""Folders of checkpoints: names that are given back, put aside and swept away, and which of several is taken."""

import logging
from pathlib import Path

import pytest
import torch

from llava_fsdp.checkpoint import retention
from llava_fsdp.checkpoint.commit import merge_entries
from llava_fsdp.checkpoint.manifest import RowRange, TensorEntry
from llava_fsdp.checkpoint.retention import (
    delete,
    delete_old,
    delete_temporary,
    require_plain_folder,
    restore_replaced,
    set_aside,
    set_aside_later,
    write_latest,
)
from llava_fsdp.checkpoint.verify import first_undamaged, read_small
from llava_fsdp.runtime.errors import CheckpointError


def made(parent: Path, *names: str) -> list[Path]:
    for name in names:
        (parent / name).mkdir(parents=True)
        (parent / name / "file").write_text(name)
    return [parent / name for name in names]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_replaced_checkpoint_gets_its_name_back_only_if_it_is_free(tmp_path: Path) -> None:
    restore_replaced(tmp_path / "absent")
    made(tmp_path, "step-000001.replaced.tmp", "step-000002.replaced.tmp", "step-000002", "other.replaced.tmp")
    restore_replaced(tmp_path)
    assert names_in(tmp_path) == {"step-000001", "step-000002.replaced.tmp", "step-000002", "other.replaced.tmp"}
    assert (tmp_path / "step-000002" / "file").read_text() == "step-000002"


def test_what_saves_have_left_is_swept_away_and_links_are_not_followed(tmp_path: Path) -> None:
    delete_temporary(tmp_path / "absent")
    made(tmp_path, "step-000001", "step-000002.tmp", "step-000003.deleted.tmp", "elsewhere")
    (tmp_path / "step-000004.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step-000005.tmp").write_text("")
    delete_temporary(tmp_path)
    assert names_in(tmp_path) == {"step-000001", "elsewhere", "step-000004.tmp", "step-000005.tmp"}
    assert (tmp_path / "elsewhere" / "file").is_file()


def test_a_checkpoint_is_renamed_before_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier deletion was interrupted."""
    folder, _ = made(tmp_path, "step-000001", "step-000001.deleted.tmp")
    seen: list[set[str]] = []
    monkeypatch.setattr(retention, "sync_folder", lambda parent: seen.append(names_in(parent)))
    delete(folder)
    assert seen == [{"step-000001.deleted.tmp"}] and names_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("keep", "every", "damaged", "kept"),
    [
        (2, None, (), {4, 5}), (2, 2, (), {2, 4, 5}), (1, 3, (), {3, 5}), (2, None, (5,), {3, 4, 5}),
        (1, None, (3,), {5}), (9, None, (), {1, 2, 3, 4, 5}),
    ],
)  # fmt: skip
def test_the_newest_are_kept(
    keep: int, every: int | None, damaged: tuple[int, ...], kept: set[int], tmp_path: Path
) -> None:
    folders = made(tmp_path, *(f"step-{step:06d}" for step in range(1, 6)))
    bad, points = [folders[step - 1] for step in damaged], list[str]()
    delete_old(tmp_path, keep, every, lambda folder: folder not in bad, points.append)
    assert names_in(tmp_path) == {f"step-{step:06d}" for step in kept}
    assert points == ["one deleted"] * (5 - len(kept))


def test_what_is_put_aside_keeps_its_place_in_a_new_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path, "old-1", "checkpoints/step-000001")
    (tmp_path / "metrics.jsonl").write_text("x")
    with caplog.at_level(logging.INFO):
        set_aside(tmp_path, [tmp_path / "absent"])
        assert names_in(tmp_path) == {"old-1", "checkpoints", "metrics.jsonl"} and not caplog.text
        set_aside(tmp_path, [tmp_path / "absent", tmp_path / "checkpoints" / "step-000001", tmp_path / "metrics.jsonl"])
    assert names_in(tmp_path) == {"old-1", "old-2", "checkpoints"}
    assert (tmp_path / "old-2" / "checkpoints" / "step-000001" / "file").is_file()
    assert (tmp_path / "old-2" / "metrics.jsonl").is_file() and (tmp_path / "old-2").stat().st_mode & 0o777 == 0o700
    assert "old-2: step-000001, metrics.jsonl" in caplog.text


@pytest.mark.parametrize(("own", "pointer"), [(True, "step-000002"), (False, "step-000003")])
def test_later_checkpoints_are_put_aside(own: bool, pointer: str, tmp_path: Path) -> None:
    """The pointer names the one that the run continues from, if it is one of these."""
    parent = tmp_path / "checkpoints"
    folders = made(parent, *(f"step-{step:06d}" for step in (1, 2, 3)))
    write_latest(folders[-1])
    (elsewhere,) = made(tmp_path / "other", "step-000002")
    set_aside_later(tmp_path, folders[1] if own else elsewhere, 2)
    assert names_in(parent) == {"step-000001", "step-000002", "latest"}
    assert (parent / "latest").read_text() == f"{pointer}\n" and not (elsewhere.parent / "latest").exists()
    set_aside_later(tmp_path, folders[1], 2)
    assert names_in(tmp_path) == {"checkpoints", "other", "old-1"}


def test_a_link_is_no_checkpoint(tmp_path: Path) -> None:
    (folder,) = made(tmp_path, "step-000001")
    require_plain_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CheckpointError, match="it is a link"):
        require_plain_folder(tmp_path / "link")
    with pytest.raises(CheckpointError, match="not a folder"):
        require_plain_folder(folder / "file")


def test_the_first_good_checkpoint_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [tmp_path / name for name in "abc"]

    def check(good: str):  # type: ignore[no-untyped-def]
        def one(folder: Path):  # type: ignore[no-untyped-def]
            if folder.name not in good:
                raise CheckpointError(f"{folder.name} is damaged")
            return folder

        return one

    assert first_undamaged([], True, check("")) is None
    assert first_undamaged(folders, True, check("ac")) == folders[0]
    with caplog.at_level(logging.WARNING):
        assert first_undamaged(folders, False, check("bc")) == folders[1]
    assert "a is damaged; this checkpoint is not used" in caplog.text
    with pytest.raises(CheckpointError, match=r"a is damaged\n.*checkpoint\.strict=true takes no other"):
        first_undamaged(folders, True, check("bc"))
    with pytest.raises(CheckpointError, match="none of them verifies"):
        first_undamaged(folders[:1], False, check(""))


def test_rows_of_ranks_are_in_their_order() -> None:
    """Whichever rank has them; a tensor may be of one rank alone."""
    parts = [RowRange("rank-00000.safetensors", 4, 6), RowRange("rank-00001.safetensors", 0, 4)]
    entries = [{"w": TensorEntry(torch.float32, (6, 2), (own,))} for own in parts]
    alone = TensorEntry(torch.float32, (), (RowRange("rank-00001.safetensors", 0, 1),))
    merged = merge_entries([entries[0], {**entries[1], "b": alone}])
    assert [*merged] == ["b", "w"] and merged["b"] == alone
    assert merged["w"] == TensorEntry(torch.float32, (6, 2), (parts[1], parts[0]))


@pytest.mark.parametrize(("size", "fits"), [(8, True), (9, False)])
def test_small_files_are_small(size: int, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    if fits:
        assert read_small(tmp_path / "file", 8) == bytes(size)
    else:
        with pytest.raises(CheckpointError, match="file has more than 8 bytes"):
            read_small(tmp_path / "file", 8)
