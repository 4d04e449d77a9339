"""What the tables of the spec look like to a reader: every key with its type, default, path base and documentation.

Walks `JobSpec` and reads the string literal under each field, only when asked: the light path of a good spec pays for
none of it. Validates nothing. Readers: `spec.load`, `spec.rules` (defaults), `spec.faults` (nearest key), `spec.reference`.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from miles_hpc.spec.fields import PathBase, Table
from miles_hpc.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the spec.

    Attributes:
        path: ("train", "num_steps").
        table: the class of the table it opens, or None for a value.
        is_map: a table whose keys the user chooses, such as [env].
        base: what a relative path is relative to; None when the key is no path.
    """

    path: tuple[str, ...]
    field: FieldInfo
    owner: type[Table]
    table: type[Table] | None
    is_map: bool
    base: Literal["current", "file", "node"] | None

    @property
    def required(self) -> bool:
        """The key has no default."""
        return self.field.is_required()

    @property
    def default(self) -> object:
        """The value of a key that is left out; None when it is required or a table."""
        if self.required or self.table is not None:
            return None
        value: object = self.field.get_default(call_default_factory=True)
        return value


@cache
def spec_keys() -> dict[tuple[str, ...], Key]:
    """Return every key and table of a spec by its path, in the order of the tables."""
    return {key.path: key for key in _walk(JobSpec, ())}


def _walk(model: type[Table], prefix: tuple[str, ...]) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        table = _table_of(field.annotation)
        yield Key(
            path=path,
            field=field,
            owner=model,
            table=table,
            is_map=get_origin(_without_none(field.annotation)) is dict,
            base=_path_base(field),
        )
        if table is not None:
            yield from _walk(table, path)


def _without_none(annotation: object) -> object:
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return members[0]
    return annotation


def _table_of(annotation: object) -> type[Table] | None:
    bare = _without_none(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Table) else None


def _path_base(field: FieldInfo) -> Literal["current", "file", "node"] | None:
    metadata = list(field.metadata)
    bare = _without_none(field.annotation)
    if get_origin(bare) is Annotated:
        metadata.extend(get_args(bare)[1:])
    return next((item.base for item in metadata if isinstance(item, PathBase)), None)


@cache
def _docs_of(model: type[Table]) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == model.__name__
    )
    docs = {}
    for field, literal in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(literal, ast.Expr)
            and isinstance(literal.value, ast.Constant)
            and isinstance(literal.value.value, str)
        ):
            docs[field.target.id] = inspect.cleandoc(literal.value.value)
    return docs


def entry_table(path: tuple[str, ...]) -> type[Table] | None:
    """Return the class of the tables in the map at `path`, such as those of [rules]; None when it holds values."""
    key = spec_keys().get(path)
    if key is None or not key.is_map:
        return None
    return _table_of(get_args(_without_none(key.field.annotation))[1])


def describe_field(model: type[Table], name: str) -> str:
    """Return the documentation under the field `name` of `model`; "" when there is none."""
    return _docs_of(model).get(name, "")


def describe(key: Key) -> str:
    """Return the documentation under the key's field; a table without one has its class docstring."""
    docs = describe_field(key.owner, key.path[-1])
    if not docs and key.table is not None:
        return inspect.cleandoc(key.table.__doc__ or "")
    return docs


def nearest_key(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the valid key that `path` was probably meant to be, or None when nothing is close.

    A sibling with a similar name wins; then a key with that very name in another table; then any similar path.
    """
    *parent, name = path
    siblings = {key[-1]: key for key in spec_keys() if key[:-1] == tuple(parent)}
    close = get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    elsewhere = [key for key in spec_keys() if key[-1] == name]
    if elsewhere:
        return elsewhere[0]
    dotted = {".".join(key): key for key in spec_keys()}
    close = get_close_matches(".".join(path), dotted, n=1, cutoff=0.75)
    return dotted[close[0]] if close else None
