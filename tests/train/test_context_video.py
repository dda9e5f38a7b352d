"""A video of 32K tokens is trained on four ranks that process it together, with the command that users type."""

import json
import subprocess
from pathlib import Path

import pytest
from commands import TORCHRUN
from safetensors.torch import load_file
from small import write_json
from tiled import loaded, parts_of
from videos import write_video

SIDE = 28
"""Patches along a side of a frame: 14 x 14 tokens a frame."""
FRAMES = 168
TOKENS = FRAMES * (SIDE // 2) ** 2 + 1


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny widths; frames and positions of a real size. Four heads of attention, for four ranks."""
    folder = parts_of("siglip_qwen3", tmp_path_factory.mktemp("parts"))
    size = 14 * SIDE
    for path, values in (
        ("vision/config.json", {"image_size": size}),
        ("vision/preprocessor_config.json", {"size": {"height": size, "width": size}}),
        (
            "language/config.json",
            {"max_position_embeddings": 40_000, "num_attention_heads": 4, "num_key_value_heads": 2},
        ),
    ):
        write_json(folder / path, json.loads((folder / path).read_text()) | values)
    return folder


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("film")
    (folder / "images").mkdir()
    write_video(folder / "images" / "long.mp4", frames=FRAMES, rate=4)
    turns = [{"from": "human", "value": "<image>\nwhat moves"}, {"from": "gpt", "value": "a red square"}]
    text = [{"from": "human", "value": "how many"}, {"from": "gpt", "value": "two"}]
    records = [{"id": f"v{n}", "video": "long.mp4", "conversations": turns} for n in range(2)]
    write_json(folder / "film.json", [*records, {"id": "t", "conversations": text}])
    return folder


def run(parts: Path, film: Path, output: Path, *overrides: str) -> list[dict]:
    words = [
        f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}", "model.projector=random",
        "model.random_weights=true", "model.patch_merge=spatial_unpad", "model.select_layer=-1",
        "model.select_feature=auto", "data=llava_json", f"data.path={film / 'film.json'}",
        f"data.images={film / 'images'}", "data.image_aspect_ratio=anyres_max", "data.max_tiles=2",
        "data.video_fps=4", f"data.video_frames={FRAMES}", "data.max_length=33400", "data.workers=0",
        "precision=fp32", "activation_checkpointing=full", "tokens_per_micro_batch=8350", "global_batch_size=3",
        "optim.lr=1e-3", "checkpoint.every=1", "sharding=zero3", "export.dtype=fp32", f"output_dir={output}",
    ]  # fmt: skip
    subprocess.run([*TORCHRUN, "4", "-m", "llava_fsdp.train", *words, *overrides], check=True, timeout=900)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_film_trains_resumes_and_is_exported(parts: Path, film: Path, tmp_path: Path) -> None:
    whole = run(parts, film, tmp_path / "whole", "parallel.context=4", "epochs=9", "max_steps=2")
    assert whole[0]["tokens"] > 2 * TOKENS > 64_000
    run(parts, film, tmp_path / "parts", "parallel.context=4", "epochs=9", "max_steps=1", "export.enabled=false")
    more = "parallel.context=2", "tokens_per_micro_batch=16700", "epochs=9", "max_steps=2"
    resumed = run(parts, film, tmp_path / "parts", *more)
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in whole], rel=1e-5)
    loaded(tmp_path / "whole" / "export")
    one, other = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys() and max(float((one[n] - other[n]).abs().max()) for n in one) < 1e-5
