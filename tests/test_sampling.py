"""Which rows of a table run by default."""

import pytest


def by_default(request):
    return request.node.get_closest_marker("exhaustive") is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("second", range(2))
def test_of_a_sampled_test_one_row_in_n_runs(first, second, request):
    assert by_default(request) == ((5 * second + first) % 3 == 0)


@pytest.mark.parametrize("row", range(11))
def test_of_any_other_one_in_nine_runs(row, request):
    assert by_default(request) == (row in (0, 9))
