"""Segments of registered memory, found by address."""

import contextlib
import gc
import itertools
import mmap
import threading

import numpy as np
import pytest
from helpers import mapping
from hypothesis import given
from hypothesis import strategies as st

import rdmaview as rv

RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ
PAGE = mmap.PAGESIZE


@pytest.fixture
def table(pd):
    with rv.SegmentTable(pd, RIGHTS) as table:
        yield table


@pytest.fixture
def memory():
    return np.zeros(8 * PAGE, "u1")


def address(array):
    return array.__array_interface__["data"][0]


class TestLookUp:
    def test_finds_the_segment_that_contains_the_range(self, table, memory):
        parts = [memory[at : at + PAGE] for at in (4 * PAGE, 0, 2 * PAGE)]
        segments = [table.register(part) for part in parts]
        for part, segment in zip(parts, segments, strict=True):
            (piece,) = segment.pieces
            assert table.view_of(part) == piece
            assert table.view_of(part[-1:]) == piece[PAGE - 1 :]
            assert table.view_at(address(part) + 8, 16) == piece[8:24]
        assert [segment.addr for segment in table] == sorted(map(address, parts))

    def test_refuses_what_reaches_past_the_end(self, table, memory):
        table.register(memory[:PAGE])
        start = address(memory)
        assert table.view_at(start + PAGE - 1, 1).size == 1
        for at, size in ((PAGE - 1, 2), (-1, 1), (-1, 2), (PAGE, 1), (0, 2**64 - 1)):
            with pytest.raises(rv.NotRegisteredError, match="no registered segment"):
                table.view_at(start + at, size)

    def test_of_nothing_registered_says_so(self, table):
        with pytest.raises(rv.NotRegisteredError, match="none is registered"):
            table.view_at(4096, 1)

    def test_names_both_segments_that_a_range_straddles(self, table, memory):
        a, b = table.register(memory[:PAGE]), table.register(memory[PAGE : 2 * PAGE])
        both = memory[8 : 2 * PAGE - 8]
        with pytest.raises(rv.NotRegisteredError) as refusal:
            table.view_of(both)
        for segment in (a, b):
            end = segment.addr + segment.size
            assert f"[{segment.addr:#x}, {end:#x})" in str(refusal.value)
        cut = table.view_of(both, split=True)
        assert list(cut) == [a.pieces[0][8:], b.pieces[0][:-8]]
        assert table.view_at(address(both), len(both), split=True) == cut
        assert table.views_of([both], split=True) == cut
        assert table.views_at([address(both)], len(both), split=True) == cut
        assert table.runs_of(both, split=True) == cut

    def test_never_splits_over_a_gap(self, table, memory):
        table.register(memory[:PAGE])
        table.register(memory[2 * PAGE :])
        with pytest.raises(rv.NotRegisteredError, match="a part of them is in"):
            table.view_of(memory, split=True)

    def test_finds_every_one_as_they_come_and_go(self, table, memory):
        parts = [memory[at : at + 8] for at in range(0, 70 * 16, 16)]
        order = np.random.default_rng(5)
        segments = {}
        for step in range(200):
            place = int(order.integers(len(parts)))
            if place in segments:
                table.remove(segments.pop(place))
            else:
                segments[place] = table.register(parts[place])
            for at, part in enumerate(parts if step % 10 == 0 else ()):
                if at in segments:
                    assert table.view_of(part) == segments[at].pieces[0]
                else:
                    with pytest.raises(rv.NotRegisteredError):
                        table.view_of(part)

    def test_of_many_gives_what_each_gives(self, table, memory):
        for at in range(0, 8, 2):
            table.register(memory[at * PAGE : (at + 1) * PAGE])
        random = np.random.default_rng(1)
        places = random.integers(0, 4, 5000) * 2 * PAGE + random.integers(0, 4000, 5000)
        for order in (places, np.sort(places)):
            arrays = [memory[at : at + 64] for at in order]
            views = table.views_at(order + address(memory), 64)
            assert list(views) == [table.view_of(array) for array in arrays]
            assert table.views_of(arrays) == views

    def test_of_many_names_the_one_that_is_not_there(self, table, memory):
        table.register(memory[:PAGE])
        start = address(memory)
        for count in (5, 50, 50_000):
            places = np.full(count, start, np.uint64)
            places[count - 2] += PAGE
            with pytest.raises(rv.NotRegisteredError, match=f"range {count - 2}"):
                table.views_at(places, 1)
        with pytest.raises(rv.NotRegisteredError, match="array 1"):
            table.views_of([memory[:8], np.zeros(8)])

    def test_of_runs_is_that_of_the_region(self, table, memory):
        (piece,) = table.register(memory).pieces
        matrix = memory.reshape(8, PAGE)[2:5, 100:200]
        assert table.runs_of(matrix) == piece.mr.runs_of(matrix)

    def test_moves_bytes(self, table, pair, memory):
        table.register(memory)
        memory[:PAGE] = 7
        pair.a.write(
            table.view_of(memory[:PAGE]), table.view_of(memory[-PAGE:]).remote()
        )
        assert (memory[-PAGE:] == 7).all()

    def test_of_a_hundred_thousand_segments(self, pd, is_soft):
        count = 100_000 if is_soft else 2000
        if is_soft:
            rv.softverbs.configure(max_mr=count)
        with mapping(2 * count * 64) as start, rv.SegmentTable(pd) as table:
            starts = start + np.arange(count) * 128
            table.sync([(int(at), 64) for at in starts])
            assert len(table) == count
            views = np.asarray(table.views_at(starts + 63, 1))
            assert (views["virtual_addr"] == starts + 63).all()
            assert len({*views["id"].tolist()}) == count
            with pytest.raises(rv.NotRegisteredError):
                table.view_at(int(starts[-1]) + 64, 1)
            del views


class TestTheRuleForOverlaps:
    def test_the_same_range_is_the_same_segment(self, ctx, table, memory):
        first, second = table.register(memory), table.register(memory.view("f4"))
        assert first is second
        assert (first.count, ctx.mr_count) == (2, 1)

    def test_a_range_inside_another_is_a_slice_of_it(self, ctx, table, memory):
        outer, inner = table.register(memory), table.register(memory[64:128])
        assert inner.pieces == (outer.pieces[0][64:128],)
        assert ctx.mr_count == 1

    def test_a_range_that_overlaps_in_part_is_another(self, ctx, table, memory):
        table.register(memory[:PAGE])
        table.register(memory[64 : PAGE + 64])
        assert ctx.mr_count == 2
        assert table.view_of(memory[:PAGE]).size == PAGE
        assert table.view_of(memory[64 : PAGE + 64]).size == PAGE

    @pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
    @pytest.mark.parametrize("made", [(0, 1, 2, 3), (2, 3, 0, 1)])
    def test_the_last_release_deregisters(self, pd, order, made):
        base = np.zeros(8192, "u1")
        ranges = [(0, 8192), (0, 8192), (0, 4096), (2048, 6144)]
        ctx = pd.context
        with rv.SegmentTable(pd, RIGHTS) as table:
            segments = {i: table.register(base[slice(*ranges[i])]) for i in made}
            most = ctx.mr_count
            left = {*range(4)}
            for i in order:
                table.remove(segments[i])
                left.discard(i)
                for j in left:
                    low, high = ranges[j]
                    view = table.view_of(base[low:high])
                    assert (view.virtual_addr, view.size) == (
                        address(base) + low,
                        high - low,
                    )
                    view.array()
                assert ctx.mr_count <= most
                if not left & {0, 1}:
                    with pytest.raises(rv.NotRegisteredError):
                        table.view_of(base)
            assert ctx.mr_count == 0
            assert len(table) == 0

    def test_other_rights_are_refused(self, pd, memory):
        with rv.SegmentTable(pd) as table, pd.reg_mr(memory[:PAGE], RIGHTS) as mr:
            table.register(memory[64:])
            with pytest.raises(ValueError, match="have the same rights"):
                table.adopt(mr)
            assert len(table) == 1


class TestASegment:
    def test_that_is_removed_is_found_no_more(self, table, memory):
        segment = table.register(memory)
        view = table.view_of(memory)
        table.remove(segment)
        with pytest.raises(rv.NotRegisteredError):
            table.view_of(memory)
        with pytest.raises(rv.StaleViewError):
            view.array()
        with pytest.raises(ValueError, match="not in the table"):
            table.remove(segment)

    def test_that_was_adopted_stays_registered(self, ctx, pd, table, memory):
        with pd.reg_mr(memory, RIGHTS) as mr:
            segment = table.adopt(mr)
            assert table.adopt(mr) is segment
            assert table.view_of(memory[8:16]) == mr[8:16]
            table.remove(segment)
            assert table.view_of(memory) == mr[:]
            inner = table.register(memory[:64])
            table.remove(segment)
            assert table.view_of(memory[:64]) == mr[:64]
            table.remove(inner)
            assert not mr.closed
            assert len(table) == 0

    def test_whose_region_somebody_closed_gives_no_view(self, pd, table, memory):
        mr = pd.reg_mr(memory, RIGHTS)
        table.adopt(mr)
        mr.close()
        for call in (
            lambda: table.view_of(memory),
            lambda: table.views_of([memory]),
            lambda: table.views_at([address(memory)], 8),
            lambda: table.view_of(memory, split=True),
        ):
            with pytest.raises(rv.StaleViewError):
                call()

    @pytest.mark.soft_only("max_mr_size can be set")
    def test_over_the_largest_region_is_in_pieces(self, ctx, pd, memory):
        rv.softverbs.configure(max_mr_size=2 * PAGE)
        with rv.open("soft0") as ctx, ctx.alloc_pd() as pd:
            with rv.SegmentTable(pd, RIGHTS) as table:
                segment = table.register(memory)
                assert [piece.size for piece in segment.pieces] == [2 * PAGE] * 4
                assert len(table.view_of(memory, split=True)) == 4
                with pytest.raises(rv.NotRegisteredError, match="split=True"):
                    table.view_of(memory)
                inner = table.register(memory[PAGE : 3 * PAGE])
                assert len(inner.pieces) == 2
                assert ctx.mr_count == 4
                table.remove(segment)
                assert ctx.mr_count == 2
                table.remove(inner)
                assert ctx.mr_count == 0

    @pytest.mark.soft_only("registrations fail when they are told to")
    def test_is_registered_whole_or_not_at_all(self, memory):
        rv.softverbs.configure(max_mr_size=2 * PAGE, max_mr=3)
        with rv.open("soft0") as ctx, ctx.alloc_pd() as pd:
            with rv.SegmentTable(pd, RIGHTS) as table:
                with pytest.raises(rv.VerbsError):
                    table.register(memory)
                assert (len(table), ctx.mr_count) == (0, 0)


class TestSync:
    def test_registers_what_is_new_and_retires_what_is_gone(self, ctx, table, memory):
        a, b, c = (address(memory) + at * PAGE for at in (0, 2, 4))
        report = table.sync([(a, PAGE), (b, PAGE)])
        assert [s.addr for s in report.added] == [a, b]
        report = table.sync([(b, PAGE), (c, PAGE)])
        assert [s.addr for s in report.added] == [c]
        assert [s.addr for s in report.retired] == [a]
        assert ctx.mr_count == 2
        assert not report.grown

    def test_of_a_grown_segment_leaves_old_views_their_registration(
        self, ctx, table, pair, memory
    ):
        start = address(memory)
        table.sync([(start, PAGE)])
        old = table.view_at(start, PAGE)
        report = table.sync([(start, 2 * PAGE)])
        (grown,) = report.grown
        assert (grown.size, len(report.retired), report.added) == (2 * PAGE, 1, [])
        new = table.view_at(start, PAGE)
        assert new.id != old.id
        assert table.stats["retired"] == 1
        memory[:8] = 5
        pair.a.write(old[:8], new[64:72].remote())
        assert (memory[64:72] == 5).all()
        del old
        gc.collect()
        assert table.stats["retired"] == 0
        assert ctx.mr_count == 1

    def test_of_a_shrunk_segment_registers_it_anew(self, table, memory):
        start = address(memory)
        table.sync([(start, 2 * PAGE)])
        report = table.sync([(start, PAGE)])
        assert (len(report.added), len(report.grown), len(report.retired)) == (1, 0, 1)
        with pytest.raises(rv.NotRegisteredError):
            table.view_at(start, PAGE + 1)

    def test_serves_no_old_key_at_a_recycled_address(self, table):
        with mapping(4 * PAGE) as start:
            table.sync([(start, PAGE, None, "first")])
            old = table.view_at(start, PAGE)
        with mapping(4 * PAGE, start):
            report = table.sync([(start, 4 * PAGE, None, "second")])
            assert (len(report.added), len(report.retired)) == (1, 1)
            new = table.view_at(start, PAGE)
            assert (new.id, new.rkey) != (old.id, old.rkey)
            assert table.view_at(start, 4 * PAGE).size == 4 * PAGE
            assert table.reap() == 1
            with pytest.raises(rv.StaleViewError):
                old.array()
            assert table.reap() == 0

    def test_is_all_or_nothing(self, ctx, table, memory):
        start = address(memory)
        table.sync([(start, PAGE)])
        before = table.view_at(start, PAGE)
        with mapping(PAGE) as gone:
            pass
        with pytest.raises(rv.VerbsError):
            table.sync([(start, 2 * PAGE), (start + 4 * PAGE, PAGE), (gone, PAGE)])
        assert table.view_at(start, PAGE) == before
        assert (len(table), ctx.mr_count) == (1, 1)

    def test_leaves_alone_what_was_registered_otherwise(self, table, memory):
        table.register(memory[:PAGE])
        table.sync([(address(memory) + 2 * PAGE, PAGE)])
        table.sync([])
        assert [segment.size for segment in table] == [PAGE]
        assert table.view_of(memory[:PAGE]).size == PAGE

    def test_refuses_two_segments_at_one_address(self, table, memory):
        start = address(memory)
        with pytest.raises(ValueError, match="two segments begin"):
            table.sync([(start, 1), (start, 2)])


class TestClose:
    def test_deregisters_all_and_again_does_nothing(self, ctx, pd, memory):
        table = rv.SegmentTable(pd, RIGHTS)
        table.register(memory[:PAGE])
        table.sync([(address(memory) + 4 * PAGE, PAGE)])
        old = table.view_at(address(memory) + 4 * PAGE, 8)
        table.sync([])
        table.close()
        table.close()
        assert ctx.mr_count == 0
        assert (len(table), table.stats["retired"]) == (0, 0)
        with pytest.raises(rv.StaleViewError):
            old.array()

    def test_of_an_abandoned_table_is_the_collectors(self, ctx, pd, memory):
        table = rv.SegmentTable(pd, RIGHTS)
        table.register(memory)
        del table
        gc.collect()
        assert ctx.mr_count == 0


ranges = st.tuples(st.integers(0, 40), st.integers(1, 24))


@given(steps=st.lists(st.tuples(st.booleans(), ranges), max_size=14), data=st.data())
def test_a_table_finds_what_a_plain_search_finds(device_name, steps, data):
    base = np.zeros(64, "u1")
    start = address(base)
    with rv.open(device_name) as ctx, ctx.alloc_pd() as pd:
        with rv.SegmentTable(pd, RIGHTS) as table:
            model = []
            for adds, (low, size) in steps:
                if adds or not model:
                    model.append(table.register(base[low : low + size]))
                else:
                    index = data.draw(st.integers(0, len(model) - 1))
                    table.remove(model.pop(index))
                spans = {(s.addr - start, s.addr - start + s.size) for s in model}
                for low in range(0, 64, 3):
                    for high in range(low + 1, 65, 4):
                        inside = any(a <= low and high <= b for a, b in spans)
                        with (
                            contextlib.nullcontext()
                            if inside
                            else pytest.raises(rv.NotRegisteredError)
                        ):
                            view = table.view_at(start + low, high - low)
                            assert view.virtual_addr == start + low
                            assert view.size == high - low
                            view.array()
            for segment in model:
                table.remove(segment)
            assert ctx.mr_count == 0


def test_threads_share_a_table(ctx, table):
    arrays = [np.zeros(PAGE, "u1") for _ in range(8)]
    shared = table.register(arrays[0])
    errors = []

    def work(number):
        mine = arrays[number]
        try:
            for _ in range(50):
                segment = table.register(mine)
                for view in (table.view_of(mine[8:16]), *table.views_of([mine] * 9)):
                    assert view.virtual_addr - address(mine) in (0, 8)
                many = table.views_at(np.full(5000, address(mine)), 8)
                assert (np.asarray(many)["id"] == table.view_of(mine).id).all()
                table.remove(segment)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert (len(table), ctx.mr_count, shared.count) == (1, 1, 1)
