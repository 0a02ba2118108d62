/*
 * rdmaview.h - a view of registered memory, as a C value.
 *
 * This is the very struct that rdmaview's Python objects carry, and the NumPy
 * dtype of a packed view. It needs neither Python.h nor <infiniband/verbs.h>,
 * and compiles as C99 and as C++.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef RDMAVIEW_H
#define RDMAVIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A slice of a registration, as its owner sees it. Sizes are bytes. */
typedef struct rdmaview_view {
	uint64_t id;           /* names one registration, never reused */
	uint64_t virtual_addr; /* where the bytes are in this process */
	uint64_t rdma_addr;    /* where a work request finds them */
	uint64_t size;
	uint32_t lkey; /* for the local side of a work request */
	uint32_t rkey; /* for the remote side; 0: no remote right */
} rdmaview_view;

/* What a peer needs of a view. */
typedef struct rdmaview_remote {
	uint64_t id;
	uint64_t rdma_addr;
	uint64_t size;
	uint32_t rkey;
	uint32_t reserved; /* zero */
} rdmaview_remote;

typedef char rdmaview_view_is_40_bytes[sizeof(rdmaview_view) == 40 ? 1 : -1];
typedef char rdmaview_remote_is_32_bytes[sizeof(rdmaview_remote) == 32 ? 1 : -1];

/*
 * Does [offset, offset + size) lie within `whole` bytes? Written so that no
 * sum is ever formed: a hostile offset or size cannot wrap around.
 */
static inline bool rdmaview_within(uint64_t whole, uint64_t offset,
				   uint64_t size)
{
	return offset <= whole && size <= whole - offset;
}

/* Cut [offset, offset + size) out of `view`; false, and no change, if it is not inside. */
static inline bool rdmaview_slice(const rdmaview_view *view, uint64_t offset,
				  uint64_t size, rdmaview_view *slice)
{
	if (!rdmaview_within(view->size, offset, size))
		return false;
	slice->id = view->id;
	slice->virtual_addr = view->virtual_addr + offset;
	slice->rdma_addr = view->rdma_addr + offset;
	slice->size = size;
	slice->lkey = view->lkey;
	slice->rkey = view->rkey;
	return true;
}

static inline bool rdmaview_remote_slice(const rdmaview_remote *view,
					 uint64_t offset, uint64_t size,
					 rdmaview_remote *slice)
{
	if (!rdmaview_within(view->size, offset, size))
		return false;
	slice->id = view->id;
	slice->rdma_addr = view->rdma_addr + offset;
	slice->size = size;
	slice->rkey = view->rkey;
	slice->reserved = 0;
	return true;
}

/* The part of a view that may be told to a peer. */
static inline rdmaview_remote rdmaview_to_remote(const rdmaview_view *view)
{
	rdmaview_remote remote;

	remote.id = view->id;
	remote.rdma_addr = view->rdma_addr;
	remote.size = view->size;
	remote.rkey = view->rkey;
	remote.reserved = 0;
	return remote;
}

/* Is `inner` a slice of `outer`: one registration, its keys, and inside it? */
static inline bool rdmaview_contains(const rdmaview_view *outer,
				     const rdmaview_view *inner)
{
	uint64_t offset = inner->virtual_addr - outer->virtual_addr;

	return inner->id == outer->id && inner->lkey == outer->lkey &&
	       inner->rkey == outer->rkey &&
	       inner->rdma_addr - outer->rdma_addr == offset &&
	       rdmaview_within(outer->size, offset, inner->size);
}

static inline bool rdmaview_remote_contains(const rdmaview_remote *outer,
					    const rdmaview_remote *inner)
{
	return inner->id == outer->id && inner->rkey == outer->rkey &&
	       rdmaview_within(outer->size, inner->rdma_addr - outer->rdma_addr,
			       inner->size);
}

/* Do two ranges share a byte? An empty range shares none. */
static inline bool rdmaview_ranges_overlap(uint64_t a, uint64_t a_size,
					   uint64_t b, uint64_t b_size)
{
	return a_size && b_size && (a <= b ? b - a < a_size : a - b < b_size);
}

static inline bool rdmaview_overlaps(const rdmaview_view *a,
				     const rdmaview_view *b)
{
	return a->id == b->id &&
	       rdmaview_ranges_overlap(a->rdma_addr, a->size, b->rdma_addr,
				       b->size);
}

static inline bool rdmaview_remote_overlaps(const rdmaview_remote *a,
					    const rdmaview_remote *b)
{
	return a->id == b->id &&
	       rdmaview_ranges_overlap(a->rdma_addr, a->size, b->rdma_addr,
				       b->size);
}

static inline bool rdmaview_equal(const rdmaview_view *a,
				  const rdmaview_view *b)
{
	return memcmp(a, b, sizeof(*a)) == 0;
}

static inline bool rdmaview_remote_equal(const rdmaview_remote *a,
					 const rdmaview_remote *b)
{
	return a->id == b->id && a->rdma_addr == b->rdma_addr &&
	       a->size == b->size && a->rkey == b->rkey;
}

/* Spreads every bit of `x` over all of the result (the finaliser of MurmurHash3). */
static inline uint64_t rdmaview_mix(uint64_t x)
{
	x ^= x >> 33;
	x *= UINT64_C(0xff51afd7ed558ccd);
	x ^= x >> 33;
	x *= UINT64_C(0xc4ceb9fe1a85ec53);
	x ^= x >> 33;
	return x;
}

/*
 * The hash of the fields: the same in every process and on every machine. The
 * products do not wait for one another, which is what makes it fast.
 */
static inline uint64_t rdmaview_hash(const rdmaview_view *view)
{
	uint64_t keys = (uint64_t)view->lkey << 32 | view->rkey;

	return rdmaview_mix(view->id * UINT64_C(0x9e3779b97f4a7c15) +
			    view->virtual_addr * UINT64_C(0xbf58476d1ce4e5b9) +
			    view->rdma_addr * UINT64_C(0x94d049bb133111eb) +
			    view->size * UINT64_C(0xd6e8feb86659fd93) +
			    keys * UINT64_C(0xa0761d6478bd642f));
}

static inline uint64_t rdmaview_remote_hash(const rdmaview_remote *view)
{
	return rdmaview_mix(view->id * UINT64_C(0x9e3779b97f4a7c15) +
			    view->rdma_addr * UINT64_C(0x94d049bb133111eb) +
			    view->size * UINT64_C(0xd6e8feb86659fd93) +
			    view->rkey * UINT64_C(0xa0761d6478bd642f));
}

/*
 * Arrays of views. Those of Python may have gaps between their elements, or go
 * backwards: `stride` is the bytes from one element to the next.
 */
static inline const rdmaview_view *rdmaview_at(const void *views,
					       ptrdiff_t stride, size_t i)
{
	return (const rdmaview_view *)((const char *)views +
				       stride * (ptrdiff_t)i);
}

static inline const rdmaview_remote *
rdmaview_remote_at(const void *views, ptrdiff_t stride, size_t i)
{
	return (const rdmaview_remote *)((const char *)views +
					 stride * (ptrdiff_t)i);
}

/*
 * Cut `count` slices out of `whole` into `views`, and return how many were cut: fewer
 * than `count` if the one at that place is not inside. The steps are in items; with
 * a step of 0, one offset or size is for all.
 */
static inline size_t
rdmaview_slice_many(const rdmaview_view *whole, const uint64_t *offsets,
		    ptrdiff_t offset_step, const uint64_t *sizes,
		    ptrdiff_t size_step, size_t count, rdmaview_view *views)
{
	size_t i;

	for (i = 0; i < count; i++) {
		if (!rdmaview_slice(whole, *offsets, *sizes, &views[i]))
			break;
		offsets += offset_step;
		sizes += size_step;
	}
	return i;
}

static inline size_t
rdmaview_remote_slice_many(const rdmaview_remote *whole,
			   const uint64_t *offsets, ptrdiff_t offset_step,
			   const uint64_t *sizes, ptrdiff_t size_step,
			   size_t count, rdmaview_remote *views)
{
	size_t i;

	for (i = 0; i < count; i++) {
		if (!rdmaview_remote_slice(whole, *offsets, *sizes, &views[i]))
			break;
		offsets += offset_step;
		sizes += size_step;
	}
	return i;
}

static inline void rdmaview_to_remote_many(const void *views, ptrdiff_t stride,
					   size_t count,
					   rdmaview_remote *remotes)
{
	size_t i;

	for (i = 0; i < count; i++)
		remotes[i] = rdmaview_to_remote(rdmaview_at(views, stride, i));
}

static inline void rdmaview_hash_many(const void *views, ptrdiff_t stride,
				      size_t count, uint64_t *hashes)
{
	size_t i;

	for (i = 0; i < count; i++)
		hashes[i] = rdmaview_hash(rdmaview_at(views, stride, i));
}

static inline void rdmaview_remote_hash_many(const void *views,
					     ptrdiff_t stride, size_t count,
					     uint64_t *hashes)
{
	size_t i;

	for (i = 0; i < count; i++)
		hashes[i] = rdmaview_remote_hash(
			rdmaview_remote_at(views, stride, i));
}

/* Does `next` begin where `view` ends, in the same registration? */
static inline bool rdmaview_adjacent(const rdmaview_view *view,
				     const rdmaview_view *next)
{
	return view->id == next->id && view->lkey == next->lkey &&
	       view->rkey == next->rkey &&
	       view->virtual_addr + view->size == next->virtual_addr &&
	       view->rdma_addr + view->size == next->rdma_addr;
}

static inline bool rdmaview_remote_adjacent(const rdmaview_remote *view,
					    const rdmaview_remote *next)
{
	return view->id == next->id && view->rkey == next->rkey &&
	       view->rdma_addr + view->size == next->rdma_addr;
}

/* Join neighbours that are adjacent, in order; return how many are left in `joined`. */
static inline size_t rdmaview_coalesce(const void *views, ptrdiff_t stride,
				       size_t count, rdmaview_view *joined)
{
	size_t i;
	size_t left = 0;

	for (i = 0; i < count; i++) {
		const rdmaview_view *view = rdmaview_at(views, stride, i);

		if (left && rdmaview_adjacent(&joined[left - 1], view))
			joined[left - 1].size += view->size;
		else
			joined[left++] = *view;
	}
	return left;
}

static inline size_t rdmaview_remote_coalesce(const void *views,
					      ptrdiff_t stride, size_t count,
					      rdmaview_remote *joined)
{
	size_t i;
	size_t left = 0;

	for (i = 0; i < count; i++) {
		const rdmaview_remote *view =
			rdmaview_remote_at(views, stride, i);

		if (left && rdmaview_remote_adjacent(&joined[left - 1], view))
			joined[left - 1].size += view->size;
		else
			joined[left++] = *view;
	}
	return left;
}

/* Integers in network order, at any address. */
static inline uint64_t rdmaview_big_endian(uint64_t x)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	return __builtin_bswap64(x);
#else
	return x;
#endif
}

static inline void rdmaview_store(unsigned char *at, uint64_t x)
{
	x = rdmaview_big_endian(x);
	memcpy(at, &x, sizeof(x));
}

static inline uint64_t rdmaview_load(const unsigned char *at)
{
	uint64_t x;

	memcpy(&x, at, sizeof(x));
	return rdmaview_big_endian(x);
}

#define RDMAVIEW_PACKED_SIZE 40
#define RDMAVIEW_REMOTE_PACKED_SIZE 28

/* The wire form of a view without its magic: !QQQQII, 40 bytes. */
static inline void rdmaview_pack(const rdmaview_view *view, unsigned char *wire)
{
	rdmaview_store(wire, view->id);
	rdmaview_store(wire + 8, view->virtual_addr);
	rdmaview_store(wire + 16, view->rdma_addr);
	rdmaview_store(wire + 24, view->size);
	rdmaview_store(wire + 32, (uint64_t)view->lkey << 32 | view->rkey);
}

/* False if an address plus the size passes 2**64 - 1. */
static inline bool rdmaview_unpack(const unsigned char *wire,
				   rdmaview_view *view)
{
	uint64_t keys = rdmaview_load(wire + 32);

	view->id = rdmaview_load(wire);
	view->virtual_addr = rdmaview_load(wire + 8);
	view->rdma_addr = rdmaview_load(wire + 16);
	view->size = rdmaview_load(wire + 24);
	view->lkey = (uint32_t)(keys >> 32);
	view->rkey = (uint32_t)keys;
	return view->size <= UINT64_MAX - view->virtual_addr &&
	       view->size <= UINT64_MAX - view->rdma_addr;
}

/* The wire form of a remote view without its magic: !QQQI, 28 bytes. */
static inline void rdmaview_remote_pack(const rdmaview_remote *view,
					unsigned char *wire)
{
	/* The key goes first: the low half of a store that the size then overwrites. */
	rdmaview_store(wire + 20, view->rkey);
	rdmaview_store(wire, view->id);
	rdmaview_store(wire + 8, view->rdma_addr);
	rdmaview_store(wire + 16, view->size);
}

/* False if the address plus the size passes 2**64 - 1. */
static inline bool rdmaview_remote_unpack(const unsigned char *wire,
					  rdmaview_remote *view)
{
	view->id = rdmaview_load(wire);
	view->rdma_addr = rdmaview_load(wire + 8);
	view->size = rdmaview_load(wire + 16);
	view->rkey = (uint32_t)rdmaview_load(wire + 20);
	view->reserved = 0;
	return view->size <= UINT64_MAX - view->rdma_addr;
}

#ifdef __cplusplus
}
#endif

#endif /* RDMAVIEW_H */
