"""Scale and bias vectors behind the LoRA sites of a graph: (y + delta) * scale + bias.

1. Every site has inputs of its own, `lora_scale_<path>` and `lora_bias_<path>`, both [n].
2. With slots these are stacks [slots + 1, n]: each token takes the row of its slot, one without an
   adapter the last, which is ones and zeros.
3. The base model's own bias comes behind them. One inside a Gemm becomes an addition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import Linear
from trt_lora.builder.passes.token_slots import TokenSlots
from trt_lora.plugins.contract.sites import VECTORS, BindingNames, Site
from trt_lora.plugins.contract.slots import SLOTS_AND_BASE
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.memory.dtypes import storage_dtype

Step = tuple[str, ir.Value]  # an operator, and what it takes beside the sum so far


@dataclass(frozen=True)
class SiteVectors:
    """The vector inputs of a graph, made at the first call of each site."""

    graph: ir.Graph
    names: BindingNames
    slots: TokenSlots | None = None

    def steps(self, linear: Linear, site: Site) -> Iterator[Step]:
        """Yield what follows the sum of a linear and its delta.

        Raises:
            ModelError: it cannot be told which row a token belongs to.
        """
        for operator, vector in zip(("Mul", "Add"), self._inputs(site), strict=True):
            yield operator, vector if self.slots is None else self.slots.gather(vector, linear)

    def _inputs(self, site: Site) -> Iterator[ir.Value]:
        made = {value.name: value for value in self.graph.inputs}
        for factor in VECTORS:
            name = self.names.binding(factor, site.path)
            if name not in made:
                sizes = (site.n,) if self.slots is None else (SLOTS_AND_BASE, site.n)
                dtype = ir.DataType.from_numpy(storage_dtype(site.dtype))
                made[name] = ir.val(name, dtype, sizes)
                self.graph.inputs.append(made[name])
            yield made[name]


def part_from_biases(linears: Sequence[Linear]) -> None:
    """Let every linear make x @ W alone, and an addition add the bias that it had.

    Raises:
        ModelError: it takes another multiple of the bias than one.
    """
    for linear in linears:
        if len(linear.node.inputs) < 3 or linear.node.inputs[2] is None:
            continue
        if linear.node.attributes.get_float("beta", 1.0) != 1:
            raise ModelError(f"{linear.path} multiplies its bias; leave out --lora-vectors")
        tape, bias, y = Tape(), linear.node.inputs[2], linear.y
        linear.node.resize_inputs(2)
        total = tape.op("Add", [None, bias])
        total.type, total.shape = y.type, y.shape
        gv.replace_value(y, total)
        tape.nodes[0].replace_input_with(0, y)
        gv.insert_behind(gv.graph_of(linear.node), y, gv.unnamed(tape))
