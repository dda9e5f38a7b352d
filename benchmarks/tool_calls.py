"""Does a model learn to call a tool if the labels of its training are found by a search for role markers? For each way
to find labels, trains the same small model with the same seed and steps, and measures it on held-out images.

    python benchmarks/tool_calls.py            # under ten minutes on two idle cores; writes the result into results/
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import tests_support  # noqa: F401
import torch
from provenance import commit, machine
from tool_learning import CHANCE, HELD_OUT, RECORDS, STEPS, Labels, measure, train_with, write_examples

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        held_out = write_examples(data, RECORDS, HELD_OUT)
        for labels in Labels:
            began = time.process_time()
            train_with(labels, data, Path(folder) / labels.name)
            seconds = round(time.process_time() - began)
            shares = measure(Path(folder) / labels.name, held_out, data / "images")
            rows.append({"labels": labels.name, "cpu_seconds": seconds, **shares})
            print(json.dumps(rows[-1]))
    sizes = {"records": RECORDS, "steps": STEPS, "held_out": HELD_OUT, "chance": CHANCE}
    result = {
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        **sizes,
        "rows": rows,
    }
    path = options.to / f"tool-calls-cpu-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
