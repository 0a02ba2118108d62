/*
 * Answers, in numbers, what rdmaview.h makes of the views on stdin. The header comes
 * first: it must not lean on another one.
 *
 * A line in: the six fields of a, the six fields of b, an offset and a size.
 * A line out: hash, remote hash; contains, overlaps, equal; those of the remote
 * forms; does the slice fit, its six fields; does the remote slice, its four.
 */
#include "rdmaview.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

static int read_view(rdmaview_view *view)
{
	return scanf("%" SCNu64 "%" SCNu64 "%" SCNu64 "%" SCNu64 "%" SCNu32
		     "%" SCNu32,
		     &view->id, &view->virtual_addr, &view->rdma_addr,
		     &view->size, &view->lkey, &view->rkey) == 6;
}

static void answer(const rdmaview_view *a, const rdmaview_view *b,
		   uint64_t offset, uint64_t size)
{
	rdmaview_remote far_a = rdmaview_to_remote(a);
	rdmaview_remote far_b = rdmaview_to_remote(b);
	rdmaview_view slice = *a;
	rdmaview_remote far_slice = far_a;
	bool fits = rdmaview_slice(a, offset, size, &slice);
	bool far_fits = rdmaview_remote_slice(&far_a, offset, size, &far_slice);

	printf("%" PRIu64 " %" PRIu64, rdmaview_hash(a),
	       rdmaview_remote_hash(&far_a));
	printf(" %d %d %d", rdmaview_contains(a, b), rdmaview_overlaps(a, b),
	       rdmaview_equal(a, b));
	printf(" %d %d %d", rdmaview_remote_contains(&far_a, &far_b),
	       rdmaview_remote_overlaps(&far_a, &far_b),
	       rdmaview_remote_equal(&far_a, &far_b));
	printf(" %d %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu32
	       " %" PRIu32,
	       fits, slice.id, slice.virtual_addr, slice.rdma_addr, slice.size,
	       slice.lkey, slice.rkey);
	printf(" %d %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu32 "\n",
	       far_fits, far_slice.id, far_slice.rdma_addr, far_slice.size,
	       far_slice.rkey);
}

int main(void)
{
	rdmaview_view a;
	rdmaview_view b;
	uint64_t offset;
	uint64_t size;

	printf("%zu %zu %zu %zu %zu %zu %zu\n", sizeof(rdmaview_view),
	       offsetof(rdmaview_view, id),
	       offsetof(rdmaview_view, virtual_addr),
	       offsetof(rdmaview_view, rdma_addr),
	       offsetof(rdmaview_view, size), offsetof(rdmaview_view, lkey),
	       offsetof(rdmaview_view, rkey));
	while (read_view(&a) && read_view(&b) &&
	       scanf("%" SCNu64 "%" SCNu64, &offset, &size) == 2)
		answer(&a, &b, offset, size);
	return ferror(stdin) || ferror(stdout) || fflush(stdout) != 0;
}
