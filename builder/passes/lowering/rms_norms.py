"""Pass that makes the norms of a trace, six to eight nodes each, one `RMSNormalization`.

1. `weight * x / sqrt(mean(x^2) + epsilon)` over the last axis, all in float32, becomes the
   operator.
2. So does one of half precision that is computed in float32 and scaled afterwards: that is the
   operator's own definition. One that is scaled in float32 stays between its casts, by rule 1.
3. Left alone are other axes and powers, a weight that is not [n], and an epsilon that is no number.
"""

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern
from onnxscript.rewriter import rewrite as apply_rules

from trt_lora.builder.passes import graph_values as gv

_FLOAT = int(ir.DataType.FLOAT)


class RMSNorms(ir.passes.InPlacePass):
    """The pass, for graphs of opset 23 and later."""

    def requires(self, model: ir.Model) -> None:
        """The opset has the operator."""
        gv.require_opset(model, 23)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        norm: Any = _Norm
        rules = [norm.rule(is_half=is_half) for is_half in (False, True)]
        apply_rules(model, pattern.RewriteRuleSet(rules, commute=True))
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Every norm has as many weights as its last axis has places."""
        for node in (node for node in model.graph if node.op_type == "RMSNormalization"):
            widths = [list(gv.present(value).shape or ())[-1:] for value in node.inputs]
            gv.ensure(widths[0] == widths[1], f"{node.name} has a weight of another width")


class _Norm(pattern.RewriteRuleClassBase):
    """x and weight are of one type, float32 or a half one that is widened for the norm alone."""

    def __init__(self, *, is_half: bool) -> None:
        super().__init__()
        self._is_half = is_half

    def pattern(self, op: Any, x: Any, weight: Any, epsilon: Any) -> Any:
        if self._is_half:
            return op.Mul(weight, op.Cast(_normed(op, op.Cast(x, to=_FLOAT), epsilon)))
        return op.Mul(weight, _normed(op, x, epsilon))

    def check(  # type: ignore[override] # the rewriter calls it by name
        self, context: Any, x: ir.Value, weight: ir.Value, epsilon: ir.Value
    ) -> bool:
        del context  # the rewriter's own
        has_its_type = self._is_half or x.dtype == ir.DataType.FLOAT
        return has_its_type and x.dtype == weight.dtype and _is_norm(x, weight, epsilon)

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, epsilon: ir.Value) -> Any:
        return op.RMSNormalization(
            x, weight, axis=-1, epsilon=gv.number(epsilon), stash_type=_FLOAT
        )


def _normed(op: Any, x: Any, epsilon: Any) -> Any:
    mean = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1)
    return op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, epsilon))))


def _is_norm(x: ir.Value, weight: ir.Value, epsilon: ir.Value) -> bool:
    """Whether epsilon is a number, and weight has one for every place of x's last axis."""
    scale = ir.convenience.get_const_tensor(weight)
    if scale is None or x.shape is None or gv.number(epsilon) is None:
        return False
    return list(scale.shape) == [x.shape[-1]]
