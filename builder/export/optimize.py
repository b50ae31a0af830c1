"""Graph optimization of the exporter, without the merging of equal weights.

`torch.onnx.export(optimize=True)` makes one initializer of small weights with equal values, and
then one node of two linears that read the same x: an adapter for one would be applied to both.
"""

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript.optimizer import fold_constants, inline
from onnxscript.rewriter import _DEFAULT_REWRITE_RULES, rewrite
from onnxscript.rewriter.rules.common import slice_split_rule

# Equal constants are merged up to this many elements: sizes, axes and scalars, but no weight.
_MERGED_ELEMENTS = 8
# One of the rules looks for pairs of nodes anywhere in the graph: a quarter of the export's time.
_RULES = [rule for rule in _DEFAULT_REWRITE_RULES if rule is not slice_split_rule]


def optimize(model: ir.Model) -> None:
    """Fold constants, rewrite, and merge equal nodes in place; linears stay apart."""
    inline(model)
    for _ in range(2):  # rewriting makes new constants
        fold_constants(model, onnx_shape_inference=True)
        rewrite(model, _RULES)
    ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(size_limit=_MERGED_ELEMENTS),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
