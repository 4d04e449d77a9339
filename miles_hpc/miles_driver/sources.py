"""What a checkout of Miles says of itself without being imported: its commit, the flags of its parser, its model arguments' files.

Flags are read from the syntax of its sources, since importing Miles takes a GPU, minutes and everything that it depends on.
Megatron's and SGLang's flags stand in their own repositories and are not looked at. Standard library only.

`python -m miles_hpc.miles_driver.sources CHECKOUT` prints the flags, as `engine.miles_revisions` has them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ADDERS = frozenset({"add_argument", "reset_arg"})
_SOURCES = (
    *(
        "miles/utils/arguments.py",
        "miles/utils/arguments",
        "miles/backends",
        "miles/dashboard/args.py",
    ),
    *("miles/router", "miles/rollout", "miles/ray", "miles_plugins"),
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def checkout_flags(root: Path) -> frozenset[str]:
    """Return the long flags, without dashes, that Miles' own sources add to its parser; empty when there are none to read."""
    return frozenset(name for path in _python_files(root) for name in _flags_of(path))


def checkout_revision(root: Path) -> str | None:
    """Return the commit of the checkout at `root`, or None when it is no Git checkout or keeps it elsewhere."""
    folder = root / ".git"
    if folder.is_file():  # a worktree or submodule: "gitdir: PATH"
        target = _line(folder).removeprefix("gitdir:").strip()
        folder = (root / target) if target else folder
    head = _line(folder / "HEAD")
    if not head.startswith("ref:"):
        return _as_commit(head)
    name = head.removeprefix("ref:").strip()
    common = _line(folder / "commondir")
    for base in (folder, folder / common) if common else (folder,):
        found = _as_commit(_line(base / name)) or _packed(base / "packed-refs", name)
        if found is not None:
            return found
    return None


def _python_files(root: Path) -> Iterator[Path]:
    for name in _SOURCES:
        path = root / name
        if path.suffix == ".py":
            yield path
        else:
            yield from sorted(path.rglob("*.py"))


def _flags_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) in _ADDERS:
            switches = any(
                word.arg == "action" and _name_of(word.value) == "BooleanOptionalAction"
                for word in node.keywords
            )
            for value in node.args:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    name = value.value.removeprefix("--")
                    if name != value.value:
                        yield name
                        if switches:
                            yield f"no-{name}"


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError):
        return ""


def _packed(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return next((_as_commit(line[:40]) for line in lines if line[41:] == name), None)


def _as_commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def main(argv: list[str]) -> int:
    """Print the flags of the checkout `argv[0]`, one a line."""
    if len(argv) != 1:
        sys.stderr.write("error: usage: python -m miles_hpc.miles_driver.sources CHECKOUT\n")
        return 2
    sys.stdout.write("".join(f"{name}\n" for name in sorted(checkout_flags(Path(argv[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
