/*
 * Control of the soft device: its limits, and faults to inject.
 *
 * A program that loads the soft device as libibverbs.so.1 finds these beside the verbs,
 * under the version node SOFTVERBS_1.0.  Every function may be called from any thread,
 * with or without an open device.
 */
#ifndef SOFTVERBS_H
#define SOFTVERBS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Set a limit, named as in ibv_device_attr or ibv_port_attr ("max_mr", "max_msg_sz", ...);
 * "max_chain", the work requests that one post_send takes before it says ENOMEM; and
 * "odp_general_caps" and "odp_rc_caps", those of query_device_ex.
 * Queries and checks see it at once; objects that exist already stay.
 * ENOENT: no such limit.  EINVAL: not a possible value.
 */
int softverbs_configure(const char *name, uint64_t value);

/*
 * Make the next `times` calls of a verb fail with `error`; 0 times clears.
 * The verb is named without ibv_.  A failing call is counted and does nothing else.
 *   error > 0   NULL with that errno, or that number as the return value
 *   error < 0   as some drivers do it: the return value is -1, and errno is -error
 *   error == 0  NULL with errno 0; only for verbs that return a pointer
 * poll_cq, which counts completions, returns a negative number in each case.
 * ENOENT: no such verb.  EINVAL: this verb can't fail that way.
 */
int softverbs_fail(const char *verb, int error, uint64_t times);

/*
 * Make every call of a verb take longer; 0 clears.
 * "completion" defers the execution of posted work instead, in the background.
 * ENOENT: no such verb.  EINVAL: negative, not finite, or longer than a year.
 */
int softverbs_delay(const char *what, double seconds);

/*
 * Calls of each verb since the last reset, then the number of live objects ("live_mr", ...).
 * Fills at most `capacity` names and values and returns how many there are;
 * either array may be NULL.
 */
size_t softverbs_counters(const char **names, uint64_t *values, size_t capacity);

/* Limits, failures and delays back to their defaults, counters to zero.  Live objects stay. */
void softverbs_reset(void);

#ifdef __cplusplus
}
#endif

#endif
