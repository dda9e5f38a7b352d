"""Read the bytes of images from the files that hold many: the files that were used last stay open."""

from collections import OrderedDict
from typing import Any

from llava_fsdp.data.containers.place import LocalFile, Place
from llava_fsdp.data.containers.read_place import PageCache, read_place

MOST_OPEN = 64
"""Number of files that a process keeps open."""


class OpenShards:
    """Reads images by their places. When it is pickled, nothing that is open goes with it."""

    def __init__(self) -> None:
        self.pages = PageCache()
        self._open: OrderedDict[str, LocalFile] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, ()

    def read(self, place: Place) -> bytes:
        """Return the bytes of an image.

        Raises:
            ImageError: the image is too large, or its page cannot be decompressed.
            SourceError: the file cannot be read, or is shorter than when its index was made.
        """
        return read_place(self.open(place.file), place, self.pages)

    def open(self, file: str) -> LocalFile:
        """Return a reader of a file."""
        if file not in self._open:
            self._open[file] = LocalFile(file)
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(file)
        return self._open[file]
