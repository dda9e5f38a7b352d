"""Find a file whose name is almost that of a record's missing image."""

import itertools
import os
import unicodedata
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

MOST_NAMES = 200_000
"""Greatest number of names of a folder that are compared."""


def near_name(path: Path) -> str | None:
    """Return the path of an existing file whose name differs from a missing one only in letter case, Unicode form,
    blanks, backslashes for slashes, or escapes (`%20`); else None. `~` and links are not resolved."""
    try:
        parts = Path(str(path).replace("\\", "/")).parts
        found = Path(parts[0]) if parts else path
        for part in parts[1:]:
            candidate = found / part
            if not candidate.exists():
                name = names_in(found).get(plain(part))
                if name is None:
                    return None
                candidate = found / name
            found = candidate
        return str(found) if found.is_file() else None
    except (OSError, ValueError):  # a name is too long, has a zero character, or a folder cannot be listed
        return None


@lru_cache(maxsize=8)  # many images of one folder may be missing
def names_in(folder: Path) -> dict[str, str]:
    with os.scandir(folder) as entries:
        return {plain(entry.name): entry.name for entry in itertools.islice(entries, MOST_NAMES)}


def plain(name: str) -> str:
    """Return a name in which case, composition and blanks do not matter."""
    return "".join(unicodedata.normalize("NFKC", unquote(name)).casefold().split())
