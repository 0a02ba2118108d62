/*
 * view_block.h - the memory of packed views, and the loops that fill it.
 *
 * A million views are 40 MB: what they cost is memory traffic, and most of all the
 * kernel's zeroing of fresh pages. So large results bypass the cache, and the last large
 * block that was given back is kept for the next array.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef RDMAVIEW_VIEW_BLOCK_H
#define RDMAVIEW_VIEW_BLOCK_H

#include <stdlib.h>
#include <sys/mman.h>
#include "rdmaview.h"
#include "stream.h"

#define BLOCK_ALIGNMENT 64
/* Smaller ones cost malloc little; larger ones are too much to sit on. */
#define SPARE_LEAST ((size_t)1 << 20)
#define SPARE_MOST ((size_t)64 << 20)
#define HUGE_PAGE ((size_t)2 << 20)

/* With the GIL held, as all that takes and gives. */
static void *spare_block;
static size_t spare_size;

static inline size_t block_size(size_t size)
{
	return (size + BLOCK_ALIGNMENT) & ~(size_t)(BLOCK_ALIGNMENT - 1);
}

/* Fresh memory that will be filled at once: faults and zeroing by 2 MiB, not by 4 KiB. */
static inline void prefer_huge_pages(void *memory, size_t size)
{
	uintptr_t start = ((uintptr_t)memory + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
	uintptr_t end = ((uintptr_t)memory + size) & ~(HUGE_PAGE - 1);

	/* Advice: where the kernel won't, it is small pages as before. */
	if (end > start)
		madvise((void *)start, end - start, MADV_HUGEPAGE);
}

static inline void *take_block(size_t size)
{
	void *block;

	size = block_size(size);
	if (spare_block && size <= spare_size && size >= spare_size / 2) {
		block = spare_block;
		spare_block = NULL;
		return block;
	}
	block = aligned_alloc(BLOCK_ALIGNMENT, size);
	if (block)
		prefer_huge_pages(block, size);
	return block;
}

/* `size` is what it was taken for: a block that is larger is only known as so large. */
static inline void give_block(void *block, size_t size)
{
	size = block_size(size);
	if (size >= SPARE_LEAST && size <= SPARE_MOST &&
	    (spare_block == NULL || size >= spare_size)) {
		void *old = spare_block;

		spare_block = block;
		spare_size = size;
		block = old;
	}
	free(block);
}

/* As rdmaview_slice_many. */
static inline size_t cut_slices(const rdmaview_view *whole,
				const uint64_t *offsets, ptrdiff_t offset_step,
				const uint64_t *sizes, ptrdiff_t size_step,
				size_t count, rdmaview_view *views)
{
	size_t i;

	if (count < STREAM_LEAST)
		return rdmaview_slice_many(whole, offsets, offset_step, sizes,
					   size_step, count, views);
	for (i = 0; i < count; i++) {
		rdmaview_view view;

		if (!rdmaview_slice(whole, *offsets, *sizes, &view))
			break;
		stream_view(&views[i], &view);
		offsets += offset_step;
		sizes += size_step;
	}
	end_streaming();
	return i;
}

static inline size_t
cut_remote_slices(const rdmaview_remote *whole, const uint64_t *offsets,
		  ptrdiff_t offset_step, const uint64_t *sizes,
		  ptrdiff_t size_step, size_t count, rdmaview_remote *views)
{
	return rdmaview_remote_slice_many(whole, offsets, offset_step, sizes,
					  size_step, count, views);
}

/* For views that a caller's own array holds. */
static inline size_t copy_views(const char *views, ptrdiff_t stride,
				size_t count, rdmaview_view *copies)
{
	size_t i;

	for (i = 0; i < count; i++) {
		const rdmaview_view *copy = &copies[i];

		memcpy(&copies[i], views + stride * (ptrdiff_t)i,
		       sizeof(*copy));
		if (copy->size > UINT64_MAX - copy->virtual_addr ||
		    copy->size > UINT64_MAX - copy->rdma_addr)
			break;
	}
	return i;
}

static inline size_t copy_remotes(const char *views, ptrdiff_t stride,
				  size_t count, rdmaview_remote *copies)
{
	size_t i;

	for (i = 0; i < count; i++) {
		rdmaview_remote *copy = &copies[i];

		memcpy(copy, views + stride * (ptrdiff_t)i, sizeof(*copy));
		copy->reserved = 0;
		if (copy->size > UINT64_MAX - copy->rdma_addr)
			break;
	}
	return i;
}

#endif /* RDMAVIEW_VIEW_BLOCK_H */
