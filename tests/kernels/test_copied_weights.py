"""The operations of a compiled program that `scripts.kernels.figures` counts as copies of a weight."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from scripts.kernels.figures import copied_weights

# Three layers of 2,048 channels of 2,048 inputs, and an embedding of 4,096 tokens. A step of 2,048 tokens has states as
# large as a weight.
SHAPES = {"layers": (3, 2048, 2048), "embedding": (4096, 2048)}
HLO = """HloModule step

%multiply (p0: bf16[2048,2048], p1: s8[3,2048,2048]) -> bf16[2048,2048] {
  %p0 = bf16[2048,2048]{1,0} parameter(0)
  %p1 = s8[3,2048,2048]{2,1,0} parameter(1)
  %convert.1 = bf16[3,2048,2048]{2,1,0} convert(%p1)
  ROOT %convolution.1 = bf16[2048,2048]{1,0} convolution(%p0, %convert.1), dim_labels=bf_oi->bf
}

%add (p2: bf16[2048,2048]) -> bf16[2048,2048] {
  %p2 = bf16[2048,2048]{1,0} parameter(0)
  ROOT %add.1 = bf16[2048,2048]{1,0} add(%p2, %p2)
}

%body (carry: (s8[3,2048,2048], s8[2048,2048])) -> s8[3,2048,2048] {
  %carry = (s8[3,2048,2048]{2,1,0}, s8[2048,2048]{1,0}) parameter(0)
  %part.1 = s8[2048,2048]{1,0} get-tuple-element(%carry), index=1
  %stack.1 = s8[3,2048,2048]{2,1,0} get-tuple-element(%carry), index=0
  ROOT %IN_LOOP
}

ENTRY %main (stack: s8[3,2048,2048], embedding: bf16[4096,2048], x: bf16[2048,2048]) -> bf16[2048,2048] {
  %stack = s8[3,2048,2048]{2,1,0} parameter(0)
  %embedding = bf16[4096,2048]{1,0} parameter(1)
  %x = bf16[2048,2048]{1,0} parameter(2)
  %product = bf16[2048,2048]{1,0} fusion(%x, %stack), kind=kOutput, calls=%multiply
  %sum = bf16[2048,2048]{1,0} fusion(%product), kind=kLoop, calls=%add
  ROOT %ONCE
}
"""


NOTHING = "nothing = s32[] constant(0)"
START = "(s8[{0}]{{2,1,0:S(1)}}, s8[{0}]{{2,1,0}}, u32[]) copy-start(%stack)"


@pytest.mark.parametrize(
    ("once", "in_loop", "found"),
    [
        ("sum.2 = bf16[2048,2048]{1,0} add(%sum, %x)", NOTHING, []),
        ("slice.1 = s8[1,2048,2048]{2,1,0} dynamic-slice(%stack, %x)", NOTHING, ["dynamic-slice s8[1,2048,2048]"]),
        ("widened = (bf16[2048,2048]{1,0}, f32[8]{0}) fusion(%stack), calls=%add", NOTHING, ["fusion bf16[2048,2048]"]),
        ("copy.1 = s8[3,2048,2048]{1,2,0} copy(%stack)", NOTHING, ["copy s8[3,2048,2048]"]),
        ("copy.2 = bf16[4096,2048]{0,1} copy(%embedding)", NOTHING, ["copy bf16[4096,2048]"]),
        # Asynchronous copies: of a stack before a loop, of a part in a loop, of a stack in a loop, and so in two parts.
        (f"start.1 = {START.format('3,2048,2048')}", NOTHING, []),
        (NOTHING, f"start.2 = {START.format('1,2048,2048')}", []),
        (NOTHING, f"start.3 = {START.format('3,2048,2048')}", ["copy-start s8[3,2048,2048]"]),
        (
            NOTHING,
            'joined = s8[3,2048,2048]{2,1,0:S(1)} custom-call(%a, %b), custom_call_target="ConcatBitcast"',
            ["custom-call s8[3,2048,2048]"],
        ),
    ],
)
def test_copies_are_known_by_what_they_read_and_write(once, in_loop, found):
    shapes = {name: jax.ShapeDtypeStruct(shape, "int8") for name, shape in SHAPES.items()}
    params = SimpleNamespace(**shapes, unembedding=None)

    assert copied_weights(HLO.replace("%ONCE", f"%{once}").replace("%IN_LOOP", f"%{in_loop}"), params) == found
