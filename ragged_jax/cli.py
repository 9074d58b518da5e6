"""The command `ragged-jax`: plan a model's layout, look at one or at a checkpoint, convert a checkpoint.

ragged-jax plan SHAPES.json -n 64 --block rows:32
ragged-jax show LAYOUT.json
ragged-jax show CHECKPOINT --verify
ragged-jax convert CHECKPOINT HUGGINGFACE_FOLDER --map names.json
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ._convert import convert
from ._shapes import model_groups, num_params, read_shapes
from ._show import show_checkpoint
from .layout import NAME_MAPS, Block, BlockRule, Layout, LayoutError, elements, rows, tile, whole
from .planner import PROFILES, BucketReport, Plan, advise, draw, plan, plan_table

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 1 for damage found, or 2 with one message for the rest."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"ragged-jax {args.command}: {error}", file=sys.stderr)
        return 2


def block_rule(text: str) -> Block:
    """Reads `element`, `elements:256`, `row`, `rows:32`, `tile:128x128` (or `128x128`) and `whole`.

    Example:
      >>> block_rule("rows:32"), block_rule("128x128")
      (rows(32), tile(128, 128))
    """
    kind, _, sizes = text.partition(":")
    if kind and "x" in kind and not sizes:
        kind, sizes = "tile", kind
    try:
        numbers = [int(number) for number in sizes.split("x")] if re.fullmatch(r"\d+(x\d+)*", sizes) else []
        kind = kind if numbers or not sizes else ""
        match kind, numbers:
            case (("element" | "elements"), []):
                return elements(1)
            case (("element" | "elements"), [n]):
                return elements(n)
            case (("row" | "rows"), []):
                return rows(1)
            case (("row" | "rows"), [n]):
                return rows(n)
            case "tile", [r, c]:
                return tile(r, c)
            case "whole", []:
                return whole()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    comma = re.fullmatch(r"(?:tile:)?(\d+),(\d+)", text)
    right = f"tile:{comma[1]}x{comma[2]}" if comma else "element, elements:256, row, rows:32, tile:128x128 or whole"
    raise argparse.ArgumentTypeError(f"{text!r} is not a block; write {right}")


def _rule(texts: Sequence[str]) -> BlockRule:
    """One block for all, or `PATTERN=BLOCK` by name; what no pattern matches may be cut anywhere."""
    try:
        if len(texts) == 1 and "=" not in texts[0]:
            return block_rule(texts[0])
        rule = {}
        for text in texts:
            pattern, _, block = text.rpartition("=")
            rule[pattern or "*"] = block_rule(block)
        return rule
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--block {error}") from None


def _merge(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _shares(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ragged-jax", description="Layouts that cut a tensor only where its structure allows."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("plan", help="choose a layout and say what it costs")
    command.set_defaults(run=_plan)
    command.add_argument(
        "shapes",
        help="a shapes file, a safetensors file or index, or module:factory, which returns a Flax model",
    )
    command.add_argument("-n", "--num-shards", type=int, required=True)
    command.add_argument(
        "--block",
        nargs="+",
        default=["row"],
        metavar="BLOCK",
        help="what must stay on one device: element, elements:256, row, rows:32, tile:128x128, whole; or "
        "several PATTERN=BLOCK, the first that matches a tensor's name wins. Default: row",
    )
    units = "of a Flax model, patterns of the submodules that gather, as for fully_shard, which follows that layout"
    command.add_argument("--units", nargs="+", default=[], metavar="PATTERN", help=units)
    stacked = "which of the units hold layers stacked for a scan"
    command.add_argument("--stacked", nargs="+", default=[], metavar="PATTERN", help=stacked)
    command.add_argument("--profile", choices=sorted(PROFILES), default="h100", help="the machine")
    command.add_argument("--storage", choices=("row_major", "tiled", "auto"), default="row_major")
    command.add_argument("--merge", type=_merge, default=1, metavar="LAYERS", help="layers in a bucket, or auto")
    command.add_argument("--shares", type=_shares, metavar="2,2,1,1", help="for devices of different memory")
    command.add_argument("-o", "--output", type=Path, metavar="LAYOUT.json", help="write the layout")
    _add_output(command)

    command = commands.add_parser("show", help="what a layout file or a checkpoint says")
    command.set_defaults(run=_show)
    command.add_argument("path", type=Path, metavar="PATH", help="a layout file, a checkpoint, or a folder of them")
    command.add_argument("--verify", action="store_true", help="read all of a checkpoint, compare its checksums")
    _add_output(command)

    command = commands.add_parser(
        "convert", help="a checkpoint to a Hugging Face directory, or such a directory to a checkpoint"
    )
    command.set_defaults(run=_convert)
    command.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, a folder of them, or the directory")
    command.add_argument("target", type=Path, metavar="DST", help="the other")
    command.add_argument("--map", metavar="NAME", help=f"what tensors are called: {', '.join(NAME_MAPS)}, or a file")
    command.add_argument("--prefix", help="of the model's tensors in the checkpoint. Default: model")
    command.add_argument("--step", type=int, help="which of a folder, or of the new one. Default: latest, 0")
    command.add_argument("--dtype", help="convert floating-point tensors to this, for example bfloat16")
    command.add_argument("--max-file-nbytes", type=int, default=5_000_000_000, help="of one safetensors file")
    command.add_argument("--dry-run", action="store_true", help="say what would be written")
    command.add_argument("--json", action="store_true", help="figures as JSON, nothing else")
    return parser


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="figures as JSON, nothing else")
    command.add_argument("--png", type=Path, metavar="FILE", help="draw the layout; needs matplotlib")


def _plan(args: argparse.Namespace) -> int:
    rule = _rule(args.block)
    if _is_factory(args.shapes):
        groups = model_groups(args.shapes, rule, args.units, args.stacked)
    elif args.units or args.stacked:
        raise ValueError(f"--units and --stacked are for module:factory, and {args.shapes} is a file of shapes")
    else:
        groups = read_shapes(args.shapes, rule)
    names = [tensor.name for group in groups for tensor in group.tensors]
    for pattern in rule if not isinstance(rule, Block) else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--block: the pattern {pattern!r} matches none of {', '.join(names[:10])}, ...")
    options = {"profile": args.profile, "storage": args.storage, "merge": args.merge, "shares": args.shares}
    start = time.perf_counter()
    made = plan(groups, args.num_shards, **options)
    seconds = time.perf_counter() - start
    if args.output:
        args.output.write_text(made.layout.to_json())
    if args.png:
        draw(made.layout, args.png)
    advice = advise(groups, args.num_shards, **options)
    if args.json:
        bound = {
            "lower_bound_fraction": made.bound_fraction,
            "any_layout_fraction": made.floor_fraction,
            "optimal": made.optimal,
            "plan_seconds": seconds,
            "advice": list(advice),
        }
        print(json.dumps({"params": num_params(groups), **_figures(made), **bound}))
        return 0
    console = _console()
    console.print(plan_table(made))
    gap = 100 * (made.padding_fraction - made.bound_fraction)
    verdict = "optimal for these slabs" if made.optimal else f"{gap:.2f} points above the bound for these slabs"
    console.print(f"{num_params(groups):,} parameters, {verdict}, planned in {seconds:.3f} s", highlight=False)
    for line in advice:
        console.print(f"- {line}", highlight=False)
    return 0


def _console() -> "Console":
    """As wide as the terminal; as wide as a table wants where there is none."""
    from rich.console import Console

    return Console(markup=False, width=None if sys.stdout.isatty() else 118)


def _is_factory(source: str) -> bool:
    return ":" in source and not Path(source).exists()


def _show(args: argparse.Namespace) -> int:
    if args.path.is_dir():
        return show_checkpoint(args.path, as_json=args.json, verify=args.verify)
    try:
        layout = Layout.from_json(args.path.read_bytes())
    except OSError as error:
        raise ValueError(f"{args.path}: {error.strerror or error}") from None
    except LayoutError as error:
        raise LayoutError(f"{args.path}: {error}") from None
    made = Plan(layout, tuple(BucketReport.of(bucket, layout.num_parts) for bucket in layout.buckets))
    if args.png:
        draw(layout, args.png)
    if args.json:
        print(json.dumps({"params": sum(t.numel for t in layout.tensors), **_figures(made)}))
    else:
        _console().print(plan_table(made, with_bound=False))
    return 0


def _convert(args: argparse.Namespace) -> int:
    return convert(
        args.source,
        args.target,
        names=args.map,
        prefix=args.prefix,
        step=args.step,
        dtype=args.dtype,
        max_file_nbytes=args.max_file_nbytes,
        dry_run=args.dry_run,
        as_json=args.json,
    )


def _figures(made: Plan) -> dict[str, float | int | str]:
    layout = made.layout
    slabs = [slab for bucket in layout.buckets for slab in bucket.slabs]
    sole = sum(slab.payload_numel for slab in slabs if slab.sole)
    return {
        "num_shards": layout.num_shards,
        "num_tensors": len(layout.tensors),
        "num_buckets": len(layout.buckets),
        "num_slabs": len(slabs),
        "padding_fraction": made.padding_fraction,
        "max_shard_nbytes": made.shard_nbytes,
        "spmd_padding_nbytes": layout.spmd_padding_nbytes,
        "sole_fraction": sole / max(1, sum(slab.payload_numel for slab in slabs)),
        "fingerprint": layout.fingerprint,
    }


if __name__ == "__main__":
    raise SystemExit(main())
