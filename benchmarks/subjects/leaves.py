"""The global norm clip against the number of leaves and against their size: the picture's rows."""

from benchmarks import trees
from benchmarks.rows import Row, Scale
from benchmarks.subjects import norm

TITLE = "Global norm clip by number and size of leaves"
COUNTS = (1, 10, 100)
SIZES = (1, 16, 256, 4096)  # KB


def rows(scale: Scale) -> list[Row]:
    """Leaves of 4 KB, more and more; eight leaves, larger and larger."""

    def row(name: str, axis: str, count: int, kilobytes: int) -> Row:
        shapes = trees.leaves(count, (kilobytes, 256))
        facts = {"axis": axis, "leaves": count, "leaf bytes": 1024 * kilobytes}
        return Row(name, lambda: norm.sides(shapes), budget=3.0, facts=facts)

    by_count = {scale(n): None for n in COUNTS}
    by_size = {scale(n): None for n in SIZES}
    return [row(f"{n:,} x 4 KB", "leaves", n, 4) for n in by_count] + [
        row(f"8 x {n:,} KB", "leaf bytes", 8, n) for n in by_size
    ]
