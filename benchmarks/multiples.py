"""Times and temporaries of all sides of a row in multiples of those of the plain gradient."""

from typing import Any

PLAIN, TORCH = "no clip", "torch, no clip"
METHODS = ("one pass", "two passes")
IN_TORCH = ("Opacus", "Opacus, ghost", "fastDP")
HEAD = ["work", "by", "time", "temporaries, MB", "times as many"]


def cells(side: dict[str, Any], floor: dict[str, Any]) -> list[str]:
    """A side beside the floor of the same library."""
    time = side["seconds"]["run"]["median"] / floor["seconds"]["run"]["median"]
    taken, least = (each["facts"].get("temporaries") for each in (side, floor))
    if taken is None or not least:
        return [side["name"], f"{time:.2f}", "", ""]
    return [side["name"], f"{time:.2f}", f"{taken / 1e6:.1f}", f"{taken / least:.2f}"]


def lines(row: dict[str, Any]) -> list[list[str]]:
    """A line for each side that has a floor; PyTorch's plain gradient is that of its own sides."""
    sides = {side["name"]: side for side in row["sides"]}
    found = []
    for name, side in sides.items():
        floor = sides.get(TORCH if name in (*IN_TORCH, TORCH) else PLAIN)
        if floor:
            found.append([row["name"] if not found else "", *cells(side, floor)])
    return found


def by_method(result: dict[str, Any]) -> str:
    """For each work what this library chooses, and the time and temporaries of each method."""
    found = [["work", "`auto`", *METHODS, "optax"], ["---"] * 5]
    for row in result["rows"]:
        sides = {side["name"]: side for side in row["sides"]}
        taken = {name: side["facts"].get("temporaries") for name, side in sides.items()}
        chosen = next(name for name in METHODS if taken[name] == taken["clipgrad"])
        each = [cells(sides[name], sides[PLAIN]) for name in (*METHODS, "optax, all at once")]
        found.append([row["name"], chosen, *(f"{time}, {ratio}" for _, time, _, ratio in each)])
    return "\n".join(f"| {' | '.join(line)} |" for line in found)


def table(result: dict[str, Any]) -> str:
    """All rows of a subject."""
    rule = ["---", "---", "---:", "---:", "---:"]
    rows = [line for row in result["rows"] for line in lines(row)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEAD, rule, *rows])
