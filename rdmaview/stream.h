/*
 * stream.h - stores that bypass the cache, for what is written once and not read soon.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef RDMAVIEW_STREAM_H
#define RDMAVIEW_STREAM_H

#include <stdint.h>
#include <string.h>
#include "rdmaview.h"

#ifdef __x86_64__
#include <emmintrin.h>
#endif

/* Fewer views than these stay in the cache, where the next to use them finds them. */
#define STREAM_LEAST ((size_t)1 << 15)

static inline void stream_view(rdmaview_view *at, const rdmaview_view *view)
{
#ifdef __x86_64__
	uint64_t words[sizeof(*view) / 8];
	size_t i;

	memcpy(words, view, sizeof(*view));
	for (i = 0; i < sizeof(*view) / 8; i++)
		_mm_stream_si64((long long *)at + i, (long long)words[i]);
#else
	*at = *view;
#endif
}

static inline void end_streaming(void)
{
#ifdef __x86_64__
	_mm_sfence();
#endif
}

#endif /* RDMAVIEW_STREAM_H */
