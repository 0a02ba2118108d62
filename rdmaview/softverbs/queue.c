/* Completion queues and queue pairs: their making, their states, posting and polling. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define QP_NUMBERS 0x1000000u
#define QP_BUCKETS 1024

static struct soft_qp *qp_buckets[QP_BUCKETS];
static uint32_t next_qp_number;

/* ---- completion queues ---- */

static int cq_find(struct ibv_cq *handle, struct soft_cq **found)
{
    struct object *object;
    int error = object_find(KIND_CQ, handle, &object);

    if (!error)
        *found = container_of(object, struct soft_cq, object);
    return error;
}

static int add_cq(struct soft_cq *cq)
{
    int error = context_find(cq->ibv.context, &cq->context);

    if (!error && cq->ibv.channel)
        error = channel_find(cq->ibv.channel, &cq->channel);
    if (!error && cq->channel && cq->channel->context != cq->context)
        error = EINVAL;
    if (!error)
        error = object_add(&cq->object, KIND_CQ, &cq->ibv, cq, limit(LIMIT_max_cq));
    if (error)
        return error;
    cq->context->children++;
    if (cq->channel)
        cq->channel->children++;
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *handle, int cqe, void *cq_context,
                             struct ibv_comp_channel *channel, int comp_vector)
{
    struct soft_cq *cq;
    int result;

    if (verb_fails(VERB_create_cq, &result))
        return NULL;
    if (cqe < 1 || (uint64_t)cqe > limit(LIMIT_max_cqe) || comp_vector != 0) {
        errno = EINVAL;
        return NULL;
    }
    cq = calloc(1, sizeof(*cq));
    if (!cq)
        return NULL;
    cq->ring = calloc((size_t)cqe, sizeof(*cq->ring));
    if (!cq->ring) {
        free(cq);
        errno = ENOMEM;
        return NULL;
    }
    cq->ibv.context = handle;
    cq->ibv.channel = channel;
    cq->ibv.cq_context = cq_context;
    cq->ibv.cqe = cqe;
    cq->depth = (uint32_t)cqe;
    cq->completion.element = cq;
    cq->failure.element = &cq->ibv;
    cq->failure.type = IBV_EVENT_CQ_ERR;
    pthread_mutex_init(&cq->ibv.mutex, NULL);
    pthread_cond_init(&cq->ibv.cond, NULL);

    pthread_mutex_lock(&state_lock);
    result = add_cq(cq);
    pthread_mutex_unlock(&state_lock);
    if (result) {
        free(cq->ring);
        free(cq);
        errno = result;
        return NULL;
    }
    return &cq->ibv;
}

int ibv_destroy_cq(struct ibv_cq *handle)
{
    struct soft_cq *cq;
    int result;

    if (verb_fails(VERB_destroy_cq, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = cq_find(handle, &cq);
    if (!result && cq->children)
        result = EBUSY;
    if (result) {
        pthread_mutex_unlock(&state_lock);
        return result;
    }
    object_remove(&cq->object);
    mailbox_forget(&cq->context->async, &cq->failure);
    if (cq->channel)
        mailbox_forget(&cq->channel->mailbox, &cq->completion);
    pthread_mutex_unlock(&state_lock);

    /* As in libibverbs: an event that was taken and not acknowledged holds the queue. */
    pthread_mutex_lock(&handle->mutex);
    while (handle->comp_events_completed != cq->events_delivered)
        pthread_cond_wait(&handle->cond, &handle->mutex);
    pthread_mutex_unlock(&handle->mutex);

    pthread_mutex_lock(&state_lock);
    cq->context->children--;
    if (cq->channel)
        cq->channel->children--;
    free(cq->ring);
    object_free(&cq->object);
    pthread_mutex_unlock(&state_lock);
    return 0;
}

/* A completion that finds no room is lost, and with it everything that uses the queue. */
static void cq_overrun(struct soft_cq *cq)
{
    cq->overrun = true;
    mailbox_announce(&cq->context->async, &cq->failure);
    for (int i = 0; i < QP_BUCKETS; i++)
        for (struct soft_qp *qp = qp_buckets[i]; qp; qp = qp->next)
            if ((qp->send_cq == cq || qp->recv_cq == cq) && qp->state != IBV_QPS_RESET)
                qp_fail(qp);
}

void cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited)
{
    if (cq->overrun)
        return;
    if (cq->used == cq->depth) {
        cq_overrun(cq);
        return;
    }
    cq->ring[(cq->head + cq->used++) % cq->depth] = *wc;
    if (cq->armed && (!cq->armed_solicited || solicited || wc->status != IBV_WC_SUCCESS)) {
        cq->armed = false;
        mailbox_announce(&cq->channel->mailbox, &cq->completion);
    }
}

int soft_poll_cq(struct ibv_cq *handle, int capacity, struct ibv_wc *wc)
{
    struct soft_cq *cq;
    int result, taken = 0;

    if (verb_fails(VERB_poll_cq, &result))
        return result < 0 ? result : -result;
    pthread_mutex_lock(&state_lock);
    result = cq_find(handle, &cq);
    if (!result)
        for (; taken < capacity && cq->used; taken++) {
            wc[taken] = cq->ring[cq->head];
            cq->head = (cq->head + 1) % cq->depth;
            cq->used--;
        }
    pthread_mutex_unlock(&state_lock);
    return result ? -result : taken;
}

int soft_req_notify_cq(struct ibv_cq *handle, int solicited_only)
{
    struct soft_cq *cq;
    int result;

    if (verb_fails(VERB_req_notify_cq, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = cq_find(handle, &cq);
    if (!result && cq->channel) {
        /* A request for any completion isn't weakened by a later one for solicited ones. */
        cq->armed_solicited = solicited_only && (!cq->armed || cq->armed_solicited);
        cq->armed = true;
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

/* ---- queue pairs ---- */

static int qp_find(struct ibv_qp *handle, struct soft_qp **found)
{
    struct object *object;
    int error = object_find(KIND_QP, handle, &object);

    if (!error)
        *found = container_of(object, struct soft_qp, object);
    return error;
}

struct soft_qp *qp_by_number(uint32_t number)
{
    struct soft_qp *qp = qp_buckets[number % QP_BUCKETS];

    while (qp && qp->number != number)
        qp = qp->next;
    return qp;
}

/*
 * Numbers begin anywhere, so a peer's number that belongs to another process isn't mistaken
 * for one of ours.
 */
static uint32_t take_qp_number(void)
{
    if (!next_qp_number && getrandom(&next_qp_number, sizeof(next_qp_number), GRND_NONBLOCK) < 0)
        next_qp_number = (uint32_t)now_ns();
    do
        next_qp_number = (next_qp_number + 1) % QP_NUMBERS;
    while (next_qp_number < 2 || qp_by_number(next_qp_number));
    return next_qp_number;
}

void qp_forget(void)
{
    memset(qp_buckets, 0, sizeof(qp_buckets));
    next_qp_number = 0;
}

static int check_cap(const struct ibv_qp_init_attr *init)
{
    const struct ibv_qp_cap *cap = &init->cap;
    uint64_t max_wr = limit(LIMIT_max_qp_wr), max_sge = limit(LIMIT_max_sge);

    if (init->qp_type != IBV_QPT_RC || init->srq)
        return EOPNOTSUPP;
    if (cap->max_send_wr > max_wr || cap->max_recv_wr > max_wr || cap->max_send_sge > max_sge ||
        cap->max_recv_sge > max_sge || cap->max_inline_data > MAX_INLINE_DATA)
        return EINVAL;
    return 0;
}

static void free_rings(struct soft_qp *qp)
{
    free(qp->send_wqes);
    free(qp->send_sges);
    free(qp->inline_data);
    free(qp->recv_wqes);
    free(qp->recv_sges);
}

/* One more than asked for, so that an empty queue isn't a failed allocation. */
static bool allocate_rings(struct soft_qp *qp)
{
    const struct ibv_qp_cap *cap = &qp->cap;

    qp->send.depth = cap->max_send_wr;
    qp->recv.depth = cap->max_recv_wr;
    qp->send_wqes = calloc((size_t)cap->max_send_wr + 1, sizeof(*qp->send_wqes));
    qp->send_sges =
        calloc((size_t)cap->max_send_wr * cap->max_send_sge + 1, sizeof(*qp->send_sges));
    qp->inline_data = calloc((size_t)cap->max_send_wr * cap->max_inline_data + 1, 1);
    qp->recv_wqes = calloc((size_t)cap->max_recv_wr + 1, sizeof(*qp->recv_wqes));
    qp->recv_sges =
        calloc((size_t)cap->max_recv_wr * cap->max_recv_sge + 1, sizeof(*qp->recv_sges));
    return qp->send_wqes && qp->send_sges && qp->inline_data && qp->recv_wqes && qp->recv_sges;
}

static int add_qp(struct soft_qp *qp)
{
    struct soft_qp **bucket;
    int error = pd_find(qp->ibv.pd, &qp->pd);

    if (!error)
        error = cq_find(qp->ibv.send_cq, &qp->send_cq);
    if (!error)
        error = cq_find(qp->ibv.recv_cq, &qp->recv_cq);
    if (error)
        return error;
    qp->context = qp->pd->context;
    if (qp->send_cq->context != qp->context || qp->recv_cq->context != qp->context)
        return EINVAL;
    error = object_add(&qp->object, KIND_QP, &qp->ibv, qp, limit(LIMIT_max_qp));
    if (error)
        return error;
    qp->number = take_qp_number();
    qp->ibv.qp_num = qp->ibv.handle = qp->number;
    qp->ibv.context = qp->pd->ibv.context;
    bucket = &qp_buckets[qp->number % QP_BUCKETS];
    qp->next = *bucket;
    *bucket = qp;
    qp->pd->children++;
    qp->send_cq->children++;
    qp->recv_cq->children++;
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    struct soft_qp *qp;
    int result;

    if (verb_fails(VERB_create_qp, &result))
        return NULL;
    result = check_cap(init);
    if (result) {
        errno = result;
        return NULL;
    }
    qp = calloc(1, sizeof(*qp));
    if (!qp)
        return NULL;
    qp->ibv.qp_context = init->qp_context;
    qp->ibv.pd = pd;
    qp->ibv.send_cq = init->send_cq;
    qp->ibv.recv_cq = init->recv_cq;
    qp->ibv.qp_type = init->qp_type;
    qp->cap = init->cap;
    qp->signal_all = init->sq_sig_all;
    pthread_mutex_init(&qp->ibv.mutex, NULL);
    pthread_cond_init(&qp->ibv.cond, NULL);

    result = allocate_rings(qp) ? 0 : ENOMEM;
    if (!result) {
        pthread_mutex_lock(&state_lock);
        result = add_qp(qp);
        pthread_mutex_unlock(&state_lock);
    }
    if (result) {
        free_rings(qp);
        free(qp);
        errno = result;
        return NULL;
    }
    return &qp->ibv;
}

int ibv_destroy_qp(struct ibv_qp *handle)
{
    struct soft_qp *qp, **link;
    int result;

    if (verb_fails(VERB_destroy_qp, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = qp_find(handle, &qp);
    if (!result) {
        object_remove(&qp->object);
        qp->dying = true;
        link = &qp_buckets[qp->number % QP_BUCKETS];
        while (*link != qp)
            link = &(*link)->next;
        *link = qp->next;
        state_wake_idle();
        while (qp->running || qp->responding || qp->modifying)
            state_wait_idle();
        transfer_unschedule(qp);
        qp->pd->children--;
        qp->send_cq->children--;
        qp->recv_cq->children--;
        free_rings(qp);
        object_free(&qp->object);
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

/* Flushing waits for the thread that is still in a work request of the queue. */
void qp_flush(struct soft_qp *qp)
{
    struct ibv_wc wc = {.status = IBV_WC_WR_FLUSH_ERR, .qp_num = qp->number};

    if (qp->state != IBV_QPS_ERR || qp->dying)
        return;
    while (!qp->running && qp->send.used) {
        wc.wr_id = qp->send_wqes[qp->send.head].wr_id;
        ring_pop(&qp->send);
        cq_push(qp->send_cq, &wc, false);
    }
    while (!qp->responding && qp->recv.used) {
        wc.wr_id = qp->recv_wqes[qp->recv.head].wr_id;
        ring_pop(&qp->recv);
        cq_push(qp->recv_cq, &wc, false);
    }
}

void qp_fail(struct soft_qp *qp)
{
    if (qp->state == IBV_QPS_ERR)
        return;
    qp->state = IBV_QPS_ERR;
    transfer_unschedule(qp);
    qp_flush(qp);
}

/* ---- states ---- */

#define FROM_RESET (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define TO_RTR                                                                                     \
    (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |   \
     IBV_QP_MIN_RNR_TIMER)
#define TO_RTS                                                                                     \
    (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

/* What InfiniBand demands and allows of an RC queue pair; SQD and SQE aren't offered. */
static const struct {
    enum ibv_qp_state from, to;
    int required, optional;
} transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, FROM_RESET, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, FROM_RESET},
    {IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR, IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS, TO_RTS,
     IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE |
         IBV_QP_MIN_RNR_TIMER},
};

static bool transition_allowed(enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
    mask &= ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        return !mask;
    for (size_t i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++) {
        int required = transitions[i].required;

        if (transitions[i].from == from && transitions[i].to == to)
            return (mask & required) == required && !(mask & ~(required | transitions[i].optional));
    }
    return false;
}

static bool values_allowed(const struct ibv_qp_attr *attr, int mask)
{
    if ((mask & IBV_QP_PORT) && attr->port_num != 1)
        return false;
    if ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index != 0)
        return false;
    /* RoCE has no addressing without GIDs. */
    if ((mask & IBV_QP_AV) && (!attr->ah_attr.is_global || attr->ah_attr.port_num != 1 ||
                               attr->ah_attr.grh.sgid_index >= GID_COUNT))
        return false;
    if ((mask & IBV_QP_PATH_MTU) &&
        (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
        return false;
    if ((mask & IBV_QP_DEST_QPN) && attr->dest_qp_num >= QP_NUMBERS)
        return false;
    if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) &&
        attr->max_dest_rd_atomic > limit(LIMIT_max_qp_rd_atom))
        return false;
    if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) &&
        attr->max_rd_atomic > limit(LIMIT_max_qp_init_rd_atom))
        return false;
    if ((mask & IBV_QP_MIN_RNR_TIMER) && attr->min_rnr_timer > 31)
        return false;
    if ((mask & IBV_QP_TIMEOUT) && attr->timeout > 31)
        return false;
    if ((mask & IBV_QP_RETRY_CNT) && attr->retry_cnt > 7)
        return false;
    if ((mask & IBV_QP_RNR_RETRY) && attr->rnr_retry > 7)
        return false;
    return true;
}

static void set_attributes(struct ibv_qp_attr *to, const struct ibv_qp_attr *from, int mask)
{
#define SET(bit, member)                                                                           \
    if (mask & (bit))                                                                              \
    to->member = from->member
    SET(IBV_QP_ACCESS_FLAGS, qp_access_flags);
    SET(IBV_QP_PKEY_INDEX, pkey_index);
    SET(IBV_QP_PORT, port_num);
    SET(IBV_QP_AV, ah_attr);
    SET(IBV_QP_PATH_MTU, path_mtu);
    SET(IBV_QP_DEST_QPN, dest_qp_num);
    SET(IBV_QP_RQ_PSN, rq_psn);
    SET(IBV_QP_SQ_PSN, sq_psn);
    SET(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
    SET(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    SET(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
    SET(IBV_QP_TIMEOUT, timeout);
    SET(IBV_QP_RETRY_CNT, retry_cnt);
    SET(IBV_QP_RNR_RETRY, rnr_retry);
    SET(IBV_QP_ALT_PATH, alt_ah_attr);
    SET(IBV_QP_PATH_MIG_STATE, path_mig_state);
#undef SET
}

static void wait_until_still(struct soft_qp *qp)
{
    qp->modifying++;
    while (!qp->dying && (qp->running || qp->responding))
        state_wait_idle();
    qp->modifying--;
    state_wake_idle();
}

static int modify(struct soft_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : qp->state;

    if ((mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != qp->state)
        return EINVAL;
    if (!transition_allowed(qp->state, to, mask) || !values_allowed(attr, mask))
        return EINVAL;

    if (to == IBV_QPS_ERR) {
        qp_fail(qp);
        wait_until_still(qp);
    } else if (to == IBV_QPS_RESET) {
        qp->state = IBV_QPS_RESET;
        transfer_unschedule(qp);
        wait_until_still(qp);
        qp->send.used = qp->recv.used = 0;
        qp->epoch++;
        memset(&qp->attr, 0, sizeof(qp->attr));
    } else {
        set_attributes(&qp->attr, attr, mask);
        qp->state = to;
    }
    qp->ibv.state = to;
    return 0;
}

int ibv_modify_qp(struct ibv_qp *handle, struct ibv_qp_attr *attr, int mask)
{
    struct soft_qp *qp;
    int result;

    if (verb_fails(VERB_modify_qp, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = qp_find(handle, &qp);
    if (!result)
        result = modify(qp, attr, mask);
    pthread_mutex_unlock(&state_lock);
    return result;
}

int ibv_query_qp(struct ibv_qp *handle, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init)
{
    struct soft_qp *qp;
    int result;

    (void)mask; /* says what is needed at least */
    if (verb_fails(VERB_query_qp, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = qp_find(handle, &qp);
    if (!result) {
        *attr = qp->attr;
        attr->qp_state = attr->cur_qp_state = qp->state;
        attr->cap = qp->cap;
        *init = (struct ibv_qp_init_attr){
            .qp_context = qp->ibv.qp_context,
            .send_cq = qp->ibv.send_cq,
            .recv_cq = qp->ibv.recv_cq,
            .cap = qp->cap,
            .qp_type = qp->ibv.qp_type,
            .sq_sig_all = qp->signal_all,
        };
        qp->ibv.state = qp->state;
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

/* ---- posting ---- */

static bool opcode_supported(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
           opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_READ;
}

/* A provider copies inline data while posting; a dead address is EFAULT here. */
static int take_inline_data(const struct soft_qp *qp, uint32_t slot, const struct ibv_send_wr *wr,
                            uint64_t length)
{
    struct iovec to = {qp->inline_data + (size_t)slot * qp->cap.max_inline_data, length};
    struct iovec from[MAX_SGE];

    for (int i = 0; i < wr->num_sge; i++)
        from[i] = (struct iovec){(void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length};
    return !length || copy_bytes(&to, 1, from, wr->num_sge) ? 0 : EFAULT;
}

static int enqueue_send(struct soft_qp *qp, const struct ibv_send_wr *wr)
{
    uint64_t length = 0, delay = completion_delay_ns();
    uint32_t slot;

    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge ||
        !opcode_supported(wr->opcode))
        return EINVAL;
    for (int i = 0; i < wr->num_sge; i++)
        length += wr->sg_list[i].length;
    if ((wr->send_flags & IBV_SEND_INLINE) &&
        (length > qp->cap.max_inline_data || wr->opcode == IBV_WR_RDMA_READ))
        return EINVAL;
    if (qp->send.used == qp->send.depth)
        return ENOMEM;

    slot = ring_next(&qp->send);
    if (wr->send_flags & IBV_SEND_INLINE) {
        int error = take_inline_data(qp, slot, wr, length);

        if (error)
            return error;
    } else {
        memcpy(qp->send_sges + (size_t)slot * qp->cap.max_send_sge, wr->sg_list,
               (size_t)wr->num_sge * sizeof(*wr->sg_list));
    }
    qp->send_wqes[slot] = (struct send_wqe){
        .wr_id = wr->wr_id,
        .opcode = wr->opcode,
        .flags = wr->send_flags,
        .imm_data = wr->imm_data,
        .remote_address = wr->wr.rdma.remote_addr,
        .rkey = wr->wr.rdma.rkey,
        .sge_count = wr->num_sge,
        .length = length,
        .not_before = delay ? now_ns() + delay : 0,
    };
    qp->send.used++;
    return 0;
}

int soft_post_send(struct ibv_qp *handle, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
    struct soft_qp *qp;
    uint64_t posted = 0, most = limit(LIMIT_max_chain);
    int result;

    if (verb_fails(VERB_post_send, &result)) {
        *bad_wr = wr;
        return result;
    }
    pthread_mutex_lock(&state_lock);
    result = qp_find(handle, &qp);
    if (!result && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR)
        result = EINVAL;
    for (; !result && wr; wr = wr->next) {
        result = posted < most ? enqueue_send(qp, wr) : ENOMEM;
        if (result)
            break;
        posted++;
    }
    if (result)
        *bad_wr = wr;
    /* What was posted before a bad request is executed all the same. */
    if (posted)
        transfer_start(qp);
    pthread_mutex_unlock(&state_lock);
    return result;
}

int soft_post_recv(struct ibv_qp *handle, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    struct soft_qp *qp;
    int result;

    if (verb_fails(VERB_post_recv, &result)) {
        *bad_wr = wr;
        return result;
    }
    pthread_mutex_lock(&state_lock);
    result = qp_find(handle, &qp);
    if (!result && qp->state == IBV_QPS_RESET)
        result = EINVAL;
    for (; !result && wr; wr = wr->next) {
        uint32_t slot;

        if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_recv_sge)
            result = EINVAL;
        else if (qp->recv.used == qp->recv.depth)
            result = ENOMEM;
        if (result)
            break;
        slot = ring_next(&qp->recv);
        qp->recv_wqes[slot] = (struct recv_wqe){wr->wr_id, wr->num_sge};
        memcpy(qp->recv_sges + (size_t)slot * qp->cap.max_recv_sge, wr->sg_list,
               (size_t)wr->num_sge * sizeof(*wr->sg_list));
        qp->recv.used++;
        qp_flush(qp);
    }
    if (result)
        *bad_wr = wr;
    pthread_mutex_unlock(&state_lock);
    return result;
}

/* ---- address handles ---- */

struct soft_ah {
    struct ibv_ah ibv;
    struct object object;
    struct soft_pd *pd;
};

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    struct soft_ah *ah;
    int result;

    if (verb_fails(VERB_create_ah, &result))
        return NULL;
    if (!values_allowed(&(struct ibv_qp_attr){.ah_attr = *attr}, IBV_QP_AV)) {
        errno = EINVAL;
        return NULL;
    }
    ah = calloc(1, sizeof(*ah));
    if (!ah)
        return NULL;
    ah->ibv.pd = pd;
    pthread_mutex_lock(&state_lock);
    result = pd_find(pd, &ah->pd);
    if (!result)
        result = object_add(&ah->object, KIND_AH, &ah->ibv, ah, limit(LIMIT_max_ah));
    if (!result) {
        ah->pd->children++;
        ah->ibv.context = ah->pd->ibv.context;
    }
    pthread_mutex_unlock(&state_lock);
    if (result) {
        free(ah);
        errno = result;
        return NULL;
    }
    return &ah->ibv;
}

int ibv_destroy_ah(struct ibv_ah *handle)
{
    struct object *object;
    int result;

    if (verb_fails(VERB_destroy_ah, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = object_find(KIND_AH, handle, &object);
    if (!result) {
        object_remove(object);
        container_of(object, struct soft_ah, object)->pd->children--;
        object_free(object);
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

/* ---- what isn't offered, answered as a provider does that lacks it ---- */

int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
    int result;

    (void)cq, (void)cqe;
    return verb_fails(VERB_resize_cq, &result) ? result : EOPNOTSUPP;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
    int result;

    (void)pd, (void)init;
    if (!verb_fails(VERB_create_srq, &result))
        errno = EOPNOTSUPP;
    return NULL;
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
    (void)srq, (void)attr, (void)mask;
    return EOPNOTSUPP;
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
    (void)srq, (void)attr;
    return EOPNOTSUPP;
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
    (void)srq;
    return EOPNOTSUPP;
}

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    (void)qp, (void)gid, (void)lid;
    return EOPNOTSUPP;
}

int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    (void)qp, (void)gid, (void)lid;
    return EOPNOTSUPP;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    (void)qp, (void)ece;
    return EOPNOTSUPP;
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    (void)qp, (void)ece;
    return EOPNOTSUPP;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
    (void)qp;
    return NULL; /* as for a queue pair that wasn't made with send_ops_flags */
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
    (void)qp, (void)op, (void)flags;
    return 0;
}
