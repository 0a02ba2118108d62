/*
 * segment_index.h - which of many pieces of registered memory contain a range.
 *
 * No piece contains another, so that in the order of their starts they are also in that
 * of their ends: of the pieces that start at or before an address, the last one reaches
 * furthest, and is the only candidate.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef RDMAVIEW_SEGMENT_INDEX_H
#define RDMAVIEW_SEGMENT_INDEX_H

#include <stdbool.h>
#include "rdmaview.h"
#include "stream.h"

/* Searched in step, so that the cache misses of one overlap those of the others. */
#define LANES 16

/* Two cache lines of starts to a signpost. */
#define SIGNPOST_STEP 16

/*
 * `starts` has one more than `count`: UINT64_MAX, after which no piece begins.
 * `signposts` has every sixteenth of them: few enough to stay in the nearest cache.
 */
typedef struct {
	uint64_t *starts;
	uint64_t *signposts;
	rdmaview_view *wholes;
	size_t count;
} piece_list;

/* After a change of the starts from the piece `first` on. */
static inline void set_signposts(piece_list *pieces, size_t first)
{
	size_t i;

	for (i = first / SIGNPOST_STEP; i * SIGNPOST_STEP < pieces->count; i++)
		pieces->signposts[i] = pieces->starts[i * SIGNPOST_STEP];
}

/* The last of the starts at or before the address; the first one if none is. */
static inline size_t find_last(const uint64_t *starts, size_t left, uint64_t address)
{
	size_t low = 0, half;

	while (left > 1) {
		half = left / 2;
		/* A mask: a branch would be mispredicted every other time. */
		low += half & -(size_t)(starts[low + half] <= address);
		left -= half;
	}
	return low;
}

/* The last piece that starts at or before the address; the first one if none does. */
static inline size_t find_piece(const piece_list *pieces, uint64_t address)
{
	size_t posts = (pieces->count + SIGNPOST_STEP - 1) / SIGNPOST_STEP;
	size_t first = find_last(pieces->signposts, posts, address) * SIGNPOST_STEP;
	size_t left = pieces->count - first;

	return first + find_last(pieces->starts + first,
				 left < SIGNPOST_STEP ? left : SIGNPOST_STEP, address);
}

static inline void find_lanes(const piece_list *pieces,
			      const uint64_t addresses[LANES], size_t found[LANES])
{
	size_t left = pieces->count, half;
	int lane;

	for (lane = 0; lane < LANES; lane++)
		found[lane] = 0;
	while (left > 1) {
		half = left / 2;
		for (lane = 0; lane < LANES; lane++)
			found[lane] += half & -(size_t)(
				pieces->starts[found[lane] + half] <=
				addresses[lane]);
		left -= half;
	}
}

/* Does the address start in the piece `near`, or in the next one? */
static inline bool is_near(const piece_list *pieces, uint64_t address, size_t *near)
{
	if (address < pieces->starts[*near])
		return false;
	if (address < pieces->starts[*near + 1])
		return true;
	if (*near + 1 >= pieces->count ||
	    (*near + 2 <= pieces->count && address >= pieces->starts[*near + 2]))
		return false;
	++*near;
	return true;
}

/* False if the piece does not contain the whole range. */
static inline bool cut_piece(const piece_list *pieces, size_t piece, uint64_t address,
			     uint64_t size, rdmaview_view *view)
{
	const rdmaview_view *whole = &pieces->wholes[piece];

	return pieces->count && rdmaview_slice(whole, address - whole->virtual_addr,
					       size, view);
}

/*
 * Cut `count` views; mark the pieces that they are cut from. Return how many were cut:
 * fewer than `count` if that one is in no piece.
 */
static inline size_t cut_pieces(const piece_list *pieces, const uint64_t *addresses,
				ptrdiff_t address_step, const uint64_t *sizes,
				ptrdiff_t size_step, size_t count,
				rdmaview_view *views, unsigned char *used)
{
	const bool streams = count >= STREAM_LEAST;
	uint64_t lane_addresses[LANES];
	size_t found[LANES], near = 0, i, lanes, lane;
	rdmaview_view view;

	if (!pieces->count)
		return 0;
	for (i = 0; i < count; i += lanes) {
		lanes = count - i < LANES ? count - i : LANES;
		for (lane = 0; lane < lanes; lane++) {
			lane_addresses[lane] = *addresses;
			addresses += address_step;
		}
		for (lane = 0; lane < lanes; lane++) {
			if (!is_near(pieces, lane_addresses[lane], &near))
				break;
			found[lane] = near;
		}
		if (lane < lanes) {
			for (lane = lanes; lane < LANES; lane++)
				lane_addresses[lane] = 0;
			find_lanes(pieces, lane_addresses, found);
			near = found[lanes - 1];
		}
		for (lane = 0; lane < lanes; lane++) {
			if (!cut_piece(pieces, found[lane], lane_addresses[lane],
				       *sizes, &view))
				goto out;
			used[found[lane]] = 1;
			if (streams)
				stream_view(views++, &view);
			else
				*views++ = view;
			sizes += size_step;
		}
	}
	lane = 0;
out:
	if (streams)
		end_streaming();
	return i + lane;
}

/*
 * Cut the part of a range that lies in one piece, as much as can be. Return its size; 0
 * if the first byte is in no piece, or the range is empty.
 */
static inline uint64_t cut_first(const piece_list *pieces, uint64_t address,
				 uint64_t size, rdmaview_view *view, size_t *piece)
{
	const rdmaview_view *whole;
	uint64_t offset, left;

	*piece = find_piece(pieces, address);
	if (!pieces->count)
		return 0;
	whole = &pieces->wholes[*piece];
	offset = address - whole->virtual_addr;
	if (offset >= whole->size)
		return 0;
	left = whole->size - offset;
	if (size > left)
		size = left;
	rdmaview_slice(whole, offset, size, view);
	return size;
}

#endif /* RDMAVIEW_SEGMENT_INDEX_H */
