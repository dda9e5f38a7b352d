"""Plant each bug of `bugs.toml` in a copy of the tree, and check that the test that its row names fails.

    python tests/mutants/run_bugs.py [PATTERN] [--minutes M] [--table FILE]

PATTERN chooses rows: a regular expression for their area, file, function, test and description. FILE is another table.
After M minutes no further bug is planted; 0 sets no limit. With a limit, the first bug of each file is planted before
the second ones, and so on. Rows of the whole table that cannot be planted are told first.
The working tree is only read.
Two rows run at a time, each in its own copy of the tree and its own process. Processes are forked when torch and
transformers are imported, and nothing of this project is. A bug is caught if the test fails by an assertion or by one
of the project's own errors. A syntax error, a failing import or a timeout shows nothing about the test.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest
from bugs import ROOT, TABLE, Bug, Planted, Tree, read_bugs
from outcomes import Recorder

AT_ONCE = 2
LONGEST = 300
"""Seconds that the tests of one job may take."""
WARM = (
    "numpy", "PIL.Image", "torch.distributed.fsdp", "torch.distributed.tensor", "hydra",
    "transformers.models.llama.modeling_llama", "transformers.models.clip.modeling_clip",
)  # fmt: skip
"""Modules that are imported once, before processes are forked."""


@dataclass
class Job:
    """What one process runs: a row's test with its bug planted, or all tests that rows name in a file, with no bug."""

    nodes: list[str]
    planted: Planted | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    too_long: bool = False
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.planted.bug.name if self.planted else self.nodes[0].partition("::")[0]

    def trouble(self) -> str:
        """What is wrong with the outcome, in words; empty if nothing is."""
        if self.too_long:
            return f"FAILED THE WRONG WAY: over {LONGEST} s"
        wrong = [one for one in self.seen if one["outcome"] == "failed" and not one["right"]]
        failed = [one for one in self.seen if one["outcome"] == "failed"]
        if self.planted is None:
            passed = {one["node"] for one in self.seen if one["outcome"] == "passed"}
            passed |= {node.partition("[")[0] for node in passed}
            missing = [node for node in self.nodes if node not in passed]
            return reasons(failed) if failed else f"did not pass: {', '.join(missing)}" if missing else ""
        if wrong or not self.seen:
            return f"FAILED THE WRONG WAY: {reasons(wrong) or 'no test ran'}"
        return "" if failed else f"NOT CAUGHT by {self.nodes[0]}"


def reasons(failed: list[dict[str, Any]]) -> str:
    return "; ".join(f"{one['node']} ({one['phase']}): {one['why']}" for one in failed)


def copy_tree(into: Path) -> Path:
    """Copy all files that git tracks or would track, with bytecode that is checked by the hash of the source.

    By default Python compares times in seconds and sizes, and would miss a bug of the same length as the old text.
    """
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        source = ROOT / name
        if source.is_file():  # neither deleted nor a link to a folder
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into / name)
    compileall.compile_dir(into / "src", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return into


@contextlib.contextmanager
def changed(copy: Path, planted: Planted) -> Iterator[None]:
    """Plant a bug in a copy of the tree, and take it out again at the end."""
    file = copy / planted.path
    content = file.read_text(encoding="utf-8")
    file.write_text(planted.content, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(content, encoding="utf-8")


def serve(copy: Path, job: Job, found: Path, log: Path) -> None:
    """Run a job's tests in the forked process, and write their outcomes to `found`."""
    os.setsid()  # one process group, so that all its ranks are killed with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    sys.modules["__main__"] = types.ModuleType("__main__")  # else worker processes that a test starts import this file
    scratch = copy.with_suffix(".scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    tempfile.tempdir = str(scratch)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)}
    sys.path[:] = [str(copy / "src"), *(p for p in sys.path if Path(p or ".").resolve() != TABLE.parent)]
    recorder = Recorder()
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(copy), "-c", str(copy / "pyproject.toml")]
    options += ["--basetemp", str(scratch / "pytest"), "-x"] if job.planted else ["--basetemp", str(scratch / "pytest")]
    pytest.main([*options, *job.nodes], plugins=[recorder])
    found.write_text(json.dumps(recorder.seen))


class Slot:
    """A copy of the tree and the process that runs in it."""

    def __init__(self, copy: Path):
        self.copy = copy
        self.found, self.log = copy.with_suffix(".json"), copy.with_suffix(".log")
        self.job: Job | None = None
        self.process = 0
        self.began = 0.0
        self.planted = contextlib.ExitStack()

    def begin(self, job: Job) -> None:
        """Plant the job's bug and fork its process."""
        if job.planted is not None:
            self.planted.enter_context(changed(self.copy, job.planted))
        self.found.unlink(missing_ok=True)
        self.job, self.began = job, time.monotonic()
        sys.stdout.flush()
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                serve(self.copy, job, self.found, self.log)
                status = 0
            finally:
                os._exit(status)

    def finished(self) -> Job | None:
        """The job if its process has ended or has run too long; None while it runs."""
        job = self.job
        assert job is not None
        ended = os.waitpid(self.process, os.WNOHANG)[0] != 0
        job.too_long = not ended and time.monotonic() - self.began > LONGEST
        if not ended and not job.too_long:
            return None
        self.close(ended)
        job.seconds = time.monotonic() - self.began
        if self.found.is_file():
            job.seen = json.loads(self.found.read_text())
        return job

    def close(self, ended: bool = False) -> None:
        """Kill the job's processes, and take its bug out of the copy."""
        if self.job is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        if not ended:
            os.waitpid(self.process, 0)
        self.planted.close()
        self.job = None


def plant_all(bugs: list[Bug]) -> tuple[list[Planted], list[str]]:
    """The files of all bugs with the bugs in them, and what is wrong with rows that cannot be planted."""
    tree, planted, troubles = Tree(), [], []
    for bug in bugs:
        try:
            planted.append(tree.plant(bug))
        except ValueError as error:
            troubles.append(f"BROKEN ROW: {error}")
    return planted, troubles


def in_rounds(bugs: list[Planted]) -> list[list[Planted]]:
    """Return the bugs in lists: the first one of each file, then the second ones, and so on."""
    seen: Counter[str] = Counter()
    rounds: list[list[Planted]] = []
    for bug in bugs:
        if seen[bug.path] == len(rounds):
            rounds.append([])
        rounds[seen[bug.path]].append(bug)
        seen[bug.path] += 1
    return rounds


def run_all(jobs: list[Job], slots: list[Slot], end: float = float("inf")) -> tuple[int, list[str]]:
    """Run jobs side by side until `end`, a time of `time.monotonic()`, and print how each went. Return how many ran,
    and what is wrong."""
    waiting, troubles = deque(jobs), []

    def report(job: Job) -> None:
        trouble = job.trouble()
        if trouble:
            troubles.append(f"{job.name}: {trouble}")
        print(f"{trouble or ('caught' if job.planted else 'passes')}  {job.name}  ({job.seconds:.1f} s)", flush=True)

    try:
        while waiting or any(slot.job for slot in slots):
            late = time.monotonic() > end
            if late and not any(slot.job for slot in slots):
                break
            for slot in slots:
                if slot.job is None and waiting and not late:
                    slot.begin(waiting.popleft())
                elif slot.job is not None and (done := slot.finished()) is not None:
                    report(done)
            time.sleep(0.05)
    finally:
        for slot in slots:
            slot.close()
    return len(jobs) - len(waiting), troubles


def warm_up() -> None:
    for name in WARM:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    assert not [name for name in sys.modules if name.split(".")[0] == "llava_fsdp"], "it would replace the copy"


def main(pattern: str, table: Path, minutes: float) -> int:
    planted, troubles = plant_all(read_bugs(table))
    for trouble in troubles:
        print(trouble)
    texts = [f"{one.bug.area} {one.path} {one.bug.where} {one.bug.test} {one.bug.bug}" for one in planted]
    bugs = [one for one, text in zip(planted, texts, strict=True) if re.search(pattern, text)]
    if not bugs:
        print(f"no row of {table} that can be planted matches {pattern!r}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are killed and copies deleted
    warm_up()
    started = time.monotonic()
    end = started + 60 * minutes if minutes else float("inf")
    rounds = in_rounds(bugs) if minutes else [bugs]
    count = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        slots = [Slot(copy_tree(Path(scratch, str(number)))) for number in range(AT_ONCE)]
        for some in rounds:
            files: dict[str, set[str]] = {}
            for bug in (one.bug for one in some):
                files.setdefault(bug.test_file, set()).add(bug.test)
            _, wrong = run_all([Job(sorted(nodes)) for nodes in files.values()], slots, end)
            if wrong:
                print(f"{len(wrong)} test files do not pass without a bug; no further bug was planted")
                troubles += wrong
                break
            planted_now, wrong = run_all([Job([one.bug.test], one) for one in some], slots, end)
            count, troubles = count + planted_now, troubles + wrong
    for trouble in troubles:
        print(f"WRONG: {trouble}")
    left = f" ({len(bugs) - count} rows not planted; --minutes 0 plants all)" if 0 < count < len(bugs) else ""
    print(f"{count} planted bugs, {len(troubles)} wrong, {time.monotonic() - started:.0f} s{left}")
    return 1 if troubles else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plant bugs, and check that tests fail.")
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression that chooses rows")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--minutes", type=float, default=28, help="after which no further bug is planted; 0: no limit")
    given = parser.parse_args()
    sys.exit(main(given.pattern, given.table, given.minutes))
