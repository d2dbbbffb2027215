"""Tests of messages whose arrays are written and read in place, and of steps without
rows.
"""

from __future__ import annotations

import random

import pytest
import torch
from google.protobuf.message import DecodeError

from torchrec_recstore import ops
from torchrec_recstore.kernels import PooledGroup
from torchrec_recstore.optim import RowWiseAdagrad
from torchrec_recstore.options import LRU, MinFrequency, TableOptions
from torchrec_recstore.store import Table
from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire import row_ops
from torchrec_recstore_service.wire.messages import content, fields, new_message

SIZES = (1, 2, 3, 127, 128, 129, 16_383, 16_384, 100_001, 2**21 - 1, 2**21, 2**21 + 5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["", "t", "table", "u" * 200])
def test_protobuf_reads_the_messages(size: int, name: str) -> None:
    header = pb.WriteHeader(table=name, kind=pb.WriteHeader.PUSH, request=7)
    arrays = {
        2: torch.randint(0, 256, (size,), dtype=torch.uint8),
        3: torch.arange(11, dtype=torch.uint8),
    }
    message, memory = new_message(
        [(number, len(array)) for number, array in arrays.items()],
        header.SerializeToString(),
    )
    for place, array in zip(memory, arrays.values(), strict=True):
        assert place.data_ptr() % 4 == 0
        place.copy_(array)
    read = pb.WriteRequest.FromString(message)
    assert read.header == header
    assert read.ids == arrays[2].numpy().tobytes()
    assert read.rows == arrays[3].numpy().tobytes()
    for written in (message, read.SerializeToString()):
        found = fields(written)
        assert content(found[1]) == header.SerializeToString()
        assert all(
            torch.equal(found[number], array) for number, array in arrays.items()
        )


def test_messages_without_arrays() -> None:
    assert pb.WriteRequest.FromString(new_message([], b"")[0]) == pb.WriteRequest()
    header = pb.WriteHeader(table="t")
    assert (
        pb.WriteRequest.FromString(
            new_message([], header.SerializeToString())[0]
        ).header
        == header
    )
    assert fields(b"") == {}
    assert content(None) == b""


def test_damaged_messages_are_errors() -> None:
    chosen = random.Random(0)
    whole = pb.WriteRequest(
        header=pb.WriteHeader(table="t"), ids=bytes(8), rows=bytes(32)
    ).SerializeToString()
    for message in (
        b"\x08\x01",
        b"\x12",
        b"\x12\x80",
        b"\x12\x05abcd",
        b"\x12\xff\xff\xff\xff\xff\x01",
        b"\x92\x01\x00",
    ):
        with pytest.raises(ValueError, match="not one of the protocol"):
            fields(message)
    for _ in range(20_000):
        damaged = bytearray(whole)
        for _ in range(chosen.randrange(1, 4)):
            damaged[chosen.randrange(len(damaged))] = chosen.randrange(256)
        message = bytes(damaged[: chosen.randrange(len(damaged) + 1)])
        try:
            found = fields(message)
        except ValueError:
            continue
        assert sum(map(len, found.values())) <= len(message)
        try:
            read = pb.WriteRequest.FromString(message)
        except DecodeError:  # the header is damaged, or a field number is 0
            continue
        assert content(found.get(2)) == read.ids


def test_a_step_without_rows_is_a_step() -> None:
    ids, grads = torch.randint(-50, 50, (3000,)), torch.randn(3000, 12)
    for options in (
        TableOptions(),
        TableOptions(admission=MinFrequency(3)),
        TableOptions(max_rows=70, eviction=LRU()),
    ):
        exports = []
        for with_rows in (True, False):
            with Table(12, optimizer=RowWiseAdagrad(lr=0.1), options=options) as table:
                group = PooledGroup([table], [0], "sum")
                for some, gradient in zip(ids.split(50), grads.split(50), strict=True):
                    if with_rows:
                        context = ops.rows_forward(
                            [group.handle], some, [len(some)], True
                        )[1]
                    else:
                        context = row_ops.rows_begin(group.handle, some)
                    group.update(context, gradient, False)
                exports.append(
                    (
                        *ops.table_export(table.handle, table.ids()),
                        table.ids(),
                        table.stats(),
                    )
                )
        for one, other in zip(*exports, strict=True):
            assert (
                torch.equal(one, other)
                if isinstance(one, torch.Tensor)
                else one == other
            )
