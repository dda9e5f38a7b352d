"""Profile a few steps (`profile=true`): write a trace of torch's profiler, the CUDA memory history and an HTML page."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from llava_fsdp.config import Config
from llava_fsdp.report.profile.profile_page import profile_page
from llava_fsdp.report.profile.profile_trace import RANGE, TraceError, times_of
from llava_fsdp.runtime.errors import StorageError
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.run_events import RunEvents, RunStart
from llava_fsdp.train.state import StepResult

FOLDER = "profile"
LAST_STEP = 12
"""Last step that is profiled by default; the first step of this process has the number 1."""
MOST_ENTRIES = 200_000
"""Maximum number of allocations in CUDA's memory history, enough for a few steps."""


def part(name: str) -> AbstractContextManager[object]:
    """Return a context manager that names a part of a step, such as `forward`, in a profile. It does nothing while no
    profiler of torch runs."""
    return record_function(RANGE + name) if torch.autograd._profiler_enabled() else nullcontext()


class StepProfiler(RunEvents):
    """Profiles a range of steps, and writes the results after its last step. The first step of this process has the
    number 1. The profile of a step includes the time of waiting for its data."""

    def __init__(self, cfg: Config, steps: tuple[int, int], rank: int, device: torch.device):
        """Prepare the profiler, to start later. `steps`: first and last step to profile, from 1 in this process."""
        self.first, self.last = steps
        self.folder = Path(cfg.output_dir) / FOLDER
        self.rank = rank
        self.on_cuda = device.type == "cuda"
        self.profiler: profile | None = None
        self.number = 0
        """Number of the step that has begun last."""

    def on_start(self, run: RunStart) -> None:
        self.begin_next()

    def after_step(self, result: StepResult) -> None:
        self.begin_next()

    def close(self) -> None:
        """Stop a profiler that still runs, and log that its range of steps was not reached."""
        if self.profiler is not None:  # the run has ended before the last step of the range: no trace is written
            log().warning("profile=true: the run has ended before step %d of this start", self.last)
            self.profiler.stop()
            self.profiler = None
            if self.on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def begin_next(self) -> None:
        """Count the step that begins now, and start, advance or end the profiler before it."""
        self.number += 1
        self.begin(self.number)

    def begin(self, number: int) -> None:
        """Start or advance the profiler before step `number`, or write its results after the range. It is started one
        step before the range, to warm up, unless the range begins with step 1."""
        if number == max(1, self.first - 1):
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_cuda else [])]
            plan = schedule(wait=0, warmup=self.first - number, active=self.last - self.first + 1, repeat=1)
            self.profiler = profile(activities=activities, schedule=plan)
            self.profiler.start()
        elif self.profiler is not None:
            if number == self.last + 1:
                self.finish(self.profiler)
                return
            self.profiler.step()
        if number == self.first and self.on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)

    def finish(self, profiler: profile) -> None:
        """Stop torch's profiler; write trace, CUDA memory history and HTML page. Raises StorageError if that fails."""
        self.profiler = None
        if self.on_cuda:
            torch.cuda.synchronize()
        profiler.stop()
        name = f"rank-{self.rank}"
        trace = self.folder / f"{name}.trace.json.gz"
        try:
            self.folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            if self.on_cuda:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
            title = f"steps {self.first} to {self.last} of this start, rank {self.rank}"
            page = self.folder / f"{name}.html"
            page.write_text(profile_page(times_of(trace), title, self.first))
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written ({why(error, self.folder)})") from error
        except TraceError as error:
            raise StorageError(f"{trace} {error}: is the disk full? profile=false turns profiling off") from error
        finally:
            if self.on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)
        if self.rank == 0:
            log().info("profile: %s; the trace beside it opens in https://ui.perfetto.dev", os.fspath(page))


def open_profiler(cfg: Config, rank: int, device: torch.device, finished_steps: int, total: int) -> StepProfiler | None:
    """Create the profiler of a training that has finished `finished_steps` of `total` steps. None: nothing is recorded,
    because the setting `profile` is false or there are too few steps left. `rank` is in the names of the files."""
    steps_left = total - finished_steps
    if not cfg.profile or steps_left <= 0:
        return None
    if cfg.profile_steps is None:
        return StepProfiler(cfg, usual_steps(steps_left), rank, device)
    first, last = cfg.profile_steps
    if steps_left < last:  # not an error: a run that was profiled may be restarted near its end
        log().warning(
            "profile_steps=%s: this start has %d steps to do, and they are counted from its first; nothing is recorded",
            cfg.profile_steps, steps_left,
        )  # fmt: skip
        return None
    return StepProfiler(cfg, (first, last), rank, device)


def usual_steps(steps_left: int) -> tuple[int, int]:
    """Return the first and the last step that are profiled by default, counted from 1, if `steps_left` steps are to be
    done: three steps up to step `LAST_STEP`, when everything is compiled, or the last steps if the run ends earlier. If
    possible, the profiler can warm up in one step before them."""
    last = min(steps_left, LAST_STEP)
    return min(last, max(2, last - 2)), last
