"""How many CPU seconds does a step of a whole model of transformers take, compared with transformers' Trainer and with
an expert's packed loop, on the same weights, samples and steps?

    .venv-any/bin/python benchmarks/whole_peers.py      # ten minutes; ./launch/test.sh --any makes .venv-any

Each peer is a process. All are in memory, and one runs at a time. The peers are in whole_peers_rank.py.
benchmarks/README.md explains the result.
"""

from __future__ import annotations

import tests_support  # noqa: F401

# isort: split
import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from statistics import median

import torch
from bench import Report, command_line, facts, show, spread, write_json
from peers import ADAMW, CLIP, EQUAL_WITHIN, Peer, check_equal, end_all, measure, meet, merge, versions
from torchruns import places
from transformers import AutoConfig, AutoModelForImageTextToText
from whole_peers_data import BLANK, DATA, Steps, read_steps, write_start

OURS, PADDED, ROW = "ours packed", "hf", "row"
PEERS = {
    OURS: "this project, packed rows: `fit` with its reports, heartbeats and saver",
    PADDED: "transformers' Trainer, padded rows in the drawn order",
    ROW: "a loop by hand around transformers' class: one row, SDPA a sample at a time, logits of labels alone",
}
GOALS = {PADDED: 1.6, ROW: 1.0}
"""How many times our CPU seconds a peer should take on data with images."""
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1099511627776"}
"""glibc keeps free memory, as it does in this project's trainings on a CPU; for all peers."""


def plan_of(peer: str, data: list[str], work: Path, listener: Listener, options: argparse.Namespace) -> Report:
    return {
        "peer": peer,
        "address": listener.address,
        "key": options.key,
        "work": str(work),
        "data": data,
        "rounds": (1 + options.repeats) * len(data),
        "adamw": ADAMW,
        "clip": CLIP,
        "options": {name: getattr(options, name) for name in ("steps", "ranks", "rows", "frozen")},
    }


def start_peers(work: Path, listener: Listener, options: argparse.Namespace) -> list[Peer]:
    peers = []
    script = str(Path(__file__).with_name("whole_peers_rank.py"))
    try:
        for number, name in enumerate(PEERS):
            plan, log = work / f"plan{number}.json", work / f"log{number}.txt"
            data = [*options.data, *[BLANK] * (name == OURS and "text" in options.data)]
            plan.write_text(json.dumps(plan_of(name, data, work, listener, options)))
            peers.append(Peer(name, data, start([sys.executable, script, str(plan)], log), log))
            meet(peers[-1], listener, options)
    except BaseException:
        end_all(peers)
        raise
    return peers


def start(command: list[str], log: Path) -> subprocess.Popen:
    """A process of one thread, without torchrun: with it transformers' Trainer would be DDP of one rank."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": places(), **MALLOC}
    with log.open("w") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def sizes_of(steps: Steps) -> Report:
    """Means of a step: tokens, positions of padded rows, tokens with a label, and patches of the vision part."""
    tokens = [[sample["input_ids"].shape[1] for sample in step] for step in steps]
    return {
        "tokens": sum(map(sum, tokens)) / len(steps),
        "padded_positions": sum(len(own) * max(own) for own in tokens) / len(steps),
        "label_tokens": sum(int((s["labels"] >= 0).sum()) for step in steps for s in step) / len(steps),
        "patches": sum(len(s.get("pixel_values", ())) for step in steps for s in step) / len(steps),
    }


def weights_of(folder: Path) -> Report:
    """Numbers of weights in the matrices of a Qwen2.5-VL, by what they are multiplied with: tokens, those of images,
    labels or patches."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    parts = {
        "tokens": [model.model.language_model.layers],
        "image_tokens": [model.model.visual.merger],
        "patches": [model.model.visual.blocks, model.model.visual.patch_embed],
        "labels": [model.lm_head],
    }
    return {
        name: sum(p.numel() for module in own for p in module.parameters() if p.ndim > 1) for name, own in parts.items()
    }


def ideal_of(sizes: Report, weights: Report) -> Report:
    """What padding alone can lose: products of matrices of a padded step over those of a packed step, whose logits are
    of labels alone. Attention is left out. With a frozen vision part, only its forward pass remains."""
    found = {}
    for name, of_vision in (("all parts train", 1.0), ("vision part frozen", 1 / 3)):
        vision = sizes["patches"] * (weights["patches"] * of_vision + weights["image_tokens"] / 4)
        packed = vision + sizes["tokens"] * weights["tokens"] + sizes["label_tokens"] * weights["labels"]
        padded = vision + sizes["padded_positions"] * (weights["tokens"] + weights["labels"])
        found[name] = {"padded_over_packed": padded / packed, "share_of_vision": vision / packed}
    return found


def rows_of(seen: dict[str, dict[str, list[Report]]]) -> list[Report]:
    return [
        {
            "data": data,
            "peer": name,
            "cpu_seconds": spread([r["cpu"] for r in rounds[1:]]),
            "times_ours": [r["times_ours"] for r in rounds[1:]],
            "first_loss": rounds[0]["losses"][0],
            "first_norm": rounds[0]["norms"][0],
        }
        for name, own in seen.items()
        for data, rounds in own.items()
    ]


def goals_of(rows: list[Report]) -> list[Report]:
    found = []
    for row in rows:
        if row["data"] != "text" and (goal := GOALS.get(row["peer"])) is not None:
            value = median(row["times_ours"])
            own = {"data": row["data"], "peer": row["peer"], "value": value, "goal": goal}
            found.append(own | {"met": value >= goal})
    return found


def blank_cost(rows: list[Report]) -> Report | None:
    """CPU seconds of our step of text with a blank image over those of the same step without, in each round."""
    own = {row["data"]: row["cpu_seconds"]["all"] for row in rows if row["peer"] == OURS}
    if "text" not in own:
        return None
    times = [a / b for a, b in zip(own[BLANK], own["text"], strict=True)]
    return {"times": times, "median": median(times)}


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # else the peers would stay behind
    report = facts("how many CPU seconds does a step of a whole model take, beside its peers?", options)
    options.key, options.ranks = secrets.token_hex(16), 1
    with tempfile.TemporaryDirectory(prefix="whole-peers-") as folder:
        work = Path(folder)
        write_start(work, options)
        sizes = {data: sizes_of(read_steps(work, data)) for data in options.data}
        weights = weights_of(work / "weights")
        ideal = {data: ideal_of(own, weights) for data, own in sizes.items()}
        print(sizes, ideal)
        with Listener(str(work / "socket"), "AF_UNIX", authkey=bytes.fromhex(options.key)) as listener:
            peers = start_peers(work, listener, options)
            try:
                measure(peers, options)
                for peer in peers:
                    peer.process.wait(options.timeout)
            finally:
                end_all(peers)
        seen: dict[str, dict[str, list[Report]]] = {}
        merge(seen, peers)
    rows = rows_of(seen)
    report |= {
        "precision": "fp32",
        "versions": versions([]),
        "peers": PEERS,
        "sizes": sizes,
        "products": ideal,
        "equality": check_equal(seen) | {"bound": EQUAL_WITHIN},
        "goals": goals_of(rows),
        "blank_image": blank_cost(rows),
        "rows": rows,
    }
    lines = [
        (f"{row['peer']}, {row['data']}", f"{row['cpu_seconds']['median']:.3f}", f"{median(row['times_ours']):.3f} x")
        for row in rows
    ]
    show("CPU seconds of a step", ("peer, data", "median", "ours packed is"), lines)
    name = "whole-peers-frozen-cpu" if options.frozen else "whole-peers-cpu"
    print(f"wrote {write_json(report, name, options.folder)}")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help="samples")
    parser.add_argument("--repeats", type=int, default=4, help="timed rounds of every peer")
    parser.add_argument("--steps", type=int, default=3, help="steps of a round, of each data set")
    parser.add_argument("--rows", type=int, default=8, help="samples of a step")
    parser.add_argument("--hidden", type=int, default=512, help="width of the language model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--frozen", action="store_true", help="the vision part is frozen, as in LLaVA's recipe")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a peer may take to start, or a round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
