"""Which row of the batch a token is in, by the sizes of a linear's input; or a refusal by name."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.passes.remove_lora import RemoveLoRA
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.plugins.errors import ModelError

Q, RANK, SLOTS, K, N = "h.0.attn.q_proj", 4, 3, 6, 2
A, B = f"lora_A_{Q}", f"lora_B_{Q}"
# What a linear reads, and how `hidden` [batch, sequence, 6] becomes it.
READ = {
    "each token": "x = Identity(hidden)",
    "tokens in one dimension": "x = Reshape(hidden, flat)",
    "tokens of split heads": "h = Reshape(hidden, heads) x = Reshape(h, flat)",
    "tokens computed one by one": "t = Reshape(hidden, flat) s = Relu(t) x = Mul(s, t)",
    "the last of each row": "x = Gather<axis = 1>(hidden, last)",
    "rows with heads": "x = Unsqueeze(hidden, one)",
    "tokens that are kept": "h = Reshape(hidden, one_row) x = Gather<axis = 1>(h, kept)",
}
TOKENS = {  # rows of those tokens, for a batch of 2 and a sequence of 3
    **{read: [0, 0, 0, 1, 1, 1] for read in READ},
    "the last of each row": [0, 1],
    "tokens that are kept": [1, 0],
}


def graph(body: str) -> ir.Model:
    """A model whose only linear, q_proj, reads x; its weight is zero."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g (int64[batch, sequence] input_ids, int64[kept] kept,
           float[batch, sequence, {K}] hidden) => (float z)
        <float[{K}, {N}] w = {{ {", ".join("0" * K * N)} }},
         int64[2] flat = {{-1, {K}}}, int64[4] heads = {{0, 0, 2, 3}}, int64 last = {{2}},
         int64[1] one = {{1}}, int64[3] one_row = {{1, -1, {K}}}, int64[3] swap = {{1, 0, 2}},
         int64 zero = {{0}}>
        {{ {body} y = MatMul(x, w) z = Identity(y) }}
    """)
    come_from(next(node for node in model.graph if node.outputs[0].name == "y"), Q)
    model.graph.outputs[0].shape = None
    ShapeInferencePass()(model)
    for node in model.graph:
        if node.outputs[0].name == "h" and "one_row" in body:  # as the exporter knows it
            node.outputs[0].shape = ir.Shape([1, None, K])
        if node.outputs[0].name == "x" and "one_row" in body:
            node.outputs[0].shape = ir.Shape([1, "kept", K])
    return model


def insert(model: ir.Model, *, vectors: bool = False) -> InsertLoRAResult:
    result = InsertLoRA(Targets.from_names(["attn_q"]), stack_rank=RANK, vectors=vectors)(model)
    assert isinstance(result, InsertLoRAResult)
    return result


def run(model: ir.Model, slots: list[int]) -> npt.NDArray[np.float32]:
    """Z of two rows of three tokens of ones; an adapter in slot s adds s + 1."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    a = np.zeros((SLOTS, K, RANK), np.float32)
    a[:, 0, 0] = np.arange(SLOTS) + 1
    b = np.zeros((SLOTS, RANK, N), np.float32)
    b[:, 0] = 1
    known = {
        "input_ids": np.zeros((2, 3), np.int64),
        "kept": np.array([4, 2]),
        "hidden": np.ones((2, 3, K), np.float32),
        "lora_slot": np.array(slots, np.int32),
        "lora_rank": np.ones((SLOTS, 1), np.int32),
        A: a,
        B: b,
        # A slot's vectors scale by 10 and add 0.5; the base model's are the last.
        A.replace("A", "scale"): np.array([[10] * N] * SLOTS + [[1] * N], np.float32),
        A.replace("A", "bias"): np.array([[0.5] * N] * SLOTS + [[0] * N], np.float32),
    }
    names = [value.name for value in session.get_inputs()]
    return np.asarray(session.run(None, {name: known[name] for name in names})[0])


@pytest.mark.parametrize("read", READ)
def test_every_token_takes_the_adapter_of_its_row(read: str) -> None:
    model = graph(READ[read])
    insert(model)
    slots = [2, -1]
    added = run(model, slots)[..., 0].reshape(-1)
    assert added.tolist() == [slots[row] + 1 for row in TOKENS[read]]


@pytest.mark.parametrize("read", READ)
def test_every_token_takes_the_vectors_of_its_row(read: str) -> None:
    model = graph(READ[read])
    insert(model, vectors=True)
    slots = [2, -1]
    rows = [30.5 if slots[row] == 2 else 0 for row in TOKENS[read]]
    assert run(model, slots)[..., 0].reshape(-1).tolist() == rows


def test_one_slot_is_for_the_vectors_of_every_row() -> None:
    model = graph(READ["each token"])
    insert(model, vectors=True)
    assert run(model, [1]).reshape(-1).tolist() == [20.5] * 6 * N
    assert not run(model, [-1]).any()


@pytest.mark.parametrize(("slot", "added"), [(1, 2), (-1, 0)])
def test_one_slot_is_for_every_row(slot: int, added: int) -> None:
    model = graph(READ["each token"])
    insert(model)
    assert run(model, [slot]).reshape(-1).tolist() == [added] * 6 * N


def test_a_wrong_number_of_slots_is_an_error() -> None:
    model = graph(READ["each token"])
    insert(model)
    with pytest.raises(Exception, match="Expand"):
        run(model, [0, 1, 2])


@pytest.mark.parametrize(
    "body",
    [
        "t = Transpose<perm = [1, 0, 2]>(hidden) x = Identity(t)",
        "t = Transpose<perm = [1, 0, 2]>(hidden) x = Reshape(t, flat)",
        "t = Reshape(hidden, flat) x = Gather<axis = 0>(t, kept)",
        "t = Reshape(hidden, flat) s = Identity(t) x = CumSum(s, zero)",
    ],
)
def test_an_input_whose_rows_cannot_be_told_is_refused_by_name(body: str) -> None:
    with pytest.raises(ModelError, match=rf"^the input of {Q} has shape .*leave out --max-loras$"):
        insert(graph(body))


def test_inputs_are_stacks_with_the_slots_and_ranks_of_all() -> None:
    model = graph(READ["each token"])
    insert(model)
    shapes = {str(value.name): str(value.shape) for value in model.graph.inputs}
    assert shapes["lora_slot"] == "[slot_rows]"
    assert shapes["lora_rank"] == "[slots,1]"
    assert shapes[A] == f"[slots,{K},{RANK}]"
    assert shapes[B] == f"[slots,{RANK},{N}]"


def test_linears_of_one_shape_share_what_is_computed_of_the_slots() -> None:
    model = graph("x = Add(hidden, hidden) u = MatMul(hidden, w)")
    (other,) = [node for node in model.graph if node.outputs[0].name == "u"]
    come_from(other, "h.1.attn.q_proj")
    insert(model)
    lora = [node for node in model.graph if node.domain == DOMAIN]
    assert len(lora) == 2
    assert len({node.inputs[1] for node in lora}) == 1
    assert sum(node.op_type == "Expand" for node in model.graph) == 1


def test_inputs_of_unnamed_sizes_have_slots_of_their_own() -> None:
    model = graph(
        "x = Add(hidden, hidden) h = Add(x, x) g = Add(h, h) u = MatMul(h, w) v = MatMul(g, w)"
    )
    paths = {"u": "h.1.attn.q_proj", "v": "h.2.attn.q_proj"}
    for node in model.graph:
        output = node.outputs[0]
        if output.name in ("x", "h", "g"):
            output.shape = ir.Shape(["batch", None, K])
        if output.name in paths:
            come_from(node, paths[output.name])
    insert(model)
    lora = [node for node in model.graph if node.domain == DOMAIN]
    assert len({node.inputs[1] for node in lora}) == 3
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(names) == len(set(names))


def test_the_pass_is_idempotent_with_stacks() -> None:
    model = graph(READ["tokens that are kept"])
    first = insert(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    second = insert(model)
    assert not second.modified
    assert second.sites == first.sites
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("read", READ)
def test_what_is_computed_of_slots_goes_with_lora(read: str) -> None:
    model, plain = graph(READ[read]), graph(READ[read])
    insert(model)
    RemoveLoRA(frozenset({A, B, "lora_slot", "lora_rank"}))(model)
    assert [node.op_type for node in model.graph] == [node.op_type for node in plain.graph]
    assert [v.name for v in model.graph.inputs] == [v.name for v in plain.graph.inputs]
