"""A program of a user: mypy --strict must find nothing in it; and it runs."""

import sys

import numpy as np

import rdmaview as rv

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
            rooms = {here: "here", there: "there"}
            assert_type(rooms[there], str)
            assert here.mr is mr
            return there.array().tobytes()


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else None))
