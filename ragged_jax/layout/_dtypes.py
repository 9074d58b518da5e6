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


SAFETENSORS_DTYPES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
"""What safetensors files call them; complex128 is missing there."""
