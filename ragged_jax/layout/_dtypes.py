"""Sizes of the element types a layout may name.

The layout core must not import a framework, and numpy alone does not know bfloat16 or the 8-bit floats, so
the names that JAX, torch and safetensors share are listed here with their size.
"""

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`, named as numpy, JAX and ml_dtypes name it.

    Raises:
      ValueError: the name is not one that a layout file may hold.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; a layout knows {', '.join(sorted(ITEMSIZE))}") from None
