/* The devices, their contexts, and what can be asked of them. */
#include "internal.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef ibv_query_port

/* Private to libibverbs: its programs call them, no installed header declares them. */
enum ibv_gid_type_sysfs { IBV_GID_TYPE_SYSFS_IB_ROCE_V1, IBV_GID_TYPE_SYSFS_ROCE_V2 };
int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index,
                       enum ibv_gid_type_sysfs *type);
const char *ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);

#define PORT 1
#define DEFAULT_PKEY 0xffff
#define WIDTH_4X 2
#define SPEED_25_GBPS 32
#define PHYS_STATE_LINK_UP 5

#define DEVICE(number, last_byte)                                                                  \
    {                                                                                              \
        .ibv = {.node_type = IBV_NODE_CA,                                                          \
                .transport_type = IBV_TRANSPORT_IB,                                                \
                .name = "soft" #number,                                                            \
                .dev_name = "uverbs-soft" #number,                                                 \
                .dev_path = "/sys/class/infiniband_verbs/uverbs-soft" #number,                     \
                .ibdev_path = "/sys/class/infiniband/soft" #number},                               \
        .guid = 0x005057fffe000000u + last_byte, .ipv4 = {192, 0, 2, last_byte},                   \
    }

static struct soft_device devices[] = {DEVICE(0, 10), DEVICE(1, 11)};

#define DEVICE_COUNT ((int)(sizeof(devices) / sizeof(devices[0])))

static const struct soft_device *device_find(const struct ibv_device *handle)
{
    for (int i = 0; i < DEVICE_COUNT; i++)
        if (handle == &devices[i].ibv)
            return &devices[i];
    return NULL;
}

/* As on a RoCE host: each address twice, and the routable RoCE v2 one comes last. */
int device_gid(const struct soft_device *device, uint32_t index, union ibv_gid *gid)
{
    if (index >= GID_COUNT)
        return EINVAL;
    memset(gid, 0, sizeof(*gid));
    if (index < 2) {
        gid->global.subnet_prefix = htobe64(0xfe80000000000000u);
        gid->global.interface_id = htobe64(device->guid ^ 0x0200000000000000u);
    } else {
        memset(gid->raw + 10, 0xff, 2);
        memcpy(gid->raw + 12, device->ipv4, sizeof(device->ipv4));
    }
    return 0;
}

enum ibv_gid_type device_gid_type(uint32_t index)
{
    return index % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
}

struct ibv_device **ibv_get_device_list(int *num_devices)
{
    struct ibv_device **list;
    int result;

    if (num_devices)
        *num_devices = 0;
    if (verb_fails(VERB_get_device_list, &result))
        return NULL;
    list = calloc(DEVICE_COUNT + 1, sizeof(*list));
    if (!list)
        return NULL;
    for (int i = 0; i < DEVICE_COUNT; i++)
        list[i] = &devices[i].ibv;
    if (num_devices)
        *num_devices = DEVICE_COUNT;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *handle)
{
    const struct soft_device *device = device_find(handle);

    return device ? device->ibv.name : NULL;
}

__be64 ibv_get_device_guid(struct ibv_device *handle)
{
    const struct soft_device *device = device_find(handle);

    return device ? htobe64(device->guid) : 0;
}

int ibv_get_device_index(struct ibv_device *handle)
{
    (void)handle;
    return -1; /* no kernel knows this device */
}

int context_find(struct ibv_context *handle, struct soft_context **found)
{
    struct object *object;
    int error = object_find(KIND_CONTEXT, handle, &object);

    if (!error)
        *found = container_of(object, struct soft_context, object);
    return error;
}

/* Devices are never freed, so a context's device may be used without the lock. */
static int device_of(struct ibv_context *handle, const struct soft_device **device)
{
    struct soft_context *context;
    int error;

    pthread_mutex_lock(&state_lock);
    error = context_find(handle, &context);
    if (!error)
        *device = context->device;
    pthread_mutex_unlock(&state_lock);
    return error;
}

static void fill_device_attr(const struct soft_device *device, struct ibv_device_attr *attr)
{
    *attr = (struct ibv_device_attr){
        .fw_ver = "soft-1.0",
        .node_guid = htobe64(device->guid),
        .sys_image_guid = htobe64(device->guid),
        .max_mr_size = limit(LIMIT_max_mr_size),
        .page_size_cap = 0xfffff000u,
        .vendor_id = 0xffffff,
        .max_qp = (int)limit(LIMIT_max_qp),
        .max_qp_wr = (int)limit(LIMIT_max_qp_wr),
        .device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SYS_IMAGE_GUID |
                            IBV_DEVICE_CURR_QP_STATE_MOD,
        .max_sge = (int)limit(LIMIT_max_sge),
        .max_sge_rd = (int)limit(LIMIT_max_sge_rd),
        .max_cq = (int)limit(LIMIT_max_cq),
        .max_cqe = (int)limit(LIMIT_max_cqe),
        .max_mr = (int)limit(LIMIT_max_mr),
        .max_pd = (int)limit(LIMIT_max_pd),
        .max_qp_rd_atom = (int)limit(LIMIT_max_qp_rd_atom),
        .max_res_rd_atom = (int)limit(LIMIT_max_res_rd_atom),
        .max_qp_init_rd_atom = (int)limit(LIMIT_max_qp_init_rd_atom),
        .atomic_cap = IBV_ATOMIC_NONE,
        .max_ah = (int)limit(LIMIT_max_ah),
        .max_pkeys = 1,
        .local_ca_ack_delay = 15,
        .phys_port_cnt = 1,
    };
}

int ibv_query_device(struct ibv_context *handle, struct ibv_device_attr *attr)
{
    const struct soft_device *device;
    int result;

    if (verb_fails(VERB_query_device, &result))
        return result;
    result = device_of(handle, &device);
    if (!result)
        fill_device_attr(device, attr);
    return result;
}

static int query_device_ex(struct ibv_context *handle,
                           const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size)
{
    const struct soft_device *device;
    struct ibv_device_attr_ex full = {.phys_port_cnt_ex = 1};
    int result;

    if (verb_fails(VERB_query_device, &result))
        return result;
    result = device_of(handle, &device);
    if (result)
        return result;
    if ((input && input->comp_mask) || size < sizeof(full.orig_attr))
        return EINVAL;
    fill_device_attr(device, &full.orig_attr);
    full.device_cap_flags_ex = full.orig_attr.device_cap_flags;
    full.odp_caps.general_caps = limit(LIMIT_odp_general_caps);
    full.odp_caps.per_transport_caps.rc_odp_caps = (uint32_t)limit(LIMIT_odp_rc_caps);
    memset(attr, 0, size);
    memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return 0;
}

static int query_port(struct ibv_context *handle, uint8_t port, struct ibv_port_attr *attr,
                      size_t size)
{
    const struct soft_device *device;
    struct ibv_port_attr full = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = GID_COUNT,
        .port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
        .max_msg_sz = (uint32_t)limit(LIMIT_max_msg_sz),
        .pkey_tbl_len = 1,
        .max_vl_num = 1,
        .active_width = WIDTH_4X,
        .active_speed = SPEED_25_GBPS,
        .phys_state = PHYS_STATE_LINK_UP,
        .link_layer = IBV_LINK_LAYER_ETHERNET,
        .flags = IBV_QPF_GRH_REQUIRED,
    };
    int result;

    if (verb_fails(VERB_query_port, &result))
        return result;
    result = device_of(handle, &device);
    if (result)
        return result;
    if (port != PORT)
        return EINVAL;
    memset(attr, 0, size);
    memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return 0;
}

/* Programs built before port_cap_flags2 give a shorter struct. */
int ibv_query_port(struct ibv_context *handle, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    return query_port(handle, port, (struct ibv_port_attr *)attr,
                      offsetof(struct ibv_port_attr, port_cap_flags2));
}

static int query_gid(struct ibv_context *handle, uint32_t port, uint32_t index, union ibv_gid *gid)
{
    const struct soft_device *device;
    int result;

    if (verb_fails(VERB_query_gid, &result))
        return result;
    result = device_of(handle, &device);
    if (result)
        return result;
    return port == PORT ? device_gid(device, index, gid) : EINVAL;
}

int ibv_query_gid(struct ibv_context *handle, uint8_t port, int index, union ibv_gid *gid)
{
    int result = query_gid(handle, port, (uint32_t)index, gid);

    if (result > 0)
        errno = result;
    return result ? -1 : 0;
}

static void fill_gid_entry(uint32_t index, const union ibv_gid *gid, void *entry, size_t size)
{
    struct ibv_gid_entry full = {
        .gid = *gid,
        .gid_index = index,
        .port_num = PORT,
        .gid_type = device_gid_type(index),
    };

    memset(entry, 0, size);
    memcpy(entry, &full, size < sizeof(full) ? size : sizeof(full));
}

int _ibv_query_gid_ex(struct ibv_context *handle, uint32_t port, uint32_t index,
                      struct ibv_gid_entry *entry, uint32_t flags, size_t size)
{
    union ibv_gid gid;
    int result = flags ? EOPNOTSUPP : query_gid(handle, port, index, &gid);

    if (!result)
        fill_gid_entry(index, &gid, entry, size);
    return result;
}

ssize_t _ibv_query_gid_table(struct ibv_context *handle, struct ibv_gid_entry *entries,
                             size_t capacity, uint32_t flags, size_t size)
{
    if (flags)
        return -EOPNOTSUPP;
    if (capacity < GID_COUNT)
        return -EINVAL;
    for (uint32_t i = 0; i < GID_COUNT; i++) {
        union ibv_gid gid;
        int result = query_gid(handle, PORT, i, &gid);

        if (result)
            return result < 0 ? -errno : -result;
        fill_gid_entry(i, &gid, (char *)entries + i * size, size);
    }
    return GID_COUNT;
}

int ibv_query_gid_type(struct ibv_context *handle, uint8_t port, unsigned int index,
                       enum ibv_gid_type_sysfs *type)
{
    const struct soft_device *device;
    int error = device_of(handle, &device);

    if (!error && (port != PORT || index >= GID_COUNT))
        error = EINVAL;
    if (error) {
        errno = error;
        return -1;
    }
    *type = device_gid_type(index) == IBV_GID_TYPE_ROCE_V2 ? IBV_GID_TYPE_SYSFS_ROCE_V2
                                                           : IBV_GID_TYPE_SYSFS_IB_ROCE_V1;
    return 0;
}

int ibv_query_pkey(struct ibv_context *handle, uint8_t port, int index, __be16 *pkey)
{
    const struct soft_device *device;
    int result;

    if (verb_fails(VERB_query_pkey, &result))
        return -1;
    result = device_of(handle, &device);
    if (!result && (port != PORT || index != 0))
        result = EINVAL;
    if (result) {
        errno = result;
        return -1;
    }
    *pkey = htobe16(DEFAULT_PKEY);
    return 0;
}

int ibv_get_pkey_index(struct ibv_context *handle, uint8_t port, __be16 pkey)
{
    __be16 only;

    if (ibv_query_pkey(handle, port, 0, &only))
        return -1;
    if (pkey == only)
        return 0;
    errno = ENOENT;
    return -1;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    (void)srq;
    *bad_wr = wr;
    return EOPNOTSUPP;
}

struct ibv_context *ibv_open_device(struct ibv_device *handle)
{
    const struct soft_device *device = device_find(handle);
    struct soft_context *context;
    int result;

    if (verb_fails(VERB_open_device, &result))
        return NULL;
    if (!device) {
        errno = EINVAL;
        return NULL;
    }
    context = calloc(1, sizeof(*context));
    if (!context)
        return NULL;
    result = mailbox_open(&context->async);
    if (result) {
        free(context);
        errno = result;
        return NULL;
    }
    context->device = device;
    context->verbs.sz = sizeof(context->verbs);
    context->verbs.query_port = query_port;
    context->verbs.query_device_ex = query_device_ex;
    context->verbs.context = (struct ibv_context){
        .device = handle,
        .ops = {.poll_cq = soft_poll_cq,
                .req_notify_cq = soft_req_notify_cq,
                .post_srq_recv = post_srq_recv,
                .post_send = soft_post_send,
                .post_recv = soft_post_recv},
        .cmd_fd = -1,
        .async_fd = context->async.fd,
        .num_comp_vectors = 1,
        .abi_compat = __VERBS_ABI_IS_EXTENDED,
    };
    pthread_mutex_init(&context->verbs.context.mutex, NULL);

    pthread_mutex_lock(&state_lock);
    object_add(&context->object, KIND_CONTEXT, &context->verbs.context, context, UINT64_MAX);
    pthread_mutex_unlock(&state_lock);
    return &context->verbs.context;
}

/*
 * libibverbs pulls the context from under its children; here they are counted, and closing is
 * refused.  errno is set too, since the manual page speaks of -1 and errno.
 */
int ibv_close_device(struct ibv_context *handle)
{
    struct soft_context *context;
    int result;

    if (verb_fails(VERB_close_device, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = context_find(handle, &context);
    if (!result && context->children)
        result = EBUSY;
    if (!result) {
        object_remove(&context->object);
        mailbox_close(&context->async);
        object_free(&context->object);
    }
    pthread_mutex_unlock(&state_lock);
    errno = result;
    return result;
}

int ibv_get_async_event(struct ibv_context *handle, struct ibv_async_event *event)
{
    struct soft_context *context = NULL;
    struct notice *notice = NULL;
    int result;

    if (verb_fails(VERB_get_async_event, &result))
        return -1;
    pthread_mutex_lock(&state_lock);
    result = context_find(handle, &context);
    pthread_mutex_unlock(&state_lock);
    while (!result && !notice) {
        result = mailbox_wait(&context->async);
        if (result)
            break;
        pthread_mutex_lock(&state_lock);
        notice = mailbox_take(&context->async);
        if (notice) {
            event->element.cq = notice->element;
            event->event_type = notice->type;
        }
        pthread_mutex_unlock(&state_lock);
    }
    errno = result;
    return result ? -1 : 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event; /* nothing waits for it: an event is taken back when its object goes */
}

const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size)
{
    char path[IBV_SYSFS_PATH_MAX * 2];
    ssize_t length;
    int fd;

    for (int i = 0; i < DEVICE_COUNT; i++) {
        if (strcmp(dir, devices[i].ibv.ibdev_path) && strcmp(dir, devices[i].ibv.dev_path))
            continue;
        if (!strcmp(file, "board_id") || !strcmp(file, "hca_type"))
            return snprintf(buf, size, "soft");
        errno = ENOENT;
        return -1;
    }

    if (snprintf(path, sizeof(path), "%s/%s", dir, file) >= (int)sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    length = read(fd, buf, size);
    close(fd);
    if (length > 0) {
        if (buf[length - 1] == '\n')
            buf[--length] = '\0';
        else if ((size_t)length < size)
            buf[length] = '\0';
        else
            return -1;
    }
    return (int)length;
}
