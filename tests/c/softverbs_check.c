/*
 * Checks of the soft device in C: one function a behaviour.  From the root of the repository:
 *
 *   gcc -std=gnu11 -Wall -Wextra -Werror -g -O1 -pthread -I rdmaview/softverbs \
 *       -o /tmp/softverbs_check tests/c/softverbs_check.c rdmaview/softverbs/[a-z]*.c
 *   /tmp/softverbs_check            # all; prints each name, exits 0
 *   /tmp/softverbs_check NAME...    # some
 *   /tmp/softverbs_check -NAME...   # all but some
 *
 * Also with -fsanitize=address,undefined, with -fsanitize=thread and under valgrind.  The thread
 * sanitizer can't follow a child that starts threads, and valgrind remarks on the dead addresses
 * that the kernel is given on purpose, so leave out
 *
 *   -fsanitize=thread   -a_child_gets_errors_and_the_parent_goes_on
 *                       -exit_with_work_in_flight_is_clean
 *                       -a_container_that_forbids_process_vm_readv_is_no_obstacle
 *   valgrind            -a_dead_address_is_a_status
 *                       -a_container_that_forbids_process_vm_readv_is_no_obstacle
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "softverbs.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: in %s: %s (errno %d)\n", __FILE__, __LINE__, __func__,         \
                    #condition, errno);                                                            \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#define CHECK_NULL(call, error)                                                                    \
    do {                                                                                           \
        errno = 0;                                                                                 \
        CHECK((call) == NULL);                                                                     \
        CHECK(errno == (error));                                                                   \
    } while (0)

#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)
#define GID_INDEX 3
#define PAGE 4096

/* ---- two connected queue pairs on two devices, with a registered buffer each ---- */

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *buffer;
    size_t size;
};

struct pair {
    struct end a, b;
};

struct options {
    size_t size;
    int cqe;
    uint32_t depth;
    uint32_t recv_depth;
    int signal_all;
    unsigned qp_access;
    int timeout, retry_cnt, rnr_retry;
    int max_rd_atomic;
    int no_connect;
};

static const struct options defaults = {
    .size = 64 * 1024,
    .cqe = 256,
    .depth = 64,
    .recv_depth = 64,
    .qp_access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    .timeout = 8,
    .retry_cnt = 3,
    .rnr_retry = 2,
    .max_rd_atomic = 16,
};

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void nap(double duration)
{
    struct timespec t = {(time_t)duration, (long)((duration - (double)(time_t)duration) * 1e9)};

    nanosleep(&t, NULL);
}

static struct ibv_context *open_soft(int number)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context;

    CHECK(list);
    context = ibv_open_device(list[number]);
    CHECK(context);
    ibv_free_device_list(list);
    return context;
}

static void *map_pages(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    CHECK(memory != MAP_FAILED);
    return memory;
}

static struct ibv_qp *make_qp(struct end *end, const struct options *o)
{
    struct ibv_qp_init_attr init = {
        .send_cq = end->cq,
        .recv_cq = end->cq,
        .cap = {o->depth, o->recv_depth, 8, 8, 256},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = o->signal_all,
    };
    struct ibv_qp *qp = ibv_create_qp(end->pd, &init);

    CHECK(qp);
    return qp;
}

static void open_end(struct end *end, int number, const struct options *o)
{
    end->context = open_soft(number);
    CHECK((end->pd = ibv_alloc_pd(end->context)));
    CHECK((end->cq = ibv_create_cq(end->context, o->cqe, end, NULL, 0)));
    end->qp = make_qp(end, o);
    end->size = o->size;
    end->buffer = map_pages(o->size);
    end->mr = ibv_reg_mr(end->pd, end->buffer, o->size, ALL_ACCESS);
    CHECK(end->mr);
}

static int to_init(struct ibv_qp *qp, const struct options *o)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = o->qp_access};

    return ibv_modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

#define RTR_MASK                                                                                   \
    (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |                \
     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define RTS_MASK                                                                                   \
    (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |         \
     IBV_QP_MAX_QP_RD_ATOMIC)

static struct ibv_qp_attr rtr_attr(struct ibv_context *to, uint32_t number, const struct options *o)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = number,
        .rq_psn = 7,
        .max_dest_rd_atomic = (uint8_t)o->max_rd_atomic,
        .min_rnr_timer = 14,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.sgid_index = GID_INDEX, .hop_limit = 1}},
    };

    CHECK(!ibv_query_gid(to, 1, GID_INDEX, &attr.ah_attr.grh.dgid));
    return attr;
}

static struct ibv_qp_attr rts_attr(const struct options *o)
{
    return (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .timeout = (uint8_t)o->timeout,
        .retry_cnt = (uint8_t)o->retry_cnt,
        .rnr_retry = (uint8_t)o->rnr_retry,
        .sq_psn = 7,
        .max_rd_atomic = (uint8_t)o->max_rd_atomic,
    };
}

static void connect_to(struct ibv_qp *qp, struct ibv_context *to, uint32_t number,
                       const struct options *o)
{
    struct ibv_qp_attr rtr = rtr_attr(to, number, o), rts = rts_attr(o);

    CHECK(!to_init(qp, o));
    CHECK(!ibv_modify_qp(qp, &rtr, RTR_MASK));
    CHECK(!ibv_modify_qp(qp, &rts, RTS_MASK));
}

static void connect_pair(struct pair *pair, const struct options *o)
{
    connect_to(pair->a.qp, pair->b.context, pair->b.qp->qp_num, o);
    connect_to(pair->b.qp, pair->a.context, pair->a.qp->qp_num, o);
}

static struct pair open_pair(const struct options *o)
{
    struct pair pair;

    open_end(&pair.a, 0, o);
    open_end(&pair.b, 1, o);
    if (!o->no_connect)
        connect_pair(&pair, o);
    return pair;
}

static void close_end(struct end *end)
{
    if (end->qp)
        CHECK(!ibv_destroy_qp(end->qp));
    if (end->mr)
        CHECK(!ibv_dereg_mr(end->mr));
    CHECK(!ibv_destroy_cq(end->cq));
    CHECK(!ibv_dealloc_pd(end->pd));
    CHECK(!ibv_close_device(end->context));
    munmap(end->buffer, end->size);
}

static void close_pair(struct pair *pair)
{
    close_end(&pair->a);
    close_end(&pair->b);
}

/* ---- posting and polling ---- */

static struct ibv_sge sge_of(const struct end *end, size_t offset, uint32_t length)
{
    return (struct ibv_sge){(uintptr_t)end->mr->addr + offset, length, end->mr->lkey};
}

static struct ibv_send_wr request(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *sge,
                                  const struct end *peer, size_t offset)
{
    struct ibv_send_wr wr = {
        .wr_id = wr_id,
        .sg_list = sge,
        .num_sge = 1,
        .opcode = opcode,
        .send_flags = IBV_SEND_SIGNALED,
    };

    wr.wr.rdma.remote_addr = (uintptr_t)peer->mr->addr + offset;
    wr.wr.rdma.rkey = peer->mr->rkey;
    return wr;
}

static int post(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad = NULL;
    int error = ibv_post_send(qp, wr, &bad);

    CHECK(!error || bad);
    return error;
}

static int post_receive(struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
    struct ibv_sge sge = sge_of(end, offset, length);
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    return ibv_post_recv(end->qp, &wr, &bad);
}

static struct ibv_wc wait_for_one(struct ibv_cq *cq)
{
    double end = seconds() + 20;
    struct ibv_wc wc;
    int count;

    while (!(count = ibv_poll_cq(cq, 1, &wc))) {
        CHECK(seconds() < end);
        sched_yield();
    }
    CHECK(count == 1);
    return wc;
}

static void expect(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
    struct ibv_wc wc = wait_for_one(cq);

    if (wc.status != status || wc.wr_id != wr_id)
        fprintf(stderr, "wr_id %llu status %d, expected %llu status %d\n",
                (unsigned long long)wc.wr_id, wc.status, (unsigned long long)wr_id, status);
    CHECK(wc.wr_id == wr_id);
    CHECK(wc.status == status);
}

static void expect_nothing(struct ibv_cq *cq)
{
    struct ibv_wc wc;

    CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
}

static enum ibv_qp_state state_of(struct ibv_qp *qp)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;

    CHECK(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
    CHECK(qp->state == attr.qp_state);
    return attr.qp_state;
}

static uint64_t counter(const char *name)
{
    const char *names[128];
    uint64_t values[128];
    size_t count = softverbs_counters(names, values, 128);

    CHECK(count <= 128);
    for (size_t i = 0; i < count; i++)
        if (!strcmp(names[i], name))
            return values[i];
    CHECK(!"a counter of that name");
    return 0;
}

static void fill(uint8_t *bytes, size_t size, unsigned seed)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(seed = seed * 1103515245u + 12345u, seed >> 16);
}

/* Runs a part of a check in a child, and takes over its verdict. */
static pid_t start_child(void (*body)(void *), void *argument)
{
    pid_t pid = fork();

    CHECK(pid >= 0);
    if (!pid) {
        alarm(60);
        body(argument);
        _exit(0);
    }
    return pid;
}

static void in_child(void (*body)(void *), void *argument)
{
    int status;

    CHECK(waitpid(start_child(body, argument), &status, 0) > 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- devices ---- */

static void devices_show_themselves_as_soft(void)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);

    CHECK(list && count == 2 && !list[2]);
    CHECK(!strcmp(ibv_get_device_name(list[0]), "soft0"));
    CHECK(!strcmp(ibv_get_device_name(list[1]), "soft1"));
    CHECK(!strcmp(list[0]->dev_name, "uverbs-soft0"));
    CHECK(ibv_get_device_guid(list[0]));
    CHECK(ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]));
    ibv_free_device_list(list);
}

static void query_answers_limits_as_configured(void)
{
    struct ibv_context *context = open_soft(0);
    struct ibv_device_attr attr;
    struct ibv_device_attr_ex attr_ex;
    struct ibv_port_attr port;

    CHECK(!ibv_query_device(context, &attr));
    CHECK(!strcmp(attr.fw_ver, "soft-1.0") && attr.max_mr_size == UINT64_MAX);
    CHECK(!ibv_query_port(context, 1, &port));
    CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
    CHECK(port.max_msg_sz == 0x40000000 && port.gid_tbl_len == 4);
    CHECK(ibv_query_port(context, 2, &port) == EINVAL);

    CHECK(!softverbs_configure("max_mr", 5));
    CHECK(!softverbs_configure("max_msg_sz", 4096));
    CHECK(softverbs_configure("max_nonsense", 1) == ENOENT);
    CHECK(softverbs_configure(NULL, 1) == ENOENT);
    CHECK(softverbs_configure("max_msg_sz", 0) == EINVAL);
    CHECK(softverbs_configure("max_msg_sz", (uint64_t)1 << 32) == EINVAL);
    CHECK(!ibv_query_device_ex(context, NULL, &attr_ex) && attr_ex.orig_attr.max_mr == 5);
    CHECK(!ibv_query_port(context, 1, &port) && port.max_msg_sz == 4096);
    softverbs_reset();
    CHECK(!ibv_query_device(context, &attr) && attr.max_mr == 0x7ffff);
    CHECK(!ibv_close_device(context));
}

static void gid_table_looks_like_a_roce_host(void)
{
    struct ibv_context *context = open_soft(1);
    struct ibv_gid_entry entries[4], entry;
    union ibv_gid gid;
    const uint8_t mapped[16] = {[10] = 0xff, 0xff, 192, 0, 2, 11};

    CHECK(ibv_query_gid_table(context, entries, 4, 0) == 4);
    CHECK(entries[0].gid_type == IBV_GID_TYPE_ROCE_V1 && entries[0].gid.raw[0] == 0xfe);
    CHECK(entries[1].gid_type == IBV_GID_TYPE_ROCE_V2 && entries[1].gid.raw[0] == 0xfe);
    CHECK(entries[2].gid_type == IBV_GID_TYPE_ROCE_V1 && !memcmp(entries[2].gid.raw, mapped, 16));
    CHECK(entries[3].gid_type == IBV_GID_TYPE_ROCE_V2 && !memcmp(entries[3].gid.raw, mapped, 16));
    CHECK(!ibv_query_gid_ex(context, 1, 3, &entry, 0) && entry.gid_index == 3);
    CHECK(ibv_query_gid_ex(context, 1, 4, &entry, 0) == EINVAL);
    CHECK(ibv_query_gid(context, 1, 4, &gid) == -1 && errno == EINVAL);
    CHECK(ibv_query_gid(context, 1, -1, &gid) == -1 && errno == EINVAL);
    CHECK(!ibv_close_device(context));
}

/* ---- registration ---- */

static void registration_refuses_what_a_kernel_refuses(void)
{
    struct ibv_context *context = open_soft(0);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    uint8_t *pages = map_pages(4 * PAGE);
    uint64_t base = (uintptr_t)pages;
    struct ibv_mr *mr;

    CHECK_NULL(ibv_reg_mr(pd, pages, 0, 0), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, pages, PAGE, IBV_ACCESS_REMOTE_WRITE), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, pages, PAGE, IBV_ACCESS_REMOTE_ATOMIC), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, pages, PAGE, IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
    CHECK_NULL(ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, pages, SIZE_MAX, 0), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, (void *)(UINTPTR_MAX - 10), 11, 0), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, (void *)(UINTPTR_MAX - 10), 5, 0), EINVAL);
    CHECK_NULL(ibv_reg_mr_iova(pd, pages, PAGE, 8, 0), EINVAL);
    CHECK_NULL(ibv_reg_mr_iova(pd, pages, 2 * PAGE, UINT64_MAX - PAGE + 1, 0), EINVAL);
    CHECK_NULL(ibv_reg_mr(pd, NULL, PAGE, 0), EFAULT);
    CHECK_NULL(ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, -1, 0), EBADF);
    CHECK_NULL(ibv_alloc_null_mr(pd), EOPNOTSUPP);
    CHECK_NULL(ibv_reg_mr(NULL, pages, PAGE, 0), EINVAL);

    munmap(pages + 2 * PAGE, PAGE);
    CHECK_NULL(ibv_reg_mr(pd, pages, 3 * PAGE, 0), EFAULT);
    CHECK_NULL(ibv_reg_mr(pd, pages + 2 * PAGE - 1, 2, 0), EFAULT);
    mprotect(pages + PAGE, PAGE, PROT_READ);
    CHECK_NULL(ibv_reg_mr(pd, pages, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE), EFAULT);
    CHECK((mr = ibv_reg_mr(pd, pages, 2 * PAGE, IBV_ACCESS_REMOTE_READ)));
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) && errno == EOPNOTSUPP);
    CHECK(!ibv_dereg_mr(mr));
    mprotect(pages, PAGE, PROT_NONE);
    CHECK_NULL(ibv_reg_mr(pd, pages, PAGE, 0), EFAULT);

    CHECK((mr = ibv_reg_mr_iova(pd, pages + 3 * PAGE + 16, 64, 16, IBV_ACCESS_LOCAL_WRITE)));
    CHECK(mr->addr == pages + 3 * PAGE + 16 && mr->length == 64 && mr->pd == pd);
    CHECK(!ibv_dereg_mr(mr));
    CHECK(counter("live_mr") == 0 && base);

    CHECK(!softverbs_configure("max_mr_size", PAGE));
    CHECK_NULL(ibv_reg_mr(pd, pages + 3 * PAGE, PAGE + 1, 0), EINVAL);
    softverbs_reset();
    CHECK(!ibv_dealloc_pd(pd));
    CHECK(!ibv_close_device(context));
    munmap(pages, 4 * PAGE);
}

static void keys_differ_and_are_not_used_again_at_once(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    uint32_t keys[1000];

    for (int i = 0; i < 1000; i++) {
        struct ibv_mr *mr = ibv_reg_mr(pair.a.pd, pair.a.buffer, 64, 0);

        CHECK(mr && mr->rkey == (mr->lkey ^ 0x5a5a0000u));
        keys[i] = mr->lkey;
        for (int j = 0; j < i; j++)
            CHECK(keys[i] != keys[j]);
        CHECK(!ibv_dereg_mr(mr));
        CHECK(ibv_dereg_mr(mr) == EINVAL);
    }
    close_pair(&pair);
}

static void a_full_key_table_is_enomem_until_one_is_released(void)
{
    struct ibv_context *context = open_soft(0);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_mr *mrs[8];
    uint8_t *pages = map_pages(9 * PAGE);

    CHECK(!softverbs_configure("max_mr", 8));
    for (int i = 0; i < 8; i++)
        CHECK((mrs[i] = ibv_reg_mr(pd, pages + i * PAGE, PAGE, 0)));
    CHECK_NULL(ibv_reg_mr(pd, pages + 8 * PAGE, PAGE, 0), ENOMEM);
    CHECK(!ibv_dereg_mr(mrs[0]));
    CHECK((mrs[0] = ibv_reg_mr(pd, pages + 8 * PAGE, PAGE, 0)));
    CHECK(counter("live_mr") == 8);
    for (int i = 0; i < 8; i++)
        CHECK(!ibv_dereg_mr(mrs[i]));
    softverbs_reset();
    CHECK(!ibv_dealloc_pd(pd));
    CHECK(!ibv_close_device(context));
    munmap(pages, 9 * PAGE);
}

static void a_sparse_mapping_registers_at_once_and_stays_sparse(void)
{
    struct ibv_context *context = open_soft(0);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    size_t size = (size_t)16 << 30;
    uint8_t *memory = map_pages(size);
    double start = seconds();
    struct ibv_mr *mr = ibv_reg_mr_iova(pd, memory, size, 0, ALL_ACCESS);
    unsigned char resident[16];

    CHECK(mr && mr->length == size);
    CHECK(seconds() - start < 0.5);
    CHECK(!mincore(memory, 16 * PAGE, resident) && !(resident[0] & 1));
    CHECK(!ibv_dereg_mr(mr));
    CHECK(!ibv_dealloc_pd(pd));
    CHECK(!ibv_close_device(context));
    munmap(memory, size);
}

static void without_capability(void *unused)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0, 0, 0}, {0, 0, 0}};
    struct rlimit limit = {65536, 65536};
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *first, *second;
    uint8_t *memory = map_pages(1 << 20);

    (void)unused;
    CHECK(!syscall(SYS_capset, &header, data));
    CHECK(!setrlimit(RLIMIT_MEMLOCK, &limit));
    context = open_soft(0);
    pd = ibv_alloc_pd(context);
    CHECK((first = ibv_reg_mr(pd, memory, 32768, 0)));
    CHECK(!ibv_dereg_mr(first));
    CHECK_NULL(ibv_reg_mr(pd, memory, 1 << 20, 0), ENOMEM);
    CHECK((first = ibv_reg_mr(pd, memory, 40960, 0)));
    CHECK_NULL(ibv_reg_mr(pd, memory + 65536, 40960, 0), ENOMEM);
    /* Two bytes over a page's border are two pages. */
    CHECK((second = ibv_reg_mr(pd, memory + 65536 + PAGE - 1, 2, 0)));
    CHECK_NULL(ibv_reg_mr(pd, memory, 5 * PAGE, 0), ENOMEM);
    CHECK(!ibv_dereg_mr(first));
    CHECK((first = ibv_reg_mr(pd, memory, 5 * PAGE, 0)));
    CHECK(!ibv_dereg_mr(first) && !ibv_dereg_mr(second));
}

static void locked_memory_is_limited_without_the_capability(void)
{
    in_child(without_capability, NULL);
}

/* ---- data ---- */

static void write_and_read_move_the_bytes(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    static const uint32_t sizes[] = {0, 1, 8, 4095, 4096, 65536};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct ibv_sge sge = sge_of(&pair.a, 0, sizes[i]);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, i, &sge, &pair.b, 0);
        struct ibv_wc wc;

        fill(pair.a.buffer, o.size, (unsigned)i);
        memset(pair.b.buffer, 0, o.size);
        CHECK(!post(pair.a.qp, &wr));
        wc = wait_for_one(pair.a.cq);
        CHECK(!wc.status && wc.wr_id == i && wc.opcode == IBV_WC_RDMA_WRITE);
        CHECK(wc.qp_num == pair.a.qp->qp_num);
        CHECK(!memcmp(pair.a.buffer, pair.b.buffer, sizes[i]));
        CHECK(sizes[i] == o.size || !pair.b.buffer[sizes[i]]);

        memset(pair.a.buffer, 0, o.size);
        wr = request(IBV_WR_RDMA_READ, 100 + i, &sge, &pair.b, 0);
        CHECK(!post(pair.a.qp, &wr));
        wc = wait_for_one(pair.a.cq);
        CHECK(!wc.status && wc.wr_id == 100 + i && wc.opcode == IBV_WC_RDMA_READ);
        CHECK(wc.byte_len == sizes[i]);
        CHECK(!memcmp(pair.a.buffer, pair.b.buffer, sizes[i]));
    }
    close_pair(&pair);
}

static void a_queue_pair_may_talk_to_itself(void)
{
    struct options o = defaults;
    struct end end;
    struct ibv_sge sge;
    struct ibv_send_wr wr;

    open_end(&end, 0, &o);
    connect_to(end.qp, end.context, end.qp->qp_num, &o);
    fill(end.buffer, 64, 1);
    sge = sge_of(&end, 0, 64);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &end, 1000);
    CHECK(!post(end.qp, &wr));
    expect(end.cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(end.buffer, end.buffer + 1000, 64));
    wr.wr.rdma.rkey ^= 1;
    CHECK(!post_receive(&end, 9, 0, 1));
    CHECK(!post(end.qp, &wr));
    expect(end.cq, 1, IBV_WC_REM_ACCESS_ERR);
    expect(end.cq, 9, IBV_WC_WR_FLUSH_ERR);
    close_end(&end);
}

static void iova_is_the_address_that_requests_use(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_mr *local = ibv_reg_mr_iova(pair.a.pd, pair.a.buffer, PAGE, 0, 1);
    struct ibv_mr *remote =
        ibv_reg_mr_iova(pair.b.pd, pair.b.buffer, PAGE, 0x100000000, ALL_ACCESS);
    struct ibv_sge sge = {100, 16, local->lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

    CHECK(local && remote);
    fill(pair.a.buffer, PAGE, 3);
    wr.wr.rdma.remote_addr = 0x100000000 + 200;
    wr.wr.rdma.rkey = remote->rkey;
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.a.buffer + 100, pair.b.buffer + 200, 16));
    CHECK(!ibv_dereg_mr(local) && !ibv_dereg_mr(remote));
    close_pair(&pair);
}

static void several_entries_are_gathered_and_scattered(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge from[3] = {sge_of(&pair.a, 0, 10), sge_of(&pair.a, 100, 0),
                              sge_of(&pair.a, 200, 30)};
    struct ibv_sge to[2] = {sge_of(&pair.b, 0, 25), sge_of(&pair.b, 1000, 100)};
    struct ibv_recv_wr receive = {.wr_id = 5, .sg_list = to, .num_sge = 2}, *bad;
    struct ibv_send_wr wr = request(IBV_WR_SEND_WITH_IMM, 1, from, &pair.b, 0);
    struct ibv_wc wc;

    fill(pair.a.buffer, o.size, 4);
    wr.num_sge = 3;
    wr.imm_data = 0x01020304;
    CHECK(!ibv_post_recv(pair.b.qp, &receive, &bad));
    CHECK(!post(pair.a.qp, &wr));
    wc = wait_for_one(pair.a.cq);
    CHECK(!wc.status && wc.wr_id == 1 && wc.opcode == IBV_WC_SEND);
    wc = wait_for_one(pair.b.cq);
    CHECK(!wc.status && wc.wr_id == 5 && wc.opcode == IBV_WC_RECV && wc.byte_len == 40);
    CHECK(wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == 0x01020304);
    CHECK(wc.src_qp == pair.a.qp->qp_num && wc.qp_num == pair.b.qp->qp_num);
    CHECK(!memcmp(pair.b.buffer, pair.a.buffer, 10));
    CHECK(!memcmp(pair.b.buffer + 10, pair.a.buffer + 200, 15));
    CHECK(!memcmp(pair.b.buffer + 1000, pair.a.buffer + 215, 15));
    CHECK(!pair.b.buffer[1015]);
    close_pair(&pair);
}

static void write_with_immediate_takes_a_receive(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 100);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE_WITH_IMM, 1, &sge, &pair.b, 0);
    struct ibv_wc wc;

    wr.imm_data = 77;
    CHECK(!post_receive(&pair.b, 2, 0, 0));
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    wc = wait_for_one(pair.b.cq);
    CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == 77 && wc.byte_len == 100);
    close_pair(&pair);
}

static void inline_data_is_taken_while_posting(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    uint8_t unregistered[257];
    struct ibv_sge sge = {(uintptr_t)unregistered, 256, 0xdead};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    uint8_t expected[256];

    fill(unregistered, 256, 5);
    memcpy(expected, unregistered, 256);
    wr.send_flags |= IBV_SEND_INLINE;
    CHECK(!softverbs_delay("completion", 0.05));
    CHECK(!post(pair.a.qp, &wr));
    memset(unregistered, 0, 256);
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.b.buffer, expected, 256));
    sge.length = 257;
    CHECK(post(pair.a.qp, &wr) == EINVAL);
    sge.length = 8;
    sge.addr = 8;
    CHECK(post(pair.a.qp, &wr) == EFAULT);
    softverbs_reset();
    close_pair(&pair);
}

static void unsignalled_requests_complete_silently(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

    wr.send_flags = 0;
    for (int i = 0; i < 200; i++)
        CHECK(!post(pair.a.qp, &wr));
    expect_nothing(pair.a.cq);
    wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
    wr.wr_id = 2;
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 2, IBV_WC_SUCCESS);
    wr.send_flags = 0;
    wr.wr.rdma.rkey ^= 1;
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 2, IBV_WC_REM_ACCESS_ERR);
    close_pair(&pair);

    o.signal_all = 1;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 8);
    wr = request(IBV_WR_RDMA_WRITE, 3, &sge, &pair.b, 0);
    wr.send_flags = 0;
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 3, IBV_WC_SUCCESS);
    close_pair(&pair);
}

static void a_chain_stops_at_the_first_bad_request(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);
    struct ibv_send_wr wrs[3], *bad = NULL;

    for (int i = 0; i < 3; i++) {
        wrs[i] = request(IBV_WR_RDMA_WRITE, (uint64_t)i, &sge, &pair.b, 0);
        wrs[i].next = i < 2 ? &wrs[i + 1] : NULL;
    }
    wrs[1].num_sge = 9;
    CHECK(ibv_post_send(pair.a.qp, wrs, &bad) == EINVAL && bad == &wrs[1]);
    expect(pair.a.cq, 0, IBV_WC_SUCCESS);
    expect_nothing(pair.a.cq);
    wrs[1].num_sge = 1;
    wrs[1].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    CHECK(ibv_post_send(pair.a.qp, wrs, &bad) == EINVAL && bad == &wrs[1]);
    expect(pair.a.cq, 0, IBV_WC_SUCCESS);
    close_pair(&pair);
}

static void a_full_send_queue_is_enomem(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge sge;
    struct ibv_send_wr wr;

    o.depth = o.recv_depth = 4;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 8);
    CHECK(!softverbs_delay("completion", 0.05));
    for (uint64_t i = 0; i < 4; i++) {
        wr = request(IBV_WR_RDMA_WRITE, i, &sge, &pair.b, 0);
        CHECK(!post(pair.a.qp, &wr));
    }
    CHECK(post(pair.a.qp, &wr) == ENOMEM);
    for (uint64_t i = 0; i < 4; i++)
        expect(pair.a.cq, i, IBV_WC_SUCCESS);
    CHECK(!post(pair.a.qp, &wr));
    for (uint64_t i = 0; i < 4; i++)
        CHECK(!post_receive(&pair.b, i, 0, 8));
    CHECK(post_receive(&pair.b, 4, 0, 8) == ENOMEM);
    softverbs_reset();
    close_pair(&pair);
}

static void a_message_over_max_msg_sz_is_a_length_error(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 4096);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

    CHECK(!softverbs_configure("max_msg_sz", 4096));
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    sge.length = 4097;
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_LOC_LEN_ERR);
    softverbs_reset();
    close_pair(&pair);
}

/* ---- what an HCA refuses ---- */

struct refusal {
    const char *name;
    enum ibv_wc_status status;
    enum ibv_wr_opcode opcode;
    long local_offset, remote_offset;
    uint32_t length, lkey_xor, rkey_xor;
    int access_a, access_b;
    unsigned qp_access;
};

static void check_refusal(const struct refusal *r)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge sge;
    struct ibv_send_wr wr;

    o.qp_access = r->qp_access;
    pair = open_pair(&o);
    CHECK(!ibv_dereg_mr(pair.a.mr) && !ibv_dereg_mr(pair.b.mr));
    CHECK((pair.a.mr = ibv_reg_mr(pair.a.pd, pair.a.buffer + PAGE, PAGE, r->access_a)));
    CHECK((pair.b.mr = ibv_reg_mr(pair.b.pd, pair.b.buffer + PAGE, PAGE, r->access_b)));
    fill(pair.a.buffer, o.size, 1);
    sge = sge_of(&pair.a, 0, r->length);
    sge.addr += (uint64_t)r->local_offset;
    sge.lkey ^= r->lkey_xor;
    wr = request(r->opcode, 1, &sge, &pair.b, 0);
    wr.wr.rdma.remote_addr += (uint64_t)r->remote_offset;
    wr.wr.rdma.rkey ^= r->rkey_xor;
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, r->status);
    if (r->status != IBV_WC_SUCCESS) {
        for (size_t i = 0; i < o.size; i++)
            CHECK(!pair.b.buffer[i]);
        CHECK(state_of(pair.a.qp) == IBV_QPS_ERR);
        CHECK(!post(pair.a.qp, &wr));
        expect(pair.a.cq, 1, IBV_WC_WR_FLUSH_ERR);
        CHECK(state_of(pair.b.qp) ==
              (r->status >= IBV_WC_REM_INV_REQ_ERR ? IBV_QPS_ERR : IBV_QPS_RTS));
    }
    close_pair(&pair);
}

static void keys_ranges_and_rights_are_checked(void)
{
    const int lw = IBV_ACCESS_LOCAL_WRITE, rw = IBV_ACCESS_REMOTE_WRITE,
              rr = IBV_ACCESS_REMOTE_READ;
    const unsigned q = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    const enum ibv_wr_opcode W = IBV_WR_RDMA_WRITE, R = IBV_WR_RDMA_READ;
    const struct refusal cases[] = {
        {"write", IBV_WC_SUCCESS, W, 0, 0, PAGE, 0, 0, 0, lw | rw, q},
        {"read", IBV_WC_SUCCESS, R, 0, 0, PAGE, 0, 0, lw, rr, q},
        {"lkey wrong", IBV_WC_LOC_PROT_ERR, W, 0, 0, 8, 1, 0, lw, lw | rw, q},
        {"lkey slot wrong", IBV_WC_LOC_PROT_ERR, W, 0, 0, 8, 0xff00, 0, lw, lw | rw, q},
        {"rkey as lkey", IBV_WC_LOC_PROT_ERR, W, 0, 0, 8, 0x5a5a0000, 0, lw, lw | rw, q},
        {"rkey wrong", IBV_WC_REM_ACCESS_ERR, W, 0, 0, 8, 0, 1, lw, lw | rw, q},
        {"lkey as rkey", IBV_WC_REM_ACCESS_ERR, W, 0, 0, 8, 0, 0x5a5a0000, lw, lw | rw, q},
        {"lkey as rkey, read", IBV_WC_REM_ACCESS_ERR, R, 0, 0, 8, 0, 0x5a5a0000, lw, rr, q},
        {"local end", IBV_WC_LOC_PROT_ERR, W, 4089, 0, 8, 0, 0, lw, lw | rw, q},
        {"local begin", IBV_WC_LOC_PROT_ERR, W, -1, 0, 8, 0, 0, lw, lw | rw, q},
        {"remote end", IBV_WC_REM_ACCESS_ERR, W, 0, 4089, 8, 0, 0, lw, lw | rw, q},
        {"remote begin", IBV_WC_REM_ACCESS_ERR, W, 0, -1, 8, 0, 0, lw, lw | rw, q},
        {"remote past end", IBV_WC_REM_ACCESS_ERR, R, 0, 5000, 8, 0, 0, lw, rr, q},
        {"remote too long", IBV_WC_REM_ACCESS_ERR, R, 0, 1, PAGE, 0, 0, lw, rr, q},
        {"read lands without local write", IBV_WC_LOC_PROT_ERR, R, 0, 0, 8, 0, 0, 0, rr, q},
        {"no remote write", IBV_WC_REM_ACCESS_ERR, W, 0, 0, 8, 0, 0, lw, lw | rr, q},
        {"no remote read", IBV_WC_REM_ACCESS_ERR, R, 0, 0, 8, 0, 0, lw, lw | rw, q},
        {"qp without write", IBV_WC_REM_INV_REQ_ERR, W, 0, 0, 8, 0, 0, lw, lw | rw, (unsigned)rr},
        {"qp without read", IBV_WC_REM_INV_REQ_ERR, R, 0, 0, 8, 0, 0, lw, lw | rr, (unsigned)rw},
        {"empty write needs no key", IBV_WC_SUCCESS, W, 0, 0, 0, 1, 1, lw, 0, q},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_refusal(&cases[i]);
}

static void ranges_do_not_wrap(void)
{
    struct options o = defaults;
    const uint64_t base = UINT64_MAX - 2 * PAGE + 1;
    const struct {
        uint64_t offset;
        uint32_t length;
        enum ibv_wc_status status;
    } cases[] = {
        {0, PAGE, IBV_WC_SUCCESS},
        {PAGE - 1, 1, IBV_WC_SUCCESS},
        {PAGE - 1, 2, IBV_WC_REM_ACCESS_ERR},
        {PAGE, 1, IBV_WC_REM_ACCESS_ERR},
        {2 * PAGE - 1, 8, IBV_WC_REM_ACCESS_ERR},
        {2 * PAGE + 5, 8, IBV_WC_REM_ACCESS_ERR},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pair pair = open_pair(&o);
        struct ibv_mr *high = ibv_reg_mr_iova(pair.b.pd, pair.b.buffer, PAGE, base, ALL_ACCESS);
        struct ibv_sge sge = sge_of(&pair.a, 0, cases[i].length);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, i, &sge, &pair.b, 0);

        CHECK(high);
        wr.wr.rdma.remote_addr = base + cases[i].offset;
        wr.wr.rdma.rkey = high->rkey;
        CHECK(!post(pair.a.qp, &wr));
        expect(pair.a.cq, i, cases[i].status);
        CHECK(!ibv_dereg_mr(high));
        close_pair(&pair);
    }
}

static void keys_belong_to_their_protection_domain(void)
{
    struct options o = defaults;

    for (int local = 0; local < 2; local++) {
        struct pair pair = open_pair(&o);
        struct end *end = local ? &pair.a : &pair.b;
        struct ibv_pd *other = ibv_alloc_pd(end->context);
        struct ibv_mr *foreign = ibv_reg_mr(other, end->buffer, PAGE, ALL_ACCESS);
        struct ibv_sge sge = sge_of(&pair.a, 0, 8);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

        CHECK(foreign);
        if (local)
            sge.lkey = foreign->lkey;
        else
            wr.wr.rdma.rkey = foreign->rkey;
        CHECK(!post(pair.a.qp, &wr));
        expect(pair.a.cq, 1, local ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_ACCESS_ERR);
        CHECK(ibv_dealloc_pd(other) == EBUSY);
        CHECK(!ibv_dereg_mr(foreign) && !ibv_dealloc_pd(other));
        close_pair(&pair);
    }
}

static void a_dead_address_is_a_status(void)
{
    struct options o = defaults;
    static const struct {
        int local, protect;
        enum ibv_wr_opcode opcode;
        enum ibv_wc_status status;
    } cases[] = {
        {1, 0, IBV_WR_RDMA_WRITE, IBV_WC_LOC_PROT_ERR},
        {1, 0, IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR},
        {1, 1, IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR},
        {0, 0, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR},
        {0, 0, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR},
        {0, 1, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pair pair = open_pair(&o);
        struct end *end = cases[i].local ? &pair.a : &pair.b;
        struct ibv_sge sge = sge_of(&pair.a, 0, 4 * PAGE);
        struct ibv_send_wr wr = request(cases[i].opcode, i, &sge, &pair.b, 0);

        if (cases[i].protect)
            mprotect(end->buffer + 2 * PAGE, PAGE, PROT_READ);
        else
            munmap(end->buffer + 2 * PAGE, PAGE);
        CHECK(!post(pair.a.qp, &wr));
        expect(pair.a.cq, i, cases[i].status);
        close_pair(&pair);
    }
}

static void a_bad_receive_fails_both_ends(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 100);
    struct ibv_send_wr wr = request(IBV_WR_SEND, 1, &sge, &pair.b, 0);
    struct ibv_sge bad_sge = sge_of(&pair.b, 0, 100);
    struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = &bad_sge, .num_sge = 1}, *bad;

    CHECK(!post_receive(&pair.b, 2, 0, 99));
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_REM_INV_REQ_ERR);
    expect(pair.b.cq, 2, IBV_WC_LOC_LEN_ERR);
    close_pair(&pair);

    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 100);
    bad_sge = sge_of(&pair.b, 0, 100);
    bad_sge.lkey ^= 1;
    CHECK(!ibv_post_recv(pair.b.qp, &receive, &bad));
    CHECK(!post_receive(&pair.b, 3, 0, 99));
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_REM_OP_ERR);
    expect(pair.b.cq, 2, IBV_WC_LOC_PROT_ERR);
    expect(pair.b.cq, 3, IBV_WC_WR_FLUSH_ERR);
    close_pair(&pair);
}

static void a_bad_status_flushes_everything_in_order(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);

    CHECK(!softverbs_delay("completion", 0.05));
    for (uint64_t i = 0; i < 10; i++) {
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, i, &sge, &pair.b, 0);

        wr.send_flags = 0;
        if (i == 2)
            wr.wr.rdma.rkey ^= 1;
        CHECK(!post(pair.a.qp, &wr));
        CHECK(!post_receive(&pair.b, 200 + i, 0, 8));
    }
    expect(pair.a.cq, 2, IBV_WC_REM_ACCESS_ERR);
    for (uint64_t i = 3; i < 10; i++)
        expect(pair.a.cq, i, IBV_WC_WR_FLUSH_ERR);
    for (uint64_t i = 0; i < 10; i++)
        expect(pair.b.cq, 200 + i, IBV_WC_WR_FLUSH_ERR);
    softverbs_reset();
    close_pair(&pair);
}

/* ---- peers ---- */

static void a_peer_that_is_gone_exceeds_the_retries(void)
{
    struct options o = defaults;

    for (int how = 0; how < 4; how++) {
        struct pair pair = open_pair(&o);
        struct ibv_sge sge = sge_of(&pair.a, 0, 8);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
        struct ibv_qp_attr attr = {.qp_state = how == 1 ? IBV_QPS_ERR : IBV_QPS_RESET};
        double start;

        if (how == 0) {
            CHECK(!ibv_destroy_qp(pair.b.qp));
            pair.b.qp = NULL;
        } else {
            CHECK(!ibv_modify_qp(pair.b.qp, &attr, IBV_QP_STATE));
        }
        if (how == 3) /* another life, for another peer */
            connect_to(pair.b.qp, pair.a.context, pair.b.qp->qp_num, &o);
        start = seconds();
        CHECK(!post(pair.a.qp, &wr));
        expect(pair.a.cq, 1, IBV_WC_RETRY_EXC_ERR);
        CHECK(seconds() - start < 2);
        CHECK(state_of(pair.a.qp) == IBV_QPS_ERR);
        close_pair(&pair);
    }
}

static void a_peer_that_comes_late_is_reached_by_a_retry(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge sge;
    struct ibv_send_wr wr;

    o.timeout = 14;
    o.retry_cnt = 7;
    o.no_connect = 1;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 8);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    connect_to(pair.a.qp, pair.b.context, pair.b.qp->qp_num, &o);
    CHECK(!post(pair.a.qp, &wr));
    expect_nothing(pair.a.cq);
    connect_to(pair.b.qp, pair.a.context, pair.a.qp->qp_num, &o);
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    close_pair(&pair);
}

static void gids_of_different_kinds_do_not_meet(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    struct ibv_qp_attr rtr, rts = rts_attr(&o);

    o.no_connect = 1;
    pair = open_pair(&o);
    connect_to(pair.a.qp, pair.b.context, pair.b.qp->qp_num, &o);
    rtr = rtr_attr(pair.a.context, pair.a.qp->qp_num, &o);
    rtr.ah_attr.grh.sgid_index = 2; /* the same address, RoCE v1 */
    CHECK(!to_init(pair.b.qp, &o));
    CHECK(!ibv_modify_qp(pair.b.qp, &rtr, RTR_MASK));
    CHECK(!ibv_modify_qp(pair.b.qp, &rts, RTS_MASK));
    sge = sge_of(&pair.a, 0, 8);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_RETRY_EXC_ERR);
    close_pair(&pair);
}

static void a_receiver_that_is_not_ready_is_retried(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);
    struct ibv_send_wr wr = request(IBV_WR_SEND, 1, &sge, &pair.b, 0);

    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
    close_pair(&pair);

    o.rnr_retry = 7;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 8);
    wr = request(IBV_WR_SEND, 1, &sge, &pair.b, 0);
    CHECK(!post(pair.a.qp, &wr));
    nap(0.05);
    expect_nothing(pair.a.cq);
    CHECK(!post_receive(&pair.b, 2, 0, 8));
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    expect(pair.b.cq, 2, IBV_WC_SUCCESS);

    for (int how = 0; how < 3; how++) { /* waits for ever, until that is ended */
        struct ibv_qp_attr attr = {.qp_state = how == 0 ? IBV_QPS_ERR : IBV_QPS_RESET};

        CHECK(!post(pair.a.qp, &wr));
        nap(0.01);
        if (how == 2)
            break;
        CHECK(!ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE));
        if (how == 0)
            expect(pair.a.cq, 1, IBV_WC_WR_FLUSH_ERR);
        expect_nothing(pair.a.cq);
        attr.qp_state = IBV_QPS_RESET;
        CHECK(!ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE));
        CHECK(!ibv_modify_qp(pair.b.qp, &attr, IBV_QP_STATE));
        connect_pair(&pair, &o);
    }
    close_pair(&pair);
}

/* ---- states ---- */

static void states_follow_the_rules(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_qp_attr rtr, rts = rts_attr(&o), attr;
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    struct ibv_qp_init_attr init;

    o.no_connect = 1;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 8);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    rtr = rtr_attr(pair.b.context, pair.b.qp->qp_num, &o);

    CHECK(post(pair.a.qp, &wr) == EINVAL);
    CHECK(post_receive(&pair.a, 1, 0, 8) == EINVAL);
    CHECK(ibv_modify_qp(pair.a.qp, &rtr, RTR_MASK) == EINVAL);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT, .port_num = 1};
    CHECK(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_PORT) == EINVAL);
    attr.port_num = 2;
    CHECK(ibv_modify_qp(pair.a.qp, &attr,
                        IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS) ==
          EINVAL);
    CHECK(!to_init(pair.a.qp, &o));
    CHECK(post(pair.a.qp, &wr) == EINVAL);
    CHECK(!post_receive(&pair.a, 1, 0, 8));
    CHECK(ibv_modify_qp(pair.a.qp, &rts, RTS_MASK) == EINVAL);
    CHECK(ibv_modify_qp(pair.a.qp, &rtr, RTR_MASK & ~IBV_QP_AV) == EINVAL);
    CHECK(ibv_modify_qp(pair.a.qp, &rtr, RTR_MASK | IBV_QP_TIMEOUT) == EINVAL);
    rtr.ah_attr.is_global = 0;
    CHECK(ibv_modify_qp(pair.a.qp, &rtr, RTR_MASK) == EINVAL);
    rtr.ah_attr.is_global = 1;
    rtr.ah_attr.grh.sgid_index = 4;
    CHECK(ibv_modify_qp(pair.a.qp, &rtr, RTR_MASK) == EINVAL);
    rtr.ah_attr.grh.sgid_index = GID_INDEX;
    CHECK(!ibv_modify_qp(pair.a.qp, &rtr, RTR_MASK));
    CHECK(post(pair.a.qp, &wr) == EINVAL);
    CHECK(ibv_modify_qp(pair.a.qp, &rts, RTS_MASK & ~IBV_QP_SQ_PSN) == EINVAL);
    CHECK(!ibv_modify_qp(pair.a.qp, &rts, RTS_MASK));
    CHECK(state_of(pair.a.qp) == IBV_QPS_RTS);
    CHECK(!ibv_query_qp(pair.a.qp, &attr, IBV_QP_STATE, &init));
    CHECK(attr.dest_qp_num == pair.b.qp->qp_num && attr.cap.max_send_wr == 64);
    CHECK(init.send_cq == pair.a.cq && init.qp_type == IBV_QPT_RC);

    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_ERR};
    CHECK(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_PORT) == EINVAL);
    CHECK(!ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE));
    expect(pair.a.cq, 1, IBV_WC_WR_FLUSH_ERR);
    CHECK(!post_receive(&pair.a, 2, 0, 8));
    expect(pair.a.cq, 2, IBV_WC_WR_FLUSH_ERR);
    attr.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE) == EINVAL);
    attr.qp_state = IBV_QPS_RESET;
    CHECK(!ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE));
    connect_pair(&pair, &o);
    CHECK(!post(pair.a.qp, &wr));
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    close_pair(&pair);
}

static void parents_with_children_are_busy(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(pair.a.context);
    struct ibv_cq *cq = ibv_create_cq(pair.a.context, 4, NULL, channel, 0);

    CHECK(ibv_close_device(pair.a.context) == EBUSY && errno == EBUSY);
    CHECK(ibv_dealloc_pd(pair.a.pd) == EBUSY);
    CHECK(ibv_destroy_cq(pair.a.cq) == EBUSY);
    CHECK(ibv_destroy_comp_channel(channel) == EBUSY);
    CHECK(!ibv_destroy_cq(cq));
    CHECK(!ibv_destroy_comp_channel(channel));
    close_pair(&pair);
}

static void a_handle_that_was_closed_is_einval(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct pair closed = pair;
    struct ibv_wc wc;
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

    CHECK(!ibv_destroy_qp(pair.a.qp));
    pair.a.qp = NULL;
    CHECK(post(closed.a.qp, &wr) == EINVAL);
    CHECK(ibv_destroy_qp(closed.a.qp) == EINVAL);
    close_pair(&pair);
    CHECK(ibv_dereg_mr(closed.a.mr) == EINVAL);
    CHECK(ibv_poll_cq(closed.a.cq, 1, &wc) == -EINVAL);
    CHECK(ibv_destroy_cq(closed.a.cq) == EINVAL);
    CHECK(ibv_dealloc_pd(closed.a.pd) == EINVAL);
    CHECK(ibv_close_device(closed.a.context) == EINVAL);
    CHECK_NULL(ibv_alloc_pd(closed.a.context), EINVAL);
    CHECK(ibv_dereg_mr(NULL) == EINVAL && ibv_close_device(NULL) == EINVAL);
    CHECK(ibv_destroy_qp((struct ibv_qp *)&pair) == EINVAL);
}

/* ---- completion queues ---- */

static void an_overrun_completion_queue_takes_its_queue_pairs_along(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    struct ibv_async_event event;

    o.cqe = 4;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 8);
    for (uint64_t i = 0; i < 5; i++) {
        wr = request(IBV_WR_RDMA_WRITE, i, &sge, &pair.b, 0);
        CHECK(!post(pair.a.qp, &wr));
    }
    CHECK(state_of(pair.a.qp) == IBV_QPS_ERR);
    CHECK(!ibv_get_async_event(pair.a.context, &event));
    CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == pair.a.cq);
    ibv_ack_async_event(&event);
    for (uint64_t i = 0; i < 4; i++)
        expect(pair.a.cq, i, IBV_WC_SUCCESS);
    expect_nothing(pair.a.cq);
    close_pair(&pair);
}

static void a_requested_event_arrives_once(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    struct pollfd fd = {.events = POLLIN};
    void *cq_context;
    struct ibv_cq *announced;

    o.no_connect = 1;
    pair = open_pair(&o);
    channel = ibv_create_comp_channel(pair.a.context);
    cq = ibv_create_cq(pair.a.context, 4, &pair, channel, 0);
    CHECK(channel && cq);
    CHECK(!ibv_destroy_qp(pair.a.qp));
    init.send_cq = init.recv_cq = cq;
    CHECK((pair.a.qp = ibv_create_qp(pair.a.pd, &init)));
    connect_pair(&pair, &o);
    sge = sge_of(&pair.a, 0, 8);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    fd.fd = channel->fd;

    CHECK(!post(pair.a.qp, &wr));
    CHECK(poll(&fd, 1, 0) == 0);
    expect(cq, 1, IBV_WC_SUCCESS);
    CHECK(!ibv_req_notify_cq(cq, 0));
    CHECK(!softverbs_delay("completion", 0.02));
    CHECK(!post(pair.a.qp, &wr));
    CHECK(!ibv_get_cq_event(channel, &announced, &cq_context));
    CHECK(announced == cq && cq_context == &pair);
    ibv_ack_cq_events(cq, 1);
    softverbs_reset();
    CHECK(!post(pair.a.qp, &wr));
    CHECK(poll(&fd, 1, 0) == 0);
    CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
    CHECK(ibv_get_cq_event(channel, &announced, &cq_context) == -1 && errno == EAGAIN);
    CHECK(!ibv_req_notify_cq(cq, 1)); /* a send's own completion isn't a solicited one */
    CHECK(!post(pair.a.qp, &wr));
    CHECK(poll(&fd, 1, 0) == 0);
    expect(cq, 1, IBV_WC_SUCCESS);
    CHECK(!ibv_req_notify_cq(cq, 0));
    CHECK(!ibv_req_notify_cq(cq, 1));
    CHECK(!post(pair.a.qp, &wr));
    CHECK(poll(&fd, 1, 0) == 1);
    CHECK(!ibv_destroy_qp(pair.a.qp));
    pair.a.qp = NULL;
    CHECK(!ibv_destroy_cq(cq)); /* takes its unread event along */
    CHECK(poll(&fd, 1, 0) == 0);
    CHECK(!ibv_destroy_comp_channel(channel));
    close_pair(&pair);
}

/* ---- in the background ---- */

static void a_delayed_completion_delays_no_other_queue_pair(void)
{
    struct options o = defaults;
    struct pair slow = open_pair(&o), fast = open_pair(&o);
    struct ibv_sge slow_sge = sge_of(&slow.a, 0, 8), fast_sge = sge_of(&fast.a, 0, 60000);
    struct ibv_send_wr slow_wr = request(IBV_WR_RDMA_WRITE, 1, &slow_sge, &slow.b, 0);
    struct ibv_send_wr fast_wr = request(IBV_WR_RDMA_WRITE, 2, &fast_sge, &fast.b, 0);
    double start = seconds();

    CHECK(!softverbs_delay("completion", 0.3));
    CHECK(!post(slow.a.qp, &slow_wr));
    CHECK(!softverbs_delay("completion", 0.01));
    CHECK(!post(fast.a.qp, &fast_wr));
    expect(fast.a.cq, 2, IBV_WC_SUCCESS);
    CHECK(seconds() - start < 0.25);
    expect_nothing(slow.a.cq);
    expect(slow.a.cq, 1, IBV_WC_SUCCESS);
    CHECK(seconds() - start >= 0.3);
    softverbs_reset();
    close_pair(&slow);
    close_pair(&fast);
}

static void nothing_moves_after_destroy_qp_or_dereg_mr(void)
{
    struct options o = defaults;

    for (int how = 0; how < 4; how++) {
        struct pair pair = open_pair(&o);
        struct ibv_sge sge = sge_of(&pair.a, 0, 8);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

        memset(pair.a.buffer, 0xaa, 8);
        CHECK(!softverbs_delay("completion", 0.03));
        CHECK(!post(pair.a.qp, &wr));
        if (how == 0) {
            CHECK(!ibv_destroy_qp(pair.a.qp));
            pair.a.qp = NULL;
            nap(0.05);
            expect_nothing(pair.a.cq);
        } else if (how == 1) {
            CHECK(!ibv_destroy_qp(pair.b.qp));
            pair.b.qp = NULL;
            expect(pair.a.cq, 1, IBV_WC_RETRY_EXC_ERR);
        } else if (how == 2) {
            CHECK(!ibv_dereg_mr(pair.a.mr));
            pair.a.mr = NULL;
            expect(pair.a.cq, 1, IBV_WC_LOC_PROT_ERR);
        } else {
            CHECK(!ibv_dereg_mr(pair.b.mr));
            pair.b.mr = NULL;
            expect(pair.a.cq, 1, IBV_WC_REM_ACCESS_ERR);
        }
        CHECK(!pair.b.buffer[0]);
        softverbs_reset();
        close_pair(&pair);
    }
}

/* Looks while the device writes, as no program should that has a completion to wait for. */
__attribute__((noinline, no_sanitize("thread"))) static uint8_t first_byte(const uint8_t *buffer)
{
    return *(const volatile uint8_t *)buffer;
}

/* How many pages of a buffer have been written, front to back. */
static size_t frontier(const struct end *end)
{
    size_t low = 0, high = end->size / PAGE;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (first_byte(end->buffer + middle * PAGE))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void wait_for_first_byte(const struct end *end)
{
    while (!first_byte(end->buffer))
        sched_yield();
}

/* A long transfer is on its way, and whatever it uses is taken away. */
static void taking_away_what_a_copy_uses_waits_for_the_copy(void)
{
    struct options o = defaults;

    o.size = (size_t)64 << 20;
    for (int round = 0; round < 36; round++) {
        int how = round % 6;
        struct pair pair = open_pair(&o);
        struct ibv_sge sge = sge_of(&pair.a, 0, (uint32_t)o.size);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
        struct ibv_qp_attr attr = {.qp_state = how == 4 ? IBV_QPS_ERR : IBV_QPS_RESET};
        double start;
        size_t written;

        memset(pair.a.buffer, 0xaa, o.size);
        CHECK(!post(pair.a.qp, &wr));
        wait_for_first_byte(&pair.b);
        start = seconds();
        switch (how) {
        case 0:
            CHECK(!ibv_destroy_qp(pair.a.qp));
            pair.a.qp = NULL;
            break;
        case 1:
            CHECK(!ibv_destroy_qp(pair.b.qp));
            pair.b.qp = NULL;
            break;
        case 2:
            CHECK(!ibv_dereg_mr(pair.a.mr));
            pair.a.mr = NULL;
            break;
        case 3:
            CHECK(!ibv_dereg_mr(pair.b.mr));
            pair.b.mr = NULL;
            break;
        default:
            CHECK(!ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE));
        }
        written = frontier(&pair.b);
        CHECK(seconds() - start < 5);
        nap(0.01);
        CHECK(frontier(&pair.b) == written);
        close_pair(&pair);
    }
}

static void a_peer_that_fails_in_the_middle_flushes_its_receive(void)
{
    struct options o = defaults;

    o.size = (size_t)64 << 20;
    for (int how = 0; how < 2; how++) {
        struct pair pair = open_pair(&o);
        struct ibv_sge sge = sge_of(&pair.a, 0, (uint32_t)o.size);
        struct ibv_send_wr wr = request(IBV_WR_SEND, 1, &sge, &pair.b, 0);
        struct ibv_qp_attr attr = {.qp_state = how ? IBV_QPS_RESET : IBV_QPS_ERR};
        struct ibv_wc wc;

        memset(pair.a.buffer, 0xaa, o.size);
        CHECK(!post_receive(&pair.b, 2, 0, (uint32_t)o.size));
        CHECK(!post(pair.a.qp, &wr));
        wait_for_first_byte(&pair.b);
        CHECK(!ibv_modify_qp(pair.b.qp, &attr, IBV_QP_STATE));
        if (how) { /* another life must not get the rest of the message */
            connect_to(pair.b.qp, pair.a.context, pair.a.qp->qp_num, &o);
            CHECK(!post_receive(&pair.b, 3, 0, (uint32_t)o.size));
        }
        wc = wait_for_one(pair.a.cq);
        CHECK(wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_SUCCESS);
        if (wc.status == IBV_WC_SUCCESS) /* we were too late */
            expect(pair.b.cq, 2, IBV_WC_SUCCESS);
        else if (how == 0)
            expect(pair.b.cq, 2, IBV_WC_WR_FLUSH_ERR);
        expect_nothing(pair.b.cq);
        close_pair(&pair);
    }
}

static void a_long_transfer_leaves_room_for_others(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_qp *other_a, *other_b;
    struct ibv_sge large, small;
    struct ibv_send_wr wr, small_wr;

    o.size = (size_t)64 << 20;
    pair = open_pair(&o);
    other_a = make_qp(&pair.a, &o);
    other_b = make_qp(&pair.b, &o);
    connect_to(other_a, pair.b.context, other_b->qp_num, &o);
    connect_to(other_b, pair.a.context, other_a->qp_num, &o);
    fill(pair.a.buffer, PAGE, 8);
    memcpy(pair.a.buffer + o.size - PAGE, pair.a.buffer, PAGE);
    large = sge_of(&pair.a, 0, (uint32_t)o.size);
    wr = request(IBV_WR_RDMA_WRITE, 1, &large, &pair.b, 0);
    small = sge_of(&pair.a, 0, 256 * 1024); /* too large to be executed by the poster */
    small_wr = request(IBV_WR_RDMA_WRITE, 2, &small, &pair.b, 0);
    CHECK(!softverbs_delay("completion", 0.05)); /* so that both are there when work begins */
    CHECK(!post(pair.a.qp, &wr));
    CHECK(!post(other_a, &small_wr));
    softverbs_reset();
    expect(pair.a.cq, 2, IBV_WC_SUCCESS);
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.b.buffer + o.size - PAGE, pair.a.buffer, PAGE));
    CHECK(!ibv_destroy_qp(other_a) && !ibv_destroy_qp(other_b));
    close_pair(&pair);
}

static void completions_keep_the_order_of_posting(void)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge large, small;

    o.size = (size_t)4 << 20;
    pair = open_pair(&o);
    large = sge_of(&pair.a, 0, 3u << 20);
    small = sge_of(&pair.a, 0, 8);
    for (uint64_t i = 0; i < 20; i++) {
        struct ibv_send_wr wr =
            request(i % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, i, i % 3 ? &small : &large,
                    &pair.b, 0);

        CHECK(!post(pair.a.qp, &wr));
    }
    for (uint64_t i = 0; i < 20; i++)
        expect(pair.a.cq, i, IBV_WC_SUCCESS);
    close_pair(&pair);
}

/* ---- failures, delays, counters ---- */

static void injected_failures_do_nothing_else_and_count(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    struct ibv_wc wc;
    struct ibv_mr *mr;

    softverbs_reset();
    CHECK(!softverbs_fail("reg_mr", EAGAIN, 2));
    CHECK_NULL(ibv_reg_mr(pair.a.pd, pair.a.buffer, 8, 0), EAGAIN);
    CHECK_NULL(ibv_reg_mr_iova(pair.a.pd, pair.a.buffer, 8, 0, 0), EAGAIN);
    CHECK((mr = ibv_reg_mr_iova2(pair.a.pd, pair.a.buffer, 8, 0, 0)));
    CHECK(counter("reg_mr") == 3);
    CHECK(!softverbs_fail("reg_mr", 0, 1));
    errno = EIO;
    CHECK(!ibv_reg_mr(pair.a.pd, pair.a.buffer, 8, 0) && errno == 0);
    CHECK(!softverbs_fail("dereg_mr", EBUSY, 1));
    CHECK(ibv_dereg_mr(mr) == EBUSY);
    CHECK(counter("live_mr") == 3);
    CHECK(!ibv_dereg_mr(mr) && counter("dereg_mr") == 2);
    CHECK(!softverbs_fail("post_send", -ENOMEM, 1));
    errno = 0;
    CHECK(post(pair.a.qp, &wr) == -1 && errno == ENOMEM);
    CHECK(!softverbs_fail("poll_cq", EIO, 1));
    CHECK(ibv_poll_cq(pair.a.cq, 1, &wc) == -EIO);
    expect_nothing(pair.a.cq);
    CHECK(!softverbs_fail("open_device", EMFILE, 5));
    CHECK(!softverbs_fail("open_device", EMFILE, 0));
    CHECK(!ibv_close_device(open_soft(0)));
    CHECK(softverbs_fail("nonsense", EIO, 1) == ENOENT && softverbs_fail(NULL, EIO, 1) == ENOENT);
    CHECK(softverbs_fail("dereg_mr", 0, 1) == EINVAL);
    CHECK(softverbs_counters(NULL, NULL, 0) > 30);
    softverbs_reset();
    CHECK(counter("reg_mr") == 0);
    close_pair(&pair);
}

static void a_delay_makes_a_verb_take_longer(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    double start = seconds();
    struct ibv_mr *mr;

    CHECK(!softverbs_delay("reg_mr", 0.1));
    CHECK((mr = ibv_reg_mr(pair.a.pd, pair.a.buffer, 8, 0)));
    CHECK(seconds() - start >= 0.1);
    CHECK(!softverbs_delay("reg_mr", 0));
    start = seconds();
    CHECK(!ibv_dereg_mr(mr) && (mr = ibv_reg_mr(pair.a.pd, pair.a.buffer, 8, 0)));
    CHECK(seconds() - start < 0.1);
    CHECK(!ibv_dereg_mr(mr));
    CHECK(softverbs_delay("reg_mr", -1) == EINVAL && softverbs_delay("reg_mr", NAN) == EINVAL);
    CHECK(softverbs_delay("reg_mr", INFINITY) == EINVAL);
    CHECK(softverbs_delay("nonsense", 1) == ENOENT && softverbs_delay(NULL, 1) == ENOENT);
    close_pair(&pair);
}

/* ---- processes ---- */

static void use_after_fork(void *argument)
{
    struct pair *pair = argument, own;
    struct ibv_sge sge = sge_of(&pair->a, 0, 8);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair->b, 0);
    struct ibv_wc wc;

    CHECK(post(pair->a.qp, &wr) == ENODEV);
    CHECK(ibv_poll_cq(pair->a.cq, 1, &wc) == -ENODEV);
    CHECK(ibv_dereg_mr(pair->a.mr) == ENODEV);
    CHECK(ibv_destroy_qp(pair->a.qp) == ENODEV);
    CHECK_NULL(ibv_reg_mr(pair->a.pd, pair->a.buffer, 8, 0), ENODEV);
    CHECK(ibv_close_device(pair->a.context) == ENODEV);
    CHECK(counter("live_mr") == 0);

    own = open_pair(&defaults);
    sge = sge_of(&own.a, 0, 8);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &own.b, 0);
    CHECK(!softverbs_delay("completion", 0.01));
    CHECK(!post(own.a.qp, &wr));
    expect(own.a.cq, 1, IBV_WC_SUCCESS);
    close_pair(&own);
}

static void a_child_gets_errors_and_the_parent_goes_on(void)
{
    struct options o = defaults;
    struct pair pair = open_pair(&o);
    struct ibv_sge sge = sge_of(&pair.a, 0, 8);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);

    CHECK(!softverbs_delay("completion", 0.05));
    CHECK(!post(pair.a.qp, &wr)); /* the worker is there, and work waits for it */
    in_child(use_after_fork, &pair);
    expect(pair.a.cq, 1, IBV_WC_SUCCESS);
    softverbs_reset();
    close_pair(&pair);
}

static void leave_everything(void *unused)
{
    struct options o = defaults;
    struct pair pair;
    struct ibv_sge sge;
    struct ibv_send_wr wr;

    (void)unused;
    o.size = (size_t)64 << 20;
    pair = open_pair(&o);
    sge = sge_of(&pair.a, 0, 64u << 20);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, 0);
    for (int i = 0; i < 20; i++)
        CHECK(!post(pair.a.qp, &wr));
    exit(0);
}

static void exit_with_work_in_flight_is_clean(void)
{
    in_child(leave_everything, NULL);
}

static void without_process_vm_readv(void *unused)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};

    (void)unused;
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
    write_and_read_move_the_bytes();
    several_entries_are_gathered_and_scattered();
    inline_data_is_taken_while_posting();
    a_dead_address_is_a_status();
}

static void a_container_that_forbids_process_vm_readv_is_no_obstacle(void)
{
    in_child(without_process_vm_readv, NULL);
}

static void without_mapping_query(void *unused)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOTTY),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};

    (void)unused;
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
    registration_refuses_what_a_kernel_refuses();
    a_sparse_mapping_registers_at_once_and_stays_sparse();
}

static void an_older_kernel_is_asked_by_reading_its_maps(void)
{
    in_child(without_mapping_query, NULL);
}

/* ---- many threads ---- */

#define STRESS_THREADS 8
#define STRESS_ROUNDS 40

static void *stress(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument + 1;
    struct options o = defaults;

    o.size = 512 * 1024;
    for (int round = 0; round < STRESS_ROUNDS; round++) {
        struct pair pair = open_pair(&o);
        uint32_t length = (uint32_t)rand_r(&seed) % (round % 8 ? 4000 : 400000) + 1;
        size_t from = (size_t)rand_r(&seed) % (o.size - length);
        size_t to = (size_t)rand_r(&seed) % (o.size - length);
        struct ibv_sge sge = sge_of(&pair.a, from, length);
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &pair.b, to);
        struct ibv_send_wr back = request(IBV_WR_RDMA_READ, 2, &sge, &pair.b, to);
        uint8_t *copy = malloc(length);

        CHECK(copy);
        fill(pair.a.buffer + from, length, seed);
        memcpy(copy, pair.a.buffer + from, length);
        CHECK(!post(pair.a.qp, &wr));
        expect(pair.a.cq, 1, IBV_WC_SUCCESS);
        CHECK(!memcmp(pair.b.buffer + to, copy, length));
        memset(pair.a.buffer + from, 0, length);
        CHECK(!post(pair.a.qp, &back));
        expect(pair.a.cq, 2, IBV_WC_SUCCESS);
        CHECK(!memcmp(pair.a.buffer + from, copy, length));
        free(copy);

        for (int i = 0; i < 20; i++) {
            struct ibv_mr *mr = ibv_reg_mr(pair.a.pd, pair.a.buffer, PAGE, 0);

            CHECK(mr && !ibv_dereg_mr(mr));
        }
        for (int i = 0; i < 10; i++)
            CHECK(!post(pair.a.qp, &wr));
        if (rand_r(&seed) % 2) {
            struct end *end = rand_r(&seed) % 2 ? &pair.a : &pair.b;

            CHECK(!ibv_dereg_mr(end->mr));
            end->mr = NULL;
        } else {
            struct end *end = rand_r(&seed) % 2 ? &pair.a : &pair.b;

            CHECK(!ibv_destroy_qp(end->qp));
            end->qp = NULL;
        }
        close_pair(&pair);
    }
    return NULL;
}

static void threads_do_everything_at_once(void)
{
    pthread_t threads[STRESS_THREADS];

    for (uintptr_t i = 0; i < STRESS_THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, stress, (void *)i));
    for (int i = 0; i < STRESS_THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(counter("live_mr") == 0 && counter("live_context") == 0);
}

/* One queue pair, posted to by many threads while its end is near. */
struct shared {
    struct pair pair;
    uint64_t posted;
};

static void *post_many(void *argument)
{
    struct shared *shared = argument;
    struct ibv_sge sge = sge_of(&shared->pair.a, 0, 70000);
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, &shared->pair.b, 0);

    for (int i = 0; i < 500; i++) {
        int error;

        sge.length = i % 50 ? 64 : 70000;
        error = post(shared->pair.a.qp, &wr);
        CHECK(!error || error == ENOMEM);
        if (!error)
            __atomic_add_fetch(&shared->posted, 1, __ATOMIC_RELAXED);
        else
            sched_yield();
    }
    return NULL;
}

static void threads_share_a_queue_pair_and_no_completion_is_lost(void)
{
    struct options o = defaults;
    struct shared shared = {.posted = 0};
    pthread_t threads[4];
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    struct ibv_wc wc;
    uint64_t polled = 0;

    o.cqe = 4000;
    o.size = 128 * 1024;
    shared.pair = open_pair(&o);
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_create(&threads[i], NULL, post_many, &shared));
    nap(0.002);
    CHECK(!ibv_modify_qp(shared.pair.a.qp, &attr, IBV_QP_STATE));
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    while (ibv_poll_cq(shared.pair.a.cq, 1, &wc) == 1) {
        CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_WR_FLUSH_ERR);
        polled++;
    }
    CHECK(polled == shared.posted);
    close_pair(&shared.pair);
}

/* ---- all ---- */

static const struct {
    const char *name;
    void (*run)(void);
} checks[] = {
#define X(name) {#name, name}
    X(devices_show_themselves_as_soft),
    X(query_answers_limits_as_configured),
    X(gid_table_looks_like_a_roce_host),
    X(registration_refuses_what_a_kernel_refuses),
    X(keys_differ_and_are_not_used_again_at_once),
    X(a_full_key_table_is_enomem_until_one_is_released),
    X(a_sparse_mapping_registers_at_once_and_stays_sparse),
    X(locked_memory_is_limited_without_the_capability),
    X(write_and_read_move_the_bytes),
    X(a_queue_pair_may_talk_to_itself),
    X(iova_is_the_address_that_requests_use),
    X(several_entries_are_gathered_and_scattered),
    X(write_with_immediate_takes_a_receive),
    X(inline_data_is_taken_while_posting),
    X(unsignalled_requests_complete_silently),
    X(a_chain_stops_at_the_first_bad_request),
    X(a_full_send_queue_is_enomem),
    X(a_message_over_max_msg_sz_is_a_length_error),
    X(keys_ranges_and_rights_are_checked),
    X(ranges_do_not_wrap),
    X(keys_belong_to_their_protection_domain),
    X(a_dead_address_is_a_status),
    X(a_bad_receive_fails_both_ends),
    X(a_bad_status_flushes_everything_in_order),
    X(a_peer_that_is_gone_exceeds_the_retries),
    X(a_peer_that_comes_late_is_reached_by_a_retry),
    X(gids_of_different_kinds_do_not_meet),
    X(a_receiver_that_is_not_ready_is_retried),
    X(states_follow_the_rules),
    X(parents_with_children_are_busy),
    X(a_handle_that_was_closed_is_einval),
    X(an_overrun_completion_queue_takes_its_queue_pairs_along),
    X(a_requested_event_arrives_once),
    X(a_delayed_completion_delays_no_other_queue_pair),
    X(nothing_moves_after_destroy_qp_or_dereg_mr),
    X(taking_away_what_a_copy_uses_waits_for_the_copy),
    X(a_peer_that_fails_in_the_middle_flushes_its_receive),
    X(a_long_transfer_leaves_room_for_others),
    X(completions_keep_the_order_of_posting),
    X(injected_failures_do_nothing_else_and_count),
    X(a_delay_makes_a_verb_take_longer),
    X(a_child_gets_errors_and_the_parent_goes_on),
    X(exit_with_work_in_flight_is_clean),
    X(a_container_that_forbids_process_vm_readv_is_no_obstacle),
    X(an_older_kernel_is_asked_by_reading_its_maps),
    X(threads_do_everything_at_once),
    X(threads_share_a_queue_pair_and_no_completion_is_lost),
#undef X
};

int main(int argc, char **argv)
{
    alarm(600);
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        int wanted = argc == 1 || argv[1][0] == '-';

        for (int j = 1; j < argc; j++)
            if (!strcmp(argv[j] + (argv[j][0] == '-'), checks[i].name))
                wanted = argv[j][0] != '-';
        if (!wanted)
            continue;
        printf("%s\n", checks[i].name);
        fflush(stdout);
        checks[i].run();
    }
    return 0;
}
