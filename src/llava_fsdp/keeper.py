"""What happens between two steps: saving, stopping, and giving up on numbers that are none. On every rank alike."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llava_fsdp import checkpoint
from llava_fsdp.checkpoint import Saver
from llava_fsdp.config import Config
from llava_fsdp.errors import CheckpointError, FolderLost, ModelError, NumericError, Stopped
from llava_fsdp.heartbeats import Phase
from llava_fsdp.holding import Hold, Loss
from llava_fsdp.life import Life
from llava_fsdp.sharding.mesh import gather_lists, own_rank
from llava_fsdp.state import StepResult, TrainState
from llava_fsdp.votes import Votes

SHOWN = 8
"""Records that a message names; run_status.json has them all."""


class Keeper:
    """Keeps a run's state: when it is due, when it is asked for, and never in the middle of steps that were skipped."""

    def __init__(
        self,
        state: TrainState,
        saver: Saver | None,
        cfg: Config,
        last_step: int,
        life: Life,
        hold: Hold | None = None,
    ):
        """
        Args:
            saver: None: there is no step left.
            hold: on rank 0, what knows of the run's folder.
        """
        self.hold = hold
        self.state = state
        self.saver = saver
        self.cfg = cfg
        self.last_step = last_step
        self.life = life
        self.first_step = state.step  # what was resumed is on disk, and at step 0 there is nothing to keep
        self.owed = False

    @property
    def is_kept(self) -> bool:
        """Whether what there is now is on disk, or is being written."""
        saved = self.saver.saved_step if self.saver is not None else None
        return self.state.step in (self.first_step, saved)

    def after_step(self, result: StepResult) -> None:
        """Save where it is due.

        Raises:
            NumericError: more steps in a row than `numeric.max_consecutive_skips` had gradients that are not finite.
            CheckpointError: it could not be written.
        """
        state = self.state
        if state.consecutive > self.cfg.numeric.max_consecutive_skips:
            self.give_up(result)
        self.owed |= checkpoint.is_due(state.step, self.last_step, self.cfg.checkpoint)
        # what was saved before the first of several bad steps must not make room for what was saved among them
        if self.owed and (not state.consecutive or state.step == self.last_step):
            self.save()

    def between_steps(self) -> None:
        """Do what any rank was asked for. A collective.

        Raises:
            Stopped: the state is on disk, unless `checkpoint.on_save_error` allows otherwise.
            FolderLost: the run's folder is not there any more, or not the run's.
        """
        asked = Votes(
            stop=self.life.wants_stop(),
            save=self.life.wants_save(),
            failed=self.saver is not None and self.saver.failed,
            lost=self.loss() is not None,
        ).agreed()
        if asked.lost:
            self.stop_if_lost()
        if asked.failed:
            self.finish()
        if (asked.stop or asked.save) and not self.is_kept:
            self.save()
        if asked.stop:
            self.finish()
            said = "continues there" if self.is_kept else "continues from the checkpoint before, as this one failed"
            raise Stopped(
                f"{self.asker}: stopped after step {self.state.step}; the same command {said}", bool(self.life.stop)
            )

    def save(self) -> None:
        self.life.at(Phase.CHECKPOINT)
        assert self.saver is not None
        with self.explained():
            self.saver.save()
        self.owed = False

    def finish(self) -> None:
        """Wait for what is being saved.

        Raises:
            CheckpointError, NumericError: it could not be written.
        """
        if self.saver is not None:
            self.life.at(Phase.CHECKPOINT)
            with self.explained():
                self.saver.raise_if_failed()

    def close(self) -> None:
        """After the last step: all of it is on disk.

        Raises:
            CheckpointError, NumericError: it could not be written.
            Stopped: that was asked for during the last step, and there is a model left to export.
        """
        if self.saver is None:
            return
        self.finish()
        if Votes(lost=self.loss() is not None).agreed().lost:
            self.stop_if_lost()
        self.saver.close()
        self.saver = None
        if Votes(stop=self.life.wants_stop()).agreed().stop and self.cfg.export.enabled:
            raise Stopped(
                f"{self.asker}: stopped after the last step; the same command exports the model", bool(self.life.stop)
            )

    def loss(self) -> Loss | None:
        """What has become of the run's folder, where that is bad; only rank 0 knows. Not a collective."""
        return self.hold.look() if self.hold is not None else None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within it something is written into the run's folder by all ranks together: where that fails because the
        folder is gone, that is what is said.

        Raises:
            FolderLost
        """
        try:
            yield
        except (CheckpointError, ModelError) as error:
            if not isinstance(error, FolderLost):
                self.stop_if_lost()
            raise

    def stop_if_lost(self) -> None:
        """A collective.

        A state that is still in memory is saved into a new folder of the same name, unless something else is there.

        Raises:
            FolderLost: saying what is lost and what is not.
        """
        failing = f"cannot look at {self.cfg.output_dir}"
        loss = checkpoint.on_first_rank(self.loss, failing)
        if loss is None:
            return
        step = self.state.step
        said = f"output_dir={self.cfg.output_dir} {loss.what}, as found after step {step}"
        if not loss.can_be_remade:
            raise FolderLost(
                f"{said}. Nothing more was written there, and no checkpoint of step {step}; the run's own folder, put "
                "back in its place, continues from its last checkpoint",
                leaves_word=False,
            )
        try:
            checkpoint.on_first_rank(self.remake, failing)
            if self.saver is not None:
                self.life.at(Phase.CHECKPOINT)
                self.saver.forget()
                self.saver.save()
                self.saver.raise_if_failed()
        except (CheckpointError, NumericError) as error:
            raise FolderLost(f"{said}; it was to be made again, and that failed: {error}", leaves_word=True) from error
        saved = (
            f"A checkpoint of step {step} has been saved into a new folder of that name, and the same command "
            "continues from it"
            if self.saver is not None
            else "The run's last checkpoint was in it; the same command starts anew"
        )
        raise FolderLost(
            f"{said}, with its checkpoints, its metrics and what was exported. {saved}. If the folder was moved, put "
            "it back in place of the new one",
            leaves_word=True,
        )

    def remake(self) -> None:
        assert self.hold is not None
        self.hold.remake()

    @property
    def asker(self) -> str:
        return self.life.stop or "another rank was asked to"

    def give_up(self, result: StepResult) -> None:
        self.finish()
        state, step = self.state, self.state.step
        # gradients are sums over all ranks; a loss that is not finite already tells whose samples made it so
        suspects = gather_lists([] if result.own_loss_is_finite else [own_rank()])
        records = state.loader.steps.records_of(step - 1, suspects)
        named = ", ".join(records[:SHOWN]) + (f" and {len(records) - SHOWN} more" if len(records) > SHOWN else "")
        whose = f"those of step {step} on rank {', '.join(map(str, suspects))}" if suspects else f"those of step {step}"
        found = checkpoint.list_checkpoints(Path(self.cfg.output_dir) / checkpoint.FOLDER)
        first = step - state.consecutive + 1
        raise NumericError(
            f"step {first}{f' to {step}' if first < step else ''}: loss {result.loss}, gradient norm "
            f"{result.grad_norm}; the weights are those of step {first - 1}, and the last checkpoint is "
            f"{found[-1] if found else 'none'}. The samples to look at are {whose}: {named}. A smaller optim.lr, "
            "optim.clip=1.0 or precision=fp32 may help; numeric.max_consecutive_skips allows more such steps"
        ).about(records=records)
