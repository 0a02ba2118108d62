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

#ifdef __cplusplus
}
#endif

#endif /* RDMAVIEW_H */
