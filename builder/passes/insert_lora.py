"""Pass that inserts LoRA inputs for the target linears of a graph.

1. A linear is a MatMul or Gemm with a constant weight whose module, by the exporter's metadata, is
   a linear. Everything else is left alone, and the result says why.
2. Its site is the module's path. A module that the graph calls twice is one site: both calls read
   the same two inputs, as they share one weight.
3. Each site adds inputs A [k, rank] and B [rank, n], with a rank symbol of its own.
4. Linears that read the same x share one node of the domain `trt_lora` (`groups.py`); all that
   read a linear's output y, or return it, then read y + (x @ A) @ B.
5. The operator has a model-local function body in standard operators, which ONNX Runtime inlines,
   and TensorRT too where our plugin is not registered.
6. With `stack_rank`, A and B are stacks [slots, k, R] and [slots, R, n], and every node reads the
   slot of each token too (`token_slots.py`).
7. With `vectors`, a scale and a bias follow every site (`special_sites/site_vectors.py`).
8. A matrix of all experts has inputs A [E, k, rank] and B [E, rank, n], which the node of these
   experts reads (`experts/inputs.py`).
9. The input embedding, where it is a target by name, has A [V, rank] and B [rank, n] too
   (`special_sites/table_lora.py`). So has an output head among `saved`, in products alone.
10. A convolution is a linear over patches of x; its delta gets its channels first
    (`special_sites/convolutions.py`).
11. A linear that has its LoRA inputs already is left as it is: the pass is idempotent.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.experts.inputs import ExpertInputs
from trt_lora.builder.passes.groups import LinearGroup, Operand, make_groups
from trt_lora.builder.passes.linears import (
    Linear,
    find_embedding,
    find_experts,
    find_linears,
    has_module_paths,
)
from trt_lora.builder.passes.lora_function import lora_function
from trt_lora.builder.passes.special_sites.convolutions import (
    channels_first,
    patches,
    shape_of_rows,
)
from trt_lora.builder.passes.special_sites.site_vectors import SiteVectors, Step, part_from_biases
from trt_lora.builder.passes.special_sites.table_lora import adapt_table
from trt_lora.builder.passes.token_slots import TokenSlots
from trt_lora.builder.targets import LeftAlone, Targets, check_targets_matched
from trt_lora.plugins.contract.modules import target_names
from trt_lora.plugins.contract.operators import (
    COLUMNS,
    DOMAIN,
    DOMAIN_VERSION,
    EXPERTS_OPERATOR,
    Operator,
)
from trt_lora.plugins.contract.sites import FACTORS, BindingNames, Site
from trt_lora.plugins.contract.slots import SLOTS
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.runtime.generation.decoding.step_inputs import BATCH
from trt_lora.runtime.memory.dtypes import storage_dtype


@dataclass
class InsertLoRAResult(ir.passes.PassResult):
    """Result of the pass; `sites` holds those of an earlier run too."""

    sites: tuple[Site, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()


@dataclass(frozen=True)
class InsertLoRA(ir.passes.InPlacePass):
    """The pass, for the linears that are targets."""

    targets: Targets
    names: BindingNames = BindingNames.LORA
    head: str = ""  # path of the output head, which `all-linear` leaves out, as PEFT does
    # The linears of the torch model by path, and whether the logits need them.
    modules: Mapping[str, bool] = field(default_factory=dict)
    stack_rank: int | None = None  # R of stacks for many adapters; None: one adapter at a time
    vectors: bool = False  # whether every site takes a scale and a bias too
    embedding: str = ""  # path of the input embedding
    saved: Collection[str] = ()  # modules that an adapter may have saved whole
    is_part: bool = False  # whether a target may be met by another graph of the engine alone
    linears: Sequence[Linear] | None = None  # of a graph by another exporter; None: as ours says
    batch: str = BATCH  # name of the dimension that counts rows, each with its own adapter

    def requires(self, model: ir.Model) -> None:
        """The exporter's metadata must still be there, if nothing else names the linears."""
        gv.require(
            self.linears is not None or has_module_paths(model),
            "the graph carries no module paths (pkg.torch.onnx.name_scopes): "
            "insert LoRA before a pass that strips metadata",
        )

    def call(self, model: ir.Model) -> InsertLoRAResult:
        """Insert LoRA in place.

        Raises:
            ConfigError: a target matches no linear of this model, or two modules clash.
            ModelError: a target that the logits need is not in the graph by itself; or, with
                stacks, it cannot be told which adapter a token of its input takes.
        """
        linears, left_alone = self._choose(model)  # experts and embedding last
        in_graph = {linear.path for linear in linears} | {item.path for item in left_alone}
        left_alone += self._absent(in_graph)
        sites = _sites(linears)
        if not self.is_part:
            check_targets_matched(self.targets, sites.values(), left_alone)
        known = {value.name for value in model.graph.inputs}
        missing = [item for item in linears if self.names.binding("A", item.path) not in known]
        if missing:
            plain = [item for item in missing if not item.experts and not self._is_table(item)]
            if self.vectors:
                part_from_biases(plain)
            self._insert(model, make_groups(plain, with_vectors=self.vectors), sites, missing)
        return InsertLoRAResult(model, bool(missing), tuple(sites.values()), tuple(left_alone))

    def ensures(self, model: ir.Model) -> None:
        """Every input is named once, and every Lora node reads the two inputs of each site."""
        names = [value.name for value in model.graph.inputs]
        gv.ensure(len(names) == len(set(names)), "two graph inputs have one name")
        for node in (node for node in model.graph if node.domain == DOMAIN):
            factors = gv.factors(node)
            are_inputs = bool(factors) and all(factor.is_graph_input() for factor in factors)
            gv.ensure(are_inputs, f"{node.name} does not read graph inputs")

    def _choose(self, model: ir.Model) -> tuple[list[Linear], list[LeftAlone]]:
        chosen, left_alone, found = [], [], self.linears
        if found is None:
            tables = find_embedding(model, self.embedding) if self.targets.has_embedding else ()
            found = [*find_linears(model), *find_experts(model), *tables]
        for linear in found:
            if reason := (
                linear.refusal
                or self.targets.refusal(linear.path, self.head)
                or self._convolution_refusal(linear)
            ):
                left_alone.append(LeftAlone(linear.path, reason))
            else:
                chosen.append(linear)
        return chosen, left_alone

    def _is_table(self, linear: Linear) -> bool:
        """Whether the delta of a linear is no node: of the embedding, or a head saved whole."""
        return linear.is_embedding or bool(target_names(linear.path) & {*self.saved})

    def _convolution_refusal(self, linear: Linear) -> str:
        if linear.window is None or not self.vectors:
            return ""
        return "it is a convolution, which takes no vectors"

    def _absent(self, in_graph: set[str]) -> Iterator[LeftAlone]:
        """Targets that are not in the graph because the logits do not need them."""
        for path, is_needed in self.modules.items():
            if path in in_graph or not self.targets.includes(path, self.head):
                continue
            if is_needed:
                raise ModelError(
                    f"{path} is not in the exported graph as a linear of its own, so that an "
                    "adapter for it could not be told from another's; leave its kind out of "
                    "--lora-target-modules"
                )
            yield LeftAlone(path, "the logits do not depend on it")

    def _insert(
        self,
        model: ir.Model,
        groups: list[LinearGroup],
        sites: Mapping[str, Site],
        linears: Sequence[Linear],
    ) -> None:
        graph, columns_of_ranks = model.graph, {path: n for n, path in enumerate(sites)}
        has_slots = self.stack_rank is not None
        slots = TokenSlots(graph, len(sites), self.batch) if has_slots else None
        vectors = SiteVectors(graph, self.names, slots) if self.vectors else None
        for table in filter(self._is_table, linears):  # first in the graph
            adapt_table(table, [*self._inputs(graph, sites[table.path])], slots)
        for group in groups:
            operator = replace(group.operator, has_slots=slots is not None)
            _add_function(model, operator)
            operands = [_rows_of(group)]
            if slots:
                patches_of_x = operands[0] if group.window else None
                operands += slots.operands(group.linears[0], patches_of_x)
            for linear in group.linears:
                operands += self._inputs(graph, sites[linear.path])
            node = _node(group, operator, operands)
            if operator.has_slots:
                columns = [columns_of_ranks[linear.path] for linear in group.linears]
                node.attributes[COLUMNS] = ir.AttrInt64s(COLUMNS, columns)
            steps = vectors.steps if vectors else _no_steps
            _insert(group, node, [[*steps(each, sites[each.path])] for each in group.linears])
        inputs = ExpertInputs(graph, columns_of_ranks, slots)
        for linear in (each for each in linears if each.experts):
            _add_function(model, EXPERTS_OPERATOR)
            inputs.add(linear, [*self._inputs(graph, sites[linear.path])])
        graph.opset_imports[DOMAIN] = DOMAIN_VERSION
        graph.sort()  # a node may stand before the last of the outputs that it adds to
        NameFixPass()(model)  # a module that is called twice has two nodes

    def _inputs(self, graph: ir.Graph, site: Site) -> Iterator[ir.Value]:
        """The two graph inputs of a site, made at its first call."""
        made = {value.name: value for value in graph.inputs}
        rank = self.stack_rank or self.names.rank_symbol(site.path)
        leading = (SLOTS,) * (self.stack_rank is not None) + (site.experts,) * bool(site.experts)
        for factor in FACTORS:
            matrix = (site.k, rank) if factor == "A" else (rank, site.n)
            name = self.names.binding(factor, site.path)
            if name not in made:
                dtype = ir.DataType.from_numpy(storage_dtype(site.dtype))
                made[name] = ir.val(name, dtype, (*leading, *matrix))
                graph.inputs.append(made[name])
            yield made[name]


def _sites(linears: list[Linear]) -> dict[str, Site]:
    """The sites of linears, by path."""
    sites: dict[str, Site] = {}
    for linear in linears:
        dtype = gv.present(linear.y.dtype or linear.x.dtype)
        site = Site(linear.path, linear.k, linear.n, dtype.numpy().name, experts=linear.experts)
        if sites.setdefault(site.path, site) != site:
            raise ConfigError(
                f"module {site.path} is called as [{site.k}, {site.n}] and with other shapes: "
                "leave it out of the target modules"
            )
    return sites


def _add_function(model: ir.Model, operator: Operator) -> None:
    function = lora_function(operator, model.graph.opset_imports[""])
    model.functions[function.identifier()] = function


def _node(group: LinearGroup, operator: Operator, operands: list[ir.Value]) -> ir.Node:
    """The group's node with all operands but its addends."""
    name = f"lora_{group.linears[0].path}"
    node = ir.Node(DOMAIN, operator.name, operands, num_outputs=operator.sites, name=name)
    for output, y in zip(node.outputs, group.outputs, strict=True):
        shape = y.shape if group.window is None else shape_of_rows(y)
        output.type, output.shape, output.name = y.type, shape, f"{y.name}_lora"
    return node


def _rows_of(group: LinearGroup) -> ir.Value:
    """What the group's node reads: x, or its patches."""
    if group.window is None:
        return group.x
    tape, first = Tape(), group.linears[0].node
    rows = patches(tape, group.x, group.window)
    gv.graph_of(first).insert_before(first, gv.unnamed(tape))
    return rows


def _no_steps(linear: Linear, site: Site) -> Iterator[Step]:
    """Without vectors nothing follows a sum."""
    return iter(())


def _insert(group: LinearGroup, node: ir.Node, steps: Sequence[Sequence[Step]]) -> None:
    if group.residual is not None:
        _add_to_residual(group.residual, node)
    elif group.returns_delta:
        _add_behind(group, node, steps)
    else:
        _add_to_outputs(group, node)


def _add_to_residual(residual: Operand, node: ir.Node) -> None:
    _set_addends(node, [residual.value])
    residual.node.replace_input_with(residual.position, node.outputs[0])
    gv.graph_of(residual.node).insert_before(residual.node, node)


def _add_behind(group: LinearGroup, node: ir.Node, steps: Sequence[Sequence[Step]]) -> None:
    graph = gv.graph_of(group.linears[0].node)
    graph.insert_before(group.linears[0].node, node)
    for y, output, more in zip(group.outputs, node.outputs, steps, strict=True):
        tape, nodes, total = Tape(), list[ir.Node](), None
        delta = channels_first(tape, output) if group.window else output
        for operator, operand in (("Add", delta), *more):
            name = f"{operator.lower()}_{output.name}"
            nodes.append(ir.Node("", operator, [total, operand], num_outputs=1, name=name))
            total = nodes[-1].outputs[0]
            total.type, total.shape, total.name = y.type, y.shape, f"{y.name}_adapted"
        gv.replace_value(y, gv.present(total))
        nodes[0].replace_input_with(0, y)
        gv.insert_behind(graph, y, [*gv.unnamed(tape), *nodes])


def _add_to_outputs(group: LinearGroup, node: ir.Node) -> None:
    for y, adapted in zip(group.outputs, node.outputs, strict=True):
        gv.replace_value(y, adapted)
    _set_addends(node, group.outputs)
    gv.insert_behind(gv.graph_of(group.linears[0].node), group.outputs[-1], node)


def _set_addends(node: ir.Node, addends: Sequence[ir.Value]) -> None:
    first = len(node.inputs)
    node.resize_inputs(first + len(addends))
    for index, value in enumerate(addends, start=first):
        node.replace_input_with(index, value)
