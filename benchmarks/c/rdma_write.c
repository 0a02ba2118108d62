/*
 * rdma_write DEVICE [GID_INDEX] [ROUNDS] [BYTES]: two RC queue pairs of one process, RDMA writes from one to the other.
 * Three lines of JSON, times per write: "one" at a time (post, then poll until it completed), "deep" (64 posts, then poll
 * until all completed) and "chained" (one post of 64 linked work requests, the last of them signalled).
 */
#include "common.h"

enum { DEPTH = 64, PSN = 0x123456 };

static void poll_until(struct ibv_cq *cq, int wanted)
{
    struct ibv_wc wc[DEPTH];

    while (wanted > 0) {
        int n = ibv_poll_cq(cq, wanted, wc);

        CHECK(n >= 0, "ibv_poll_cq");
        for (int i = 0; i < n; i++)
            if (wc[i].status != IBV_WC_SUCCESS) {
                fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc[i].status));
                exit(1);
            }
        wanted -= n;
    }
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);

    CHECK(qp, "ibv_create_qp");
    return qp;
}

static void connect_qp(struct ibv_qp *qp, struct ibv_qp *peer, int gid_index)
{
    struct ibv_port_attr port;
    union ibv_gid gid;
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = PSN, .max_rd_atomic = 1,
    };

    CHECK(!ibv_query_port(qp->context, 1, &port), "ibv_query_port");
    CHECK(!ibv_query_gid(qp->context, 1, gid_index, &gid), "ibv_query_gid");
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = port.active_mtu,
        .dest_qp_num = peer->qp_num,
        .rq_psn = PSN,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {
            .is_global = 1,
            .port_num = 1,
            .dlid = port.lid,
            .grh = {.dgid = gid, .sgid_index = gid_index, .hop_limit = 64},
        },
    };
    CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "to INIT");
    CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "to RTR");
    CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: rdma_write DEVICE [GID_INDEX] [ROUNDS] [BYTES]\n");
        return 2;
    }
    long gid_index = number(argc, argv, 2, 1), rounds = number(argc, argv, 3, 2000), bytes = number(argc, argv, 4, 8);
    struct ibv_context *context = open_device(argv[1]);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_cq *cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
    double *samples = malloc(rounds * sizeof *samples);
    char *buffer = NULL;

    CHECK(pd, "ibv_alloc_pd");
    CHECK(cq, "ibv_create_cq");
    CHECK(samples && bytes > 0 && rounds > 0, "arguments");
    CHECK(!posix_memalign((void **)&buffer, 4096, 2 * bytes), "posix_memalign");
    memset(buffer, 0x5a, bytes);
    memset(buffer + bytes, 0, bytes);
    struct ibv_mr *mr = ibv_reg_mr(pd, buffer, 2 * bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    CHECK(mr, "ibv_reg_mr");
    struct ibv_qp *a = create_qp(pd, cq), *b = create_qp(pd, cq);
    connect_qp(a, b, gid_index);
    connect_qp(b, a, gid_index);

    struct ibv_sge sge = {.addr = (uintptr_t)buffer, .length = bytes, .lkey = mr->lkey};
    struct ibv_send_wr wr[DEPTH], *bad;
    memset(wr, 0, sizeof wr);
    for (int i = 0; i < DEPTH; i++) {
        wr[i].wr_id = i;
        wr[i].sg_list = &sge;
        wr[i].num_sge = 1;
        wr[i].opcode = IBV_WR_RDMA_WRITE;
        wr[i].wr.rdma.remote_addr = (uintptr_t)buffer + bytes;
        wr[i].wr.rdma.rkey = mr->rkey;
    }
    const char *ways[] = {"one", "deep", "chained"};
    for (int way = 0; way < 3; way++) {
        int each = way ? DEPTH : 1;
        long n = way ? rounds / 16 + 1 : rounds;

        for (int i = 0; i < DEPTH; i++) {
            int is_linked = way == 2 && i + 1 < DEPTH;

            wr[i].next = is_linked ? &wr[i + 1] : NULL;
            wr[i].send_flags = is_linked ? 0 : IBV_SEND_SIGNALED;
        }
        for (long i = -n / 10; i < n; i++) { /* a tenth more, to warm up */
            double start = now_ns();

            for (int k = 0; k < (way == 2 ? 1 : each); k++)
                CHECK(!ibv_post_send(a, &wr[k], &bad), "ibv_post_send");
            poll_until(cq, way == 2 ? 1 : each);
            if (i >= 0)
                samples[i] = (now_ns() - start) / each;
        }
        printf("{\"what\": \"rdma_write\", \"way\": \"%s\", \"device\": \"%s\", \"bytes\": %ld, \"depth\": %d, \"rounds\": %ld, ",
               ways[way], argv[1], bytes, each, n);
        print_figures(samples, n);
        printf("}\n");
        fflush(stdout);
    }
    CHECK(!memcmp(buffer, buffer + bytes, bytes), "the bytes did not arrive");
    ibv_destroy_qp(a);
    ibv_destroy_qp(b);
    ibv_dereg_mr(mr);
    ibv_destroy_cq(cq);
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
    free(samples);
    free(buffer);
    return 0;
}
