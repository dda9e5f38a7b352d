"""Decode two formats inside Parquet files: Thrift's compact protocol, and run-length encoded small numbers (RLE).

Sources: `https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md` and
`https://parquet.apache.org/docs/file-format/data-pages/encodings/`.
"""

from typing import Any

import numpy as np

MOST_DEPTH = 16
"""Greatest nesting depth of structs and lists; a footer needs 9."""
MOST_FIELDS = 10_000
"""Greatest number of fields and list elements in a page header. The format defines about 20."""
GROUPS_AT_ONCE = 8192
"""Number of groups (of eight bit-packed numbers) that are unpacked at a time, to bound the memory that this takes."""


class Malformed(Exception):
    """Bytes do not follow their format. The message is the reason."""


class EndsEarly(Malformed):
    """Bytes end before the value that is being read."""


class Cursor:
    """Reads numbers and Thrift structs from bytes, one after the other."""

    def __init__(self, data: bytes, at: int = 0, most_fields: int = MOST_FIELDS):
        self.data, self.at = data, at
        self.fields, self.most_fields = 0, most_fields

    def take(self, size: int) -> bytes:
        """Read `size` bytes; raise EndsEarly if fewer are left."""
        if size > len(self.data) - self.at:
            raise EndsEarly(f"{size} bytes expected, {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def byte(self) -> int:
        """Read one byte; raise EndsEarly if none is left."""
        if self.at >= len(self.data):
            raise EndsEarly("a byte expected, none is left")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        """Read an unsigned number of at most 64 bits, stored as base-128 digits, the least significant one first."""
        number = shift = 0
        while (byte := self.byte()) > 127:
            number |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise Malformed("a number has more than 64 bits")
        return number | byte << shift

    def zigzag(self) -> int:
        """Read a number with a sign, which is stored as an unsigned one: 0, -1, 1, -2 as 0, 1, 2, 3."""
        number = self.varint()
        return (number >> 1) ^ -(number & 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read a Thrift struct, at a nesting depth of at most MOST_DEPTH, as {field number: value}."""
        if depth > MOST_DEPTH:
            raise Malformed(f"structs are nested more than {MOST_DEPTH} deep")
        values, number = {}, 0
        while (head := self.byte()) != 0:
            # a field begins with its number, less that of the field before it (0: the number follows), and its type
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            # the value of a boolean field is in the head of the field
            values[number] = head & 15 == 1 if head & 15 in (1, 2) else self.read_value(head & 15, depth)
            self.count_value()
        return values

    def count_value(self) -> None:
        """Count a value that was read; raise Malformed after too many: a few bytes could claim millions."""
        self.fields += 1
        if self.fields > self.most_fields:
            raise Malformed(f"it has more than {self.most_fields} fields")

    def read_value(self, kind: int, depth: int) -> Any:
        """Read a value of a struct or a list. Raise Malformed if there are too many values, or for Thrift's types that
        no Parquet header has (maps and UUIDs).

        Args:
            kind: number of the value's type in the compact protocol.
            depth: number of structs and lists around the value.
        """
        self.count_value()
        match kind:
            case 1 | 2:  # a boolean in a list; that of a field has no byte of its own (see `struct`)
                return self.byte() == 1
            case 3:
                return self.byte()
            case 4 | 5 | 6:  # integers
                return self.zigzag()
            case 7:  # a float, which no one needs: its bytes
                return self.take(8)
            case 8:
                return self.take(self.varint())
            case 9 | 10:  # a list or a set: its head has the number of elements, if that is below 15, and their type
                head = self.byte()
                length = self.varint() if head >> 4 == 15 else head >> 4
                return [self.read_value(head & 15, depth + 1) for _ in range(length)]
            case 12:
                return self.struct(depth + 1)
        raise Malformed(f"a value is of the unknown Thrift type {kind}")


def number_of(fields: dict[int, Any], field: int, most: int = (1 << 31) - 1) -> int:
    """Return a field of a Thrift struct {number: value}; raise Malformed if it is not an integer from 0 to `most`."""
    value = fields.get(field)
    if type(value) is not int or not 0 <= value <= most:
        raise Malformed(f"field {field} is {str(value)[:40]}; 0 to {most} expected")
    return value


def decode_small_numbers(data: bytes, width: int, count: int) -> np.ndarray:
    """Decode `count` numbers of `width` bits (0 to 32), int64 [count], in Parquet's hybrid of run-length encoding and
    bit-packing, which stores levels and the ids of dictionary values. Raise Malformed if there are fewer."""
    if not 0 <= width <= 32:
        raise Malformed(f"numbers of {width} bits")
    numbers = np.zeros(count, np.int64)
    done, cursor = 0, Cursor(data)
    while done < count:
        head = cursor.varint()  # odd: (head >> 1) groups of 8 packed numbers follow; even: one number, to be repeated
        if head & 1:
            groups = min(head >> 1, -(-(count - done) // 8), GROUPS_AT_ONCE)
            groups_left = (head >> 1) - groups
            while groups:
                # the last groups may be truncated after the last number
                packed = cursor.take(min(groups * width, len(data) - cursor.at))
                unpacked = unpack_bits(packed, width, groups)[: count - done]
                numbers[done : done + len(unpacked)] = unpacked
                done += len(unpacked)
                if len(unpacked) < groups * 8 and done < count:
                    raise EndsEarly(f"{done} of {count} numbers")
                groups = min(groups_left, -(-(count - done) // 8), GROUPS_AT_ONCE)
                groups_left -= groups
        else:
            run = min(head >> 1, count - done)
            numbers[done : done + run] = int.from_bytes(cursor.take((width + 7) // 8), "little")
            done += run
    return numbers


def unpack_bits(packed: bytes, width: int, groups: int) -> np.ndarray:
    """Decode groups of eight bit-packed numbers of `width` bits, least significant bit first: int64 [8 * groups], or
    fewer if the bytes end early."""
    if width == 0:
        return np.zeros(groups * 8, np.int64)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    return bits[: len(bits) // width * width].reshape(-1, width) @ (1 << np.arange(width, dtype=np.int64))
