"""Numbers in words. Imports nothing of ours."""

import time


def readable(size: float) -> str:
    """Bytes, in the unit that shows them best."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def moment(seconds: float) -> str:
    """Of this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
