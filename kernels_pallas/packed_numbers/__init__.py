"""Numbers of 8 and 4 bits with scales, as weights and pages hold them."""

from kernels_pallas.packed_numbers.formats import (
    centred,
    dequantize,
    doubled_fp4,
    pack_int4,
    split_int4,
    unpack_int4,
    whole_zeros,
    wide_scales,
)
from kernels_pallas.packed_numbers.turns import MAX_WIDENED, in_turns

__all__ = [
    "MAX_WIDENED",
    "centred",
    "dequantize",
    "doubled_fp4",
    "in_turns",
    "pack_int4",
    "split_int4",
    "unpack_int4",
    "whole_zeros",
    "wide_scales",
]
