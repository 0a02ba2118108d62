"""Memory whose owner holds a view of it: the collector ends such a cycle, in order."""

import array
import ctypes
import gc
import mmap
import sys
import weakref

import numpy as np
import pytest

from rdmaview import MemoryRegionView


class Array(np.ndarray):
    """An array that takes attributes."""


class Owner:
    """Owns raw memory; what it holds is let go of in this order."""

    def __init__(self, pd, *held):
        self.held = held
        self.memory = bytearray(64)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.view = pd.reg_mr_address(address, 64, owner=self).view(8, 16)


Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, Destructor]


def array_of_itself(pd):
    owner = np.zeros(64, "u1").view(Array)
    owner.view = pd.reg_mr(owner).view(8, 16)
    return owner


def array_behind_memoryview(pd):
    owner = np.zeros(64, "u1").view(Array)
    owner.views = [pd.reg_mr(memoryview(owner))[:8][2:4]]
    return owner


def ctypes_array(pd):
    owner = type("Block", (ctypes.c_char * 64,), {})()
    owner.view = pd.reg_mr(owner)[8:]
    return owner


CYCLES = {
    "an ndarray subclass": array_of_itself,
    "through a memoryview": array_behind_memoryview,
    "a ctypes array": ctypes_array,
    "the owner of a raw address": Owner,
}

PLAIN = {
    "bytes": lambda: bytes(64),
    "bytearray": lambda: bytearray(64),
    "mmap": lambda: mmap.mmap(-1, 64),
    "array.array": lambda: array.array("b", bytes(64)),
    "ndarray": lambda: np.zeros(64, "u1"),
    "a slice of an ndarray": lambda: np.zeros((4, 32), "u1")[1:3],
    "memoryview": lambda: memoryview(memoryview(bytearray(128))[64:]),
}


@pytest.fixture
def pd(pd):
    """Close it when the collector has seen to what the test left."""
    yield pd
    gc.collect()


@pytest.mark.parametrize("kind", CYCLES)
def test_an_owner_that_holds_a_view_of_itself_is_collected(kind, pd):
    owner = CYCLES[kind](pd)
    gone = weakref.ref(owner)
    assert pd.context.mr_count == 1
    gc.collect()
    assert gone() is owner
    del owner
    gc.collect()
    assert gone() is None
    assert pd.context.mr_count == 0


def test_memory_is_deregistered_before_its_owner_lets_go_of_it(pd):
    counts = []
    # No __del__, which the collector would call first, but what goes as memory does.
    destructor = Destructor(lambda _: counts.append(pd.context.mr_count))
    Owner(pd, new_capsule(1, None, destructor))
    assert counts == []
    gc.collect()
    assert counts == [0]


def test_a_view_outlives_the_cycle_that_it_was_part_of(pd):
    owner = array_of_itself(pd)
    owner[:] = 7
    view = owner.view
    del owner
    gc.collect()
    assert bytes(view) == bytes([7]) * 16
    assert view.mr.closed is False
    del view
    gc.collect()
    assert pd.context.mr_count == 0


@pytest.mark.parametrize("kind", PLAIN)
def test_views_of_plain_memory_are_unknown_to_the_collector(kind, pd):
    with pd.reg_mr(PLAIN[kind]()) as mr:
        view = mr[8:16]
        assert not gc.is_tracked(view)
        assert not gc.is_tracked(view[1:])
        assert sys.getsizeof(view) == 64


def test_views_of_memory_that_may_refer_back_are_known_to_it(pd):
    owner = array_of_itself(pd)
    for view in (
        owner.view,
        owner.view[1:],
        owner.view.subview(1, 2),
        owner.view.mr[:],
    ):
        assert gc.is_tracked(view)
        assert sys.getsizeof(view) == 64 + 16
        assert gc.get_referents(view) == [owner.view.mr]
        assert type(view) is MemoryRegionView
        assert view == MemoryRegionView.from_bytes(view.to_bytes())
        assert hash(view) == hash(MemoryRegionView(**view.to_dict()))


@pytest.mark.no_device
def test_detached_views_are_unknown_to_the_collector():
    view = MemoryRegionView(1, 2, 3, 4, 5, 6)
    for one in (view, view[1:], MemoryRegionView(**view.to_dict())):
        assert not gc.is_tracked(one)
        assert sys.getsizeof(one) == 64
        assert gc.get_referents(one) == []


def test_many_views_of_both_kinds_come_and_go(pd):
    count = 30_000
    owner = array_of_itself(pd)
    with pd.reg_mr(np.zeros(64, "u1")) as plain:
        whole = [plain[:], owner.view, MemoryRegionView(1, 2, 3, 64, 5, 6)]
        views = [whole[i % 3][i % 5 : 8] for i in range(count)]
        gc.collect()
        assert sum(gc.is_tracked(view) for view in views) == count // 3
        assert len(set(views)) == 15
        del views[::2]
        gc.collect()
        assert {len(view) for view in views} == {4, 5, 6, 7, 8}
        del views, whole
    del owner
    gc.collect()
    assert pd.context.mr_count == 0
