"""`NameMap`: what the tensors of a model are called in two naming schemes, and in which order their dims come."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from ._dims import Dims, Link, Shape, is_name, names_of, same
from ._errors import STRICT
from ._json import Document
from ._listed import listed
from ._tensor import MAX_DIMS, MAX_NUMEL

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_MAX_NAMES = 100_000  # that one rule makes; more than any model has


class NameMapError(ValueError):
    """A name map is not sound, or tensors are not those that it speaks of. The message lists every one."""


NAMES_FILE = Document("ragged-names", 1, "name map", NameMapError)


class NameRule(NamedTuple):
    """What one or more tensors are called on both sides.

    Attributes:
      source, target: names with placeholders in braces: `blocks/{i}/up/kernel`.
      dims: how the source's dims become the target's, `in out -> out in`; empty where they stay.
    """

    source: str
    target: str
    dims: str = ""


class Mapped(NamedTuple):
    """A tensor under its target name.

    Attributes:
      name, shape: of the target.
      links: the source tensors that it is made of; usually one.
    """

    name: str
    shape: Shape
    links: tuple[Link, ...]

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The source's dims in the target's order, where the target is the source with its dims in another order."""
        link = self.links[0]
        plain = len(self.links) == 1 and {*link.source_index, *link.target_index} <= {None}
        return link.axes if plain and link.target_dims == self.shape else None


@dataclass(frozen=True)
class NameMap:
    """A map between two naming schemes, as data: of names, of the order of dims, and of what is joined or split.

    A placeholder stands for a number (`blocks/{i}/kernel`) or for one of its `choices`. It has the same values in
    all rules. One that only one side's names have is a dim of the other side: `("q/{qkv}/kernel", "qkv.weight",
    "in out -> (qkv out) in")` joins three tensors into one, and `("blocks/{i}/bias", "blocks/bias", "n -> i n")`
    stacks layers. Read from right to left the same rule splits.

    Attributes:
      rules: each `(source, target)` or `(source, target, dims)`.
      choices: by placeholder, the words that it stands for.
      sizes: of dims that the shapes leave open, such as how many heads are in `(heads features)`.
      aliases: by name, the name of the tensor that it is tied to; of either side.
      ignored: patterns of names that are passed over, of either side, such as buffers.
      optional: patterns of names that may be absent, of either side.

    Raises:
      NameMapError: the rules contradict themselves; every fault is named.

    Example:
      >>> names = NameMap((("mlp/{i}/kernel", "layer.{i}.weight", "in out -> out in"),))
      >>> names.apply({"mlp/0/kernel": (3, 5)})["layer.0.weight"].shape
      (5, 3)
      >>> names.inverse.apply({"layer.0.weight": (5, 3)})["mlp/0/kernel"].axes
      (1, 0)
    """

    __pydantic_config__ = STRICT

    rules: tuple[tuple[str, ...], ...]
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    sizes: dict[str, int] = field(default_factory=dict, hash=False)
    aliases: dict[str, str] = field(default_factory=dict, hash=False)
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __post_init__(self):
        if bad := [
            f"{rule} is not (source, target) or (source, target, dims)"
            for rule in self.rules
            if len(rule) not in (2, 3)
        ]:
            raise NameMapError("not a sound name map:" + listed(bad))
        object.__setattr__(self, "rules", tuple(NameRule(*rule) for rule in self.rules))
        if faults := list(self._faults()):
            raise NameMapError("not a sound name map:" + listed(faults))
        rules = (rule._replace(dims=str(Dims.parse(rule.dims))) if rule.dims else rule for rule in self._rules)
        object.__setattr__(self, "rules", tuple(rules))  # one way to write the same rule

    def _faults(self) -> Iterator[str]:
        yield from (f"sizes: {name} is {n}" for name, n in self.sizes.items() if not 0 < n <= MAX_NUMEL)
        for name, words in self.choices.items():
            if not words or len(set(words)) < len(words) or "" in words:
                yield f"choices: those of {name} must be different words, got {words}"
        for rule in self._rules:
            yield from (f"{' -> '.join(rule[:2])!r}: {fault}" for fault in self._rule_faults(rule))
        for alias, name in self.aliases.items():
            faults = [fault for pattern in (alias, name) for fault in _pattern_faults(pattern)]
            if not faults and {*_placeholders(alias)} != {*_placeholders(name)}:
                faults = ["both must have the same placeholders"]
            yield from (f"alias {alias!r} of {name!r}: {fault}" for fault in faults)

    def _rule_faults(self, rule: NameRule) -> Iterator[str]:
        if faults := [fault for pattern in rule[:2] for fault in _pattern_faults(pattern)]:
            yield from faults
            return
        here, there = {*_placeholders(rule.source)}, {*_placeholders(rule.target)}
        if not rule.dims:
            if here != there:
                yield f"{_braces(here ^ there)} is on one side only: `dims` must say which dim of the other it is"
            return
        try:
            dims = Dims.parse(rule.dims)
        except ValueError as error:
            yield str(error)
            return
        source, target = names_of(dims.source), names_of(dims.target)
        if both := (here & there) & (source | target):
            yield f"{_braces(both)} is in both names, and so no dim"
        if wrong := (here - there) - target | (there - here) - source:
            yield f"{_braces(wrong)} is in one name only, and must be a dim of the other tensor"
        if wrong := (source ^ target) - (here ^ there) | (here - there) & source | (there - here) & target:
            yield f"{', '.join(sorted(wrong))} must be a dim on both sides, or a placeholder of the other's name"
        if max(len(names_of(dims.source)), len(names_of(dims.target))) > MAX_DIMS:
            yield f"more than {MAX_DIMS} dims"

    @property
    def _rules(self) -> tuple[NameRule, ...]:
        return self.rules  # pyright: ignore[reportReturnType]

    @cached_property
    def inverse(self) -> "NameMap":
        """The same map from target to source."""
        rules = (
            NameRule(rule.target, rule.source, str(Dims.parse(rule.dims).inverse) if rule.dims else "")
            for rule in self._rules
        )
        return NameMap(tuple(rules), self.choices, self.sizes, self.aliases, self.ignored, self.optional)

    def apply(self, sources: Mapping[str, Shape], targets: Mapping[str, Shape] | None = None) -> dict[str, Mapped]:
        """What the tensors are called on the target side, and how each is made.

        Args:
          sources: the shapes of the source tensors, by name.
          targets: those that are wanted, where that is known; by default all that the rules make of the sources.

        Returns:
          By target name.

        Raises:
          NameMapError: naming every tensor that is missing, that no rule knows, that two rules claim, or that has a
            shape that does not fit.
        """
        return _Applying(self, dict(sources), targets).run()

    def tied(self, names: Iterable[str]) -> dict[str, str]:
        """By alias, the tensor that it is tied to, of those that are called so on either side.

        Example:
          >>> NameMap((), aliases={"head": "embed"}).tied(["embed"])
          {'head': 'embed'}
        """
        patterns = [(self._regex(name), alias) for alias, name in self.aliases.items()]
        return {
            _fill(alias, found): name
            for name in names
            for regex, alias in patterns
            if (found := _match(regex, name)) is not None
        }

    def knows(self, name: str) -> bool:
        """Whether a rule or an alias speaks of a source tensor of this name, or it is passed over."""
        patterns = (*(rule.source for rule in self._rules), *self.aliases)
        return self.is_ignored(name) or any(_match(self._regex(pattern), name) is not None for pattern in patterns)

    def is_ignored(self, name: str) -> bool:
        """Whether a name is passed over."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def to_json(self, *, indent: int | None = None) -> str:
        """The map as a versioned JSON document."""
        return NAMES_FILE.dump(self, indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> "NameMap":
        """Reads what `to_json` wrote. The text may come from anywhere: it is validated whole.

        Raises:
          NameMapError: naming every fault, or that the file is of a newer version.
        """
        return NAMES_FILE.load(cls, text)

    def _regex(self, pattern: str) -> re.Pattern:
        """Placeholders become groups: numbers without leading zeros, or one of the choices."""
        if (made := self._regexes.get(pattern)) is None:
            parts = []
            for at, part in enumerate(_PLACEHOLDER.split(pattern)):
                words = "|".join(map(re.escape, self.choices.get(part, ()))) or "0|[1-9][0-9]{0,8}"
                parts.append(f"(?P<{part}>{words})" if at % 2 else re.escape(part))
            made = self._regexes[pattern] = re.compile("".join(parts))
        return made

    @cached_property
    def _regexes(self) -> dict[str, re.Pattern]:
        return {}


class _Applying:
    """One call of `NameMap.apply`."""

    def __init__(self, names: NameMap, sources: dict[str, Shape], targets: Mapping[str, Shape] | None):
        self.names, self.sources = names, sources
        self.targets = (
            None if targets is None else {n: tuple(s) for n, s in targets.items() if not names.is_ignored(n)}
        )
        self.faults: list[str] = []
        self.failed: list[re.Pattern] = []  # targets that could not be made, which is said already
        self.made: dict[str, Mapped] = {}

    def run(self) -> dict[str, Mapped]:
        found = self._found()
        values = self._values(found)
        for rule, tensors in found.items():
            if self.targets is None:
                self._check_complete(rule, tensors, values)
            self._map(rule, tensors)
        wanted = self.targets
        if wanted is not None:
            tied = {alias: name for alias, name in self.names.tied(self.made).items() if alias in wanted}
            for alias, name in tied.items():
                if alias not in self.made:
                    self.made[alias] = self.made[name]._replace(name=alias)
            self._compare(wanted, set(tied.values()))
        if self.faults:
            raise NameMapError("these tensors do not fit the name map:" + listed(self.faults))
        return self.made if wanted is None else {name: self.made[name] for name in wanted}

    def _found(self) -> dict[NameRule, list[tuple[str, dict[str, str]]]]:
        """For each rule, the sources that it speaks of, and what its placeholders are there."""
        rules = [(rule, self.names._regex(rule.source)) for rule in self.names._rules]
        found: dict[NameRule, list] = {rule: [] for rule, _ in rules}
        unknown = []
        for name, called in self._untied().items():
            if self.names.is_ignored(name):
                continue
            hits = [(rule, match) for rule, regex in rules if (match := _match(regex, called)) is not None]
            if not hits:
                unknown.append(name)
            elif len(hits) > 1:
                self.faults.append(f"{name}: ambiguous, it is {' and '.join(rule.source for rule, _ in hits)}")
            for rule, match in hits[:1]:
                found[rule].append((name, match))
        self.faults += (f"{name}: extra, no rule speaks of it" for name in unknown)
        return found

    def _untied(self) -> dict[str, str]:
        """What each source is called in the rules, without those that are tied to another that is there.

        One that stands alone goes by the name of what it is tied to.
        """
        called = {name: name for name in self.sources}
        for alias, name in self.names.aliases.items():
            regex = self.names._regex(alias)
            for found in self.sources:
                if (match := _match(regex, found)) is None:
                    continue
                first = _fill(name, match)
                if first not in self.sources:
                    called[found] = first
                    continue
                del called[found]
                here, there = tuple(self.sources[found]), tuple(self.sources[first])
                if here != there:
                    self.faults.append(f"{found}: shape {here}, but it is tied to {first} of {there}")
        return called

    def _values(self, found: Mapping[NameRule, list]) -> dict[str, dict[str, None]]:
        """By placeholder, what it is somewhere: all choices, or the numbers up to the highest that there is."""
        values: dict[str, dict[str, None]] = {
            name: dict.fromkeys(words) for name, words in self.names.choices.items()
        }
        highest: dict[str, int] = defaultdict(lambda: -1)
        for tensors in found.values():
            for _, match in tensors:
                for name, value in match.items():
                    if name not in values:
                        highest[name] = max(highest[name], int(value))
        for name, last in highest.items():
            values[name] = dict.fromkeys(str(at) for at in range(min(last + 1, _MAX_NAMES)))
        return values

    def _check_complete(self, rule: NameRule, tensors: list, values: Mapping[str, Mapping[str, None]]) -> None:
        """Names the sources that are missing, by what the placeholders are elsewhere."""
        ranges = [values.get(name, {}) for name in _placeholders(rule.source)]
        have = {_fill(rule.source, match) for _, match in tensors}
        if not all(ranges) or (not tensors and self._is_optional(rule.source)):
            if not self._is_optional(rule.source):
                self.faults.append(f"{rule.source}: missing")
            return
        names = (
            _fill(rule.source, dict(zip(_placeholders(rule.source), of, strict=True)))
            for of in itertools.islice(itertools.product(*ranges), _MAX_NAMES)
        )
        self.faults += (f"{n}: missing" for n in names if n not in have and not self._is_optional(n))

    def _is_optional(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names.optional)

    def _map(self, rule: NameRule, tensors: list[tuple[str, dict[str, str]]]) -> None:
        """The targets of one rule."""
        joined: dict[tuple, list[tuple[str, dict[str, str]]]] = defaultdict(list)
        there = _placeholders(rule.target)
        for name, match in tensors:
            joined[tuple((p, match[p]) for p in there if p in match)].append((name, match))
        for key, members in joined.items():
            try:
                self._join(rule, dict(key), members)
            except ValueError as error:
                self.faults.append(f"{', '.join(name for name, _ in members[:4])}: {error}")
                self.failed.append(self.names._regex(_fill(rule.target, dict(key))))

    def _join(self, rule: NameRule, shared: dict[str, str], members: list[tuple[str, dict[str, str]]]) -> None:
        first = tuple(self.sources[members[0][0]])
        if other := next((name for name, _ in members if tuple(self.sources[name]) != first), None):
            raise ValueError(f"shapes {first} and {tuple(self.sources[other])} of what belongs together")
        dims = Dims.parse(rule.dims) if rule.dims else same(len(first))
        inner = [p for p in _placeholders(rule.source) if p not in _placeholders(rule.target)]
        outer = [p for p in _placeholders(rule.target) if p not in shared]
        known = {**self.names.sizes, **{name: len(words) for name, words in self.names.choices.items()}}
        known |= {p: 1 + max(int(m[p]) for _, m in members) for p in inner if p not in self.names.choices}
        if (count := math.prod(known[p] for p in inner)) != len(members):
            raise ValueError(f"{len(members)} of the {count} tensors that make up {_fill(rule.target, shared)}")
        try:
            sizes = dims.solve(known, first, None)
        except ValueError:
            sizes = dims.solve(known, first, self._target_shape(rule, shared, outer))
        if (count := math.prod(sizes[p] for p in outer)) > _MAX_NAMES:
            raise ValueError(f"it would become {count} tensors")
        shape = dims.target_shape(sizes)
        for of in itertools.product(*(range(sizes[p]) for p in outer)):
            index = dict(zip(outer, of, strict=True))
            name = _fill(rule.target, {**shared, **{p: self._word(p, at) for p, at in index.items()}})
            links = (
                dims.link(source, sizes, index, {p: self._index(p, match[p]) for p in inner})
                for source, match in members
            )
            if name in self.made:
                self.faults.append(
                    f"{name}: ambiguous, made of {members[0][0]} and {self.made[name].links[0].source}"
                )
            self.made[name] = Mapped(name, shape, tuple(links))

    def _target_shape(self, rule: NameRule, shared: Mapping[str, str], outer: list[str]) -> Shape | None:
        name = _fill(rule.target, {**shared, **{p: self._word(p, 0) for p in outer}})
        return (self.targets or {}).get(name)

    def _word(self, placeholder: str, at: int) -> str:
        words = self.names.choices.get(placeholder)
        return words[at] if words else str(at)

    def _index(self, placeholder: str, word: str) -> int:
        words = self.names.choices.get(placeholder)
        return words.index(word) if words else int(word)

    def _compare(self, wanted: Mapping[str, Shape], tied: set[str]) -> None:
        """What is made against what is wanted."""
        back = [(self.names._regex(rule.target), rule.source) for rule in self.names._rules]
        for name, shape in wanted.items():
            if (mapped := self.made.get(name)) is None:
                sources = [_fill(s, m) for regex, s in back if (m := _match(regex, name)) is not None]
                near = get_close_matches(name, self.made, 1)
                hint = f", would be {sources[0]}" if sources else f"; did you mean {near[0]}?" if near else ""
                if not any(_match(regex, name) is not None for regex in self.failed):
                    self.faults.append(f"{name}: missing{hint}")
            elif mapped.shape != shape:
                self.faults.append(f"{name}: shape {mapped.shape} from {mapped.links[0].source}, wanted {shape}")
        for name, mapped in self.made.items():
            if name not in wanted and name not in tied and not self._is_optional(name):
                self.faults.append(f"{mapped.links[0].source}: extra, nothing called {name} is wanted")


def _placeholders(pattern: str) -> list[str]:
    return _PLACEHOLDER.findall(pattern)


def _pattern_faults(pattern: str) -> Iterator[str]:
    names = _placeholders(pattern)
    if not pattern or "{" in _PLACEHOLDER.sub("", pattern) or "}" in _PLACEHOLDER.sub("", pattern):
        yield f"{pattern!r} is no name with placeholders in braces"
    yield from (f"{{{name}}} is no placeholder; write {{i}}" for name in names if not is_name(name))
    if len(set(names)) < len(names):
        yield f"{pattern!r} has a placeholder twice"
    if "}{" in pattern:
        yield f"{pattern!r} has placeholders with nothing between them"


def _match(regex: re.Pattern, name: str) -> dict[str, str] | None:
    found = regex.fullmatch(name)
    return found.groupdict() if found else None


def _fill(pattern: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), pattern)


def _braces(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names))
