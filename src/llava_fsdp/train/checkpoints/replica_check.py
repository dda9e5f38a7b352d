"""Check, before training begins and before each save, that tensors and counters which several ranks hold are equal."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import torch

from llava_fsdp.parallel.local_shards import clean_name
from llava_fsdp.parallel.pipeline.pipeline import Pipeline
from llava_fsdp.parallel.ranks.consensus import rank_and_size
from llava_fsdp.parallel.ranks.mesh import gather_lists
from llava_fsdp.parallel.ranks.replicas import Difference, checksums_of_rank, find_differences
from llava_fsdp.runtime.errors import ReplicaError
from llava_fsdp.runtime.files.run_dir import list_checkpoints
from llava_fsdp.train.checkpoints.checkpoint_contents import tensors
from llava_fsdp.train.state import TrainState

SHOWN = 3
"""Maximum number of ranks, and of tensors, that a message names."""


def check_replicas(state: TrainState, parent: Path) -> None:
    """Check that the weights, moments, buffers and counters that several ranks hold are equal. Collective.

    Raises:
        ReplicaError: something differs. Raised on every rank; names the ranks and tensors that differ, and the last
            checkpoint in the folder `parent`.
    """
    if rank_and_size()[1] == 1:
        return
    if state.pipeline is None:
        # one entry for each way in which tensors are distributed over ranks (a layout)
        layouts = checksums_of_rank(all_tensors(state), counters(state))
        found = [difference for layout in layouts for difference in find_differences(layout, gather_lists)]
    else:
        found = differences_in_stages(state, state.pipeline)
    if found:
        raise replica_error(found, gather_lists([socket.gethostname()]), state.step, parent)


def differences_in_stages(state: TrainState, pipeline: Pipeline) -> list[Difference]:
    """Return the tensors that differ between ranks with the same stages, and the counters that differ between ranks.
    Collective."""
    number, size = pipeline.equal_ranks  # this is number `number` of the `size` consecutive ranks with these stages
    layouts = checksums_of_rank(all_tensors(state), {}, size)
    in_stage = [found for layout in layouts for found in find_differences(layout, pipeline.gather_in_stage)]
    first = rank_and_size()[0] - number
    # the differences name ranks by their number among those with the same stages; make these numbers global
    in_stage = [replace(each, ranks=tuple(first + place for place in each.ranks)) for each in in_stage]
    (facts,) = checksums_of_rank({}, counters(state))
    return find_differences(facts, gather_lists) + gather_lists(in_stage if number == 0 else [])


def all_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the tensors of checkpoints, frozen weights and buffers, by name."""
    found = tensors(state)
    for name, tensor in (*state.model.named_parameters(), *state.model.named_buffers()):
        found.setdefault(f"model.{clean_name(name)}", tensor)
    return found


def counters(state: TrainState) -> dict[str, str]:
    """Return, as text, the values other than tensors that each rank computes for itself and that affect later steps."""
    return {
        "step, samples": f"{state.step} {state.samples}",
        "skipped steps": f"{state.skipped} {state.consecutive}",
        "loss scale": json.dumps(state.scaler.state() if state.scaler is not None else None),
        "skipped records": json.dumps(sorted(state.loader.broken)),
    }


def replica_error(found: list[Difference], hosts: list[str], step: int, parent: Path) -> ReplicaError:
    """Build the error for tensors and counters that should be equal, but are not (`found`). `hosts`: host name of each
    rank; `parent`: folder of the run's checkpoints."""
    ranks = sorted({rank for difference in found for rank in difference.ranks})
    named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks[:SHOWN])
    named += f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    # if most ranks agree (`has_majority`), only the others are named
    verb = "differ from their replicas" if all(each.has_majority for each in found) else "differ from each other"
    verb = verb.replace("differ from their", "differs from its") if len(ranks) == 1 else verb
    checkpoints = list_checkpoints(parent)
    last = checkpoints[-1] if checkpoints else "none"
    error = ReplicaError(
        f"after step {step}, {named} {verb} in {len(found)} of the tensors and counters that must be the same to the "
        f"bit: {', '.join(each.name for each in found[:SHOWN])}. Memory or a device has changed them, or a rank has "
        f"computed other sums. They were not saved; the last checkpoint is {last}, and the "
        "same command continues from it. If this error comes again, test that machine's memory and GPUs "
        "(nvidia-smi -q -d ECC, dmesg), or run without it"
    )
    return error.about(rank=ranks[0], host=hosts[ranks[0]], tensors=[each.name for each in found])
