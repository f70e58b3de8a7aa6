"""Clipping the cotangents of variables with names, inside a function, from outside of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

import clipgrad._names as _names
import clipgrad._programs as _programs
from clipgrad._arrays import explain_call
from clipgrad._clip import ClipStats, asks, is_known
from clipgrad._error_clip.cotangent import clip_of_value
from clipgrad._error_clip.inner_grad_warning import warn_of_inner_gradients
from clipgrad._error_clip.named_rules import Rules, check_function, checked_rules
from clipgrad._errors import warn
from clipgrad._frameworks import with_models
from clipgrad._names import CLIPPED_IF_DIFFERENTIATED, Matches, resolved

ClippedByName = TypeVar("ClippedByName", bound=Callable[..., Any])


@explain_call('write {"name": rule}')
def error_clip_by_name(fun: ClippedByName, rules: Rules, *, prefix: str = "") -> ClippedByName:
    r"""Clips the gradients of values inside a function by name; you do not edit the function.

    A name is a tag, the path of a module, such as ``"encoder/attn"``, or a line, such as
    ``"model.py:14"``; `list_names` lists them.

    Example:
      >>> import clipgrad as cg, jax
      >>> def model(x):
      ...     with jax.named_scope("encoder"):
      ...         h = 2 * x
      ...     return 10 * h
      >>> clipped = cg.error_clip_by_name(model, {"encoder": cg.ErrorClipByValue(max=5.0)})
      >>> print(jax.grad(model)(1.0), jax.grad(clipped)(1.0))
      20.0 10.0

    Args:
      fun: a function of pytrees. Arguments other than JAX or NumPy arrays are passed on unchanged.
      rules: a rule for each name or pattern, such as ``{"encoder/*": ErrorClipByValue(max=5.0)}``;
        ``None`` instead of a rule: off. A function as a rule may have the keyword-only parameters
        ``name``, the variable's name, and ``operation``, the JAX primitive that computed the
        variable, such as ``"dot_general"`` or ``"exp"``:
        ``def rule(cotangent, *, name, operation)``.
      prefix: text to put before each name, such as ``"encoder/"``.

    Returns:
      A function like ``fun``.

    Raises:
      TypeError: if ``fun`` is not a function, ``rules`` is not a mapping from names to rules, or a
        rule needs parameters; when called, if a name has integer variables only.
      ValueError: when called, if a name or a pattern matches no variable that can be reached; if
        two patterns with different rules match one name; if ``fun`` changes an NNX model that it
        closes over; when differentiated, if a rule of a `jax.custom_vjp` closes over a
        differentiated value.

    A name is a tag, a module path, or a line. You set a *tag* where you compute a value:
    ``h = jax.ad_checkpoint.checkpoint_name(h, "h")``. A *module path* consists of the
    `jax.named_scope`\ s around an operation, such as ``"Transformer/block_3/attn"``; flax Linen,
    Haiku and Keras set one scope for each module. For a flax NNX or Equinox model among the
    arguments, the module path is the attribute path, such as ``"decoder/blocks/3/attn"``. A *line*
    is the end of a file's path and a number, ``"model.py:14"`` or ``"nn/model.py:14"``.
    `list_names` lists the names.

    The variables of a module are the module's outputs: values that are computed inside, and used or
    returned outside. The variable of a line is the last floating value that the line computes each
    time it runs. Let $\bar h$ be the sum of the cotangents from all uses of a tag or line, or from
    all uses outside the module. The backward pass continues with $\mathrm{rule}(\bar h)$.

    In a pattern ``*`` stands for any text within a segment, and ``**`` for any number of segments,
    as in ``"Transformer/block_*/attn"`` or ``"**/Dense_*"``. ``"!head"`` matches all names but
    ``head``; behind other patterns it removes names that these match. You may also pass a
    `re.Pattern`, which is searched in the names. ``"model.py:*"`` matches all lines of a file; no
    other pattern matches lines. An exact name overrides a pattern, and a tag overrides a module of
    the same name.

    Guarantees:
      * The result is bit-identical to that of ``fun``, with the same structure, weak types and
        shardings. (XLA may round a compiled gradient with a clip that acts differently, because the
        program is another one. The same holds for functions such as `jax.numpy.mean`, which JAX
        compiles as a whole.)
      * Names are found at any depth inside `jax.jit`, `jax.lax.scan`, `jax.lax.cond`,
        `jax.checkpoint`, `jax.shard_map`, `jax.vmap` and the matrix function of
        `jax.lax.custom_linear_solve`.
      * Each array is a separate variable, at each scan step. If you apply a module twice with
        nothing in between, the two calls count as one.
      * A `jax.lax.while_loop` has no cotangents inside, so nothing is clipped there. If a name
        occurs only in such a loop, you get no error here, but you do from functions that also
        compute the gradient, such as `train_step` and `value_and_grad_with_stats`.
      * Inside a `jax.vmap` in ``fun`` a variable is the whole batch: a norm rule measures all
        examples together, with a warning. A `jax.vmap` of the result clips each example.
      * If ``fun`` itself computes a gradient, that gradient is part of the value, and is not
        clipped; a warning says so if ``fun`` returns the gradient, as ``jax.grad(loss)`` does.
      * ``fun`` changes flax NNX models among the arguments, and references (`jax.new_ref`), as
        without clips.
      * If two clips have one name, the inner one gets the cotangent first: the clip in ``fun``, or
        the clip by the first of two transformations.
      * You can transform the result again. Forward mode works if no clipped variable depends on the
        differentiated arguments. Each call traces ``fun`` once, as `jax.jit` does.
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
        traced = _programs.trace(fun, args, kwargs)
        call = args, kwargs
        names = resolved(traced.program, named, caller, CLIPPED_IF_DIFFERENTIATED, call)
        warn_of_batches(traced.program, names, caller)
        warn_of_inner_gradients(traced.program, names, caller)
        return traced.evaluate(args, kwargs, ByName.of(traced.program, names, {}))

    return clipped  # type: ignore[return-value]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["clips"],
    meta_fields=["modules", "active", "scopes", "lines", "operations"],
)
@dataclasses.dataclass(eq=False, kw_only=True)
class ByName(_names.NamedHook):
    """Clips and watches named variables; all other equations stay as they are."""

    clips: dict[str, tuple[Any, ClipStats | None]]  # the rule and the probe of each name
    modules: frozenset[str]  # the names that are paths of modules; the others are tags
    active: frozenset[Any] | None = None  # variables of modules with a cotangent; None: all
    # The primitives that made the variables with names, if a rule asks for them.
    operations: frozenset[tuple[Any, str]] = frozenset()

    # A clip from outside of a value that is clipped so already comes before this one.
    outside = True

    @classmethod
    def of(
        cls,
        program: Any,
        names: Matches,
        probes: dict[str, ClipStats],
        active: frozenset[Any] | None = None,
    ) -> "ByName":
        """The clips of these names; a probe has a leading axis for each scan around its name."""
        is_asked = any(asks(chosen.rule) for chosen in names.values())
        operations = _names.operations(program) if is_asked else frozenset()
        clips = {name: (chosen.rule, probes.get(name)) for name, chosen in names.items()}
        modules = frozenset(name for name, chosen in names.items() if chosen.kind == "module")
        lines = _names.line_keys(program, names)
        return cls(clips=clips, modules=modules, active=active, operations=operations, lines=lines)

    @property
    def is_reusable(self) -> bool:
        return all(is_known(rule) for rule, _ in self.clips.values())

    @property
    def variables(self) -> frozenset[Any] | None:
        """The variables of modules that are clipped."""
        return self.active if self.modules else frozenset()

    def wants(self, name: str, kind: str, used: bool) -> bool:
        """Whether a name has a rule or a probe; for a module, only used values count."""
        is_own = (kind == "module") == (name in self.modules) and (used or kind == "tag")
        return (
            is_own
            and kind != _names.BACKWARD
            and any(entry is not None for entry in self.clips.get(name, ()))
        )

    def value(self, seen: _names.Seen, x: Any) -> Any:
        """The value, with its cotangent clipped."""
        rule, probe = self.clips[seen.name]
        operation = dict(self.operations).get(seen.variable, "")
        return clip_of_value(x, rule, seen.name, operation, probe)

    def programs(self, equation: Any) -> list:
        """The programs that cotangents come through."""
        return _programs.entered_programs(equation)[0]

    def reaches(self, site: _names.NamedSite) -> bool:
        return not site.within

    def slices(self, equation: Any) -> dict[str, ClipStats]:
        """The probes with an entry for each step of this scan."""
        if not _programs.is_scan(equation):
            return {}
        probes = ((name, probe) for name, (_, probe) in self._part_inside(equation).clips.items())
        return {name: probe for name, probe in probes if probe is not None and probe.size.ndim}

    def inside(self, equation: Any, part: _programs.Part) -> "ByName":
        """The clips inside of an equation, with the probes of this step."""
        inner, probes = self._part_inside(equation), part.slices or {}
        clips = {
            name: (rule, probes.get(name, probe)) for name, (rule, probe) in inner.clips.items()
        }
        return dataclasses.replace(inner, clips=clips)

    def _part_inside(self, equation: Any) -> "ByName":
        """The part of this for the variables inside of an equation."""
        inner, scopes = self.programs(equation), self.scopes_inside(equation)
        sites = [site for program in inner for site in self.sites(equation, program)]
        names = {s.name for s in sites if self.reaches(s) and self.wants(s.name, s.kind, s.used)}
        active = self.active
        if active is not None:
            active &= frozenset().union(*map(_names.variables_of_modules, inner))
        return dataclasses.replace(
            self,
            clips={name: clip for name, clip in self.clips.items() if name in names},
            modules=self.modules & names,
            active=active,
            scopes=scopes,
            lines=self.lines_inside(equation),
        )


def warn_of_batches(program: Any, names: Matches, caller: str) -> None:
    """Warns of rules that measure a norm where a variable is a batch."""
    sites = _names.sites_of(program, names)
    is_mapped = lambda name: any(s.mapped and not s.within for s in sites[name])  # noqa: E731
    rules = [(name, c.rule) for name, c in names.items() if is_mapped(name)]
    norms = [(n, rule) for n, rule in rules if is_known(rule) and rule.acts_on != "element"]
    batches = [name for name, rule in norms if rule.axis is None]
    if batches:
        warn(
            f"{caller}: got a norm rule for {batches} inside jax.vmap, where it measures the "
            "whole batch; to measure each example write clip_cotangent(x, rule) inside the mapped "
            "function, or give ClipByNorm the axes of one example as axis="
        )
