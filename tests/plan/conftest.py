"""Fixtures of the planner's tests."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def wide_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `parts`, wide enough that tensors outweigh scalars; no cut into shards is even."""
    from small import write_parts

    folder = write_parts(tmp_path_factory.mktemp("wide"))
    path = folder / "language" / "config.json"
    wide = {"hidden_size": 130, "intermediate_size": 310, "num_attention_heads": 5, "num_key_value_heads": 5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **wide, "head_dim": 26, "num_hidden_layers": 5}))
    return folder
