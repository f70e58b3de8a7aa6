"""Compiled programs that are kept, for checks of the same program.

A check of a gradient compiles about ten programs and runs each a few times. What a user's function
does may have changed since it was last checked, so it is traced anew each time; if its program is
the same as before (`identity.py`), so are the programs compiled from it. What holds an object of a
user's, such as a callback with its closure, or a large array, is kept for one check alone.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from clipgrad._jaxpr import (
    CUSTOM_RULES,
    ENTRANCES,
    Hook,
    ProgramKey,
    called_program,
    equations,
    evaluate,
    low_jit,
    map_programs,
    opened,
    program_key,
)

KEPT = 200  # programs; about ten for each function checked

_kept_by_key: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_lock = threading.RLock()


def kept_by_key(key: Any, make: Callable[[], Any]) -> Any:
    """The result that `make()` returned for an equal key, or returns now."""
    with _lock:
        found = _kept_by_key[key] if key in _kept_by_key else make()
        _kept_by_key[key] = found
        _kept_by_key.move_to_end(key)
        while len(_kept_by_key) > KEPT:
            _kept_by_key.popitem(last=False)
        return found


@contextlib.contextmanager
def kept_lightly() -> Iterator[None]:
    """A context at whose end nothing is kept that holds an object of a user's, or a large array."""
    try:
        yield
    finally:
        with _lock:
            for key in [key for key in _kept_by_key if not _is_light(key)]:
                del _kept_by_key[key]


def _is_light(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_light, key))
    return key.is_light if isinstance(key, ProgramKey) else True


def with_constants(program: Any, constants: Any) -> ClosedJaxpr:
    """The program with other constants, which may be traced."""
    return ClosedJaxpr(opened(program)[0], list(constants))


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


def without_rules(program: Any) -> Any:
    """The program, whose functions with custom rules have nothing but what they compute.

    So nothing that is kept holds the rules, which a `ProgramKey` does not compare, and what these
    close over. It is to be evaluated by a hook that enters such functions.
    """
    if not any(equation.primitive.name in CUSTOM_RULES for equation in equations(program)):
        return program
    jaxpr = opened(program)[0]
    new = jaxpr.replace(eqns=[e.replace(params=_without_rules(e)) for e in jaxpr.eqns])
    return new if jaxpr is program else program.replace(jaxpr=new)


def _without_rules(equation: JaxprEqn) -> dict[str, Any]:
    name = equation.primitive.name
    if name in CUSTOM_RULES:
        return {"call_jaxpr": without_rules(called_program(equation))}
    is_entered = name in ENTRANCES or name == "custom_linear_solve"
    return equation.params | (map_programs(equation, without_rules) if is_entered else {})


class Primal(Hook):
    """Has functions with custom rules replaced by what they compute."""

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of a function with custom rules; None for anything else."""
        if equation.primitive.name not in CUSTOM_RULES:
            return None
        return evaluate(called_program(equation), inputs, self)


def _compiled_program(fun: Callable, structure: Any, leaves: list) -> Callable[[list], Any]:
    found = []

    def flat(leaves):
        out, out_structure = jax.tree.flatten(fun(*structure.unflatten(leaves)))
        found[:] = [out_structure]
        return out

    program = jax.make_jaxpr(flat)(leaves)
    constants = opened(program)[1]
    jaxpr = without_rules(opened(program)[0])  # what is kept holds no constants of this call
    run = kept_by_key(("quick_jit", program_key(program)), lambda: _compiled_evaluation(jaxpr))
    return lambda leaves: found[0].unflatten(run(constants, leaves))


def _compiled_evaluation(program: Any) -> Callable:
    def run(constants, leaves):
        return evaluate(with_constants(program, constants), leaves, Primal())

    return low_jit(run)
