"""The error of this package, and the strictness with which files are read."""

STRICT = {"extra": "forbid", "strict": True}  # pydantic's words: no unknown fields, no conversions


class LayoutError(ValueError):
    """A layout, or a file that should hold one, is not sound. The message lists every fault by its path."""
