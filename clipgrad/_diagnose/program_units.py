"""The parts of a program, and what is measured of each: runs of equations of one module."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.measure import over_devices
from clipgrad._diagnose.probe import Site, Summary, carried_variables, site_of
from clipgrad._diagnose.records import GradientRow
from clipgrad._diagnose.segments import all_reads, leaving
from clipgrad._names import Place
from clipgrad._programs import (
    SCANS,
    Chain,
    chain_key,
    chooses_by_platform,
    differentiated_programs,
    equations,
    flow,
    holds_floats,
    is_jit,
    is_scan,
    numeric_of,
    opened,
)

SCAN = SCANS.noun
# Code without scopes is cut into so many parts, of at most so many equations: 184 probes in a
# transformer of 12 layers and 997 equations, which compile in 18 seconds on two busy cores.
_PARTS, _LONGEST = 64, 24
# A function that JAX compiles by itself, such as `jnp.linalg.norm`, stays whole up to this size.
_SMALL_FUNCTION = 24
_NO_UNITS: frozenset[int] = frozenset()


def inner_programs(equation: JaxprEqn) -> list:
    """The programs inside of an equation that are measured.

    Branches that are one function are traced once: programs of the same equations are one.
    """
    programs = [] if chooses_by_platform(equation) else differentiated_programs(equation)
    return list({tuple(opened(program)[0].eqns): program for program in programs}.values())


class Unit(NamedTuple):
    """Equations next to each other, of one module and with at most one matrix product.

    ``equations`` is one alone if there are programs ``inside`` of it to go into. ``leaves`` are the
    values that other units read, and ``carried`` the floating numbers that a scan carries.
    """

    equations: list[JaxprEqn]
    parent: Place | None
    inside: list
    leaves: list[Site]
    carried: list[Site]

    @property
    def place(self) -> Place:
        """The last equation of the unit."""
        return Place(self.equations[-1], self.parent)

    @property
    def is_layer(self) -> bool:
        """Whether there is a matrix product."""
        return any(map(_is_layer, self.equations))


def all_units(
    program: Any, parent: Place | None = None, longest: int | None = None
) -> Iterator[Unit]:
    """The units of a program and of those inside that are gone into, in program order."""
    jaxpr = opened(program)[0]
    if longest is None:
        longest = min(max(_size_of(program) // _PARTS, 1), _LONGEST)
    read = all_reads(jaxpr)
    for run, inside in _units_of(jaxpr, longest):
        for inner in inside:
            yield from all_units(inner, Place(run[0], parent), longest)
        leaves = [site_of(v, parent) for v in leaving(run, read) if holds_floats(v)]
        yield Unit(run, parent, inside, leaves, _carried(run[-1], parent, inside))


def _carried(equation: JaxprEqn, parent: Place | None, inside: list) -> list[Site]:
    """The floating numbers that a scan with programs inside carries."""
    is_loop = inside and is_scan(equation)
    states = carried_variables(equation) if is_loop else []
    return [site_of(v, Place(equation, parent)) for v in states if holds_floats(v)]


def _units_of(jaxpr: Any, longest: int) -> Iterator[tuple[list[JaxprEqn], list]]:
    """The equations of each unit, and the programs inside of one that is to be gone into."""
    run: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        inside = inner_programs(equation)
        is_held = bool(inside) and not _is_small_call(equation, inside)
        is_next_layer = _is_layer(equation) and any(map(_is_layer, run))
        is_other = is_next_layer or (run and Place(run[0]).module != Place(equation).module)
        if run and (is_held or len(run) >= longest or is_other):
            yield run, []
            run = []
        if is_held:
            yield [equation], inside
        else:
            run.append(equation)
    if run:
        yield run, []


def _is_small_call(equation: JaxprEqn, inside: list) -> bool:
    """Whether an equation stays whole in a measurement of modules."""
    has_loops = any(is_scan(e) for program in inside for e in equations(program))
    is_small = is_jit(equation) and sum(map(_size_of, inside)) <= _SMALL_FUNCTION
    return is_small and not has_loops


def _size_of(program: Any) -> int:
    """The number of equations, inside of others too."""
    every = opened(program)[0].eqns
    return len(every) + sum(_size_of(inner) for e in every for inner in inner_programs(e))


def _is_layer(equation: JaxprEqn) -> bool:
    return numeric_of(equation).is_product


def module_sites(units: list[Unit]) -> list[Site]:
    """The sites of values that leave each unit, and of the carries of each scan."""
    return [site for unit in units for site in (*unit.leaves, *unit.carried)]


def units_and_rows(
    units: list[Unit], measured: dict[Site, Summary]
) -> list[tuple[Unit, GradientRow]]:
    """A row for each unit and each scan that cotangents come to, in forward order."""
    rows = []
    for unit in units:
        # What leaves a unit with programs inside has rows there; what a scan carries has not.
        sites = unit.carried if unit.inside else unit.leaves
        pairs = [(site.variable, over_devices(measured[site], site.axes)) for site in sites]
        pairs = [(v, numbers) for v, numbers in pairs if np.any(numbers.reached)]
        if pairs:
            rows.append((unit, _row(unit, pairs)))
    return rows


def _row(unit: Unit, pairs: list) -> GradientRow:
    place, is_carried = unit.place, bool(unit.inside)
    scans = [*place.scans, *([place.equation] if is_carried else [])]
    largest = max((v.aval for v, _ in pairs), key=lambda aval: aval.size)
    sizes = np.array([v.aval.size for v, _ in pairs], float)
    summaries = [numbers for _, numbers in pairs]
    where = place.location
    return GradientRow(
        module=place.module,
        file=where.file,
        line=where.line,
        operation=SCAN if is_carried else place.operation,
        shape=tuple(largest.shape),
        dtype=str(largest.dtype),
        scans=tuple(scan.params["length"] for scan in scans),
        norm=np.linalg.norm(np.asarray([s.norm for s in summaries], np.float64), axis=0),
        largest=np.max([s.largest for s in summaries], axis=0),
        nonfinite=np.max([s.nonfinite for s in summaries], axis=0),
        zeros=np.tensordot(sizes / max(sizes.sum(), 1), [s.zeros for s in summaries], 1),
        is_layer=unit.is_layer,
        reverse=bool(scans) and scans[-1].params["reverse"],
    )


def ancestors(program: Any, units: list[Unit]) -> list[frozenset[int]]:
    """For each unit the numbers of the units that it is computed from."""
    numbers = {Place(e, u.parent).key: i for i, u in enumerate(units) for e in u.equations}
    above = [_NO_UNITS] * len(units)

    def step(chain: Chain, operands: list, inside: Callable[[], list]) -> list[frozenset[int]]:
        number = numbers.get(chain_key(chain))
        if number is None:
            return inside()
        above[number] |= _NO_UNITS.union(*operands) - {number}
        return [others | {number} for others in inside()]

    inputs = [_NO_UNITS] * len(opened(program)[0].invars)
    flow(program, inputs, step, lambda *each: _NO_UNITS.union(*each))
    return above
