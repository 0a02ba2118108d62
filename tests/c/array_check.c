/*
 * Answers what rdmaview.h makes of an array of packed views, which is on stdin. All of
 * it is packed, one thing after the other; what may be fewer than the views has its
 * count before it.
 *
 * hashes; those from the last to the first; remote views; their hashes; neighbours
 * joined; remote neighbours joined; wire forms; remote wire forms; how many of both
 * come back from them as they were; slices of 8 bytes of the first view, as many as
 * there are views and fit; the same of its remote view.
 */
#include "rdmaview.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 4096 };

static void put(const void *items, size_t size, size_t count)
{
	if (fwrite(items, size, count, stdout) != count)
		exit(1);
}

static void put_counted(const void *items, size_t size, size_t count)
{
	uint64_t number = count;

	put(&number, sizeof(number), 1);
	put(items, size, count);
}

static void put_hashes(const rdmaview_view *views, size_t count)
{
	static uint64_t hashes[MOST];
	const ptrdiff_t stride = sizeof(*views);

	rdmaview_hash_many(views, stride, count, hashes);
	put(hashes, sizeof(*hashes), count);
	rdmaview_hash_many(views + count - 1, -stride, count, hashes);
	put(hashes, sizeof(*hashes), count);
}

static void put_remotes(const rdmaview_view *views, size_t count,
			rdmaview_remote *remotes)
{
	static uint64_t hashes[MOST];

	rdmaview_to_remote_many(views, sizeof(*views), count, remotes);
	put(remotes, sizeof(*remotes), count);
	rdmaview_remote_hash_many(remotes, sizeof(*remotes), count, hashes);
	put(hashes, sizeof(*hashes), count);
}

static void put_joined(const rdmaview_view *views, const rdmaview_remote *remotes,
		       size_t count)
{
	static rdmaview_view joined[MOST];
	static rdmaview_remote far_joined[MOST];

	put_counted(joined, sizeof(*joined),
		    rdmaview_coalesce(views, sizeof(*views), count, joined));
	put_counted(far_joined, sizeof(*far_joined),
		    rdmaview_remote_coalesce(remotes, sizeof(*remotes), count,
					     far_joined));
}

static void put_wire(const rdmaview_view *views, const rdmaview_remote *remotes,
		     size_t count)
{
	static unsigned char wire[MOST][RDMAVIEW_PACKED_SIZE];
	static unsigned char far_wire[MOST][RDMAVIEW_REMOTE_PACKED_SIZE];
	uint64_t same = 0;
	size_t i;

	for (i = 0; i < count; i++) {
		rdmaview_view view;
		rdmaview_remote remote;

		rdmaview_pack(&views[i], wire[i]);
		rdmaview_remote_pack(&remotes[i], far_wire[i]);
		same += rdmaview_unpack(wire[i], &view) &&
			rdmaview_equal(&view, &views[i]) &&
			rdmaview_remote_unpack(far_wire[i], &remote) &&
			rdmaview_remote_equal(&remote, &remotes[i]);
	}
	put(wire, sizeof(*wire), count);
	put(far_wire, sizeof(*far_wire), count);
	put(&same, sizeof(same), 1);
}

static void put_slices(const rdmaview_view *whole, size_t count)
{
	static rdmaview_view slices[MOST];
	static rdmaview_remote far_slices[MOST];
	static uint64_t offsets[MOST];
	const uint64_t size = 8;
	const rdmaview_remote far_whole = rdmaview_to_remote(whole);
	size_t i;

	for (i = 0; i < count; i++)
		offsets[i] = 8 * i;
	put_counted(slices, sizeof(*slices),
		    rdmaview_slice_many(whole, offsets, 1, &size, 0, count,
					slices));
	put_counted(far_slices, sizeof(*far_slices),
		    rdmaview_remote_slice_many(&far_whole, offsets, 1, &size, 0,
					       count, far_slices));
}

int main(void)
{
	static rdmaview_view views[MOST];
	static rdmaview_remote remotes[MOST];
	size_t count = fread(views, sizeof(*views), MOST, stdin);

	if (count == 0)
		return 1;
	put_hashes(views, count);
	put_remotes(views, count, remotes);
	put_joined(views, remotes, count);
	put_wire(views, remotes, count);
	put_slices(views, count);
	return fflush(stdout) != 0;
}
