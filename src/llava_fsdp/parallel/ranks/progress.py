"""How far the GPU of a rank is in its collectives, by torch's flight recorder."""

import json
import os


def record_collectives() -> None:
    """Turn on torch's flight recorder of NCCL's collectives, with the moments at which the GPU begins them, unless the
    environment says otherwise. To be called before the process group is made. Source: ProcessGroupNCCL.hpp and
    FlightRecorder.hpp of torch, where the variables are declared.
    """
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")  # collectives; the default of torch 2.13
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def gpu_progress(trace: bytes, default_alone: bool) -> int | None:
    """Return how many collectives the GPU has begun plus how many it has completed, or None if the flight recorder does
    not know when they begin.

    Args:
        trace: the flight recorder's JSON. Its `pg_status` has the last collective of each process group that was
            enqueued, that the GPU has begun, and that it has completed; -1 stands for no collective.
        default_alone: whether only the default process group counts, whose number is 0.
    """
    status: dict[str, dict[str, str]] = json.loads(trace).get("pg_status", {})
    counted = [of_group for number, of_group in status.items() if number == "0" or not default_alone]
    begun = [int(of_group["last_started_collective"]) for of_group in counted]
    if max(begun, default=-1) < 0:
        return None
    completed = [int(of_group["last_completed_collective"]) for of_group in counted]
    return sum(max(0, number) for number in begun + completed)
