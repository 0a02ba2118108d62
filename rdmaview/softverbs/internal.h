/*
 * What the files of the soft device share.
 *
 * One mutex guards all state: the live objects, the queues and the memory regions' keys.
 * It is never held while anyone sleeps or while bytes are copied, save for the few that a
 * request carries inline.  What a copy needs is kept alive by counts instead (mr->busy,
 * qp->running, qp->responding), and whoever takes such an object away waits for its count.
 */
#ifndef SOFTVERBS_INTERNAL_H
#define SOFTVERBS_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "softverbs.h"

#define container_of(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))

#define GID_COUNT 4
#define MAX_SGE 32
#define MAX_INLINE_DATA 512

/* ---- live objects (objects.c) ---- */

enum kind { KIND_CONTEXT, KIND_PD, KIND_MR, KIND_CHANNEL, KIND_CQ, KIND_QP, KIND_AH, KIND_COUNT };

struct object {
    void *handle; /* what the caller holds */
    void *memory; /* what is freed */
    enum kind kind;
    unsigned generation; /* number of forks since the library was loaded */
    struct object *next;
};

extern pthread_mutex_t state_lock;
extern pthread_cond_t state_idle;

void state_wait_idle(void);
void state_wake_idle(void);

int object_add(struct object *object, enum kind kind, void *handle, void *memory, uint64_t most);
void object_remove(struct object *object);
void object_free(struct object *object);
int object_find(enum kind kind, const void *handle, struct object **found);
uint64_t object_count(enum kind kind);

/* ---- limits, failures, delays, counters (control.c) ---- */

#define POINTER_VERBS(X)                                                                           \
    X(get_device_list)                                                                             \
    X(open_device)                                                                                 \
    X(alloc_pd)                                                                                    \
    X(reg_mr)                                                                                      \
    X(reg_dmabuf_mr)                                                                               \
    X(create_comp_channel)                                                                         \
    X(create_cq)                                                                                   \
    X(create_qp)                                                                                   \
    X(create_ah)                                                                                   \
    X(create_srq)

#define INT_VERBS(X)                                                                               \
    X(close_device)                                                                                \
    X(query_device)                                                                                \
    X(query_port)                                                                                  \
    X(query_gid)                                                                                   \
    X(query_pkey)                                                                                  \
    X(dealloc_pd)                                                                                  \
    X(rereg_mr)                                                                                    \
    X(dereg_mr)                                                                                    \
    X(destroy_comp_channel)                                                                        \
    X(get_cq_event)                                                                                \
    X(get_async_event)                                                                             \
    X(resize_cq)                                                                                   \
    X(destroy_cq)                                                                                  \
    X(poll_cq)                                                                                     \
    X(req_notify_cq)                                                                               \
    X(query_qp)                                                                                    \
    X(modify_qp)                                                                                   \
    X(destroy_qp)                                                                                  \
    X(post_send)                                                                                   \
    X(post_recv)                                                                                   \
    X(destroy_ah)                                                                                  \
    X(fork_init)

enum verb {
#define X(name) VERB_##name,
    POINTER_VERBS(X) INT_VERBS(X)
#undef X
        VERB_COUNT
};

/* name, default, least, most */
#define LIMITS(X)                                                                                  \
    X(max_mr_size, UINT64_MAX, 1, UINT64_MAX)                                                      \
    X(max_msg_sz, 0x40000000, 1, UINT32_MAX)                                                       \
    X(max_mr, 0x7ffff, 0, 0xfffff)                                                                 \
    X(max_pd, 0x7ffc, 0, INT32_MAX)                                                                \
    X(max_cq, 0x7ffff, 0, INT32_MAX)                                                               \
    X(max_cqe, 0x3fffff, 1, 0x3fffff)                                                              \
    X(max_qp, 0xffff, 0, 0xffff)                                                                   \
    X(max_qp_wr, 0x4000, 1, 0x100000)                                                              \
    X(max_sge, MAX_SGE, 1, MAX_SGE)                                                                \
    X(max_sge_rd, MAX_SGE, 1, MAX_SGE)                                                             \
    X(max_ah, 0x7fff, 0, INT32_MAX)                                                                \
    X(max_qp_rd_atom, 128, 0, 255)                                                                 \
    X(max_qp_init_rd_atom, 128, 0, 255)                                                            \
    X(max_res_rd_atom, 0x3f000, 0, INT32_MAX)                                                      \
    X(odp_general_caps, 0, 0, 3)                                                                   \
    X(odp_rc_caps, 0, 0, 63)                                                                       \
    X(max_chain, UINT64_MAX, 0, UINT64_MAX)

enum limit {
#define X(name, initial, least, most) LIMIT_##name,
    LIMITS(X)
#undef X
        LIMIT_COUNT
};

uint64_t limit(enum limit which);

/*
 * Counts the call, sleeps if a delay is set, and says whether a failure is injected.
 * Then *result is what an int verb returns, and errno is set.
 */
bool verb_fails(enum verb verb, int *result);

uint64_t completion_delay_ns(void);
uint64_t now_ns(void);

/* ---- events on a file descriptor (events.c) ---- */

/* At most one entry of each notice is linked, so announcing never allocates. */
struct notice {
    struct notice *next;
    void *element;
    int type;
    unsigned count;
};

struct mailbox {
    int fd;
    struct notice *first;
};

int mailbox_open(struct mailbox *mailbox);
void mailbox_close(struct mailbox *mailbox);
void mailbox_announce(struct mailbox *mailbox, struct notice *notice);
void mailbox_forget(struct mailbox *mailbox, struct notice *notice);
int mailbox_wait(struct mailbox *mailbox);
struct notice *mailbox_take(struct mailbox *mailbox);

/* ---- devices (device.c) ---- */

struct soft_device {
    struct ibv_device ibv;
    uint64_t guid; /* host order */
    uint8_t ipv4[4];
};

struct soft_context {
    struct verbs_context verbs;
    struct object object;
    const struct soft_device *device;
    struct mailbox async;
    unsigned children;
};

int context_find(struct ibv_context *handle, struct soft_context **found);
int device_gid(const struct soft_device *device, uint32_t index, union ibv_gid *gid);
enum ibv_gid_type device_gid_type(uint32_t index);

/* ---- protection domains and memory regions (memory.c) ---- */

struct soft_pd {
    struct ibv_pd ibv;
    struct object object;
    struct soft_context *context;
    unsigned children;
};

struct soft_mr {
    struct ibv_mr ibv;
    struct object object;
    struct soft_pd *pd;
    uint64_t address;
    uint64_t length;
    uint64_t iova;
    uint64_t pages;
    uint32_t lkey;
    unsigned access;
    unsigned busy; /* copies in progress */
    void *mapping; /* of a dma-buf; NULL if the memory is the program's */
    size_t mapping_size;
};

int pd_find(struct ibv_pd *handle, struct soft_pd **found);

/* The region that a key names in a role, or NULL where an HCA would refuse it. */
struct soft_mr *mr_by_lkey(const struct soft_pd *pd, uint32_t lkey, unsigned access);
struct soft_mr *mr_by_rkey(const struct soft_pd *pd, uint32_t rkey, unsigned access);
bool mr_covers(const struct soft_mr *mr, uint64_t iova, uint64_t length);

void memory_forget(void);

/* ---- completion channels (events.c) ---- */

struct soft_channel {
    struct ibv_comp_channel ibv;
    struct object object;
    struct soft_context *context;
    struct mailbox mailbox;
    unsigned children;
};

int channel_find(struct ibv_comp_channel *handle, struct soft_channel **found);

/* ---- completion queues and queue pairs (queue.c) ---- */

struct soft_cq {
    struct ibv_cq ibv;
    struct object object;
    struct soft_context *context;
    struct soft_channel *channel;
    struct ibv_wc *ring;
    uint32_t depth;
    uint32_t head;
    uint32_t used;
    bool overrun;
    bool armed;
    bool armed_solicited;
    struct notice completion;
    struct notice failure;
    unsigned events_delivered;
    unsigned children;
};

void cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited);

int soft_poll_cq(struct ibv_cq *handle, int capacity, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *handle, int solicited_only);

struct send_wqe {
    uint64_t wr_id;
    enum ibv_wr_opcode opcode;
    unsigned flags;
    uint32_t imm_data;
    uint64_t remote_address;
    uint32_t rkey;
    int sge_count;
    uint64_t length;
    uint64_t done; /* bytes moved so far */
    uint64_t not_before;
    unsigned tries;
    unsigned rnr_tries;
    unsigned peer_epoch;
};

struct recv_wqe {
    uint64_t wr_id;
    int sge_count;
};

struct ring {
    uint32_t depth;
    uint32_t head;
    uint32_t used;
};

struct soft_qp {
    struct ibv_qp ibv;
    struct object object;
    struct soft_context *context;
    struct soft_pd *pd;
    struct soft_cq *send_cq;
    struct soft_cq *recv_cq;
    struct ibv_qp_cap cap;
    uint32_t number;
    bool signal_all;

    enum ibv_qp_state state;
    struct ibv_qp_attr attr; /* as last modified */
    unsigned epoch;          /* number of resets: a peer must not go on with an older life */

    struct ring send;
    struct send_wqe *send_wqes;
    struct ibv_sge *send_sges;
    uint8_t *inline_data;
    struct ring recv;
    struct recv_wqe *recv_wqes;
    struct ibv_sge *recv_sges;

    bool dying;
    unsigned modifying;  /* threads that wait in modify_qp */
    bool running;        /* a thread executes the head of the send queue */
    unsigned responding; /* copies in progress for which this is the peer */
    bool scheduled;      /* in the worker's list */
    uint64_t due;
    struct soft_qp *next_scheduled;
    struct soft_qp *next; /* all queue pairs */
};

static inline uint32_t ring_next(const struct ring *ring)
{
    return (ring->head + ring->used) % ring->depth;
}

static inline void ring_pop(struct ring *ring)
{
    ring->head = (ring->head + 1) % ring->depth;
    ring->used--;
}

struct soft_qp *qp_by_number(uint32_t number);
void qp_fail(struct soft_qp *qp);
void qp_flush(struct soft_qp *qp);
void qp_forget(void);

int soft_post_send(struct ibv_qp *handle, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int soft_post_recv(struct ibv_qp *handle, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

/* ---- execution (transfer.c) ---- */

/* With the lock held; transfer_start lets go of it while copying. */
void transfer_start(struct soft_qp *qp);
void transfer_unschedule(struct soft_qp *qp);
void transfer_forget(void);

void transfer_stop(void);

/* Copies without faulting; returns false when an address is dead on either side. */
bool copy_bytes(const struct iovec *to, int to_count, const struct iovec *from, int from_count);

#endif
