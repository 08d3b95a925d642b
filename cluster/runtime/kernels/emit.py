"""Pieces of LLVM code for vectors of sixteen float32 lanes: loads, stores, conversions and arithmetic.

Addresses are plain integers (bytes). Nothing here needs alignment. On hardware with narrower registers LLVM splits the
vectors; the results are the same bits, since every operation is lane-wise and each reduction has one fixed tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core import cgutils

LANES = 16
LINE_BYTES = 64  # of a cache

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
V16F32, V16I32, V16I16 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know; only multiplied in pairs."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


# Whether products of pairs of bfloat16 are the fastest. Not only AMD has the instruction, but elsewhere it takes four
# times as long as a product of float32 (Emerald Rapids: 145 against 270 GFLOP/s).
MULTIPLIES_PAIRS = bool(get_host_cpu_features().get("avx512bf16")) and get_host_cpu_name().startswith("znver")
PAIRS = 2 * LANES  # bfloat16 numbers in a vector of sixteen pairs
V32BF16, V32I16 = ir.VectorType(_BFloat(), PAIRS), ir.VectorType(I16, PAIRS)


def splat(value: float) -> ir.Constant:
    """The constant with `value` in every lane."""
    return ir.Constant(V16F32, [ir.Constant(F32, value)] * LANES)


def splat_int(value: int) -> ir.Constant:
    """The integer constant with `value` in every lane."""
    return ir.Constant(V16I32, [ir.Constant(I32, value)] * LANES)


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call the LLVM intrinsic `name`."""
    known = builder.module.globals.get(name)
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(known or ir.Function(builder.module, function_type, name), args)


def pointer(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    """An address as a pointer to `element`."""
    return builder.inttoptr(address, element.as_pointer())


def emit_load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Sixteen float32."""
    return builder.load(pointer(builder, address, V16F32), align=4)


def emit_load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Sixteen bfloat16, widened exactly: a bfloat16 is the upper half of a float32."""
    return _widen(builder, builder.load(pointer(builder, address, V16I16), align=2))


def _widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    return builder.bitcast(builder.shl(builder.zext(halves, V16I32), splat_int(16)), V16F32)


def stack_slot(builder: ir.IRBuilder, held: ir.Type) -> ir.Value:
    """Room for one value in the function's frame; not cleared, unlike what numba's own helper gives."""
    with builder.goto_entry_block():
        return builder.alloca(held)


def load_lanes(builder: ir.IRBuilder, address: ir.Value, count: ir.Value, vector: ir.Type) -> ir.Value:
    """The first elements of a vector, at most all, zeros after them; touches no memory past them."""
    element = vector.element
    buffer = stack_slot(builder, vector)
    with builder.if_else(builder.icmp_signed("<", count, ir.Constant(I64, vector.count))) as (some, all_lanes):
        with some:
            builder.store(ir.Constant(vector, [ir.Constant(element, 0)] * vector.count), buffer)
            source, target = pointer(builder, address, element), builder.bitcast(buffer, element.as_pointer())
            with cgutils.for_range(builder, count) as loop:
                value = builder.load(builder.gep(source, [loop.index], source_etype=element))
                builder.store(value, builder.gep(target, [loop.index], source_etype=element))
        with all_lanes:
            builder.store(builder.load(pointer(builder, address, vector), align=4 if element is F32 else 1), buffer)
    return builder.load(buffer)


def emit_load_part(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """`count` <= 16 float32, zeros in the other lanes."""
    return load_lanes(builder, address, count, V16F32)


def emit_load_bf16_part(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """`count` <= 16 bfloat16 widened, zeros in the other lanes."""
    return _widen(builder, load_lanes(builder, address, count, V16I16))


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Begin to fetch a cache line into all caches; any address will do.

    Not past the outer caches: there are too few buffers for fetches that go around them, which halves the bandwidth of
    a core where memory is slow to answer, and groups of rows after the first look for the line in the second level.
    """
    read, keep, data = (ir.Constant(I32, flag) for flag in (0, 3, 1))
    line = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call_llvm(builder, "llvm.prefetch.p0i8", ir.VoidType(), line, read, keep, data)


def emit_store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Store all lanes of a vector of any width."""
    builder.store(value, pointer(builder, address, value.type), align=4)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", V16F32, a, b, c)


def emit_pairs(builder: ir.IRBuilder, address: ir.Value, count: ir.Value | None) -> ir.Value:
    """Sixteen pairs of bfloat16, each in an integer; of `count` < 32 numbers, zeros after them; None: all."""
    if count is None:
        return builder.load(pointer(builder, address, V16I32), align=2)
    return builder.bitcast(load_lanes(builder, address, count, V32I16), V16I32)


def emit_halves(builder: ir.IRBuilder, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first and the second of each of sixteen pairs of bfloat16, widened exactly."""
    second = builder.and_(pairs, splat_int(-(1 << 16)))
    return builder.bitcast(builder.shl(pairs, splat_int(16)), V16F32), builder.bitcast(second, V16F32)


def emit_add_products(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """c + the products of sixteen pairs: c[i] + a[2i + 1] * b[2i + 1] + a[2i] * b[2i], by the processor's instruction.

    Each product is added fused, with subnormal numbers taken for zero.
    """
    factors = (builder.bitcast(pairs, V32BF16) for pairs in (a, b))
    return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V16F32, c, *factors)


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Pick lanes of a (0 ..) and b (len(a) ..)."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


def fold(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, width: int) -> ir.Value:
    """Add the halves of each group of `width` lanes: the sums for a in the lower half of the group, for b in the upper.

    One move between lanes: each half that stays in its place meets the other one, moved there.
    """
    lanes, half = range(LANES), width // 2
    kept = [lane if lane % width < half else lane + LANES for lane in lanes]
    moved = [lane + half if lane % width < half else lane - half + LANES for lane in lanes]
    return builder.fadd(shuffle(builder, a, b, kept), shuffle(builder, a, b, moved))


def emit_sums(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> list[ir.Value]:
    """The sum of each vector's lanes, by the tree i + (i + 8), i + (i + 4), i + (i + 2), i + (i + 1)."""
    folded = [(vector, [index] * LANES) for index, vector in enumerate(vectors)]  # with whose sum is in which lane
    for width in (16, 8, 4, 2):
        pairs = [(folded[first], folded[min(first + 1, len(folded) - 1)]) for first in range(0, len(folded), 2)]
        folded = [
            (
                fold(builder, a, b, width),
                [(a_owners if lane % width < width // 2 else b_owners)[lane] for lane in range(LANES)],
            )
            for (a, a_owners), (b, b_owners) in pairs
        ]
    places = {owner: (vector, lane) for vector, owners in folded for lane, owner in enumerate(owners)}
    found = (places[index] for index in range(len(vectors)))
    return [builder.extract_element(vector, ir.Constant(I32, lane)) for vector, lane in found]


def emit_sum(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    """The sum of the lanes, by the same tree as emit_sums."""
    return emit_sums(builder, [a])[0]


def transpose(builder: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Sixteen vectors of sixteen lanes: lane i of row j becomes lane j of row i."""
    turned, lanes = list(rows), range(LANES)
    for step in (8, 4, 2, 1):
        stays = [lane if not lane & step else lane - step + LANES for lane in lanes]
        moves = [lane + step if not lane & step else lane + LANES for lane in lanes]
        for first in (row for row in lanes if not row & step):
            a, b = turned[first], turned[first + step]
            turned[first], turned[first + step] = shuffle(builder, a, b, stays), shuffle(builder, a, b, moves)
    return turned


def emit_max(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Lane-wise maximum."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def emit_largest(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    """The largest lane."""
    for width in (8, 4, 2, 1):
        lower = shuffle(builder, a, a, range(width))
        a = emit_max(builder, lower, shuffle(builder, a, a, range(width, 2 * width)))
    return builder.extract_element(a, ir.Constant(I32, 0))


def emit_broadcast(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """One float32 in every lane."""
    first = builder.insert_element(ir.Constant(V16F32, ir.Undefined), value, ir.Constant(I32, 0))
    return shuffle(builder, first, first, [0] * LANES)


# exp(x) = 2**n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 is split so that n * _LN2_HIGH is exact.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_MIN, _EXP_MAX = -87.0, 88.0


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x within 2e-7 relative for -87 <= x <= 88; 0 below, e**88 above; exp(0) is exactly 1."""
    clipped = builder.select(builder.fcmp_ordered("<", x, splat(_EXP_MAX)), x, splat(_EXP_MAX))
    exponent = call_llvm(builder, "llvm.rint.v16f32", V16F32, builder.fmul(clipped, splat(_LOG2_E)))
    rest = emit_fma(builder, exponent, splat(-_LN2_HIGH), clipped)
    rest = emit_fma(builder, exponent, splat(-_LN2_LOW), rest)
    series = splat(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series = emit_fma(builder, series, rest, splat(term))
    mantissa = builder.fadd(emit_fma(builder, builder.fmul(rest, rest), series, rest), splat(1.0))
    bits = builder.add(builder.fptosi(exponent, V16I32), splat_int(127))
    power = builder.bitcast(builder.shl(bits, splat_int(23)), V16F32)
    in_range = builder.fcmp_ordered(">=", x, splat(_EXP_MIN))
    return builder.select(in_range, builder.fmul(mantissa, power), splat(0.0))


def emit_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round a vector to bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = builder.bitcast(value, V16I32)
    odd = builder.and_(builder.lshr(bits, splat_int(16)), splat_int(1))
    rounded = builder.add(bits, builder.add(odd, splat_int(0x7FFF)))
    quiet = builder.or_(bits, splat_int(0x00400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, splat_int(16)), V16I16)


def emit_store_bf16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Round sixteen lanes to bfloat16 and store them."""
    builder.store(emit_to_bf16(builder, value), pointer(builder, address, V16I16), align=2)


def emit_store_part(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value) -> None:
    """Store the first `count` lanes as float32."""
    store_lanes(builder, address, value, count)


def emit_store_bf16_part(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value) -> None:
    """Store the first `count` lanes as bfloat16."""
    store_lanes(builder, address, emit_to_bf16(builder, value), count)


def store_lanes(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value) -> None:
    """Store the first `count` lanes as they are."""
    element = value.type.element
    target = pointer(builder, address, element)
    with cgutils.for_range(builder, count) as loop:
        lane = builder.extract_element(value, loop.index)
        builder.store(lane, builder.gep(target, [loop.index], source_etype=element))


# --- choosing among code of fixed sizes ------------------------------------------------------------------------------


def for_each_count(builder: ir.IRBuilder, count: ir.Value, largest: int, emit: Callable[[int], None]) -> None:
    """Choose at run time among the code that emit(1) .. emit(largest) writes; other counts do nothing."""
    after = builder.append_basic_block("after_tile")
    switch = builder.switch(count, after)
    for variant in range(1, largest + 1):
        block = builder.append_basic_block(f"tile_{variant}")
        switch.add_case(ir.Constant(I64, variant), block)
        builder.position_at_end(block)
        emit(variant)
        builder.branch(after)
    builder.position_at_end(after)
