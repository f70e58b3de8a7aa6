"""The names of the variables inside of a function, and the rules for them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import clipgrad._arrays as _arrays
import clipgrad._programs as _programs
from clipgrad._arrays import Pattern, described, explain_call, leaves_out
from clipgrad._clip import as_rule, is_rule
from clipgrad._frameworks import Pure, differentiated_inputs, with_models
from clipgrad._names import Names, names_of

_Rule = Callable[..., Any] | None
Rules = Mapping[str, _Rule] | Mapping[re.Pattern, _Rule] | Mapping[Pattern, _Rule]


@explain_call()
def list_names(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    lines: bool = False,
) -> Names:
    r"""Lists the values inside a function that you can watch, or clip, by name.

    A name is a tag, which you set by ``jax.ad_checkpoint.checkpoint_name(x, "h")``, a module path,
    such as ``"encoder/attn"``, or a line, such as ``"model.py:14"``.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def model(x):
      ...     with jax.named_scope("encoder"):
      ...         h = jnp.tanh(x)
      ...     return h.sum()
      >>> print(cg.list_names(model, (jnp.ones(3),)))
      name     kind    shape  dtype    scans  sites  cotangent
      encoder  module  3      float32         1      yes

    Args:
      fun: a function of pytrees.
      args: the tuple of arguments; for one argument write ``(x,)``.
      kwargs: the keyword arguments.
      lines: ``True``: list the lines in your files, too, after tags and modules.

    Returns:
      A tuple of records with ``name``, ``kind``, ``shape``, ``dtype``, ``scans``, ``sites`` and
      ``cotangent``; lines also have ``calls`` and ``variable``. ``print`` shows a table, or the
      reason why there are no names.

    Raises:
      TypeError: if ``fun`` is not a function, ``args`` not a tuple, ``kwargs`` not a mapping, or
        ``lines`` not a bool.

    The value of a line is the last floating one that each run of the line computes and that later
    lines use. A statement over several lines counts as the first of these. If a line calls JAX or
    an installed package, the results belong to that line. If a line calls your own function, the
    line is not in the list, but you can use the line as a name, too.

    Guarantees:
      * The function is traced, not run; arrays may be `jax.ShapeDtypeStruct`.
      * You see all names that a pattern can match: those of floating or complex variables whose
        values or cotangents are accessible from outside. Unused values, and values in a
        `jax.lax.while_loop`, have no cotangent. Inside a custom rule neither values nor cotangents
        are accessible; inside the matrix function of a `jax.lax.custom_linear_solve` values are
        not.
      * Names are in the order of computation; a module comes after its submodules.
    """
    check_call(fun, args, kwargs)
    if not isinstance(lines, bool):
        raise TypeError(f"lines: got {lines!r}, expected True or False")
    program = program_of(fun, args, kwargs or {}, only_read=True)[0].program
    return names_of(program, lines)


def program_of(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    chosen: Mapping[int | str, Any] | None = None,
    only_read: bool = False,
) -> tuple[_programs.Traced, bool, list[int]]:
    """The program of a function, and whether it would change an NNX model; here they stay.

    The third result has the inputs of the program with respect to which the function is
    differentiated, see `differentiated_inputs`.
    """
    traced: list[_programs.Traced] = []
    changes: list[bool] = []
    moved: list[int] = []

    def read(function: Any, args: Any, kwargs: Any) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            changes.append(isinstance(function, Pure) and bool(result[0]))
            return result

        traced.append(_programs.trace(noted, args, kwargs, only_read=only_read))
        apart = args[0] if isinstance(function, Pure) else (args, kwargs)
        flags = differentiated_inputs(apart, chosen or {})
        moved[:] = [i for i, is_chosen in enumerate(flags) if is_chosen]

    with_models(read, fun, args, kwargs)
    return traced[0], changes[0], moved


def check_function(fun: Any) -> None:
    """Raises `TypeError` if what is transformed is not a function, or is a rule."""
    if is_rule(fun) or isinstance(fun, Mapping):
        raise TypeError(f"fun: got {described(fun)}, expected a function; the rules come second")
    _arrays.check_is_function(fun)


def check_call(fun: Any, args: Any, kwargs: Any) -> None:
    """Raises `TypeError` unless these are a function, a tuple of arguments, and a mapping."""
    if is_rule(fun):
        raise TypeError(f"fun: got the rule {described(fun)}, expected a function of arrays")
    _arrays.check_arguments(fun, args, kwargs)


def checked_rules(rules: Any, prefix: Any = "", argument: str = "rules") -> dict[Any, Any]:
    """The rules with the prefix before their names; `TypeError` for what is not a mapping."""
    if not isinstance(rules, Mapping) or not all(isinstance(name, Pattern) for name in rules):
        shown = repr(rules) if isinstance(rules, str) or is_rule(rules) else described(rules)
        raise TypeError(
            f"{argument}: got {shown}, expected a mapping from names to rules, such as "
            '{"h": ErrorClipByValue(max=5.0)}; for every intermediate value write '
            "error_clip_everywhere(fun, rule)"
        )
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {prefix!r}, expected a string to put before each name")
    return {_after_prefix(prefix, name): rule_of_variable(rule) for name, rule in rules.items()}


def _after_prefix(prefix: str, pattern: Pattern) -> Pattern:
    """A name or a pattern with a prefix before it."""
    if isinstance(pattern, str):
        return f"!{prefix}{pattern[1:]}" if leaves_out(pattern) else prefix + pattern
    if prefix:
        raise ValueError(
            f"prefix: got {prefix!r} with {pattern!r}, expected names or patterns in text with a "
            "prefix; write it into the re.Pattern"
        )
    return pattern


def rule_of_variable(rule: Any) -> Any:
    """The rule of a variable inside of a function; `TypeError` for one that needs parameters."""
    if getattr(as_rule(rule), "needs_params", False):
        raise TypeError(
            f"rule: got {rule!r}, which needs parameters, expected a rule that does not, since a "
            "variable has none; to measure the variable itself write clip_cotangent(x, rule)"
        )
    return rule
