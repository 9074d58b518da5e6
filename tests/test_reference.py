"""`docs/reference.md` says what the source says, and the guide names what there is."""

import importlib.util
import re
from pathlib import Path

import pytest

import ragged_jax as rj

DOCS = Path(__file__).parent.parent / "docs"
spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
assert spec
assert spec.loader
make_reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_reference)


def test_the_reference_is_up_to_date():
    assert (DOCS / "reference.md").read_text() == make_reference.generate(), "run `make docs`"


def test_it_has_the_names_that_python_sees():
    """They are read from the source alone; those of `ragged_jax` itself are checked by `generate`."""
    assert make_reference.public("ragged_jax") == [name for name in rj.__all__ if name != "optim"]
    assert make_reference.public("ragged_jax.optim") == rj.optim.__all__


def test_a_name_in_no_group_is_an_error(monkeypatch):
    groups = {**make_reference.GUIDE, "Blocks": "elements rows tile whole"}
    monkeypatch.setattr(make_reference, "GUIDE", groups)
    with pytest.raises(ValueError, match=r"differ in \['Block'\]"):
        make_reference.generate()


def test_signatures_are_those_of_the_source(tmp_path, monkeypatch):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("from ._a import f as f\nfrom ._a import C as C\n")
    (tmp_path / "p" / "_a.py").write_text(
        'def f(x: int, /, *xs: str, y: bool = True, **rest) -> str:\n    """Does it.\n\n    More."""\n'
        'class C:\n    """A thing."""\n    def __init__(self, n=1): ...\n'
        '    @property\n    def size(self):\n        """How large."""\n'
        '    def go(self, *, far: int = 2):\n        """Goes."""\n    def _hidden(self):\n        """No."""\n'
    )
    monkeypatch.setattr(make_reference, "ROOT", tmp_path)
    assert make_reference.line("p", "f") == "- [`f(x, /, *xs, y=True, **rest)`](../p/_a.py): Does it."
    assert "f(x: int, /, *xs: str, y: bool = True, **rest) -> str" in make_reference.entry("p", "f")
    thing = make_reference.entry("p", "C")
    assert "class C(n=1)" in thing
    assert thing.endswith("A thing.\n\n- `size`: How large.\n- `go(*, far=2)`: Goes.")


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_what_the_guide_names_exists(page):
    text, root = (DOCS.parent / page).read_text(), (DOCS.parent / page).parent
    names = {
        r"\brj\.(?!optim\b)(\w+)": rj.__all__,
        r"\brj\.optim\.(\w+)": rj.optim.__all__,
        r"\btb\.(?!optim\b)(\w+)": make_reference.public("torch_bridge"),
        r"\btb\.optim\.(\w+)": make_reference.public("torch_bridge.optim"),
    }
    found = {pattern: set(re.findall(pattern, text)) for pattern in names}
    assert sum(map(len, found.values())) > 10
    assert {pattern: gone for pattern, known in names.items() if (gone := found[pattern] - {*known})} == {}
    linked = re.findall(r"\]\(((?!https?:|#)[^)#\s]+)\)", re.sub(r"(?s)```.*?```", "", text))
    assert linked
    assert [path for path in linked if not (root / path).exists()] == []
