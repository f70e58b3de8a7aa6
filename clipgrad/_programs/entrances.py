"""The evaluator's way into each higher-order primitive."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec, Sharding

from clipgrad._arrays import combine, is_array, partition
from clipgrad._programs.evaluate import Hook, NotingHook, Part, entrance, evaluate
from clipgrad._programs.kinds import (
    CALLS,
    CONDS,
    CUSTOM_RULES,
    JIT,
    LINEAR_SOLVES,
    REMAT,
    SCANS,
    SHARD_MAPS,
    WHILES,
    called_program,
    scan_counts,
    while_counts,
)
from clipgrad._programs.numeric import is_print
from clipgrad._programs.programs import manual_axes, opened
from clipgrad._programs.rebind import (
    Lifted,
    cond_again,
    remat_again,
    scan_again,
    types_of,
    while_again,
)

# The compiled functions of an inner jit, as long as JAX keeps its program.
_COMPILED: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


def _noted(
    equation: JaxprEqn, hook: Hook, program: Any = None, branch: int = 0
) -> Callable[..., tuple[list, Any]]:
    """The evaluation of a program inside of an equation: its results, and its notes."""
    program = called_program(equation) if program is None else program

    def run(*inputs):
        inner = hook.inside(equation, Part(branch))
        return evaluate(program, inputs, inner), _notes_of(inner)

    return run


def _notes_of(hook: Hook) -> Any:
    """What a hook has kept in its evaluation; None of one that keeps nothing."""
    return hook.noted() if isinstance(hook, NotingHook) else None


def _note(hook: Hook, equation: JaxprEqn, inputs: list, notes: list) -> None:
    if isinstance(hook, NotingHook):
        hook.note(equation, inputs, notes)


@entrance(CALLS, CUSTOM_RULES)
def _enter_call(equation, inputs, hook):
    outputs, notes = _noted(equation, hook)(*inputs)
    _note(hook, equation, inputs, [notes])
    return outputs


@entrance(JIT)
def _enter_jit(equation, inputs, hook):
    if JIT in hook.in_place:
        return _enter_call(equation, inputs, hook)
    inner = hook.inside(equation, Part())
    leaves, structure = jax.tree.flatten(inner)
    arrays, rest = partition(leaves, is_array)
    compiled, key = {}, ()
    if inner.is_reusable:
        compiled = _COMPILED.setdefault(called_program(equation), {})
        key = (structure, *rest, *(equation.params[name] for name in _JIT_OPTIONS))
    if key not in compiled:
        compiled[key] = _jitted(equation, structure, rest)
    outputs, notes = compiled[key](arrays, *inputs)
    _note(hook, equation, inputs, [notes])
    return outputs


_JIT_OPTIONS = ("in_shardings", "out_shardings", "donated_invars", "keep_unused", "inline", "name")


def _jitted(equation: JaxprEqn, structure: Any, rest: list) -> Callable[..., list]:
    """`jax.jit` of the evaluation, with the options that the equation was made with."""
    program, params = weakref.ref(called_program(equation)), equation.params

    def run(arrays, *inputs):
        inner = structure.unflatten(combine(arrays, rest))
        return evaluate(program(), inputs, inner), _notes_of(inner)

    run.__name__ = params["name"]
    return jax.jit(
        run,
        in_shardings=(None, *map(_stated, params["in_shardings"])),
        out_shardings=(list(map(_stated, params["out_shardings"])), None),
        donate_argnums=[i + 1 for i, donated in enumerate(params["donated_invars"]) if donated],
        keep_unused=params["keep_unused"],
        inline=params["inline"],
    )


def _stated(sharding):
    return sharding if isinstance(sharding, Sharding) else None


@entrance(REMAT)
def _enter_remat(equation, inputs, hook):
    if REMAT in hook.in_place:
        return _enter_call(equation, inputs, hook)
    outputs, notes = remat_again(equation, _noted(equation, hook), inputs)
    _note(hook, equation, inputs, [notes])
    return outputs


@entrance(SCANS)
def _enter_scan(equation, inputs, hook):
    constants, carried = scan_counts(equation)
    split = constants + carried

    def step(carry, element):
        sliced, of_hook = element
        inner = hook.inside(equation, Part(slices=of_hook))
        arguments = [*inputs[:constants], *carry, *sliced]
        outputs = evaluate(called_program(equation), arguments, inner)
        return tuple(outputs[:carried]), (tuple(outputs[carried:]), _notes_of(inner))

    elements = tuple(inputs[split:]), hook.slices(equation)
    carry, (stacked, notes) = scan_again(equation, step, tuple(inputs[constants:split]), elements)
    _note(hook, equation, inputs, [notes])
    return [*carry, *stacked]


@entrance(WHILES)
def _enter_while(equation, inputs, hook):
    params = equation.params
    first, constants = while_counts(equation)
    second = first + constants
    carried = opened(params["body_jaxpr"])[0].invars[second - first :]
    enter = _noted(equation, hook, params["body_jaxpr"])

    def again(*carry):
        inner = Unprinted() if isinstance(hook, NotingHook) else hook.inside(equation, Part())
        return evaluate(params["cond_jaxpr"], [*inputs[:first], *carry], inner)[0]

    def body(*carry):
        return enter(*inputs[first:second], *carry)

    carry, types = inputs[second:], types_of(carried, inputs[second:])
    if not isinstance(hook, NotingHook):
        return while_again(equation, again, lambda *carry: body(*carry)[0], carry, types)
    outputs, notes = _loop_with_notes(equation, again, body, carry, types, hook)
    _note(hook, equation, inputs, [notes])
    return outputs


def _loop_with_notes(equation, again, body, carry, types, hook):
    """Counts the iterations, and has one predicate for all lanes of a `vmap`."""

    def step(*carry):
        goes_on, (outputs, notes) = again(*carry), body(*carry)
        if goes_on.ndim:
            pairs = zip(outputs, carry, strict=True)
            outputs = [_kept_lanes(goes_on, new, old) for new, old in pairs]
        return outputs, notes

    once = Lifted(step, types)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    start, structure = jax.tree.flatten(hook.empty((count, once.shapes[1])))
    note_count = len(start)

    def run(*state):
        number, old = structure.unflatten(state[:note_count])
        outputs, new = once(*state[note_count:])
        return [*jax.tree.leaves((number + 1, hook.kept(old, new, number))), *outputs]

    goes_on = lambda *state: again(*state[note_count:]).any()  # noqa: E731
    types = [*map(jax.typeof, start), *types]
    results = while_again(equation, goes_on, run, [*start, *carry], types)
    return results[note_count:], structure.unflatten(results[:note_count])[1]


def _kept_lanes(where: Any, new: Any, old: Any) -> Any:
    """The carry of each loop of a `vmap`: loops that have ended keep it."""
    return jnp.where(where.reshape(where.shape + (1,) * (jnp.ndim(new) - where.ndim)), new, old)


class Unprinted(Hook):
    """Leaves prints out."""

    def __call__(self, equation, inputs):
        return [] if is_print(equation) else None


@entrance(CONDS)
def _enter_cond(equation, inputs, hook):
    programs = equation.params["branches"]
    types = types_of(opened(programs[0])[0].invars, inputs[1:])
    once = [Lifted(_noted(equation, hook, p, i), types) for i, p in enumerate(programs)]
    notes = [branch.shapes[1] for branch in once]
    empty = hook.empty if isinstance(hook, NotingHook) else (lambda shapes: shapes)

    def among_all(i, *values):
        outputs, mine = once[i](*values)
        return outputs, [mine if i == j else empty(n) for j, n in enumerate(notes)]

    branches = [functools.partial(among_all, i) for i in range(len(once))]
    results = cond_again(equation, branches, inputs, types)
    outputs, taken = jax.tree.unflatten(jax.tree.structure((once[0].shapes[0], notes)), results)
    _note(hook, equation, inputs, taken)
    return outputs


class _OnDevices:
    """A leaf of `Hook.slices`, of which each device gets its slice."""

    def __init__(self, array: Any):
        self.array = array


@entrance(SHARD_MAPS)
def _enter_shard_map(equation, inputs, hook):
    params = equation.params
    axes = manual_axes(equation)
    apart = jax.tree.map(_OnDevices, hook.slices(equation))
    leaves, structure = jax.tree.flatten(hook.inside(equation, Part(slices=apart)))
    sliced, leaves = partition(leaves, lambda leaf: isinstance(leaf, _OnDevices))
    arrays, rest = partition(leaves, is_array)

    def shard(arrays, of_hook, *shards):
        of_hook = jax.tree.map(lambda x: x[0], of_hook)
        inner = structure.unflatten(combine(of_hook, combine(arrays, rest)))
        outputs = evaluate(called_program(equation), shards, inner)
        return tuple(outputs), jax.tree.map(lambda x: x[None], _notes_of(inner))

    mapped = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), PartitionSpec(axes), *params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(axes)),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    outputs, notes = mapped(arrays, jax.tree.map(lambda of_hook: of_hook.array, sliced), *inputs)
    _note(hook, equation, inputs, [notes])
    return list(outputs)


@entrance(LINEAR_SOLVES)
def _enter_linear_solve(equation, inputs, hook):
    """Enters the matrix only: JAX differentiates a linear solve by nothing else."""
    lengths, solve = equation.params["const_lengths"], equation.params["jaxprs"]
    ends = [sum(lengths[:i]) for i in range(1, 5)]
    matrix, _, forward, transposed = (
        inputs[end - length : end] for end, length in zip(ends, lengths, strict=True)
    )
    b = tuple(inputs[ends[-1] :])
    inside = hook.inside(equation, Part())

    def apply(program, constants, hook=inside):
        return lambda x: tuple(evaluate(program, [*constants, *x], hook))

    whole = Hook()
    back = solve.transpose_solve and apply(solve.transpose_solve, transposed, whole)
    has_aux = len(equation.outvars) > len(b)

    def with_aux(run):
        split = (lambda out: (out[: len(b)], out[len(b) :])) if has_aux else (lambda out: out)
        return lambda _, x: split(run(x))

    solved = lax.custom_linear_solve(
        apply(solve.matvec, matrix),
        b,
        with_aux(apply(solve.solve, forward, whole)),
        back and with_aux(back),
        symmetric=solve.vecmat is solve.matvec,
        has_aux=has_aux,
    )
    return [*solved[0], *solved[1]] if has_aux else solved
