from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Jagged(_message.Message):
    __slots__ = ("keys", "values", "lengths", "weights")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: Array
    lengths: Array
    weights: Array
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Union[Array, _Mapping]] = ..., lengths: _Optional[_Union[Array, _Mapping]] = ..., weights: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Argument(_message.Message):
    __slots__ = ("array", "jagged")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    JAGGED_FIELD_NUMBER: _ClassVar[int]
    array: Array
    jagged: Jagged
    def __init__(self, array: _Optional[_Union[Array, _Mapping]] = ..., jagged: _Optional[_Union[Jagged, _Mapping]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("arguments", "model")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Argument
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Argument, _Mapping]] = ...) -> None: ...
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    arguments: _containers.MessageMap[str, Argument]
    model: str
    def __init__(self, arguments: _Optional[_Mapping[str, Argument]] = ..., model: _Optional[str] = ...) -> None: ...

class PredictReply(_message.Message):
    __slots__ = ("outputs", "version", "number", "seconds_behind")
    class OutputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Array
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.MessageMap[str, Array]
    version: str
    number: int
    seconds_behind: float
    def __init__(self, outputs: _Optional[_Mapping[str, Array]] = ..., version: _Optional[str] = ..., number: _Optional[int] = ..., seconds_behind: _Optional[float] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
