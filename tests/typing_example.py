"""A program of a user: mypy --strict must find nothing in it; and it runs."""

import sys

import numpy as np

import rdmaview as rv
from rdmaview.scanners import Arena

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type


def register(pd: rv.ProtectionDomain, size: int) -> rv.MemoryRegion:
    """Register a segment that a peer may write and read."""
    array = np.zeros(size, dtype=np.uint8)
    rights = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ
    return pd.reg_mr(array, rights)


def send(qp: rv.QueuePair, view: rv.MemoryRegionView, wire: bytes) -> int:
    """Write a view to where a peer said; wait for the completion."""
    remote = rv.RemoteView.from_bytes(wire)
    wr_id = qp.post_write(view, remote[: len(view)])
    for completion in qp.cq.wait(timeout=5.0):
        assert_type(completion, rv.WorkCompletion)
        if not completion.ok:
            raise rv.WorkCompletionError(completion)
        assert_type(completion.status, rv.Status)
    return wr_id


def at_scale(pd: rv.ProtectionDomain, qp: rv.QueuePair) -> int:
    """Look up arrays, and move many views at once."""
    arena = Arena(1 << 20, step=1 << 16)
    parts = [arena.take(64) for _ in range(10)]
    with (
        rv.SegmentTable(pd, rv.Access.LOCAL_WRITE | rv.Access.REMOTE_READ) as table,
        rv.RegistrationCache(pd, max_bytes=1 << 20) as cache,
        pd.alloc_mr(4096) as local,
    ):
        report = table.sync(arena.segments())
        assert_type(report, rv.SyncReport)
        assert_type(report.added, list[rv.Segment])
        views = table.views_of(parts)
        assert_type(views, rv.ViewArray)
        assert_type(views[0], rv.MemoryRegionView)
        assert_type(views[2:4], rv.ViewArray)
        assert_type(table.view_of(parts[0]), rv.MemoryRegionView)
        assert_type(table.view_of(parts[0], split=True), rv.ViewArray)
        remote = rv.RemoteViewArray.from_bytes(views.remote().to_bytes())
        assert_type(remote, rv.RemoteViewArray)
        qp.reads(local.views(np.arange(10) * 64, 64), remote, timeout=5.0)
        assert_type(cache.view_of(np.zeros(8)), rv.MemoryRegionView)
        assert_type(cache.stats["misses"], float)
        return len(views.coalesce())


def main(device: str | None) -> bytes:
    """Move five bytes from one half of a segment to the other."""
    with rv.open(device) as ctx, ctx.alloc_pd() as pd, ctx.create_cq(depth=16) as cq:
        assert_type(ctx, rv.Context)
        with (
            register(pd, 8192) as mr,
            pd.create_qp(cq, max_send_wr=4) as a,
            pd.create_qp(cq, max_send_wr=4) as b,
        ):
            a.connect(b.info)
            b.connect(rv.QueuePairInfo.from_bytes(a.info.to_bytes()))
            here, there = mr[:5], mr.view(4096, 5)
            assert_type(here[1:3], rv.MemoryRegionView)
            here.array()[:] = np.frombuffer(b"hello", dtype=np.uint8)
            send(a, here, there.remote().to_bytes())
            assert at_scale(pd, a) == 1
            rooms = {here: "here", there: "there"}
            assert_type(rooms[there], str)
            assert here.mr is mr
            return there.array().tobytes()


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else None))
