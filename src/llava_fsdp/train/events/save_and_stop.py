"""Save checkpoints, and decide together on all ranks, after and between steps, whether to save, to stop on request, or
to give up after too many skipped steps."""

import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from llava_fsdp.checkpoint.commit import AdapterCopy
from llava_fsdp.checkpoint.retention import write_best
from llava_fsdp.checkpoint.saver import SavedState, Saver
from llava_fsdp.config import CheckpointConfig, Config, OffloadMode
from llava_fsdp.parallel.ranks.consensus import Votes, on_first_rank
from llava_fsdp.parallel.ranks.mesh import gather_lists, own_rank
from llava_fsdp.runtime.errors import CheckpointError, FolderLost, ModelError, NumericError, Stopped
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.run_dir import FOLDER, list_checkpoints
from llava_fsdp.runtime.process.run_dir_watch import FolderChange, RunDirLock
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.checkpoints.checkpoint_contents import facts_of, tensors
from llava_fsdp.train.checkpoints.replica_check import check_replicas
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.optimizer import prepare_moments
from llava_fsdp.train.state import StepResult, TrainState

SHOWN = 8
"""Maximum number of records that a message names; run_status.json lists all of them."""
SLOW_SECONDS = 5.0
"""Seconds of waiting for the last checkpoint after which a message says so."""


class RunController(RunEvents):
    """Saves the state of a training when a checkpoint is due or requested, and ends the run on request. While updates
    of the weights are skipped, a checkpoint that is due is postponed."""

    def __init__(
        self,
        state: TrainState,
        saver: Saver | None,
        cfg: Config,
        last_step: int,
        watchdog: Watchdog,
        dir_lock: RunDirLock | None = None,
    ):
        """Create the controller. `saver` is None if no step is left to do; `dir_lock` is rank 0's lock on the run's
        folder, and None on other ranks."""
        self.dir_lock = dir_lock
        self.state = state
        self.saver = saver
        self.cfg = cfg
        self.last_step = last_step
        self.watchdog = watchdog
        self.first_step = state.step  # a resumed state is already on disk, and at step 0 there is nothing to save
        self.is_save_due = False
        """Whether a checkpoint was postponed because steps were skipped."""

    @property
    def needs_no_save(self) -> bool:
        """Whether the current state need not be saved: it is on disk or being written, or no step was taken yet."""
        saved = self.saver.saved_step if self.saver is not None else None
        return self.state.step in (self.first_step, saved)

    def after_step(self, result: StepResult) -> None:
        """Save a checkpoint if one is due.

        Raises:
            NumericError: more than `numeric.max_consecutive_skips` consecutive steps had gradients that are not finite.
            CheckpointError: the checkpoint could not be written.
        """
        state = self.state
        if state.consecutive > self.cfg.numeric.max_consecutive_skips:
            self.give_up(result)
        self.is_save_due |= is_due(state.step, self.last_step, self.cfg.checkpoint)
        # saves delete old checkpoints, and the one from before a series of skipped steps must not be deleted
        if self.is_save_due and (not state.consecutive or state.step == self.last_step):
            self.save()

    def before_step(self) -> None:
        """Save or stop if this was requested on any rank, or stop if the run's folder is lost. A state that is already
        on disk, or being written (`needs_no_save`), is not saved again. Collective.

        Raises:
            Stopped: on request. The state is on disk, unless saving failed and `checkpoint.on_save_error=warn`.
            FolderLost: the run's folder was deleted or moved, or belongs to another run now.
        """
        votes = Votes(
            stop=self.watchdog.wants_stop(),
            save=self.watchdog.wants_save(),
            failed=self.saver is not None and self.saver.failed,
            lost=self.is_lost(),
        ).agreed()
        if votes.lost:
            self.stop_if_lost()
        if votes.failed:
            self.finish()  # raises the error of that save
        if (votes.stop or votes.save) and not self.needs_no_save:
            self.save()
        if votes.stop:
            self.finish()
            where = (
                "continues there" if self.needs_no_save else "continues from the checkpoint before, as this one failed"
            )
            raise self.stop_error(f"stopped after step {self.state.step}; the same command {where}")

    def on_pause(self) -> None:
        """Save or stop between two batches of a validation as between two steps. Collective."""
        self.before_step()

    def on_best(self, step: int | None) -> None:
        """Save the current state if its validation is the best so far, and keep the checkpoint of the best step, `step`
        (None: no validation has a finite number). Collective. Raises CheckpointError if it cannot be written."""
        if self.saver is None:  # no step is left, and the checkpoint of the last one is there
            if own_rank() == 0:
                write_best(Path(self.cfg.output_dir) / FOLDER, step)
            return
        if step == self.state.step != self.saver.saved_step:
            self.save()
        self.saver.keep_best(step)

    def stop_error(self, what: str) -> Stopped:
        """Return the exception for a stop on request, which says who requested it and `what`: at which step the
        training stopped, and how to continue."""
        return Stopped(f"{self.watchdog.stop or 'a signal on another rank'}: {what}", bool(self.watchdog.stop))

    def save(self) -> None:
        """Begin to save the current state as a checkpoint. Raises CheckpointError or NumericError if the previous save
        has failed, and FolderLost if the run's folder was deleted, moved or replaced."""
        self.watchdog.at(Phase.CHECKPOINT)
        assert self.saver is not None
        with self.lost_folder_explained():
            self.saver.save()
        if own_rank() == 0:
            write_expert_load(self.state, Path(self.cfg.output_dir))  # tokens per expert, of a model with experts
        self.is_save_due = False

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete. Raises CheckpointError or NumericError if it
        could not be written."""
        if self.saver is not None:
            self.watchdog.at(Phase.CHECKPOINT)
            with self.lost_folder_explained():
                self.saver.raise_if_failed()

    def on_end(self) -> None:
        """Wait, after the last training step, until the last checkpoint is on disk.

        Raises:
            CheckpointError, NumericError: the checkpoint could not be written.
            Stopped: a rank was asked to stop during the last step, and the model has not been exported yet.
        """
        if self.saver is None:
            return
        if not self.needs_no_save:  # the training has ended early
            self.save()
        with log_if_slow("waiting until the checkpoint of step %d is on disk", self.state.step):
            self.finish()
        if Votes(lost=self.is_lost()).agreed().lost:
            self.stop_if_lost()
        self.saver.close()
        # `forgiven`: error of a failed last save that did not end the run, with checkpoint.on_save_error=warn
        lost_save, self.saver = self.saver.forgiven, None
        if lost_save is not None and not self.cfg.export.enabled:
            raise CheckpointError(
                f"{lost_save}. It was that of the last step, and no export keeps the weights: make room, and run the "
                "same command again"
            )
        if Votes(stop=self.watchdog.wants_stop()).agreed().stop and self.cfg.export.enabled:
            raise self.stop_error("stopped after the last step; the same command exports the model")

    def folder_change(self) -> FolderChange | None:
        """Return what happened to the run's folder if it is lost (deleted, moved or replaced), else None. On ranks
        other than rank 0 always return None, without a collective."""
        return self.dir_lock.check_folder() if self.dir_lock is not None else None

    def is_lost(self) -> bool:
        """Return whether the run's folder is known to be lost, so that nothing may be written at its path."""
        return self.folder_change() is not None

    @contextlib.contextmanager
    def lost_folder_explained(self) -> Iterator[None]:
        """Context manager for writing into the run's folder: if writing fails because the folder is lost (deleted,
        moved or replaced), FolderLost is raised instead of the error of writing."""
        try:
            yield
        except (CheckpointError, ModelError) as error:
            if not isinstance(error, FolderLost):
                self.stop_if_lost()  # raises FolderLost
            raise

    def stop_if_lost(self) -> None:
        """If the run's folder is lost, save the state into a new folder with the same path, and raise FolderLost. If
        there is something else at that path now, only raise FolderLost. Collective."""
        failure = f"cannot look at {self.cfg.output_dir}"
        change = on_first_rank(self.folder_change, failure)
        if change is None:
            return
        step = self.state.step
        problem = f"output_dir={self.cfg.output_dir} {change.what}, as found after step {step}"
        if not change.can_be_remade:
            raise FolderLost(
                f"{problem}. Nothing was written there after that, and step {step} was not saved. To continue from the "
                "last checkpoint, put the run's own folder back in its place",
                may_be_recorded=False,  # the folder may be another run's: write no status into it
            )
        try:
            on_first_rank(lambda: self.dir_lock and self.dir_lock.remake(), failure)
            if self.saver is not None:
                self.watchdog.at(Phase.CHECKPOINT)
                self.saver.reset_saved_step()
                self.saver.save()
                self.saver.raise_if_failed()
        except (CheckpointError, NumericError) as error:
            raise FolderLost(f"{problem}; making it again failed: {error}", may_be_recorded=True) from error
        what_was_saved = (
            f"A checkpoint of step {step} has been saved into a new folder of that name, and the same command "
            "continues from it"
            if self.saver is not None
            else "The run's last checkpoint was in it; the same command starts from the beginning"
        )
        raise FolderLost(
            f"{problem}, with all that was in it. {what_was_saved}. If it was moved, put it back in place of the new "
            "one",
            may_be_recorded=True,
        )

    def give_up(self, result: StepResult) -> None:
        """Raise NumericError because the updates of too many consecutive steps were skipped. The message names the
        records of the last step that may be the cause: those of ranks whose own part of the loss is not finite or, if
        there are no such ranks, those of all ranks."""
        self.finish()
        state, step = self.state, self.state.step
        # gradients are sums over all ranks, but the bad samples were on a rank whose own loss is not finite
        suspects = gather_lists([] if result.own_loss_is_finite else [own_rank()])
        records = state.loader.steps.record_names_of_ranks(step - 1, suspects)
        named = ", ".join(records[:SHOWN]) + (f" and {len(records) - SHOWN} more" if len(records) > SHOWN else "")
        whose = f"those of step {step} on rank {', '.join(map(str, suspects))}" if suspects else f"those of step {step}"
        checkpoints = list_checkpoints(Path(self.cfg.output_dir) / FOLDER)
        first = step - state.consecutive + 1
        last_checkpoint = checkpoints[-1] if checkpoints else "none"
        raise NumericError(
            f"step {first}{f' to {step}' if first < step else ''}: loss {result.loss}, gradient norm "
            f"{result.grad_norm}; the weights are those of step {first - 1}, and the last checkpoint is "
            f"{last_checkpoint}. The samples to look at are {whose}: {named}. A smaller optim.lr, "
            "optim.clip=1.0 or precision=fp32 may help; numeric.max_consecutive_skips allows more such steps"
        ).about(records=records)


@contextlib.contextmanager
def log_if_slow(message: str, *values: object) -> Iterator[None]:
    """Context manager that logs a message (with `values` in it) once if its body takes longer than `SLOW_SECONDS`
    seconds."""
    timer = threading.Timer(SLOW_SECONDS, log().info, [message, *values])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write_expert_load(state: TrainState, folder: Path) -> None:
    """Write the load of each expert in the last step into `expert_load.json`, by the router's name, if the model has
    watched routers. If that fails, only a warning is logged."""
    if state.routers is None or state.expert_loads is None:
        return
    loads = dict(zip(state.routers.places, state.expert_loads.long().tolist(), strict=True))
    path = folder / "expert_load.json"
    try:
        replace_file(path, json.dumps({"step": state.step, "loads": loads}).encode())
    except OSError as error:
        log().warning("%s cannot be written (%s); the training continues without it", path, why(error, path))


def is_due(step: int, last_step: int, cfg: CheckpointConfig) -> bool:
    """Return whether a checkpoint is due: after the last step, and every `checkpoint.every` steps."""
    return step == last_step or (cfg.every is not None and step % cfg.every == 0)


def open_saver(
    state: TrainState, cfg: Config, resumed: Path | None = None, adapter_folder: AdapterCopy | None = None
) -> "Saver":
    """Create the saver of checkpoints. Collective.

    Args:
        resumed: folder of the verified checkpoint from which the run continues; None if it begins at step 0.
        adapter_folder: writes the LoRA adapters into each checkpoint; None without adapters, and on ranks other than 0.

    Raises:
        CheckpointError: the disk has no room for a checkpoint, or the folder is not writable.
    """
    prepare_moments(state.optimizer)
    parent = Path(cfg.output_dir) / FOLDER
    # with nvme, tensors are in files and need no copy; `equal_ranks` are those that share the writing of their tensors
    saved_state = SavedState(
        tensors=lambda: tensors(state),
        facts=lambda: facts_of(state, cfg),
        check=partial(check_replicas, state, parent),
        in_place=cfg.offload.mode is OffloadMode.nvme,
        equal_ranks=state.parallelism.equal_ranks,
    )
    # a verified checkpoint of this run, which need not be verified again
    verified = [resumed] if resumed is not None and resumed.parent.resolve() == parent.resolve() else []
    saver = Saver(parent, cfg.checkpoint, saved_state, verified, adapter_folder=adapter_folder)
    # an update must wait until the tensors to save are copied
    state.optimizer.register_step_pre_hook(lambda *_: saver.before_update())
    return saver
