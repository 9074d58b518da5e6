"""What Flax calls the parameters of torch's layers: a table."""

from torch import nn

from ragged_jax.layout import NameMap

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
FLAX: dict[type[nn.Module], dict[str, tuple[str, ...]]] = {
    nn.Linear: {"weight": ("kernel", "in out -> out in")},
    nn.Embedding: {"weight": ("embedding",)},
    nn.Conv1d: {"weight": ("kernel", "w in out -> out in w")},
    nn.Conv2d: {"weight": ("kernel", "h w in out -> out in h w")},
    nn.Conv3d: {"weight": ("kernel", "d h w in out -> out in d h w")},
    **{norm: {"weight": ("scale",)} for norm in _NORMS},
}


def flax_names(module: nn.Module) -> NameMap:
    """What a Flax model would call the parameters of a torch module, if its own submodules are called alike.

    `blocks.3.mlp.weight` (out, in) of a `Linear` is `blocks/3/mlp/kernel` (in, out); the weight of a norm is a
    `scale`, that of an `Embedding` an `embedding`. The rest keeps its name. A tied parameter goes by its first use.

    Example:
      >>> flax_names(nn.Sequential(nn.Linear(3, 5))).rules[0]
      NameRule(source='0/kernel', target='0.weight', dims='in out -> out in')
    """
    rules = []
    seen = set()
    for path, child in module.named_modules():
        table = next((names for kind, names in FLAX.items() if isinstance(child, kind)), {})
        for attribute, parameter in child.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                name, *dims = table.get(attribute, (attribute,))
                here = path.replace(".", "/")
                rules.append(("/".join(filter(None, (here, name))), ".".join(filter(None, (path, attribute))), *dims))
    return NameMap(tuple(rules))
