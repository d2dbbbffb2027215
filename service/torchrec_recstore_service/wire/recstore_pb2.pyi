from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Saved(_message.Message):
    __slots__ = ("name", "id", "number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    number: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("set", "member", "members", "epoch", "live", "slots", "at", "saves", "prepared", "tables", "token", "runs", "earlier", "waits", "next", "replicated", "backup")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SET_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    set: str
    member: int
    members: int
    epoch: int
    live: bool
    slots: _containers.RepeatedScalarFieldContainer[int]
    at: Saved
    saves: _containers.RepeatedCompositeFieldContainer[Saved]
    prepared: _containers.RepeatedCompositeFieldContainer[Saved]
    tables: _containers.ScalarMap[str, str]
    token: str
    runs: _containers.RepeatedScalarFieldContainer[str]
    earlier: _containers.RepeatedScalarFieldContainer[str]
    waits: bool
    next: str
    replicated: bool
    backup: str
    def __init__(self, set: _Optional[str] = ..., member: _Optional[int] = ..., members: _Optional[int] = ..., epoch: _Optional[int] = ..., live: _Optional[bool] = ..., slots: _Optional[_Iterable[int]] = ..., at: _Optional[_Union[Saved, _Mapping]] = ..., saves: _Optional[_Iterable[_Union[Saved, _Mapping]]] = ..., prepared: _Optional[_Iterable[_Union[Saved, _Mapping]]] = ..., tables: _Optional[_Mapping[str, str]] = ..., token: _Optional[str] = ..., runs: _Optional[_Iterable[str]] = ..., earlier: _Optional[_Iterable[str]] = ..., waits: _Optional[bool] = ..., next: _Optional[str] = ..., replicated: _Optional[bool] = ..., backup: _Optional[str] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("table", "spec", "epoch")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    table: str
    spec: str
    epoch: str
    def __init__(self, table: _Optional[str] = ..., spec: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("table", "epoch")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    table: str
    epoch: str
    def __init__(self, table: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class TableIds(_message.Message):
    __slots__ = ("table", "ids", "zeros", "learning_rate")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ZEROS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    table: str
    ids: int
    zeros: bool
    learning_rate: float
    def __init__(self, table: _Optional[str] = ..., ids: _Optional[int] = ..., zeros: _Optional[bool] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("table", "epoch", "want", "tables")
    class Want(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROWS: _ClassVar[PullHeader.Want]
        FOUND: _ClassVar[PullHeader.Want]
        FOUND_ROWS: _ClassVar[PullHeader.Want]
    ROWS: PullHeader.Want
    FOUND: PullHeader.Want
    FOUND_ROWS: PullHeader.Want
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    table: str
    epoch: str
    want: PullHeader.Want
    tables: _containers.RepeatedCompositeFieldContainer[TableIds]
    def __init__(self, table: _Optional[str] = ..., epoch: _Optional[str] = ..., want: _Optional[_Union[PullHeader.Want, str]] = ..., tables: _Optional[_Iterable[_Union[TableIds, _Mapping]]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("header", "ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    ids: bytes
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., ids: _Optional[bytes] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("found", "rows")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    found: bytes
    rows: bytes
    def __init__(self, found: _Optional[bytes] = ..., rows: _Optional[bytes] = ...) -> None: ...

class WriteHeader(_message.Message):
    __slots__ = ("table", "epoch", "client", "request", "done_before", "kind", "ids", "float32", "tables")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[WriteHeader.Kind]
        PUSH: _ClassVar[WriteHeader.Kind]
        UPDATE: _ClassVar[WriteHeader.Kind]
        DELETE: _ClassVar[WriteHeader.Kind]
    NONE: WriteHeader.Kind
    PUSH: WriteHeader.Kind
    UPDATE: WriteHeader.Kind
    DELETE: WriteHeader.Kind
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DONE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FLOAT32_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    table: str
    epoch: str
    client: str
    request: int
    done_before: int
    kind: WriteHeader.Kind
    ids: int
    float32: bool
    tables: _containers.RepeatedCompositeFieldContainer[TableIds]
    def __init__(self, table: _Optional[str] = ..., epoch: _Optional[str] = ..., client: _Optional[str] = ..., request: _Optional[int] = ..., done_before: _Optional[int] = ..., kind: _Optional[_Union[WriteHeader.Kind, str]] = ..., ids: _Optional[int] = ..., float32: _Optional[bool] = ..., tables: _Optional[_Iterable[_Union[TableIds, _Mapping]]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("header", "ids", "rows", "initial_ids", "initial_rows")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_IDS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    ids: bytes
    rows: bytes
    initial_ids: bytes
    initial_rows: bytes
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., ids: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., initial_ids: _Optional[bytes] = ..., initial_rows: _Optional[bytes] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class IdsRequest(_message.Message):
    __slots__ = ("table", "epoch")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    table: str
    epoch: str
    def __init__(self, table: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class IdsReply(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("table", "epoch")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    table: str
    epoch: str
    def __init__(self, table: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("counts",)
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("phase", "epoch", "save", "overwrite", "servers", "decided", "forget")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[SaveRequest.Phase]
        RESERVE: _ClassVar[SaveRequest.Phase]
        PREPARE: _ClassVar[SaveRequest.Phase]
        COMMIT: _ClassVar[SaveRequest.Phase]
        ABORT: _ClassVar[SaveRequest.Phase]
    NONE: SaveRequest.Phase
    RESERVE: SaveRequest.Phase
    PREPARE: SaveRequest.Phase
    COMMIT: SaveRequest.Phase
    ABORT: SaveRequest.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    phase: SaveRequest.Phase
    epoch: str
    save: Saved
    overwrite: bool
    servers: _containers.RepeatedScalarFieldContainer[str]
    decided: _containers.RepeatedScalarFieldContainer[str]
    forget: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, phase: _Optional[_Union[SaveRequest.Phase, str]] = ..., epoch: _Optional[str] = ..., save: _Optional[_Union[Saved, _Mapping]] = ..., overwrite: _Optional[bool] = ..., servers: _Optional[_Iterable[str]] = ..., decided: _Optional[_Iterable[str]] = ..., forget: _Optional[_Iterable[str]] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("number", "decided")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    decided: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., decided: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("phase", "token", "save", "exact", "set", "member", "members", "epoch", "slots", "parts")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[LoadRequest.Phase]
        PREPARE: _ClassVar[LoadRequest.Phase]
        COMMIT: _ClassVar[LoadRequest.Phase]
        ABORT: _ClassVar[LoadRequest.Phase]
        RESHARD: _ClassVar[LoadRequest.Phase]
    NONE: LoadRequest.Phase
    PREPARE: LoadRequest.Phase
    COMMIT: LoadRequest.Phase
    ABORT: LoadRequest.Phase
    RESHARD: LoadRequest.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    phase: LoadRequest.Phase
    token: str
    save: Saved
    exact: bool
    set: str
    member: int
    members: int
    epoch: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    parts: int
    def __init__(self, phase: _Optional[_Union[LoadRequest.Phase, str]] = ..., token: _Optional[str] = ..., save: _Optional[_Union[Saved, _Mapping]] = ..., exact: _Optional[bool] = ..., set: _Optional[str] = ..., member: _Optional[int] = ..., members: _Optional[int] = ..., epoch: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., parts: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("phase", "epoch", "member", "before", "run")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[ResumeRequest.Phase]
        PREPARE: _ClassVar[ResumeRequest.Phase]
        NOTE: _ClassVar[ResumeRequest.Phase]
        COMMIT: _ClassVar[ResumeRequest.Phase]
    NONE: ResumeRequest.Phase
    PREPARE: ResumeRequest.Phase
    NOTE: ResumeRequest.Phase
    COMMIT: ResumeRequest.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    phase: ResumeRequest.Phase
    epoch: str
    member: int
    before: str
    run: str
    def __init__(self, phase: _Optional[_Union[ResumeRequest.Phase, str]] = ..., epoch: _Optional[str] = ..., member: _Optional[int] = ..., before: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: bool
    def __init__(self, port: _Optional[bool] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("socket", "secret", "rows_port", "server", "rows_address")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    ROWS_PORT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROWS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    socket: str
    secret: bytes
    rows_port: int
    server: str
    rows_address: str
    def __init__(self, socket: _Optional[str] = ..., secret: _Optional[bytes] = ..., rows_port: _Optional[int] = ..., server: _Optional[str] = ..., rows_address: _Optional[str] = ...) -> None: ...

class SegmentRequest(_message.Message):
    __slots__ = ("pull", "write", "describe", "attach", "ids", "rows", "initial_ids", "initial_rows")
    PULL_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_IDS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    pull: PullHeader
    write: WriteHeader
    describe: DescribeRequest
    attach: AttachRequest
    ids: int
    rows: int
    initial_ids: int
    initial_rows: int
    def __init__(self, pull: _Optional[_Union[PullHeader, _Mapping]] = ..., write: _Optional[_Union[WriteHeader, _Mapping]] = ..., describe: _Optional[_Union[DescribeRequest, _Mapping]] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., ids: _Optional[int] = ..., rows: _Optional[int] = ..., initial_ids: _Optional[int] = ..., initial_rows: _Optional[int] = ...) -> None: ...

class SegmentReply(_message.Message):
    __slots__ = ("code", "details", "error", "found", "rows", "deleted", "last", "server")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    error: str
    found: int
    rows: int
    deleted: int
    last: bool
    server: str
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., error: _Optional[str] = ..., found: _Optional[int] = ..., rows: _Optional[int] = ..., deleted: _Optional[int] = ..., last: _Optional[bool] = ..., server: _Optional[str] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("phase", "server", "rows", "address", "secret", "state", "rows_server", "rows_unmapped")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[ReplicateRequest.Phase]
        COPY: _ClassVar[ReplicateRequest.Phase]
        ALIVE: _ClassVar[ReplicateRequest.Phase]
        FOLLOW: _ClassVar[ReplicateRequest.Phase]
        TAKE_OVER: _ClassVar[ReplicateRequest.Phase]
        MEMBER: _ClassVar[ReplicateRequest.Phase]
    NONE: ReplicateRequest.Phase
    COPY: ReplicateRequest.Phase
    ALIVE: ReplicateRequest.Phase
    FOLLOW: ReplicateRequest.Phase
    TAKE_OVER: ReplicateRequest.Phase
    MEMBER: ReplicateRequest.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROWS_SERVER_FIELD_NUMBER: _ClassVar[int]
    ROWS_UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    phase: ReplicateRequest.Phase
    server: str
    rows: str
    address: str
    secret: str
    state: str
    rows_server: str
    rows_unmapped: str
    def __init__(self, phase: _Optional[_Union[ReplicateRequest.Phase, str]] = ..., server: _Optional[str] = ..., rows: _Optional[str] = ..., address: _Optional[str] = ..., secret: _Optional[str] = ..., state: _Optional[str] = ..., rows_server: _Optional[str] = ..., rows_unmapped: _Optional[str] = ...) -> None: ...

class ReplicateReply(_message.Message):
    __slots__ = ("copy", "state")
    COPY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    copy: Saved
    state: str
    def __init__(self, copy: _Optional[_Union[Saved, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class ReadFileRequest(_message.Message):
    __slots__ = ("save", "file", "offset")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    save: Saved
    file: str
    offset: int
    def __init__(self, save: _Optional[_Union[Saved, _Mapping]] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class ReadFileReply(_message.Message):
    __slots__ = ("files", "content", "last")
    FILES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[str]
    content: bytes
    last: bool
    def __init__(self, files: _Optional[_Iterable[str]] = ..., content: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class WriteFileRequest(_message.Message):
    __slots__ = ("id", "part", "file", "offset", "content")
    ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    part: int
    file: str
    offset: int
    content: bytes
    def __init__(self, id: _Optional[str] = ..., part: _Optional[int] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("table", "epoch", "by", "count", "row", "but")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    BUT_FIELD_NUMBER: _ClassVar[int]
    table: str
    epoch: str
    by: str
    count: int
    row: bytes
    but: int
    def __init__(self, table: _Optional[str] = ..., epoch: _Optional[str] = ..., by: _Optional[str] = ..., count: _Optional[int] = ..., row: _Optional[bytes] = ..., but: _Optional[int] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("rows", "steps", "ids", "columns")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    steps: int
    ids: bytes
    columns: _containers.ScalarMap[str, bytes]
    def __init__(self, rows: _Optional[int] = ..., steps: _Optional[int] = ..., ids: _Optional[bytes] = ..., columns: _Optional[_Mapping[str, bytes]] = ...) -> None: ...
