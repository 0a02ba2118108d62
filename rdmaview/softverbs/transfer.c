/*
 * The engine: takes work requests from the head of a send queue, checks them as an HCA
 * does, and moves their bytes.
 *
 * Small work is executed by the thread that posts it, everything else by one background
 * thread, in slices, so that a long transfer delays neither other queue pairs nor a
 * destroy_qp or dereg_mr for long.  Every slice is checked anew: a region that was
 * deregistered in between is an error of the work request, as on an HCA.
 *
 * Statuses are rxe's, save where rxe (Linux 6.1) leaves InfiniBand and other devices:
 *   wrong lkey              LOC_PROT_ERR            rxe: LOC_QP_OP_ERR
 *   receive too short       REM_INV_REQ_ERR, and    rxe: REM_OP_ERR, and
 *                           LOC_LEN_ERR there            LOC_QP_OP_ERR there
 *   receive's lkey wrong    LOC_PROT_ERR there      rxe: LOC_QP_OP_ERR there
 *   more than max_msg_sz    LOC_LEN_ERR             rxe: succeeds
 *   completion queue full   its queue pairs fail    rxe: completions are lost
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLICE_BYTES (1u << 20)
#define SMALL_BYTES (64u << 10)
#define TURN_REQUESTS 64

/* A dead peer is found after the queue pair's own timeouts, but never later than this. */
#define LONGEST_RETRY_NS 1000000000u

#define RNR_FOREVER 7

static pthread_cond_t work;
static pthread_t worker;
static bool worker_started;
static bool stopping;
static struct soft_qp *scheduled;

/* ---- copying ---- */

/* Where a container forbids process_vm_readv: reading one's own memory as a file. */
static bool copy_by_file(const struct iovec *to, int to_count, const struct iovec *from,
                         int from_count)
{
    int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    size_t to_done = 0, from_done = 0;
    bool alive = fd >= 0;

    while (alive && to_count && from_count) {
        size_t left = to->iov_len - to_done, available = from->iov_len - from_done;
        size_t length = left < available ? left : available;
        ssize_t moved = 0;

        if (length)
            moved = pread(fd, (char *)to->iov_base + to_done, length,
                          (off_t)((uintptr_t)from->iov_base + from_done));
        if (moved < 0 || (length && !moved)) {
            alive = false;
            break;
        }
        to_done += (size_t)moved;
        from_done += (size_t)moved;
        if (to_done == to->iov_len)
            to++, to_count--, to_done = 0;
        if (from_done == from->iov_len)
            from++, from_count--, from_done = 0;
    }
    if (fd >= 0)
        close(fd);
    return alive;
}

bool copy_bytes(const struct iovec *to, int to_count, const struct iovec *from, int from_count)
{
    size_t length = 0;
    ssize_t moved;

    for (int i = 0; i < to_count; i++)
        length += to[i].iov_len;
    moved = process_vm_readv(getpid(), to, (unsigned long)to_count, from,
                             (unsigned long)from_count, 0);
    if (moved < 0 && (errno == EPERM || errno == ENOSYS || errno == EACCES))
        return copy_by_file(to, to_count, from, from_count);
    return moved == (ssize_t)length;
}

/* A failed copy doesn't say which side was dead: the source is, if a page of it can't be read. */
static bool readable(const struct iovec *from, int from_count)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    for (int i = 0; i < from_count; i++) {
        size_t offset = 0;

        while (offset < from[i].iov_len) {
            char *address = (char *)from[i].iov_base + offset;
            char byte;
            struct iovec to = {&byte, 1}, one = {address, 1};

            if (!copy_bytes(&to, 1, &one, 1))
                return false;
            offset += page - ((uintptr_t)address & (page - 1));
        }
    }
    return true;
}

/* ---- what a slice moves ---- */

/* The part of a message, begin to end, that one slice moves, as memory on one side. */
struct side {
    struct iovec iov[MAX_SGE];
    struct soft_mr *mrs[MAX_SGE];
    int count;
    uint64_t position; /* in the message, while it is laid out */
    uint64_t begin, end;
};

static void side_add(struct side *side, void *memory, struct soft_mr *mr, uint64_t length)
{
    uint64_t first = side->position, last = first + length;

    side->position = last;
    if (last > side->end)
        last = side->end;
    if (first >= last || last <= side->begin)
        return;
    if (first < side->begin) {
        memory = (char *)memory + (side->begin - first);
        first = side->begin;
    }
    side->iov[side->count] = (struct iovec){memory, last - first};
    side->mrs[side->count] = mr;
    side->count++;
}

static void *mr_memory(const struct soft_mr *mr, uint64_t iova)
{
    return (void *)(uintptr_t)(mr->address + (iova - mr->iova));
}

/* Every entry is checked, also those outside the slice, before any byte moves. */
static bool side_add_sges(struct side *side, const struct soft_pd *pd, const struct ibv_sge *sges,
                          int count, unsigned access)
{
    for (int i = 0; i < count; i++) {
        struct soft_mr *mr;

        if (!sges[i].length)
            continue;
        mr = mr_by_lkey(pd, sges[i].lkey, access);
        if (!mr || !mr_covers(mr, sges[i].addr, sges[i].length))
            return false;
        side_add(side, mr_memory(mr, sges[i].addr), mr, sges[i].length);
    }
    return true;
}

static bool side_add_remote(struct side *side, const struct soft_pd *pd, const struct send_wqe *wqe,
                            unsigned access)
{
    struct soft_mr *mr;

    /* InfiniBand doesn't look at the key of an empty write or read. */
    if (!wqe->length)
        return true;
    mr = mr_by_rkey(pd, wqe->rkey, access);
    if (!mr || !mr_covers(mr, wqe->remote_address, wqe->length))
        return false;
    side_add(side, mr_memory(mr, wqe->remote_address), mr, wqe->length);
    return true;
}

static void side_hold(struct side *side)
{
    for (int i = 0; i < side->count; i++)
        if (side->mrs[i])
            side->mrs[i]->busy++;
}

static void side_release(struct side *side)
{
    for (int i = 0; i < side->count; i++)
        if (side->mrs[i])
            side->mrs[i]->busy--;
}

/* ---- completing ---- */

static bool is_read(const struct send_wqe *wqe)
{
    return wqe->opcode == IBV_WR_RDMA_READ;
}

static bool is_send(const struct send_wqe *wqe)
{
    return wqe->opcode == IBV_WR_SEND || wqe->opcode == IBV_WR_SEND_WITH_IMM;
}

static bool takes_receive(const struct send_wqe *wqe)
{
    return is_send(wqe) || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Of a bad completion, InfiniBand defines wr_id, status, qp_num and vendor_err only. */
static void finish_send(struct soft_qp *qp, enum ibv_wc_status status)
{
    struct send_wqe wqe = qp->send_wqes[qp->send.head];
    struct ibv_wc wc = {.wr_id = wqe.wr_id, .status = status, .qp_num = qp->number};

    ring_pop(&qp->send);
    qp->due = 0;
    if (status == IBV_WC_SUCCESS) {
        wc.opcode = is_send(&wqe)   ? IBV_WC_SEND
                    : is_read(&wqe) ? IBV_WC_RDMA_READ
                                    : IBV_WC_RDMA_WRITE;
        wc.byte_len = (uint32_t)wqe.length;
        if (qp->signal_all || (wqe.flags & IBV_SEND_SIGNALED))
            cq_push(qp->send_cq, &wc, false);
        return;
    }
    wc.vendor_err = status;
    cq_push(qp->send_cq, &wc, false);
    qp_fail(qp);
}

static void finish_receive(struct soft_qp *peer, const struct soft_qp *qp,
                           const struct send_wqe *wqe, enum ibv_wc_status status)
{
    struct ibv_wc wc = {
        .wr_id = peer->recv_wqes[peer->recv.head].wr_id,
        .status = status,
        .qp_num = peer->number,
    };

    ring_pop(&peer->recv);
    if (status == IBV_WC_SUCCESS) {
        wc.opcode = is_send(wqe) ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
        wc.byte_len = (uint32_t)wqe->length;
        wc.src_qp = qp->number;
        if (wqe->opcode != IBV_WR_SEND) {
            wc.wc_flags = IBV_WC_WITH_IMM;
            wc.imm_data = wqe->imm_data;
        }
    } else {
        wc.vendor_err = status;
    }
    cq_push(peer->recv_cq, &wc, wqe->flags & IBV_SEND_SOLICITED);
}

/* ---- the peer ---- */

static bool reachable(const struct soft_qp *qp, const struct soft_qp *peer)
{
    const struct ibv_global_route *out = &qp->attr.ah_attr.grh, *back = &peer->attr.ah_attr.grh;
    union ibv_gid here, there;

    /* The same index on both devices: the same RoCE version and kind of address. */
    return out->sgid_index == back->sgid_index &&
           !device_gid(qp->context->device, out->sgid_index, &here) &&
           !device_gid(peer->context->device, back->sgid_index, &there) &&
           !memcmp(&out->dgid, &there, sizeof(there)) && !memcmp(&back->dgid, &here, sizeof(here));
}

static bool receiving(const struct soft_qp *peer)
{
    return !peer->dying && (peer->state == IBV_QPS_RTR || peer->state == IBV_QPS_RTS);
}

/* The queue pair that would answer, or NULL where packets would get no answer. */
static struct soft_qp *find_peer(const struct soft_qp *qp)
{
    struct soft_qp *peer = qp_by_number(qp->attr.dest_qp_num);

    if (!peer || !receiving(peer) || peer->attr.dest_qp_num != qp->number || !reachable(qp, peer) ||
        (peer->attr.rq_psn ^ qp->attr.sq_psn) % (1u << 24))
        return NULL;
    return peer;
}

static uint64_t retry_interval(const struct soft_qp *qp)
{
    uint64_t longest = LONGEST_RETRY_NS / (qp->attr.retry_cnt + 1u);
    uint64_t interval = (uint64_t)4096 << qp->attr.timeout;

    /* A timeout of 0 would be for ever. */
    return qp->attr.timeout && interval < longest ? interval : longest;
}

static uint64_t rnr_interval(const struct soft_qp *peer)
{
    /* InfiniBand's code for the timer, in units of 10 us */
    static const uint16_t tens[32] = {0,    1,    2,    3,    4,    6,     8,     12,
                                      16,   24,   32,   48,   64,   96,    128,   192,
                                      256,  384,  512,  768,  1024, 1536,  2048,  3072,
                                      4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
    unsigned code = peer->attr.min_rnr_timer;

    return (code ? tens[code] : 65536u) * (uint64_t)10000;
}

/* ---- one slice ---- */

static enum ibv_wc_status check_rights(const struct soft_qp *qp, const struct soft_qp *peer,
                                       const struct send_wqe *wqe)
{
    unsigned needed = is_send(wqe)   ? 0
                      : is_read(wqe) ? IBV_ACCESS_REMOTE_READ
                                     : IBV_ACCESS_REMOTE_WRITE;

    if (is_read(wqe) && !qp->attr.max_rd_atomic)
        return IBV_WC_LOC_QP_OP_ERR;
    if ((is_read(wqe) && !peer->attr.max_dest_rd_atomic) ||
        (peer->attr.qp_access_flags & needed) != needed)
        return IBV_WC_REM_INV_REQ_ERR;
    return IBV_WC_SUCCESS;
}

static bool lay_out_local(const struct soft_qp *qp, const struct send_wqe *wqe, struct side *side)
{
    size_t slot = qp->send.head;

    if (wqe->flags & IBV_SEND_INLINE) {
        side_add(side, qp->inline_data + slot * qp->cap.max_inline_data, NULL, wqe->length);
        return true;
    }
    return side_add_sges(side, qp->pd, qp->send_sges + slot * qp->cap.max_send_sge, wqe->sge_count,
                         is_read(wqe) ? IBV_ACCESS_LOCAL_WRITE : 0);
}

static uint64_t receive_length(const struct soft_qp *peer)
{
    const struct ibv_sge *sges = peer->recv_sges + (size_t)peer->recv.head * peer->cap.max_recv_sge;
    uint64_t length = 0;

    for (int i = 0; i < peer->recv_wqes[peer->recv.head].sge_count; i++)
        length += sges[i].length;
    return length;
}

/* Fails the request at both ends, as a negative acknowledgement does. */
static void refuse(struct soft_qp *qp, struct soft_qp *peer, enum ibv_wc_status status,
                   enum ibv_wc_status receive_status)
{
    struct send_wqe wqe = qp->send_wqes[qp->send.head];

    if (receive_status != IBV_WC_SUCCESS)
        finish_receive(peer, qp, &wqe, receive_status);
    finish_send(qp, status);
    qp_fail(peer);
}

/* Lays out the responder's side; on false the request has been refused. */
static bool lay_out_remote(struct soft_qp *qp, struct soft_qp *peer, const struct send_wqe *wqe,
                           struct side *side)
{
    size_t slot = peer->recv.head;

    if (!is_send(wqe)) {
        if (side_add_remote(side, peer->pd, wqe,
                            is_read(wqe) ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE))
            return true;
        refuse(qp, peer, IBV_WC_REM_ACCESS_ERR, IBV_WC_SUCCESS);
        return false;
    }
    if (receive_length(peer) < wqe->length) {
        refuse(qp, peer, IBV_WC_REM_INV_REQ_ERR, IBV_WC_LOC_LEN_ERR);
        return false;
    }
    if (!side_add_sges(side, peer->pd, peer->recv_sges + slot * peer->cap.max_recv_sge,
                       peer->recv_wqes[slot].sge_count, IBV_ACCESS_LOCAL_WRITE)) {
        refuse(qp, peer, IBV_WC_REM_OP_ERR, IBV_WC_LOC_PROT_ERR);
        return false;
    }
    return true;
}

/* Copies with the lock released; says which side was dead. */
static enum ibv_wc_status move(struct soft_qp *qp, struct soft_qp *peer, struct side *local,
                               struct side *remote)
{
    const struct send_wqe *wqe = &qp->send_wqes[qp->send.head];
    struct side *to = is_read(wqe) ? local : remote, *from = is_read(wqe) ? remote : local;
    enum ibv_wc_status remote_status = is_send(wqe) ? IBV_WC_REM_OP_ERR : IBV_WC_REM_ACCESS_ERR;
    struct side *dead = NULL;

    side_hold(local);
    side_hold(remote);
    peer->responding++;
    pthread_mutex_unlock(&state_lock);
    if (!copy_bytes(to->iov, to->count, from->iov, from->count))
        dead = readable(from->iov, from->count) ? to : from;
    pthread_mutex_lock(&state_lock);
    side_release(local);
    side_release(remote);
    return !dead ? IBV_WC_SUCCESS : dead == local ? IBV_WC_LOC_PROT_ERR : remote_status;
}

static void release_peer(struct soft_qp *peer)
{
    if (--peer->responding == 0)
        qp_flush(peer);
    state_wake_idle();
}

static bool can_run(const struct soft_qp *qp)
{
    return qp->send.used && qp->state == IBV_QPS_RTS && !qp->dying;
}

/* No answer from the peer: try again later, in the end give up. */
static void retry(struct soft_qp *qp, struct send_wqe *wqe)
{
    if (wqe->done || wqe->tries > qp->attr.retry_cnt) {
        finish_send(qp, IBV_WC_RETRY_EXC_ERR);
        return;
    }
    wqe->tries++;
    qp->due = now_ns() + retry_interval(qp);
}

static void receiver_not_ready(struct soft_qp *qp, struct soft_qp *peer, struct send_wqe *wqe)
{
    if (qp->attr.rnr_retry != RNR_FOREVER && wqe->rnr_tries >= qp->attr.rnr_retry) {
        finish_send(qp, IBV_WC_RNR_RETRY_EXC_ERR);
        return;
    }
    wqe->rnr_tries++;
    qp->due = now_ns() + rnr_interval(peer);
}

static void run_slice(struct soft_qp *qp)
{
    struct send_wqe *wqe = &qp->send_wqes[qp->send.head];
    uint64_t left = wqe->length - wqe->done;
    uint64_t end = wqe->done + (left < SLICE_BYTES ? left : SLICE_BYTES);
    struct side local, remote;
    struct soft_qp *peer;
    enum ibv_wc_status status;

    local.count = remote.count = 0;
    local.position = remote.position = 0;
    local.begin = remote.begin = wqe->done;
    local.end = remote.end = end;
    qp->due = 0;

    if (wqe->length > limit(LIMIT_max_msg_sz)) {
        finish_send(qp, IBV_WC_LOC_LEN_ERR);
        return;
    }
    if (!is_read(wqe) && !lay_out_local(qp, wqe, &local)) {
        finish_send(qp, IBV_WC_LOC_PROT_ERR);
        return;
    }
    peer = find_peer(qp);
    if (!peer || (wqe->done && wqe->peer_epoch != peer->epoch)) {
        retry(qp, wqe);
        return;
    }
    wqe->peer_epoch = peer->epoch;
    wqe->tries = 0;
    status = check_rights(qp, peer, wqe);
    if (status == IBV_WC_LOC_QP_OP_ERR) {
        finish_send(qp, status);
        return;
    }
    if (status != IBV_WC_SUCCESS) {
        refuse(qp, peer, status, IBV_WC_SUCCESS);
        return;
    }
    if (takes_receive(wqe) && !peer->recv.used) {
        receiver_not_ready(qp, peer, wqe);
        return;
    }
    if (!lay_out_remote(qp, peer, wqe, &remote))
        return;
    if (is_read(wqe) && !lay_out_local(qp, wqe, &local)) {
        finish_send(qp, IBV_WC_LOC_PROT_ERR);
        return;
    }

    if (end == wqe->done) {
        peer->responding++;
    } else {
        status = move(qp, peer, &local, &remote);
    }
    if (can_run(qp)) {
        if (status == IBV_WC_LOC_PROT_ERR) {
            finish_send(qp, status);
        } else if (!receiving(peer)) {
            /* Sending it again could reach another life of the peer. */
            finish_send(qp, IBV_WC_RETRY_EXC_ERR);
        } else if (status != IBV_WC_SUCCESS) {
            refuse(qp, peer, status, is_send(wqe) ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS);
        } else if (end == wqe->length) {
            if (takes_receive(wqe))
                finish_receive(peer, qp, wqe, IBV_WC_SUCCESS);
            finish_send(qp, IBV_WC_SUCCESS);
        } else {
            wqe->done = end;
        }
    }
    release_peer(peer);
}

/* ---- who runs ---- */

static void end_run(struct soft_qp *qp);

/* Runs until the turn is used up, or the head has to wait. */
static void run(struct soft_qp *qp, uint64_t budget, bool whole_requests)
{
    int requests = 0;

    qp->running = true;
    while (can_run(qp) && requests < TURN_REQUESTS) {
        const struct send_wqe *wqe = &qp->send_wqes[qp->send.head];
        uint64_t left = wqe->length - wqe->done;
        uint64_t slice = left < SLICE_BYTES ? left : SLICE_BYTES;

        if ((whole_requests ? left : slice) > budget)
            break;
        qp->due = wqe->not_before;
        if (qp->due && qp->due > now_ns())
            break;
        budget -= slice;
        requests++;
        run_slice(qp);
        if (qp->due)
            break;
    }
    end_run(qp);
}

static void *work_in_background(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&state_lock);
    while (!stopping) {
        struct soft_qp *first = scheduled;

        for (struct soft_qp *qp = scheduled; qp; qp = qp->next_scheduled)
            if (qp->due < first->due)
                first = qp;
        if (!first) {
            pthread_cond_wait(&work, &state_lock);
        } else if (first->due > now_ns()) {
            struct timespec until = {(time_t)(first->due / 1000000000u),
                                     (long)(first->due % 1000000000u)};

            pthread_cond_timedwait(&work, &state_lock, &until);
        } else {
            transfer_unschedule(first);
            run(first, SLICE_BYTES, false);
        }
    }
    pthread_mutex_unlock(&state_lock);
    return NULL;
}

/* Signals are for the program's own threads. */
static bool start_worker(void)
{
    pthread_condattr_t attr;
    sigset_t all, old;
    int error;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&work, &attr);
    pthread_condattr_destroy(&attr);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    error = pthread_create(&worker, NULL, work_in_background, NULL);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    worker_started = !error;
    return worker_started;
}

static void schedule(struct soft_qp *qp)
{
    uint64_t now = now_ns();

    if (stopping)
        return;
    if (!worker_started && !start_worker()) {
        finish_send(qp, IBV_WC_GENERAL_ERR);
        return;
    }
    /* A backlog is due from now on, and so takes turns with others. */
    if (qp->due < now)
        qp->due = now;
    qp->scheduled = true;
    qp->next_scheduled = NULL;
    for (struct soft_qp **link = &scheduled;; link = &(*link)->next_scheduled) {
        if (!*link) {
            *link = qp;
            break;
        }
    }
    pthread_cond_signal(&work);
}

void transfer_unschedule(struct soft_qp *qp)
{
    struct soft_qp **link = &scheduled;

    if (!qp->scheduled)
        return;
    while (*link != qp)
        link = &(*link)->next_scheduled;
    *link = qp->next_scheduled;
    qp->scheduled = false;
}

static void end_run(struct soft_qp *qp)
{
    qp->running = false;
    qp_flush(qp);
    if (can_run(qp))
        schedule(qp);
    state_wake_idle();
}

void transfer_start(struct soft_qp *qp)
{
    qp_flush(qp);
    if (can_run(qp) && !qp->running && !qp->scheduled)
        run(qp, SMALL_BYTES, true);
}

void transfer_forget(void)
{
    worker_started = false;
    stopping = false;
    scheduled = NULL;
}

void transfer_stop(void)
{
    bool started;

    pthread_mutex_lock(&state_lock);
    stopping = true;
    started = worker_started;
    if (started)
        pthread_cond_signal(&work);
    pthread_mutex_unlock(&state_lock);
    if (started)
        pthread_join(worker, NULL);
}
