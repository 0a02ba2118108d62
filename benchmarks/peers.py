"""Time a registration or a write through one library, for bench_view.py.

python peers.py LIBRARY {register,write,chain} DEVICE SIZE GID_INDEX ROUNDS

A process of its own for each: the libraries need different interpreters, and a different
libibverbs on the built-in device. Prints the median of the rounds as JSON, less the median
of rounds that do nothing. This imports what it measures, and else the standard library.
"""

import ctypes
import json
import mmap
import statistics
import sys
import time

CHAIN = 64  # as in benchmarks/c
keep = []  # what the timed functions need, but don't refer to
RIGHTS = 1 | 2 | 4  # local write, remote write, remote read: as in benchmarks/c


def rdmaview_register(device, size, gid_index):
    import rdmaview as rv

    pd = rv.open(device).alloc_pd()
    memory = private_memory(size)
    access = rv.Access(RIGHTS)
    return lambda: pd.reg_mr(memory, access).close()


def ibverbs_register(device, size, gid_index):
    pd = ibverbs_context(device).alloc_pd()
    memory = private_memory(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    keep.append(memory)
    return lambda: pd.reg_mr(address, size, RIGHTS).close()


def pyverbs_register(device, size, gid_index):
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    pd = PD(Context(name=device))
    memory = private_memory(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    keep.append(memory)
    return lambda: MR(pd, size, RIGHTS, address).close()


def rdmaview_write(device, size, gid_index):
    import rdmaview as rv

    ctx = rv.open(device)
    pd, cq = ctx.alloc_pd(), ctx.create_cq(64)
    a, b = pd.create_qp(cq), pd.create_qp(cq)
    a.connect(b.info)
    b.connect(a.info)
    memory = private_memory(mmap.PAGESIZE)
    mr = pd.reg_mr(memory, rv.Access(RIGHTS))
    local, remote = mr[:size], mr[-size:].remote()
    keep.extend([b, mr])
    return lambda: a.write(local, remote)


def rdmaview_chain(device, size, gid_index):
    """As many as C posts at once, from one place to another: packed views, cut before."""
    import rdmaview as rv

    ctx = rv.open(device)
    pd, cq = ctx.alloc_pd(), ctx.create_cq(2 * CHAIN)
    a, b = (pd.create_qp(cq, max_send_wr=CHAIN) for _ in range(2))
    a.connect(b.info)
    b.connect(a.info)
    memory = private_memory(mmap.PAGESIZE)
    mr = pd.reg_mr(memory, rv.Access(RIGHTS))
    local = mr.views([0] * CHAIN, size)
    remote = mr.views([mmap.PAGESIZE - size] * CHAIN, size).remote()
    keep.extend([b, mr])
    return lambda: a.writes(local, remote)


def ibverbs_pair(device, gid_index):
    """A queue pair that is connected to another, its queue, memory and region."""
    import ibverbs

    ctx = ibverbs_context(device)
    pd, cq = ctx.alloc_pd(), ctx.create_cq(2 * CHAIN)
    gid, port = ctx.query_gid(1, gid_index), ctx.query_port(1)
    a, b = (
        pd.create_qp(ibverbs.QPInitAttr(send_cq=cq, recv_cq=cq, max_send_wr=CHAIN))
        for _ in range(2)
    )
    for qp, peer in (a, b), (b, a):
        info = ibverbs.local_qp_info(peer, port, gid, port=1)
        ibverbs.connect_rc(qp, info, port=1, sgid_index=gid_index, access=RIGHTS)
    memory = private_memory(mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mr = pd.reg_mr(address, mmap.PAGESIZE, RIGHTS)
    keep.extend([b, mr, memory])
    return a, cq, address, mr


def ibverbs_request(address, size, mr, flags):
    import ibverbs

    return ibverbs.SendWR(
        sg_list=[ibverbs.SGE(address, size, mr.lkey)],
        opcode=ibverbs.WROpcode.RDMA_WRITE,
        send_flags=flags,
        remote_addr=address + mmap.PAGESIZE - size,
        rkey=mr.rkey,
    )


def ibverbs_write(device, size, gid_index):
    import ibverbs

    qp, cq, address, mr = ibverbs_pair(device, gid_index)

    def write():
        qp.post_send(ibverbs_request(address, size, mr, ibverbs.SendFlags.SIGNALED))
        while not (done := cq.poll(1)):
            pass
        done[0].raise_for_status()

    return write


def ibverbs_chain(device, size, gid_index):
    """The requests are made before, as our views are cut before."""
    import ibverbs

    qp, cq, address, mr = ibverbs_pair(device, gid_index)
    flags = [ibverbs.SendFlags(0)] * (CHAIN - 1) + [ibverbs.SendFlags.SIGNALED]
    requests = [ibverbs_request(address, size, mr, flag) for flag in flags]

    def write():
        qp.post_send(requests)
        while not (done := cq.poll(1)):
            pass
        done[0].raise_for_status()

    return write


def private_memory(size):
    """Memory of the kind that the C programs get: to pin a shared page costs more."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * size)
    return memory


def ibverbs_context(device):
    import ibverbs

    return next(d for d in ibverbs.get_device_list() if d.name == device).open()


def median_ns(function, rounds):
    clock = time.perf_counter_ns
    for _ in range(rounds // 10 + 1):
        function()
    samples = []
    for _ in range(rounds):
        start = clock()
        function()
        samples.append(clock() - start)
    return statistics.median(samples)


WHATS = {
    ("rdmaview", "register"): rdmaview_register,
    ("ibverbs", "register"): ibverbs_register,
    ("pyverbs", "register"): pyverbs_register,
    ("rdmaview", "write"): rdmaview_write,
    ("rdmaview", "chain"): rdmaview_chain,
    ("ibverbs", "write"): ibverbs_write,
    ("ibverbs", "chain"): ibverbs_chain,
}


def main():
    library, what, device, *numbers = sys.argv[1:]
    size, gid_index, rounds = map(int, numbers)
    function = WHATS[library, what](device, size, gid_index)
    empty = median_ns(lambda: None, rounds)
    print(json.dumps({"median_ns": median_ns(function, rounds) - empty}))


if __name__ == "__main__":
    main()
