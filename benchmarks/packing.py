"""What does packing save compared with padded rows? Some ten minutes on an idle core.

    python benchmarks/packing.py            # one process, one thread

benchmarks/README.md explains the result.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench import Report, clock, command_line, composed, facts, in_turns, show, spread, write
from samples import (
    IMAGE,
    LONGEST,
    MEAN_TEXT,
    MEAN_TEXT_ONLY,
    RANKS,
    ROWS,
    TAILS,
    TEXT_ONLY,
    Lengths,
    grouped,
    write_model,
    write_records,
)

from llava_fsdp.config import Config, Normalize
from llava_fsdp.data.batching.batch import Step, StepFacts
from llava_fsdp.data.batching.collate import Collator
from llava_fsdp.data.batching.llava_samplers import split_into
from llava_fsdp.data.batching.packing import split_step
from llava_fsdp.data.batching.tile_inputs import Row
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import TrainState

TOLERANCE = 1e-5
GROUPED = "padded, grouped by modality and length"
RANDOM = "padded, random order"
SORTED = "padded, sorted by length (pack=false)"
PACKED = "packed (pack=true)"
LAYOUTS = (GROUPED, RANDOM, SORTED, PACKED)
SIDE = 12
"""Patches on a side of an image."""


def step_of_original(tail: str, samples: int) -> Lengths:
    """The first steps with images of the original's epoch. Its steps are of one modality; 19 of 20 have images."""
    lengths, order = grouped(tail)
    first = next(n for n in range(0, len(order), RANKS) if lengths[order[n][0]][1])
    return [lengths[i] for m in order[first : first + samples // ROWS] for i in m]


def configure(work: Path, samples: int, scale: int) -> Config:
    overrides = [
        "stage=finetune", f"model.language={work / 'language'}", f"model.vision={work / 'vision'}",
        "model.projector=random", "data=llava_json", f"data.path={work / 'records.json'}",
        f"data.images={work / 'images'}", f"data.max_length={LONGEST // scale + 64}",
        "data.workers=0", f"output_dir={work / 'run'}", "precision=fp32", "activation_checkpointing=none",
        "export.enabled=false",
        f"global_batch_size={samples}", f"micro_batch_size={ROWS}", "max_steps=1000",
        "optim.lr=0", "optim.projector_lr=0",  # every step is the first one again, so that all must agree
    ]  # fmt: skip
    return composed(overrides)


def micro_batches(state: TrainState, cfg: Config, layout: str) -> Step:
    """All samples as one step, laid out in one of the ways."""
    steps = state.loader.steps
    if layout == PACKED:
        return steps.prepare(0)
    numbers = steps.sampler.samples(0)
    rows: list[Row] = [steps.read_row(number) for number in numbers]
    known = StepFacts(0, samples=len(rows), label_tokens=sum(s.num_labels for s, _ in rows))
    collate = Collator(steps.image_reader, Normalize.step, pack=False)
    if layout == GROUPED:  # the records were written in its order
        cut = split_into(sorted(range(len(rows)), key=lambda place: numbers[place]), ROWS)
    elif layout == RANDOM:
        cut = split_into(list(range(len(rows))), ROWS)
    else:
        more = IMAGE - steps.image_reader.tokens.features
        (cut,) = split_step([len(s.input_ids) + more * bool(s.images) for s, _ in rows], 1, ROWS)
    assert sorted(i for m in cut for i in m) == list(range(len(rows)))
    return Step(known, [collate([rows[i] for i in m], known, len(cut)) for m in cut])


def measure(tail: str, options: argparse.Namespace) -> list[Report]:
    """CPU seconds of a training step of the same samples in every layout; the layouts take turns."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        work, cpu = Path(name), torch.device("cpu")
        write_model(work, options.hidden, options.layers, SIDE)
        write_records(work, step_of_original(tail, options.samples), SIDE * SIDE, options.scale)
        cfg = configure(work, options.samples, options.scale)
        state = build_state(cfg, Parallelism.of(cfg, World(0, 1, 0, 1, cpu)))
        state.model.train()
        steps = {layout: micro_batches(state, cfg, layout) for layout in LAYOUTS}
        results = {layout: run(state, cfg, step) for layout, step in steps.items()}
        check_equal(results)
        seconds: dict[str, list[float]] = {layout: [] for layout in steps}
        for layout in in_turns(LAYOUTS, options.repeats):
            gc.collect()
            started = clock(cpu)
            run(state, cfg, steps[layout])
            seconds[layout].append(clock(cpu) - started)
    real = sum(sum(micro.lengths) for micro in steps[PACKED].micro_batches)
    rows = []
    for layout, step in steps.items():
        computed = sum(m.input_ids.numel() for m in step.micro_batches)
        rows.append({
            "tail": tail, "layout": layout, "micro_batches": len(step.micro_batches), "real_tokens": real,
            "computed_positions": computed, "padding_share": 1 - real / computed,
            "cpu_seconds": spread(seconds[layout]),
            "real_tokens_per_cpu_second": real / min(seconds[layout]),
            "packed_is_times": min(seconds[layout]) / min(seconds[PACKED]),
            "loss": results[layout][0], "gradient_norm": results[layout][1],
        })  # fmt: skip
    print(f"{tail}: timed", flush=True)
    return rows


def run(state: TrainState, cfg: Config, step: Step) -> tuple[float, float]:
    """Loss and gradient norm."""
    state.step = 0
    result = train_step(state, step, cfg, 0.0)
    return result.loss, result.grad_norm


def check_equal(results: dict[str, tuple[float, float]]) -> None:
    """Refuse to time layouts that do not compute the same."""
    loss, norm = results[PACKED]
    for layout, (other, other_norm) in results.items():
        if abs(other - loss) > TOLERANCE * loss or abs(other_norm - norm) > TOLERANCE * norm:
            raise SystemExit(f"{layout}: loss {other} and gradient norm {other_norm}, packed {loss} and {norm}")


def show_rows(rows: list[Report]) -> None:
    heads = ("tail, layout", "padding", "CPU s min", "median", "real tokens / CPU s", "packed is")
    lines = [
        (f"{row['tail']}, {row['layout']}", f"{row['padding_share']:.1%}", f"{row['cpu_seconds']['min']:.2f}",
         f"{row['cpu_seconds']['median']:.2f}", f"{row['real_tokens_per_cpu_second']:,.0f}",
         f"{row['packed_is_times']:.2f} x")
        for row in rows
    ]  # fmt: skip
    show("one training step of the same samples, CPU", heads, lines)


def draw(pyplot: Any, report: Report) -> None:
    """Real tokens a CPU second by tail."""
    _, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for number, layout in enumerate(LAYOUTS):
        rates = [row["real_tokens_per_cpu_second"] for row in report["speed"] if row["layout"] == layout]
        axes.bar([place + 0.2 * number for place in range(len(TAILS))], rates, 0.2, label=layout)
    axes.set_xticks([place + 0.3 for place in range(len(TAILS))], list(TAILS))
    axes.set_ylabel("real tokens a CPU second")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.08))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hidden", type=int, default=256, help="width of the language model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128, help=f"of a timed step, a multiple of {ROWS}")
    parser.add_argument("--scale", type=int, default=4, help="timed samples are as many times shorter than LLaVA's")
    parser.add_argument("--repeats", type=int, default=4, help="of every layout; the fastest counts")
    options = parser.parse_args()
    if options.samples % ROWS or options.hidden % 32:
        parser.error(f"--samples must be a multiple of {ROWS}, --hidden one of 32")
    report = facts("what does packing save compared with padded rows?", options) | {
        "lengths": {
            "picture": IMAGE, "longest": LONGEST, "text_only_share": TEXT_ONLY, "mean_text": MEAN_TEXT,
            "mean_text_only": MEAN_TEXT_ONLY, "sigma_of_log": TAILS,
        },
    }  # fmt: skip
    torch.set_num_threads(1)  # threads that wait for each other burn CPU seconds
    report["speed"] = [row for tail in TAILS for row in measure(tail, options)]
    show_rows(report["speed"])
    write(report, "packing-cpu", options.folder, draw)


if __name__ == "__main__":
    main()
