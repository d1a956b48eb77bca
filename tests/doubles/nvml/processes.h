/* Copyright (c) Clean Slate contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Live processes, as the reader's own /proc shows them.
 */
#ifndef CLEANSLATE_PROCESSES_H
#define CLEANSLATE_PROCESSES_H

#include <stdbool.h>
#include <sys/types.h>

/* Not a zombie without live threads; `start` (stat field 22, clock ticks) 0 means any. */
bool process_alive(long long pid, unsigned long long start);

/* Start time in clock ticks, 0 if there is no such process. */
unsigned long long process_start(long long pid);

long long process_parent(long long pid);

/* The command line as one title (its first string), compared from the start or as a whole. */
bool process_has_title(long long pid, const char *title, bool whole);

/* Files already found to be no device of interest, by a hash of file system and inode: most mappings are shared
 * libraries, the same ones in all processes. */
typedef struct {
    unsigned long long keys[8192];
} OtherFiles;

/* A readable mapping of this device number: what a CUDA context leaves, unlike a write-only doorbell. */
bool process_maps_device(long long pid, dev_t device, OtherFiles *others);

bool process_opens_device(long long pid, dev_t device);

/* "/dev/nvidia0" (stat) or "195:0". */
bool device_number(const char *text, dev_t *device);

/* An exclusive flock, which every fork of the holder shares and only the last one's death ends. */
bool lock_is_held(const char *path);

unsigned long long own_pid_namespace(void);

/* All numeric entries of /proc; the caller frees. -1 on failure. */
int process_list(long long **pids);

#endif
