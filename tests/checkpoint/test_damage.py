"""What is done to the files of a checkpoint is noticed, said, and the one before it is taken."""

import contextlib
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged import forge_facts, forge_manifest
from harness import RankPool, single_world
from saves import loaded, loaded_alone, save_steps
from xxhash import xxh3_128

from llava_fsdp.checkpoint.manifest import MANIFEST_FILE, STATE_FILE
from llava_fsdp.checkpoint.verify import newest_together, verify
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files.digests import TAIL, with_digest

BESIDE_FILE = "adapter/adapter_model.safetensors"
FILES = ("rank-00000.safetensors", "rank-00001.safetensors", STATE_FILE, MANIFEST_FILE, BESIDE_FILE)
RANK_0, RANK_1 = FILES[:2]
BEFORE = "step-000002"


@pytest.fixture(scope="module")
def good(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, by two ranks, with a folder for other programs; and in `four`, of step 4 by four,
    without."""
    parent = tmp_path_factory.mktemp("good")
    pools[2].run(save_with_adapter, parent)
    pools[4].run(save_steps, parent / "four", [4])
    return parent


def save_with_adapter(world: World, parent: Path) -> None:
    save_steps(world, parent, [2, 4], with_adapter=True)


@pytest.fixture
def parent(good: Path, tmp_path: Path) -> Path:
    for name in ("step-000002", "step-000004"):
        shutil.copytree(good / name, tmp_path / name)
    shutil.copyfile(good / "latest", tmp_path / "latest")
    return tmp_path


def cut_off(path: Path, length: int) -> None:
    os.truncate(path, length)


def swap(folder: Path) -> None:
    (folder / RANK_0).rename(folder / "between")
    (folder / RANK_1).rename(folder / RANK_0)
    (folder / "between").rename(folder / RANK_1)


def shift(pieces: list[list[Any]]) -> None:
    """The two ranks' rows exchanged, under a manifest that agrees with itself."""
    pieces[0][0], pieces[1][0] = pieces[1][0], pieces[0][0]


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"{name}: half of it": lambda f, n=name: cut_off(f / n, (f / n).stat().st_size // 2) for name in FILES},
    **{f"{name}: a byte less": lambda f, n=name: cut_off(f / n, (f / n).stat().st_size - 1) for name in FILES},
    **{f"{name}: nothing of it": lambda f, n=name: cut_off(f / n, 0) for name in FILES},
    **{f"{name}: a byte more": lambda f, n=name: (f / n).open("ab").write(b" ") for name in FILES},
    **{f"{name}: gone": lambda f, n=name: (f / n).unlink() for name in FILES},
    **{f"{name}: a link to itself elsewhere": lambda f, n=name: relink(f / n) for name in FILES},
    **{f"{name}: an earlier one": lambda f, n=name: shutil.copyfile(f.parent / BEFORE / n, f / n) for name in FILES},
    "two ranks' files swapped": swap,
    "a foreign file": lambda f: (f / "model.safetensors").write_bytes(b""),
    "a foreign folder": lambda f: (f / "more").mkdir(),
    "a foreign file beside": lambda f: (f / "adapter" / "more.json").write_bytes(b""),
    "a foreign file in a folder beside": lambda f: (f / "adapter" / "vision_tower" / "more.json").write_bytes(b""),
    "a folder beside that is a link": lambda f: relink(f / "adapter"),
    "a folder in it that is a link": lambda f: relink(f / "adapter" / "vision_tower"),
    "no folder beside": lambda f: shutil.rmtree(f / "adapter"),
    "a file beside, outside": lambda f: forge_manifest(
        f, lambda m: m["files"].update({"adapter/../state.json": m["files"][RANK_0]})
    ),
    "a stale shard of four ranks": lambda f: shutil.copyfile(f / RANK_1, f / "rank-00002.safetensors"),
    "the manifest's digest edited": lambda f: edit(f / MANIFEST_FILE, b'"digest": "', b'"digest": "0'),
    "a step edited": lambda f: edit(f / MANIFEST_FILE, b'"step": 4', b'"step": 2'),
    "a newer format": lambda f: forge_manifest(f, lambda m: m.update(format=7)),
    "an older format": lambda f: forge_manifest(f, lambda m: m.update(format=4)),
    "ranks' rows exchanged": lambda f: forge_manifest(f, lambda m: shift(m["tensors"]["model.a.weight"]["pieces"])),
    "a tensor that no file has": lambda f: forge_manifest(f, lambda m: m["tensors"].update(z=m["tensors"]["model.b"])),
    "a tensor left out": lambda f: forge_manifest(f, lambda m: m["tensors"].pop("model.b")),
    **{
        name: lambda f, values=values: forge_manifest(f, lambda m: m["tensors"]["model.b"].update(values))
        for name, values in {
            "another dtype": {"dtype": "I32"},
            "another shape": {"shape": [1, 3, 4]},
            "a huge shape": {"shape": [1, 1 << 61, 1 << 61]},
            "a negative row": {"pieces": [[RANK_0, -1, 1]]},
            "a piece in no file of tensors": {"pieces": [["state.json", 0, 1]]},
            "a piece in the file of a rank that is not listed": {"pieces": [["rank-00009.safetensors", 0, 1]]},
            "a piece outside": {"pieces": [["..", 0, 1]]},
            "rows in a file beside": {"pieces": [[BESIDE_FILE, 0, 1]]},
        }.items()
    },
    "files of elsewhere": lambda f: forge_manifest(f, lambda m: m["files"].update({"/etc/passwd": m["files"][RANK_0]})),
    "a number of a thousand digits": lambda f: forge_manifest(f, lambda m: m.update(step=10**1000)),
    "facts without a run": lambda f: forge_facts(f, lambda s: s.pop("run")),
    "facts of another step": lambda f: forge_facts(f, lambda s: s.update(step=7)),
    "a scaler with methods": lambda f: forge_facts(f, lambda s: s.update(scaler={"update": 1})),
    "empty": lambda f: (shutil.rmtree(f), f.mkdir()),
    "a link to a good one": lambda f: (f.rename(f.with_name("elsewhere")), f.symlink_to("elsewhere")),
    "a file": lambda f: (shutil.rmtree(f), f.write_bytes(b"")),
    "another step's name": lambda f: (shutil.rmtree(f), shutil.copytree(f.with_name("step-000002"), f)),
}  # fmt: skip


def relink(path: Path) -> None:
    kept = next(p for p in path.parents if p.name.startswith("step-")).with_name("kept")
    path.rename(kept)
    path.symlink_to(kept)


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(
    damage: str, parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[damage](parent / "step-000004")
    logging.getLogger("llava_fsdp").propagate = True
    with pytest.raises(CheckpointError):
        verify(parent / "step-000004")
    assert loaded_alone(parent) == 2
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    # once for each handler: pytest may have put one on a logger that did not propagate
    unused = list(dict.fromkeys(text for text in said if text.endswith("this checkpoint is not used")))
    assert len(unused) == 1 and str(parent / "step-000004") in unused[0]
    with pytest.raises(CheckpointError, match=r"step-000004.*\n.*checkpoint\.strict=true takes no other"):
        newest_together(parent, strict=True)
    shutil.rmtree(parent / "step-000002")
    with pytest.raises(
        CheckpointError, match=r"none of them verifies:\n.*step-000004(.*\n)+.*checkpoint\.resume=never"
    ):
        loaded_alone(parent)


@pytest.mark.parametrize("name", ["step-000006.bak", "step-0000006", "step-6", "old-step-000006", "step-000006x"])
def test_other_names_are_no_checkpoints(name: str, parent: Path) -> None:
    (parent / "step-000004").rename(parent / name)
    assert loaded_alone(parent) == 2


def test_what_an_interrupted_save_left_is_no_checkpoint(parent: Path, tmp_path: Path) -> None:
    (parent / "step-000004").rename(parent / "step-000004.tmp")
    assert loaded_alone(parent) == 2
    shutil.rmtree(parent / "step-000002")
    assert loaded_alone(parent) == 0, "there never was one: the run begins"


@pytest.mark.parametrize("said", ["step-000009", "../../etc", "step-000002/../../x", "", "\xff" * 999, "step-000002"])
def test_the_pointer_decides_nothing(said: str, parent: Path) -> None:
    (parent / "latest").write_text(said)
    assert loaded_alone(parent) == 4
    (parent / "latest").unlink()
    (parent / "latest").symlink_to("/nonexistent/step-000002")
    assert loaded_alone(parent) == 4


def test_sixty_flips(parent: Path) -> None:
    """Of single bits, over all files."""
    dice, folder = random.Random(0), parent / "step-000004"
    sizes = [(folder / name).stat().st_size for name in FILES]
    for _ in range(60):
        path = folder / dice.choices(FILES, sizes)[0]
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=str(folder)):
            verify(folder)
        path.write_bytes(content)
    verify(folder)


@pytest.mark.parametrize("name", FILES)
def test_readers_raise_nothing_but_our_error(name: str, parent: Path) -> None:
    """60 mutations of a file, of which the manifest's and the header's agree with their digests where they can."""
    dice, folder = random.Random(name), parent / "step-000004"
    content = (folder / name).read_bytes()
    whole = (folder / MANIFEST_FILE).read_bytes()
    for _ in range(60):
        mutated = mutate(content, dice)
        if mutated == content:
            continue
        (folder / name).write_bytes(mutated)
        agree_if_possible(folder, name, mutated)
        with contextlib.suppress(CheckpointError):  # what only a digest would show may pass: here it agrees
            verify(folder)
        (folder / name).write_bytes(content)
        (folder / MANIFEST_FILE).write_bytes(whole)
    verify(folder)


def mutate(content: bytes, dice: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        begin = dice.randrange(min(len(made), 2000) or 1)
        match dice.randrange(5):
            case 0:
                made[begin : begin + 1] = bytes([dice.randrange(256)])
            case 1:
                del made[begin : begin + dice.randrange(1, 40)]
            case 2:
                made[begin:begin] = dice.choice((b"9" * 30, b"[" * 5000, b"null", b'"', b"\x00" * 8, b"-1", b"1e999"))
            case 3:
                made[:8] = dice.randrange(1 << 64).to_bytes(8, "little")
            case _:
                other = dice.randrange(len(made) or 1)
                made[begin : begin + 12] = made[other : other + 12]
    return bytes(made)


def agree_if_possible(folder: Path, name: str, content: bytes) -> None:
    """A manifest with the digest of what was mutated: what reads behind it must hold out alone."""
    if name == MANIFEST_FILE:
        (folder / name).write_bytes(with_digest(content[:-TAIL]))
        return
    own = {"bytes": len(content), "xxh128": xxh3_128(content).hexdigest()}
    forge_manifest(folder, lambda m: m["files"].update({name: own}))


@pytest.mark.ranks
def test_what_one_rank_finds_all_ranks_say(parent: Path, pools: dict[int, RankPool]) -> None:
    """The files are shared out; whichever rank reads the damaged one, all take the checkpoint before it."""
    for name in (RANK_0, RANK_1):
        path = parent / "step-000004" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert pools[2].run(loaded, parent) == [2, 2]
        path.write_bytes(content)
    assert pools[2].run(loaded, parent) == [4, 4]
    assert loaded(single_world(), parent) == 4
