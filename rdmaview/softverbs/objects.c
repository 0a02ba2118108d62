/* The table of live objects, and what fork and exit do to them. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

/*
 * A freed object's memory isn't reused for a while: the inline verbs of <infiniband/verbs.h>
 * look into a handle before we see it, and a second dereg must not hit a newer region.
 */
#define QUARANTINE 256
#define FIRST_BUCKETS 1024

pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t state_idle = PTHREAD_COND_INITIALIZER;

static unsigned idle_waiters;
static unsigned generation;
static struct object *first_buckets[FIRST_BUCKETS];
static struct object **buckets = first_buckets;
static size_t bucket_count = FIRST_BUCKETS;
static size_t object_total;
static uint64_t counts[KIND_COUNT];
static void *quarantine[QUARANTINE];
static size_t quarantine_next;

void state_wait_idle(void)
{
    idle_waiters++;
    pthread_cond_wait(&state_idle, &state_lock);
    idle_waiters--;
}

void state_wake_idle(void)
{
    if (idle_waiters)
        pthread_cond_broadcast(&state_idle);
}

static struct object **bucket_of(const void *handle)
{
    uint64_t hash = (uint64_t)(uintptr_t)handle * 0x9e3779b97f4a7c15u;

    return &buckets[(hash >> 32) & (bucket_count - 1)];
}

static void grow(void)
{
    struct object **old = buckets;
    size_t old_count = bucket_count;
    struct object **larger = calloc(old_count * 2, sizeof(*larger));

    /* Longer chains are slower, not wrong. */
    if (!larger)
        return;
    buckets = larger;
    bucket_count = old_count * 2;
    for (size_t i = 0; i < old_count; i++) {
        while (old[i]) {
            struct object *object = old[i];
            struct object **bucket = bucket_of(object->handle);

            old[i] = object->next;
            object->next = *bucket;
            *bucket = object;
        }
    }
    if (old != first_buckets)
        free(old);
}

int object_add(struct object *object, enum kind kind, void *handle, void *memory, uint64_t most)
{
    struct object **bucket;

    if (counts[kind] >= most)
        return ENOMEM;
    if (object_total >= bucket_count)
        grow();
    bucket = bucket_of(handle);
    *object = (struct object){
        .handle = handle,
        .memory = memory,
        .kind = kind,
        .generation = generation,
        .next = *bucket,
    };
    *bucket = object;
    object_total++;
    counts[kind]++;
    return 0;
}

void object_remove(struct object *object)
{
    struct object **link = bucket_of(object->handle);

    while (*link != object)
        link = &(*link)->next;
    *link = object->next;
    object_total--;
    counts[object->kind]--;
}

void object_free(struct object *object)
{
    void *memory = object->memory;

    free(quarantine[quarantine_next]);
    quarantine[quarantine_next] = memory;
    quarantine_next = (quarantine_next + 1) % QUARANTINE;
}

int object_find(enum kind kind, const void *handle, struct object **found)
{
    for (struct object *object = *bucket_of(handle); object; object = object->next) {
        if (object->handle != handle || object->kind != kind)
            continue;
        if (object->generation != generation)
            return ENODEV;
        *found = object;
        return 0;
    }
    return EINVAL;
}

uint64_t object_count(enum kind kind)
{
    return counts[kind];
}

static void before_fork(void)
{
    pthread_mutex_lock(&state_lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&state_lock);
}

/*
 * The child keeps nothing: what it inherited answers ENODEV, and it may open the device anew.
 * Only the thread that forked is here, so nobody waits any more.
 */
static void in_child(void)
{
    pthread_cond_init(&state_idle, NULL);
    idle_waiters = 0;
    generation++;
    for (int kind = 0; kind < KIND_COUNT; kind++)
        counts[kind] = 0;
    memory_forget();
    qp_forget();
    transfer_forget();
    pthread_mutex_unlock(&state_lock);
}

__attribute__((constructor)) static void load(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

__attribute__((destructor)) static void unload(void)
{
    transfer_stop();
}
