"""What the reader of an exported folder is told about other programs."""

import logging
from pathlib import Path

import pytest
import torch
from small import make_config
from tiled import parts_of

from llava_fsdp.config import AspectRatio
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.export.card.model_card import REMARKS, FolderKind
from llava_fsdp.export.write.formats import source_of_run, write_hf_except_weights, write_notes
from llava_fsdp.export.write.remarks import log_remarks, remarks_on
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts

ALL = tuple(grid_sizes([], 28, AspectRatio.anyres_max))


@pytest.mark.parametrize(
    ("aspect", "most", "sizes", "told"),
    [
        (AspectRatio.anyres_max, 9, ALL, False),
        (AspectRatio.anyres_max, 4, ALL, True),
        (AspectRatio.anyres_max, 16, ALL, True),
        (AspectRatio.anyres_max, 4, ((28, 56), (112, 28)), False),
        (AspectRatio.anyres_max, 3, ((28, 56), (112, 28)), True),
        (AspectRatio.anyres_max, 16, ((84, 84),), False),
        (AspectRatio.anyres_max, 16, ((84, 112),), True),
        (AspectRatio.anyres, 4, ALL, False),
        (AspectRatio.pad, 4, (), False),
    ],
)
def test_a_limit_on_tiles_that_vllm_does_not_read_is_told(
    aspect: AspectRatio, most: int, sizes: tuple[tuple[int, int], ...], told: bool
) -> None:
    """Wherever an image of the model can be cut into more tiles than the smaller of the two limits."""
    found = remarks_on(ImageTokens(aspect, 28, 4, sizes, max_tiles=most), None)
    assert [f"data.max_tiles={most}" in remark and "vLLM" in remark for remark in found] == [True] * told


def test_remarks_stand_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert log_remarks([]) == [] and not caplog.records
    assert log_remarks(["one thing", "another"]) == ["one thing", "another"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


@pytest.mark.parametrize("most", [2, 9])
def test_an_export_of_llava_onevision_tells_its_limit(
    most: int, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also before the first step, which writes the same files."""
    cfg = make_config(
        parts_of("siglip_qwen3", tmp_path / "parts"), dataset, tmp_path / "run", "data.image_aspect_ratio=anyres_max",
        f"data.max_tiles={most}", "model.patch_merge=spatial_unpad", "model.select_layer=-1", "data.max_length=512",
        "model.select_feature=auto", "data.template=v1",
    )  # fmt: skip
    folder = tmp_path / "export"
    folder.mkdir()
    source = source_of_run(build_llava(find_parts(cfg.model), cfg.model, torch.float32), cfg, "", 0)
    remarks = write_hf_except_weights(source, torch.float32, folder).remarks
    assert bool(remarks) == ("data.max_tiles=2" in caplog.text) == (most == 2)
    write_notes(source, folder, FolderKind.llava_of_transformers, {REMARKS: remarks})
    assert ("data.max_tiles=2" in (folder / "README.md").read_text()) == (most == 2)
