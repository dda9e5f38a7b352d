"""Users without an entry in /etc/passwd and without HOME."""

import getpass
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from llava_fsdp.runtime.home import ensure_home


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process of a user whom the system does not know; returns the folder of temporary files."""

    def fail(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    return tmp_path


def test_a_user_without_a_home_gets_one_that_stays(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError):
        Path("~/x").expanduser()
    home = ensure_home()
    assert home is not None and Path("~/x").expanduser() == Path(home) / "x" and getpass.getuser()
    assert os.stat(home).st_mode & 0o777 == 0o700 and Path(home).parent == unknown
    assert ensure_home() is None, "it is set now"
    monkeypatch.setenv("HOME", "")
    assert ensure_home() == home


@pytest.mark.parametrize("kind", ["open", "file", "link"])
def test_a_folder_that_another_user_may_have_made_is_no_home(kind: str, unknown: Path) -> None:
    taken = unknown / f"llava_fsdp-{os.getuid()}"
    if kind == "open":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "file":
        taken.touch()
    else:
        (unknown / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(unknown / "elsewhere")
    home = ensure_home()
    assert home not in (None, str(taken)) and os.stat(str(home)).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("home", ["/somewhere", None])
def test_a_home_that_is_there_stays(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set by the user, or known to the system."""
    monkeypatch.setenv("HOME", home or "")
    assert ensure_home() is None and os.environ["HOME"] == (home or "")
