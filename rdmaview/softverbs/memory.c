/* Protection domains and memory regions. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/capability.h>
#include <linux/ioctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

/* The two keys of a region differ, or a program that swaps them would work here only. */
#define RKEY_XOR 0x5a5a0000u
/* A freed key's slot waits until so many others are free, so that stale keys stay stale. */
#define KEY_REST 64

#define REMOTE_WRITES (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)
#define KNOWN_ACCESS                                                                               \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |                   \
     IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |                       \
     IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE)

/* ---- keys: a slot number, then a byte that changes with each use of the slot ---- */

static struct key_slot {
    struct soft_mr *mr;
    uint32_t next_free;
    uint8_t key_byte;
} *slots;
static uint32_t slots_size, slots_used = 1; /* slot 0 stays unused, so no key is ever 0 */
static uint32_t free_first, free_last, free_count;
static uint64_t pinned_pages;

static uint32_t key_take(struct soft_mr *mr)
{
    uint32_t slot;

    if (free_count > KEY_REST || (free_count && slots_used > limit(LIMIT_max_mr))) {
        slot = free_first;
        free_first = slots[slot].next_free;
        free_count--;
    } else {
        if (slots_used >= slots_size) {
            uint32_t size = slots_size ? slots_size * 2 : 256;
            struct key_slot *larger = realloc(slots, size * sizeof(*slots));

            if (!larger)
                return 0;
            memset(larger + slots_size, 0, (size - slots_size) * sizeof(*slots));
            slots = larger;
            slots_size = size;
        }
        slot = slots_used++;
    }
    slots[slot].mr = mr;
    slots[slot].key_byte++;
    return slot << 8 | slots[slot].key_byte;
}

static void key_release(uint32_t lkey)
{
    uint32_t slot = lkey >> 8;

    slots[slot].mr = NULL;
    if (free_count++)
        slots[free_last].next_free = slot;
    else
        free_first = slot;
    free_last = slot;
}

static struct soft_mr *mr_by_key(const struct soft_pd *pd, uint32_t lkey, unsigned access)
{
    uint32_t slot = lkey >> 8;
    struct soft_mr *mr = slot < slots_used && slot ? slots[slot].mr : NULL;

    if (!mr || mr->lkey != lkey || mr->pd != pd || (mr->access & access) != access)
        return NULL;
    return mr;
}

struct soft_mr *mr_by_lkey(const struct soft_pd *pd, uint32_t lkey, unsigned access)
{
    return mr_by_key(pd, lkey, access);
}

struct soft_mr *mr_by_rkey(const struct soft_pd *pd, uint32_t rkey, unsigned access)
{
    return mr_by_key(pd, rkey ^ RKEY_XOR, access);
}

bool mr_covers(const struct soft_mr *mr, uint64_t iova, uint64_t length)
{
    uint64_t offset = iova - mr->iova;

    return iova >= mr->iova && offset <= mr->length && length <= mr->length - offset;
}

void memory_forget(void)
{
    for (uint32_t slot = 1; slot < slots_used; slot++)
        if (slots[slot].mr)
            key_release(slot << 8);
    pinned_pages = 0;
}

/* ---- mappings ---- */

/* From Linux 6.11's <linux/fs.h>, which is newer than the headers this is built with. */
struct procmap_query {
    uint64_t size, query_flags, query_addr;
    uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
    uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
    uint64_t vma_name_addr, build_id_addr;
};
#define QUERY_MAPPING _IOWR('f', 17, struct procmap_query)
#define MAPPING_READABLE 1
#define MAPPING_WRITABLE 2

static int check_by_query(int fd, uint64_t start, uint64_t end, uint64_t need)
{
    while (start < end) {
        struct procmap_query query = {.size = sizeof(query), .query_addr = start};

        if (ioctl(fd, QUERY_MAPPING, &query))
            return errno == ENOENT ? EFAULT : errno;
        if ((query.vma_flags & need) != need)
            return EFAULT;
        start = query.vma_end;
    }
    return 0;
}

static int check_by_text(int fd, uint64_t start, uint64_t end, uint64_t need)
{
    FILE *maps = fdopen(fd, "r");
    char *line = NULL;
    size_t size = 0;

    if (!maps) {
        int error = errno;

        close(fd);
        return error;
    }
    while (start < end && getline(&line, &size, maps) > 0) {
        uint64_t first, last;
        char readable, writable;

        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %c%c", &first, &last, &readable, &writable) !=
                4 ||
            last <= start)
            continue;
        if (first > start || ((need & MAPPING_READABLE) && readable != 'r') ||
            ((need & MAPPING_WRITABLE) && writable != 'w'))
            break;
        start = last;
    }
    free(line);
    fclose(maps);
    return start < end ? EFAULT : 0;
}

/* Asks the kernel and touches no page, so a sparse mapping stays sparse. */
static int check_mapping(uint64_t start, uint64_t end, bool writable)
{
    uint64_t need = MAPPING_READABLE | (writable ? MAPPING_WRITABLE : 0);
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    int error;

    if (fd < 0)
        return errno;
    error = check_by_query(fd, start, end, need);
    if (error && error != EFAULT)
        return check_by_text(fd, start, end, need);
    close(fd);
    return error;
}

static bool may_pin_without_limit(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

    return !syscall(SYS_capget, &header, data) &&
           data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK);
}

static uint64_t pin_limit(uint64_t page)
{
    struct rlimit memlock;

    if (may_pin_without_limit() || getrlimit(RLIMIT_MEMLOCK, &memlock) ||
        memlock.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return memlock.rlim_cur / page;
}

/* ---- verbs ---- */

int pd_find(struct ibv_pd *handle, struct soft_pd **found)
{
    struct object *object;
    int error = object_find(KIND_PD, handle, &object);

    if (!error)
        *found = container_of(object, struct soft_pd, object);
    return error;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *handle)
{
    struct soft_pd *pd;
    int result;

    if (verb_fails(VERB_alloc_pd, &result))
        return NULL;
    pd = calloc(1, sizeof(*pd));
    if (!pd)
        return NULL;
    pd->ibv.context = handle;
    pthread_mutex_lock(&state_lock);
    result = context_find(handle, &pd->context);
    if (!result)
        result = object_add(&pd->object, KIND_PD, &pd->ibv, pd, limit(LIMIT_max_pd));
    if (!result)
        pd->context->children++;
    pthread_mutex_unlock(&state_lock);
    if (result) {
        free(pd);
        errno = result;
        return NULL;
    }
    return &pd->ibv;
}

int ibv_dealloc_pd(struct ibv_pd *handle)
{
    struct soft_pd *pd;
    int result;

    if (verb_fails(VERB_dealloc_pd, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = pd_find(handle, &pd);
    if (!result && pd->children)
        result = EBUSY;
    if (!result) {
        object_remove(&pd->object);
        pd->context->children--;
        object_free(&pd->object);
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

static int check_registration(uint64_t address, uint64_t length, uint64_t iova, unsigned access,
                              uint64_t page, uint64_t *pages)
{
    uint64_t end, first;

    if (!length || __builtin_add_overflow(address, length, &end) || end > UINT64_MAX - page ||
        __builtin_add_overflow(iova, length, &first))
        return EINVAL;
    if (length > limit(LIMIT_max_mr_size))
        return EINVAL;
    if ((address ^ iova) & (page - 1))
        return EINVAL;
    if (access & IBV_ACCESS_ON_DEMAND && !(limit(LIMIT_odp_general_caps) & IBV_ODP_SUPPORT))
        return EOPNOTSUPP;
    if (access & ~(unsigned)(KNOWN_ACCESS | IBV_ACCESS_ON_DEMAND))
        return EINVAL;
    if ((access & REMOTE_WRITES) && !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;

    first = address & ~(page - 1);
    end = (end + page - 1) & ~(page - 1);
    *pages = (end - first) / page;
    return check_mapping(first, end, access & IBV_ACCESS_LOCAL_WRITE);
}

static int add_mr(struct soft_mr *mr, uint64_t most_pages)
{
    int error = pd_find(mr->ibv.pd, &mr->pd);

    if (error)
        return error;
    if (pinned_pages > most_pages || mr->pages > most_pages - pinned_pages)
        return ENOMEM;
    error = object_add(&mr->object, KIND_MR, &mr->ibv, mr, limit(LIMIT_max_mr));
    if (error)
        return error;
    mr->lkey = key_take(mr);
    if (!mr->lkey) {
        object_remove(&mr->object);
        return ENOMEM;
    }
    mr->ibv.lkey = mr->lkey;
    mr->ibv.rkey = mr->lkey ^ RKEY_XOR;
    mr->ibv.handle = mr->lkey >> 8;
    mr->ibv.context = mr->pd->ibv.context;
    mr->pd->children++;
    pinned_pages += mr->pages;
    return 0;
}

/* Register mr->length bytes at mr->address; frees the region if that fails. */
static struct ibv_mr *register_region(struct soft_mr *mr)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    int result = check_registration(mr->address, mr->length, mr->iova, mr->access, page, &mr->pages);

    if (!result) {
        uint64_t most_pages = pin_limit(page);

        pthread_mutex_lock(&state_lock);
        result = add_mr(mr, most_pages);
        pthread_mutex_unlock(&state_lock);
    }
    if (result) {
        if (mr->mapping)
            munmap(mr->mapping, mr->mapping_size);
        free(mr);
        errno = result;
        return NULL;
    }
    return &mr->ibv;
}

static struct soft_mr *new_region(struct ibv_pd *pd, size_t length, uint64_t iova, unsigned access)
{
    struct soft_pd *unused;
    struct soft_mr *mr;
    int result;

    pthread_mutex_lock(&state_lock);
    result = pd_find(pd, &unused);
    pthread_mutex_unlock(&state_lock);
    if (result) {
        errno = result;
        return NULL;
    }
    mr = calloc(1, sizeof(*mr));
    if (!mr)
        return NULL;
    mr->ibv.pd = pd;
    mr->ibv.length = length;
    mr->length = length;
    mr->iova = iova;
    mr->access = access;
    return mr;
}

static struct ibv_mr *register_memory(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                      unsigned access)
{
    struct soft_mr *mr;
    int result;

    if (verb_fails(VERB_reg_mr, &result))
        return NULL;
    mr = new_region(pd, length, iova, access);
    if (!mr)
        return NULL;
    mr->ibv.addr = addr;
    mr->address = (uint64_t)(uintptr_t)addr;
    return register_region(mr);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    return register_memory(pd, addr, length, (uint64_t)(uintptr_t)addr, (unsigned)access);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                               int access)
{
    return register_memory(pd, addr, length, iova, (unsigned)access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned int access)
{
    return register_memory(pd, addr, length, iova, access);
}

/* Map the pages that [offset, offset + length) of a file are in; a memfd is as good as a dma-buf. */
static int map_file(struct soft_mr *mr, uint64_t offset, int fd)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t first = offset & ~(page - 1), end;
    int writes = mr->access & IBV_ACCESS_LOCAL_WRITE ? PROT_WRITE : 0;
    struct stat status;

    if (fstat(fd, &status))
        return errno;
    if (!S_ISREG(status.st_mode) || (offset ^ mr->iova) & (page - 1) || !mr->length ||
        __builtin_add_overflow(offset, mr->length, &end) || end > (uint64_t)status.st_size)
        return EINVAL;
    mr->mapping_size = end - first;
    mr->mapping = mmap(NULL, mr->mapping_size, PROT_READ | writes, MAP_SHARED, fd, (off_t)first);
    if (mr->mapping == MAP_FAILED) {
        mr->mapping = NULL;
        return errno;
    }
    mr->address = (uint64_t)(uintptr_t)mr->mapping + (offset - first);
    return 0;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                 int fd, int access)
{
    struct soft_mr *mr;
    int result;

    if (verb_fails(VERB_reg_dmabuf_mr, &result))
        return NULL;
    mr = new_region(pd, length, iova, (unsigned)access);
    if (!mr)
        return NULL;
    mr->ibv.addr = (void *)(uintptr_t)offset;
    result = map_file(mr, offset, fd);
    if (result) {
        free(mr);
        errno = result;
        return NULL;
    }
    return register_region(mr);
}

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length,
                 int access)
{
    int result;

    (void)mr, (void)flags, (void)pd, (void)addr, (void)length, (void)access;
    if (!verb_fails(VERB_rereg_mr, &result))
        errno = EOPNOTSUPP;
    return IBV_REREG_MR_ERR_INPUT;
}

int ibv_dereg_mr(struct ibv_mr *handle)
{
    struct object *object;
    struct soft_mr *mr;
    int result;

    if (verb_fails(VERB_dereg_mr, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = object_find(KIND_MR, handle, &object);
    if (!result) {
        mr = container_of(object, struct soft_mr, object);
        object_remove(object);
        key_release(mr->lkey);
        while (mr->busy)
            state_wait_idle();
        pinned_pages -= mr->pages;
        mr->pd->children--;
        if (mr->mapping)
            munmap(mr->mapping, mr->mapping_size);
        object_free(object);
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

int ibv_fork_init(void)
{
    int result;

    return verb_fails(VERB_fork_init, &result) ? result : 0;
}

/* Nothing is pinned, and a copy finds a page wherever the kernel has moved it. */
enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}
