"""A program that opens GGUF files in llama.cpp, by the package xllamacpp, and asks its server questions.

It is started in a process of its own, because llama.cpp ends the process at some errors. Its arguments are a file with
the task, and the file for the answers. The task has `package` (the folder with xllamacpp), `model`, `mmproj` (files;
mmproj may be null), `settings` (of the server's /completion) and `asked`, a list of {"message": {...}, "image": BASE64
or null}. An answer has `ids` (token ids of the prompt that the chat template makes, without those of an image) and
`answer` (of /completion), or `error`.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any


def main(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer of llama.cpp's server to each question, {"ids", "answer"} or {"error"}. `task` has `package` (a
    folder with xllamacpp), `model` and `mmproj` (GGUF files), `settings` of /completion, and `asked`, a list of
    {"message", "image"}."""
    sys.path.append(task["package"])
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path, params.use_jinja, params.warmup, params.verbosity = task["model"], True, False, 0
    if task["mmproj"] is not None:
        params.mmproj.path = task["mmproj"]
    params.n_ctx, params.n_batch, params.n_parallel = 4096, 512, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine

    def send(path: str, body: dict[str, Any]) -> Any:
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.listening_address}{path}", json.dumps(body).encode(), kind)
        with opener.open(request, timeout=600) as answer:
            return json.loads(answer.read())

    found = []
    for asked in task["asked"]:
        try:
            # the server draws a text at its start that stands for an image in a prompt
            prompt = send("/apply-template", {"messages": [asked["message"]]})["prompt"]
            ids = send("/tokenize", {"content": prompt, "add_special": False, "parse_special": True})["tokens"]
            text = {"prompt_string": prompt, "multimodal_data": [asked["image"]]} if asked["image"] else prompt
            answer = send("/completion", {"prompt": text, **task["settings"]})
            found.append({"ids": ids, "answer": answer})
        except urllib.request.HTTPError as error:
            found.append({"error": f"{error} {error.read().decode(errors='replace')}"})
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
