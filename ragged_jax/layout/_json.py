"""Layout files: versioned JSON, read as untrusted input.

pydantic checks types, ranges and unknown fields straight off the dataclasses and reports every fault with its
path; `Layout.faults` then checks what only the whole can show (overlaps, cut blocks, names that repeat).
"""

import json
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

if TYPE_CHECKING:
    from ._layout import Layout

FORMAT = "ragged-layout"
VERSION = 1


class LayoutError(ValueError):
    """A layout, or a file that should hold one, is not sound. The message lists every fault by its path."""


def _adapter() -> TypeAdapter:
    from ._block import Block
    from ._layout import Layout
    from ._slab import Bucket, Placement, Slab
    from ._tensor import TensorSpec

    for value in (Block, TensorSpec, Placement, Slab, Bucket, Layout):
        with_config(ConfigDict(extra="forbid", strict=True))(value)
    return TypeAdapter(Layout)


_cached: list[TypeAdapter] = []


def _schema() -> TypeAdapter:
    if not _cached:
        _cached.append(_adapter())
    return _cached[0]


def dump(layout: "Layout", indent: int | None) -> str:
    document = {"format": FORMAT, "version": VERSION, **_schema().dump_python(layout, mode="json")}
    return json.dumps(document, indent=indent, separators=None if indent else (",", ":"))


def load(text: str | bytes) -> "Layout":
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"not a layout file: {error}") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise LayoutError(f'not a layout file: it must be an object with "format": "{FORMAT}"')
    version = document.pop("version", None)
    if isinstance(version, int) and version > VERSION:
        raise LayoutError(f"the layout file has version {version}, this release reads up to {VERSION}: upgrade")
    if version != VERSION or isinstance(version, bool):
        raise LayoutError(f"version: {version!r} is not a known version (this release reads {VERSION})")
    try:
        layout = _schema().validate_json(json.dumps(document))
    except ValidationError as error:
        faults = [f"  {_path(fault['loc'])}: {fault['msg']}" for fault in error.errors(include_url=False)]
        raise LayoutError("not a valid layout file:\n" + "\n".join(faults)) from None
    return layout.check()


def _path(location: tuple[int | str, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return "".join(steps).lstrip(".") or "document"
