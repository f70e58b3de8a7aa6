"""Programs for brief use: compiled with little optimization, and kept for the same program.

A check compiles about ten programs and runs each a few times. What a user's function does may
have changed since it was last checked, so it is traced anew each time; if its program is the same
as before, down to the text, so are the programs compiled from it.
"""

import collections
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

import clipgrad._jaxpr as _jaxpr

CALLING = _jaxpr.JIT | _jaxpr.REMAT | _jaxpr.CALLS | _jaxpr.CUSTOM_RULES
KEPT = 200  # programs; about ten for each function checked
LOW = {"xla_backend_optimization_level": 0}
OLDER = {"xla_cpu_use_fusion_emitters": False}  # JAX 0.10: the new emitters compile for longer

_kept_by_key: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_lock = threading.RLock()


def kept_by_key(key: Any, make: Callable[[], Any]) -> Any:
    """What `make()` returned for an equal key, or returns now."""
    with _lock:
        found = _kept_by_key[key] if key in _kept_by_key else make()
        _kept_by_key[key] = found
        _kept_by_key.move_to_end(key)
        while len(_kept_by_key) > KEPT:
            _kept_by_key.popitem(last=False)
        return found


def text(program: Any) -> str:
    """A program as text, with all that it computes with but the values of its own constants.

    The constants that programs inside keep to themselves, as a `jax.jit` does that closes over
    an array, stand for themselves by a digest.
    """
    with np.printoptions(threshold=sys.maxsize):
        return str(_jaxpr.opened(program)[0]) + "".join(map(_digest, _inner_constants(program)))


def _inner_constants(program: Any) -> Iterator[Any]:
    for equation in _jaxpr.equations(program):
        for inner in jax.tree.leaves(list(equation.params.values())):
            yield from inner.consts if isinstance(inner, ClosedJaxpr) else ()


def _digest(constant: Any) -> str:
    is_key = jnp.issubdtype(jax.typeof(constant).dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(constant) if is_key else constant)
    return hashlib.sha256(values.tobytes()).hexdigest()


def with_constants(program: Any, constants: Any) -> ClosedJaxpr:
    """The program with other constants, which may be traced."""
    return ClosedJaxpr(_jaxpr.opened(program)[0], list(constants))


def quick_jit(fun: Callable) -> Callable:
    """`jax.jit` with as little optimization as the installed compiler offers.

    Traced when it is first called with arguments of some shapes, and compiled if there is no such
    program yet.
    """
    known: dict[Any, Callable] = {}

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        shapes = (structure, *(jax.typeof(leaf) for leaf in leaves))
        if shapes not in known:
            known[shapes] = _compiled_program(fun, structure, leaves)
        return known[shapes](leaves)

    return call


def _compiled_program(fun: Callable, structure: Any, leaves: list) -> Callable[[list], Any]:
    found = []

    def flat(leaves):
        out, out_structure = jax.tree.flatten(fun(*structure.unflatten(leaves)))
        found[:] = [out_structure]
        return out

    program = jax.make_jaxpr(flat)(leaves)
    constants = _jaxpr.opened(program)[1]
    jaxpr = _jaxpr.opened(program)[0]  # what is kept holds no constants of this call
    run = kept_by_key(("quick_jit", text(program)), lambda: _compiled_evaluation(jaxpr))
    return lambda leaves: found[0].unflatten(run(constants, leaves))


def _compiled_evaluation(program: Any) -> Callable:
    def run(constants, leaves):
        return _jaxpr.evaluate(with_constants(program, constants), leaves, _jaxpr.Hook())

    return low_jit(run)


def low_jit(fun: Callable) -> Callable:
    """`jax.jit` with little optimization; nothing is kept but by what it returns."""
    return jax.jit(fun, compiler_options=low_optimization())


@functools.cache
def low_optimization() -> dict[str, Any]:
    """The options for little optimization that this version of the compiler knows."""
    return next((options for options in (LOW | OLDER, LOW, OLDER) if _known(options)), {})


def _known(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception:
        return False
    return True


def found_by_loops(program: Any) -> list[bool]:
    """Which results depend on a loop that stops when its numbers are near enough."""
    jaxpr = _jaxpr.opened(program)[0]
    return _through_loops(jaxpr, [False] * len(jaxpr.invars))


def _through_loops(jaxpr: Any, flags: list[bool]) -> list[bool]:
    found = {variable for variable, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for equation in jaxpr.eqns:
        known = [not isinstance(atom, Literal) and atom in found for atom in equation.invars]
        programs = [_jaxpr.opened(inner)[0] for inner in jaxprs_in_params(equation.params)]
        if len(programs) == 1 and equation.primitive.name in CALLING:
            flags = _through_loops(programs[0], known)
        else:
            inside = (inner for program in programs for inner in _jaxpr.equations(program))
            stops = any(map(_stops_by_its_numbers, [equation, *inside]))
            flags = [any(known) or stops] * len(equation.outvars)
        found |= {variable for variable, flag in zip(equation.outvars, flags, strict=True) if flag}
    return [not isinstance(atom, Literal) and atom in found for atom in jaxpr.outvars]


def _stops_by_its_numbers(equation: Any) -> bool:
    if equation.primitive.name != "while":
        return False
    compared = _jaxpr.equations(equation.params["cond_jaxpr"])
    avals: list[Any] = [atom.aval for inner in compared for atom in inner.invars]
    return any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
