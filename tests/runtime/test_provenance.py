"""One flipped bit in any file that we wrote for others to load is named by whoever starts from it."""

import errno
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness import RankPool
from reference import EXPORTED
from small import conversion, make_config, write_json
from tiers import slow_after

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.open_model import open_model
from llava_fsdp.config import AspectRatio, Config, ConversionConfig
from llava_fsdp.export import source_model
from llava_fsdp.export.main import export
from llava_fsdp.export.source_model import open_source
from llava_fsdp.model.adapters.lora_files import open_adapter
from llava_fsdp.model.sources import pretrained as parts_module
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, DamagedModel, ModelError
from llava_fsdp.runtime.exit_codes import ExitCode
from llava_fsdp.runtime.files import provenance
from llava_fsdp.runtime.files.digests import digest_of_file
from llava_fsdp.runtime.files.provenance import NOTES, README, check_folder, read_notes
from llava_fsdp.train import main as train

SHORT = ["max_steps=1", "global_batch_size=4", "micro_batch_size=4", "data.max_length=128", "checkpoint.every=1"]
LORA = ["model.lora.r=4", "optim.warmup_ratio=0", "optim.lr=0.1", "max_steps=2"]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def written(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of stage 1 and of LoRA, and what `export` makes of them."""
    folder = tmp_path_factory.mktemp("written")
    train.train(make_config(parts, dataset, folder / "pretrain", *SHORT, *EXPORTED, stage="pretrain"))
    train.train(make_config(parts, dataset, folder / "lora", *SHORT, *EXPORTED, *LORA, stage="finetune_lora"))
    export(conversion(folder / "pretrain", folder / "projector", "format=projector"))
    export(conversion(folder / "lora", folder / "llava", "format=llava"))
    export(conversion(folder / "lora", folder / "merged"))
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged: what is copied or moved is what was written."""
    return Path(shutil.copytree(written, tmp_path / "moved"))


def flip(path: Path, dice: random.Random | None = None) -> None:
    content = bytearray(path.read_bytes())
    dice = dice or random.Random(0)
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def flip_last(path: Path) -> None:
    """A bit of a tensor, in a file of these."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def command(source: Path, *overrides: str) -> ConversionConfig:
    return conversion(source, Path("unused"), "to=null", *overrides)


Start = Callable[[Path, Path, Path, Path], object]
"""Begins with a folder of `written`, given the parts, the dataset and an empty folder."""


def stage_2(folder: Path, parts: Path, dataset: Path, to: Path, *values: str, stage: str = "finetune") -> None:
    cfg = make_config(parts, dataset, to / "run", *SHORT, "model.projector=auto", *values, stage=stage)
    train.train(cfg)


def whole(folder: Path, parts: Path, dataset: Path, to: Path) -> None:
    stage_2(folder, parts, dataset, to, f"model.checkpoint={folder}", "model.random_weights=false")


def asked(folder: Path, parts: Path, dataset: Path, to: Path) -> None:
    Assistant(str(folder), "v1", AspectRatio.square)


def converted(folder: Path, parts: Path, dataset: Path, to: Path) -> None:
    language = [f"language={parts / 'language'}"] if folder.name == "projector" else []
    export(conversion(folder, to / "to", *language))


def with_projector(folder: Path, parts: Path, dataset: Path, to: Path) -> None:
    stage_2(folder, parts, dataset, to, f"model.projector={folder}", "model.random_weights=true")


def beside_stage_1(folder: Path, parts: Path, dataset: Path, to: Path) -> None:
    """model.projector=auto looks for the run beside output_dir."""
    stage_2(folder, parts, dataset, folder.parents[1])


def adapted(folder: Path, parts: Path, dataset: Path, to: Path) -> None:
    more = [*LORA[:-1], f"model.lora.checkpoint={folder}"]
    stage_2(folder, parts, dataset, to, *more, stage="finetune_lora")


STARTS: dict[str, tuple[str, Start]] = {
    "train from an export": ("pretrain/export", whole),
    "train from a merged model": ("merged", whole),
    "train from the original's format": ("llava", whole),
    "stage 2 beside stage 1": ("pretrain/export", beside_stage_1),
    "stage 2 with a run's projector": ("pretrain/export", with_projector),
    "stage 2 with a projector's folder": ("projector", with_projector),
    "train from an adapter": ("lora/adapter", adapted),
    "export an export": ("pretrain/export", converted),
    "export a merged model": ("merged", converted),
    "export the original's format": ("llava", converted),
    "export a projector": ("projector", converted),
    "export an adapter": ("lora/adapter", converted),
    "ask an export": ("pretrain/export", asked),
    "ask the original's format": ("llava", asked),
    "ask an adapter": ("lora/adapter", asked),
}


def assert_named(start: str, name: str, copied: Path, parts: Path, dataset: Path, to: Path) -> None:
    folder, begin = STARTS[start]
    with pytest.raises(DamagedModel) as raised:
        begin(copied / folder, parts, dataset, to)
    said = str(raised.value)
    assert str(copied / folder / name) in said and f"'accept=[{name}]'" in said and "\n" not in said
    assert raised.value.exit_code == ExitCode.USER and raised.value.ending == "model"


@pytest.mark.parametrize("start", slow_after(1, STARTS))
def test_a_flipped_weight_is_named_by_whoever_starts_from_it(
    start: str, copied: Path, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file is too large to be read at the door."""
    monkeypatch.setattr(parts_module, "SMALL", 0)
    monkeypatch.setattr(source_model, "SMALL", 0)
    tensors = [n for n in names(copied / STARTS[start][0]) if n.endswith((".safetensors", ".bin"))]
    for number, name in enumerate(tensors):
        kept = (copied / STARTS[start][0] / name).read_bytes()
        flip_last(copied / STARTS[start][0] / name)
        assert_named(start, name, copied, parts, dataset, tmp_path / str(number))
        (copied / STARTS[start][0] / name).write_bytes(kept)


@pytest.mark.parametrize("folder", ["pretrain/export", "projector", "llava", "lora/adapter", "lora/export"])
def test_every_file_is_compared(folder: str, copied: Path) -> None:
    """One bit of each, and its absence; the notes themselves are a file too."""
    dice = random.Random(folder)
    check_folder(copied / folder)
    for name in names(copied / folder):
        path = copied / folder / name
        if name == README:  # users change it
            continue
        kept = path.read_bytes()
        flip(path, dice)
        with pytest.raises(DamagedModel) as raised:
            check_folder(copied / folder)
        assert str(path) in str(raised.value), name
        if name != NOTES:
            path.unlink()
            with pytest.raises(DamagedModel, match="is missing") as raised:
                check_folder(copied / folder)
            assert str(path) in str(raised.value)
        path.write_bytes(kept)
    check_folder(copied / folder)


def test_every_bit_of_the_notes_counts(copied: Path) -> None:
    """None of them makes a folder one of another program, or of an earlier version."""
    path = copied / "projector" / NOTES
    kept = path.read_bytes()
    for place in range(8 * len(kept)):
        content = bytearray(kept)
        content[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedModel):
            provenance.parse(bytes(content), path.parent)
    for end in (0, 1, len(kept) // 2, len(kept) - 1):
        with pytest.raises(DamagedModel):
            provenance.parse(kept[:end], path.parent)


@pytest.mark.parametrize(
    "start",
    [
        "train from a merged model",
        "stage 2 with a projector's folder",
        "export the original's format",
        "ask an adapter",
    ],
)
def test_whole_artifacts_are_started_from(start: str, copied: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """What was moved, and lies beside files that nobody loads."""
    folder, begin = STARTS[start]
    (copied / folder / "README.md").write_text("a model")
    (copied / folder / ".cache").mkdir()
    (copied / folder / ".cache" / "config.json").write_text("{}")
    begin(copied / folder, parts, dataset, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_sixty_random_flips_are_named(start: str, copied: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    folder, dice = copied / STARTS[start][0], random.Random(start)
    for number in range(60):
        name = dice.choice(names(folder))
        kept = (folder / name).read_bytes()
        flip(folder / name, dice)
        assert_named(start, name, copied, parts, dataset, tmp_path / str(number))
        (folder / name).write_bytes(kept)


@pytest.mark.ranks
def test_all_ranks_say_what_one_has_found(
    copied: Path, parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    flip_last(copied / "projector" / "mm_projector.bin")
    values = [*SHORT, f"model.projector={copied / 'projector'}"]
    said = pools[2].run(how_it_ends, make_config(parts, dataset, tmp_path / "run", *values))
    assert len(said) == 2 and said[0] == said[1] and "mm_projector.bin is not what was written" in said[0]


def how_it_ends(world: World, cfg: Config) -> str:
    try:
        train.train(cfg)
    except DamagedModel as error:
        return str(error)
    return "done"


@pytest.mark.slow
def test_a_projectors_file_alone_is_compared(copied: Path, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Given as a file; what lies beside it is not read."""
    file = copied / "projector" / "mm_projector.safetensors"
    flip_last(copied / "projector" / "mm_projector.bin")
    with_projector(file, parts, dataset, tmp_path / "a")
    flip_last(file)
    with pytest.raises(DamagedModel, match=r"mm_projector\.safetensors is not what was written"):
        with_projector(file, parts, dataset, tmp_path / "b")


@pytest.mark.parametrize(
    "name", [WEIGHTS, *(pytest.param(own, marks=pytest.mark.slow) for own in ("config.json", NOTES))]
)
@pytest.mark.slow
def test_a_finished_run_writes_a_damaged_export_anew(
    name: str, copied: Path, parts: Path, dataset: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("llava_fsdp").propagate = True
    path = copied / "pretrain" / "export" / name
    before = path.read_bytes()
    flip_last(path)
    cfg = make_config(parts, dataset, copied / "pretrain", *SHORT, *EXPORTED, stage="pretrain")
    train.train(cfg)
    assert any(f"{path} is not what was written" in text for text in caplog.messages)
    assert path.read_bytes() == before
    changed = path.stat().st_mtime_ns
    train.train(cfg)
    assert path.stat().st_mtime_ns == changed, "what is whole is kept"


@pytest.mark.slow
def test_a_finished_run_writes_a_damaged_adapter_anew(copied: Path, parts: Path, dataset: Path) -> None:
    path = copied / "lora" / "adapter" / "adapter_model.safetensors"
    before = path.read_bytes()
    flip_last(path)
    train.train(make_config(parts, dataset, copied / "lora", *SHORT, *EXPORTED, *LORA, stage="finetune_lora"))
    assert path.read_bytes() == before
    assert open_adapter(path.parent).modules


@pytest.mark.parametrize(
    "name", [WEIGHTS, *(pytest.param(own, marks=pytest.mark.slow) for own in ("tokenizer.json", NOTES))]
)
def test_the_checkpoint_stands_in_for_a_damaged_export(
    name: str, copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written of the flipped bits; without a checkpoint nothing is written at all."""
    logging.getLogger("llava_fsdp").propagate = True
    run = copied / "pretrain"
    whole_bits = (run / "export" / WEIGHTS).read_bytes()
    assert open_source(conversion(run, tmp_path / "x")).folder == run / "export"
    flip_last(run / "export" / name)
    opened = open_source(conversion(run, tmp_path / "x"))
    assert opened.folder == run / "checkpoints" / "step-000001"
    assert any(str(run / "export" / name) in text and "instead" in text for text in caplog.messages)
    if name == WEIGHTS:
        made = export(conversion(run, tmp_path / "made"))
        assert (made / WEIGHTS).read_bytes() == whole_bits
    with pytest.raises(DamagedModel, match="start its run again, which writes it anew"):
        open_model(str(run), "v1")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(DamagedModel) as raised:
        open_source(conversion(run, tmp_path / "x"))
    assert str(run / "export" / name) in str(raised.value)


def test_what_was_changed_on_purpose_is_accepted_by_name(copied: Path) -> None:
    folder = copied / "merged"
    config = json.loads((folder / "generation_config.json").read_text())
    write_json(folder / "generation_config.json", {**config, "temperature": 0.25})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(DamagedModel):
        open_source(conversion(folder, copied / "to"))
    (folder / NOTES).chmod(0o640)
    export(command(folder, "accept=[generation_config.json]"))
    assert (folder / NOTES).stat().st_mode & 0o777 == 0o640
    with pytest.raises(DamagedModel, match=r"'accept=\[chat_template\.jinja\]'"):
        open_source(conversion(folder, copied / "to"))
    export(command(folder, "accept=[chat_template.jinja]"))
    assert open_source(conversion(folder, copied / "to")).folder == folder
    (folder / "chat_template.jinja").unlink()
    export(command(folder, "accept=[chat_template.jinja]"))
    assert open_source(conversion(folder, copied / "to")).folder == folder
    flip_last(folder / WEIGHTS)
    export(command(folder, "accept=[config.json]"))
    with pytest.raises(DamagedModel, match=WEIGHTS):
        open_source(conversion(folder, copied / "to"))


def test_notes_that_were_changed_are_accepted_by_their_own_name(copied: Path) -> None:
    folder = copied / "merged"
    write_json(folder / NOTES, read_notes(folder) | {"template": "plain"})
    with pytest.raises(DamagedModel, match=NOTES):
        export(command(folder, "accept=[config.json]"))
    export(command(folder, f"accept=[{NOTES}]"))
    assert open_source(conversion(folder, copied / "to")).source.template == "plain"
    flip_last(folder / WEIGHTS)
    export(command(folder, f"accept=[{NOTES}]"))
    with pytest.raises(DamagedModel, match=WEIGHTS):
        open_source(conversion(folder, copied / "to"))


def test_accept_refuses_what_it_cannot_mean(copied: Path, parts: Path) -> None:
    folder = copied / "merged"
    for source, name, said in (
        (folder, "other.json", "has no such file"),
        (folder, "../merged/config.json", "no file's path"),
        (folder, "/etc/passwd", "no file's path"),
        (parts / "language", "config.json", f"has no {NOTES}"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(command(source, f"accept=[{name}]"))
    with pytest.raises(ConfigError, match="accept"):
        export(conversion(folder, copied / "to", "accept=[config.json]"))
    with pytest.raises(ConfigError, match="to is not set"):
        export(command(folder))


def test_an_earlier_versions_folder_is_taken_with_a_warning(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("llava_fsdp").propagate = True
    folder = copied / "merged"
    said = {key: value for key, value in read_notes(folder).items() if key not in ("files", "digest")}
    write_json(folder / NOTES, said)
    assert open_source(conversion(folder, copied / "to")).folder == folder
    assert any(str(folder) in text and "cannot be told" in text for text in caplog.messages)
    export(command(folder, f"accept=[{NOTES}]"))
    flip_last(folder / WEIGHTS)
    with pytest.raises(DamagedModel, match=WEIGHTS):
        open_source(conversion(folder, copied / "to"))


def test_an_earlier_versions_adapter_is_compared_as_far_as_it_says(copied: Path) -> None:
    """It has the digests of its tensors alone."""
    folder = copied / "lora" / "adapter"
    file = folder / "adapter_model.safetensors"
    said = {key: value for key, value in read_notes(folder).items() if key != "digest"}
    write_json(folder / NOTES, said | {"files": {file.name: digest_of_file(file).xxh128}})
    assert open_adapter(folder).modules
    flip_last(file)
    with pytest.raises(DamagedModel, match=file.name):
        open_adapter(folder)


def test_a_file_that_would_be_read_instead_is_refused(copied: Path) -> None:
    """The index of an older export, left behind: it comes before the weights of this one."""
    write_json(copied / "merged" / "model.safetensors.index.json", {"weight_map": {}})
    with pytest.raises(DamagedModel, match=r"model\.safetensors\.index\.json is no file that was written here"):
        open_source(conversion(copied / "merged", copied / "to"))


def test_links_are_followed(copied: Path) -> None:
    """As in the hub's cache, where every file is a link to its content."""
    folder, blobs = copied / "merged", copied / "blobs"
    blobs.mkdir()
    for number, name in enumerate(names(folder)):
        (folder / name).rename(blobs / str(number))
        (folder / name).symlink_to(blobs / str(number))
    assert open_source(conversion(folder, copied / "to")).folder == folder
    number = names(folder).index(WEIGHTS)
    flip_last(blobs / str(number))
    with pytest.raises(DamagedModel, match=WEIGHTS):
        open_source(conversion(folder, copied / "to"))
    for name in (WEIGHTS, NOTES):
        (blobs / str(names(folder).index(name) if (folder / name).exists() else 0)).unlink(missing_ok=True)
        (folder / name).unlink()
        (folder / name).symlink_to(blobs / "gone")
        with pytest.raises(DamagedModel, match=name):
            open_source(conversion(folder, copied / "to"))


def test_a_disk_that_cannot_be_read_is_an_error_of_ours(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(provenance, "digest_of_file", broken)
    with pytest.raises(DamagedModel, match="cannot be read: Input/output error"):
        open_source(conversion(copied / "merged", copied / "to"))


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "preprocessor_config.json"])
def test_a_file_that_goes_after_it_was_compared_is_an_error_of_ours(
    name: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = source_model.check_artifacts

    def then_gone(paths: Any) -> None:
        compared(paths)
        (copied / "merged" / name).unlink()

    monkeypatch.setattr(source_model, "check_artifacts", then_gone)
    with pytest.raises(ModelError, match=r"merged"):
        asked(copied / "merged", tmp_path, tmp_path, tmp_path)
