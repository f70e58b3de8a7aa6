"""The rows of a diagnosis: cotangents by part of a module, and by step of a scan."""

from collections.abc import Iterator

import numpy as np

from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.cotangents import Measured, joined
from clipgrad._diagnose.records import GradientRow
from clipgrad._diagnose.units import Unit, all_units

SCAN = "scan"


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
