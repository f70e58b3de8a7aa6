"""Evaluate a jaxpr again with a hook at each equation, nested programs included.

This is the only module that knows how JAX's higher-order primitives store their programs, and
in what their parameters differ between versions. A hook sees every equation first; what it
leaves alone is entered if it holds a program, and bound as it stands if it does not.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vmap_call"})
CALLS = frozenset({"closed_call", "core_call"})
REMAT = frozenset({"checkpoint", "remat", "remat2"})


class Hook:
    """What to do at the equations of a program; the defaults change nothing.

    `flatten=True` evaluates `jit` and `remat` in place and enters custom rules by their primal
    program; `flatten=False` keeps all three, custom rules whole.
    """

    flatten: bool = False

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """Return the outputs of `equation`, or None to have it evaluated or entered."""
        del equation, inputs
        return None

    def constant(self, value: Any, aval: Any) -> Any:
        """Return what stands for a literal or a closed-over constant."""
        del aval
        return value

    def steps(self, equation: JaxprEqn) -> Any:
        """Return a tree with a leading axis as long as the scan, handed out step by step."""
        del equation
        return ()

    def inside(self, equation: JaxprEqn, step: Any) -> "Hook":
        """Return the hook for a program of `equation`; `step` is this step's part of `steps`."""
        del equation, step
        return self


def evaluate(program: Any, inputs: Sequence, hook: Hook) -> list:
    """Evaluate a program on flat inputs, showing each equation to the hook.

    Args:
      program: a `ClosedJaxpr`, or a `Jaxpr` without constants.
      inputs: one value for each input variable.
      hook: sees every equation of this program, and of those inside it through `hook.inside`.

    Returns:
      The list of outputs.
    """
    jaxpr, constants = opened(program)
    values: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, constant in zip(jaxpr.constvars, constants, strict=True):
        values[variable] = hook.constant(constant, variable.aval)

    def read(atom):
        if isinstance(atom, Literal):
            return hook.constant(atom.val, atom.aval)
        return values[atom]

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        outputs = hook(equation, arguments)
        if outputs is None:
            outputs = _enter(equation, arguments, hook)
        if outputs is None:
            outputs = bind(equation, arguments)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: JaxprEqn, inputs: Sequence, **changed: Any) -> list:
    """Apply the primitive of `equation` to `inputs`, with some parameters changed."""
    params = equation.primitive.get_bind_params({**equation.params, **changed})
    outputs = equation.primitive.bind(*inputs, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def opened(program: Any) -> tuple[Any, Sequence]:
    """Return the jaxpr and the constants of a program in any of JAX's containers."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def equations(program: Any) -> Iterator[JaxprEqn]:
    """Iterate over the equations of a program and of all programs inside it."""
    for equation in opened(program)[0].eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def is_entered(equation: JaxprEqn, hook: Hook) -> bool:
    """Whether `evaluate` goes inside this equation with this hook."""
    name = equation.primitive.name
    return name in _ENTRANCES or (hook.flatten and name in CUSTOM_RULES)


def map_programs(equation: JaxprEqn, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the parameters that hold programs, each program replaced by `change` of it."""

    def changed(value):
        if hasattr(value, "eqns"):
            return change(value)
        if isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            items = [changed(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    new = {name: changed(value) for name, value in equation.params.items()}
    return {name: value for name, value in new.items() if value is not equation.params[name]}


def retrace(program: Any, avals: Sequence, hook: Hook) -> Any:
    """Trace a program again under `hook` for inputs of other types; keeps its container."""
    traced = jax.make_jaxpr(lambda *inputs: evaluate(program, inputs, hook))(*avals)
    return traced if isinstance(program, ClosedJaxpr) else opened(traced)[0]


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a scan are constants and how many are carried."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def _enter(equation: JaxprEqn, inputs: list, hook: Hook) -> Sequence | None:
    name = equation.primitive.name
    if name in _ENTRANCES:
        return _ENTRANCES[name](equation, inputs, hook)
    if hook.flatten and name in CUSTOM_RULES:
        return _call(equation, inputs, hook)
    return None


def _program(equation: JaxprEqn) -> Any:
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    return next(equation.params[name] for name in names if name in equation.params)


def _body(equation: JaxprEqn, hook: Hook, program: Any = None) -> Callable[..., list]:
    program = _program(equation) if program is None else program
    return lambda *inputs: evaluate(program, inputs, hook.inside(equation, ()))


def _call(equation, inputs, hook):
    return _body(equation, hook)(*inputs)


def _jit(equation, inputs, hook):
    if hook.flatten:
        return _call(equation, inputs, hook)
    inputs = _constrained(inputs, equation.params["in_shardings"])
    outputs = jax.jit(_body(equation, hook))(*inputs)
    return _constrained(outputs, equation.params["out_shardings"])


def _constrained(values, shardings):
    return [
        lax.with_sharding_constraint(value, sharding)
        if isinstance(sharding, jax.sharding.Sharding)
        else value
        for value, sharding in zip(values, shardings, strict=True)
    ]


def _remat(equation, inputs, hook):
    if hook.flatten:
        return _call(equation, inputs, hook)
    params = equation.params
    again = jax.checkpoint(
        _body(equation, hook), prevent_cse=params["prevent_cse"], policy=params["policy"]
    )
    return again(*inputs)


def _scan(equation, inputs, hook):
    constants, carried = scan_counts(equation)
    split = constants + carried

    def step(carry, element):
        sliced, own = element
        inner = hook.inside(equation, own)
        arguments = [*inputs[:constants], *carry, *sliced]
        outputs = evaluate(_program(equation), arguments, inner)
        return tuple(outputs[:carried]), tuple(outputs[carried:])

    carry, stacked = lax.scan(
        step,
        tuple(inputs[constants:split]),
        (tuple(inputs[split:]), hook.steps(equation)),
        **{name: equation.params[name] for name in ("length", "reverse", "unroll")},
    )
    return [*carry, *stacked]


def _while(equation, inputs, hook):
    params = equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    again = _body(equation, hook, params["cond_jaxpr"])
    body = _body(equation, hook, params["body_jaxpr"])
    return lax.while_loop(
        lambda carry: again(*inputs[:first], *carry)[0],
        lambda carry: tuple(body(*inputs[first:second], *carry)),
        tuple(inputs[second:]),
    )


def _cond(equation, inputs, hook):
    branches = [_body(equation, hook, branch) for branch in equation.params["branches"]]
    return lax.switch(inputs[0], branches, *inputs[1:])


def _shard_map(equation, inputs, hook):
    params = equation.params
    mapped = jax.shard_map(
        lambda *shards: tuple(_body(equation, hook)(*shards)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return mapped(*inputs)


_ENTRANCES: dict[str, Callable[[JaxprEqn, list, Hook], Sequence]] = {
    "jit": _jit,
    "pjit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    **dict.fromkeys(REMAT, _remat),
    **dict.fromkeys(CALLS, _call),
}
