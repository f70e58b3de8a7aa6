"""Clipping every cotangent inside a function."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import DropVar, Literal, Var

import clipgrad._names as _names
import clipgrad._programs as _programs
from clipgrad._arrays import explain_call
from clipgrad._clip import asks, is_known
from clipgrad._error_clip.cotangent import clip_of_value
from clipgrad._error_clip.inner_grad_warning import warn_of_inner_gradients
from clipgrad._error_clip.named_rules import check_function, rule_of_variable
from clipgrad._frameworks import with_models

Transformed = TypeVar("Transformed", bound=Callable[..., Any])


_ASK = "write a rule that asks for them: def rule(cotangent, *, name, operation)"


@explain_call(where=_ASK, names=_ASK, operation=_ASK, operations=_ASK)
def error_clip_everywhere(fun: Transformed, rule: Callable[..., Any] | None) -> Transformed:
    r"""Clips, in the backward pass, the gradient of every value that a function computes.

    Example:
      >>> import clipgrad as cg, jax
      >>> def model(x):
      ...     return 7 * (3 * (2 * x))
      >>> clipped = cg.error_clip_everywhere(model, cg.ErrorClipByValue(max=10.0))
      >>> print(jax.grad(model)(1.0), jax.grad(clipped)(1.0))
      42.0 20.0

    Args:
      fun: a function of pytrees.
      rule: a `ClipRule`, a function of the cotangent, or ``None``: off. A function may have the
        keyword-only parameters ``name`` (the tag, or the innermost module that the value leaves, or
        ``""``) and ``operation`` (the JAX primitive that computed the value). So
        ``lambda g, *, operation: jnp.clip(g, -1, 1) if operation == "exp" else g`` clips only the
        results of ``exp``.

    Returns:
      A function like ``fun``.

    Raises:
      TypeError: if ``fun`` is not a function, or ``rule`` is not a rule or needs parameters.

    For each operation $y = f(x_1, \ldots, x_n)$ inside ``fun``, let $\bar y$ be the sum of the
    cotangents from all uses of $y$. The operation's VJP receives $\mathrm{rule}(\bar y)$.

    Usually you want a value rule. A norm rule measures the cotangent of each value alone, and
    inside a `jax.vmap` in ``fun`` the cotangent of the whole batch.

    Guarantees:
      * The result is bit-identical to that of ``fun``.
      * Operations are clipped at any depth, at each `jax.lax.scan` step. A function with a custom
        rule, such as `jax.custom_vjp`, is one operation.
      * A clip inside ``fun`` is an operation, and the result is clipped like any other: the
        cotangent passes the rule from outside, the clip, and the rule again.
      * Cotangents of arguments are not clipped, nor those of results that ``fun`` itself does not
        use. (A scan's carry is used by the next step.)

    References:
      PaddlePaddle, Error Clip, 2018,
      https://github.com/PaddlePaddle/Paddle/blob/4ead8e1b57b2c8eca3bd3fc111d1251c59aa60a4/doc/design/error_clip.md:
      every gradient is clipped before the next operation of the backward pass takes it.
    """
    check_function(fun)
    rule = rule_of_variable(rule)

    @functools.wraps(fun)
    def clipped(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs) if rule is None else with_models(run, fun, args, kwargs)

    def run(fun: Any, args: Any, kwargs: Any) -> Any:
        traced = _programs.trace(fun, args, kwargs)
        warn_of_inner_gradients(traced.program, None, "error_clip_everywhere")
        results = range(len(_programs.opened(traced.program)[0].outvars))
        ends, names = _ends(traced.program, results), _names.names_of_variables(traced.program)
        hook = _Everywhere(rule, ends, (), frozenset(names.items() if asks(rule) else ()))
        return traced.evaluate(args, kwargs, hook)

    return clipped  # type: ignore[return-value]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rule"],
    meta_fields=["ends", "scopes", "names"],
)
@dataclasses.dataclass(frozen=True)
class _Everywhere(_programs.Hook):
    """Clips the results of operations, except ``ends`` and values without cotangents."""

    rule: Callable[..., Any] | None
    ends: frozenset[Var]
    scopes: _names.ScopePath = ()  # those around the program
    names: frozenset[tuple[Var, str]] = frozenset()  # of its variables, if the rule asks for them

    @property
    def is_reusable(self) -> bool:
        return is_known(self.rule)

    def __call__(self, equation: Any, inputs: list) -> Sequence | None:
        """The clipped results of an operation; None for an equation with programs inside."""
        inner, _ = _programs.entered_programs(equation)
        if inner and not _programs.is_linear_solve(equation):
            return None
        outputs = _programs.bind(equation, inputs)
        if _programs.is_tag(equation):
            return outputs
        flags = [self._is_clipped(variable) for variable in equation.outvars]
        names, operation = dict(self.names), _programs.operation_name(equation)
        rows = zip(flags, outputs, equation.outvars, strict=True)
        return [
            clip_of_value(x, self.rule, names.get(variable, ""), operation) if flag else x
            for flag, x, variable in rows
        ]

    def inside(self, equation: Any, part: _programs.Part) -> "_Everywhere":
        inner, _ = _programs.entered_programs(equation)
        # The next step of a scan uses what it carries.
        first = _programs.scan_counts(equation)[1] if _programs.is_scan(equation) else 0
        ends = [i for i, v in enumerate(equation.outvars) if i >= first and v in self.ends]
        inside = frozenset().union(*(_ends(p, ends) for p in inner))
        scopes = (*self.scopes, *_names.path(equation))
        names = _names.names_inside(equation, scopes, dict(self.names)) if asks(self.rule) else {}
        return _Everywhere(self.rule, inside, scopes, frozenset(names.items()))

    def _is_clipped(self, variable: Any) -> bool:
        is_plain = type(variable.aval) is ShapedArray and not isinstance(variable, DropVar)
        return is_plain and variable not in self.ends


def _ends(program: Any, positions: Iterable[int]) -> frozenset[Var]:
    """The results at these positions alone, that nothing in the program uses, and its numbers."""
    jaxpr, _ = _programs.opened(program)
    chosen = set(positions)
    used = {atom for e in jaxpr.eqns for atom in e.invars if not isinstance(atom, Literal)}
    results = [(i, v) for i, v in enumerate(jaxpr.outvars) if not isinstance(v, Literal)]
    ends = {v for i, v in results if i in chosen} - {v for i, v in results if i not in chosen}
    # What depends on numbers alone has no cotangent, as copies of them that `jax.shard_map` makes.
    numbers: set[Var] = set()
    for e in jaxpr.eqns:
        if all(isinstance(atom, Literal) or atom in numbers for atom in e.invars):
            numbers.update(e.outvars)
    return frozenset((ends - used) | numbers)
