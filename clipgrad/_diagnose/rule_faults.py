"""The rule of a function as a program: which of its operations makes cotangents that are bad."""

import jax

from clipgrad._diagnose.guilty import is_of_users_rule, value_at
from clipgrad._diagnose.levels import level
from clipgrad._diagnose.origins import Operation
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._names import rule_source
from clipgrad._programs import holds_floats


def fault_in_rule(entry: Entry) -> Operation | None:
    """The operation in a rule of the user's that makes NaN or inf; None if it is not known.

    The rule is traced and run on a tape of its own. On the devices of a mesh it stays whole.
    """
    if not is_of_users_rule(entry) or entry.tape.runs.axes:
        return None
    try:
        tape = _tape_of_rule(entry)
    except (TypeError, ValueError, NotImplementedError):
        return None
    bad = [(atom, level(tape.read(atom))) for atom in tape.jaxpr.outvars]
    sources = [value_at(tape, atom, wanted)[0] for atom, wanted in bad if wanted]
    return next((source for source in sources if isinstance(source, Operation)), None)


def place_in_rule(entry: Entry, fault: Operation) -> str:
    """The line of an operation in a rule; JAX keeps none of a backward function but its first."""
    inside, rule = fault.entry.place.location, rule_source(entry.equation)
    return str(inside) if inside.file or rule is None else rule.place


def _tape_of_rule(entry: Entry) -> Tape:
    """The function and its rule, which computes the bad cotangents of an entry."""
    bad = [i for i, g in enumerate(entry.in_cotangents) if level(g)]
    got = [j for j, g in enumerate(entry.out_cotangents) if g is not None and holds_floats(g)]

    def pulled(ins: list, cotangents: list) -> tuple:
        def run(*moved: jax.Array) -> list:
            operands = dict(enumerate(ins)) | dict(zip(bad, moved, strict=True))
            results = entry.run(*operands.values())
            return [results[j] for j in got]

        return jax.vjp(run, *(ins[i] for i in bad))[1](cotangents)

    inputs = entry.ins, [entry.out_cotangents[j] for j in got]
    leaves = jax.tree.leaves(inputs)
    program = jax.make_jaxpr(pulled)(*inputs)
    return Tape(program, leaves, [False] * len(leaves), openings=entry.tape.openings)
