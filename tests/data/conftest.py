"""Fixtures of the tests of data."""

from collections.abc import Iterator

import pytest
from fake_hub import TOKEN, FakeHub
from huggingface_hub import constants


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hugging Face hub on this machine, empty, which huggingface_hub asks with a user's token."""
    made = FakeHub({})
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield made
    made.close()
