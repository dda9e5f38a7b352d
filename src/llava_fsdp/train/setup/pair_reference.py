"""Compute the log-probabilities of the reference of pairs with the weights at the start, once, and store them.

A file in the run's folder has a value for each answer of each record that is trained on, and a second file has those of
the held-out records. They are written several times while the values are computed, so that an interrupted start
continues. Their metadata say of which weights and data they are.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from llava_fsdp.config import Config
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.validation_set import HeldOutSampler, held_out_sampler
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.eval_mode import evaluating
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.run_dir import HELD_OUT_PAIR_REFERENCE, PAIR_REFERENCE
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch, watch_silently
from llava_fsdp.train.setup.build_state import open_data
from llava_fsdp.train.state import TrainState
from llava_fsdp.train.sums.preference import answers_of
from llava_fsdp.train.sums.source_sums import sum_over_ranks

SAVE_EVERY = 50
"""Number of batches after which the values that are known are written."""
TABLE = "log_probabilities"
"""Name of the tensor in the file, float32 [samples, 2]: of the chosen and of the rejected answer."""


@dataclass(frozen=True)
class StoredReference:
    """The content of the file."""

    weights: str
    """Digest of all weights of the model."""
    data: str
    """Digest of the records and their encoding."""
    batches: str
    """Digest of the batches in which the values are computed."""
    run: str
    """Identifier of the run that has these values."""
    done: int
    """Number of batches whose values are in the table."""
    table: torch.Tensor
    """float32 [samples, 2]; NaN where the value is not known yet, or the record could not be read."""

    def write(self, path: Path) -> None:
        """Write the reference model's log-probabilities, and their metadata, to `path`, replacing an earlier file."""
        facts = {name: str(value) for name, value in vars(self).items() if name != "table"}
        content = save({TABLE: self.table.cpu()}, {key: json.dumps(value) for key, value in facts.items()})
        replace_file(path, content, durable=True)  # every later checkpoint needs it

    @classmethod
    def read(cls, path: Path) -> "StoredReference | None":
        """Read the file with the log-probabilities of a reference model for pairs of answers; return None if it does
        not exist. Raise ModelError if it is damaged."""
        if not path.exists():
            return None
        with library_errors(f"{path} is damaged; remove it and start over with checkpoint.resume=never"):
            content = path.read_bytes()
            size = int.from_bytes(content[:8], "little")  # of the header of a safetensors file
            facts = json.loads(content[8 : 8 + size])["__metadata__"]
            names = (field.name for field in fields(cls) if field.name != "table")
            values: dict[str, Any] = {name: json.loads(facts[name]) for name in names}
            return cls(**values | {"done": int(values["done"]), "table": load(content)[TABLE]})


def open_references(state: TrainState, cfg: Config, resumed: bool, progress: Callable[[], None]) -> None:
    """Set `state.pair_reference` to the log-probabilities of both answers of each sample by the model at the start of
    the run and, with validation, `state.held_out_pair_reference` to those of the held-out samples. They are read from
    files in the run's folder; if the run is at its start, they are computed and written. Collective.

    Args:
        resumed: whether the weights are those of a checkpoint, so that nothing can be computed.
        progress: called before each batch.

    Raises:
        CheckpointError: a file is missing in a run that continues, or is of other weights, data or another run.
    """
    folder, world, model = Path(cfg.output_dir), state.parallelism.world, state.model
    assert isinstance(model, Architecture)

    def choose(records: Records) -> HeldOutSampler:
        """Return a sampler that gives every sample once, in order."""
        return held_out_sampler([len(records)], None, cfg.global_batch_size)

    def open_trained() -> Loader:
        return open_data(replace(cfg, epochs=1, max_steps=None, profile=False), world, model, choose)

    reference = ReferenceFile(folder / PAIR_REFERENCE, state.loader, open_trained)
    state.pair_reference = open_reference(state, reference, resumed, progress)
    if state.held_out is not None:
        loader = state.held_out.loader
        reference = ReferenceFile(folder / HELD_OUT_PAIR_REFERENCE, loader, lambda: loader, is_held_out=True)
        state.held_out_pair_reference = open_reference(state, reference, resumed, progress)


@dataclass(frozen=True)
class ReferenceFile:
    """A file with the log-probabilities of samples, and what they are computed with."""

    path: Path
    loader: Loader
    """Has the samples."""
    open_loader: Callable[[], Loader]
    """Opens a loader that has each of the samples at most once. Collective."""
    is_held_out: bool = False
    """Whether the samples are those of the validation."""


def open_reference(
    state: TrainState, reference: ReferenceFile, resumed: bool, progress: Callable[[], None]
) -> torch.Tensor:
    """Return the log-probabilities, by the model at the start of the run, of the chosen and the rejected answer of each
    sample, float32 [samples, 2], on the device. They are read from a file; those that it lacks are computed at the
    start of a run. Collective.

    Args:
        reference: the file, and the samples that it is about.
        resumed: whether the weights are those of a checkpoint, so that nothing can be computed.
        progress: called before each batch.

    Raises:
        CheckpointError: the file is missing in a run that continues, or is of other weights, data or another run.
    """
    path, loader = reference.path, reference.loader
    stored = on_first_rank(lambda: StoredReference.read(path), f"{path} cannot be read")
    run = on_first_rank(lambda: state.run, "")
    data = data_digest(loader)
    if resumed:
        is_other = stored is None or stored.run != run or stored.data != data
        # the file has all samples that are trained on, but only those held-out ones that val.limit put into batches
        if stored is None or is_other or (reference.is_held_out and stored.batches != batches_digest(loader)):
            without = ", set val.every=null" if reference.is_held_out else ""
            raise CheckpointError(
                f"{path}, with the log-probabilities of the model at the start of this run, is missing, of another run "
                f"or of other records; put it, the records and val.limit back{without}, or start over with "
                "checkpoint.resume=never"
            )
        return stored.table.to(loader.device)
    if stored is not None and (stored.weights, stored.data) != (state.start_digest, data):
        raise CheckpointError(
            f"{path} is of other weights, records or settings of their encoding than this run has; remove it, set them "
            "back, or start over with checkpoint.resume=never"
        )
    opened = reference.open_loader()
    batches = batches_digest(opened)
    # the file counts batches that are done (here 0), so that the values of other batches cannot be used: begin anew
    if stored is None or stored.batches != batches:
        table = torch.full((len(loader.steps.records), 2), math.nan)
        stored = StoredReference(state.start_digest, data, batches, run, 0, table)
    return compute(state, opened, path, replace(stored, run=run), progress)


def data_digest(loader: Loader) -> str:
    """Return a digest of the records and of all that changes their token ids, labels and images."""
    return hashlib.sha256(json.dumps(loader.fingerprints).encode()).hexdigest()[:32]


def batches_digest(loader: Loader) -> str:
    """Return a digest of the samples of each batch."""
    sampler = loader.steps.sampler
    assert isinstance(sampler, HeldOutSampler)
    return hashlib.sha256(json.dumps(sampler.steps).encode()).hexdigest()[:32]


def compute(
    state: TrainState, loader: Loader, path: Path, start: StoredReference, progress: Callable[[], None]
) -> torch.Tensor:
    """Run forward passes over the batches that `start` does not have, write the table of log-probabilities, float32
    [samples, 2], into the file `path` now and then and at the end, and return it, on the device. Collective.

    Args:
        loader: gives each sample once.
        start: the values that are already known, and the number of their batches.
        progress: called before each batch.
    """
    world, model = state.parallelism.world, state.model
    table = torch.full_like(start.table, math.nan, device=loader.device)
    if world.is_first:
        table.copy_(start.table)
    done, last = start.done, loader.total_steps

    def write() -> torch.Tensor:
        # a rank has the values of its own samples; ranks that share rows have the same ones, which are averaged
        known = (~table.isnan()).to(table.dtype)
        whole = sum_over_ranks(table.nan_to_num()) / sum_over_ranks(known)  # NaN where no rank has a value
        now = replace(start, done=done, table=whole)
        on_first_rank(
            lambda: now.write(path),
            f"{path} cannot be written; make room, and the same command continues the computation",
        )
        return whole

    if done < last and world.is_first:
        log().info("computing the log-probabilities of both answers with the model that training begins with, once")
    with (
        evaluating(model, loader.device, state.roots),
        (watch if world.is_first else watch_silently)("reference of pairs", last - done) as advance,
    ):
        for step in loader.steps_from(done):
            # None ends the steps only for a caller that passes `give_up`
            assert step is not None, "nobody gives up"
            progress()
            for micro in loader.agree(step).micro_batches:
                micro = loader.to_device(micro)
                losses = model(**micro.inputs)
                answers = answers_of(losses, micro.label_answers, len(micro.pair_numbers))
                table[micro.pair_numbers] = answers.sums.view(-1, 2)
            done += 1
            advance(1)
            if done % SAVE_EVERY == 0 and done < last:
                write()
        return write()
