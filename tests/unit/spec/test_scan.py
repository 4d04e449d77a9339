"""The key-position scanner: every key that tomli sees has the line on which it was written."""

import string

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.spec.scan import KeyPath, scan_lines, split_key


def paths_of(value: object, prefix: KeyPath = ()) -> set[KeyPath]:
    """Return the path of every key and element in `value`."""
    children: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    found = {(*prefix, part) for part, _ in children}
    return found.union(*(paths_of(child, (*prefix, part)) for part, child in children))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\nb = 2", {("a",): 1, ("b",): 2}),
        ("\n# c = 0\na = 1 # b = 2\n", {("a",): 3}),
        ('"a b" = 1\n"c.d" = 2\n\'e"f\' = 3', {("a b",): 1, ("c.d",): 2, ('e"f',): 3}),
        ('"\\u0061\\t" = 1', {("a\t",): 1}),
        ("a.b . c = 1\n'x'.y = 2", {("a", "b", "c"): 1, ("x", "y"): 2, ("a",): 1}),
        ("[t]\na = 1\n[ t . 'u' ]\nb = 2", {("t",): 1, ("t", "a"): 2, ("t", "u"): 3, ("t", "u", "b"): 4}),
        ("[t.u]\na = 1\n[t]\nb = 2", {("t",): 3, ("t", "u"): 1, ("t", "b"): 4}),
        (
            "[[x]]\na = 1\n[[x]]\na = 2\n[x.y]\nb = 3\n[[x.z]]\nc = 4",
            {("x", 0, "a"): 2, ("x", 1): 3, ("x", 1, "a"): 4, ("x", 1, "y", "b"): 6, ("x", 1, "z", 0, "c"): 8},
        ),
        ("a = {b = 1, c.d = [2, {e = 3}]}\nf = 4", {("a", "c", "d", 1, "e"): 1, ("f",): 2}),
        ("a = [\n  1, # one ]\n  [2,\n   3],\n]\nb = 4", {("a", 0): 2, ("a", 1): 3, ("a", 1, 1): 4, ("b",): 6}),
        ('a = """\n[x]\nb = "1"\n"""\nc = 2', {("a",): 1, ("c",): 5}),
        ('a = """x\\"""y""""\nb = 2', {("a",): 1, ("b",): 2}),
        ("a = '''\n\\'''\nb = 2", {("a",): 1, ("b",): 3}),
        ('a = "x = \\" # y"\nb = 2', {("a",): 1, ("b",): 2}),
        ("a = 1979-05-27 07:32:00\nb = 0x1F\n", {("a",): 1, ("b",): 2}),
    ],
)  # fmt: skip
def test_a_key_has_its_line(text: str, expected: dict[KeyPath, int]):
    lines = scan_lines(text)
    assert paths_of(tomli.loads(text)) <= lines.keys()
    assert {path: lines[path] for path in expected} == expected


def test_line_ends_of_windows_count_once():
    text = 'a = 1\r\n[t]\r\nb = """\r\nx\r\n"""\r\nc = 2\r\n'
    lines = scan_lines(text.replace("\r\n", "\n"))
    assert (lines[("a",)], lines[("t", "b")], lines[("t", "c")]) == (1, 3, 6)


BARE = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=6)
ANY_KEY = st.one_of(
    BARE, st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6)
)
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(ANY_KEY, inner, max_size=3)
    ),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(ANY_KEY, VALUES, max_size=5)


class Writer:
    """Writes a document as TOML in a style drawn by hypothesis, and notes the line of each key."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[KeyPath, int] = {}

    def put(self, text: str) -> None:
        self.text += text

    def line(self) -> int:
        return self.text.count("\n") + 1

    def noise(self) -> None:
        self.put(self.draw(st.sampled_from(["", "", "\n", " # a = [1\n", '\t\n# ]} """\n'])))

    def string(self, value: str) -> str:
        printable = all(character >= " " and character != "\x7f" for character in value)
        styles = ["basic"]
        if printable and "'" not in value:
            styles += ["literal", "literal lines"]
        if (
            '"' not in value
            and "\\" not in value
            and all(c >= " " or c == "\n" for c in value)
            and "\x7f" not in value
        ):
            styles.append("lines")
        style = self.draw(st.sampled_from(styles))
        if style == "literal":
            return f"'{value}'"
        if style == "literal lines":
            return f"'''\n{value}'''"
        if style == "lines":
            return f'"""\n{value}"""'
        return '"' + "".join(self.escaped(character) for character in value) + '"'

    @staticmethod
    def escaped(character: str) -> str:
        code = ord(character)
        if character in '"\\':
            return "\\" + character
        return character if 0x20 <= code < 0x7F else f"\\U{code:08x}"

    def key(self, key: str) -> str:
        if (
            key
            and all(c in string.ascii_letters + string.digits + "-_" for c in key)
            and self.draw(st.booleans())
        ):
            return key
        if (
            "'" not in key
            and all(c >= " " and c != "\x7f" for c in key)
            and self.draw(st.booleans())
        ):
            return f"'{key}'"
        return '"' + "".join(self.escaped(character) for character in key) + '"'

    def pair(self, path: KeyPath, value: object) -> None:
        self.lines[path] = self.line()
        self.put(self.key(str(path[-1])))
        self.put(self.draw(st.sampled_from([" = ", "=", "\t=  "])))
        self.value(path, value)

    def value(self, path: KeyPath, value: object) -> None:
        if isinstance(value, bool):
            self.put(str(value).lower())
        elif isinstance(value, int | float):
            self.put(repr(value))
        elif isinstance(value, str):
            self.put(self.string(value))
        elif isinstance(value, list):
            self.put("[")
            for index, item in enumerate(value):
                self.noise()
                self.lines[(*path, index)] = self.line()
                self.value((*path, index), item)
                self.put(
                    self.draw(st.sampled_from([",", " ,\n"])) if index < len(value) - 1 else ""
                )
            self.noise()
            self.put("]")
        elif isinstance(value, dict):
            self.put("{")
            for index, (key, item) in enumerate(value.items()):
                self.pair((*path, key), item)
                self.put(", " if index < len(value) - 1 else "")
            self.put("}")

    def start_line(self) -> None:
        self.noise()
        if self.text and not self.text.endswith("\n"):
            self.put("\n")

    def style_of(self, value: object) -> str:
        if isinstance(value, dict):
            return self.draw(
                st.sampled_from(["header", "inline", "dotted"] if value else ["header"])
            )
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return self.draw(st.sampled_from(["headers", "inline"]))
        return "inline"

    def dotted(self, path: KeyPath, key: str, value: dict[str, object]) -> None:
        for name, item in value.items():
            self.start_line()
            self.lines.setdefault((*path, key), self.line())
            self.lines[(*path, key, name)] = self.line()
            self.put(f"{self.key(key)} . {self.key(name)} =")
            self.value((*path, key, name), item)
            self.put("\n")

    def header(self, path: KeyPath, mark: str) -> None:
        self.start_line()
        self.lines[path] = self.line()
        names = [str(part) for part in path if isinstance(part, str)]
        self.put("[" * len(mark) + " . ".join(self.key(name) for name in names) + mark + "\n")

    def table(self, path: KeyPath, values: dict[str, object]) -> None:
        styles = {key: self.style_of(value) for key, value in values.items()}
        for key, value in values.items():
            if styles[key] == "inline":
                self.start_line()
                self.pair((*path, key), value)
                self.put("\n")
            elif styles[key] == "dotted":
                assert isinstance(value, dict)
                self.dotted(path, key, value)
        for key, value in values.items():
            if styles[key] == "header":
                assert isinstance(value, dict)
                self.header((*path, key), "]")
                self.table((*path, key), value)
            elif styles[key] == "headers":
                assert isinstance(value, list)
                for index, item in enumerate(value):
                    self.header((*path, key, index), "]]")
                    self.lines.setdefault((*path, key), self.lines[(*path, key, index)])
                    self.table((*path, key, index), item)


@st.composite
def written_documents(draw: st.DrawFn) -> tuple[str, dict[str, object], dict[KeyPath, int]]:
    document = draw(DOCUMENTS)
    writer = Writer(draw)
    writer.table((), document)
    return writer.text, document, writer.lines


@settings(max_examples=120, deadline=None)
@given(written_documents())
def test_every_key_of_any_document_has_the_line_it_was_written_on(
    written: tuple[str, dict[str, object], dict[KeyPath, int]],
):
    text, document, lines = written
    assert tomli.loads(text) == document
    found = scan_lines(text)
    assert paths_of(document) == found.keys()
    assert found == lines


@settings(max_examples=120, deadline=None)
@given(
    st.lists(ANY_KEY, min_size=1, max_size=4), st.text(st.characters(codec="utf-8"), max_size=10)
)
def test_a_key_path_splits_from_its_value_whatever_they_hold(parts: list[str], value: str):
    quoted = ".".join('"' + "".join(Writer.escaped(c) for c in part) + '"' for part in parts)
    assert split_key(f"{quoted}={value}") == (tuple(parts), value.strip())


@settings(max_examples=120, deadline=None)
@given(st.text(max_size=20))
def test_any_text_either_splits_or_is_no_key(text: str):
    split = split_key(text)
    assert split is None or "=" in text
