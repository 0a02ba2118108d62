"""Registrations that are made on first use, and kept while their memory is."""

import gc
import mmap
import random
import threading
import weakref
from array import array as items_of

import numpy as np
import pytest
from helpers import eventually, mapping
from test_memory import Tensor

import rdmaview as rv

RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ
PAGE = mmap.PAGESIZE


@pytest.fixture
def cache(pd):
    with rv.RegistrationCache(pd, RIGHTS) as cache:
        yield cache


class At:
    """Memory at an address, that another array may have had before."""

    def __init__(self, address, size):
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class TestAHit:
    def test_is_a_view_of_the_registration_that_is_there(self, ctx, cache):
        array = np.zeros(1000, "f4")
        first = cache.view_of(array)
        second = cache.view_of(array)
        assert first == second
        assert (cache.hits, cache.misses, ctx.mr_count) == (1, 1, 1)

    def test_is_found_though_no_view_was_left(self, ctx, cache):
        array = np.zeros(1000, "f4")
        first = cache.view_of(array).rkey
        gc.collect()
        assert cache.in_use == 0
        assert cache.view_of(array).rkey == first
        assert (cache.hits, cache.misses, ctx.mr_count) == (1, 1, 1)

    def test_is_any_part_of_the_owners_memory(self, ctx, cache):
        base = np.zeros(1000, "f4")
        whole = cache.view_of(base)
        assert cache.view_of(base[250:500]) == whole[1000:2000]
        assert cache.view_of(base[250:500].view("f8")) == whole[1000:2000]
        assert cache.view_of(base[::1][3:]) == whole[12:]
        assert cache.view_of(memoryview(base)[8:16]) == whole[32:64]
        assert ctx.mr_count == 1

    def test_is_registered_by_the_first_part(self, ctx, cache):
        base = np.zeros((64, 64), "u1")
        views = [cache.view_of(row) for row in base]
        assert (cache.misses, ctx.mr_count, cache.bytes_pinned) == (1, 1, 4096)
        assert [view.virtual_addr - views[0].virtual_addr for view in views] == [
            64 * i for i in range(64)
        ]

    def test_of_a_tensor_is_by_its_storage(self, ctx, cache):
        class Storage:
            def __init__(self, items):
                self.items = items

            def data_ptr(self):
                return self.items.__array_interface__["data"][0]

            def nbytes(self):
                return self.items.nbytes

        items = np.arange(100, dtype="f4")
        storage = Storage(items)
        whole = cache.view_of(Tensor(items, storage=storage))
        assert cache.view_of(Tensor(items[10:20], storage=storage)) == whole[40:80]
        assert ctx.mr_count == 1

    def test_of_a_mapping_is_by_the_mapping(self, ctx, cache):
        mapped = mmap.mmap(-1, 4 * PAGE)
        view = cache.view_of(np.frombuffer(mapped, "u1")[PAGE : 2 * PAGE])
        assert cache.view_of(mapped)[PAGE : 2 * PAGE] == view
        assert ctx.mr_count == 1

    def test_moves_bytes(self, cache, pair):
        base = np.arange(1000, dtype="u1")
        got = np.zeros(100, dtype="u1")
        pair.a.write(cache.view_of(base[50:150]), cache.view_of(got).remote())
        assert (got == base[50:150]).all()


class TestTheOwner:
    def test_is_not_held_by_the_cache(self, ctx, cache):
        array = np.zeros(1000)
        dead = weakref.ref(array)
        cache.view_of(array)
        del array
        assert dead() is None
        assert (len(cache), cache.bytes_pinned, ctx.mr_count) == (0, 0, 0)

    def test_is_held_by_a_view(self, ctx, cache):
        array = np.arange(1000)
        dead = weakref.ref(array)
        view = cache.view_of(array[10:20])
        del array
        gc.collect()
        assert dead() is not None
        assert view.array().view("i8").tolist() == [*range(10, 20)]
        del view
        assert dead() is None
        assert ctx.mr_count == 0

    def test_is_held_by_an_array_of_a_view(self, ctx, cache):
        array = np.arange(1000)
        numbers = cache.view_of(array).array()
        del array
        gc.collect()
        assert numbers.view("i8")[999] == 999
        del numbers
        assert ctx.mr_count == 0

    def test_in_a_cycle_with_its_view_is_collected(self, ctx, cache):
        class Array(np.ndarray):
            pass

        array = np.zeros(100).view(Array)
        owner = np.zeros(100)
        array.view_of_itself = cache.view_of(array)
        cell = [owner, cache.view_of(owner)]
        cell.append(cell)
        del array, owner, cell
        gc.collect()
        assert ctx.mr_count == 0

    def test_at_the_address_of_a_dead_one_is_registered_anew(self, cache):
        with mapping(4 * PAGE) as address:
            first = At(address, PAGE)
            old = cache.view_of(first)
            keys = (old.id, old.rkey)
            del old, first
        with mapping(4 * PAGE, address):
            second = At(address, 4 * PAGE)
            new = cache.view_of(second)
            assert new.size == 4 * PAGE
            assert (new.id, new.rkey) != keys
            assert cache.misses == 2
            del new, second

    def test_that_moved_its_memory_is_registered_anew(self, ctx, cache):
        numbers = items_of("d", [1.0] * 100)
        old = cache.view_of(numbers).id
        numbers.extend([2.0] * 100_000)
        new = cache.view_of(numbers)
        assert new.id != old
        assert new.size == 100_100 * 8
        assert ctx.mr_count == 1

    def test_cannot_move_its_memory_under_a_view(self, cache):
        numbers = items_of("d", [1.0] * 100)
        view = cache.view_of(numbers)
        with pytest.raises(BufferError):
            numbers.extend([2.0])
        del view
        numbers.extend([2.0])

    @pytest.mark.parametrize("kind", [bytearray, lambda n: memoryview(bytearray(n))])
    def test_that_takes_no_weakref_is_registered_for_each_view(self, ctx, cache, kind):
        array = kind(100)
        first, second = cache.view_of(array), cache.view_of(array)
        assert first != second
        assert (cache.uncached, cache.misses, len(cache)) == (2, 0, 0)
        assert ctx.mr_count == 2
        del first, second
        assert ctx.mr_count == 0

    def test_that_is_read_only_gets_no_right_to_write(self, pd, cache):
        array = np.zeros(100)
        array.flags.writeable = False
        with pytest.raises(BufferError, match="read-only"):
            cache.view_of(array)
        with rv.RegistrationCache(pd) as readers:
            assert readers.view_of(array).mr.access == 0

    @pytest.mark.parametrize("thing", ["text", 7, None, np.array([None])])
    def test_has_memory(self, cache, thing):
        with pytest.raises(TypeError):
            cache.view_of(thing)
        assert (len(cache), cache.misses, cache.hits) == (0, 0, 0)

    def test_has_bytes(self, cache):
        with pytest.raises(ValueError, match="zero bytes|0 bytes|empty"):
            cache.view_of(np.zeros(0))
        assert len(cache) == 0


class TestLimits:
    def test_evict_what_was_not_used_for_longest(self, ctx, pd):
        with rv.RegistrationCache(pd, max_regions=3) as cache:
            arrays = [np.zeros(10) for _ in range(4)]
            for i in (0, 1, 2, 0, 3):
                cache.view_of(arrays[i])
            assert (len(cache), cache.evictions, ctx.mr_count) == (3, 1, 3)
            cache.view_of(arrays[0])
            assert cache.misses == 4
            cache.view_of(arrays[1])
            assert cache.misses == 5

    def test_count_bytes(self, pd):
        with rv.RegistrationCache(pd, max_bytes=2000) as cache:
            arrays = [np.zeros(100) for _ in range(5)]
            for array in arrays:
                cache.view_of(array)
                assert cache.bytes_pinned <= 2000
            assert (len(cache), cache.evictions) == (2, 3)

    def test_never_evict_what_is_in_use(self, ctx, pd):
        with rv.RegistrationCache(pd, max_regions=2) as cache:
            arrays = [np.zeros(10) for _ in range(4)]
            views = [cache.view_of(array) for array in arrays]
            assert (len(cache), cache.evictions) == (4, 0)
            for view in views:
                view.array()
            del views, view
            arrays.append(np.zeros(10))
            cache.view_of(arrays[-1])
            assert (len(cache), ctx.mr_count) == (2, 2)

    @pytest.mark.soft_only("max_mr can be set")
    def test_of_the_device_evict_too(self):
        rv.softverbs.configure(max_mr=4)
        with rv.open("soft0") as ctx, ctx.alloc_pd() as pd:
            with rv.RegistrationCache(pd) as cache:
                arrays = [np.zeros(10) for _ in range(6)]
                for array in arrays:
                    cache.view_of(array)
                assert (len(cache), cache.evictions) == (4, 2)
                views = [cache.view_of(array) for array in arrays[:4]]
                with pytest.raises(rv.VerbsError, match="max_mr"):
                    cache.view_of(arrays[5])
                assert len(cache) == 4
                del views

    @pytest.mark.parametrize("limit", [0, -1, 2**64])
    def test_are_one_or_more(self, pd, limit):
        for name in ("max_regions", "max_bytes"):
            with pytest.raises(ValueError, match=f"{name} must be 1 or more"):
                rv.RegistrationCache(pd, **{name: limit})


class TestItsEnd:
    def test_by_clear_leaves_what_is_in_use_to_its_views(self, ctx, cache):
        arrays = [np.arange(10.0) for _ in range(2)]
        view = cache.view_of(arrays[0])
        cache.view_of(arrays[1])
        cache.clear()
        assert (len(cache), ctx.mr_count) == (0, 1)
        assert view.array().view("f8")[9] == 9
        assert cache.view_of(arrays[0]) != view
        del view
        assert ctx.mr_count == 1

    def test_by_close_makes_views_stale(self, ctx, pd):
        cache = rv.RegistrationCache(pd)
        array = np.zeros(10)
        view = cache.view_of(array)
        cache.close()
        cache.close()
        assert cache.closed
        assert ctx.mr_count == 0
        with pytest.raises(rv.StaleViewError):
            view.array()
        with pytest.raises(ValueError, match="closed"):
            cache.view_of(array)

    @pytest.mark.soft_only("work is held back")
    def test_is_refused_while_work_is_in_flight(self, pd, pair):
        cache = rv.RegistrationCache(pd, RIGHTS)
        arrays = [np.zeros(10) for _ in range(2)]
        rv.softverbs.delay("completion", 0.2)
        here, there = map(cache.view_of, arrays)
        pair.a.post_write(here, there.remote())
        with pytest.raises(rv.VerbsError, match="in flight"):
            cache.close()
        assert not cache.closed
        assert eventually(lambda: pair.a.cq.poll())
        cache.close()

    def test_of_an_abandoned_cache_is_the_collectors(self, ctx, pd):
        cache = rv.RegistrationCache(pd)
        array = np.zeros(10)
        view = cache.view_of(array)
        del cache
        gc.collect()
        view.array()
        del view
        gc.collect()
        assert ctx.mr_count == 0

    def test_is_not_a_matter_of_one_view(self, cache):
        view = cache.view_of(np.zeros(10))
        with pytest.raises(ValueError, match="RegistrationCache's"):
            view.mr.close()


def test_threads_register_one_memory_once(ctx, pd, is_soft):
    if is_soft:
        rv.softverbs.delay("reg_mr", 0.002)
    shared = [np.zeros(PAGE, "u1") for _ in range(4)]
    errors = []
    start = threading.Barrier(8)

    def work(number, cache):
        chooser = random.Random(number)
        own = [np.zeros(PAGE, "u1") for _ in range(4)]
        try:
            start.wait(30)
            for _ in range(500):
                array = chooser.choice(shared + own)
                at = chooser.randrange(PAGE)
                view = cache.view_of(array[at:])
                assert view.size == PAGE - at
                assert view.mr.addr == array.__array_interface__["data"][0]
        except BaseException as error:
            errors.append(error)

    with rv.RegistrationCache(pd) as cache:
        threads = [threading.Thread(target=work, args=(i, cache)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert cache.misses == 4 + 8 * 4
        assert cache.hits == 8 * 500 - cache.misses
        del threads
        gc.collect()
        assert eventually(lambda: len(cache) == 4)
        assert ctx.mr_count == 4
    assert ctx.mr_count == 0
