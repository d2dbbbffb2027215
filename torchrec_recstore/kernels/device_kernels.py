"""The kernels of a CUDA device, in Triton: they pool and update rows of an arena.

Every kernel computes what the row loops of csrc/row_loops compute, in the same order,
with the same roundings, so that its results have the bits of the host. The payload of a
NaN is the exception. These rules give this result:

- Kernels are compiled without fused multiplications and additions. A division is
  ``tl.div_rn`` and a root ``tl.sqrt_rn``, because ``/`` and ``tl.sqrt`` are
  approximations on a device.
- A sum of gradients is in the order of the batch, and begins with its first product,
  because ``0 + -0`` is ``0``.
- A sum over columns is in the order of sixteen lanes; see :func:`_lane_sum`.

The module is imported only where there is a device, or by tests. With
``TRITON_INTERPRET=1``, the kernels run on the host.

Tests: tests/kernels/test_device_kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_recstore.kernels.device_interface import (
    INTEGERS,
    NUMBERS,
    SEGMENT_FIELDS,
    ArenaLayout,
    UpdateKind,
)
from torchrec_recstore.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RMSprop,
    RowWiseAdagrad,
)
from torchrec_recstore.options import NONFINITE
from torchrec_recstore.row_types import ROW_TYPES

FLOAT32: tl.constexpr = tl.constexpr(ROW_TYPES[torch.float32])
FLOAT16: tl.constexpr = tl.constexpr(ROW_TYPES[torch.float16])
BFLOAT16: tl.constexpr = tl.constexpr(ROW_TYPES[torch.bfloat16])

_SGD: tl.constexpr = tl.constexpr(SGD.kind)
_ADAGRAD: tl.constexpr = tl.constexpr(Adagrad.kind)
_ROW_WISE_ADAGRAD: tl.constexpr = tl.constexpr(RowWiseAdagrad.kind)
_ADAM: tl.constexpr = tl.constexpr(Adam.kind)
_PARTIAL_ROW_WISE_ADAM: tl.constexpr = tl.constexpr(PartialRowWiseAdam.kind)
_LAMB: tl.constexpr = tl.constexpr(LAMB.kind)
_PARTIAL_ROW_WISE_LAMB: tl.constexpr = tl.constexpr(PartialRowWiseLAMB.kind)
_LARS_SGD: tl.constexpr = tl.constexpr(LARSSGD.kind)
_RMSPROP: tl.constexpr = tl.constexpr(RMSprop.kind)
_FTRL: tl.constexpr = tl.constexpr(Ftrl.kind)
_ADADELTA: tl.constexpr = tl.constexpr(Adadelta.kind)

_NUMBERS: tl.constexpr = tl.constexpr(len(NUMBERS))
_LEARNING_RATE: tl.constexpr = tl.constexpr(NUMBERS.index("learning_rate"))
_EPS: tl.constexpr = tl.constexpr(NUMBERS.index("eps"))
_WEIGHT_DECAY: tl.constexpr = tl.constexpr(NUMBERS.index("weight_decay"))
_DECAY_FACTOR: tl.constexpr = tl.constexpr(NUMBERS.index("decay_factor"))
_MOMENTUM: tl.constexpr = tl.constexpr(NUMBERS.index("momentum"))
_BETA1: tl.constexpr = tl.constexpr(NUMBERS.index("beta1"))
_BETA2: tl.constexpr = tl.constexpr(NUMBERS.index("beta2"))
_ONE_MINUS_BETA1: tl.constexpr = tl.constexpr(NUMBERS.index("one_minus_beta1"))
_ONE_MINUS_BETA2: tl.constexpr = tl.constexpr(NUMBERS.index("one_minus_beta2"))
_ADAM_RATE: tl.constexpr = tl.constexpr(NUMBERS.index("adam_rate"))
_BIAS1: tl.constexpr = tl.constexpr(NUMBERS.index("bias1"))
_BIAS2: tl.constexpr = tl.constexpr(NUMBERS.index("bias2"))
_ETA: tl.constexpr = tl.constexpr(NUMBERS.index("eta"))
_ALPHA: tl.constexpr = tl.constexpr(NUMBERS.index("alpha"))
_ONE_MINUS_ALPHA: tl.constexpr = tl.constexpr(NUMBERS.index("one_minus_alpha"))
_L1: tl.constexpr = tl.constexpr(NUMBERS.index("l1"))
_L2: tl.constexpr = tl.constexpr(NUMBERS.index("l2"))
_BETA: tl.constexpr = tl.constexpr(NUMBERS.index("beta"))
_MAX_GRADIENT: tl.constexpr = tl.constexpr(NUMBERS.index("max_gradient"))
_MAX_GRADIENT_NORM: tl.constexpr = tl.constexpr(NUMBERS.index("max_gradient_norm"))
_MAX_NORM: tl.constexpr = tl.constexpr(NUMBERS.index("max_norm"))
_DECOUPLE: tl.constexpr = tl.constexpr(NUMBERS.index("decouple"))

_INTEGERS: tl.constexpr = tl.constexpr(len(INTEGERS))
_STOCHASTIC: tl.constexpr = tl.constexpr(INTEGERS.index("stochastic"))
_ROUNDING_KEY: tl.constexpr = tl.constexpr(INTEGERS.index("rounding_key"))
_COLUMN_BEGIN: tl.constexpr = tl.constexpr(INTEGERS.index("column_begin"))
_BLOCK_ROWS: tl.constexpr = tl.constexpr(INTEGERS.index("block_rows"))
_WORLD_SIZE: tl.constexpr = tl.constexpr(INTEGERS.index("world_size"))
_RANK: tl.constexpr = tl.constexpr(INTEGERS.index("rank"))
_MIXED: tl.constexpr = tl.constexpr(INTEGERS.index("mixed"))
_NONFINITE: tl.constexpr = tl.constexpr(INTEGERS.index("nonfinite"))
_PASS: tl.constexpr = tl.constexpr(NONFINITE.index("pass"))
_RAISE: tl.constexpr = tl.constexpr(NONFINITE.index("raise"))

_SEGMENT: tl.constexpr = tl.constexpr(SEGMENT_FIELDS)
_RUN = 16  # columns: a number for each lane of csrc/row_loops/lanes.inl
_LANES: tl.constexpr = tl.constexpr(_RUN)
# A slot with at least this many positions is hot: its gradients are summed by a kernel
# of its own, a block of columns a program.
HOT_POSITIONS = 64
_HOT: tl.constexpr = tl.constexpr(HOT_POSITIONS)
_HOT_COLUMNS = 32
_HOT_UNROLLED: tl.constexpr = tl.constexpr(16)
_UNROLLED: tl.constexpr = tl.constexpr(4)


# Numbers of rows and gradients.


@triton.jit
def _widened(bits, TYPE: tl.constexpr):
    """Returns narrow numbers, given as int16, as float32."""
    if TYPE == FLOAT16:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        words = bits.to(tl.int32) << 16
        values = words.to(tl.float32, bitcast=True)
    return values


@triton.jit
def _load(pointers, mask, TYPE: tl.constexpr):
    """Returns numbers as float32. ``pointers`` are to float32, or to the int16 bits of
    narrow numbers.
    """
    if TYPE == FLOAT32:
        values = tl.load(pointers, mask=mask, other=0.0)
    else:
        values = _widened(tl.load(pointers, mask=mask, other=0), TYPE)
    return values


@triton.jit
def _weight_pointers(rows, columns, TYPE: tl.constexpr):
    """Returns pointers to weights of the rows that begin at ``rows``."""
    if TYPE == FLOAT32:
        pointers = rows + columns
    else:
        pointers = rows.to(tl.pointer_type(tl.int16), bitcast=True) + columns
    return pointers


@triton.jit
def _bits(values):
    return values.to(tl.uint32, bitcast=True)


@triton.jit
def _narrow(values, TYPE: tl.constexpr):
    """Returns the int16 bits of narrow numbers, rounded to nearest, ties to even."""
    if TYPE == FLOAT16:
        narrow = values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        # Triton's interpreter truncates a conversion to bfloat16.
        bits = _bits(values)
        narrow = _truncated_bfloat16(values, 0x7FFF + ((bits >> 16) & 1))
    return narrow


@triton.jit
def _narrow_randomly(values, random, TYPE: tl.constexpr):
    """Returns the int16 bits of narrow numbers, rounded with random words."""
    if TYPE == FLOAT16:
        narrow = _random_float16(values, random)
    else:
        narrow = _truncated_bfloat16(values, random & 0xFFFF)
    return narrow


@triton.jit
def _truncated_bfloat16(values, addend):
    """``Bfloat16Row::truncated`` in row_types.inl."""
    bits = _bits(values)
    quiet = (bits >> 16) | 0x40
    rounded = (bits + addend) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, quiet, rounded).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _random_float16(values, random):
    """``float_to_half`` with random bits in row_types.inl."""
    one = tl.full(values.shape, 1, tl.uint32)
    magnitude = _bits(values) & 0x7FFFFFFF
    exponent = magnitude >> 23
    normal = (magnitude - 0x38000000 + (random & 0x1FFF)) >> 13
    is_tiny = exponent < 95
    cut = tl.where(is_tiny, one * 31, 126 - tl.minimum(exponent, one * 112))
    significand = tl.where(is_tiny, one * 0, (magnitude & 0x7FFFFF) | 0x800000)
    subnormal = (significand + (random & ((one << cut) - 1))) >> cut
    is_nan = magnitude > 0x7F800000
    special = tl.where(is_nan, ((magnitude >> 13) & 0x3FF) | 0x7E00, one * 0x7C00)
    finite = tl.where(magnitude < 0x38800000, subnormal, normal)
    half = tl.where(magnitude >= 0x47800000, special, finite)
    sign = (_bits(values) >> 16) & 0x8000
    return (half | sign).to(tl.uint16).to(tl.int16, bitcast=True)


# Random words of stochastic rounding.


@triton.jit
def _unmixed(x):
    """``unmix`` in slots.h."""
    x = (x ^ (x >> 33)) * 0x9CB4B2F8129337DB
    x = (x ^ (x >> 33)) * 0x4F74430C22A54005
    return x ^ (x >> 33)


@triton.jit
def _raw_id(local, settings):
    """``Routing::raw_id`` in batch.h, for an id as int64. Returns uint64."""
    block_rows = tl.load(settings + _BLOCK_ROWS).to(tl.uint64, bitcast=True)
    world_size = tl.load(settings + _WORLD_SIZE).to(tl.uint64, bitcast=True)
    rank = tl.load(settings + _RANK).to(tl.uint64, bitcast=True)
    local = local.to(tl.uint64, bitcast=True)
    in_block = local + rank * block_rows
    beyond = local * world_size + rank
    routed = tl.where(local < block_rows, in_block, beyond)
    routed = tl.where(tl.load(settings + _MIXED) != 0, _unmixed(routed), routed)
    return tl.where(world_size == 0, local, routed)


@triton.jit
def _random_words(id, settings, columns):
    """``random_numbers`` in random.inl: a word for each of a row's columns.

    The words of 64 columns are those of 16 Philox blocks. The first word of each block
    comes first, then the second of each.
    """
    key = tl.load(settings + _ROUNDING_KEY).to(tl.uint64, bitcast=True)
    column = columns + tl.load(settings + _COLUMN_BEGIN).to(tl.int32)
    block = (column // 64) * 16 + column % 16
    word = (column % 64) // 16
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c2 = block.to(tl.uint32)
    c3 = c2 & 0
    c0 = c3 + id.to(tl.uint32)
    c1 = c3 + (id >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, c3 * 0 + 0xD2511F53)
        high2 = tl.umulhi(c2, c3 * 0 + 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        low2 = c2 * 0xCD9E8D57
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    first = tl.where(word == 0, c0, c1)
    second = tl.where(word == 2, c2, c3)
    return tl.where(word < 2, first, second)


# Sums over columns.


@triton.jit
def _lane_sum(x, RUNS: tl.constexpr):
    """Returns the sum of x, (RUNS * 16,), in the order of csrc/row_loops/lanes.inl.

    Sixteen lanes are summed run by run, from 0 on, and then lanes that are 8, 4, 2 and
    1 apart. A ``tl.sum`` of numbers of which at most two are not 0 is exact.
    """
    runs = tl.reshape(x, (RUNS, _LANES))
    run_numbers = tl.arange(0, RUNS)[:, None]
    lanes = tl.zeros((_LANES,), tl.float32)
    for run in tl.range(0, RUNS):
        lanes = lanes + tl.sum(tl.where(run_numbers == run, runs, 0.0), 0)
    lanes = tl.sum(tl.reshape(lanes, (2, 8)), 0)
    lanes = tl.sum(tl.reshape(lanes, (2, 4)), 0)
    lanes = tl.sum(tl.reshape(lanes, (2, 2)), 0)
    return tl.sum(lanes, 0)


@triton.jit
def _norm(x, RUNS: tl.constexpr):
    return tl.sqrt_rn(_lane_sum(x * x, RUNS))


@triton.jit
def _clipped(grad, bound):
    """Returns a gradient, each element limited to the bound. NaN stays NaN."""
    limited = tl.where(grad > bound, bound, grad)
    limited = tl.where(grad < -bound, -bound, limited)
    return tl.where(bound > 0.0, limited, grad)


# Copies of rows.


@triton.jit(do_not_specialize=["count"])
def _gather(
    arena,
    slots,
    out,
    count,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = tl.arange(0, WORDS)
    mask = (row < count)[:, None] & (words < STRIDE)[None, :]
    slot = tl.load(slots + row, mask=row < count, other=0).to(tl.int64)
    values = tl.load(
        arena + slot[:, None] * STRIDE + words[None, :], mask=mask, other=0
    )
    tl.store(
        out + row.to(tl.int64)[:, None] * STRIDE + words[None, :], values, mask=mask
    )


@triton.jit(do_not_specialize=["count"])
def _scatter(
    arena,
    slots,
    rows,
    count,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = tl.arange(0, WORDS)
    mask = (row < count)[:, None] & (words < STRIDE)[None, :]
    slot = tl.load(slots + row, mask=row < count, other=0).to(tl.int64)
    values = tl.load(
        rows + row.to(tl.int64)[:, None] * STRIDE + words[None, :], mask=mask, other=0
    )
    tl.store(arena + slot[:, None] * STRIDE + words[None, :], values, mask=mask)


# Bags.


@triton.jit
def _first_position(offsets, bag, mask, HAS_OFFSETS: tl.constexpr):
    if HAS_OFFSETS:
        position = tl.load(offsets + bag, mask=mask, other=0).to(tl.int64)
    else:
        position = bag
    return position


@triton.jit
def _row_weights(
    arena,
    base,
    staging,
    slot,
    mask,
    columns,
    column_mask,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_STAGING: tl.constexpr,
):
    """Returns the weights of the rows of slots, (rows, columns) float32."""
    in_arena = mask & (slot >= 0)
    row = tl.where(in_arena, slot - base, 0).to(tl.int64)
    pointers = _weight_pointers(arena + row[:, None] * STRIDE, columns[None, :], TYPE)
    values = _load(pointers, in_arena[:, None] & column_mask[None, :], TYPE)
    if HAS_STAGING:
        is_staged = mask & (slot < -1)
        row = tl.where(is_staged, -2 - slot, 0).to(tl.int64)
        pointers = _weight_pointers(
            staging + row[:, None] * STRIDE, columns[None, :], TYPE
        )
        staged = _load(pointers, is_staged[:, None] & column_mask[None, :], TYPE)
        values = tl.where(is_staged[:, None], staged, values)
    return values


@triton.jit(do_not_specialize=["base"])
def _pool(
    arena,
    base,
    staging,
    slots,
    offsets,
    weights,
    segments,
    out,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    HAS_STAGING: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    MEAN: tl.constexpr,
    BAGS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Pools BAGS bags of a segment. A sum begins with 0, as that of the host."""
    segment = segments + tl.program_id(1) * _SEGMENT
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = bag < tl.load(segment + 1)
    columns = tl.arange(0, PADDED)
    column_mask = columns < COLUMNS
    number = tl.load(segment) + bag
    first = _first_position(offsets, number, is_bag, HAS_OFFSETS)
    last = _first_position(offsets, number + 1, is_bag, HAS_OFFSETS)
    length = tl.where(is_bag, last - first, 0)
    total = tl.zeros((BAGS, PADDED), tl.float32)
    longest = tl.max(length, 0)
    turn = tl.zeros((), tl.int64)
    while turn < longest:
        has_turn = turn < length
        slot = tl.load(slots + first + turn, mask=has_turn, other=-1)
        has_row = slot != -1
        values = _row_weights(
            arena,
            base,
            staging,
            slot,
            has_row,
            columns,
            column_mask,
            STRIDE,
            TYPE,
            HAS_STAGING,
        )
        if HAS_WEIGHTS:
            weight = tl.load(weights + first + turn, mask=has_turn, other=0.0)
            values = values * weight[:, None]
        total = tl.where(has_row[:, None], total + values, total)
        turn += 1
    if MEAN:
        divisor = tl.broadcast_to(length.to(tl.float32)[:, None], (BAGS, PADDED))
        total = tl.where((length > 1)[:, None], tl.div_rn(total, divisor), total)
    begin = tl.load(segment + 2) + bag * tl.load(segment + 3)
    pointers = out + begin[:, None] + columns[None, :]
    mask = is_bag[:, None] & column_mask[None, :]
    if OUT_TYPE == FLOAT32:
        tl.store(pointers, total, mask=mask)
    else:
        tl.store(pointers, _narrow(total, OUT_TYPE), mask=mask)


@triton.jit
def _locate(
    offsets,
    weights,
    segments,
    sources,
    scales,
    tables,
    HAS_OFFSETS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    MEAN: tl.constexpr,
    BAGS: tl.constexpr,
):
    """Writes the source, the scale and the table of the positions of BAGS bags."""
    segment = segments + tl.program_id(1) * _SEGMENT
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = bag < tl.load(segment + 1)
    number = tl.load(segment) + bag
    first = _first_position(offsets, number, is_bag, HAS_OFFSETS)
    last = _first_position(offsets, number + 1, is_bag, HAS_OFFSETS)
    length = tl.where(is_bag, last - first, 0)
    source = tl.load(segment + 2) + bag * tl.load(segment + 3)
    table = tl.broadcast_to(tl.load(segment + 4).to(tl.int32), (BAGS,))
    ones = tl.full((BAGS,), 1.0, tl.float32)
    mean_scale = ones
    if MEAN:
        divided = tl.div_rn(ones, tl.maximum(length, 1).to(tl.float32))
        mean_scale = tl.where(length > 1, divided, ones)
    longest = tl.max(length, 0)
    turn = tl.zeros((), tl.int64)
    while turn < longest:
        has_turn = turn < length
        position = first + turn
        scale = mean_scale
        if HAS_WEIGHTS:
            scale = tl.load(weights + position, mask=has_turn, other=0.0) * mean_scale
        tl.store(sources + position, source, mask=has_turn)
        tl.store(scales + position, scale, mask=has_turn)
        tl.store(tables + position, table, mask=has_turn)
        turn += 1


@triton.jit(do_not_specialize=["base"])
def _weight_gradients(
    arena,
    base,
    staging,
    slots,
    offsets,
    segments,
    grad,
    numbers,
    out,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    HAS_STAGING: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    MEAN: tl.constexpr,
    CLIPS_VALUES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Writes the gradients of the weights of one bag's positions."""
    segment = segments + tl.program_id(1) * _SEGMENT
    bag = tl.program_id(0).to(tl.int64)
    if bag < tl.load(segment + 1):
        columns = tl.arange(0, PADDED)
        column_mask = columns < COLUMNS
        number = tl.load(segment) + bag
        first = _first_position(offsets, number, bag >= 0, HAS_OFFSETS)
        last = _first_position(offsets, number + 1, bag >= 0, HAS_OFFSETS)
        source = tl.load(segment + 2) + bag * tl.load(segment + 3)
        bag_grad = _load(grad + source + columns, column_mask, GRAD_TYPE)
        if CLIPS_VALUES:
            settings = numbers + tl.load(segment + 4) * _NUMBERS
            bag_grad = _clipped(bag_grad, tl.load(settings + _MAX_GRADIENT))
        scale = tl.full((), 1.0, tl.float32)
        if MEAN:
            length = last - first
            divided = tl.div_rn(scale, tl.maximum(length, 1).to(tl.float32))
            scale = tl.where(length > 1, divided, scale)
        position = first
        while position < last:
            slot = tl.load(slots + position + tl.arange(0, 1))
            row = _row_weights(
                arena,
                base,
                staging,
                slot,
                slot != -1,
                columns,
                column_mask,
                STRIDE,
                TYPE,
                HAS_STAGING,
            )
            products = tl.reshape(row, (PADDED,)) * bag_grad
            products = tl.where(column_mask, products, 0.0)
            weight_grad = scale * _lane_sum(products, PADDED // _LANES)
            has_row = tl.load(slots + position) != -1
            tl.store(out + position, tl.where(has_row, weight_grad, 0.0))
            position += 1


@triton.jit(do_not_specialize=["last"])
def _check_finite(
    grad,
    segments,
    integers,
    failed,
    last,
    COLUMNS: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    BAGS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Notes the tables whose gradients are not finite, if this is an error."""
    segment = segments + tl.program_id(1) * _SEGMENT
    table = tl.load(segment + 4)
    if tl.load(integers + table * _INTEGERS + _NONFINITE) == _RAISE:
        bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
        is_bag = bag < tl.load(segment + 1)
        columns = tl.arange(0, PADDED)
        mask = is_bag[:, None] & (columns < COLUMNS)[None, :]
        source = tl.load(segment + 2) + bag * tl.load(segment + 3)
        values = _load(grad + source[:, None] + columns[None, :], mask, GRAD_TYPE)
        is_bad = (_bits(values) & 0x7F800000) == 0x7F800000
        if tl.max(tl.max(is_bad.to(tl.int32), 1), 0) != 0:
            tl.store(failed + table, 1)
            tl.store(failed + last, 1)


# Updates.


@triton.jit
def _scaled(
    grad,
    order,
    sources,
    scales,
    place,
    bound,
    columns,
    mask,
    GRAD_TYPE: tl.constexpr,
    CLIPS_VALUES: tl.constexpr,
):
    """Returns the scaled gradient of a sorted position."""
    position = tl.load(order + place)
    values = _load(grad + tl.load(sources + position) + columns, mask, GRAD_TYPE)
    if CLIPS_VALUES:
        values = _clipped(values, bound)
    return values * tl.load(scales + position)


@triton.jit
def _sum(
    total,
    grad,
    order,
    sources,
    scales,
    place,
    end,
    bound,
    columns,
    mask,
    GRAD_TYPE: tl.constexpr,
    CLIPS_VALUES: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Adds the scaled gradients of the sorted positions [place, end) to the total.

    The loads of UNROLLED gradients are independent, so that they are in flight
    together.
    """
    while place + UNROLLED <= end:
        for step in tl.static_range(0, UNROLLED, 4):
            a = _scaled(
                grad,
                order,
                sources,
                scales,
                place + step,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
            )
            b = _scaled(
                grad,
                order,
                sources,
                scales,
                place + step + 1,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
            )
            c = _scaled(
                grad,
                order,
                sources,
                scales,
                place + step + 2,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
            )
            d = _scaled(
                grad,
                order,
                sources,
                scales,
                place + step + 3,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
            )
            total = (((total + a) + b) + c) + d
        place += UNROLLED
    while place < end:
        total = total + _scaled(
            grad,
            order,
            sources,
            scales,
            place,
            bound,
            columns,
            mask,
            GRAD_TYPE,
            CLIPS_VALUES,
        )
        place += 1
    return total


@triton.jit(do_not_specialize=["begin", "end"])
def _sum_hot(
    keys,
    order,
    begin,
    end,
    sources,
    scales,
    tables,
    grad,
    numbers,
    sums,
    COLUMNS: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    CLIPS_VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums BLOCK columns of the gradients of a hot slot.

    A hot slot has at least _HOT sorted positions, so that one of them is a multiple of
    _HOT after ``begin``. The program of the first of these sums the gradients.
    """
    here = begin + tl.program_id(0) * _HOT
    window = tl.arange(0, _HOT)
    key = tl.load(keys + here)
    before = here - _HOT + window
    is_same = tl.load(keys + before, mask=before >= begin, other=-1) == key
    count_before = tl.sum(is_same.to(tl.int32), 0)
    first = here - count_before
    last = first + _HOT - 1
    is_hot = tl.load(keys + last, mask=last < end, other=-1) == key
    if (count_before < _HOT) & is_hot:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < COLUMNS
        bound = tl.full((), 0.0, tl.float32)
        if CLIPS_VALUES:
            table = tl.load(tables + tl.load(order + first))
            bound = tl.load(numbers + table * _NUMBERS + _MAX_GRADIENT)
        total = _scaled(
            grad,
            order,
            sources,
            scales,
            first,
            bound,
            columns,
            mask,
            GRAD_TYPE,
            CLIPS_VALUES,
        )
        place = first + 1
        count = tl.full((), _HOT - 1, tl.int32)
        while count > 0:
            total = _sum(
                total,
                grad,
                order,
                sources,
                scales,
                place,
                place + count,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
                _HOT_UNROLLED,
            )
            place += count
            after = place + window
            is_same = tl.load(keys + after, mask=after < end, other=-1) == key
            count = tl.sum(is_same.to(tl.int32), 0)
        row = sums + tl.program_id(0).to(tl.int64) * PADDED
        tl.store(row + columns, total, mask=mask)


@triton.jit
def _average(state, value, beta, one_minus_beta):
    return beta * state + one_minus_beta * value


@triton.jit
def _ratio(numerator, weights, update, divisor):
    """Returns numerator / divisor, or 1 unless both norms are positive."""
    is_positive = (weights > 0.0) & (update > 0.0)
    return tl.where(is_positive, tl.div_rn(numerator, divisor), 1.0)


@triton.jit
def _along(w, direction, rate, mask, RUNS: tl.constexpr):
    """``step_along`` in row_steps.inl: w - rate * |w| / |u| * u."""
    direction = tl.where(mask, direction, 0.0)
    weights = _norm(w, RUNS)
    update = _norm(direction, RUNS)
    ratio = _ratio(weights, weights, update, update)
    return w - rate * ratio * direction


@triton.jit
def _mean_square(g, COLUMNS: tl.constexpr, RUNS: tl.constexpr):
    return tl.div_rn(_lane_sum(g * g, RUNS), tl.full((), COLUMNS, tl.float32))


@triton.jit
def _store_row_state(row_state, value):
    """Stores a row-wise state after all warps have read the old one."""
    tl.debug_barrier()
    tl.store(row_state, value)


@triton.jit
def _row_wise_divisor(
    g, row_state, settings, COLUMNS: tl.constexpr, RUNS: tl.constexpr
):
    """``row_wise_divisor`` in row_steps.inl: updates the second moment."""
    beta2 = tl.load(settings + _BETA2)
    one_minus_beta2 = tl.load(settings + _ONE_MINUS_BETA2)
    old = tl.load(row_state)
    square = _mean_square(g, COLUMNS, RUNS)
    moment = _average(old, square, beta2, one_minus_beta2)
    _store_row_state(row_state, moment)
    return tl.sqrt_rn(moment * tl.load(settings + _BIAS2)) + tl.load(settings + _EPS)


@triton.jit
def _first_moment(g, state, mask, settings):
    beta1 = tl.load(settings + _BETA1)
    one_minus_beta1 = tl.load(settings + _ONE_MINUS_BETA1)
    moment = _average(tl.load(state, mask=mask, other=0.0), g, beta1, one_minus_beta1)
    tl.store(state, moment, mask=mask)
    return moment


@triton.jit
def _second_moment(g, state, mask, settings):
    beta2 = tl.load(settings + _BETA2)
    one_minus_beta2 = tl.load(settings + _ONE_MINUS_BETA2)
    moment = _average(
        tl.load(state, mask=mask, other=0.0), g * g, beta2, one_minus_beta2
    )
    tl.store(state, moment, mask=mask)
    return moment


@triton.jit
def _step(
    w,
    g,
    row_state,
    first_state,
    second_state,
    mask,
    settings,
    OPTIMIZER: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Returns the new weights, and stores the new states. row_steps.inl has the same
    steps.
    """
    RUNS: tl.constexpr = PADDED // _LANES
    rate = tl.load(settings + _LEARNING_RATE)
    eps = tl.load(settings + _EPS)
    decay = tl.load(settings + _WEIGHT_DECAY)
    if OPTIMIZER == _SGD:
        if HAS_MOMENTUM:
            old = tl.load(first_state, mask=mask, other=0.0)
            buffer = tl.load(settings + _MOMENTUM) * old + (g + decay * w)
            tl.store(first_state, buffer, mask=mask)
            w = w - rate * buffer
        else:
            g = tl.where(decay != 0.0, g + decay * w, g)
            w = w - rate * g
    elif OPTIMIZER == _ADAGRAD:
        g = tl.where(decay != 0.0, g + decay * w, g)
        squares = tl.load(first_state, mask=mask, other=0.0) + g * g
        tl.store(first_state, squares, mask=mask)
        w = w - tl.div_rn(rate * g, tl.sqrt_rn(squares) + eps)
    elif OPTIMIZER == _ROW_WISE_ADAGRAD:
        g = tl.where(decay != 0.0, g + decay * w, g)
        squares = tl.load(row_state) + _mean_square(
            tl.where(mask, g, 0.0), COLUMNS, RUNS
        )
        _store_row_state(row_state, squares)
        w = w - tl.div_rn(rate, tl.sqrt_rn(squares) + eps) * g
    elif OPTIMIZER == _ADAM:
        first = _first_moment(g, first_state, mask, settings)
        second = _second_moment(g, second_state, mask, settings)
        divisor = tl.sqrt_rn(second * tl.load(settings + _BIAS2)) + eps
        step = tl.div_rn(tl.load(settings + _ADAM_RATE) * first, divisor)
        w = tl.load(settings + _DECAY_FACTOR) * w - step
    elif OPTIMIZER == _PARTIAL_ROW_WISE_ADAM:
        divisor = _row_wise_divisor(g, row_state, settings, COLUMNS, RUNS)
        first = _first_moment(g, first_state, mask, settings)
        step = tl.div_rn(
            tl.load(settings + _ADAM_RATE) * first,
            tl.broadcast_to(divisor, first.shape),
        )
        w = tl.load(settings + _DECAY_FACTOR) * w - step
    elif OPTIMIZER == _LAMB:
        first = _first_moment(g, first_state, mask, settings)
        second = _second_moment(g, second_state, mask, settings)
        divisor = tl.sqrt_rn(second * tl.load(settings + _BIAS2)) + eps
        direction = tl.div_rn(first * tl.load(settings + _BIAS1), divisor) + decay * w
        w = _along(w, direction, rate, mask, RUNS)
    elif OPTIMIZER == _PARTIAL_ROW_WISE_LAMB:
        divisor = _row_wise_divisor(g, row_state, settings, COLUMNS, RUNS)
        first = _first_moment(g, first_state, mask, settings)
        direction = (
            tl.div_rn(
                first * tl.load(settings + _BIAS1),
                tl.broadcast_to(divisor, first.shape),
            )
            + decay * w
        )
        w = _along(w, direction, rate, mask, RUNS)
    elif OPTIMIZER == _LARS_SGD:
        weights = _norm(w, RUNS)
        divisor = _norm(g, RUNS) + decay * weights
        ratio = _ratio(tl.load(settings + _ETA) * weights, weights, divisor, divisor)
        old = tl.load(first_state, mask=mask, other=0.0)
        buffer = tl.load(settings + _MOMENTUM) * old + rate * ratio * (g + decay * w)
        tl.store(first_state, buffer, mask=mask)
        w = w - buffer
    elif OPTIMIZER == _RMSPROP:
        g = g + decay * w
        old = tl.load(first_state, mask=mask, other=0.0)
        squares = _average(
            old, g * g, tl.load(settings + _ALPHA), tl.load(settings + _ONE_MINUS_ALPHA)
        )
        tl.store(first_state, squares, mask=mask)
        w = w - tl.div_rn(rate * g, tl.sqrt_rn(squares) + eps)
    elif OPTIMIZER == _FTRL:
        w = _ftrl(w, g, first_state, second_state, mask, settings, rate)
    else:
        tl.static_assert(OPTIMIZER == _ADADELTA)
        alpha = tl.load(settings + _ALPHA)
        one_minus_alpha = tl.load(settings + _ONE_MINUS_ALPHA)
        g = g + decay * w
        squares = _average(
            tl.load(first_state, mask=mask, other=0.0), g * g, alpha, one_minus_alpha
        )
        old = tl.load(second_state, mask=mask, other=0.0)
        delta = tl.div_rn(tl.sqrt_rn(old + eps), tl.sqrt_rn(squares + eps)) * g
        tl.store(first_state, squares, mask=mask)
        deltas = _average(old, delta * delta, alpha, one_minus_alpha)
        tl.store(second_state, deltas, mask=mask)
        w = w - rate * delta
    return w


@triton.jit
def _ftrl(w, g, accumulator, linear, mask, settings, rate):
    """``FtrlStep`` in row_steps.inl: a learning rate of 0 changes nothing."""
    l1 = tl.load(settings + _L1)
    l2 = tl.load(settings + _L2)
    before = tl.load(accumulator, mask=mask, other=0.0)
    total = before + g * g
    root = tl.sqrt_rn(total)
    rates = tl.broadcast_to(rate, w.shape)
    sigma = tl.div_rn(root - tl.sqrt_rn(before), rates)
    z = tl.load(linear, mask=mask, other=0.0) + g - sigma * w
    changes = mask & (rates != 0.0)
    tl.store(accumulator, total, mask=changes)
    tl.store(linear, z, mask=changes)
    size = tl.where(z < 0.0, -z, z)
    excess = tl.where(z < 0.0, z + l1, z - l1)
    divisor = tl.div_rn(tl.load(settings + _BETA) + root, rates) + l2
    solved = tl.where(size > l1, tl.div_rn(-excess, divisor), 0.0)
    solved = tl.where(total > 0.0, solved, w)
    return tl.where(rates != 0.0, solved, w)


@triton.jit
def _limited(x, bound, RUNS: tl.constexpr):
    """Returns x, scaled down to a norm of ``bound``. A bound of 0 is none."""
    length = _norm(x, RUNS)
    scaled = x * tl.div_rn(bound, length)
    return tl.where((bound > 0.0) & (length > bound), scaled, x)


@triton.jit
def _update_row(
    row,
    position,
    g,
    ids,
    settings,
    integer_settings,
    columns,
    mask,
    COLUMNS: tl.constexpr,
    WEIGHT_FLOATS: tl.constexpr,
    HOST_FLOATS: tl.constexpr,
    TYPE: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    CLIPS_NORM: tl.constexpr,
    BOUNDS_NORM: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Updates the row at ``row`` on the sum of its gradients."""
    RUNS: tl.constexpr = PADDED // _LANES
    weights = _weight_pointers(row, columns, TYPE)
    w = _load(weights, mask, TYPE)
    if CLIPS_NORM:
        g = _limited(g, tl.load(settings + _MAX_GRADIENT_NORM), RUNS)
    decouples = tl.load(settings + _DECOUPLE) != 0.0
    w = tl.where(decouples, w * tl.load(settings + _DECAY_FACTOR), w)
    first_state = row + WEIGHT_FLOATS + columns
    w = _step(
        w,
        g,
        row + HOST_FLOATS,
        first_state,
        first_state + COLUMNS,
        mask,
        settings,
        OPTIMIZER,
        HAS_MOMENTUM,
        COLUMNS,
        PADDED,
    )
    if BOUNDS_NORM:
        w = tl.where(mask, w, 0.0)
        w = _limited(w, tl.load(settings + _MAX_NORM), RUNS)
    if TYPE == FLOAT32:
        tl.store(weights, w, mask=mask)
    else:
        narrow = _narrow(w, TYPE)
        if IS_STOCHASTIC:
            id = _raw_id(tl.load(ids + position), integer_settings)
            words = _random_words(id, integer_settings, columns)
            is_random = tl.load(integer_settings + _STOCHASTIC) != 0
            narrow = tl.where(is_random, _narrow_randomly(w, words, TYPE), narrow)
        tl.store(weights, narrow, mask=mask)


@triton.jit(do_not_specialize=["base", "begin", "end"])
def _update(
    arena,
    base,
    keys,
    order,
    begin,
    end,
    sources,
    scales,
    tables,
    grad,
    numbers,
    integers,
    ids,
    failed,
    skipped,
    sums,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT_FLOATS: tl.constexpr,
    HOST_FLOATS: tl.constexpr,
    TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    CLIPS_VALUES: tl.constexpr,
    CLIPS_NORM: tl.constexpr,
    BOUNDS_NORM: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    SKIPS_NONFINITE: tl.constexpr,
    HAS_FAILED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Updates the row of a sorted position, if it is the first one of its slot."""
    place = begin + tl.program_id(0)
    key = tl.load(keys + place)
    before = tl.load(keys + place - 1, mask=place > begin, other=-1)
    updates = key != before
    if HAS_FAILED:
        updates = updates & (tl.load(failed) == 0)
    if updates:
        columns = tl.arange(0, PADDED)
        mask = columns < COLUMNS
        position = tl.load(order + place)
        table = tl.load(tables + position)
        settings = numbers + table * _NUMBERS
        integer_settings = integers + table * _INTEGERS
        bound = tl.full((), 0.0, tl.float32)
        if CLIPS_VALUES:
            bound = tl.load(settings + _MAX_GRADIENT)
        window = place + tl.arange(0, _HOT)
        is_same = tl.load(keys + window, mask=window < end, other=-1) == key
        count = tl.sum(is_same.to(tl.int32), 0)
        if count == _HOT:
            sum_row = (place - begin + _HOT - 1) // _HOT
            g = tl.load(
                sums + sum_row.to(tl.int64) * PADDED + columns, mask=mask, other=0.0
            )
        else:
            g = _scaled(
                grad,
                order,
                sources,
                scales,
                place,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
            )
            g = _sum(
                g,
                grad,
                order,
                sources,
                scales,
                place + 1,
                place + count,
                bound,
                columns,
                mask,
                GRAD_TYPE,
                CLIPS_VALUES,
                _UNROLLED,
            )
        row = arena + (key - base).to(tl.int64) * STRIDE
        if SKIPS_NONFINITE:
            is_bad = mask & ((_bits(g) & 0x7F800000) == 0x7F800000)
            has_bad = tl.max(is_bad.to(tl.int32), 0) != 0
            if has_bad & (tl.load(integer_settings + _NONFINITE) != _PASS):
                tl.atomic_add(skipped + table, tl.full((), 1, tl.int64))
            else:
                _update_row(
                    row,
                    position,
                    g,
                    ids,
                    settings,
                    integer_settings,
                    columns,
                    mask,
                    COLUMNS,
                    WEIGHT_FLOATS,
                    HOST_FLOATS,
                    TYPE,
                    OPTIMIZER,
                    HAS_MOMENTUM,
                    CLIPS_NORM,
                    BOUNDS_NORM,
                    IS_STOCHASTIC,
                    PADDED,
                )
        else:
            _update_row(
                row,
                position,
                g,
                ids,
                settings,
                integer_settings,
                columns,
                mask,
                COLUMNS,
                WEIGHT_FLOATS,
                HOST_FLOATS,
                TYPE,
                OPTIMIZER,
                HAS_MOMENTUM,
                CLIPS_NORM,
                BOUNDS_NORM,
                IS_STOCHASTIC,
                PADDED,
            )


# Launches.

_ELEMENTS = 512  # approximate number of elements of a program's block
_MOST_THREADS = 256


def _padded(columns: int) -> int:
    """Returns the columns of a block: a power of two, and whole runs of lanes."""
    return max(_RUN, 1 << (columns - 1).bit_length())


def _warps(elements: int) -> int:
    """Returns the number of warps of a program that works on one row."""
    return min(max(elements // 128, 1), _MOST_THREADS // 32)


def _type_of(tensor: Tensor) -> int:
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"outputs and gradients must be float32, float16 or bfloat16, got"
            f" {tensor.dtype}"
        )
    return ROW_TYPES[tensor.dtype]


def _as_bits(tensor: Tensor) -> Tensor:
    """Returns a flat view of numbers: of float32, or of the bits of narrow ones."""
    flat = tensor.view(-1)
    return flat if flat.dtype is torch.float32 else flat.view(torch.int16)


class TritonKernels:
    """See ``DeviceKernels``."""

    def __init__(self) -> None:
        self._compiled: set[tuple[object, ...]] = set()
        """The launches that ``compile_only`` has compiled."""

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Tensor | int | None],
        *,
        warps: int,
        compile_only: bool = False,
        **constants: int,
    ) -> None:
        """Launches a kernel.

        ``constants`` are the arguments with which it is compiled. ``warps`` is the
        number of warps of a program. A subclass may compile the kernel only.

        Raises:
            RuntimeError: The kernel cannot be compiled or launched. The message names
                the option of tables that asks for it.
        """
        options = {"num_warps": warps, "enable_fp_fusion": False, **constants}
        try:
            if compile_only:
                self._compile(kernel, grid, arguments, options)
            else:
                kernel[grid](*arguments, **options)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"Triton {triton.__version__} could not compile or launch the kernel"
                f" {kernel.__name__}, for tables with TableOptions.device_rows:"
                f" {type(error).__name__}: {error}; Triton needs a C compiler (gcc) and"
                " a CUDA device of compute capability 8.0 or higher; with device_rows=0"
                " rows stay on the host"
            ) from error

    def _compile(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Tensor | int | None],
        options: Mapping[str, int],
    ) -> None:
        """Compiles a kernel as a launch with these arguments does, and loads it."""
        # Triton compiles anew for other types, and for another alignment of memory.
        kinds: list[tuple[object, bool]] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                kinds.append((argument.dtype, argument.data_ptr() % 16 == 0))
            else:
                kinds.append((type(argument), False))
        variant = (kernel.__name__, *kinds, *options.items())
        if variant in self._compiled:
            return
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            # The first read of this property makes the launcher, for which Triton runs
            # a C compiler, and loads the kernel on the device.
            _ = compiled.run
        self._compiled.add(variant)

    def gather(self, arena: Tensor, slots: Tensor, out: Tensor) -> None:
        """See ``DeviceKernels.gather``."""
        self._copy(_gather, arena, slots, out)

    def scatter(
        self, arena: Tensor, slots: Tensor, rows: Tensor, *, compile_only: bool = False
    ) -> None:
        """See ``DeviceKernels.scatter``."""
        self._copy(_scatter, arena, slots, rows, compile_only=compile_only)

    def _copy(
        self,
        kernel: Any,
        arena: Tensor,
        slots: Tensor,
        rows: Tensor,
        *,
        compile_only: bool = False,
    ) -> None:
        count = slots.shape[0]
        if count == 0:
            return
        stride = arena.shape[1]
        words = triton.next_power_of_2(stride)
        rows_together = max(_ELEMENTS // words, 1)
        self.launch(
            kernel,
            (triton.cdiv(count, rows_together),),
            (
                arena.view(torch.int32),
                slots,
                rows.view(torch.int32),
                count,
            ),
            warps=4,
            compile_only=compile_only,
            STRIDE=stride,
            WORDS=words,
            ROWS=rows_together,
        )

    def pool(
        self,
        layout: ArenaLayout,
        arena: Tensor,
        base: int,
        staging: Tensor | None,
        slots: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        segments: Tensor,
        most_bags: int,
        mean: bool,
        out: Tensor,
    ) -> None:
        """See ``DeviceKernels.pool``."""
        if most_bags == 0 or len(segments) == 0:
            return
        padded = _padded(layout.columns)
        bags = max(_ELEMENTS // padded, 1)
        self.launch(
            _pool,
            (triton.cdiv(most_bags, bags), len(segments)),
            (
                arena,
                base,
                staging,
                slots,
                offsets,
                weights,
                segments,
                _as_bits(out),
            ),
            warps=4,
            COLUMNS=layout.columns,
            STRIDE=layout.stride,
            TYPE=layout.row_type,
            OUT_TYPE=_type_of(out),
            HAS_STAGING=staging is not None,
            HAS_OFFSETS=offsets is not None,
            HAS_WEIGHTS=weights is not None,
            MEAN=mean,
            BAGS=bags,
            PADDED=padded,
        )

    def locate(
        self,
        offsets: Tensor | None,
        weights: Tensor | None,
        segments: Tensor,
        most_bags: int,
        mean: bool,
        sources: Tensor,
        scales: Tensor,
        tables: Tensor,
    ) -> None:
        """See ``DeviceKernels.locate``."""
        if most_bags == 0 or len(segments) == 0:
            return
        bags = 128
        self.launch(
            _locate,
            (triton.cdiv(most_bags, bags), len(segments)),
            (
                offsets,
                weights,
                segments,
                sources,
                scales,
                tables,
            ),
            warps=4,
            HAS_OFFSETS=offsets is not None,
            HAS_WEIGHTS=weights is not None,
            MEAN=mean,
            BAGS=bags,
        )

    def sort(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DeviceKernels.sort``."""
        keys, order = torch.sort(slots, stable=True)
        return keys, order

    def weight_gradients(
        self,
        kind: UpdateKind,
        arena: Tensor,
        base: int,
        staging: Tensor | None,
        slots: Tensor,
        offsets: Tensor | None,
        segments: Tensor,
        most_bags: int,
        mean: bool,
        grad: Tensor,
        numbers: Tensor,
        out: Tensor,
    ) -> None:
        """See ``DeviceKernels.weight_gradients``."""
        if most_bags == 0 or len(segments) == 0:
            return
        layout = kind.layout
        padded = _padded(layout.columns)
        self.launch(
            _weight_gradients,
            (most_bags, len(segments)),
            (
                arena,
                base,
                staging,
                slots,
                offsets,
                segments,
                _as_bits(grad),
                numbers,
                out,
            ),
            warps=_warps(padded),
            COLUMNS=layout.columns,
            STRIDE=layout.stride,
            TYPE=layout.row_type,
            GRAD_TYPE=_type_of(grad),
            HAS_STAGING=staging is not None,
            HAS_OFFSETS=offsets is not None,
            MEAN=mean,
            CLIPS_VALUES=kind.clips_values,
            PADDED=padded,
        )

    def check_finite(
        self,
        grad: Tensor,
        segments: Tensor,
        most_bags: int,
        columns: int,
        integers: Tensor,
        failed: Tensor,
    ) -> None:
        """See ``DeviceKernels.check_finite``."""
        if most_bags == 0 or len(segments) == 0:
            return
        padded = _padded(columns)
        bags = max(_ELEMENTS // padded, 1)
        self.launch(
            _check_finite,
            (triton.cdiv(most_bags, bags), len(segments)),
            (
                _as_bits(grad),
                segments,
                integers,
                failed,
                len(integers),
            ),
            warps=4,
            COLUMNS=columns,
            GRAD_TYPE=_type_of(grad),
            BAGS=bags,
            PADDED=padded,
        )

    def new_sums(
        self, kind: UpdateKind, positions: int, device: torch.device
    ) -> Tensor:
        """See ``DeviceKernels.new_sums``."""
        shape = (triton.cdiv(positions, HOT_POSITIONS), _padded(kind.layout.columns))
        return torch.empty(shape, dtype=torch.float32, device=device)

    def update(
        self,
        kind: UpdateKind,
        arena: Tensor,
        base: int,
        keys: Tensor,
        order: Tensor,
        begin: int,
        end: int,
        sources: Tensor,
        scales: Tensor,
        tables: Tensor,
        grad: Tensor,
        numbers: Tensor,
        integers: Tensor,
        ids: Tensor | None,
        failed: Tensor | None,
        skipped: Tensor | None,
        sums: Tensor,
        *,
        compile_only: bool = False,
    ) -> None:
        """See ``DeviceKernels.update``."""
        if begin == end:
            return
        layout = kind.layout
        padded = _padded(layout.columns)
        grad_type = _type_of(grad)
        grad = _as_bits(grad)
        hot_places = triton.cdiv(end - begin, HOT_POSITIONS)
        block = min(_HOT_COLUMNS, padded)
        self.launch(
            _sum_hot,
            (hot_places, triton.cdiv(layout.columns, block)),
            (
                keys,
                order,
                begin,
                end,
                sources,
                scales,
                tables,
                grad,
                numbers,
                sums,
            ),
            warps=1,
            compile_only=compile_only,
            COLUMNS=layout.columns,
            GRAD_TYPE=grad_type,
            CLIPS_VALUES=kind.clips_values,
            PADDED=padded,
            BLOCK=block,
        )
        self.launch(
            _update,
            (end - begin,),
            (
                arena,
                base,
                keys,
                order,
                begin,
                end,
                sources,
                scales,
                tables,
                grad,
                numbers,
                integers,
                ids,
                None if failed is None else failed[len(integers) :],
                skipped,
                sums,
            ),
            warps=_warps(padded),
            compile_only=compile_only,
            COLUMNS=layout.columns,
            STRIDE=layout.stride,
            WEIGHT_FLOATS=layout.weight_floats,
            HOST_FLOATS=layout.host_floats,
            TYPE=layout.row_type,
            GRAD_TYPE=grad_type,
            OPTIMIZER=layout.optimizer,
            HAS_MOMENTUM=layout.element_states > 0,
            CLIPS_VALUES=kind.clips_values,
            CLIPS_NORM=kind.clips_norm,
            BOUNDS_NORM=kind.bounds_norm,
            IS_STOCHASTIC=kind.is_stochastic,
            SKIPS_NONFINITE=kind.skips_nonfinite,
            HAS_FAILED=failed is not None,
            PADDED=padded,
        )
