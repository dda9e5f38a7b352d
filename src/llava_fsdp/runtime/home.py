"""Create a home folder for a user who has none, as in a container whose user number is not in /etc/passwd."""

import os
import pwd
import stat
import tempfile


def ensure_home() -> str | None:
    """Set HOME and USER, here and in child processes, if HOME is not set and the system does not know this user.
    Otherwise `expanduser`, `getuser`, and with them torch and others, fail or write into a folder named `~`.

    Returns:
        The new home folder, which only this user can read: the same in all commands. None if the user has one already.
    """
    user = os.getuid()
    if os.environ.get("HOME") or is_known_user(user):
        return None
    home = os.path.join(tempfile.gettempdir(), f"llava_fsdp-{user}")
    try:
        os.mkdir(home, 0o700)
    except FileExistsError:
        status = os.lstat(home)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:  # another user made it
            home = tempfile.mkdtemp(prefix="llava_fsdp-")
    os.environ["HOME"] = home
    os.environ.setdefault("USER", f"uid{user}")
    return home


def is_known_user(user: int) -> bool:
    """Return whether the system has an entry for the user with this number, as in /etc/passwd."""
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True
