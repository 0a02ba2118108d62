/* reg_mr DEVICE [BYTES] [ROUNDS]: time of ibv_reg_mr plus ibv_dereg_mr, as a line of JSON. */
#include "common.h"

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: reg_mr DEVICE [BYTES] [ROUNDS]\n");
        return 2;
    }
    long bytes = number(argc, argv, 2, 4096), rounds = number(argc, argv, 3, 2000);
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct ibv_context *context = open_device(argv[1]);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    double *samples = malloc(rounds * sizeof *samples);
    void *buffer = NULL;

    CHECK(pd, "ibv_alloc_pd");
    CHECK(samples && bytes > 0 && rounds > 0, "arguments");
    CHECK(!posix_memalign(&buffer, 4096, bytes), "posix_memalign");
    memset(buffer, 1, bytes);
    for (long i = -rounds / 10; i < rounds; i++) { /* a tenth more, to warm up */
        double start = now_ns();
        struct ibv_mr *mr = ibv_reg_mr(pd, buffer, bytes, access);

        CHECK(mr, "ibv_reg_mr");
        CHECK(!ibv_dereg_mr(mr), "ibv_dereg_mr");
        if (i >= 0)
            samples[i] = now_ns() - start;
    }
    printf("{\"what\": \"reg_mr\", \"device\": \"%s\", \"bytes\": %ld, \"rounds\": %ld, ", argv[1], bytes, rounds);
    print_figures(samples, rounds);
    printf("}\n");
    free(samples);
    free(buffer);
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
    return 0;
}
