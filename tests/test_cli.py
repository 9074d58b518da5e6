"""The command line: tables, JSON, pictures, layout files, models of all kinds; one clear error for the rest."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ragged_jax import _shapes
from ragged_jax._shapes import ShapesError, groups_from, model_groups, num_params, read_shapes
from ragged_jax.checkpoint import CheckpointDirectory, Part, TensorEntry, read_tensor
from ragged_jax.cli import block_rule, main
from ragged_jax.layout import Layout, elements, rows, tile, whole

MODELS = Path(__file__).parent.parent / "benchmarks" / "models"
GPT2 = str(MODELS / "gpt2_124m.json")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_plan_and_show(capsys, tmp_path):
    layout, picture = str(tmp_path / "layout.json"), tmp_path / "layout.png"
    status, out, err = run(capsys, "plan", GPT2, "-n", "8", "--block", "rows:32", "-o", layout, "--png", str(picture))
    assert (status, err) == (0, "")
    assert "124,439,808 parameters, optimal for these slabs" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    status, out, err = run(capsys, "show", layout)
    assert (status, err) == (0, "")
    assert Layout.from_json(Path(layout).read_bytes()).fingerprint in out


def test_json_figures(capsys, tmp_path):
    layout = str(tmp_path / "layout.json")
    status, out, _ = run(capsys, "plan", GPT2, "-n", "64", "--block", "rows:32", "--json", "-o", layout)
    figures = json.loads(out)
    assert status == 0
    assert figures["params"] == 124_439_808
    assert figures["num_shards"] == 64
    assert 0.38 < figures["padding_fraction"] < 0.40
    assert figures["lower_bound_fraction"] <= figures["padding_fraction"]
    assert figures["plan_seconds"] < 5
    assert figures["advice"][0].startswith("64 shards: 39.04 % padding")
    shown = json.loads(run(capsys, "show", layout, "--json")[1])
    assert shown == {key: figures[key] for key in shown}


def test_options_reach_the_planner(capsys):
    tiled = ("plan", GPT2, "-n", "64", "--block", "32x32", "--storage", "tiled", "--json")
    assert json.loads(run(capsys, *tiled)[1])["padding_fraction"] < 0.02
    blocks = ("--block", "*attn*=rows:32", "*=row", "--shares", "2,1", "--merge", "2", "--profile", "v5p")
    status, out, _ = run(capsys, "plan", GPT2, "-n", "2", *blocks, "--json")
    assert status == 0
    assert json.loads(out)["num_buckets"] == 8


def test_python_m():
    command = [sys.executable, "-m", "ragged_jax", "plan", GPT2, "-n", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["num_tensors"] == 148


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("element", elements(1)),
        ("elements:256", elements(256)),
        ("row", rows(1)),
        ("rows:32", rows(32)),
        ("tile:8x128", tile(8, 128)),
        ("128x128", tile(128, 128)),
        ("whole", whole()),
    ],
)
def test_blocks(text, block):
    assert block_rule(text) == block


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "missing.json", "-n", "4"), "missing.json: No such file"),
        (("plan", __file__, "-n", "4"), "not JSON"),
        (("plan", str(MODELS), "-n", "4"), "is a directory; give a file of shapes, a safetensors file or the index"),
        (("plan", GPT2, "-n", "0"), "num_shards must be an integer of at least 1, got 0"),
        (("plan", GPT2, "-n", "4", "--block", "columns:3"), "'columns:3' is not a block; write element"),
        (("plan", GPT2, "-n", "4", "--block", "tile:8,16"), "'tile:8,16' is not a block; write tile:8x16"),
        (("plan", GPT2, "-n", "4", "--block", "rows:0"), "integers of at least 1"),
        (("plan", GPT2, "-n", "4", "--block", "rows:x"), "'rows:x' is not a block; write element"),
        (
            ("plan", GPT2, "-n", "4", "--block", "*foo=rows:2", "row"),
            "the pattern '*foo' matches none of",
        ),
        (("plan", "flax.nnx:Linear", "-n", "4"), "does not return a model: Linear.__init__() missing"),
        (("plan", GPT2, "-n", "4", "--shares", "1,2"), "shares must be 4 integers"),
        (("plan", "nosuchmodule:make", "-n", "4"), "No module named 'nosuchmodule'"),
        (("plan", "json:nosuch", "-n", "4"), "no attribute 'nosuch'"),
        (("plan", "os:getcwd", "-n", "4"), "must return an NNX module, or a Linen module"),
        (("show", "missing.json"), "missing.json: No such file"),
        (("show", GPT2), "not a layout file"),
    ],
)
def test_one_clear_error(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith(f"ragged-jax {arguments[0]}: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "document: Input should be an object"),
        ({}, "groups: Field required"),
        ({"groups": [{"name": "a"}]}, "groups.0.tensors: Field required"),
        (
            {"groups": [{"name": "a", "tensors": [{"name": "t", "shape": [2, -1]}]}]},
            "shape.1: Input should be greater",
        ),
        ({"groups": [{"name": "a", "tensors": [{"name": "t", "shape": [2.5]}]}]}, "shape.0"),
        (
            {"groups": [{"name": "a", "tensors": [{"name": "t", "shape": [2], "dtype": "f7"}]}]},
            "unknown dtype 'f7'",
        ),
        ({"groups": [{"name": "a", "count": 0, "tensors": []}]}, "count"),
        ({"groups": [{"name": "a", "tensors": [{"name": "t", "shape": [2**30, 2**30]}]}]}, "more than 2"),
    ],
)
def test_bad_shapes_files(document, message):
    with pytest.raises(ShapesError) as error:
        groups_from(document, rows(1), source="model.json")
    assert "model.json" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_the_models_have_their_published_sizes(path):
    assert num_params(read_shapes(path, rows(1))) == json.loads(path.read_text())["params"]


def test_experts_are_stacks():
    document = {"groups": [{"name": "moe", "tensors": [{"name": "experts.up", "shape": [8, 64, 32]}]}]}
    assert groups_from(document, rows(4))[0].tensors[0].block == rows(4, dim=1)
    assert groups_from(document, whole())[0].tensors[0].granularity == 64 * 32


def test_a_directory_says_which_of_its_files_will_do(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    with pytest.raises(ShapesError, match=r"is a directory; .*, such as .*model\.safetensors\.index\.json$"):
        read_shapes(tmp_path, rows(1))


def test_names_are_no_markup(capsys, tmp_path):
    sizes = {"a[/b]": 4, "c[bold]": 8}
    shapes = {"groups": [{"name": n, "tensors": [{"name": "w", "shape": [k]}]} for n, k in sizes.items()]}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    status, out, _ = run(capsys, "plan", str(tmp_path / "shapes.json"), "-n", "2")
    assert (status, "a[/b]" in out, "c[bold]" in out) == (0, True, True)
    part = Part("c[bold]/w", ((0, 2),), np.zeros(2, np.float32))
    CheckpointDirectory(tmp_path / "a[/b]").save(1, {part.tensor: TensorEntry("float32", (2,))}, [part])
    status, out, _ = run(capsys, "show", str(tmp_path / "a[/b]"))
    assert (status, "a[/b]" in out, "c[bold]" in out) == (0, True, True)


def test_a_single_safetensors_file_is_converted(capsys, tmp_path):
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    status, _, err = run(capsys, "convert", str(tmp_path / "model.safetensors"), str(tmp_path / "run"))
    assert (status, err) == (0, "")
    assert read_tensor(tmp_path / "run" / "step_00000000", "model/w").tolist() == [0, 1, 2]


def test_safetensors(tmp_path):
    tensors = {
        f"model.layers.{i}.{name}": np.zeros(shape, np.float32)
        for i in (0, 2, 10)
        for name, shape in {"up.weight": (8, 4), "norm.weight": (4,)}.items()
    }
    tensors["model.embed.weight"] = np.zeros((16, 4), np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    for file in ("model.safetensors", "index.json"):
        groups = read_shapes(tmp_path / file, rows(1))
        assert [g.name for g in groups] == [
            "model.embed",
            "model.layers.0",
            "model.layers.2",
            "model.layers.10",
        ]
        assert {t.dtype for t in groups[0].tensors} == {"float16"}
        assert num_params(groups) == 16 * 4 + 3 * (8 * 4 + 4)
    (tmp_path / "evil.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ShapesError, match="not beside it"):
        read_shapes(tmp_path / "evil.json", rows(1))
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ShapesError, match="claims a header"):
        read_shapes(tmp_path / "bad.safetensors", rows(1))
    (tmp_path / "bad.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ShapesError, match="not a safetensors header"):
        read_shapes(tmp_path / "bad.safetensors", rows(1))


def nnx_model():
    from flax import nnx

    return nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(0)))


def blocks_model():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(40, 8, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    return Model(nnx.Rngs(0))


def test_fully_shard_follows_a_layout_planned_with_its_units(capsys, tmp_path):
    import jax

    import ragged_jax as rj

    file, factory = tmp_path / "layout.json", f"{__name__}:blocks_model"
    assert run(capsys, "plan", factory, "-n", "4", "--units", "blocks/*", "-o", str(file))[0] == 0
    layout = Layout.from_json(file.read_bytes())
    assert [bucket.name for bucket in layout.buckets] == ["", "blocks/0", "blocks/1"]  # not what is in the blocks
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    model = rj.fully_shard(blocks_model, mesh, axis="fsdp", units="blocks/*", plan=layout)
    assert rj.get_layout(model) == layout
    nested = rj.plan(blocks_model(), 4, units=("blocks/*", "blocks/*/up"))
    assert [bucket.name for bucket in nested.layout.buckets if bucket.name.endswith("/up")] == [
        "blocks/0/up",
        "blocks/1/up",
    ]
    status, _, err = run(capsys, "plan", factory, "-n", "4", "--units", "block/*")
    assert (status, "matches no submodule" in err) == (2, True)
    assert "--units and --stacked are for" in run(capsys, "plan", GPT2, "-n", "4", "--units", "h/*")[2]


def linen_model():
    import jax.numpy as jnp
    from flax import linen

    return linen.Dense(16), jnp.zeros((1, 8))


@pytest.mark.parametrize(("name", "params"), [("nnx_model", 8 * 16 + 16 + 16 * 4 + 4), ("linen_model", 8 * 16 + 16)])
def test_flax_models(name, params):
    groups = model_groups(f"{__name__}:{name}", rows(1))
    assert num_params(groups) == params
    assert {t.dtype for g in groups for t in g.tensors} == {"float32"}
    assert _shapes.__doc__


def test_the_first_bytes_of_a_safetensors_file_are_enough_to_plan(tmp_path, capsys):
    whole, start = tmp_path / "whole.safetensors", tmp_path / "start.safetensors"
    save_file({"layers.0.w": np.ones((64, 32), np.float32)}, whole)
    start.write_bytes(whole.read_bytes()[:-64])
    outputs = [(main(["plan", str(file), "-n", "2"]), capsys.readouterr().out) for file in (whole, start)]
    assert outputs[0][0] == outputs[1][0] == 0
    assert outputs[0][1].replace("whole", "start") == outputs[1][1]
