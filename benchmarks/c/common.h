/* What both baselines share: the device by name, a clock, and the figures. */
#ifndef RDMAVIEW_BENCH_COMMON_H
#define RDMAVIEW_BENCH_COMMON_H

#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(ok, what)                                     \
    do {                                                    \
        if (!(ok)) {                                        \
            perror(what);                                   \
            exit(1);                                        \
        }                                                   \
    } while (0)

static inline struct ibv_context *open_device(const char *name)
{
    int n = 0;
    struct ibv_device **list = ibv_get_device_list(&n);
    struct ibv_context *context = NULL;

    CHECK(list, "ibv_get_device_list");
    for (int i = 0; i < n; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) {
            context = ibv_open_device(list[i]);
            CHECK(context, "ibv_open_device");
        }
    ibv_free_device_list(list);
    if (!context) {
        fprintf(stderr, "no device %s\n", name);
        exit(1);
    }
    return context;
}

static inline double now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static inline int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Prints "median_ns": ..., "min_ns": ... of the samples, which get sorted. */
static inline void print_figures(double *samples, long n)
{
    qsort(samples, n, sizeof *samples, compare_doubles);
    printf("\"median_ns\": %.1f, \"min_ns\": %.1f", samples[n / 2], samples[0]);
}

static inline long number(int argc, char **argv, int i, long otherwise)
{
    return argc > i ? strtol(argv[i], NULL, 0) : otherwise;
}

#endif
