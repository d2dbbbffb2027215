"""A change of any byte of a served file is found, in the file and in the model that is
loaded from the file.
"""

from __future__ import annotations

import os
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.formats import fixed
from torchrec_recstore.inference import (
    export_checkpoint,
    export_checkpoint_delta,
    export_delta,
    export_for_inference,
    read_delta,
    verify,
)
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore_serving.export.row_formats import DTYPES
from torchrec_recstore_serving.export.verification import (
    checksum_after,
    checksum_of,
    scripted_function,
)

EXPORTS = [*(f"tables_{name}.pt" for name in DTYPES), "model.pt"]
DELTAS = [f"{Path(name).stem}_delta" for name in EXPORTS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes an export of each kind and a delta of each export."""
    folder = tmp_path_factory.mktemp("written")
    for name, dtype in DTYPES.items():
        path = folder / f"tables_{name}.pt"
        export_checkpoint(fixed.CHECKPOINTS / "full", path, dtype=dtype)
        export_checkpoint_delta(
            fixed.CHECKPOINTS / "delta", folder / f"tables_{name}_delta", base=path
        )
    model = fixed.train_served(fixed.Served(), 3)
    export_for_inference(model, folder / "model.pt")
    with torch.no_grad():
        model.over.bias.fill_(2.5)
    export_delta(
        fixed.train_served(model, 11), folder / "model_delta", base=folder / "model.pt"
    )
    return folder


def outside_members(path: Path) -> list[int]:
    """Returns the positions of the bytes of a zip file that are outside the data of its
    members.
    """
    inside: set[int] = set()
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name, extra = struct.unpack_from("<HH", content, member.header_offset + 26)
            begin = member.header_offset + 30 + name + extra
            inside.update(range(begin, begin + member.compress_size))
    return [place for place in range(len(content)) if place not in inside]


def is_found(path: Path) -> bool:
    """Returns whether ``verify`` refuses the file with an error that names the file."""
    try:
        verify(path)
    except ValueError as error:
        return str(path) in str(error)
    return False


def missed_flips(path: Path, places: list[int]) -> list[tuple[int, int]]:
    """Flips one bit of each byte, checks the file, and restores the bit.

    Returns the flips that are not found.
    """
    torch.set_num_threads(1)
    verify(path)
    generator = random.Random(0)
    content = path.read_bytes()
    missed = []
    descriptor = os.open(path, os.O_RDWR)
    try:
        for place in places:
            bit = generator.randrange(8)
            os.pwrite(descriptor, bytes([content[place] ^ 1 << bit]), place)
            if not is_found(path):
                missed.append((place, bit))
            os.pwrite(descriptor, content[place : place + 1], place)
    finally:
        os.close(descriptor)
    verify(path)
    return missed


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_every_byte_of_the_structure_of_an_export(written: Path, name: str) -> None:
    """Flips bits in the parts of the zip format: headers, names, sizes, checksums,
    padding and the directory.
    """
    structure = outside_members(written / name)
    assert len(structure) > 1000
    assert not missed_flips(written / name, structure)


@pytest.mark.parametrize("name", EXPORTS)
def test_flipped_bits_of_an_export(written: Path, name: str) -> None:
    path = written / name
    some = random.Random(1)
    places = some.sample(range(path.stat().st_size), 200) + some.sample(
        outside_members(path), 100
    )
    # The end of the directory, and the checksum.
    end = range(path.stat().st_size - 60, path.stat().st_size)
    assert not missed_flips(path, [*places, *end])


@pytest.mark.parametrize("name", DELTAS)
def test_flipped_bits_of_a_delta(written: Path, name: str) -> None:
    assert not missed_flips(
        written / name, list(range((written / name).stat().st_size))
    )


@pytest.mark.parametrize("name", ["tables_int8.pt", "tables_int8_delta"])
def test_files_that_are_cut_or_longer(written: Path, name: str, tmp_path: Path) -> None:
    content = (written / name).read_bytes()
    file = tmp_path / name
    for damaged in (
        content[:-1],
        content[:-34],
        content[: len(content) // 2],
        content[:5],
        b"",
        content + b"\0",
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(file)):
            verify(file)
    with pytest.raises(FileNotFoundError, match="none"):
        verify(tmp_path / "none")


def tensors_of(served: torch.jit.ScriptModule) -> list[Tensor]:
    return [*served.parameters(), *served.buffers()]


@pytest.mark.parametrize("name", EXPORTS)
def test_a_model_in_memory(written: Path, name: str) -> None:
    path = written / name
    served = torch.jit.load(path)
    served.verify()
    file = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    served.verify(file)
    file[len(file) // 2] ^= 4
    with pytest.raises(
        torch.jit.Error, match="the file is damaged: its checksum does not fit"
    ):
        served.verify(file)
    delta = read_delta(written / f"{path.stem}_delta")
    generator = random.Random(0)
    for tensor in tensors_of(served):
        data = tensor.detach().view(-1).view(torch.uint8)
        place, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
        data[place] ^= bit
        version = served.recstore_version()
        for check in (served.verify, lambda: served.apply_delta(delta)):
            with pytest.raises(
                torch.jit.Error,
                match=f"damaged: its tensors are not of version {version}",
            ):
                check()
        assert served.recstore_version() == version
        data[place] ^= bit
    served.verify()
    assert served.apply_delta(delta)
    served.verify()


def test_attributes_in_memory(written: Path) -> None:
    served = torch.jit.load(written / "model.pt")
    first = served.bags.tables._modules["0"]
    for owner, name, value in (
        (served, "scale", 3),
        (first, "dim", 4),
        (first, "row_format", "int4"),
        (served.bags, "_means", [True, True]),
        (served.bags, "_keys", ["g", "f", "h"]),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(
            torch.jit.Error, match="the model is damaged: its attributes are not those"
        ):
            served.verify()
        setattr(owner, name, before)
        served.verify()
    served.eval().train().eval()
    served.verify()


def test_a_damaged_base_has_no_delta(written: Path, tmp_path: Path) -> None:
    file = tmp_path / "base.pt"
    content = bytearray((written / "tables_float32.pt").read_bytes())
    content[100] ^= 1  # A byte of the first tensor.
    file.write_bytes(content)
    torch.jit.load(file)  # torch.jit.load does not find the damage.
    with pytest.raises(
        ValueError, match=f"{file} is damaged: its checksum does not fit"
    ):
        export_checkpoint_delta(
            fixed.CHECKPOINTS / "delta", tmp_path / "delta", base=file
        )
    with pytest.raises(
        ValueError, match=r"base cannot be used: .*the model is damaged"
    ):
        export_checkpoint_delta(
            fixed.CHECKPOINTS / "delta", tmp_path / "delta", base=torch.jit.load(file)
        )
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, 4096, (1 << 19) - 1, 1 << 19, (1 << 19) + 3, (3 << 19) + 5]
)
def test_the_library_computes_the_checksum_of_torchscript(size: int) -> None:
    """A server without the library checks the files of a publisher that has it, and the
    reverse.
    """
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    state = torch.randint(-(1 << 62), 1 << 62, (1,), generator=generator)
    expected = scripted_function(checksum_after)(state, data)
    assert torch.equal(torch.ops.recstore.checksum_after(state, data), expected)


def test_a_checksum_of_other_tensors_is_refused() -> None:
    state = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="state must be"):
        torch.ops.recstore.checksum_after(
            torch.zeros(2, dtype=torch.int64), torch.zeros(8, dtype=torch.uint8)
        )
    with pytest.raises(ValueError, match="data must be"):
        torch.ops.recstore.checksum_after(state, torch.zeros(8))


def test_two_signs(tmp_path: Path) -> None:
    """Both highest bits of two words are flipped.

    A sum of words times odd numbers would not change.
    """
    rows = torch.randn(100, 2)
    other = rows.clone()
    other[[3, 7], 1] *= -1
    checksum = scripted_function(checksum_of)
    assert not torch.equal(checksum({"rows": rows}), checksum({"rows": other}))
    assert not torch.equal(
        checksum({"rows": rows}), checksum({"rows": rows.view(torch.int32)})
    )
    assert not torch.equal(
        checksum({"rows": rows}), checksum({"rows": rows.view(2, 100)})
    )
    assert not torch.equal(
        checksum({"ab": rows[0], "c": rows[1]}), checksum({"a": rows[0], "bc": rows[1]})
    )


def test_files_of_another_format(written: Path, tmp_path: Path) -> None:
    message = (
        r"has the format 2, which torchrec_recstore [\d.]+ does not know: .*pip install"
        r" --upgrade"
    )
    file = tmp_path / "new.pt"
    file.write_bytes(
        (written / "model.pt")
        .read_bytes()
        .replace(b"recstore export 0001", b"recstore export 0002")
    )
    with pytest.raises(ValueError, match=f"{file} {message}"):
        verify(file)
    delta = tmp_path / "delta"
    delta.write_bytes(
        (written / "model_delta").read_bytes().replace(b'delta":"0001', b'delta":"0002')
    )
    for read in (verify, read_delta):
        with pytest.raises(ValueError, match=f"{delta} {message}"):
            read(delta)


def test_a_delta_of_another_format_in_memory(written: Path) -> None:
    served = torch.jit.load(written / "model.pt")
    delta = {**read_delta(written / "model_delta"), "format": torch.tensor([2])}
    with pytest.raises(
        torch.jit.Error,
        match="the model takes deltas of format 1, and this is another one",
    ):
        served.apply_delta({**delta, "checksum": scripted_function(checksum_of)(delta)})


class WithVerify(nn.Module):
    """A model that has a method with the name of an added method."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RecStoreEmbedding(50, 4, name="a")

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.rows(ids)
        return out

    def verify(self) -> None:
        """A method of the model."""


def test_a_model_with_a_method_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="WithVerify has an attribute 'verify': a served model has a"
    ):
        export_for_inference(WithVerify().eval(), tmp_path / "model.pt")
