"""Compiled programs that are kept, for another call of the same function.

A check of a gradient compiles about ten programs and runs each a few times; a diagnosis compiles
up to eight. What a user's function does may have changed since it was last looked at, so it is
traced anew each time; if its program is the same as before (`identity.py`), so are the programs
compiled from it. What holds an object of a user's, such as a callback with its closure, or a large
array, is kept for one call alone.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from clipgrad._jaxpr.compiled import BRIEF, element_count, low_jit
from clipgrad._jaxpr.evaluate import ENTRANCES, Hook, bind, evaluate
from clipgrad._jaxpr.identity import ProgramKey, program_key
from clipgrad._jaxpr.programs import (
    CUSTOM_RULES,
    called_program,
    equations,
    map_programs,
    opened,
)

KEPT = 200  # programs; about ten for each function

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


@contextlib.contextmanager
def settings_of_runs() -> Iterator[None]:
    """`kept_lightly`, with JAX's own ways of finding NaN and of forbidding transfers off."""
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"), kept_lightly():
        yield


def _is_light(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_light, key))
    return key.is_light if isinstance(key, ProgramKey) else True


def with_constants(program: Any, constants: Any) -> ClosedJaxpr:
    """The program with other constants, which may be traced."""
    return ClosedJaxpr(opened(program)[0], list(constants))


def quick_jit(fun: Callable, jit: Callable[[Callable], Callable] = low_jit) -> Callable:
    """`jax.jit` of a function, whose compiled programs are kept.

    Traced when it is first called with arguments of some shapes, and compiled by `jit` if there is
    no such program yet.
    """
    known: dict[Any, tuple[Callable, Any]] = {}

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        shapes = (structure, *map(jax.typeof, leaves))
        if shapes not in known:
            program, results = jax.make_jaxpr(fun, return_shape=True)(*args)
            known[shapes] = kept_run(program, jit), jax.tree.structure(results)
        run, results = known[shapes]
        return results.unflatten(run(leaves))

    return call


def jit_for_one_call(program: Any) -> Callable[[Callable], Callable]:
    """`quick_jit` for something like a program, to be called once.

    With little optimization if that takes longer than a run without it.
    """
    is_brief = element_count(program) <= BRIEF
    return functools.partial(quick_jit, jit=low_jit if is_brief else jax.jit)


def kept_run(program: Any, jit: Callable[[Callable], Callable]) -> Callable[[Sequence], list]:
    """A program compiled, from its inputs to its outputs; what is kept holds no constants of it."""
    jaxpr, constants = without_rules(opened(program)[0]), opened(program)[1]

    def run(constants, leaves):
        return evaluate(with_constants(jaxpr, constants), leaves, Primal())

    compiled = kept_by_key((jit, program_key(program)), lambda: jit(run))
    return functools.partial(compiled, constants)


def without_rules(program: Any) -> Any:
    """The program, whose functions with custom rules have nothing but what they compute.

    So nothing that is kept holds the rules, which a `ProgramKey` does not compare, and what these
    close over. It is to be evaluated by a hook that enters such functions.
    """
    if not _has_rules(program):
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
    """Has functions with custom rules replaced by what they compute; all else stays as it is."""

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; None where there are such functions inside."""
        if equation.primitive.name in CUSTOM_RULES:
            return evaluate(called_program(equation), inputs, self)
        has_rules = any(map(_has_rules, jaxprs_in_params(equation.params)))
        return None if has_rules else bind(equation, inputs)


def _has_rules(program: Any) -> bool:
    return any(equation.primitive.name in CUSTOM_RULES for equation in equations(program))
