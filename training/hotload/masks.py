"""Compare 64 elements at once and get one bit for each: the vector instructions behind the codec's passes over whole tensors.

Written as LLVM vector operations, which any processor's back end turns into what it has (AVX-512, AVX2, NEON).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from groundhop.training.hotload.kernels import compiled

LANES = 64
"""Elements at once; a loop sees to it that so many are there."""


def _lanes(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """64 elements of a contiguous array from `index` on; they need not be aligned."""
    bits = array_type.dtype.bitwidth
    data = context.make_array(array_type)(context, builder, array).data
    vector = ir.VectorType(ir.IntType(bits), LANES)
    start = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
    return builder.load(start, align=1)


def _splat(builder: Any, value: Any, bits: int) -> Any:
    """One number in all 64 places."""
    vector = ir.VectorType(ir.IntType(bits), LANES)
    narrow = builder.trunc(value, ir.IntType(bits))
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), narrow, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), order)


def _differ(typing_context: Any, first: Any, second: Any, index: Any) -> Any:
    """The elements `index ... index + 63` in which two arrays of one type differ, the first in the lowest bit."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right = (_lanes(context, builder, signature.args[i], arguments[i], arguments[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(first, second, types.intp), build


def _at_least(typing_context: Any, array: Any, index: Any, mask: Any, bound: Any) -> Any:
    """Those of the elements `index ... index + 63` of which the bits in `mask`, as a number, are not below `bound`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = signature.args[0].dtype.bitwidth
        lanes = _lanes(context, builder, signature.args[0], arguments[0], arguments[1])
        kept = builder.and_(lanes, _splat(builder, arguments[2], bits))
        reached = builder.icmp_unsigned(">=", kept, _splat(builder, arguments[3], bits))
        return builder.bitcast(reached, ir.IntType(64))

    return types.uint64(array, types.intp, types.uint64, types.uint64), build


def _count_ones(typing_context: Any, word: Any) -> Any:
    """How many bits of a 64-bit word are set."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), build


def _first_one(typing_context: Any, word: Any) -> Any:
    """The place of the lowest set bit of a 64-bit word that is not zero."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), build


def _bit_length(typing_context: Any, word: Any) -> Any:
    """How many bits a 64-bit number takes."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.int64(types.uint64), build


def _fetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Bring the element `index`, which may lie past the end, near to the processor: it will soon be read or written."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        builder.call(function, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), build


# Inside compiled loops they are called without the first argument, which type checkers cannot know.
differ: Any = intrinsic(_differ)
at_least: Any = intrinsic(_at_least)
count_ones: Any = intrinsic(_count_ones)
first_one: Any = intrinsic(_first_one)
bit_length: Any = intrinsic(_bit_length)
fetch: Any = intrinsic(_fetch)


@compiled
def fetch_ahead(array: Any, index: Any) -> None:
    """Bring near the 64 elements from `index` on, which a pass will come to a few rounds later.

    By itself the processor stays so close ahead of a pass over one or two arrays that half as much time again goes by in waiting.
    """
    fetch(array, index)
    fetch(array, index + LANES // 2)
