"""A position in a mapped GGUF file whose readers check, before they read, that the file goes on that far."""

import mmap
import struct

from realizar_torch.checkpoint.gguf_errors import broken, shown
from realizar_torch.errors import GGUFError


class Cursor:
    """Reads little-endian numbers and strings one after the other. ``where`` names the field in errors."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    @property
    def remaining(self) -> int:
        return self.size - self.position

    def broken(self, where: str, found: str, expected: str, *advice: str) -> GGUFError:
        return broken(self.path, where, found, expected, *advice)

    def truncated(self, where: str, start: int, count: int) -> GGUFError:
        found = f"the end of the file at byte {self.size}"
        return self.broken(where, found, f"bytes {start} to {start + count}")

    def take(self, count: int, where: str) -> int:
        """Move ``count`` bytes on and return where they start."""
        start = self.position
        if count > self.remaining:
            raise self.truncated(where, start, count)
        self.position = start + count
        return start

    def number(self, code: str, where: str) -> int | float:
        """One number; ``code`` is its struct format."""
        (value,) = struct.unpack_from(code, self.data, self.take(struct.calcsize(code), where))
        return value

    def u32(self, where: str) -> int:
        return int.from_bytes(self._bytes(4, where), "little")

    def u64(self, where: str) -> int:
        return int.from_bytes(self._bytes(8, where), "little")

    def text(self, where: str, limit: int) -> str:
        """A string of at most ``limit`` bytes: u64 byte count, then UTF-8."""
        count = self.u64(where)
        if count > min(limit, self.remaining):
            if count > self.remaining:
                raise self.truncated(where, self.position, count)
            raise self.broken(where, f"a text of {count} bytes", f"at most {limit} bytes")
        raw = self._bytes(count, where)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.broken(where, f"bytes {shown(raw)} ({error.reason})", "UTF-8 text") from None

    def name(self, where: str, limit: int) -> str:
        """A string that names something: not empty, printable."""
        name = self.text(where, limit)
        if not name or not name.isprintable():
            raise self.broken(where, f"the name {shown(name)}", "a name of one or more printable characters")
        return name

    def _bytes(self, count: int, where: str) -> bytes:
        start = self.take(count, where)
        return self.data[start : start + count]
