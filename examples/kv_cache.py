"""Pull scattered blocks out of a paged KV cache by RDMA reads, all in one call.

python examples/kv_cache.py [--device NAME] [--size BYTES] [--blocks N] [--processes]

One side holds a cache in one registered segment, in blocks of 1 to 16 pages. The other asks
for many of them: their views come to it as bytes, it reads them all by one
``qp.reads(local, remote)``, and checks every byte. The two sides are threads, or processes
(which the built-in device can't connect).
"""

import argparse
import multiprocessing
import sys
import threading
import time

import numpy as np

import rdmaview as rv

PAGE = 4096
# Blocks of so many pages have this share of all blocks.
PAGES, SHARES = [1, 2, 4, 8, 16], [0.45, 0.25, 0.15, 0.10, 0.05]
# Word i of a block is i, plus the block's number in the upper half.
NUMBER_SHIFT = np.uint64(32)
SECONDS = 600


def cut_blocks(size):
    """Offsets and sizes of the blocks that fill the cache."""
    random = np.random.default_rng(1)
    sizes = random.choice(PAGES, size // PAGE, p=SHARES).astype(np.uint64) * PAGE
    ends = np.cumsum(sizes)
    count = np.searchsorted(ends, size, "right")
    return (ends - sizes)[:count], sizes[:count]


def block_words(block, size):
    """What a block holds."""
    return np.arange(size // 8, dtype=np.uint64) + (np.uint64(block) << NUMBER_SHIFT)


def connect(qp, peer):
    """Tell each other the queue pairs, and connect them."""
    peer.send_bytes(qp.info.to_bytes())
    qp.connect(rv.QueuePairInfo.from_bytes(peer.recv_bytes()))


def own_cache(device, size, peer):
    """Hold the cache; send the views of the blocks that the peer asks for."""
    memory = np.zeros(size, np.uint8)
    offsets, sizes = cut_blocks(size)
    for block, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
        memory[offset : offset + length].view(np.uint64)[:] = block_words(block, length)
    # Closed if this side fails: then the other one does not wait for it.
    rights = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_READ
    with peer, rv.open(device) as ctx, ctx.alloc_pd() as pd, ctx.create_cq() as cq:
        with pd.reg_mr(memory, rights) as mr, pd.create_qp(cq) as qp:
            connect(qp, peer)
            peer.send(len(sizes))
            wanted = peer.recv()
            peer.send(sizes[wanted])
            views = mr.views(offsets[wanted], sizes[wanted])
            peer.send_bytes(views.remote().to_bytes())
            peer.recv()  # It has read them all.


def pull_blocks(device, count, peer):
    """Read blocks of the peer's cache that are chosen at random, and check them."""
    with rv.open(device) as ctx, ctx.alloc_pd() as pd, ctx.create_cq(1024) as cq:
        with pd.create_qp(cq, max_send_wr=1024) as qp:
            connect(qp, peer)
            wanted = np.random.default_rng(2).permutation(peer.recv())[:count]
            peer.send(wanted)
            sizes = peer.recv()
            offsets = np.cumsum(sizes) - sizes
            with pd.alloc_mr(int(sizes.sum())) as mr:
                start = time.perf_counter()
                remote = rv.RemoteViewArray.from_bytes(peer.recv_bytes())
                local = mr.views(offsets, sizes)
                cutting = time.perf_counter() - start
                before = qp.device_seconds
                start = time.perf_counter()
                with Progress(qp, mr.length):
                    qp.reads(local, remote, timeout=SECONDS)
                reading = time.perf_counter() - start
                its = qp.device_seconds - before
                peer.send("done")
                check_blocks(mr[:].array(), wanted, offsets, sizes)
                report(ctx.name, mr.length, len(wanted), cutting, reading, its)


def check_blocks(memory, wanted, offsets, sizes):
    """Compare each block with what the cache holds."""
    for block, offset, size in zip(wanted, offsets, sizes, strict=True):
        words = memory[offset : offset + size].view(np.uint64)
        if not np.array_equal(words, block_words(block, size)):
            sys.exit(f"block {block} of {size} bytes is not what the cache holds")


def report(device, size, count, cutting, reading, its):
    """Say what was done, and whose the time was."""
    ours = cutting + reading - its
    print(
        f"{count} blocks, {size} bytes, on {device}: all verified\n"
        f"views cut and unpacked  {cutting * 1e3:9.3f} ms, "
        f"{cutting / count * 1e9:.1f} ns a block\n"
        f"one call of reads       {reading * 1e3:9.3f} ms, "
        f"{size / reading / 1e9:.2f} GB/s\n"
        f"of both, the device's   {its * 1e3:9.3f} ms, "
        f"{its / (cutting + reading):.2%}\n"
        f"and ours                {ours * 1e3:9.3f} ms, "
        f"{ours / (cutting + reading):.2%}"
    )


class Progress:
    """A bar on standard error, while a queue pair moves bytes; none if it is no terminal."""

    def __init__(self, qp, size):
        self.qp = qp
        self.size = size
        self.first = qp.bytes_completed
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.draw)

    def __enter__(self):
        if sys.stderr.isatty():
            self.thread.start()

    def __exit__(self, *exception):
        self.over.set()
        if self.thread.ident:
            self.thread.join()

    def draw(self):
        while not self.over.wait(0.1):
            share = (self.qp.bytes_completed - self.first) / self.size
            bar = "#" * int(40 * share)
            print(f"\r[{bar:40}] {share:4.0%}", end="", file=sys.stderr, flush=True)
        print("\r" + " " * 50, end="\r", file=sys.stderr, flush=True)


def main():
    """Start the owner beside this side, which pulls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="NAME", default="soft0")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the cache")
    parser.add_argument("--blocks", type=int, default=50_000, help="blocks to pull")
    parser.add_argument(
        "--processes", action="store_true", help="two processes, not two threads"
    )
    args = parser.parse_args()
    if args.size < PAGES[-1] * PAGE or args.blocks < 1:
        parser.error(
            f"a cache has {PAGES[-1] * PAGE} bytes or more, and 1 block or more"
        )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    kind = context.Process if args.processes else threading.Thread
    owner = kind(target=own_cache, args=(args.device, args.size, there), daemon=True)
    owner.start()
    if args.processes:
        there.close()  # The owner has its own: if that ends, `here` says so.
    pull_blocks(args.device, args.blocks, here)
    owner.join()


if __name__ == "__main__":
    main()
