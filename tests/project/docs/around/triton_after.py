# ruff: noqa: F821  (the names are those of the page)
import json
import os

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

with torch.inference_mode():
    wanted = model(ids, lengths)
package = torch._inductor.aoti_load_package(
    str(repository / "ctr_package" / "1" / "model.pt2")
)
assert torch.allclose(package(ids, lengths), wanted)
assert torch.equal(
    torch.jit.load(repository / "ctr" / "1" / "model.pt")(ids, lengths), wanted
)
os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
assert package(ids[:0], torch.zeros(1, dtype=torch.int64)).shape == (1, 1)
arguments, outputs = (json.loads(spec)[1] for spec in package.loader.get_call_spec())
inputs = arguments["children_spec"][0]["children_spec"]
for name, platform in (("ctr", "pytorch_libtorch"), ("ctr_package", "torch_aoti")):
    parsed = text_format.Parse(
        (repository / name / "config.pbtxt").read_text(), ModelConfig()
    )
    assert parsed.platform == platform
    assert [each.name for each in parsed.input] == [
        f"INPUT__{number}" for number in range(len(inputs))
    ]
    assert len(parsed.output) == 1
assert outputs["type"] is None  # one tensor, not a collection of tensors
