"""A program for llama.cpp, which a test starts in an environment with xllamacpp and gguf: what its Jinja makes of chat
templates.

Its argument is a file with a list of {"template": code, "messages": [conversation]}. It prints a list with the texts
that llama.cpp makes of the conversations, or with its error, for each of them.
"""

import json
import multiprocessing
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

SECONDS, TRIES = 20, 5
"""Seconds for all conversations of a template, and how often they are tried."""


def write_model(path: Path) -> None:
    """A language model with one layer and the 256 bytes as its tokens."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *([6] * 256)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    square, rows = np.zeros((32, 32), dtype=np.float32), np.zeros((len(tokens), 32), dtype=np.float32)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {"token_embd": rows, "output": rows, **{f"blk.0.{name}": square for name in names}}
    tensors |= {name: np.ones(32, dtype=np.float32) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rendered(model: Path, template: str, conversations: list[Any]) -> list[str]:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    asked = xllamacpp.CommonParams()
    asked.model.path, asked.chat_template, asked.use_jinja = str(model), template, True
    asked.n_ctx, asked.n_parallel, asked.warmup, asked.verbosity = 512, 1, False, 0
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
    server, found = xllamacpp.Server(asked), []
    for messages in conversations:
        body = json.dumps({"messages": messages}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.listening_address}/apply-template", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.loads(answer.read())["prompt"])
    return found


def answer(model: Path, own: dict[str, Any]) -> list[str] | str:
    """What `rendered` returns, or its error as a text."""
    try:
        return rendered(model, own["template"], own["messages"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as made:
        model = Path(made) / "model.gguf"
        write_model(model)
        for own in json.loads(Path(sys.argv[1]).read_text()):
            for _ in range(TRIES):  # xllamacpp's server hangs at about one start in ten
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    try:
                        found.append(pool.apply_async(answer, (model, own)).get(SECONDS))
                        break
                    except multiprocessing.TimeoutError:
                        continue
            else:
                found.append(f"no answer in {TRIES} tries of {SECONDS} seconds")
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
