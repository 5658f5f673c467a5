"""Read files line by line or whole, packed or not, in bounded memory."""

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from heedful.errors import DataError

MIB = 2**20
LONGEST_LINE = 64 * MIB
"""No record is as long; a longer line is refused before it fills the memory."""
UNPACKED = 256 * MIB
"""A packed file may always unpack to this size, and beyond it only to a number of times its own."""
GZIP_RATIO = 300
"""Text packs to a tenth of its size, records with the same long system message to a 140th; zeros to a thousandth."""


class Growth:
    """Refuses a packed file that unpacks to far more than records do, before it fills the memory.

    Args:
        path: the file's name in messages.
        packed: its size in bytes.
        ratio: how many times this size its content may have.
        remedy: what to do if the content is real.
    """

    def __init__(self, path: str, packed: int, ratio: int, remedy: str) -> None:
        self.path, self.limit, self.ratio, self.remedy = path, max(UNPACKED, ratio * packed), ratio, remedy
        self.size = 0

    def add(self, size: int) -> None:
        """Count bytes that were unpacked. Raises DataError if they are too many."""
        self.size += size
        if self.size > self.limit:
            raise DataError(
                f"{self.path}: it unpacks to more than {self.limit // MIB} MiB, over {self.ratio} times its own size, which "
                f"records do not. If they are yours all the same: {self.remedy}"
            )


def numbered_lines(path: str, file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers from 1, without a byte order mark.

    Lines end only at ``\\n``: `str.splitlines` would also cut at U+2028, which JSON allows inside a string. Only what is
    asked for is read, so damage in the rest of a packed file is not noticed (`check_packed`).

    Raises DataError for a line that is too long, and as `read_whole` does.
    """
    with _opened(path, file) as stream:
        number = 0
        while raw := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise DataError(
                    f"{path}:{number}: the line is longer than {LONGEST_LINE // MIB} MiB. A .jsonl file holds one record per "
                    "line; a list of records is a .json file"
                )
            yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def beginning(path: str, file: Path) -> bytes:
    """Return the first MiB of a file, as `read_whole` does."""
    with _opened(path, file) as stream:
        return stream.read(MIB).removeprefix(codecs.BOM_UTF8)


def read_whole(path: str, file: Path) -> bytes:
    """Return the content of a file, unpacked, without a byte order mark.

    Raises DataError if it cannot be read, if a packed file is damaged, or if it unpacks to far more than records do.
    """
    with _opened(path, file) as stream:
        return stream.read().removeprefix(codecs.BOM_UTF8)


def check_packed(path: str, file: Path) -> None:
    """Read a packed file to its checksum: damage can look like a fault in a line. Raises DataError if it is damaged."""
    with _opened(path, file) as stream:
        while stream.read(MIB):
            pass


def is_packed(file: Path) -> bool:
    """Whether a file is gzip, by its name."""
    return file.name.lower().endswith(".gz")


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, counted."""

    def __init__(self, packed: gzip.GzipFile, growth: Growth) -> None:
        self._packed, self._growth = packed, growth

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer, in typeshed
        size = self._packed.readinto(buffer)
        self._growth.add(size)
        return size


UTF_16 = {
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
    **dict.fromkeys((b"{\0", b"[\0"), "utf-16-le"),
    **dict.fromkeys((b"\0{", b"\0["), "utf-16-be"),
}
"""How a file begins that Windows saved: with a byte order mark, or a NUL beside the bracket that JSON begins with."""


def _as_utf8(stream: BinaryIO) -> BinaryIO:
    encoding = UTF_16.get(stream.peek(2)[:2])  # type: ignore[attr-defined]  # both streams below are buffered
    return stream if encoding is None else io.BytesIO(stream.read().decode(encoding).encode("utf-8"))


@contextlib.contextmanager
def _opened(path: str, file: Path) -> Iterator[BinaryIO]:
    """Open a file to read its content. What goes wrong meanwhile becomes a DataError."""
    try:
        with file.open("rb") as stream:
            if not is_packed(file):
                yield _as_utf8(stream)
                return
            growth = Growth(path, file.stat().st_size, GZIP_RATIO, "unpack it first (gunzip)")
            with gzip.GzipFile(fileobj=stream) as packed:
                yield _as_utf8(io.BufferedReader(_Unpacked(packed, growth), MIB))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip stream is cut short or corrupt ({error}). Copy or download the file again; `gzip -t` "
            "checks it."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: it begins as UTF-16, but is not ({error.reason}). Save it as UTF-8, or copy it again."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}). Check its permissions.") from error
