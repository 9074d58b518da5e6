"""Writes `docs/reference.md`: every public name with its signature and the first line of its docstring.

The source is parsed and not imported, so that neither jax nor torch need be installed: `make docs`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 110  # of a signature on one line

GUIDE = {  # the names of `ragged_jax` itself, by the question that they answer
    "Sharding a model": "fully_shard shard_tree unsharded unshard ShardedTree PackedTensor",
    "Blocks": "elements rows tile whole Block",
    "Training": "value_and_grad apply replicated varying labelled partition combine",
    "Whole tensors": "full_params shard_like get",
    "Precision": "MixedPrecision DynamicLossScale all_finite quantisation_error",
    "Seeing inside": "describe norms find_nonfinite",
    "Plans, compilers and processes": "plan get_layout Layout LayoutError RaggedShard compiler_options "
    "check_same_on_all_processes",
    "Host memory": "offload to_memory",
    "Checkpoints": "Checkpointer Checkpoint CheckpointError redistribute",
    "Hugging Face and Orbax": "load_huggingface save_huggingface load_orbax save_orbax NameMap",
}
PACKAGES = {  # what users of this package call, with what to say of it
    "ragged_jax.optim": "As `rj.optim`: optax transforms that know what lies where.",
    "ragged_jax.preflight": "What a compiled program does.",
    "ragged_jax.planner": "Chooses layouts and schedules; knows no framework.",
    "torch_bridge": "As `tb`: the same layouts on `torch.distributed`.",
    "torch_bridge.optim": "As `tb.optim`: optimizers of sharded and ordinary parameters.",
}
PARTS = {  # what the above is made of, a line for each name
    "ragged_jax.layout": "What lies where, as values; knows no framework.",
    "ragged_jax.checkpoint": "The format of checkpoints; knows no framework.",
    "ragged_jax.exchange": "States of JAX jobs on the move.",
    "ragged_jax.adapters": "How a Flax model becomes buckets.",
    "ragged_jax.fsdp": "The JAX runtime.",
}
HEAD = """# Reference

Every public name, with its signature and the first line of its docstring. `help(rj.fully_shard)` has the rest:
arguments, shapes, errors, an example. The [guide](guide.md) says what they are for. Written by `make docs`.

"""

Found = tuple[Path, ast.AST]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> dict[str, tuple[str, str]]:
    """By name, the module of this repository that it is imported from, and what it is called there."""
    parts = module.split(".") if file_of(module).name == "__init__.py" else module.split(".")[:-1]
    found = {}
    for node in ast.walk(parsed(file_of(module))):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            if file_of(source).exists():
                found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


def public(package: str) -> list[str]:
    """The names that a package exports, `from ._x import name as name`; of subpackages none."""
    exported = (
        alias.name
        for node in ast.walk(parsed(file_of(package)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    )
    return sorted({name for name in exported if not (file_of(package).parent / name).is_dir()})


def find(module: str, name: str) -> Found:
    """Where a name is defined, in this module or in one that it is imported from."""
    here: ast.AST | None = None
    for node in parsed(file_of(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            here = node  # the last one: what stands before are overloads
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            here = node if any(isinstance(t, ast.Name) and t.id == name for t in targets) else here
    if here is not None:
        return file_of(module), here
    source = imports(module).get(name)
    if source is None:
        raise LookupError(f"{module} has no {name}")
    return find(*source)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def signature(name: str, arguments: list[str], returns: str = "") -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def arguments_of(function: ast.FunctionDef, *, method: bool = False, types: bool = True) -> list[str]:
    """As they stand in the source, one by one."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]

    def text(arg: ast.arg, default: ast.expr | None) -> str:
        typed = f": {ast.unparse(arg.annotation)}" if types and arg.annotation else ""
        equals = " = " if typed else "="
        return arg.arg + typed + (f"{equals}{ast.unparse(default)}" if default else "")

    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    found = [text(*pair) for pair in zip(positional, defaults, strict=True)][1 if method and not is_static else 0 :]
    if args.posonlyargs and not method:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg:
        found.append(f"*{text(args.vararg, None)}")
    elif args.kwonlyargs:
        found.append("*")
    found += [text(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([f"**{text(args.kwarg, None)}"] if args.kwarg else [])


def first_line(node: ast.AST) -> str:
    doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
    return (doc or "").split("\n\n")[0].split("\n")[0]


def ancestry(file: Path, node: ast.ClassDef) -> Iterator[tuple[Path, ast.ClassDef]]:
    """The class and those of this repository that it inherits from."""
    yield file, node
    for base in node.bases:
        try:
            where, found = find(module_of(file), ast.unparse(base))
        except LookupError:  # of another library
            continue
        if isinstance(found, ast.ClassDef):
            yield from ancestry(where, found)


def of_class(name: str, file: Path, node: ast.ClassDef) -> tuple[str, list[str]]:
    """Its signature, and a line for each of its public methods and properties."""
    members: dict[str, ast.FunctionDef] = {}
    for _, each in ancestry(file, node):
        for member in each.body:
            if isinstance(member, ast.FunctionDef):
                members.setdefault(member.name, member)
    fields = [ast.unparse(f) for f in node.body if isinstance(f, ast.AnnAssign) and ast.unparse(f.target)[0] != "_"]
    init = members.get("__init__")
    arguments = arguments_of(init, method=True) if init else fields
    lines = []
    for member in members.values():
        decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
        says = first_line(member)
        if member.name.startswith("_") or not says or any(d.endswith(".setter") for d in decorators):
            continue
        is_property = bool(decorators & {"property", "cached_property"})
        call = "" if is_property else f"({', '.join(arguments_of(member, method=True, types=False))})"
        lines.append(f"- `{member.name}{call}`: {says}")
    return signature(f"class {name}", arguments), lines


def entry(package: str, name: str) -> str:
    """A heading, the signature, and what it does."""
    file, node = find(package, name)
    members: list[str] = []
    says = first_line(node)
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        code = signature(name, arguments_of(node), returns)
    elif isinstance(node, ast.ClassDef):
        code, members = of_class(name, file, node)
    else:
        code = ast.unparse(node)
        code = code if len(code) <= WIDTH else f"{code.partition(' = ')[0]} = ..."
    said = [says] if says else []
    listed = ["\n".join(members)] if members else []
    return "\n\n".join([f"#### {linked(name, file)}", f"```python\n{code}\n```", *said, *listed])


def line(package: str, name: str) -> str:
    """A name in one line."""
    file, node = find(package, name)
    call = f"({', '.join(arguments_of(node, types=False))})" if isinstance(node, ast.FunctionDef) else ""
    says = first_line(node) or (f"`{ast.unparse(node.value)}`" if isinstance(node, ast.Assign) else "")
    return f"- {linked(f'`{name}{call}`', file)}" + (f": {says}" if 0 < len(says) <= WIDTH else "")


def linked(text: str, file: Path) -> str:
    return f"[{text}](../{file.relative_to(ROOT).as_posix()})"


def generate() -> str:
    """The text of the page.

    Raises:
      ValueError: the groups above do not have the names that `ragged_jax` exports.
    """
    grouped = [name for names in GUIDE.values() for name in names.split()]
    if sorted(grouped) != public("ragged_jax"):
        raise ValueError(f"GUIDE and ragged_jax differ in {sorted(set(grouped) ^ set(public('ragged_jax')))}")
    parts = ["## ragged_jax\n\nAs `rj`."]
    for group, names in GUIDE.items():
        parts += [f"### {group}", *(entry("ragged_jax", name) for name in names.split())]
    for package, says in PACKAGES.items():
        parts += [f"## {package}\n\n{says}", *(entry(package, name) for name in public(package))]
    parts.append("## Parts\n\nFor those who write an adapter, an optimizer or a tool. Names from above are left out.")
    for package, says in PARTS.items():
        names = [name for name in public(package) if name not in grouped]
        parts += [f"### {package}\n\n{says}", "\n".join(line(package, name) for name in names)]
    return HEAD + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    page = ROOT / "docs" / "reference.md"
    page.write_text(generate())
