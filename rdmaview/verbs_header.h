/* The device library's own header, or one line on how to get it. */
#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#else
#error "rdmaview needs <infiniband/verbs.h>: install libibverbs-dev (Debian, Ubuntu) or rdma-core-devel (Fedora, RHEL)"
#endif

#include <errno.h>

/* As ibv_query_device_ex, which would link with libibverbs for devices that lack it. */
static inline int query_device_ex(struct ibv_context *context,
				  struct ibv_device_attr_ex *attributes)
{
	struct verbs_context *device = verbs_get_ctx_op(context, query_device_ex);

	if (!device)
		return EOPNOTSUPP;
	return device->query_device_ex(context, NULL, attributes,
				       sizeof(*attributes));
}
