"""The parts of a program, and what is measured of each: runs of equations of one module."""

from collections.abc import Iterator

import numpy as np
from jax.extend.core import DropVar, JaxprEqn, Var

from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.cotangents import CotangentSite, Measured, joined
from clipgrad._diagnose.probe import RESULT, STATE, Site, carried_variables
from clipgrad._diagnose.records import GradientRow
from clipgrad._jaxpr import JIT, holds_floats
from clipgrad._names import Place

# Code without scopes is cut into so many parts, of at most so many equations: 184 probes in a
# transformer of 12 layers and 997 equations, which compile in 18 seconds on two busy cores.
_PARTS, _LONGEST = 64, 24
# A function that JAX compiles by itself, such as `jnp.linalg.norm`, stays whole up to this size.
_SMALL_FUNCTION = 24
_LAYERS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
CLOSED = frozenset({"while", "pallas_call", "pure_callback", "ffi_call", "cond"})


class Unit:
    """Equations next to each other, of one module and with at most one matrix product.

    ``equations`` is one alone if there are blocks ``inside`` of it to go into. ``leaves`` are the
    variables that other units read, with the sites where their cotangents are measured, and
    ``carried`` are the floating numbers that a scan carries, as variables of its body.
    """

    def __init__(
        self,
        block: Block,
        equations: list[JaxprEqn],
        inside: list[Block],
    ):
        self.block, self.equations, self.inside = block, equations, inside
        own = set(map(id, equations))
        self.leaves = {
            v: Site(RESULT, block.place(equation).key, i)
            for equation in equations
            for i, v in enumerate(equation.outvars)
            if not isinstance(v, DropVar) and holds_floats(v) and self._leaves(v, own)
        }
        is_scan = inside and self.place.equation.primitive.name == "scan"
        states = enumerate(carried_variables(self.place.equation) if is_scan else ())
        self.carried = {v: Site(STATE, self.place.key, i) for i, v in states if holds_floats(v)}
        self.is_layer = any(map(_is_layer, equations))

    def _leaves(self, variable: Var, own: set[int]) -> bool:
        """Whether a result of the unit is read by another one, or is one of the block."""
        jaxpr = self.block.jaxpr
        readers = {id(jaxpr.eqns[i]) for i, _ in self.block.uses.get(variable, ())}
        return bool(readers - own) or any(v is variable for v in jaxpr.outvars)

    @property
    def place(self) -> Place:
        """The last equation of the unit."""
        return self.block.place(self.equations[-1])


def all_units(block: Block, longest: int | None = None) -> Iterator[Unit]:
    """The units of a block and of those inside that are gone into, in program order."""
    if longest is None:
        longest = min(max(_size_of(block) // _PARTS, 1), _LONGEST)
    for equations, inside in _runs(block, longest):
        for inner in inside:
            yield from all_units(inner, longest)
        yield Unit(block, equations, inside)


def _runs(block: Block, longest: int) -> Iterator[tuple[list[JaxprEqn], list[Block]]]:
    """The equations of each unit, and the blocks inside of one that is to be gone into."""
    run: list[JaxprEqn] = []
    for i, equation in enumerate(block.jaxpr.eqns):
        inside = block.children.get(i, [])
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


def _is_small_call(equation: JaxprEqn, inside: list[Block]) -> bool:
    """Whether an equation stays whole in a measurement of modules."""
    held = (e for block in inside for own in block.blocks() for e in own.jaxpr.eqns)
    has_loops = any(e.primitive.name == "scan" for e in held)
    is_small = equation.primitive.name in JIT and sum(map(_size_of, inside)) <= _SMALL_FUNCTION
    return is_small and not has_loops


def _size_of(block: Block) -> int:
    """The number of equations, inside of others too."""
    return sum(len(own.jaxpr.eqns) for own in block.blocks())


def _is_layer(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _LAYERS


SCAN = "scan"


def module_sites(block: Block) -> list[CotangentSite]:
    """The sites of values that leave each unit, and of the carries of each scan."""
    sites = []
    for unit in all_units(block):
        sites += [CotangentSite(site, unit.block.parent, v) for v, site in unit.leaves.items()]
        sites += [CotangentSite(site, unit.place, v) for v, site in unit.carried.items()]
    return sites


def units_and_rows(block: Block, measured: Measured) -> Iterator[tuple[Unit, GradientRow]]:
    """A row for each unit and each scan that cotangents come to, in forward order."""
    for unit in all_units(block):
        # What leaves a unit with programs inside has rows there; what a scan carries has not.
        around = unit.place if unit.inside else unit.block.parent
        sites = unit.carried if unit.inside else unit.leaves
        pairs = [(v, joined(measured[site], around)) for v, site in sites.items()]
        pairs = [(v, summary) for v, summary in pairs if np.any(summary.reached)]
        if pairs:
            yield unit, _row(unit, pairs)


def _row(unit: Unit, pairs: list) -> GradientRow:
    place, is_carried = unit.place, bool(unit.inside)
    scans = [*place.scans, *([place.equation] if is_carried else [])]
    largest = max((v.aval for v, _ in pairs), key=lambda aval: aval.size)
    sizes = np.array([v.aval.size for v, _ in pairs], float)
    summaries = [summary for _, summary in pairs]
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
        nonfinite=np.sum([s.nonfinite for s in summaries], axis=0),
        zeros=np.tensordot(sizes / max(sizes.sum(), 1), [s.zeros for s in summaries], 1),
        is_layer=unit.is_layer,
        reverse=bool(scans) and scans[-1].params["reverse"],
    )
