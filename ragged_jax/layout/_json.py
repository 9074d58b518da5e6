"""Layout files: versioned JSON, read as untrusted input.

pydantic checks types, ranges and unknown fields straight off the dataclasses and reports every fault with its
path. It is imported when a file is read or written, so that planning does not wait for it.
"""

import json
from functools import cache
from typing import Any, TypeVar

from ._errors import LayoutError

T = TypeVar("T")

FORMAT = "ragged-layout"
VERSION = 2  # 2 added `splits` to tensors; a layout without them is still written as version 1, to the same bytes


@cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def dump(layout: Any, indent: int | None) -> str:
    """A layout as a document."""
    values = _adapter(type(layout)).dump_python(layout, mode="json")
    version = 2 if _drop_empty_splits(values) else 1
    document = {"format": FORMAT, "version": version, **values}
    return json.dumps(document, indent=indent, separators=None if indent else (",", ":"))


def load(cls: type[T], text: str | bytes) -> T:
    """A value of type `cls` from a document.

    Raises:
      LayoutError: the text is no such document, or of a newer version, or breaks the schema; every fault is listed.
    """
    from pydantic import ValidationError

    try:
        document: Any = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"not a layout file: {error}") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise LayoutError(f'not a layout file: it must be an object with "format": "{FORMAT}"')
    version = document.pop("version", None)
    if type(version) is int and version > VERSION:
        raise LayoutError(f"the layout file has version {version}, this release reads up to {VERSION}: upgrade")
    if type(version) is not int or version < 1:
        raise LayoutError(f"version: {version!r} is not a known version (this release reads 1 to {VERSION})")
    if version < 2 and _has(document, "splits"):
        raise LayoutError(f"version: {version}, but the file has splits, which came with version 2")
    try:
        return _adapter(cls).validate_json(json.dumps(document))
    except ValidationError as error:
        faults = [f"  {_path(fault['loc'])}: {fault['msg']}" for fault in error.errors(include_url=False)]
        raise LayoutError("not a valid layout file:\n" + "\n".join(faults)) from None


def _drop_empty_splits(node: Any) -> bool:
    """Takes out, in place, what version 1 did not know and this layout does not use; whether something is left."""
    if isinstance(node, dict) and node.get("splits") == []:
        del node["splits"]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    left = [_drop_empty_splits(child) for child in children]
    return (isinstance(node, dict) and "splits" in node) or any(left)


def _has(node: Any, key: str) -> bool:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (isinstance(node, dict) and key in node) or any(_has(child, key) for child in children)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):  # another reader might take the other one
        raise ValueError("an object has the same key twice")
    return values


def _path(location: tuple[int | str, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).lstrip(".") or "document"
