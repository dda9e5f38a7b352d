"""Refuse MP4 and QuickTime files whose tables claim far more frames than a video has, before FFmpeg reads them.

FFmpeg makes an entry of 24 bytes or more for each frame that a table claims, and a few bytes can claim any number. The
format is ISO/IEC 14496-12: boxes in boxes, each with its length and type.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from llava_fsdp.data.images.broken_images import read_at, read_number
from llava_fsdp.data.images.work_limits import require_at_most

BOXES = 400_000
"""Greatest number of boxes of a file. A recording in fragments has about five for each second."""
FRAMES = 10_000_000
"""Greatest number of frames in all tables of a file: 46 hours at 60 frames a second, with sound."""
EDITS = 10_000
"""Greatest number of entries of a list of edits, for each of which FFmpeg passes over all frames."""
NESTED = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf")
"""Types of the boxes on the way to the tables."""
COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4}
"""{type of a table of frames: offset of their number behind the box's head}."""


def check_mov(file: BinaryIO, size: int) -> None:
    """Raise TooMuchWork if an MP4 or QuickTime file has too many boxes, frames or edits."""
    frames = 0
    for number_of_box, (kind, at) in enumerate(boxes(file, size)):
        require_at_most(number_of_box, BOXES, "or more boxes")
        if kind not in COUNTS and kind != b"elst":
            continue
        try:
            # a table has its number of entries at a certain offset behind the box's head
            count = read_number(">I", read_at(file, at + COUNTS.get(kind, 4), 4), 0)
        except struct.error:  # the file ends early, which FFmpeg reports later
            return
        if kind == b"elst":
            require_at_most(count, EDITS, "edits")
        else:
            require_at_most(frames := frames + count, FRAMES, "or more frames in its tables")


def boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield (type, offset behind the head) of each box of a file, also of those inside the boxes NESTED."""
    ranges = [(0, size)]
    while ranges:
        at, end = ranges.pop()
        while at + 8 <= end:
            head = read_at(file, at, 16)
            if len(head) < 8:
                break
            length, kind, width = read_number(">I", head, 0), head[4:8], 8
            if length == 1 and len(head) == 16:
                length, width = read_number(">Q", head, 8), 16
            length = end - at if length == 0 else length
            yield kind, at + width
            if length < width:
                break
            if kind in NESTED:  # its boxes are next; those behind it follow later
                ranges.append((at + length, end))
                end = min(end, at + length)
                at += width
            else:
                at += length
