/* The device library's own header, or one line on how to get it. */
#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#else
#error "rdmaview needs <infiniband/verbs.h>: install libibverbs-dev (Debian, Ubuntu) or rdma-core-devel (Fedora, RHEL)"
#endif
