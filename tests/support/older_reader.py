"""A program for an older transformers, which a test starts with that version on its path: what it makes of exports.

Its arguments are folders. Each has an export, and `asked.pt` with inputs of its model, with texts for its tokenizer,
messages for its chat template, and the name of an image. It writes what it finds, or the error, into `found.pt` there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image


def read(folder: Path) -> dict[str, Any]:
    asked, found = torch.load(folder / "asked.pt"), {}
    if "inputs" in asked:
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        model, said = getattr(transformers, name).from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
        found["dtype"] = str(model.dtype)
        found["amiss"] = sorted(key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if said[key])
        with torch.no_grad():
            found["logits"] = [model.eval()(**inputs).logits for inputs in asked["inputs"]]
    if "texts" in asked:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found["ids"] = [tokenizer(text)["input_ids"] for text in asked["texts"]]
        found["chats"] = [tokenizer.apply_chat_template(own, return_dict=False) for own in asked["messages"]]
        found["ends"] = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    if "image" in asked:
        processor = transformers.AutoProcessor.from_pretrained(folder)
        made = processor(text="<image>\nwhat", images=Image.open(folder / asked["image"]), return_tensors="pt")
        found |= {"image_ids": made["input_ids"].tolist(), "pixels": made["pixel_values"]}
    return found


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:]:
        try:
            found = read(Path(name))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        torch.save({"version": transformers.__version__, **found}, Path(name) / "found.pt")


if __name__ == "__main__":
    main()
