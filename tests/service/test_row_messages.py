"""Tests of csrc/row_messages.cpp: a SegmentRequest, also a damaged one, says there what
protobuf's own parser reads.
"""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
from google.protobuf.message import DecodeError

from torchrec_recstore_service.server.native import NativeStatus, native
from torchrec_recstore_service.wire import recstore_pb2 as pb

_NUMBERS = (0, 1, 2, 3, 127, 128, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1)
_TEXTS = ("", "t", "run/1", "\N{SNOWMAN}", "\N{GRINNING FACE}" * 3, "a" * 200)


def read_here(message: bytes) -> str | None:
    """Returns what the library reads. None: it refuses the message."""
    out, status = ctypes.create_string_buffer(8 * len(message) + 1000), NativeStatus()
    native["request_text"](message, len(message), out, ctypes.byref(status))
    return None if status.code else out.value.decode()


def read_by_protobuf(message: bytes) -> str | None:
    try:
        request = pb.SegmentRequest.FromString(message)
    except DecodeError:
        return None
    call = request.WhichOneof("call")
    if call is None:
        return None
    is_pull = call == "pull"
    header = getattr(request, call) if is_pull or call == "write" else pb.WriteHeader()
    texts = [header.table, header.epoch, "" if is_pull else header.client]
    numbers = (
        [header.want % 2**32, 0, 0, 0, 0]
        if is_pull
        else [
            *(
                header.kind % 2**32,
                header.request,
                header.done_before,
                header.ids,
                int(header.float32),
            )
        ]
    )
    said = [
        ("write", "pull", "describe", "attach").index(call),
        *(text.encode().hex() for text in texts),
        *numbers,
    ]
    said += [request.ids, request.rows, request.initial_ids, request.initial_rows]
    for table in header.tables:
        has_rate = table.HasField("learning_rate")
        rate = (
            struct.unpack("<Q", struct.pack("<d", table.learning_rate))[0]
            if has_rate
            else 0
        )
        said += [
            table.table.encode().hex(),
            table.ids,
            int(table.zeros),
            int(has_rate),
            rate,
        ]
    return "".join(f"{each} " for each in said)


class Messages:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def request(self) -> bytes:
        chosen = self.random
        tables = [
            pb.TableIds(
                table=chosen.choice(_TEXTS),
                ids=chosen.choice(_NUMBERS),
                zeros=chosen.random() < 0.5,
                learning_rate=chosen.choice([None, 0.0, -0.5, float("inf"), 1e-300]),
            )
            for _ in range(chosen.choice((0, 0, 1, 3)))
        ]
        named = {
            "table": chosen.choice(_TEXTS),
            "epoch": chosen.choice(_TEXTS),
            "tables": tables,
        }
        sizes = {
            name: chosen.choice(_NUMBERS)
            for name in ("ids", "rows", "initial_ids", "initial_rows")
        }
        if chosen.random() < 0.1:
            about = (
                {"describe": pb.DescribeRequest()}
                if chosen.random() < 0.5
                else {"attach": pb.AttachRequest(port=True)}
            )
            return pb.SegmentRequest(**about, **sizes).SerializeToString()  # type: ignore[arg-type]
        if chosen.random() < 0.5:
            pull = pb.PullHeader(want=chosen.randrange(4), **named)  # type: ignore[arg-type]
            return pb.SegmentRequest(pull=pull, **sizes).SerializeToString()
        fields = {
            name: chosen.choice(_NUMBERS) for name in ("request", "done_before", "ids")
        }
        write = pb.WriteHeader(
            client=chosen.choice(_TEXTS),
            kind=chosen.randrange(5),
            float32=chosen.random() < 0.5,
            **fields,
            **named,
        )  # type: ignore[arg-type]
        return pb.SegmentRequest(write=write, **sizes).SerializeToString()

    def damaged(self, message: bytes) -> bytes:
        chosen = self.random
        content = bytearray(message)
        for _ in range(chosen.choice((1, 1, 2, 5))):
            place = chosen.randrange(len(content) + 1)
            how = chosen.randrange(5)
            if how == 0:
                del content[place:]
            elif how == 1 and place < len(content):
                content[place] = chosen.randrange(256)
            elif how == 2:
                content[place:place] = chosen.randbytes(chosen.randrange(1, 12))
            elif how == 3:
                content[place : place + chosen.randrange(4)] = b""
            else:
                content += self.request()  # protobuf then merges the two
        return bytes(content)


def compare(message: bytes) -> None:
    here, expected = read_here(message), read_by_protobuf(message)
    # groups are no part of proto3, and the library knows none
    if here is None and expected is not None:
        assert any(byte & 7 in (3, 4) for byte in message), message.hex()
    else:
        assert here == expected, message.hex()


def test_random_and_damaged_messages() -> None:
    messages = Messages(0)
    for _ in range(6_000):
        message = messages.request()
        assert read_here(message) == read_by_protobuf(message) is not None, (
            message.hex()
        )
        compare(messages.damaged(message))
        compare(messages.random.randbytes(messages.random.randrange(30)))


@pytest.mark.parametrize(
    "message",
    [
        "",
        "1800",  # no call
        "0a00",
        "0a0000",  # field 0
        "0a05",
        "0a030a01ff",  # not UTF-8
        "0a050a03eda080",  # a surrogate
        "0a040a02c080",  # overlong
        "0a80808080000a00",  # a size with more bytes than it needs
        "0a808080808000",  # and with more than 5
        "8a80808000 00",
        "8a8080808080 0000",  # a tag with more than 5 bytes
        "0a00 18ffffffffffffffffff7f",  # a number of more than 64 bits
        "0a00 18ffffffffffffffffffff01",
        "0a00 1d00000000",  # a known field of another type is not known
        "0a00 1a020101",
        "0a0618808080 8010",  # an enum of more than 32 bits
        "0a03 0a0174 0a03 120172",  # the same call twice: protobuf merges them
        "0a03 0a0174 1203 120172",  # the last call counts
        "0a03 0a0174 0800",
        "0a03 0a0174 3a00",
        "3a00 4200 0a00",
        "4202 0801",
        "3a01 ff",  # a field that is cut
        "3800",
        "0a00 fa0700",  # field 127
        "0a00 ffffffff0f",
        "0a00 a006 01",
    ],
)
def test_rare_messages(message: str) -> None:
    compare(bytes.fromhex(message))
