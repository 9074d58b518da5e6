"""Operations that ragged tensors must do as whole tensors do, and others that they must refuse by name."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

F = nn.functional


def words(text: str) -> list[str]:
    return text.split()


ELEMENTWISE_1 = words(
    """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad digamma erf erfc
    erfinv exp exp2 expm1 floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2
    logical_not logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt selu sgn sigmoid sign signbit sin
    sinc sinh sqrt square tan tanh trunc clone zeros_like ones_like frexp
    """
)
ELEMENTWISE_2 = words(
    """
    add atan2 copysign div eq float_power floor_divide fmax fmin fmod ge gt heaviside hypot le ldexp logaddexp
    logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul ne nextafter pow remainder rsub sub
    true_divide xlogy max min
    """
)
INTEGER_2 = words(
    """
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm add mul
    """
)
FUNCTIONAL = words(
    """
    celu elu gelu hardshrink hardsigmoid hardtanh leaky_relu mish relu6 silu softplus softshrink softsign tanhshrink
    hardswish
    """
)
REDUCTIONS = words(
    """
    sum mean prod amax amin max min any all norm count_nonzero
    """
)
FOREACH_1 = words(
    """
    abs acos ceil cos exp expm1 floor log neg reciprocal round sigmoid sign sin sqrt tanh trunc zero_ abs_ neg_
    sqrt_ exp_
    """
)
FOREACH_2 = words(
    """
    add sub mul div maximum minimum pow add_ sub_ mul_ div_ copy_
    """
)

Case = Callable[[torch.Tensor, torch.Tensor], object]


def of_one(f: Callable, change: Callable = lambda x: x) -> Case:
    """The result, and the operand afterwards: in place both are checked."""
    return lambda x, y: (f(x := change(x)), x)


def of_two(f: Callable, change: Callable = lambda x: x) -> Case:
    return lambda x, y: (f(x := change(x), y := change(y)), x, y)


def of_lists(f: Callable, *more: object) -> Case:
    return lambda x, y: (f([x, y], *(more or [[y, y]])), x, y)


def works() -> Iterator[tuple[str, Case]]:
    """Of two tensors of one shape, the second positive: cases that equal the run on whole tensors."""
    for name in ELEMENTWISE_1:
        change = torch.Tensor.int if name == "bitwise_not" else torch.Tensor.clone
        yield name, of_one(getattr(torch, name), change)
        if hasattr(torch.Tensor, name + "_"):
            yield name + "_", of_one(getattr(torch.Tensor, name + "_"), change)
    for name in ELEMENTWISE_2:
        yield name, of_two(getattr(torch, name))
        if hasattr(torch.Tensor, name + "_") and name not in ("ldexp", "float_power"):
            yield name + "_", of_two(getattr(torch.Tensor, name + "_"))
    for name in INTEGER_2:
        yield f"{name} int", of_two(getattr(torch, name), lambda x: x.abs().int())
    for name in FUNCTIONAL:
        yield name, of_one(getattr(F, name))
    for name in REDUCTIONS:
        f = getattr(torch, name)
        yield name, of_one(f)
        if name not in ("any", "all", "count_nonzero"):
            yield f"{name} bf16", of_one(f, lambda x: x.bfloat16().clamp(-2, 2))
        if name not in ("mean", "norm"):
            yield f"{name} bool", of_one(f, lambda x: x > 100)
    for name in FOREACH_1:
        yield f"_foreach_{name}", lambda x, y, f=getattr(torch, f"_foreach_{name}"): (f([y, x + 9]), x, y)  # noqa: B008
    for name in FOREACH_2:
        f = getattr(torch, f"_foreach_{name}")
        yield f"_foreach_{name}", of_lists(f)
        if name != "copy_":
            yield f"_foreach_{name} scalar", of_lists(f, 2.0)
            yield f"_foreach_{name} scalars", of_lists(f, [2, 3])
    for ord in (0, 0.5, 1, 2, 3, -1, float("inf"), -float("inf")):
        yield f"vector_norm {ord}", lambda x, y, ord=ord: torch.linalg.vector_norm(x, ord)
        yield f"_foreach_norm {ord}", lambda x, y, ord=ord: torch._foreach_norm([x, y.T, x.bfloat16()], ord)
    nan = float("nan")
    yield from {
        "scalars": lambda x, y: (x * 2 + 1.5, 3 - x, 1 / y, x**2, 2**x, x > 0, -x, abs(x), x // 2, x % 3, ~(x > 0)),
        "scalar tensors": lambda x, y: (
            x * torch.tensor(2.0),
            torch.tensor(3, dtype=torch.float64) - x,
            x / torch.tensor(2),
        ),
        "in place": lambda x, y: (x.add_(y, alpha=2).mul_(y).sub_(1).div_(2).clamp_(-1, 1), x),
        "in place ops": lambda x, y: [x.__iadd__(y), x.__imul__(2), x],
        "out": lambda x, y: (torch.add(x, y, out=y), y),
        "clamp": lambda x, y: (torch.clamp(x, -1), x.clamp(max=1), x.clamp(-y, y), x.clamp_min(0), x.clamp_max(y)),
        "where": lambda x, y: (torch.where(x > 0, x, y), torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, y)),
        "masked_fill": lambda x, y: (x.masked_fill(x > 0, 7), x.masked_fill_(x < 0, torch.tensor(3.0)), x),
        "lerp": lambda x, y: (torch.lerp(x, y, 0.25), torch.lerp(x, y, y), x.lerp_(y, 0.5), x),
        "addcmul": lambda x, y: (torch.addcmul(x, y, y, value=2), x.addcdiv_(y, y + 1, value=-1), x),
        "fill": lambda x, y: (x.fill_(3), y.zero_(), x, y),
        "copy": lambda x, y: (x.copy_(y.bfloat16()), x),
        "full": lambda x, y: (torch.full_like(x, 3), torch.ones_like(x, dtype=torch.int64)),
        "dtypes": lambda x, y: (
            x.bfloat16(),
            x.to(torch.float64),
            x.half().float(),
            x.int(),
            x.bool(),
            y.type(torch.int8),
        ),
        "devices": lambda x, y: (x.cpu(), x.to("cpu", copy=True), x.contiguous(), x.detach(), x.clone()),
        "promotion": lambda x, y: (x.bfloat16() + y, x.int() * y, x.half() + y.bfloat16(), x.int() / y.int()),
        "views": lambda x, y: (
            x.view(-1),
            x.reshape(2, -1, 2),
            x.flatten(),
            x.unsqueeze(1),
            x[None],
            x.unsqueeze(-1).squeeze(),
        ),
        "view in place": lambda x, y: (x.view(-1).mul_(2), x),
        "transposes": lambda x, y: (
            x.T,
            x.mT,
            x.t(),
            x.transpose(0, 1),
            x.permute(1, 0),
            x.unsqueeze(1).permute(2, 0, 1),
        ),
        "of transposed": lambda x, y: (x.T * y.T + 1, x.T.norm(), x.T.add_(1), x, (x.T * 2).T, torch.zeros_like(x.T)),
        "of views": lambda x, y: (x.view(4, 7) * y.view(4, 7), x.flatten().sum()),
        "reductions of dims": lambda x, y: (x.sum((0, 1)), x.flatten().sum(0), x.mean(dim=(-1, 0)), x.amax((1, 0))),
        "reductions with dtypes": lambda x, y: (
            x.int().sum(),
            (x > 0).sum(),
            x.sum(dtype=torch.float64),
            x.half().norm(),
        ),
        "nan": lambda x, y: [f(torch.where(x > 2, nan, x)) for f in (torch.sum, torch.amax, torch.amin, torch.isnan)],
        "equal": lambda x, y: (torch.equal(x, x.clone()), torch.equal(x, y), torch.allclose(x, x + 1e-9)),
        "isclose": lambda x, y: torch.isclose(x, y),
        "complex": lambda x, y: (x * 1j, (x * 1j).abs(), (x * 1j).norm()),
        "threshold": lambda x, y: (F.threshold(x, 0.5, 2.0), torch.special.xlog1py(x.abs(), y)),
        "special": lambda x, y: [
            f(y) for f in (torch.special.entr, torch.special.erfcx, torch.special.i1, torch.special.log_ndtr)
        ],
        "polygamma": lambda x, y: (torch.polygamma(2, y), torch.mvlgamma(y + 3, 2), torch.igamma(y, y + 1)),
        "foreach three": lambda x, y: (
            torch._foreach_addcdiv_([x], [y], [y + 1], 0.5),
            torch._foreach_lerp([x], [y], 0.1),
            x,
        ),
        "foreach tensor": lambda x, y: (torch._foreach_mul_([x, y], torch.tensor(0.5)), x, y),
        "foreach max": lambda x, y: torch._foreach_max([x, y]),
    }.items()


def refused() -> Iterator[tuple[str, Case]]:
    """Cases that must raise NotImplementedError."""
    yield from {
        "mm": lambda x, y: x @ y.T,
        "linear": lambda x, y: F.linear(x, y),
        "addmm": lambda x, y: torch.addmm(x, x, torch.ones(4, 4)),
        "einsum": lambda x, y: torch.einsum("ij,ij->i", x, y),
        "dot": lambda x, y: torch.dot(x.view(-1), y.view(-1)),
        "outer": lambda x, y: torch.outer(x.view(-1), y.view(-1)),
        "softmax": lambda x, y: x.softmax(-1),
        "log_softmax": lambda x, y: x.log_softmax(0),
        "layer_norm": lambda x, y: F.layer_norm(x, (4,)),
        "glu": lambda x, y: F.glu(x),
        "conv": lambda x, y: F.conv1d(x[None], y[None]),
        "embedding": lambda x, y: F.embedding(torch.tensor([1]), x),
        "cross_entropy": lambda x, y: F.cross_entropy(x, torch.zeros(7, dtype=torch.long)),
        "pad": lambda x, y: F.pad(x, (1, 1)),
        "sum of a dim": lambda x, y: x.sum(0),
        "sum keepdim": lambda x, y: x.sum((0, 1), keepdim=True),
        "mean of a dim": lambda x, y: x.mean(-1),
        "amax of a dim": lambda x, y: x.amax(1),
        "max of a dim": lambda x, y: x.max(0),
        "max of the dim": lambda x, y: x.flatten().max(0),
        "norm of a dim": lambda x, y: x.norm(dim=1),
        "matrix norm": lambda x, y: torch.linalg.matrix_norm(x, 2),
        "svd": lambda x, y: torch.linalg.svd(x),
        "qr": lambda x, y: torch.linalg.qr(x),
        "var": lambda x, y: x.var(),
        "std": lambda x, y: x.std(0),
        "median": lambda x, y: x.median(),
        "argmax": lambda x, y: x.argmax(),
        "logsumexp": lambda x, y: x.logsumexp((0, 1)),
        "cumsum": lambda x, y: x.cumsum(0),
        "cumprod": lambda x, y: x.cumprod(0),
        "diff": lambda x, y: x.diff(),
        "sort": lambda x, y: x.sort(),
        "topk": lambda x, y: x.topk(2),
        "unique": lambda x, y: x.unique(),
        "kthvalue": lambda x, y: x.kthvalue(2),
        "quantile": lambda x, y: x.quantile(0.5),
        "histc": lambda x, y: x.histc(3),
        "nonzero": lambda x, y: x.nonzero(),
        "masked_select": lambda x, y: x.masked_select(x > 0),
        "boolean index": lambda x, y: x[x > 0],
        "row": lambda x, y: x[0],
        "rows": lambda x, y: x[1:3],
        "set row": lambda x, y: x.__setitem__(0, 1.0),
        "index_select": lambda x, y: x.index_select(0, torch.tensor([1])),
        "gather": lambda x, y: x.gather(0, torch.zeros(1, 4, dtype=torch.long)),
        "take": lambda x, y: x.take(torch.tensor([1])),
        "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1]), y),
        "scatter_": lambda x, y: x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 1.0),
        "cat": lambda x, y: torch.cat([x, y]),
        "stack": lambda x, y: torch.stack([x, y]),
        "split": lambda x, y: x.split(2),
        "chunk": lambda x, y: x.chunk(2),
        "unbind": lambda x, y: x.unbind(),
        "narrow": lambda x, y: x.narrow(0, 1, 2),
        "roll": lambda x, y: x.roll(1),
        "flip": lambda x, y: x.flip(0),
        "repeat": lambda x, y: x.repeat(2, 1),
        "expand": lambda x, y: x[None].expand(3, 7, 4),
        "tril": lambda x, y: x.tril(),
        "diag": lambda x, y: x.diagonal(),
        "unfold": lambda x, y: x.unfold(0, 2, 1),
        "as_strided": lambda x, y: x.as_strided((2,), (1,)),
        "view of dtype": lambda x, y: x.view(torch.int32),
        "view of transposed": lambda x, y: x.T.reshape(2, 14),
        "contiguous of transposed": lambda x, y: x.T.contiguous(),
        "resize_": lambda x, y: x.resize_(3),
        "set_": lambda x, y: x.set_(y),
        "t_": lambda x, y: x.t_(),
        "new size": lambda x, y: x.new_zeros(3),
        "logsigmoid": lambda x, y: F.logsigmoid(x),
        "item": lambda x, y: x.view(-1)[0].item(),
        "rand_like": lambda x, y: torch.rand_like(x),
        "randn_like": lambda x, y: torch.randn_like(x),
        "normal_": lambda x, y: x.normal_(),
        "uniform_": lambda x, y: x.uniform_(),
        "bernoulli": lambda x, y: x.sigmoid().bernoulli(),
        "dropout": lambda x, y: F.dropout(x, 0.5),
        "rrelu": lambda x, y: F.rrelu(x, training=True),
        "random_": lambda x, y: x.random_(),
        "trunc_normal_": lambda x, y: nn.init.trunc_normal_(x),
        "cdist": lambda x, y: torch.cdist(x, y),
        "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
        "view_as_complex": lambda x, y: torch.view_as_complex(x.view(7, 2, 2)),
        "transposed and not": lambda x, y: x.view(4, 7) + y.T,
        "other shape": lambda x, y: x + y.view(-1),
        "broadcast": lambda x, y: x * y.unsqueeze(0),
        "whole": lambda x, y: x + torch.ones(7, 4),
        "whole, from": lambda x, y: torch.ones(7, 4).add_(x),
        "row of numbers": lambda x, y: x * torch.ones(4),
        "into an ordinary tensor": lambda x, y: torch.zeros(()).add_(x),
        "ordinary in a list": lambda x, y: torch._foreach_add([x, torch.ones(3)], 1.0),
        "norm of a mixed list": lambda x, y: torch._foreach_norm([x, torch.ones(3)]),
    }.items()
