/*
 * view_wire.h - many views to and from their wire form.
 *
 * A view and its wire form have the same fields in the same places, so that only the
 * order of bytes differs: four 64-bit fields can be turned by one AVX2 instruction where
 * the processor has it.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef RDMAVIEW_VIEW_WIRE_H
#define RDMAVIEW_VIEW_WIRE_H

#include <string.h>
#include "rdmaview.h"

#ifdef __x86_64__
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m256i turn_bytes(__m256i words)
{
	return _mm256_shuffle_epi8(
		words, _mm256_setr_epi8(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12,
					11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0,
					15, 14, 13, 12, 11, 10, 9, 8));
}

/* The two keys keep their places, and each is turned. */
static inline void turn_keys(const void *from, void *to)
{
	uint64_t keys;

	memcpy(&keys, from, sizeof(keys));
	keys = __builtin_bswap64(keys);
	keys = keys << 32 | keys >> 32;
	memcpy(to, &keys, sizeof(keys));
}

AVX2 static inline void pack_views_avx2(const char *views, ptrdiff_t stride,
					size_t count, unsigned char *wire)
{
	size_t i;

	for (i = 0; i < count; i++) {
		_mm256_storeu_si256(
			(__m256i *)wire,
			turn_bytes(_mm256_loadu_si256((const __m256i *)views)));
		turn_keys(views + 32, wire + 32);
		views += stride;
		wire += RDMAVIEW_PACKED_SIZE;
	}
}

/* Return whether every view fits below 2**64; what doesn't is for others to find. */
AVX2 static inline bool unpack_views_avx2(const unsigned char *wire,
					  size_t count, rdmaview_view *views)
{
	const int addresses = 2 | 4; /* of id, virtual_addr, rdma_addr, size */
	__m256i carries = _mm256_setzero_si256();
	size_t i;

	for (i = 0; i < count; i++) {
		__m256i words = turn_bytes(
			_mm256_loadu_si256((const __m256i *)wire));
		__m256i sizes = _mm256_permute4x64_epi64(words, 0xff);
		__m256i ends = _mm256_add_epi64(words, sizes);

		/* The sum's carry: the top bit of (a & b) | ((a | b) & ~(a + b)). */
		carries = _mm256_or_si256(
			carries,
			_mm256_or_si256(
				_mm256_and_si256(words, sizes),
				_mm256_andnot_si256(
					ends,
					_mm256_or_si256(words, sizes))));
		_mm256_storeu_si256((__m256i *)&views[i], words);
		turn_keys(wire + 32, &views[i].lkey);
		wire += RDMAVIEW_PACKED_SIZE;
	}
	return !(_mm256_movemask_pd(_mm256_castsi256_pd(carries)) & addresses);
}

static inline bool has_avx2(void)
{
	return __builtin_cpu_supports("avx2");
}
#else
static inline bool has_avx2(void)
{
	return false;
}

static inline void pack_views_avx2(const char *views, ptrdiff_t stride,
				   size_t count, unsigned char *wire)
{
	(void)views, (void)stride, (void)count, (void)wire;
}

static inline bool unpack_views_avx2(const unsigned char *wire, size_t count,
				     rdmaview_view *views)
{
	(void)wire, (void)count, (void)views;
	return false;
}
#endif

static inline void pack_views(const char *views, ptrdiff_t stride, size_t count,
			      unsigned char *wire)
{
	size_t i;

	if (has_avx2()) {
		pack_views_avx2(views, stride, count, wire);
		return;
	}
	for (i = 0; i < count; i++)
		rdmaview_pack(rdmaview_at(views, stride, i),
			      wire + i * RDMAVIEW_PACKED_SIZE);
}

/* Return how many fit; fewer than `count` if one's address plus size passes 2**64. */
static inline size_t unpack_views(const unsigned char *wire, size_t count,
				  rdmaview_view *views)
{
	size_t i;

	if (has_avx2() && unpack_views_avx2(wire, count, views))
		return count;
	for (i = 0; i < count; i++)
		if (!rdmaview_unpack(wire + i * RDMAVIEW_PACKED_SIZE,
				     &views[i]))
			break;
	return i;
}

static inline void pack_remotes(const char *views, ptrdiff_t stride,
				size_t count, unsigned char *wire)
{
	size_t i;

	for (i = 0; i < count; i++)
		rdmaview_remote_pack(rdmaview_remote_at(views, stride, i),
				     wire + i * RDMAVIEW_REMOTE_PACKED_SIZE);
}

/* As unpack_views. */
static inline size_t unpack_remotes(const unsigned char *wire, size_t count,
				    rdmaview_remote *views)
{
	size_t i;

	for (i = 0; i < count; i++)
		if (!rdmaview_remote_unpack(
			    wire + i * RDMAVIEW_REMOTE_PACKED_SIZE, &views[i]))
			break;
	return i;
}

#endif /* RDMAVIEW_VIEW_WIRE_H */
