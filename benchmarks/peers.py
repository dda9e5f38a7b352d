"""How many real tokens does a CPU second train, compared with every peer, on the same weights, samples and steps?

    python benchmarks/peers.py                          # half an hour of two cores
    python benchmarks/peers.py FOLDER --against packed  # an hour
    python benchmarks/peers.py --readme RESULT.json     # the table between README.md's markers, of a stored result

Each peer is a torchrun of CPU ranks. Up to four are in memory, and one runs at a time. The peers are in peers_rank.py
and peers_packed.py. benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
from bench import Report, command_line, facts, spread, write
from peers_data import DATA, PADDED_LAYOUTS, RATE, lengths_of, write_start
from peers_environments import CANNOT_RUN, FOREIGN, environment_of
from peers_table import draw, rewrite_readme, show_rows
from provenance import REPOSITORY
from safetensors.torch import load_file
from torchruns import deepspeed_missing, end, last_of, start
from zero_json import deepspeed_config

EQUAL_WITHIN = 1e-5
CLIP = 1.0
AT_ONCE = 3
"""Peers beside ours that wait in memory while another has its round."""
ADAMW = {"lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "fused": True}
PEERS = {
    "ours packed": "this project, packed rows: `fit` with its reports, heartbeats and saver; zero3",
    "ours padded": "the same with `pack=false`: a step's samples sorted by length; zero3",
    "by hand, our model": "an FSDP2 loop of ten lines around our model, on the packed rows of the first peer",
    "by hand": "the same loop around transformers' model, padded",
    "hf": "transformers' Trainer, padded; on a CPU it is DDP, whatever is asked for",
    "zero2": "DeepSpeed ZeRO-2, transformers' model, padded",
    "zero3": "DeepSpeed ZeRO-3, transformers' model, padded",
    "original": "LLaVA's own way: DeepSpeed ZeRO-3, padded, everything recomputed",
    "rows": "the loop by hand around transformers' model, packed: rows of several samples, with its own mask",
    "row": "the loop by hand around transformers' model, packed: one row, SDPA a sample at a time",
    "trl": "TRL's SFTTrainer, packed (best fit, padding-free); on a CPU it is DDP",
    "automodel": "NeMo Automodel's Llama, packing and collator; FSDP2 by hand",
}
OURS, SAME_MODEL = "ours packed", "by hand, our model"
PADDED_PEERS = ("by hand", "hf", "zero2", "zero3", "original")
PACKED_PEERS = ("rows", "row", "trl", "automodel")
TEXT_PEERS = ("trl", "automodel")
"""They train on text alone."""
AGAINST: dict[str, Report] = {
    "padded": {
        "ranks": 2, "rows": 16, "steps": 1, "repeats": 5, "data": ["mixed", "equal"],
        "peers": [OURS, "ours padded", SAME_MODEL, *PADDED_PEERS],
    },
    "packed": {
        "ranks": 4, "rows": 4, "steps": 8, "repeats": 3, "data": list(DATA),
        "peers": [OURS, "row", "rows", SAME_MODEL, "by hand", *TEXT_PEERS],
    },
}  # fmt: skip
"""What is compared if nothing else is asked for."""
WARM_UP = 2
"""Steps of a peer's first round, which is not timed."""


class Peer:
    """One torchrun, and the connections to its ranks."""

    def __init__(self, name: str, data: list[str], process: subprocess.Popen, log: Path):
        self.name = name
        self.data = data
        self.process = process
        self.log = log
        self.connections: dict[int, Connection] = {}
        self.seen: dict[str, list[Report]] = {name: [] for name in data}
        """Rounds of each data set, the warm-up first."""

    def fail(self, problem: str) -> SystemExit:
        return SystemExit(f"{last_of(self.log)}\n{self.name}: {problem}; the end of its output is above")

    def run_round(self, data: str, steps: int, timeout: float) -> None:
        """Run the first `steps` steps of a data set, and keep their losses and the seconds of a step; CPU seconds are
        those of all ranks together."""
        try:
            for connection in self.connections.values():
                connection.send((data, steps))
        except OSError as error:
            raise self.fail("a rank has ended") from error
        found = [self.answer(connection, timeout) for connection in self.connections.values()]
        assert len(found[0]["losses"]) == steps
        self.seen[data].append({
            "cpu": sum(f["cpu"] for f in found) / steps,
            "wall": max(f["wall"] for f in found) / steps,
            "losses": mean_of_ranks([f["losses"] for f in found]),
            "norms": mean_of_ranks([f["norms"] for f in found]),
        })  # fmt: skip

    def answer(self, connection: Connection, timeout: float) -> Report:
        if not connection.poll(timeout):
            raise self.fail(f"no answer within {timeout} s (--timeout)")
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise self.fail("a rank has ended") from error


def mean_of_ranks(values: list[list[float]]) -> list[float]:
    """A peer tells each rank the loss of all, or each rank of its own part of it times the ranks."""
    return [statistics.mean(of_step) for of_step in zip(*values, strict=True)]


# Starting


def missing(peer: str) -> str | None:
    """Why a peer cannot run here; None where it can."""
    if peer in ("zero2", "zero3", "original"):
        return deepspeed_missing()
    if peer in ("hf", "trl") and importlib.util.find_spec("accelerate") is None:
        return "accelerate, which transformers' Trainer needs, is not installed here: pip install -e '.[bench]'"
    return None


def plan_of(peer: str, data: list[str], work: Path, listener: Listener, options: argparse.Namespace) -> Report:
    zero = 2 if peer == "zero2" else 3
    return {
        "peer": peer,
        "address": listener.address,
        "key": options.key,
        "work": str(work),
        "data": data,
        "rounds": (1 + options.repeats) * len(data),
        "timeout": options.timeout,
        "adamw": ADAMW,
        "clip": CLIP,
        "options": {name: getattr(options, name) for name in ("steps", "hidden", "layers", "padded", "ranks", "rows")},
        "deepspeed": deepspeed_config(zero, False, options.hidden, options.rows, 1, CLIP),
    }


def start_peers(
    names: list[str], data: list[str], work: Path, listener: Listener, options: argparse.Namespace
) -> list[Peer]:
    """Start peers one after the other: with too few cores for all, the libraries of some would time out."""
    peers = []
    try:
        for number, name in enumerate(names):
            plan = work / f"plan{number}.json"
            plan.write_text(json.dumps(plan_of(name, data, work, listener, options)))
            log = work / f"log{number}.txt"
            script = str(Path(__file__).with_name("peers_rank.py"))
            python = environment_of(name, options.environments)
            peers.append(Peer(name, data, start([script, str(plan)], options.ranks, log, python=python), log))
            meet(peers[-1], listener, options)
    except BaseException:
        end_all(peers)
        raise
    return peers


def meet(peer: Peer, listener: Listener, options: argparse.Namespace) -> None:
    """Wait until all ranks of a peer have built their model and connected.

    Raises:
        SystemExit: it has ended instead, or takes too long.
    """
    deadline = time.monotonic() + options.timeout
    socket: Any = listener._listener._socket  # type: ignore[attr-defined]  # a Listener alone cannot be waited for
    while len(peer.connections) < options.ranks:
        if wait([socket], 0.5):
            try:
                connection = listener.accept()
                name, rank = connection.recv()
            except (EOFError, OSError) as error:
                raise peer.fail("a rank has ended") from error
            assert name == peer.name
            peer.connections[rank] = connection
        elif peer.process.poll() is not None:
            raise peer.fail(f"ended with exit code {peer.process.returncode}")
        elif time.monotonic() > deadline:
            raise peer.fail(f"was not ready after {options.timeout} s (--timeout)")


def end_all(peers: list[Peer]) -> None:
    for peer in peers:
        if peer.process.poll() is None:
            end(peer.process)


# Measuring


def groups(names: list[str], data: list[str]) -> list[tuple[list[str], list[str]]]:
    """Divide peers into groups that fit into memory: their names, and their data sets. The first peer, ours, is in
    every group, so that each is timed beside it. Text has groups of its own, because some peers begin with it and all
    must begin with the same weights."""
    found = []
    for own, left_out in ((without(data, ["text"]), TEXT_PEERS), ([d for d in data if d == "text"], PADDED_PEERS)):
        first, *others = without(names, left_out)
        parts = [[first, *others[n : n + AT_ONCE]] for n in range(0, len(others), AT_ONCE)] or [[first]]
        found += [(part, own) for part in parts if own]
    return found


def without(names: list[str], left_out: Iterable[str]) -> list[str]:
    return [name for name in names if name not in left_out]


def measure(peers: list[Peer], options: argparse.Namespace) -> None:
    """Run a round of each peer to warm up, check that all have the same losses, and run the timed rounds, in which the
    peers take turns in this order and then in the opposite one."""
    for peer in peers:
        for data in peer.data:
            peer.run_round(data, min(WARM_UP, options.steps), options.timeout)
    differences = check_equal({peer.name: peer.seen for peer in peers})
    print(f"{', '.join(peer.name for peer in peers)}: equal before anything is timed: {differences}")
    for repeat in range(options.repeats):
        for peer in peers if repeat % 2 == 0 else peers[::-1]:
            for data in peer.data:
                peer.run_round(data, options.steps, options.timeout)
        print(f"round {repeat + 1} of {options.repeats}")


def merge(seen: dict[str, dict[str, list[Report]]], peers: list[Peer]) -> None:
    """Add a group's rounds to those of the groups before. A peer's warm-up round is kept once. Each round is compared
    with the same round of the group's first peer, which is ours."""
    for peer in peers:
        for data, rounds in peer.seen.items():
            for own, first in zip(rounds, peers[0].seen[data], strict=True):
                own["times_ours"] = own["cpu"] / first["cpu"]
        known = seen.setdefault(peer.name, {})
        for data in peer.data:
            known.setdefault(data, peer.seen[data][:1]).extend(peer.seen[data][1:])


def check_equal(seen: dict[str, dict[str, list[Report]]]) -> dict[str, float]:
    """Compare the losses and norms of all peers' warm-up steps with those of the first peer.

    Returns:
        The largest relative differences of losses and gradient norms, in the first step and in all.

    Raises:
        SystemExit: they do not compute the same, so that their cost cannot be compared.
    """
    differences: dict[str, float] = {}
    first = next(iter(seen))
    for name, rounds in seen.items():
        begin = next(iter(rounds))
        for data in rounds:
            mine, other = rounds[data][0], seen[first][data][0]
            for what in ("losses", "norms"):
                if not mine[what] or not other[what]:  # a peer need not tell its norm
                    continue
                apart = [abs(a - b) / abs(b) for a, b in zip(mine[what], other[what], strict=True)]
                if data == begin:
                    differences[f"first {what}"] = max(differences.get(f"first {what}", 0), apart[0])
                differences[f"all {what}"] = max(differences.get(f"all {what}", 0), *apart)
                bound = EQUAL_WITHIN if what == "losses" else 10 * EQUAL_WITHIN
                checked = apart if what == "losses" else apart[:1] if data == begin else []
                if not all(a <= bound for a in checked):
                    raise SystemExit(
                        f"{name}, {data}: {what} {mine[what]} are not those of {first}, {other[what]} (bound {bound:g})"
                    )
    return differences


# What is reported


def rows_of(seen: dict[str, dict[str, list[Report]]], work: Path, options: argparse.Namespace) -> list[Report]:
    rows = []
    for data in options.data:
        real, computed = tokens_of(work / "samples" / data, options)
        for name, rounds in seen.items():
            if data not in rounds:
                continue
            timed = rounds[data][1:]
            cpu, wall = ([r[clock] for r in timed] for clock in ("cpu", "wall"))
            rows.append({
                "data": data,
                "peer": name,
                "cpu_seconds": spread(cpu),
                "wall_seconds": spread(wall),
                "times_ours": [r["times_ours"] for r in timed],
                "real_tokens": real,
                "computed_positions": computed if name in PADDED_PEERS else None,
                "real_tokens_per_cpu_second": real / min(cpu),
                "real_tokens_per_cpu_second_median": real / statistics.median(cpu),
                "first_loss": rounds[data][0]["losses"][0],
                "first_norm": next(iter(rounds[data][0]["norms"]), None),
            })  # fmt: skip
    return rows


def tokens_of(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Mean of a step: positions of samples, and positions that the padded peers compute. A row without a label is no
    sample."""
    real = computed = 0
    for rank in range(options.ranks):
        tensors = load_file(folder / f"rank{rank}.safetensors")
        for number in range(options.steps):
            mask, labels = (tensors[f"{number}.0.{name}"] for name in ("attention_mask", "labels"))
            real += int(mask[(labels >= 0).any(1)].sum())
            computed += mask.numel()
    return real / options.steps, computed / options.steps


def goals_of(rows: list[Report]) -> list[Report]:
    """What this project wants to reach, and whether it has; without the peer that a goal needs there is none."""
    rate = {(r["data"], r["peer"]): 1 / statistics.median(r["times_ours"]) for r in rows}
    found: list[Report] = []

    def goal(what: str, data: str, ours: str, others: list[str], least: float) -> None:
        known = [rate[data, o] for o in others if (data, o) in rate]
        if known and (data, ours) in rate:
            value = rate[data, ours] / max(known)
            found.append({"what": what, "value": value, "goal": least, "met": value >= least})

    for data, least in (("mixed", 1.2), ("equal", 1.0), ("text", 1.0)):
        goal(f"{data}: ours packed / the best packed peer", data, OURS, list(PACKED_PEERS), least)
    goal("mixed lengths: ours packed / the best padded peer", "mixed", OURS, list(PADDED_PEERS), 1.6)
    goal("equal lengths: ours packed / FSDP2 by hand", "equal", OURS, ["by hand"], 0.99)
    goal("equal lengths: ours packed / DeepSpeed ZeRO-3", "equal", OURS, ["zero3"], 1.0)
    for data in DATA:
        goal(f"{data} lengths: the trainer beside the loop by hand, our model", data, OURS, [SAME_MODEL], 1 / 1.01)
    return found


def versions(peers: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that all peers have in common, and of those that a peer has to itself."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate", "trl"):
        if importlib.util.find_spec(name) is not None:
            found[name] = importlib.metadata.version(name)
    return found | {name: version for peer in peers if peer in FOREIGN for name, version in FOREIGN[peer].items()}


# The whole


def main() -> None:
    options = parse()
    if options.readme is not None:
        rewrite_readme(options.readme)
        return
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # else the peers would stay behind
    report = facts("how many real tokens does a CPU second train, beside every peer?", options)
    options.key = secrets.token_hex(16)
    not_run = {name: why for name in options.peers if (why := missing(name)) is not None}
    if options.against == "packed":
        not_run |= CANNOT_RUN
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        work = Path(folder)
        write_start(work, options)
        with Listener(
            str(work / "socket"), "AF_UNIX", backlog=options.ranks, authkey=bytes.fromhex(options.key)
        ) as listener:
            seen: dict[str, dict[str, list[Report]]] = {}
            for names, data in groups(without(options.peers, not_run), options.data):
                peers = start_peers(names, data, work, listener, options)
                try:
                    measure(peers, options)
                    for peer in peers:
                        peer.process.wait(options.timeout)
                finally:
                    end_all(peers)
                merge(seen, peers)
        differences = check_equal(seen)
        rows = rows_of(seen, work, options)
    report |= {
        "ranks": options.ranks,
        "rows_of_a_micro_batch": options.rows,
        "precision": "fp32",
        "versions": versions(seen),
        "samples": {data: len(lengths_of(data, options)) for data in options.data},
        "peers": {name: PEERS[name] for name in options.peers},
        "not_run": not_run | {"GPU": "this benchmark runs on CPUs only"},
        "equality": differences | {"bound": EQUAL_WITHIN},
        "goals": goals_of(rows),
        "rows": rows,
    }
    show_rows(report)
    for goal in report["goals"]:
        print(f"{goal['what']}: {goal['value']:.3f}, goal {goal['goal']:.2f}: {'met' if goal['met'] else 'MISSED'}")
    name = "peers-cpu" if options.against == "padded" else f"packed-peers-{options.hidden}-cpu"
    write(report, name, options.folder, draw)


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        "--against",
        choices=AGAINST,
        default="padded",
        help="the default peers, data sets and sizes, each of which can be given instead",
    )
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, help="peers to compare with this project, which always runs"
    )
    parser.add_argument("--data", nargs="+", choices=DATA, help="lengths of samples")
    parser.add_argument("--repeats", type=int, help="timed rounds of every peer")
    parser.add_argument("--steps", type=int, help="steps of a round, of each data set")
    parser.add_argument("--ranks", type=int, help="CPU processes of a peer")
    parser.add_argument("--rows", type=int, help="samples of a rank in a step")
    parser.add_argument(
        "--environments", type=Path, default=REPOSITORY / ".peers",
        help="folder where peers that need other libraries get an environment each",
    )  # fmt: skip
    parser.add_argument("--hidden", type=int, default=512, help="width of the language model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--padded", choices=PADDED_LAYOUTS, default="grouped",
        help="the padded peers' rows: as LLaVA's sampler deals them, or sorted by length within a step, as ours are",
    )  # fmt: skip
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a peer may take to start, or a round")
    parser.add_argument("--quick", action="store_true", help="a small model, one step, two rounds")
    parser.add_argument("--readme", type=Path, metavar="RESULT", help="write a stored result's table into README.md")
    options = parser.parse_args()
    for name, value in AGAINST[options.against].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.peers = [OURS, *without(options.peers, [OURS])]
    if options.quick:
        options.hidden, options.layers, options.steps, options.repeats = 64, 2, 1, 2
    if options.hidden % 32:
        parser.error(f"--hidden {options.hidden} must be a multiple of 32, the width of a head")
    if min(options.repeats, options.steps, options.ranks, options.rows) < 1:
        parser.error("--repeats, --steps, --ranks and --rows must be at least 1")
    return options


if __name__ == "__main__":
    main()
