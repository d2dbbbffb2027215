"""Connections by shared memory that send any message, and a process that attacks a
server through them.
"""

from __future__ import annotations

import random
import socket
import sys
import threading

import grpc
import torch

from torchrec_recstore_service.wire import recstore_pb2 as pb
from torchrec_recstore_service.wire.agreement import label_of, run_label, run_of
from torchrec_recstore_service.wire.protocol import (
    TOKEN_KEY,
    VERSION,
    VERSION_KEY,
    token_value,
)
from torchrec_recstore_service.wire.segment import SEGMENT_BYTES, Segment

KEPT = "kept"
"""A table that an attack does not change: each of its requests for this table is
invalid.
"""
OWN = "own"
"""A table whose rows an attack may change."""
_SIZES = (0, 1, 7, 8, 32, 64, 800, 3200, 1 << 16, 2**31, 2**63, 2**64 - 1)
# a server takes a tenth of a second for so many ids
_LARGE = (SEGMENT_BYTES // 2, SEGMENT_BYTES - 64, SEGMENT_BYTES)


class RawConnection:
    """A connection by shared memory that sends any message."""

    def __init__(
        self, address: str, secret: bytes | None = None, token: str = ""
    ) -> None:
        metadata = [(VERSION_KEY, VERSION), (TOKEN_KEY, token_value(token))]
        with grpc.insecure_channel(address) as channel:

            def call(method: str, reply: type) -> object:
                named = f"/torchrec_recstore.ParameterServer/{method}"
                return channel.unary_unary(
                    named, response_deserializer=reply.FromString
                )(b"", metadata=metadata)

            offer = call("Attach", pb.AttachReply)
            state = call("Describe", pb.DescribeReply)
            self.epoch = run_label(label_of(state), run_of(state))  # type: ignore[arg-type]
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.socket.connect(f"\0{offer.socket}")  # type: ignore[attr-defined]
        self.secret: bytes = secret or offer.secret
        self.socket.send(self.secret)  # type: ignore[attr-defined]
        size, files, _, _ = socket.recv_fds(self.socket, 32, 1)
        self.files = files
        self.memory = Segment(files[0], int(size)).bytes if files else torch.empty(0)

    def send(self, message: bytes) -> pb.SegmentReply | None:
        self.socket.send(message)
        return self.receive()

    def receive(self) -> pb.SegmentReply | None:
        reply = self.socket.recv(1 << 17)
        return pb.SegmentReply.FromString(reply) if reply else None

    def header(self, number: int, **fields: object) -> pb.WriteHeader:
        known = {
            "table": "t",
            "epoch": self.epoch,
            "client": "raw",
            "kind": 2,
            "ids": 1,
            "float32": True,
        }
        return pb.WriteHeader(request=number, **{**known, **fields})


def attack(address: str, seed: int, requests: int) -> None:
    """Sends random requests, and writes random bytes to the whole memory meanwhile."""
    chosen = random.Random(seed)
    raw = RawConnection(address)
    done = threading.Event()
    used = raw.memory[: 1 << 16]

    def scribble() -> None:
        while not done.is_set():
            used.random_()

    threading.Thread(target=scribble, daemon=True).start()
    for number in range(requests):
        reply = raw.send(_request(raw, chosen, number).SerializeToString())
        while reply is not None and not reply.last:
            reply = raw.receive()
        assert reply is not None, "the server has closed the connection"
    done.set()
    # The process ends in the middle of a call.
    raw.socket.send(_request(raw, chosen, requests).SerializeToString())


def _request(
    raw: RawConnection, chosen: random.Random, number: int
) -> pb.SegmentRequest:
    kept = chosen.randrange(3) == 0
    sizes = [
        chosen.choice(_LARGE if chosen.randrange(500) == 0 else _SIZES)
        for _ in range(4)
    ]
    n = chosen.randrange(100)
    epoch = chosen.choice([raw.epoch, raw.epoch, raw.epoch, "", "x/1"])
    if chosen.randrange(4) == 0:
        return _several_tables(raw, chosen, number, n)
    if chosen.randrange(2):
        read = pb.PullHeader(
            table=chosen.choice([KEPT, OWN, "", "none"]),
            epoch=epoch,
            want=chosen.randrange(4),
        )
        return pb.SegmentRequest(
            pull=read, ids=chosen.choice([8 * n, sizes[0]]), rows=sizes[1]
        )
    if not kept and chosen.randrange(2):  # a write that fits
        write = raw.header(
            number,
            table=OWN,
            ids=n,
            kind=chosen.choice([1, 2, 3]),
            client=f"{chosen.randrange(9)}",
        )
        rows = 0 if write.kind == 3 else 32 * n
        return pb.SegmentRequest(
            write=write, ids=8 * n, rows=rows, initial_ids=8 * n, initial_rows=32 * n
        )
    write = raw.header(
        number,
        table=KEPT if kept else OWN,
        epoch=epoch,
        ids=chosen.choice([n, 2**64 - 1]),
        kind=chosen.randrange(5),
    )
    if kept:  # one id more than was announced
        sizes[0] = 8 * (n + 1)
    return pb.SegmentRequest(
        write=write,
        ids=sizes[0],
        rows=sizes[1],
        initial_ids=sizes[2],
        initial_rows=sizes[3],
    )


def _several_tables(
    raw: RawConnection, chosen: random.Random, number: int, n: int
) -> pb.SegmentRequest:
    """Returns a read of several tables, or an update.

    An update with the table KEPT has a wrong number of ids.
    """
    names = [
        chosen.choice([OWN, OWN, KEPT, "none"]) for _ in range(chosen.randrange(1, 4))
    ]
    tables = [
        pb.TableIds(
            table=name,
            ids=n,
            zeros=chosen.random() < 0.5,
            learning_rate=chosen.choice([0.1, -1.0, float("nan")]),
        )
        for name in names
    ]
    ids = n * len(names) + (1 if KEPT in names else chosen.choice([0, 0, 1]))
    if chosen.randrange(2):
        read = pb.PullHeader(
            epoch=raw.epoch, want=chosen.choice([0, 0, 0, 1, 2]), tables=tables
        )
        return pb.SegmentRequest(pull=read, ids=8 * n * len(names))
    if chosen.randrange(20) == 0:
        tables[0].ids = 2**64 - 1
    write = raw.header(number, table="", ids=ids, kind=2, tables=tables)
    return pb.SegmentRequest(write=write, ids=8 * ids, rows=32 * ids)


if __name__ == "__main__":
    attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
