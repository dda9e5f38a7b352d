"""A machine made of fakes: a copy of the launch scripts, and a PATH with nothing but what is put there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash") or "bash"
TOOLS = "cat dirname getconf grep mktemp rm sleep tail tee timeout env bash".split()

# Answers for pip, pytest and the training, and notes what it was asked; everything else goes to the real Python.
FAKE_PYTHON = f"""#!{BASH}
case "$*" in
  "-m pip "*) echo "pip: $*" >>"$NOTES"; exit 0 ;;
  "-m pytest "*) echo "pytest: $*" >>"$NOTES"; echo "SKIPPED [1] tests/test_x.py:3: no Slurm here"
                 echo "===== 3 passed, 1 skipped in 0.12s ====="; exit "${{PYTEST_STATUS:-0}}" ;;
  "examples/real/fetch.py "*) echo "fetch: ${{*:2}}" >>"$NOTES"; exit "${{FETCH:-0}}" ;;
  "tests/mutants/"*) echo "planted: $* OMP_NUM_THREADS=$OMP_NUM_THREADS" >>"$NOTES"; exit 0 ;;
  "-m llava_fsdp train "*)
    echo "train ${{*:4}} shutdown=${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-}}" >>"$NOTES"
    [[ -z "${{SAVES:-}}" ]] || {shutil.which("mkdir")} -p checkpoints/step-000005
    exit "${{CODE:-0}}" ;;
  *torch.cuda.is_available*) exit "${{NO_CUDA:-1}}" ;;
esac
exec {sys.executable} "$@"
"""
NOTE = f'#!{BASH}\necho "$(basename "$0") $* OMP_NUM_THREADS=$OMP_NUM_THREADS" >>"$NOTES"\n'


# A Python whose `-m llava_fsdp train` can be given faults and a pace (faulty.py), on the CPU.
FAULTY_PYTHON = f"""#!{BASH}
export CUDA_VISIBLE_DEVICES=
[[ "$1 $2 $3" != "-m llava_fsdp train" ]] || exec {sys.executable} {ROOT}/tests/support/faulty_launcher.py "${{@:4}}"
exec {sys.executable} "$@"
"""


def checkout(folder: Path) -> dict[str, str]:
    """The launch scripts in a folder, for real trainings whose first argument is stage=; the environment to run in.

    Without a .venv, which would come before the Python that is put there.
    """
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text(FAULTY_PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    return {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


class Machine:
    """A copy of the scripts beside a `.venv` of fakes, and a PATH with nothing but what is put there."""

    def __init__(self, folder: Path):
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.notes = folder / "notes"
        for folder_of_scripts in ("launch", ".ci"):
            shutil.copytree(ROOT / folder_of_scripts, self.root / folder_of_scripts)
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for tool in [*TOOLS, "basename"]:
            (self.bin / tool).symlink_to(shutil.which(tool) or f"/no/{tool}")
        self.notes.touch()

    def put(self, place: str, text: str) -> None:
        path = (self.root if place.startswith(".venv") else self.bin) / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def venv(self) -> None:
        self.put(".venv/bin/python", FAKE_PYTHON)

    def gpus(self, count: int) -> None:
        self.put("nvidia-smi", f"#!{BASH}\n" + "".join(f"echo 'GPU {n}: H200'\n" for n in range(count)))

    def bash(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.bin), "NOTES": str(self.notes), "HOME": os.environ.get("HOME", "/"), **environment}
        return subprocess.run(
            [BASH, *([script] if script.endswith(".sh") else ["-euo", "pipefail", "-c", script]), *arguments],
            check=False, cwd=self.root, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def noted(self, word: str) -> list[str]:
        return [line for line in self.notes.read_text().splitlines() if line.startswith(word)]
