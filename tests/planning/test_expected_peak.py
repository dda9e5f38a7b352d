"""The plan's worst moment of the run that begins, for its page."""

from pathlib import Path

from harness import single_world
from small import make_config

from llava_fsdp.model.parts import find_parts
from llava_fsdp.planning.auto import expected_peak
from llava_fsdp.planning.samples import Samples


def test_more_in_a_row_is_more_memory(parts: Path, dataset: Path, tmp_path: Path) -> None:
    samples, found = Samples(100, 0.7, 20, 30, "imagined"), []
    for tokens in (256, 1024):
        cfg = make_config(parts, dataset, tmp_path, f"tokens_per_micro_batch={tokens}", "global_batch_size=64")
        found.append(expected_peak(cfg, single_world(), find_parts(cfg.model), samples))
    assert 0 < found[0] < found[1]
