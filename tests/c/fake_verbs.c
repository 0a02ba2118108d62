/*
 * A libibverbs without a device behind it, to see what is said when things are missing.
 *
 * Told by the environment, as numbers:
 *   FAKE_DEVICES   devices that are listed: fake0, fake1, ... (3); -1: the list fails
 *   FAKE_LIST      errno of a list that fails
 *   FAKE_OPEN      errnos of opening each device, as "13,19,0"; 0 opens it (all 0)
 *   FAKE_STATES    state of each device's port, as "1,4" (all 4, active)
 *   FAKE_REG       errno of every registration; 0 registers (0)
 *   FAKE_FORK      what ibv_is_fork_initialized answers (2, unneeded)
 *   FAKE_FORK_INIT what ibv_fork_init returns (0)
 *   FAKE_GIDS      the GID table: "type:32 hex digits" with commas between (empty)
 * Told to the compiler, the newer symbols that it lacks:
 *   LACKS_REG_MR_IOVA2, LACKS_REG_MR_IOVA, LACKS_GID_TABLE, LACKS_FORK_STATUS
 *   LACKS_REG_MR: not newer, so that it is no libibverbs at all
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_query_port

#define MOST_DEVICES 8

static struct ibv_device devices[MOST_DEVICES];

static long number(const char *name, long otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

static long number_at(const char *name, int index, long otherwise)
{
    const char *text = getenv(name);

    while (text && *text && index--) {
        text = strchr(text, ',');
        text = text ? text + 1 : NULL;
    }
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    long wanted = number("FAKE_DEVICES", 3);
    struct ibv_device **list;

    if (wanted < 0) {
        errno = (int)number("FAKE_LIST", ENOSYS);
        return NULL;
    }
    list = calloc((size_t)wanted + 1, sizeof(*list));
    for (int i = 0; i < wanted && i < MOST_DEVICES; i++) {
        snprintf(devices[i].name, sizeof(devices[i].name), "fake%d", i);
        snprintf(devices[i].dev_name, sizeof(devices[i].dev_name), "uverbs9%d", i);
        list[i] = &devices[i];
    }
    if (count)
        *count = (int)wanted;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

static int poll_nothing(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    (void)cq, (void)most, (void)wc;
    return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    int error = (int)number_at("FAKE_OPEN", (int)(device - devices), 0);
    struct ibv_context *context;

    if (error) {
        errno = error;
        return NULL;
    }
    context = calloc(1, sizeof(*context));
    context->device = device;
    context->ops.poll_cq = poll_nothing;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    (void)context;
    memset(attr, 0, sizeof(*attr));
    attr->max_mr_size = UINT64_MAX;
    attr->max_mr = 1000;
    attr->max_cqe = attr->max_qp_wr = attr->max_sge = 1024;
    attr->phys_port_cnt = 1;
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat)
{
    struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;

    (void)port;
    attr->state = (enum ibv_port_state)number_at("FAKE_STATES", (int)(context->device - devices),
                                                 IBV_PORT_ACTIVE);
    attr->max_mtu = attr->active_mtu = IBV_MTU_1024;
    attr->max_msg_sz = 1u << 20;
    attr->gid_tbl_len = 16;
    attr->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof(*pd));

    pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

/* What was registered can be read back from the keys: which call, and with which rights. */
static struct ibv_mr *fake_mr(struct ibv_pd *pd, uint32_t call, unsigned access)
{
    int error = (int)number("FAKE_REG", 0);
    struct ibv_mr *mr;

    if (error) {
        errno = error;
        return NULL;
    }
    mr = calloc(1, sizeof(*mr));
    mr->pd = pd;
    mr->context = pd->context;
    mr->lkey = call;
    mr->rkey = access;
    return mr;
}

#ifndef LACKS_REG_MR
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    (void)addr, (void)length;
    return fake_mr(pd, 1, (unsigned)access);
}
#endif

#ifndef LACKS_REG_MR_IOVA
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                               int access)
{
    (void)addr, (void)length, (void)iova;
    return fake_mr(pd, 2, (unsigned)access);
}
#endif

#ifndef LACKS_REG_MR_IOVA2
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned access)
{
    (void)addr, (void)length, (void)iova;
    return fake_mr(pd, 3, access);
}
#endif

int ibv_dereg_mr(struct ibv_mr *mr)
{
    free(mr);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *user,
                             struct ibv_comp_channel *channel, int vector)
{
    struct ibv_cq *cq = calloc(1, sizeof(*cq));

    (void)user, (void)channel, (void)vector;
    cq->context = context;
    cq->cqe = cqe;
    return cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
    free(cq);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct ibv_qp *qp = calloc(1, sizeof(*qp));

    (void)attr;
    qp->context = pd->context;
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    (void)qp, (void)attr, (void)mask;
    return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init)
{
    (void)qp, (void)attr, (void)mask, (void)init;
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    free(qp);
    return 0;
}

int ibv_fork_init(void)
{
    return (int)number("FAKE_FORK_INIT", 0);
}

#ifndef LACKS_FORK_STATUS
enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return (enum ibv_fork_status)number("FAKE_FORK", IBV_FORK_UNNEEDED);
}
#endif

#ifndef LACKS_GID_TABLE
ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                             size_t most, uint32_t flags, size_t entry_size)
{
    const char *text = getenv("FAKE_GIDS");
    size_t count = 0;

    (void)context, (void)flags;
    if (entry_size != sizeof(*entries))
        return -EINVAL;
    for (; text && *text && count < most; count++) {
        struct ibv_gid_entry *entry = &entries[count];

        memset(entry, 0, sizeof(*entry));
        entry->gid_index = (uint32_t)count;
        entry->port_num = 1;
        entry->gid_type = (uint32_t)strtol(text, NULL, 0);
        text = strchr(text, ':') + 1;
        for (int i = 0; i < 16; i++, text += 2) {
            char digits[3] = {text[0], text[1], 0};

            entry->gid.raw[i] = (uint8_t)strtol(digits, NULL, 16);
        }
        text = *text == ',' ? text + 1 : text;
    }
    return (ssize_t)count;
}
#endif
