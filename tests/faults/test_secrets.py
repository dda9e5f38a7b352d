"""Secrets stay where they are, what a run writes is its user's, and nothing is fetched that is here."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Runs
from traps import no_network

from llava_fsdp.config import Config, load
from llava_fsdp.config.command_line import cli
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.redact import (
    HIDDEN,
    has_secret,
    is_secret_name,
    is_secret_variable,
    redact,
    redact_values,
    secrets_of,
)

CANARY = "canary0123456789abcdef"
SECRETS = {
    "HF_TOKEN": f"hf_{CANARY}", "WANDB_API_KEY": f"wandb-{CANARY}", "AWS_SECRET_ACCESS_KEY": f"aws-{CANARY}",
    "MY_PASSWORD": f"word-{CANARY}",
}  # fmt: skip


def everything_in(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


WORDS = {
    "+api_key=VALUE": "api_key",
    "+hub.token=VALUE": "hub.token",
    "+wandb_api_key=VALUE": "wandb_api_key",
    f"data.path=https://me:{CANARY}@host/x.json": "data.path",
    f"model.language=hf_{CANARY}": "model.language",
    f"output_dir=sk-{CANARY}": "output_dir",
    "output_dir=${oc.env:HF_TOKEN}": "output_dir",
    "+x=${oc.env:WANDB_API_KEY}": "x",
    "output_dir=x${oc.env:${oc.env:NAME}}": "output_dir",
}


@pytest.mark.parametrize("word", WORDS)
def test_secrets_are_refused_without_being_told(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**SECRETS, "NAME": "HF_TOKEN"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train", word.replace("VALUE", f"sk-{CANARY}"), "data.source=shapes"])
    with pytest.raises(ConfigError, match="secret") as caught:
        node = cli.compose("train", Config)
        assert node is not None
        load(Config, node)
    assert CANARY not in str(caught.value) and WORDS[word] in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["train", "sweep"])
def test_no_file_has_a_secret(module: str, tmp_path: Path) -> None:
    words = ["-m", "seed=1,2"] if module == "sweep" else ["output_dir=out"]
    ran = subprocess.run(
        [sys.executable, "-m", f"llava_fsdp.{module}", *words, f"+hub_token=hf_{CANARY}"],
        cwd=tmp_path, env={**os.environ, **SECRETS}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 2 and "ConfigError: +hub_token" in ran.stderr
    assert CANARY not in ran.stdout + ran.stderr and CANARY.encode() not in everything_in(tmp_path)


@pytest.mark.faults
def test_a_run_is_its_users_and_tells_nothing(runs: Runs, tmp_path: Path) -> None:
    ended = runs.run(
        "max_steps=2", "export.enabled=true", "export.verify=false", folder=tmp_path, env=SECRETS, timeout=100,
        trap=no_network,
    )  # fmt: skip
    assert ended.code == 0, ended.stderr
    out = tmp_path / "out"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    written = [path for path in out.rglob("*") if path.name != "run_status.json"]
    assert len(written) > 8
    open_to_others = [str(path) for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not open_to_others
    assert CANARY.encode() not in everything_in(tmp_path) and "network" not in ended.stderr


@pytest.mark.faults
def test_private_can_be_turned_off(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o777)
    (tmp_path / "out").chmod(0o777)
    ended = runs.run("max_steps=1", "private=false", folder=tmp_path, ranks=1)
    assert ended.code == 0, ended.stderr
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777, "a folder that exists stays as it is"
    assert stat.S_IMODE((tmp_path / "out" / "metrics.jsonl").stat().st_mode) == 0o644
    assert "output_dir=out can be written by every user of this machine" in ended.stderr


INNOCENT = [
    "tokens_per_micro_batch=4096", "loss.chunk_tokens=1024", "image_token=<image>", "pad_token: '<pad>'",
    "label_tokens 12",
    "data.path=/data/cs-sk-translation-pairs-2024-v2/a.json", "model.language=/models/hf_llama2vicunachat13b",
    "token_id: 32000",
    "https://example.org/a@b.json", "author=me", "bos_token=<s>", "keys=7", "data.path=/home/me/secretary.json",
]  # fmt: skip


@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_no_secret_is_told(text: str) -> None:
    assert redact(text) == text and not has_secret(text)
    assert not is_secret_name(text.partition("=")[0].partition(" ")[0].rpartition(".")[2].rstrip(":"))


@pytest.mark.parametrize(
    "text",
    [
        f"hub_token={CANARY}", f"--hub_token {CANARY}", f'"wandb_api_key": "{CANARY}"', f"password='{CANARY} x'",
        f"https://me:{CANARY}@host/x", f"hf_{CANARY}", f"sk-{CANARY}", f"sk-proj-a_b-{CANARY}",
        f"export HF_TOKEN={CANARY}",
        f"credentials: {CANARY}",
        f"aws.secret_access_key = {CANARY}",
    ],
)  # fmt: skip
def test_secrets_are_hidden(text: str) -> None:
    assert CANARY not in redact(text) and HIDDEN in redact(text)


def test_what_the_environment_holds_is_hidden() -> None:
    assert redact(f"found {CANARY}", [CANARY]) == f"found {HIDDEN}"
    assert is_secret_variable("HF_TOKEN") and not is_secret_variable("TOKENIZERS_PARALLELISM")


def test_secrets_in_the_values_of_a_configuration_are_hidden() -> None:
    """Whole, where the key says so, also the end of a key; what holds no text stays."""
    values = {
        "hub_token": "plain", "tracker.api_key": ["plain", 7, None], "password": "", "data.token_id": "plain",
        "note": f"found {CANARY} here", "names": (f"found {CANARY}", "plain", 3), "steps": 4, "flag": False,
    }  # fmt: skip
    assert redact_values(values, iter([CANARY])) == {
        "hub_token": HIDDEN, "tracker.api_key": [HIDDEN, 7, None], "password": "", "data.token_id": "plain",
        "note": f"found {HIDDEN} here", "names": [f"found {HIDDEN}", "plain", 3], "steps": 4, "flag": False,
    }  # fmt: skip


def test_which_values_of_the_environment_are_secrets() -> None:
    """The longest first, as one may begin with another; short ones are words that stand anywhere."""
    found = secrets_of(
        {"A_TOKEN": "12345678", "B_SECRET": "12345678abc", "C_TOKEN": "1234567", "PATH": "/usr/local/bin"}
    )
    assert found == ["12345678abc", "12345678"]
    assert redact("12345678abc", found) == HIDDEN
    assert [redact(f"token={word}") for word in ("None", "null", "abc")] == [
        "token=None",
        "token=null",
        f"token={HIDDEN}",
    ]
