"""Give a user without a home folder one, as in a container that runs under a number without an entry in /etc/passwd."""

import os
import pwd
import stat
import tempfile


def ensure_home() -> str | None:
    """Set the environment variables HOME and USER, for this process and those that it starts, if HOME is not set and
    the system does not know this user. Python's `expanduser` and `getuser`, and with them torch, the hub's client and
    other libraries, would otherwise fail or write into a folder named `~`.

    Returns:
        The new home folder, which only this user can read: the same one in all commands of this user. None if there is
        a home folder already.
    """
    user = os.getuid()
    if os.environ.get("HOME") or is_known(user):
        return None
    home = os.path.join(tempfile.gettempdir(), f"llava_fsdp-{user}")
    try:
        os.mkdir(home, 0o700)
    except FileExistsError:
        found = os.lstat(home)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:  # another user made it
            home = tempfile.mkdtemp(prefix="llava_fsdp-")
    os.environ["HOME"] = home
    os.environ.setdefault("USER", f"uid{user}")
    return home


def is_known(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True
