/* Events that a program waits for on a file descriptor, and completion channels. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

int mailbox_open(struct mailbox *mailbox)
{
    mailbox->first = NULL;
    mailbox->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    return mailbox->fd < 0 ? errno : 0;
}

void mailbox_close(struct mailbox *mailbox)
{
    close(mailbox->fd);
}

void mailbox_announce(struct mailbox *mailbox, struct notice *notice)
{
    uint64_t one = 1;
    struct notice **link = &mailbox->first;

    if (notice->count++ == 0) {
        while (*link)
            link = &(*link)->next;
        notice->next = NULL;
        *link = notice;
    }
    /* Only a count of 2^64 - 1 unread events could make this wait. */
    if (write(mailbox->fd, &one, sizeof(one)) < 0)
        notice->count--;
}

static void unlink_notice(struct mailbox *mailbox, struct notice *notice)
{
    struct notice **link = &mailbox->first;

    while (*link != notice)
        link = &(*link)->next;
    *link = notice->next;
}

void mailbox_forget(struct mailbox *mailbox, struct notice *notice)
{
    uint64_t one;
    struct iovec iov = {&one, sizeof(one)};

    if (!notice->count)
        return;
    unlink_notice(mailbox, notice);
    /* Another thread may have read the count already: it finds no notice and waits again. */
    while (notice->count--)
        if (preadv2(mailbox->fd, &iov, 1, -1, RWF_NOWAIT) < 0)
            break;
    notice->count = 0;
}

int mailbox_wait(struct mailbox *mailbox)
{
    uint64_t one;

    return read(mailbox->fd, &one, sizeof(one)) == sizeof(one) ? 0 : errno;
}

struct notice *mailbox_take(struct mailbox *mailbox)
{
    struct notice *notice = mailbox->first;

    if (notice && --notice->count == 0)
        mailbox->first = notice->next;
    return notice;
}

/* ---- completion channels ---- */

int channel_find(struct ibv_comp_channel *handle, struct soft_channel **found)
{
    struct object *object;
    int error = object_find(KIND_CHANNEL, handle, &object);

    if (!error)
        *found = container_of(object, struct soft_channel, object);
    return error;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *handle)
{
    struct soft_channel *channel;
    int result;

    if (verb_fails(VERB_create_comp_channel, &result))
        return NULL;
    channel = calloc(1, sizeof(*channel));
    if (!channel)
        return NULL;
    result = mailbox_open(&channel->mailbox);
    if (result) {
        free(channel);
        errno = result;
        return NULL;
    }
    channel->ibv.context = handle;
    channel->ibv.fd = channel->mailbox.fd;
    pthread_mutex_lock(&state_lock);
    result = context_find(handle, &channel->context);
    if (!result)
        result = object_add(&channel->object, KIND_CHANNEL, &channel->ibv, channel, UINT64_MAX);
    if (!result)
        channel->context->children++;
    pthread_mutex_unlock(&state_lock);
    if (result) {
        mailbox_close(&channel->mailbox);
        free(channel);
        errno = result;
        return NULL;
    }
    return &channel->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *handle)
{
    struct soft_channel *channel;
    int result;

    if (verb_fails(VERB_destroy_comp_channel, &result))
        return result;
    pthread_mutex_lock(&state_lock);
    result = channel_find(handle, &channel);
    if (!result && channel->children)
        result = EBUSY;
    if (!result) {
        object_remove(&channel->object);
        mailbox_close(&channel->mailbox);
        channel->context->children--;
        object_free(&channel->object);
    }
    pthread_mutex_unlock(&state_lock);
    return result;
}

int ibv_get_cq_event(struct ibv_comp_channel *handle, struct ibv_cq **cq, void **cq_context)
{
    struct soft_channel *channel = NULL;
    struct notice *notice = NULL;
    int result;

    if (verb_fails(VERB_get_cq_event, &result))
        return -1;
    pthread_mutex_lock(&state_lock);
    result = channel_find(handle, &channel);
    pthread_mutex_unlock(&state_lock);
    while (!result && !notice) {
        result = mailbox_wait(&channel->mailbox);
        if (result)
            break;
        pthread_mutex_lock(&state_lock);
        notice = mailbox_take(&channel->mailbox);
        if (notice) {
            struct soft_cq *announced = notice->element;

            announced->events_delivered++;
            *cq = &announced->ibv;
            *cq_context = announced->ibv.cq_context;
        }
        pthread_mutex_unlock(&state_lock);
    }
    errno = result;
    return result ? -1 : 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += count;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}
