"""What benchmarks/data.py compares before it times anything, and that its smallest run writes a result."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from llava_fsdp.data.images.preprocess import read_preprocessor

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data.py"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module(SCRIPT.stem)
    torch.set_num_threads(threads)


def test_images_are_drawn_from_the_seed_and_cost_what_photos_do(benchmark: ModuleType, tmp_path: Path) -> None:
    for seed in (0, 1):
        image = benchmark.photo(seed, 640, 480)
        image.save(tmp_path / "a.jpg", quality=90)
        assert 50_000 < (tmp_path / "a.jpg").stat().st_size < 62_000
        assert image.tobytes() == benchmark.photo(seed, 640, 480).tobytes()
    assert image.tobytes() != benchmark.photo(0, 640, 480).tobytes()


def test_a_path_that_is_not_exact_is_not_timed(benchmark: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(benchmark.CLIP))
    preprocessor = read_preprocessor(tmp_path)
    files = [tmp_path / "a.png"]
    benchmark.photo(0, 90, 70).save(files[0])
    ways = benchmark.ways_of(preprocessor, tmp_path)
    assert benchmark.compare(files, preprocessor, ways)["fast_mean"] < 2
    exact = ways["exact"]
    with pytest.raises(SystemExit, match=r"a\.png: data\.pixels=exact is not what CLIPImageProcessor makes"):
        benchmark.compare(files, preprocessor, ways | {"exact": lambda file: np.roll(exact(file), 1)})


@pytest.mark.slow
def test_smallest_run(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["data.py", str(tmp_path), "--sizes", "64x48", "--images", "1", "--repeats", "2"])
    benchmark.main()
    (path,) = tmp_path.glob("data-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["format"] for row in rows] == ["JPEG", "PNG", "WEBP"]
    ways = {way: len(seconds["all"]) for row in rows for way, seconds in row["cpu_seconds"].items()}
    assert ways == {"exact": 2, "fast": 2, "processor": 2}
