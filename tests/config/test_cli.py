"""What every entry does at its end."""

import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import OmegaConf

from llava_fsdp.config import ChatConfig, Config, did_you_mean, schema_keys
from llava_fsdp.config.command_line import cli
from llava_fsdp.config.command_line.foreign_names import FOREIGN
from llava_fsdp.migrate.flags.llava_flags import FLAGS
from llava_fsdp.migrate.flags.next_flags import NEXT_FLAGS
from llava_fsdp.migrate.flags.trainer_flags import OTHER_FLAGS
from llava_fsdp.runtime.errors import (
    CommunicationError,
    ConfigError,
    FolderInUse,
    FolderLost,
    ModelError,
    OutOfMemory,
    Stopped,
)
from llava_fsdp.runtime.files.heartbeat import Beat
from llava_fsdp.runtime.files.status_file import Outcome

SCRIPT = """\
import os, sys
from rich.console import Console
from llava_fsdp.config import ChatConfig, Config
from llava_fsdp.config.command_line import cli

def plain(cfg):
    print("x")

def much(cfg):
    print("x\\n" * 100_000)

def by_rich(cfg):
    Console().print("x")

def other_pipe(cfg):
    reads, writes = os.pipe()
    os.close(reads)
    os.write(writes, b"x")

def mistake(cfg):
    print("x")
    raise cli.ConfigError("of the user")

task = globals()[sys.argv.pop()]
cli.run("chat", ChatConfig, task, cli.no_status if sys.argv.pop() == "entry" else lambda folder, outcome: None)
"""


def with_no_reader(kind: str, task: str, gone: bool = True, word: str = "image=null") -> subprocess.CompletedProcess:
    """Its output goes into a pipe that nobody reads any more, as `| head -0` leaves it."""
    reads, writes = os.pipe()
    command = [sys.executable, "-c", SCRIPT, word, kind, task]
    try:
        if gone:
            os.close(reads)
        return subprocess.run(
            command, check=False, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": ""},  # a short text then is written at the end
        )  # fmt: skip
    finally:
        os.close(writes)
        if not gone:
            os.close(reads)


@pytest.mark.parametrize("task", ["plain", "much", "by_rich"])
def test_a_reader_that_has_left_ends_an_entry_quietly(task: str) -> None:
    done = with_no_reader("entry", task)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_left_ends_the_help_quietly() -> None:
    done = with_no_reader("entry", "plain", word="--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_is_no_reader() -> None:
    done = with_no_reader("entry", "other_pipe", gone=False)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_training_does_not_end_as_done_for_a_reader() -> None:
    done = with_no_reader("training", "much")
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_a_mistake_keeps_its_exit_code_without_a_reader() -> None:
    done = with_no_reader("entry", "mistake")
    assert done.returncode == 2 and "of the user" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["output_dir=a", "output_dir=b"], Path("b")), (["seed=1"], None), (["dry_run=2", "output_dir=a"], None),
        (["output_dir=a", "seed=1", "dry_run=2"], None), (["val.dry_run=2", "output_dir=a"], Path("a")),
    ],
)  # fmt: skip
def test_a_dry_run_records_no_mistake(words: list[str], folder: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *words])
    assert cli.typed_output_dir() == folder


class Ended(BaseException):
    """Stands for the end of the process."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


@dataclass
class Life:
    """What happens around a task that ends."""

    code: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    reports: list[dict[str, Any] | None] = field(default_factory=list)
    slept: float = 0


@pytest.fixture
def lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., Life]:
    """Runs a task as an entry does, in this process, and notes how it would have ended."""

    def live(
        raised: BaseException | None, rank: int = 0, nodes: int = 1, first: dict[str, Any] | None = None,
        values: dict[str, Any] | None = None, is_training: bool = True, folder: Path | None = None,
    ) -> Life:  # fmt: skip
        life = Life()

        def end(code: int) -> NoReturn:
            raise Ended(code)

        def sleep(seconds: float) -> None:
            life.slept += seconds

        def task(cfg: object) -> None:
            if raised is not None:
                raise raised

        def note(to: Path, outcome: Outcome) -> dict[str, Any] | None:
            assert to == (folder or tmp_path)
            life.outcomes.append(outcome)
            return first

        node = OmegaConf.create({"output_dir": str(folder or tmp_path)} | (values or {}))
        monkeypatch.setattr(sys, "argv", ["train", f"output_dir={folder or tmp_path}"])
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
        for name, value in {"setup_logging": lambda: None, "compose": lambda *_: node, "load": lambda *_: None,
                            "end_agent": lambda report: life.ends.append("agent") or life.reports.append(report),
                            "end_torchrun": lambda: life.ends.append("torchrun"),
                            "await_folder": lambda _: life.ends.append("awaited")}.items():  # fmt: skip
            monkeypatch.setattr(cli, name, value)
        monkeypatch.setattr(cli.os, "_exit", end)
        monkeypatch.setattr(cli.time, "sleep", sleep)
        caplog.clear()
        try:
            with caplog.at_level("INFO"):
                cli.run("train", object, task, note if is_training else cli.no_status)
        except Ended as ended:
            life.code = ended.code
        return life

    return live


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


@pytest.mark.parametrize(
    ("raised", "code", "kind", "level", "agent"),
    [
        (None, 0, "done", [], []),
        (ConfigError("a key"), 2, "config", ["ERROR"], ["agent"]),
        (CommunicationError("a rank"), 5, "communication", ["ERROR"], []),
        (Stopped("on request"), 75, "stopped", ["INFO"], []),
        (Stopped("on request of another", asked_here=False), 75, "stopped", ["INFO"], ["torchrun"]),
        (KeyboardInterrupt(), 130, "interrupted", ["ERROR"], []),
        (ZeroDivisionError("x"), 1, "bug", ["ERROR"], []),
    ],
)
def test_how_a_first_rank_ends(
    raised: BaseException | None, code: int, kind: str, level: list[str], agent: list[str],
    lived: Callable[..., Life], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its exit code, what is recorded and printed, and who is kept from starting it again."""
    life = lived(raised)
    (outcome,) = life.outcomes
    assert (life.code, outcome.ending.name, levels(caplog), life.ends) == (code, kind, level, agent)
    assert (life.slept > 0) == (agent == ["torchrun"]), "the other ranks of the machine report first"
    if raised is not None and kind != "interrupted":
        assert str(raised) in outcome.reason and str(raised) in caplog.text
    assert ("Traceback" in caplog.text) == (kind == "bug")


def test_which_rank_reports(lived: Callable[..., Life], caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 an error of all ranks; the rank that has it one of its own; nobody one that another has caused."""
    assert lived(ConfigError("a key"), rank=1, first={"exit_code": 2, "class": "config"}).code == 2
    assert levels(caplog) == []
    life = lived(OutOfMemory("here"), rank=1)
    assert levels(caplog) == ["ERROR"] and life.ends == ["agent"] and life.slept == cli.PATIENCE_SECONDS
    life = lived(CommunicationError("a rank"), rank=1, first={"exit_code": 3, "class": "checkpoint"})
    assert life.code == 3 and levels(caplog) == [] and life.ends == ["agent"]
    life = lived(CommunicationError("a rank"), first={"exit_code": 75, "class": "stopped"})
    assert life.code == 75 and life.ends == [], "torchrun ends with the request itself"
    life = lived(ConfigError("a key"), rank=1)
    assert (life.code, levels(caplog), life.slept) == (2, ["ERROR"], 2 * cli.PATIENCE_SECONDS), "rank 0 has not met it"


def test_where_nothing_is_recorded(
    tmp_path: Path, lived: Callable[..., Life], caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder of another run, in a dry run, and by an entry that records nothing; all ranks speak of it."""
    for life in (lived(FolderInUse("theirs")), lived(ConfigError("a key"), values={"dry_run": 8})):
        assert (life.code, life.outcomes, life.ends) == (2, [], ["agent"]) and levels(caplog) == ["ERROR"]
    life = lived(FolderLost("gone", may_be_recorded=False))
    assert (life.code, life.outcomes, life.ends) == (3, [], ["torchrun", "agent"])
    assert lived(FolderLost("gone", may_be_recorded=False), nodes=2).ends == ["torchrun"], "it is the agent"
    assert lived(FolderLost("gone", may_be_recorded=True)).ends == ["agent"]
    assert lived(ConfigError("a key"), is_training=False).ends == [] and levels(caplog) == ["ERROR"]
    life = lived(ConfigError("a key"), folder=tmp_path / "absent", rank=1)
    assert life.ends == [] and levels(caplog) == [] and life.outcomes, "rank 0 speaks"


@pytest.mark.parametrize(
    ("raised", "is_made"),
    [
        (ConfigError("data.path=gone"), True),
        (ModelError("no weights"), True),
        (ConfigError("output_dir=x is within data.path=y"), False),
        (ZeroDivisionError("x"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_mistake_before_the_run_has_a_folder_is_recorded_and_not_met_again(
    raised: BaseException, is_made: bool, tmp_path: Path, lived: Callable[..., Life]
) -> None:
    """The first rank makes the folder; the agent gets the reason, in case that nothing can be written there."""
    life = lived(raised, folder=tmp_path / "new")
    assert (tmp_path / "new").is_dir() == is_made and life.outcomes
    is_mistake = not isinstance(raised, ZeroDivisionError | KeyboardInterrupt)
    said = {"reason": f"{type(raised).__name__}: {raised}", "code": 2}
    assert life.reports == [said] * is_mistake and life.ends == ["agent"] * is_mistake


def test_a_rank_on_another_machine_waits_for_the_folder(
    tmp_path: Path, lived: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = [lived(OutOfMemory("here"), rank=rank, nodes=nodes).ends for rank, nodes in ((0, 2), (1, 1), (1, 2))]
    assert ["awaited" in ends for ends in waited] == [False, False, True]
    monkeypatch.undo()
    late = [True, True, False]
    monkeypatch.setattr(cli, "is_absent", lambda _: late.pop(0))
    monkeypatch.setattr(cli.time, "sleep", lambda _: None)
    cli.await_folder(tmp_path)
    assert late == []
    monkeypatch.setattr(cli, "is_absent", lambda _: True)
    monkeypatch.setattr(cli, "FOLDER_SECONDS", 0)
    cli.await_folder(tmp_path)


def test_the_step_is_that_of_the_process_own_heartbeat(
    tmp_path: Path, lived: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat of an earlier start is not its own."""
    for pid, step in ((os.getpid(), 7), (os.getpid() + 1, None)):
        beat = Beat(0, "host", pid, 7, "step", 0, "", 1)
        monkeypatch.setattr(cli, "read_beat", lambda folder, rank, beat=beat: beat if rank == 0 else None)
        assert lived(ConfigError("a key")).outcomes[0].step == step


def test_a_folder_of_another_launch_is_not_written(
    tmp_path: Path, lived: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "is_locked_by_other_launch", lambda folder: folder == tmp_path)
    assert lived(ConfigError("a key")).outcomes == []


@pytest.mark.parametrize(
    ("attempts", "nodes", "recorded", "ends"),
    [("0", "1", 2, False), ("1", "1", 2, True), ("1", "1", None, False), ("0", "2", 3, True)],
)
def test_a_restart_that_cannot_help_ends_at_once(
    attempts: str, nodes: str, recorded: int | None, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exit code that is recorded; the first start of a single node reads no status of an earlier run."""

    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempts)
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    status = None if recorded is None else {"exit_code": recorded}
    for name, value in {"end_with": lambda _: None, "leave_noise_out": lambda: None,
                        "compose": lambda *_: OmegaConf.create({"output_dir": str(tmp_path)}),
                        "final_status": lambda folder: status if folder == tmp_path else 1 / 0}.items():  # fmt: skip
        monkeypatch.setattr(cli, name, value)
    monkeypatch.setattr(cli.os, "_exit", end)
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
    before = [signal.getsignal(number) for number in numbers]
    try:
        with pytest.raises(Ended) if ends else contextlib.nullcontext() as caught:
            cli.start_process("train", object)
        for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
            handler = signal.getsignal(number)
            assert callable(handler)
            with pytest.raises(Ended) as stopped:
                handler(number, None)
            assert stopped.value.code == code
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if caught is not None:
        assert caught.value.code == recorded


def test_what_torchrun_prints_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "aB3" * 12
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    cli.write_torchrun_error(f"no access with {secret}")
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert secret not in str(written) and written["message"].startswith("no access with ")
    assert written["message"] == written["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["a/b", "x=1"], "source", ["source=a/b", "x=1"]), (["x=1", "a/b"], "source", None),
        (["runs/lr=0.1"], "output_dir", ["output_dir=runs/lr=0.1"]), (["--help"], "source", None),
        (["~x"], "source", None), ([], "source", None), (["a/b"], None, None),
    ],
)  # fmt: skip
def test_the_first_word_may_be_a_path(words: list[str], key: str | None, expected: list[str] | None) -> None:
    assert cli.name_folder(words, key) == (words if expected is None else expected)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["model.language=a", "model.vision=b"], ["model=own"]),
        (["+model.language=a"], ["model=own"]),
        (["model.checkpoint=a"], ["model=own", "model.language=a"]),
        (["model.checkpoint=a", "model.language=b"], ["model=own"]),
        (["model.language=a", "model=llava_v1_5_7b"], []),
        (["model.language=package:tiny"], []),
        (["model.checkpoint=null", "model.lora.r=2"], []),
        (["seed=1"], []),
    ],
)
def test_a_named_model_has_settings_of_its_own(words: list[str], more: list[str]) -> None:
    """The default's learning rate is for two million parameters."""
    assert cli.with_own_model(words) == [*words, *more]


def test_a_tower_alone_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"model\.vision=a .*model\.language=DIR"):
        cli.with_own_model(["model.vision=a"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("output_dir=a,b", "output_dir='a,b'"), ("output_dir=a/b-c.d:e", "output_dir=a/b-c.d:e"),
        ("output_dir='a,b'", "output_dir='a,b'"), ('output_dir="a,b"', 'output_dir="a,b"'),
        ("val.path=null", "val.path=null"), ("optim.lr=1e-5,2e-5", "optim.lr=1e-5,2e-5"), ("question", "question"),
        ("question=it's", r"question='it\'s'"), ("question=a\\'b", r"question='a\\\'b'"),
        ("data.sources.a.path=x,y", "++data.sources.a.path='x,y'"),
        ("data.sources.a.images=x y", "++data.sources.a.images='x y'"),
        ("data.sources.a.path='x,y'", "++data.sources.a.path='x,y'"),
        ("val.sources.a.weight=2", "++val.sources.a.weight=2"),
        ("data.sources.a.epochs=[1,2]", "++data.sources.a.epochs=[1,2]"),
    ],
)  # fmt: skip
def test_texts_are_taken_as_they_are_typed(word: str, expected: str) -> None:
    """Values of other keys, and texts in quotes, are left to Hydra."""
    assert cli.taken_literally(word) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stage=pretrian"], "did you mean pretrain"), (["stage=nothing"], "choose one of"),
        (["optim.lrr=1"], "did you mean optim.lr"), (["seeed=1"], "did you mean seed"),
        (["-cn", "x", "seeed=1"], "seed"), (["stage=finetune", "+nothing=1"], None), (["hydra.verbose=1"], None),
        (["data.sources.a.path=x"], None), (["stage=finetune,pretrain"], None), (["stage=${x}"], None),
        (["--config-name", "a=b"], None), (["--config-dir", "x", "stage=mine"], None), (["-cd", "x", "mine=1"], None),
        (["--config-dir=x", "stage=mine"], None),
    ],
)  # fmt: skip
def test_words_with_unknown_names(words: list[str], said: str | None) -> None:
    """The nearest known one is named. What only Hydra can know is left to it."""
    with pytest.raises(ConfigError, match=said) if said is not None else contextlib.nullcontext():
        cli.refuse_unknown(words, Config)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("batch_size=4", "global_batch_size"), ("learning_rate=2e-5", r"optim\.lr$"), ("lr=1", r"optim\.lr$"),
        ("num_train_epochs=1", "epochs"), ("gradient_accumulation_steps=4", "global_batch_size"),
        ("gradient_checkpointing=true", "activation_checkpointing="), ("bf16=true", "precision=bf16"),
        ("early_stopping=true", "val.patience"),
        ("load_best_model_at_end=true", "export.which=best"), ("train_micro_batch_size_per_gpu=1", "micro_batch_size"),
        ("zero_optimization.stage=3", "sharding="), ("optim.learning_rate=1", r"optim\.lr$"),
        ("LoRA_R=8", r"model\.lora\.r"),
        ("mm_tunable_parts=mm_mlp_adapter", r"model\.train="), ("cutoff_len=2048", r"data\.max_length"),
        ("num_gpus=8", "--nproc-per-node"), ("--learning_rate=1", r"not a flag.*optim\.lr"),
        ("--per-device-train-batch-size", "not a flag.*micro_batch_size"), ("optimizer=sgd", "optim=adamw or muon"),
        ("model_name=x", r"model\.checkpoint .* or model\.language$"), ("warmup_ratio=0.03", r"optim\.warmup_ratio$"),
        ("eval_steps=10", "val.every=STEPS"), ("deepspeed=zero3.json", "sharding="), ("tf32=true", "leave it out"),
        ("+per_device_train_batch_size=1", None),
    ],
)  # fmt: skip
def test_names_of_other_programs_are_answered_with_ours(word: str, said: str | None) -> None:
    """Before a similar name of another meaning is looked for. Keys with a plus are Hydra's to refuse."""
    with pytest.raises(ConfigError, match=said) if said is not None else contextlib.nullcontext():
        cli.refuse_unknown([word], Config)


def test_a_command_is_answered_with_keys_of_its_own() -> None:
    for word in ("learning_rate=1", "num_gpus=8", "optimizer=sgd"):
        with pytest.raises(ConfigError) as caught:
            cli.refuse_unknown([word], ChatConfig)
        assert "here" not in str(caught.value)


def test_every_name_of_another_program_leads_to_keys_that_exist() -> None:
    keys = schema_keys(Config)
    for text in set(FOREIGN.values()):
        named = [*re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", text), re.split("[ =:,]", text)[0]]
        assert all(key in keys or key.startswith(("-", "nothing")) for key in named), text
    assert not FOREIGN.keys() & set(keys)


def keys_told(rule: object) -> set[str]:
    """The keys that a rule of `migrate` can print: those of its attributes, its closure and its code."""
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    given = [key for cell in cells for key in (cell if isinstance(cell, tuple) else (cell,)) if isinstance(key, str)]
    code = inspect.getsource(rule) if inspect.isfunction(rule) else ""
    return {*given, getattr(rule, "key", ""), *re.findall(r'\btell\("([\w.]+)"', code)}


def test_every_flag_that_migrate_maps_is_answered_with_the_same_key() -> None:
    keys, answered = schema_keys(Config), 0
    for name, flag in [item for table in (FLAGS, NEXT_FLAGS, OTHER_FLAGS) for item in table.items()]:
        told = keys_told(flag.rule) & set(keys)
        if told and name not in keys:
            answer = did_you_mean(name, keys)
            words = set(re.findall(r"[\w.]+", answer))
            assert words & (told | {key for key in keys if key.rpartition(".")[0] in told}), (name, told, answer)
            assert answer.startswith("; here it is ")
            answered += 1
    assert answered > 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x=1", "outputs"], "outputs has no key; .* as in output_dir=outputs/mine"),
        (["."], r"did you mean output_dir=\.\?"),
        (["~optim.lr"], None), (["--cfg", "job"], None), (["-cd", "x", "y=1"], None),
        (["--cfg", "job", "x"], "x has no key"),
    ],
)  # fmt: skip
def test_words_without_a_key(
    words: list[str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that name no file or folder: in a checkout, `outputs` may be one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) if said is not None else contextlib.nullcontext():
        cli.refuse_bare_words(words, "train")


def test_a_word_without_a_key_of_a_command_that_reads_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"did you mean source=\.\?"):
        cli.refuse_bare_words(["to=x", "."], "export")


@pytest.mark.parametrize("value", ["1=2,3", "a{b", "x]"])
def test_a_value_that_hydra_cannot_read_is_named_with_its_key(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    word = f"seed={value}"
    monkeypatch.setattr(sys, "argv", ["train", "max_steps=1", word])
    with pytest.raises(ConfigError, match=re.escape(word)):
        cli.compose("train", Config)


@pytest.mark.parametrize("flag", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_several_jobs_are_for_the_sweep(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "stage=finetune", flag, "seed=1,2"])
    with pytest.raises(ConfigError, match=r"llava-fsdp sweep -m stage=finetune seed=1,2$"):
        cli.refuse_multirun("train")
    monkeypatch.setattr(sys, "argv", ["train", "seed=1"])
    cli.refuse_multirun("train")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("bad\n  Config search path:\n\tprovider=hydra", "bad"),
        ("bad\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "bad"),
        ("bad value\n    full_key: optim.lr\n    object_type=dict", "bad value"),
        ("Traceback (most recent call last):\n  File\nValueError: the last line", "ValueError: the last line"),
        ("Could not override 'optim.lrr'.\nTo append to your config use +optim.lrr=1",
         "optim.lrr is not a key of the configuration; did you mean optim.lr?"),
    ],
)  # fmt: skip
def test_messages_of_hydra_are_shortened(message: str, expected: str) -> None:
    assert cli.shorten(message, Config) == expected


def test_a_message_about_characters_says_what_quotes_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])
    said = cli.shorten("mismatched input ')'\nSee https://hydra.cc/docs/1.2/advanced/override_grammar/basic", Config)
    assert said.startswith("mismatched input ')'; put quotes around") and "https" not in said
