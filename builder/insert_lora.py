"""Pass that gives the targeted linears of a graph LoRA inputs.

1. A linear is a MatMul or Gemm with a constant weight whose module, by the exporter's metadata, is
   a linear. Everything else is left alone, and the result says why.
2. Its site is the module's path. A module that the graph calls twice is one site: both calls read
   the same two inputs, as they share one weight.
3. Each site adds inputs A [k, rank] and B [rank, n], with a rank symbol of its own, and each call a
   node `trt_lora::Lora(y, x, A, B) -> y'` right after the linear. All that read y, or return it,
   then read y'.
4. The operator has a model-local function body in standard operators, which ONNX Runtime and
   TensorRT inline.
5. A linear that already has its Lora node is left as it is: the pass is idempotent.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trt_lora.builder.dtypes import dtype_name, onnx_dtype
from trt_lora.builder.linears import Linear, find_linears, has_module_paths
from trt_lora.plugins.contract import (
    DOMAIN,
    DOMAIN_VERSION,
    OPERATOR,
    BindingNames,
    Factor,
    Site,
)
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.modules import ALL_LINEAR, module_of


@dataclass(frozen=True)
class LeftAlone:
    """A matrix product that takes no LoRA."""

    path: str  # the module's path, or the node's name where it has none
    reason: str


@dataclass
class InsertLoRAResult(ir.passes.PassResult):
    """What the pass did; `sites` holds those of an earlier run too."""

    sites: tuple[Site, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()


@dataclass(frozen=True)
class InsertLoRA(ir.passes.InPlacePass):
    """The pass, for the targets that `resolve_targets` returned."""

    targets: dict[str, frozenset[str]]
    names: BindingNames = BindingNames.LORA
    head: str = ""  # path of the output head, which `all-linear` leaves out, as PEFT does

    def requires(self, model: ir.Model) -> None:
        """The exporter's metadata must still be there."""
        if not has_module_paths(model):
            raise ir.passes.PreconditionError(
                "the graph carries no module paths (pkg.torch.onnx.name_scopes): "
                "insert LoRA before a pass that strips metadata"
            )

    def call(self, model: ir.Model) -> InsertLoRAResult:
        """Insert LoRA in place.

        Raises:
            ConfigError: a target matches no linear of this model, or two modules clash.
        """
        linears, left_alone = self._choose(model)
        sites = _sites(linears)
        self._check_every_target_matched(sites, left_alone)
        missing = [linear for linear in linears if _lora_node(linear.y) is None]
        if missing:
            _add_operator(model)
            _insert_all(model.graph, missing, sites, self.names)
        return InsertLoRAResult(model, bool(missing), tuple(sites.values()), tuple(left_alone))

    def ensures(self, model: ir.Model) -> None:
        """Every input is named once, and every Lora node reads the two inputs of one site."""
        names = [value.name for value in model.graph.inputs]
        if len(names) != len(set(names)):
            raise ir.passes.PostconditionError("two graph inputs have one name")
        for node in model.graph:
            if node.domain == DOMAIN and not all(
                value is not None and value.is_graph_input() for value in node.inputs[2:]
            ):
                raise ir.passes.PostconditionError(f"{node.name} does not read graph inputs")

    def _choose(self, model: ir.Model) -> tuple[list[Linear], list[LeftAlone]]:
        chosen, left_alone = [], []
        for linear in find_linears(model):
            if reason := linear.refusal or self._not_targeted(linear.path):
                left_alone.append(LeftAlone(linear.path, reason))
            else:
                chosen.append(linear)
        return chosen, left_alone

    def _not_targeted(self, path: str) -> str:
        """Why a linear is no target; empty if it is one."""
        module = module_of(path)
        wanted = frozenset[str]().union(*self.targets.values())
        if module is not None and module.name in wanted:
            return ""
        if ALL_LINEAR in wanted:
            return "it is the output head" if path == self.head else ""
        return f"{module.name if module else 'its module'} is not a target"

    def _check_every_target_matched(
        self, sites: dict[str, Site], left_alone: list[LeftAlone]
    ) -> None:
        present = {site.module.name for site in sites.values() if site.module}
        others = {module.name for item in left_alone if (module := module_of(item.path))}
        for target, modules in self.targets.items():
            if not modules & present and not (ALL_LINEAR in modules and sites):
                raise ConfigError(
                    f"this model has no layer for the LoRA target module {target!r}; "
                    f"it has: {', '.join(sorted(present | others)) or 'none that is known'}"
                )


def _sites(linears: list[Linear]) -> dict[str, Site]:
    """The sites of linears, by path."""
    sites: dict[str, Site] = {}
    for linear in linears:
        dtype = linear.y.dtype or linear.x.dtype
        assert dtype is not None  # the exporter writes the type of every value
        site = Site(linear.path, linear.k, linear.n, dtype_name(dtype))
        if sites.setdefault(site.path, site) != site:
            raise ConfigError(
                f"module {site.path} is called as [{site.k}, {site.n}] and with other shapes: "
                "leave it out of the target modules"
            )
    return sites


def _insert_all(
    graph: ir.Graph, linears: list[Linear], sites: dict[str, Site], names: BindingNames
) -> None:
    inputs = _SiteInputs(graph, names)
    node_names = _UnusedNames(str(node.name) for node in graph.all_nodes())
    value_names = _UnusedNames(_value_names(graph))
    for linear in linears:
        weights = inputs.of(sites[linear.path])
        node = _insert(linear, weights, value_names.new(f"{linear.y.name}_lora"))
        node.name = node_names.new(f"lora_{linear.path}")


class _SiteInputs:
    """The two graph inputs of each site, made at the site's first call."""

    def __init__(self, graph: ir.Graph, names: BindingNames) -> None:
        self._graph, self._names = graph, names
        self._made = {str(value.name): value for value in graph.inputs}

    def of(self, site: Site) -> tuple[ir.Value, ir.Value]:
        return self._input(site, "A"), self._input(site, "B")

    def _input(self, site: Site, factor: Factor) -> ir.Value:
        name = self._names.binding(factor, site.path)
        if name not in self._made:
            rank = self._names.rank_symbol(site.path)
            dimensions = (site.k, rank) if factor == "A" else (rank, site.n)
            value = ir.val(name, onnx_dtype(site.dtype), dimensions)
            self._graph.inputs.append(value)
            self._made[name] = value
        return self._made[name]


class _UnusedNames:
    """Hands out names that nothing in the graph has."""

    def __init__(self, used: Iterator[str]) -> None:
        self._used = set(used)

    def new(self, wish: str) -> str:
        name, count = wish, 1
        while name in self._used:
            name, count = f"{wish}_{count}", count + 1
        self._used.add(name)
        return name


def _value_names(graph: ir.Graph) -> Iterator[str]:
    yield from (str(value.name) for value in graph.inputs)
    yield from (str(name) for name in graph.initializers)
    yield from (str(value.name) for node in graph.all_nodes() for value in node.outputs)


def _lora_node(y: ir.Value) -> ir.Node | None:
    """The Lora node that already follows a linear's output."""
    users = (node for node, index in y.uses() if node.domain == DOMAIN and index == 0)
    return next(users, None)


def _insert(linear: Linear, weights: tuple[ir.Value, ir.Value], name: str) -> ir.Node:
    y = linear.y
    node = ir.Node(DOMAIN, OPERATOR, inputs=[], num_outputs=1)
    (adapted,) = node.outputs
    adapted.type, adapted.shape = y.type, y.shape
    if y.is_graph_output():  # the caller knows the output by its name: the new value takes it
        adapted.name, y.name = y.name, name
    else:
        adapted.name = name
    ir.convenience.replace_all_uses_with(y, adapted, replace_graph_outputs=True)
    node.resize_inputs(4)
    for index, value in enumerate((y, linear.x, *weights)):
        node.replace_input_with(index, value)
    graph = linear.node.graph
    assert graph is not None  # the node was found in one
    graph.insert_after(linear.node, node)
    return node


def _add_operator(model: ir.Model) -> None:
    """Add the operator's function body, `y + (x @ A) @ B`, and its domain."""
    function = lora_function(model.graph.opset_imports[""])
    model.functions[function.identifier()] = function
    model.graph.opset_imports[DOMAIN] = DOMAIN_VERSION


def lora_function(opset: int) -> ir.Function:
    """Return the model-local function `trt_lora::Lora(y, x, A, B) -> y'` in opset `opset`."""
    y, x, a, b = (ir.val(name) for name in ("y", "x", "A", "B"))
    shrink = ir.node("MatMul", [x, a])
    expand = ir.node("MatMul", [shrink.outputs[0], b])
    add = ir.node("Add", [y, expand.outputs[0]])
    for node, name in ((shrink, "xa"), (expand, "delta"), (add, "z")):
        node.name, node.outputs[0].name = name, name
    body = ir.Graph(
        [y, x, a, b],
        add.outputs,
        nodes=(shrink, expand, add),
        opset_imports={"": opset},
        name=OPERATOR,
    )
    return ir.Function(DOMAIN, OPERATOR, graph=body, attributes=())
