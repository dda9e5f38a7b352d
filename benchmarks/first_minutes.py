"""How long does `llava-fsdp` take to answer, and what does a terminal show when a training goes wrong?

    python benchmarks/first_minutes.py times       # median seconds of --help, a typo, a wrong choice; 10 runs each
    python benchmarks/first_minutes.py sessions    # what six failing trainings print, with their exit codes; minutes

Results go to benchmarks/results/first-minutes-DATE.txt, `times` before `sessions`.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from provenance import REPOSITORY, commit, machine

RESULTS = REPOSITORY / "benchmarks" / "results"
ANSWERS = {
    "list of commands": "--help",
    "help of a group of keys": "train --help optim",
    "help of all keys": "train --help",
    "typo in a command": "trian",
    "typo in a key": "train optim.lrr=1",
    "wrong choice": "train stage=finetun",
    "wrong value": "train epochs=0",
}
RUN = "train --nproc-per-node 2 export.enabled=false log_every=1 max_steps=300 output_dir=out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["times", "sessions"])
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    if options.what == "times":
        text = f"{machine()}, median of {options.runs} runs\n"
        for name, words in ANSWERS.items():
            text += f"{median_seconds(words.split(), options.runs):6.2f} s  {name:24} llava-fsdp {words}\n"
    else:
        text = "\n".join(session(title, words, act) for title, words, act in SESSIONS)
    print(text)
    with (RESULTS / f"first-minutes-{datetime.date.today()}.txt").open("a") as file:
        file.write(f"commit {commit()}\n{text}\n")


def median_seconds(words: list[str], runs: int) -> float:
    """Median of the wall-clock seconds of a command, after one run that fills the file cache."""
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        subprocess.run([*COMMAND, *words], check=False, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds[1:]), 3)


LIMITED = ["bash", "-c", 'ulimit -d 2097152; exec "$@"', "bash"]
"""What stands before a command each of whose processes gets at most 2 GiB of memory."""
COMMAND = (sys.executable, "-m", "llava_fsdp")


def session(title: str, words: str, act: Callable[[subprocess.Popen, Path], None]) -> str:
    """Run a command in a new folder, let `act` disturb it, and return what the terminal showed and the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder)
        command = [*LIMITED * (title == "out of memory"), *COMMAND, *shlex.split(words)]
        with (folder / "terminal.txt").open("w") as file:
            process = subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            act(process, folder)
            code = process.wait(600)
        shown = (folder / "terminal.txt").read_text()
    return f"## {title}\n$ llava-fsdp {words}\n{shown}$ echo $?\n{code}\n"


def write_dataset(folder: Path) -> None:
    """A dataset in LLaVA's format, whose fourth record has no answer."""

    def turns(n: int) -> list[dict[str, str]]:
        return [{"from": "human", "value": f"What is {n} + 1?"}, {"from": "gpt", "value": str(n + 1)}]

    records = [{"id": str(n), "conversations": turns(n)} for n in range(8)]
    del records[3]["conversations"][1]
    (folder / "records.json").write_text(json.dumps(records))


def nothing(process: subprocess.Popen, folder: Path) -> None:
    """Let the command end by itself."""


def ctrl_c(process: subprocess.Popen, folder: Path) -> None:
    await_step(process, folder, 3)
    process.send_signal(signal.SIGINT)


def kill_rank(process: subprocess.Popen, folder: Path) -> None:
    await_step(process, folder, 3)
    os.kill(json.loads((folder / "out/.heartbeats/rank-1.json").read_text())["pid"], signal.SIGKILL)


def await_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    path = folder / "out" / "metrics.jsonl"
    while process.poll() is None and not (path.is_file() and path.read_text().count("\n") >= step):
        time.sleep(0.05)


SESSIONS = (
    ("a typo", "train optim.lrr=1", nothing),
    ("a missing file", f"{RUN} data=llava_json data.path=gone.json data.images=.", nothing),
    ("a bad record", f"{RUN} data=llava_json data.path=records.json data.images=.", nothing),
    ("Ctrl-C at step 3", RUN, ctrl_c),
    ("a killed rank", f"{RUN} --max-restarts 0", kill_rank),
    ("out of memory", f"{RUN} micro_batch_size=3000 global_batch_size=3000", nothing),
)


if __name__ == "__main__":
    main()
