/* Limits, injected failures, delays and counters. */
#include "internal.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define LONGEST_DELAY_SECONDS (366.0 * 86400)

static struct {
    const char *name;
    uint64_t initial, least, most;
    _Atomic uint64_t value;
} limits[LIMIT_COUNT] = {
#define X(name, initial, least, most) {#name, initial, least, most, initial},
    LIMITS(X)
#undef X
};

static struct {
    const char *name;
    bool returns_pointer;
    _Atomic uint64_t calls;
    _Atomic uint64_t delay_ns;
    _Atomic uint64_t fail_times;
    _Atomic int fail_error;
} verbs[VERB_COUNT] = {
#define X(name) {#name, true, 0, 0, 0, 0},
    POINTER_VERBS(X)
#undef X
#define X(name) {#name, false, 0, 0, 0, 0},
        INT_VERBS(X)
#undef X
};

static const struct {
    const char *name;
    enum kind kind;
} gauges[] = {
    {"live_context", KIND_CONTEXT}, {"live_pd", KIND_PD}, {"live_mr", KIND_MR},
    {"live_cq", KIND_CQ},           {"live_qp", KIND_QP},
};

#define GAUGE_COUNT (sizeof(gauges) / sizeof(gauges[0]))

static _Atomic uint64_t completion_delay;

uint64_t limit(enum limit which)
{
    return atomic_load_explicit(&limits[which].value, memory_order_relaxed);
}

uint64_t completion_delay_ns(void)
{
    return atomic_load_explicit(&completion_delay, memory_order_relaxed);
}

uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ns(uint64_t duration)
{
    uint64_t end = now_ns() + duration;
    struct timespec until = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
}

bool verb_fails(enum verb verb, int *result)
{
    uint64_t times, delay;
    int error;

    atomic_fetch_add_explicit(&verbs[verb].calls, 1, memory_order_relaxed);
    delay = atomic_load_explicit(&verbs[verb].delay_ns, memory_order_relaxed);
    if (delay)
        sleep_ns(delay);

    times = atomic_load_explicit(&verbs[verb].fail_times, memory_order_acquire);
    do {
        if (!times)
            return false;
        error = atomic_load_explicit(&verbs[verb].fail_error, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak(&verbs[verb].fail_times, &times, times - 1));

    errno = error < 0 ? -error : error;
    *result = error < 0 ? -1 : error;
    return true;
}

static int verb_named(const char *name)
{
    for (int i = 0; name && i < VERB_COUNT; i++)
        if (!strcmp(verbs[i].name, name))
            return i;
    return -1;
}

int softverbs_configure(const char *name, uint64_t value)
{
    for (int i = 0; name && i < LIMIT_COUNT; i++) {
        if (strcmp(limits[i].name, name))
            continue;
        if (value < limits[i].least || value > limits[i].most)
            return EINVAL;
        atomic_store(&limits[i].value, value);
        return 0;
    }
    return ENOENT;
}

int softverbs_fail(const char *verb, int error, uint64_t times)
{
    int i = verb_named(verb);

    if (i < 0)
        return ENOENT;
    if (times && !error && !verbs[i].returns_pointer)
        return EINVAL;
    if (error < -4095 || error > 4095)
        return EINVAL;
    atomic_store(&verbs[i].fail_times, 0);
    atomic_store(&verbs[i].fail_error, error);
    atomic_store_explicit(&verbs[i].fail_times, times, memory_order_release);
    return 0;
}

int softverbs_delay(const char *what, double seconds)
{
    bool completion = what && !strcmp(what, "completion");
    int i = verb_named(what);
    uint64_t delay;

    if (i < 0 && !completion)
        return ENOENT;
    if (!isfinite(seconds) || seconds < 0 || seconds > LONGEST_DELAY_SECONDS)
        return EINVAL;
    delay = (uint64_t)(seconds * 1e9);
    if (completion)
        atomic_store(&completion_delay, delay);
    else
        atomic_store(&verbs[i].delay_ns, delay);
    return 0;
}

static void put_counter(const char **names, uint64_t *values, size_t i, const char *name,
                        uint64_t value)
{
    if (names)
        names[i] = name;
    if (values)
        values[i] = value;
}

size_t softverbs_counters(const char **names, uint64_t *values, size_t capacity)
{
    for (size_t i = 0; i < VERB_COUNT && i < capacity; i++)
        put_counter(names, values, i, verbs[i].name, atomic_load(&verbs[i].calls));

    pthread_mutex_lock(&state_lock);
    for (size_t i = 0; i < GAUGE_COUNT && VERB_COUNT + i < capacity; i++)
        put_counter(names, values, VERB_COUNT + i, gauges[i].name, object_count(gauges[i].kind));
    pthread_mutex_unlock(&state_lock);
    return VERB_COUNT + GAUGE_COUNT;
}

void softverbs_reset(void)
{
    for (int i = 0; i < LIMIT_COUNT; i++)
        atomic_store(&limits[i].value, limits[i].initial);
    for (int i = 0; i < VERB_COUNT; i++) {
        atomic_store(&verbs[i].fail_times, 0);
        atomic_store(&verbs[i].delay_ns, 0);
        atomic_store(&verbs[i].calls, 0);
    }
    atomic_store(&completion_delay, 0);
}
