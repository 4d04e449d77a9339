"""Finds the line of every key in a TOML text, beside tomli, which gives the values but not where they stand.

The text must be one that tomli accepts: this scanner skips over values and checks nothing. It knows no table of the
spec. Reader: `spec.source`.
"""

from typing import Final

KeyPath = tuple[str | int, ...]
"""The way from the top of a document to a value: keys of tables and indices of arrays."""

_BARE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_SPACE: Final = frozenset(" \t")
_BLANK: Final = frozenset(" \t\r\n")
_ESCAPES: Final = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


def scan_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of each key, array element and table of `text`.

    A table's line is that of its header, or of the first key that implies it.
    """
    return _Scanner(text).scan()


def split_key(text: str) -> tuple[tuple[str, ...], str] | None:
    """Split "key.path=value" into the key's parts and the text of the value; None when it is not of that form."""
    scanner = _Scanner(text)
    try:
        parts = scanner.read_key()
    except (IndexError, ValueError):
        return None
    if not scanner.at("="):
        return None
    return parts, text[scanner.position + 1 :].strip()


class _Scanner:
    """One pass over a document; `position` and `line` move together."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line = 1
        self.lines: dict[KeyPath, int] = {}
        self.array_sizes: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self.skip_blank():
            if self.at("["):
                table = self.read_header()
            else:
                self.read_pair(table)
        return self.lines

    def at(self, prefix: str) -> bool:
        return self.text.startswith(prefix, self.position)

    def advance(self, count: int = 1) -> None:
        end = self.position + count
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def skip_blank(self) -> bool:
        """Skip blanks, line ends and comments; return whether anything is left."""
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in _BLANK:
                self.advance()
            elif character == "#":
                end = self.text.find("\n", self.position)
                self.advance((len(self.text) if end < 0 else end) - self.position)
            else:
                return True
        return False

    def skip_space(self) -> None:
        while self.position < len(self.text) and self.text[self.position] in _SPACE:
            self.position += 1

    def note(self, path: KeyPath, line: int) -> None:
        """Give `path`, and each table it implies, a line if they have none yet."""
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def read_header(self) -> KeyPath:
        line = self.line
        is_array = self.at("[[")
        self.advance(2 if is_array else 1)
        parts = self.read_key()
        self.advance(2 if is_array else 1)
        path: KeyPath = ()
        for part in parts[:-1]:
            path = self.into_last((*path, part))
        path = (*path, parts[-1])
        if not is_array:
            path = self.into_last(path)
            self.note(path, line)
            # A header says more than a key that only implied the table earlier.
            self.lines[path] = line
            return path
        index = self.array_sizes.get(path, 0)
        self.array_sizes[path] = index + 1
        self.note((*path, index), line)
        return (*path, index)

    def into_last(self, path: KeyPath) -> KeyPath:
        """Return `path`, or its last element's path when it is an array of tables."""
        size = self.array_sizes.get(path)
        return path if size is None else (*path, size - 1)

    def read_pair(self, table: KeyPath) -> None:
        line = self.line
        path = (*table, *self.read_key())
        self.note(path, line)
        self.advance()  # the equals sign
        self.skip_blank()
        self.read_value(path)

    def read_key(self) -> tuple[str, ...]:
        """Read a bare, quoted or dotted key and the blanks after it.

        Raises:
            ValueError: if a bare part is empty, which only happens outside a text that tomli accepts.
        """
        parts = []
        while True:
            self.skip_space()
            if self.text[self.position] in "\"'":
                parts.append(self.read_string())
            else:
                start = self.position
                while self.position < len(self.text) and self.text[self.position] in _BARE:
                    self.position += 1
                if start == self.position:
                    raise ValueError("an empty key")
                parts.append(self.text[start : self.position])
            self.skip_space()
            if not self.at("."):
                return tuple(parts)
            self.position += 1

    def read_value(self, path: KeyPath) -> None:
        if self.at("["):
            self.read_array(path)
        elif self.at("{"):
            self.read_inline_table(path)
        elif self.text[self.position] in "\"'":
            self.read_string()
        else:
            while self.position < len(self.text) and self.text[self.position] not in ",]}#\n":
                self.position += 1

    def read_array(self, path: KeyPath) -> None:
        self.advance()
        index = 0
        while self.skip_blank() and not self.at("]"):
            self.note((*path, index), self.line)
            self.read_value((*path, index))
            index += 1
            if self.skip_blank() and self.at(","):
                self.advance()
        self.advance()

    def read_inline_table(self, path: KeyPath) -> None:
        self.advance()
        while self.skip_blank() and not self.at("}"):
            self.read_pair(path)
            if self.skip_blank() and self.at(","):
                self.advance()
        self.advance()

    def read_string(self) -> str:
        """Read a string of any of the four kinds and return its value (exact for keys, which are never multi-line)."""
        quote = self.text[self.position]
        if self.at(quote * 3):
            return self.skip_multi_line(quote * 3)
        self.advance()
        characters = []
        while not self.at(quote):
            character = self.text[self.position]
            self.advance()
            characters.append(
                self.read_escape() if character == "\\" and quote == '"' else character
            )
        self.advance()
        return "".join(characters)

    def read_escape(self) -> str:
        kind = self.text[self.position]
        self.advance()
        digits = _HEX_DIGITS.get(kind)
        if digits is None:
            return _ESCAPES.get(kind, kind)
        code = int(self.text[self.position : self.position + digits], 16)
        self.advance(digits)
        return chr(code)

    def skip_multi_line(self, fence: str) -> str:
        self.advance(3)
        while not self.at(fence):
            self.advance(2 if self.at("\\") and fence[0] == '"' else 1)
        self.advance(3)
        # Up to two more quotes before the fence belong to the value.
        while self.at(fence[0]):
            self.advance()
        return ""
