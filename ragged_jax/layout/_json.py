"""Versioned JSON files, read as untrusted input.

pydantic checks types, ranges and unknown fields straight off the dataclasses and reports every fault with its
path. It is imported when a file is read or written, so that planning does not wait for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from ._listed import listed

T = TypeVar("T")


@cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


@dataclass(frozen=True)
class Document:
    """A kind of JSON file that holds a dataclass.

    Attributes:
      format: its name, as in the file.
      version: the newest that this release reads.
      kind: what messages call it.
      error: what is raised when a file is not one.
      since: fields that came with a later version than the first, with that version. Where all of them are empty a
        value is written as it was before, to the same bytes.
    """

    format: str
    version: int
    kind: str
    error: type[ValueError]
    since: Mapping[str, int] = field(default_factory=dict)

    def dump(self, value: Any, indent: int | None = None) -> str:
        """A value as a document."""
        values = _adapter(type(value)).dump_python(value, mode="json")
        version = max((self.since[name] for name in _drop_empty(values, self.since)), default=1)
        document = {"format": self.format, "version": version, **values}
        return json.dumps(document, indent=indent, separators=None if indent else (",", ":"), allow_nan=False)

    def load(self, cls: type[T], text: str | bytes) -> T:
        """A value of type `cls` from a document.

        Raises:
          ValueError: of this kind's type: the text is no such document, or of a newer version, or breaks the
            schema; every fault is listed.
        """
        try:
            return self._load(cls, text)
        except RecursionError:
            raise self.error(f"not a {self.kind}: it is nested too deeply") from None

    def _load(self, cls: type[T], text: str | bytes) -> T:
        from pydantic import ValidationError

        try:
            document: Any = json.loads(text, object_pairs_hook=distinct_keys)
        except ValueError as error:
            raise self.error(f"not a {self.kind}: {error}") from None
        if not isinstance(document, dict) or document.pop("format", None) != self.format:
            raise self.error(f'not a {self.kind}: it must be an object with "format": "{self.format}"')
        version = document.pop("version", None)
        if type(version) is int and version > self.version:
            raise self.error(
                f"the {self.kind} has version {version}, this release reads up to {self.version}: upgrade"
            )
        if type(version) is not int or version < 1:
            raise self.error(f"version: {version!r} is not a known version (this release reads 1 to {self.version})")
        if early := sorted(name for name in _used(document, self.since) if self.since[name] > version):
            came = ", ".join(f"{name}, which came with version {self.since[name]}" for name in early)
            raise self.error(f"version: {version}, but the file has {came}")
        try:
            return _adapter(cls).validate_json(json.dumps(document))
        except ValidationError as error:
            faults = [f"{_path(fault['loc'])}: {fault['msg']}" for fault in error.errors(include_url=False)]
            raise self.error(f"not a valid {self.kind}:" + listed(faults)) from None


def _drop_empty(node: Any, names: Mapping[str, int]) -> set[str]:
    """Takes empty fields of these names out, in place; which of the names are left."""
    if isinstance(node, dict):
        for name in names:
            if name in node and not node[name]:
                del node[name]
    return _used(node, names, _drop_empty)


def _used(node: Any, names: Mapping[str, int], below: Any = None) -> set[str]:
    """Which of these names are fields somewhere in a document."""
    if not names:
        return set()
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    found = set(names) & set(node) if isinstance(node, dict) else set()
    return found.union(*((below or _used)(child, names) for child in children))


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `object_pairs_hook`. Of a key that is there twice, readers would take different ones."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has the same key twice")
    return values


def _path(location: tuple[int | str, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).lstrip(".") or "document"
