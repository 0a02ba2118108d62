/*
 * shards.h - deals views out to shards, in C that knows nothing of Python.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef SHARDS_H
#define SHARDS_H

#include "rdmaview.h"

/*
 * A view's shard is by its hash, and so the same in every process: two programs agree on
 * who serves a block. Adds the bytes of each view to those of its shard.
 */
static inline void deal_views(const void *views, ptrdiff_t stride, size_t count,
			      uint32_t shards, uint32_t *shard_of,
			      uint64_t *shard_bytes)
{
	size_t i;

	for (i = 0; i < count; i++) {
		const rdmaview_view *view = rdmaview_at(views, stride, i);
		uint32_t shard = (uint32_t)(rdmaview_hash(view) % shards);

		shard_of[i] = shard;
		shard_bytes[shard] += view->size;
	}
}

#endif /* SHARDS_H */
