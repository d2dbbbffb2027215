"""Exported files run without this package: in another Python process, and in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fbgemm_gpu
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchrec import KeyedJaggedTensor

from tests.recstore_server import RecStoreServer
from tests.secrets import write_secret
from torchrec_recstore import RecStoreClient
from torchrec_recstore.checkpoint import save_checkpoint
from torchrec_recstore.inference import (
    DeltaPublisher,
    export_checkpoint,
    export_checkpoint_delta,
    export_delta,
    export_for_inference,
    load_library,
    scriptable,
    sign_package,
)
from torchrec_recstore.modules import RecStoreEmbedding
from torchrec_recstore_serving.export.sorted_tables import ServedTables
from torchrec_recstore_serving.export.tables_on_servers import (
    ServerTable,
    TableOnServers,
)
from torchrec_recstore_serving.export.torchscript import save_script, scripted

from ...checkpoint.models import recstore
from ..models import Model, OfPlainTensors, batch, plain_batch, train

ROOT = Path(__file__).parents[3]
try:
    NO_LIBRARY: ImportError | None = None
    load_library()
except ImportError as error:
    NO_LIBRARY = error
DTYPES = {"float32": torch.float32, "int8": torch.int8}
FBGEMM = [
    Path(fbgemm_gpu.__file__).with_name(f"fbgemm_gpu_{name}.so")
    for name in ("tbe_inference", "py")
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes exported files and deltas, with inputs and the outputs that are expected
    after each delta.
    """
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    _export_models(folder)
    import torch.distributed as dist
    from torchrec.distributed import comm

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
    )
    try:
        _export_tables(folder)
    finally:
        dist.destroy_process_group()
        comm._INTRA_PG = comm._CROSS_PG = None
    return folder


def _export_models(folder: Path) -> None:
    model = OfPlainTensors()

    def step() -> nn.Module:
        model.train()
        model(*plain_batch()).sum().backward()
        return model.eval()

    inputs = plain_batch()
    for name, dtype in DTYPES.items():
        export_for_inference(step(), folder / f"model-{name}.pt", dtype=dtype)
        base = torch.jit.load(folder / f"model-{name}.pt")
        for number in range(2):
            with torch.no_grad():
                model.over[0].weight.mul_(1.5)
            path = folder / f"model-{name}.{number}.safetensors"
            export_delta(step(), path, base=base)
            base.apply_delta(_delta(path))
        full = export_for_inference(model, dtype=dtype)
        torch.save(list(inputs), folder / f"model-{name}.inputs.pt")
        torch.save(full(*inputs), folder / f"model-{name}.output.pt")
    keyed, some = train(Model()), batch()
    export_for_inference(keyed, folder / "keyed.pt", dtype=torch.float32)
    torch.save([some.keys(), some.values(), some.lengths()], folder / "keyed.inputs.pt")
    torch.save(keyed(some).detach(), folder / "keyed.output.pt")


def _delta(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def _export_tables(folder: Path) -> None:
    model = recstore()

    def step() -> None:
        ids = torch.randint(-20, 20, (36,))
        model(
            KeyedJaggedTensor(["u", "i", "j"], ids, lengths=torch.full((6,), 6))
        ).sum().backward()

    step()
    save_checkpoint(model, folder / "full")
    step()
    save_checkpoint(model, folder / "delta", delta_of=folder / "full")
    lengths = torch.tensor([[3, 0, 2], [1, 4, 0]])
    inputs = [torch.randint(-25, 25, (10,)), lengths]
    for name, dtype in DTYPES.items():
        path = folder / f"tables-{name}.pt"
        export_checkpoint(folder / "full", path, dtype=dtype)
        export_checkpoint_delta(
            folder / "delta", folder / f"tables-{name}.0.safetensors", base=path
        )
        export_checkpoint(folder / "delta", folder / "now.pt", dtype=dtype)
        output = torch.jit.load(folder / "now.pt")(*inputs)
        torch.save(inputs, folder / f"tables-{name}.inputs.pt")
        torch.save(output, folder / f"tables-{name}.output.pt")
        # The outputs are equal to those of the model's own tables.
        if dtype == torch.float32:
            tables = {
                table.name: table for table in model.module.sparse.recstore_tables()
            }
            bags = iter(inputs[0].split(lengths.flatten().tolist()))
            wanted = [
                torch.stack([tables[t].lookup(next(bags)).sum(0) for _ in range(3)])
                for t in ("item", "user")
            ]
            assert torch.allclose(output, torch.cat(wanted, dim=1))


@pytest.mark.slow
def test_in_another_python(exported: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }
    script = Path(__file__).with_name("elsewhere.py")
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(exported)],
        capture_output=True, text=True, timeout=120, env=environment, cwd=exported, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is right") == 5


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles examples/serving/main.cpp, which takes about ten seconds."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    path = tmp_path_factory.mktemp("program") / "main"
    command = [
        str(ROOT / "examples" / "serving" / "build.sh"),
        str(path),
        "-O0",
        "-Wall",
        "-Werror",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={},
        check=False,
    )


@pytest.mark.slow
def test_in_cpp(exported: Path, program: Path, tmp_path: Path) -> None:
    libraries = [argument for path in FBGEMM for argument in ("--library", path)]
    for name in ("tables-float32", "tables-int8", "model-float32", "model-int8"):
        files = (
            exported / f"{name}.pt",
            exported / f"{name}.inputs.pt",
            tmp_path / "output.pt",
        )
        deltas = sorted(exported.glob(f"{name}.*.safetensors"))
        wanted = torch.load(exported / f"{name}.output.pt")
        more = [] if name == "tables-float32" else libraries
        done = run(
            program,
            *files,
            *more,
            *(argument for delta in deltas for argument in ("--delta", delta)),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("applied") == len(deltas)
        assert torch.equal(torch.load(tmp_path / "output.pt"), wanted)
    # The last delta is applied again.
    done = run(
        program,
        *files,
        *libraries,
        *(a for d in (*deltas, deltas[-1]) for a in ("--delta", d)),
    )
    assert "already has" in done.stdout
    assert torch.equal(torch.load(tmp_path / "output.pt"), wanted)
    # The second delta is applied without the first delta.
    done = run(program, *files, *libraries, "--delta", deltas[1])
    assert done.returncode == 1
    assert "the delta is one of version" in done.stderr
    assert "Unknown builtin op: fbgemm::" in run(program, *files).stderr
    damaged = tmp_path / "damaged.pt"
    content = bytearray(files[0].read_bytes())
    content[200] ^= 1  # A byte of the first tensor.
    damaged.write_bytes(content)
    torch.jit.load(damaged)  # torch.jit.load does not find the damage.
    done = run(program, damaged, *files[1:], *libraries)
    assert done.returncode == 1
    assert f"error: {damaged} cannot be served: " in done.stderr
    assert "the file is damaged: its checksum does not fit" in done.stderr
    torn = tmp_path / "torn"
    torn.write_bytes(deltas[0].read_bytes()[:-8])
    assert (
        f"{torn} is no safetensors file or damaged"
        in run(program, *files, *libraries, "--delta", torn).stderr
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(NO_LIBRARY is not None, reason=str(NO_LIBRARY))
@pytest.mark.parametrize(("index", "dtype"), [("hash", "float32"), ("sorted", "int8")])
def test_package_in_cpp(program: Path, tmp_path: Path, index: str, dtype: str) -> None:
    """The package of AOTInductor reads the rows of the scripted model, to the bit, and
    is a program for C++ alone.
    """
    model = OfPlainTensors()
    for _ in range(3):
        model(*plain_batch()).sum().backward()
    model.over = nn.Identity()  # The output is the pooled rows.
    path = tmp_path / "model.pt"
    exported = export_for_inference(
        model.eval(), path, dtype=DTYPES[dtype], index=index
    )
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        traced = torch.export.export(
            scriptable(exported, index=index),
            plain_batch(),
            dynamic_shapes=({0: Dim.AUTO},) * 3,
            strict=False,
        )
        package = torch._inductor.aoti_compile_and_package(
            traced, package_path=str(tmp_path / "model.pt2")
        )
    loaded, scripted = torch._inductor.aoti_load_package(package), torch.jit.load(path)
    libraries = [
        a for library in (*FBGEMM, load_library()) for a in ("--library", library)
    ]
    files = [package, tmp_path / "inputs.pt", tmp_path / "output.pt"]
    nothing = (
        torch.randn(1, 3),
        torch.empty(0, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
    )
    for inputs in (nothing, plain_batch(1), plain_batch(7)):
        torch.save(list(inputs), files[1])
        done = run(program, *files, *libraries)
        assert done.returncode == 0, done.stderr
        for output in (loaded(*inputs), torch.load(files[2])):
            assert torch.equal(output, scripted(*inputs))
    key = write_secret(tmp_path / "key", "0123456789abcdef" * 2)
    assert "has no signature" in run(program, *files, *libraries, "--key", key).stderr
    sign_package(package, key=key)
    done = run(program, *files, *libraries, "--key", key)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(files[2]), scripted(*inputs))
    for number, wrong in (
        (1, inputs[1].float()),
        (1, inputs[1].int()),
        (2, inputs[2].int()),
    ):
        torch.save([*inputs[:number], wrong, *inputs[number + 1 :]], files[1])
        done = run(program, *files, *libraries)
        assert (
            done.returncode,
            "unmatched dtype, expected: 4(at::kLong)" in done.stderr,
        ) == (1, True)
    assert "takes no deltas" in run(program, *files, "--delta", path).stderr
    if index == "hash":
        assert (
            "torch.classes.recstore.ServedTable"
            in run(program, *files, *libraries[:4]).stderr
        )


@pytest.mark.slow
@pytest.mark.skipif(NO_LIBRARY is not None, reason=str(NO_LIBRARY))
def test_following_in_cpp(program: Path, tmp_path: Path) -> None:
    """The program follows a publisher with a key, whose signatures it checks, and names
    the version.
    """
    model, ids = RecStoreEmbedding(50, 4, name="t", lr=0.3), torch.arange(6)
    torch.save([ids], tmp_path / "inputs.pt")
    key = write_secret(tmp_path / "key", "0123456789abcdef" * 2 + "\n")
    arguments = (
        "--follow",
        tmp_path / "published",
        "--library",
        load_library(),
        "--key",
        key,
    )
    publisher = DeltaPublisher(
        model,
        tmp_path / "published",
        every_s=0.01,
        full_every_s=3600,
        dtype=torch.float32,
        index="hash",
        key=key,
    )
    follower = subprocess.Popen(
        [program, *map(str, arguments)], text=True, env={},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert follower.stdin is not None
    assert follower.stdout is not None
    versions: set[str] = set()
    with publisher, follower:
        for _ in range(4):
            model.train()(ids).sum().backward()
            output, deadline = torch.empty(0), time.monotonic() + 120
            model.eval()
            while not torch.equal(output, model(ids)):
                assert time.monotonic() < deadline
                publisher.step()
                follower.stdin.write(
                    f"{tmp_path / 'inputs.pt'} {tmp_path / 'output.pt'}\n"
                )
                follower.stdin.flush()
                for line in follower.stdout:
                    if line.startswith("answered "):
                        break
                output = torch.load(tmp_path / "output.pt")
                time.sleep(0.02)
            versions.add(line.split()[-1])
        publisher.close()  # It would write the file again.
        latest = tmp_path / "published" / "latest.json"
        for place in (0.1, 0.5, 0.99):
            whole = latest.read_bytes()
            at = int(len(whole) * place)
            latest.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert follower.stderr is not None
            while f"{latest} is not signed with the key" not in (
                said := follower.stderr.readline()
            ):
                assert said
            latest.write_bytes(whole)
            # It says the same again once it has read the file in between.
            time.sleep(0.5)
        follower.stdin.close()
        assert follower.wait(60) == 0
    assert len(versions) == 4


@pytest.mark.slow
def test_signatures_in_cpp(program: Path, tmp_path: Path) -> None:
    key, other = (
        write_secret(tmp_path / name, f"{name}0123456789abcdef" * 2)
        for name in ("key", "other")
    )
    model, ids = RecStoreEmbedding(50, 4, name="t", lr=0.3), torch.arange(6)
    torch.save([ids], tmp_path / "inputs.pt")
    files = [tmp_path / name for name in ("model.pt", "inputs.pt", "output.pt")]
    delta = tmp_path / "delta"
    model(ids).sum().backward()
    export_for_inference(model.eval(), files[0], dtype=torch.float32, key=key)
    model.train()(ids + 3).sum().backward()
    export_delta(model.eval(), delta, base=files[0], key=key)
    done = run(program, *files, "--delta", delta, "--key", key)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(files[2]), model(ids))
    for path in (files[0], delta):
        content = path.read_bytes()
        assert (
            f"{files[0]} is not signed with the key"
            in run(program, *files, "--key", other).stderr
        )
        for place in (len(content) // 2, len(content) - 130):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            )
            done = run(program, *files, "--delta", delta, "--key", key)
            assert (
                done.returncode,
                f"{path} is not signed with the key" in done.stderr,
            ) == (1, True)
        path.write_bytes(content)
    export_for_inference(model, files[0], dtype=torch.float32)
    assert (
        f"{files[0]} has no signature, and the key"
        in run(program, *files, "--key", key).stderr
    )
    short = write_secret(tmp_path / "short", "0123456789abcdef")
    assert (
        "must have at least 32 characters"
        in run(program, *files, "--key", short).stderr
    )


class Odd(nn.Module):
    """A model with a table whose name must be escaped, and with tensors of many types."""

    TYPES = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.rows = RecStoreEmbedding(50, 4, name='t\n\t"\\\x01\u00fc', lr=0.3)
        for number, dtype in enumerate(self.TYPES):
            self.register_buffer(f"of{number}", torch.zeros(3).to(dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) + self.of0.sum() + self.of10.real.sum()


@pytest.mark.slow
def test_deltas_of_any_tensors_in_cpp(program: Path, tmp_path: Path) -> None:
    model, ids = Odd(), torch.arange(5)
    export_for_inference(model.eval(), tmp_path / "model.pt", dtype=torch.float32)
    model.train()(ids).sum().backward()
    for number, dtype in enumerate(model.TYPES):
        model.register_buffer(f"of{number}", torch.ones(3).to(dtype))
    delta = tmp_path / "delta"
    info = export_delta(model.eval(), delta, base=tmp_path / "model.pt")
    assert len(info.dense) == len(model.TYPES)
    safetensors.torch.save_file(_delta(delta), delta, metadata={"by": "hand"})
    torch.save([ids], tmp_path / "inputs.pt")
    files = [tmp_path / name for name in ("model.pt", "inputs.pt", "output.pt")]
    done = run(program, *files, "--delta", delta)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(files[2]), model(ids))
    # Invalid files and arguments.
    done = run(program, *files[:2], "/proc/x")
    assert (done.returncode, done.stderr) == (1, "error: cannot write /proc/x\n")
    for message, header in (
        (
            "its header is not one of safetensors",
            '{"a":{"dtype":"U8","shape":[x],"data_offsets":[0,4]}}',
        ),
        (
            "its header is not one of safetensors",
            '{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}',
        ),
        (
            "tensor a is too large",
            '{"a":{"dtype":"U8","shape":[9223372036854775807,4],"data_offsets":[0,4]}}',
        ),
        (
            "the bytes of tensor a are not where",
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}',
        ),
        (
            "the unknown type U7",
            '{"a":{"dtype":"U7","shape":[4],"data_offsets":[0,4]}}',
        ),
    ):
        delta.write_bytes(
            len(header).to_bytes(8, "little") + header.encode() + bytes(4)
        )
        done = run(program, *files, "--delta", delta)
        assert done.returncode == 1
        assert done.stderr.startswith(
            f"error: {delta} is no safetensors file or damaged: "
        )
        assert message in done.stderr


@pytest.mark.skipif(NO_LIBRARY is not None, reason=str(NO_LIBRARY))
@pytest.mark.slow
def test_rows_on_servers_in_cpp(program: Path, tmp_path: Path) -> None:
    """A model whose rows are on a server needs the library alone."""
    server = RecStoreServer(tmp_path / "data")
    with RecStoreClient([server.address]) as client:
        client.init_data("b", (100, 6))
        client.push("b", torch.arange(100), torch.arange(600.0).view(-1, 6))
        address = ",".join(client.rows_addresses())
        table = ServerTable(
            "b", "float32", TableOnServers("b", 6, torch.float32, address, False, True)
        )
        model = ServedTables([table])
        save_script(scripted(model), tmp_path / "model.pt")
        inputs = [torch.randint(-20, 120, (10,)), torch.tensor([[3, 0, 2, 1, 4]])]
        torch.save(inputs, tmp_path / "inputs.pt")
        files = [tmp_path / name for name in ("model.pt", "inputs.pt", "output.pt")]
        done = run(program, *files, "--library", load_library())
        assert done.returncode == 0, done.stderr
        assert torch.equal(torch.load(files[2]), model(*inputs))
        assert torch.load(files[2]).any()
        server.kill()
        done = run(program, *files, "--library", load_library())
        assert done.returncode == 1
        assert "table 'b' on server" in done.stderr
