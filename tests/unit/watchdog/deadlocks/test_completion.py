"""Completion of collectives: whom an operation needs, and how large its inputs are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    element_count,
    needed_members,
    python_dtype_name,
    size_bytes,
)


def collective(operation: str = "all_reduce", **changes: Any) -> Collective:
    """A pending operation of ranks 0, 1 and 2 on seven floats."""
    fields: dict[str, Any] = {
        "group": "0", "sequence": 1, "operation": operation, "sizes": ((7,),), "dtypes": ("Float",),
        "progress": CollectiveProgress.enqueued, "members": (0, 1, 2),
    }  # fmt: skip
    return Collective(**(fields | changes))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "barrier", BACKWARD])
@pytest.mark.parametrize(("rank", "others"), [(0, (1, 2)), (1, (0, 2)), (2, (0, 1))])
def test_an_operation_of_all_needs_every_other_member(
    operation: str, rank: int, others: tuple[int, ...]
) -> None:
    """If the members are not known, nor are those that it needs."""
    assert needed_members(rank, collective(operation)) == others
    assert needed_members(rank, collective(operation, members=())) is None


@pytest.mark.parametrize("operation", ["gather", "scatter", "all_to_all", "send", "coalesced", "other"])
def test_an_operation_that_may_complete_alone_needs_nobody(operation: str) -> None:
    """Whatever its root is, and whether or not its members are known."""
    for root in (-1, 0, 1):
        assert needed_members(0, collective(operation, root=root)) == ()
        assert needed_members(0, collective(operation, root=root, members=())) == ()


@pytest.mark.parametrize(
    ("rank", "root", "needed"),
    [(0, -1, ()), (0, 0, ()), (0, 2, (2,)), (1, 2, (2,)), (2, 2, ()), (2, 0, (0,)), (2, 1, (1,))],
)
def test_a_receiver_of_a_broadcast_needs_its_root(rank: int, root: int, needed: tuple[int, ...]) -> None:
    """The root needs nobody: it may complete before any receiver has come."""
    assert needed_members(rank, collective("broadcast", root=root)) == needed
    assert needed_members(rank, collective("broadcast", root=root, members=())) == needed


@pytest.mark.parametrize("root", [0, 1, 2])
def test_only_the_root_of_a_reduction_needs_the_others(root: int) -> None:
    """The others may send their part and go on."""
    for rank in range(3):
        others = tuple(other for other in range(3) if other != rank)
        assert needed_members(rank, collective("reduce", root=root)) == (others if rank == root else ())
    assert needed_members(root, collective("reduce", root=root, members=())) is None
    assert needed_members(root, collective("reduce")) == ()


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [
        ((), (1, 2)), (((),), (1, 2)), (((1,),), (1, 2)), (((0,),), ()), (((4, 0),), ()), (((0,), (0,)), ()),
        (((0,), (1,)), (1, 2)),
    ],
)  # fmt: skip
def test_an_operation_without_elements_needs_nobody(
    sizes: tuple[tuple[int, ...], ...], needed: tuple[int, ...]
) -> None:
    """Gloo completes it without communication; a barrier never has elements and needs all."""
    assert needed_members(0, collective(sizes=sizes)) == needed
    assert needed_members(0, collective("barrier", sizes=sizes)) == (1, 2)


def test_elements_of_all_inputs_are_added() -> None:
    """A scalar has one; an operation without inputs has none."""
    assert element_count(collective(sizes=((2, 3), (), (4,)))) == 6 + 1 + 4
    assert element_count(collective(sizes=())) == 0


@pytest.mark.parametrize(
    "dtype",
    [
        "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
        "ComplexDouble", "Float8_e4m3fn", "Float8_e5m2",
    ],
)  # fmt: skip
def test_the_size_of_an_element_is_in_the_name_of_its_type(dtype: str) -> None:
    """`float32` has 32 bits; a bool has a byte."""
    bits = re.search(r"\d+", python_dtype_name(dtype))
    item_bytes = int(bits[0]) // 8 if bits else 1
    assert size_bytes(collective(sizes=((5,),), dtypes=(dtype,))) == 5 * item_bytes


@pytest.mark.parametrize(
    ("sizes", "dtypes", "expected"),
    [
        (((2,), (3,)), ("Float", "Float"), 20),
        (((2,), (3,)), ("Float",), 20),
        (((2, 5), (3,)), ("Float", "Half"), 46),
        (((2,), (3,), (4,)), ("Float", "Half"), None),
        (((2,), (3,)), ("Float", "Half", "Half"), None),
        (((2,),), ("Odd",), None),
        (((2,), (3,)), ("Float", "Odd"), None),
        (((2,),), (), None),
        ((), ("Float",), None),
        ((), (), None),
    ],
)  # fmt: skip
def test_inputs_whose_size_is_not_known_have_none(
    sizes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], expected: int | None
) -> None:
    """An unknown size is no difference. One type stands for all inputs; several are one for each."""
    assert size_bytes(collective(sizes=sizes, dtypes=dtypes)) == expected
