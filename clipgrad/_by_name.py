"""Clipping the cotangents of tagged variables, inside a function, from outside of it."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

import clipgrad._jaxpr as _jaxpr
from clipgrad._cotangent import clip_cotangent
from clipgrad._nnx import with_models
from clipgrad._rules import ClipRule, as_rule, is_own
from clipgrad._selectors import nearest
from clipgrad._stats import ClipStats

F = TypeVar("F", bound=Callable[..., Any])
Rules = Mapping[str, Callable[..., Any] | None]


def error_clip_by_name(fun: F, rules: Rules, *, prefix: str = "") -> F:
    r"""Clips the cotangents of variables inside a function, by the names that they are tagged with.

    A variable is tagged where it is computed, by ``h = jax.ad_checkpoint.checkpoint_name(h, "h")``;
    many models are tagged already, for `jax.checkpoint`. With $\bar h$ the sum of the cotangents
    of all uses of the tagged value, what flows back is $\mathrm{rule}(\bar h)$. ``fun`` itself is
    not changed. It is traced once in every call, as inside of `jax.jit`: put the training step
    into `jax.jit`, so that this happens once.

    Guarantees:
      * The result is unchanged, bit by bit, with its structure, weak types and shardings.
      * Names are found at any depth of `jax.jit`, `jax.lax.scan`, `jax.lax.cond`,
        `jax.lax.switch`, `jax.checkpoint`, `jax.shard_map`, `jax.vmap` and of the matrix of
        `jax.lax.custom_linear_solve`. They keep their meaning for the policies of
        `jax.checkpoint`.
      * Each tagged array is a variable of its own, at each step of a scan.
      * Inside of a `jax.vmap` in ``fun`` a tagged array is the whole batch: a norm rule measures
        all examples together, with a warning, where `clip_cotangent` measures each. So it is for
        `jax.lax.map`, by batches of ``batch_size``. A `jax.vmap` of the result clips each example.
      * What ``fun`` changes in flax NNX models among its arguments, and in references
        (`jax.new_ref`), is changed as without the clips. Other containers are values, as for
        `jax.jit`.
      * A gradient that ``fun`` computes inside is part of its value, and is not clipped.
      * The result can be transformed again, by this or another clip, `jax.jit`, `jax.grad` or
        `jax.vmap`; in forward mode as long as no clipped variable depends on what is
        differentiated. Without any rule it computes just what ``fun`` does.

    Args:
      fun: a function of pytrees. Arguments that are not JAX or NumPy arrays reach it as they are.
      rules: a rule for each name; ``None`` in place of a rule: off.
      prefix: what is put before each name, such as ``"encoder/"``.

    Returns:
      A function like ``fun``.

    Raises:
      TypeError: if ``fun`` is not a function, ``rules`` not a mapping of names to rules, or a rule
        needs parameters; when called, if the variables of a name are integers.
      ValueError: when called, if a name tags nothing, or nothing that is used, or a variable inside
        of a primitive that can't be entered, such as a `jax.custom_vjp`, whose own rule replaces
        the cotangents in it; if ``fun`` changes an NNX model that it closes over.

    Example:
      >>> import clipgrad as cg, jax
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def model(x):
      ...     h = checkpoint_name(2 * x, "h")
      ...     return 10 * h
      >>> clipped = cg.error_clip_by_name(model, {"h": cg.ErrorClipByValue(max=5.0)})
      >>> print(jax.grad(model)(1.0), jax.grad(clipped)(1.0))
      20.0 10.0
    """
    check_function(fun)
    named = checked_rules(rules, prefix)
    caller = "error_clip_by_name"

    @functools.wraps(fun)
    def clipped(*args: Any, **kwargs: Any) -> Any:
        if not named:
            return fun(*args, **kwargs)
        return with_models(run, fun, args, kwargs)

    def run(fun: Any, args: Any, kwargs: Any) -> Any:
        traced = _jaxpr.trace(fun, args, kwargs)
        check_names(traced.program, named, caller)
        warn_of_batches(traced.program, named, caller, stacklevel=5)
        return traced.evaluate(args, kwargs, ByName(named, {}))

    return clipped  # type: ignore[return-value]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByName(_jaxpr.Hook):
    """Clips and watches the tagged variables; equations without them are left as they are."""

    rules: dict[str, Any]
    probes: dict[str, ClipStats]  # with a leading axis for each scan around the variable

    @property
    def is_reusable(self) -> bool:
        """Whether all that the rules compute with is in their fields."""
        return all(map(is_own, self.rules.values()))

    def __call__(self, equation: Any, inputs: list) -> Sequence | None:
        """The clipped result of a tag; None for an equation with tags inside."""
        name = equation.params.get("name")
        if equation.primitive.name == "name" and (name in self.rules or name in self.probes):
            (tagged,) = _jaxpr.bind(equation, inputs)
            return [clip_cotangent(tagged, self.rules.get(name), probe=self.probes.get(name))]
        inner = self._in(equation)
        return None if inner.rules or inner.probes else _jaxpr.bind(equation, inputs)

    def steps(self, equation: Any) -> dict[str, ClipStats]:
        """The probes with an entry for each step of this scan."""
        return {n: probe for n, probe in self._in(equation).probes.items() if probe.size.ndim}

    def inside(self, equation: Any, step: Any) -> "ByName":
        """The clips inside of an equation, with the probes of this step."""
        inner = self._in(equation)
        return ByName(inner.rules, inner.probes | (step or {}))

    def _in(self, equation: Any) -> "ByName":
        """The part of this for the variables inside of an equation."""
        inner, _ = _jaxpr.entered_programs(equation)
        names = {s.name for program in inner for s in _jaxpr.sites(program) if not s.within}
        rules = {n: rule for n, rule in self.rules.items() if n in names and rule is not None}
        return ByName(rules, {n: probe for n, probe in self.probes.items() if n in names})


def check_function(fun: Any) -> None:
    """Raises `TypeError` if what is transformed is not a function, or is a rule."""
    if ClipRule in type(fun).__mro__ or not callable(fun):
        raise TypeError(f"fun: got {fun!r}, expected a function; the rules come second")


def checked_rules(rules: Any, prefix: Any = "") -> dict[str, Any]:
    """The rules with the prefix before their names; `TypeError` for what is not a mapping."""
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        raise TypeError(
            f"rules: got {rules!r}, expected a mapping of names to rules such as "
            '{"h": ErrorClipByValue(max=5.0)}; for every intermediate value write '
            "error_clip_everywhere(fun, rule)"
        )
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {prefix!r}, expected a string to put before each name")
    return {prefix + name: rule_of_variable(rule) for name, rule in rules.items()}


def rule_of_variable(rule: Any) -> Any:
    """The rule of a variable inside of a function; `TypeError` for one that needs parameters."""
    if getattr(as_rule(rule), "needs_params", False):
        raise TypeError(
            f"rule: got {rule!r}, which needs parameters, expected one that does not: a variable "
            "has none; to measure the variable itself write clip_cotangent(x, rule) in its place"
        )
    return rule


def check_names(program: Any, names: Iterable[str], caller: str) -> None:
    """Raises an error if a name does not tag variables whose cotangents can be reached."""
    for name in names:
        _check_name(name, _jaxpr.sites(program), caller)


def _check_name(name: str, found: Sequence[_jaxpr.Site], caller: str) -> None:
    own = [site for site in found if site.name == name]
    if not own:
        there = list(dict.fromkeys(site.name for site in found))
        raise ValueError(
            f"{caller}: got {name!r}, expected a name that is tagged in this function; "
            f"{nearest(name, there)}; tag a variable by "
            f"x = jax.ad_checkpoint.checkpoint_name(x, {name!r})"
        )
    closed = next((site.within for site in own if site.is_out_of_reach), None)
    if closed:
        inside = list(dict.fromkeys(site.name for site in found if site.within == closed))
        raise ValueError(
            f"{caller}: got {name!r}, which tags a variable inside of {closed}, expected one whose "
            f"cotangents can be reached from outside, unlike those of {inside}; tag what goes into "
            "it or comes out of it, or write clip_cotangent into its backward pass"
        )
    if not any(site.is_differentiable for site in own):
        raise TypeError(
            f"{caller}: got {name!r}, which tags {own[0].dtype} values, expected floating or "
            "complex ones; others have no cotangents"
        )
    if not any(site.used for site in own):
        raise ValueError(
            f"{caller}: got {name!r}, which tags a value that is not used, expected one that "
            f"cotangents come back to; write x = checkpoint_name(x, {name!r}), and use that x"
        )


def warn_of_batches(program: Any, rules: Rules, caller: str, stacklevel: int) -> None:
    """Warns of rules that measure a norm where a variable is a batch."""
    mapped = {site.name for site in _jaxpr.sites(program) if site.mapped and not site.within}
    names = [name for name, rule in rules.items() if name in mapped and _measures_all(rule)]
    if names:
        warnings.warn(
            f"{caller}: got a rule that measures a norm for {names}, tagged inside of jax.vmap, "
            "where a name means the whole batch; for a norm of each example write "
            "clip_cotangent(x, rule) inside of the mapped function, or give ClipByNorm the axes "
            "of an example as axis=",
            stacklevel=stacklevel,
        )


def _measures_all(rule: Any) -> bool:
    by_norm = is_own(rule) and rule.acts_on != "element"
    return by_norm and getattr(rule, "axis", None) is None
