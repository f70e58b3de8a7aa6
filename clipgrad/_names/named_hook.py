"""Seeing the values with names while a program is evaluated, and replacing what goes on."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from clipgrad._names.line_names import LineKeys
from clipgrad._names.lines import BACKWARD, DEPTH, LINE, lines_of_program
from clipgrad._names.modules import ModuleValues, is_used, users_tag
from clipgrad._names.scopes import ScopePath, path
from clipgrad._names.sites import NamedSite, line_sites, sites
from clipgrad._programs import Hook, ProgramValues, bind, value_programs


class Seen(NamedTuple):
    """A value with a name, as a hook sees it.

    Attributes:
      name: the tag, the path of the module, or the name of the line.
      kind: ``"tag"``, ``"module"``, ``"line"``, or ``"backward"`` of a line in the backward pass of
        a gradient that the program computes.
      position: where it is in the program that is evaluated: the number of its equation, the number
        of the value among the results, and the depth of the module among the scopes of the
        program; 0 for a tag, and `lines.DEPTH` or less for a line.
      variable: of the program.
    """

    name: str
    kind: str
    position: tuple[int, int, int]
    variable: Var


@dataclasses.dataclass
class Visit:
    """The evaluation of a program by a hook.

    Attributes:
      jaxpr: the program.
      equation: where the evaluation is.
      number: of this equation.
      notes: what a hook that notes has noted of it.
    """

    jaxpr: Any
    equation: Any = None
    number: int = -1
    notes: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class NamedHook(Hook):
    """Replaces each named value by the result of `value`; equations without names inside stay
    whole.

    A subclass says which names it `wants`, and what happens to a value with such a name.

    Attributes:
      scopes: the scopes around the program.
      lines: the key of each line whose values are seen, and its name; nothing is read for none.
      outside: whether the operations of `value` are outside of a module whose value it replaces.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from clipgrad import _names, _programs
      >>> class Doubled(_names.NamedHook):
      ...     def value(self, seen, x):
      ...         print(seen.kind, seen.name)
      ...         return 2 * x
      >>> def model(x):
      ...     with jax.named_scope("encoder"):
      ...         h = 1 + x
      ...     return h + 1
      >>> print(*_programs.evaluate(jax.make_jaxpr(model)(1.0), [1.0], Doubled()))
      module encoder
      5.0
    """

    scopes: ScopePath = ()
    lines: LineKeys = ()

    outside = False

    def wants(self, name: str, kind: str, used: bool) -> bool:
        """Whether values of a name are to be seen; ``used``: those that the program uses."""
        del name, kind, used
        return True

    def value(self, seen: Seen, x: Any) -> Any:
        """The replacement of a value; a module's value is replaced only where it is used outside.

        Unused values are not replaced.
        """
        raise NotImplementedError

    def programs(self, equation: JaxprEqn) -> list:
        """The programs in an equation whose values are seen."""
        return value_programs(equation)

    def reaches(self, site: NamedSite) -> bool:
        """Whether the values of a site in such a program are seen."""
        return site.has_value

    @property
    def variables(self) -> frozenset[Var] | None:
        """Those whose values may be seen where they leave modules; None: all."""
        return None

    # What follows is the evaluation.

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """An equation without names inside is bound as it is."""
        return None if self.has_names_inside(equation) else bind(equation, inputs)

    def values(self, jaxpr: Any) -> ProgramValues:
        self.visit = Visit(jaxpr)
        return NamedValues(self)

    def has_names_inside(self, equation: JaxprEqn) -> bool:
        """Whether there are values to see in the programs of an equation."""
        if not (programs := self.programs(equation)):
            return False
        inside = (site for program in programs for site in self.sites(equation, program))
        return any(self.reaches(s) and self.wants(s.name, s.kind, s.used) for s in inside)

    def lines_inside(self, equation: JaxprEqn) -> LineKeys:
        """The lines that are seen in the programs of an equation."""
        if not self.lines:
            return ()
        key = lines_of_program(self.visit.jaxpr).key(equation)
        return tuple(pair for pair in self.lines if pair[0] != key)

    def sites(self, equation: JaxprEqn, program: Any) -> list[NamedSite]:
        """The sites of a program inside of an equation, of tags, modules and these lines."""
        scopes, names = self.scopes_inside(equation), dict(self.lines_inside(equation))
        of_names = [site.below(scopes) for site in sites(program)]
        lines = [site for site in line_sites(program) if site.name in names] if names else ()
        kinds = {BACKWARD: BACKWARD}
        return of_names + [
            site._replace(name=names[site.name], kind=kinds.get(site.kind, LINE)) for site in lines
        ]

    def scopes_inside(self, equation: JaxprEqn) -> ScopePath:
        """The scopes around a program in an equation."""
        return (*self.scopes, *path(equation))

    def name(self, scopes: ScopePath) -> str:
        """The name of a module of the program."""
        return "/".join((*self.scopes, *scopes))


class NamedValues(ModuleValues):
    """The values of a program while a `NamedHook` sees those that have names."""

    def __init__(self, hook: Any) -> None:
        self.hook, self.visit = hook, hook.visit
        self._line_names = dict(hook.lines)
        self._runs = lines_of_program(hook.visit.jaxpr).runs if hook.lines else {}
        super().__init__(hook, hook.visit.jaxpr, hook.variables, hook.outside)

    def inputs(self, equation: JaxprEqn) -> list:
        self.visit.equation = equation
        self.visit.number += 1
        return super().inputs(equation)

    def write_results(self, equation: JaxprEqn, outputs: Sequence[Any]) -> None:
        super().write_results(equation, self.replaced(equation, list(outputs)))

    def replaced(self, equation: JaxprEqn, outputs: list) -> list:
        """The results of an equation, of a tag what goes on."""
        tag = users_tag(equation)
        if tag is not None:
            used = is_used(self.visit.jaxpr, equation.outvars[0])
            outputs[0] = self.see(tag, "tag", 0, 0, outputs[0], used)
        return self._with_lines(equation, outputs) if self._runs else outputs

    def _with_lines(self, equation: JaxprEqn, outputs: list) -> list:
        """The results of an equation, with replacements for those that are values of lines."""
        for i, variable in enumerate(equation.outvars):
            seen = set()
            for depth, (run, kind) in enumerate(self._runs.get(variable, ())):
                name = self._line_names.get(run.line.key)
                if name is not None and name not in seen:
                    seen.add(name)
                    kind, used = (
                        kind if kind == BACKWARD else LINE,
                        is_used(self.visit.jaxpr, variable),
                    )
                    outputs[i] = self.see(name, kind, i, DEPTH - depth, outputs[i], used)
        return outputs

    def leave(self, variable: Var, scopes: ScopePath) -> Callable[[Any], Any] | None:
        name = self.hook.name(scopes)
        if not self.hook.wants(name, "module", True):
            return None
        output = self.visit.equation.outvars.index(variable)
        return functools.partial(self.see, name, "module", output, len(scopes))

    def see(self, name: str, kind: str, output: int, depth: int, x: Any, used: bool = True) -> Any:
        """The replacement of a result of the present equation, if the name is wanted."""
        if not self.hook.wants(name, kind, used):
            return x
        variable = self.visit.equation.outvars[output]
        return self.hook.value(Seen(name, kind, (self.visit.number, output, depth), variable), x)
